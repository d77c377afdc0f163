"""Format what a run shows in the terminal: first line, progress bar, validation, closing lines."""

import math
import re
import shlex
import shutil
from datetime import timedelta
from statistics import fmean

import torch

from minitrain.data.faults.wording import counted
from minitrain.data.sources import has_tokenizer
from minitrain.models.zoo import empty_model
from minitrain.settings import Config
from minitrain.training.packing import ENDLESS

# the greatest length of a line, so that a terminal of 80 columns does not break it
WIDTH = 78
# a run with epochs that has fewer steps gets a warning
FEW = 20
LAYOUT = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


def opening(config: Config, ranks: int, device: torch.device) -> str:
    """Return the first line: the model, the task, the machine, the length and the folder."""
    model = config.model
    size = sum(p.numel() for p in empty_model(model.config).parameters())
    millions = f"{size / 1e6:,.1f}M" if size >= 1e5 else f"{size:,}"
    weights = f"{model.name or 'a model'} with random weights"
    if model.path:
        weights = f"weights of {model.path}"
    if config.lora and config.lora.path:
        weights += f" and adapters of {config.lora.path}"
    length = counted(config.steps, "step")
    if config.epochs:
        length = f"{config.epochs:g} epoch{'' if config.epochs == 1 else 's'}"
    return wrapped(
        f"{weights}, {millions} parameters: {config.task} in {config.precision} on "
        f"{ranks} x {device.type.upper()}, {length}, into {config.out_dir}",
        head="",
        indent="  ",
    )


def wrapped(text: str, head: str, indent: str, end: str = "") -> str:
    """Break a text into lines of WIDTH columns, at spaces outside of quotes.

    The first line begins with `head`, others with `indent`; all except the last end with `end`.
    """
    first, *words = re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*'|["'])+""", text)
    lines = [head + first]
    for number, word in enumerate(words, 1):
        behind = end if number < len(words) else ""
        if len(f"{lines[-1]} {word}{behind}") > WIDTH:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return f"{end}\n".join(lines)


def amount(given: Config, steps: int, rows: int, per_step: int, noun: str = "row") -> str:
    """Return a line on how often training goes over its data; "" for data without an end.

    given: the config before epochs were converted to steps. rows: of the data. per_step: rows per step.
    """
    if rows >= ENDLESS:
        return ""
    if not given.epochs:
        epochs = steps * per_step / rows
        return f"{counted(rows, noun)}: {counted(steps, 'step')} of {per_step:,} = {epochs:.3g} epochs"
    epochs = "1 epoch" if given.epochs == 1 else f"{given.epochs:g} epochs"
    few = "; few steps learn little (more epochs, or a smaller batch, make more)"
    line = f"{counted(rows, noun)}: {epochs} = {counted(steps, 'step')} of {per_step:,}"
    return line + (few if steps < FEW else "")


def bar_width() -> int:
    """Return the width of the progress bar in characters."""
    return min(80, shutil.get_terminal_size().columns)


def fitting(figures: str, steps: int) -> str:
    """Return only the figures for which the bar has room, because a cut number would be wrong."""
    room = bar_width() - len(f"{steps}/{steps} |-| 99:59:59 left, ")
    while len(figures) > room and ", " in figures:
        figures = figures.rpartition(", ")[0]
    return figures


def step_figures(numbers: dict, bytes_per_token: float | None = None) -> str:
    """Return the main figures of a step. bytes_per_token: of text, to show bits per byte."""
    if "reward" in numbers:
        figures = f"reward {numbers['reward']:.3f}"
    else:
        figures = f"loss {numbers['loss']:.4f}"
    if bytes_per_token:
        figures += f" = {bits_per_byte(numbers['loss'], bytes_per_token):.3f} bits/byte"
    if "reward_margin" in numbers:
        figures += f", {preferring(numbers)}"
    figures += f", tokens/s {numbers['tokens_per_sec']:,.0f}"
    for name, value in numbers.items():
        if name.startswith("loss/"):
            figures += f", {name.removeprefix('loss/')} {value:.4f}"
    return figures


def preferring(numbers: dict, prefix: str = "") -> str:
    """Return the accuracy and the margin of DPO's implicit rewards."""
    accuracy, margin = (numbers[f"{prefix}reward_{name}"] for name in ("accuracy", "margin"))
    return f"accuracy {accuracy:.1%}, margin {margin:.3f}"


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Return a loss in nats per token as bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


