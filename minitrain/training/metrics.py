"""Where a run's numbers go: one JSON object per step in `metrics.jsonl`, and a progress bar. Rank 0 only."""

import json
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm


class MetricsLog:
    """Appends steps to FILE as they come, each flushed at once; a resumed run drops the steps it will repeat."""

    def __init__(self, file: Path, steps: int, start: int):
        self.enabled = dist.get_rank() == 0
        if not self.enabled:
            return
        kept = [line for line in read_lines(file) if line["step"] <= start] if start else []
        rewritten = file.with_suffix(".tmp")
        rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        rewritten.replace(file)
        self.file = file.open("a", encoding="utf-8")
        self.bar = tqdm(total=steps, initial=start, unit="step", smoothing=0.1)

    def step(self, numbers: dict) -> None:
        """Store one step's numbers, with every digit of their floats, and show the most telling ones."""
        if self.enabled:
            self.file.write(json.dumps(numbers) + "\n")
            self.file.flush()
            shown = {"loss": f"{numbers['loss']:.4f}", "tokens/s": f"{numbers['tokens_per_sec']:,.0f}"}
            if "val_loss" in numbers:
                shown["val"] = f"{numbers['val_loss']:.4f}"
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self.enabled:
            self.bar.write(text)

    def close(self) -> None:
        if self.enabled:
            self.bar.close()
            self.file.close()


def read_lines(file: Path) -> list[dict]:
    """The complete lines of a metrics.jsonl; one that a kill cut short is dropped. Empty if there is no such file."""
    if not file.exists():
        return []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines
