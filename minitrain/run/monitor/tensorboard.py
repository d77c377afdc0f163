"""Write a run's numbers (in the groups train, val and perf), config and pictures for TensorBoard."""

from pathlib import Path

import numpy as np

# names of the pictures of a toy world, before and after training
PICTURES = "before", "after"
# ends of the names that belong to the group perf
MEASURED = ("_s", "_per_sec", "_per_gpu", "_gib", "mfu")


class Board:
    """Write to folder/tensorboard; numbers after step `start`, from an earlier run, are hidden."""

    def __init__(self, folder: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        self.step = start
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)
        config = folder / "config.yaml"
        if config.exists():
            # Markdown shows lines that begin with four spaces as code
            text = "".join(f"    {line}" for line in config.open(encoding="utf-8"))
            self.writer.add_text("config", text, start)

    def __call__(self, numbers: dict) -> None:
        """Add one step's numbers."""
        self.step = numbers["step"]
        for name, value in numbers.items():
            if name != "step" and isinstance(value, int | float):
                self.writer.add_scalar(grouped(name), value, self.step)

    def close(self) -> None:
        """Add the pictures that the run has drawn."""
        for name in PICTURES:
            file = self.folder / f"{name}.png"
            if file.exists():
                # imported here, because only runs with pictures need it
                from PIL import Image

                self.writer.add_image(
                    name, np.asarray(Image.open(file)), self.step, dataformats="HWC"
                )
        self.writer.close()


def grouped(name: str) -> str:
    """Return the name of a number with its group: val/loss, perf/mfu, train/lr."""
    if name.startswith("val_"):
        return f"val/{name.removeprefix('val_')}"
    return f"perf/{name}" if name.endswith(MEASURED) else f"train/{name}"