def goodness(numbers: dict) -> float:
    """Return a score by which validations are compared; minus infinity without a validation.

    It is the share of sampled responses that pass, or else the negative loss.
    """
    loss = numbers.get("val_loss")
    return numbers.get("val_pass@1", -math.inf) if loss is None else -loss


def validation(numbers: dict) -> str:
    """Return the figures of a validation, as `1.300 nats = 1.875 bits/byte`; "" without one."""
    figures = []
    passes = [name for name in numbers if name.startswith("val_pass@")]
    for name, value in numbers.items():
        if not name.startswith("val_") or value is None or name in passes[1:-1]:
            continue
        if name == "val_reward_margin":
            figures.append(preferring(numbers, "val_"))
        elif name.startswith("val_reward_"):
            continue
        elif name == "val_loss":
            # losses of videos and of preference pairs are not in nats per token
            bare = numbers.keys() & {"video_tokens", "reward_accuracy"}
            bits = numbers.get("val_bits_per_byte")
            unit = "" if bare else f" nats{'' if bits is None else f' = {bits:.3f} bits/byte'}"
            figures.append(f"{value:.3f}{unit}")
        elif name.endswith("loss"):
            figures.append(f"{name.removeprefix('val_').replace('_', ' ')} {value:.3f} nats")
        elif name != "val_bits_per_byte":
            figures.append(f"{name.removeprefix('val_').replace('_', ' ')} {value:.1%}")
    return ", ".join(figures)


def closing_lines(
    config: Config, lines: list[dict], first: int, seconds: float, mfu_of: str
) -> list[str]:
    """Return the lines that are printed at a run's end, each with its title.

    lines: of metrics.jsonl. first: number of steps that were done before. seconds: of this run.
    mfu_of: the rate that MFU refers to.
    """
    validated = [line for line in lines if validation(line)]
    results = "none was asked for (validation.every, data.validation)"
    if validated:
        best = max(validated, key=goodness)
        results = f"{validation(best)} at step {best['step']:,}"
        if len(validated) > 1:
            results = f"best {results}"
        if best is not validated[-1]:
            results += f"; last {validation(validated[-1])}"
    # without the first step, which also compiles and allocates, and without lines that lack a number
    names = ("tokens_per_sec", "mfu", "peak_memory_gib")
    timed = [[line[name] for name in names] for line in lines if line.keys() >= {*names}]
    speed, mfu, memory = zip(*timed[1:] or timed or [[math.nan] * 3], strict=True)
    kind = "adapters" if config.lora else "model"
    busy = " (above 100 %: it was measured while the machine was busy)" if fmean(mfu) > 1 else ""
    parts = {
        "time": f"{counted(config.steps - first, 'step')} in {timedelta(seconds=round(seconds))}",
        "validation": results,
        "speed": f"{fmean(speed):,.0f} tokens/s, MFU {fmean(mfu):.1%} of {mfu_of}{busy}",
        "memory": f"{max(memory):.2f} GiB at the peak, on the first rank",
        "files": f"{config.out_dir} holds the {kind}, metrics.jsonl, curves.svg, checkpoints/",
        "next": next_command(config, config.out_dir),
    }
    if config.checkpoint.best and validated and best is not validated[-1]:
        out = shlex.quote(config.out_dir)
        parts["next"] = f"minitrain export --run {out} --step best --out FOLDER"
    return [
        wrapped(text, f"{title:<11} ", " " * 12, end=" \\" if title == "next" else "")
        for title, text in parts.items()
    ]


def next_command(config: Config, folder: str) -> str:
    """Return a command that uses a run's result. folder: where the result is."""
    out = shlex.quote(folder)
    base = config.model.path
    videos = config.task == "diffusion"
    # `generate` needs the base model of adapters in a file, and a tokenizer
    if (config.lora and not base) or not (videos or has_tokenizer(config)):
        return f"minitrain curves {shlex.quote(config.out_dir)}"
    made = f"--model {shlex.quote(base)} --adapter {out}" if config.lora else f"--model {out}"
    if config.task == "reward":
        used = f"train --config train/grpo-own-reward grpo.reward={out}"
        return f"minitrain {f'merge {made} --out FOLDER' if config.lora else used}"
    if config.data.kind == "shapes":
        made += f" --task diffusion --prompts shapes --out {out}/sheet.png"
    elif videos:
        made += f" --task diffusion --encoders FOLDER --prompts FILE --size FRAMES HEIGHT WIDTH --out {out}/videos.mp4"
    else:
        made += ' --prompt "..."' if config.task == "pretrain" else ' --chat --prompt "..."'
    return f"minitrain generate {made}"
