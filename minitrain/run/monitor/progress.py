"""Say in a terminal how a run goes: the bar, the line of a validation, the six lines at the end."""

import math
import re
import shlex
import shutil
from datetime import timedelta
from statistics import fmean

from minitrain.data.files import has_tokenizer
from minitrain.data.records import counted
from minitrain.models.zoo import empty_model
from minitrain.run.launch.start import pick_device
from minitrain.settings import Config
from minitrain.training.packing import ENDLESS

# of lines, in columns, so that a terminal of 80 breaks none
WIDTH = 78
# steps of a run of epochs
FEW = 20
LAYOUT = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


def opening(config: Config, ranks: int) -> str:
    """Return in a line what is trained, how, on what, and where it goes."""
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
        f"{ranks} x {pick_device(config.device).type.upper()}, {length}, into {config.out_dir}",
        head="",
        indent="  ",
    )


def wrapped(text: str, head: str, indent: str, end: str = "") -> str:
    """Break a text at spaces outside of quotes into lines of WIDTH columns.

    The first begins with `head`, others with `indent`; all but the last end with `end`.
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
    """Return how often training goes over its data; "" for data without an end.

    given: the config as it was written, with epochs. A step takes `per_step` of the `rows`.
    """
    if rows >= ENDLESS:
        return ""
    if not given.epochs:
        epochs = steps * per_step / rows
        return f"{counted(rows, noun)}: {counted(steps, 'step')} of {per_step:,} = {epochs:.3g} epochs"
    epochs = "1 epoch" if given.epochs == 1 else f"{given.epochs:g} epochs"
    few = "; few steps learn little (more epochs, or a smaller batch, make more)"
    told = f"{counted(rows, noun)}: {epochs} = {counted(steps, 'step')} of {per_step:,}"
    return told + (few if steps < FEW else "")


def bar_width() -> int:
    return min(80, shutil.get_terminal_size().columns)


def fitting(told: str, steps: int) -> str:
    """Return the figures that the bar has room for: one that is cut would be another."""
    room = bar_width() - len(f"{steps}/{steps} |-| 99:59:59 left, ")
    while len(told) > room and ", " in told:
        told = told.rpartition(", ")[0]
    return told


def telling(numbers: dict, bytes_per_token: float | None = None) -> str:
    """Return the figures of a step that tell most. bytes_per_token: of text, for bits per byte."""
    if "reward" in numbers:
        told = f"reward {numbers['reward']:.3f}"
    else:
        told = f"loss {numbers['loss']:.4f}"
    if bytes_per_token:
        told += f" = {bits_per_byte(numbers['loss'], bytes_per_token):.3f} bits/byte"
    if "reward_margin" in numbers:
        told += f", {preferring(numbers)}"
    told += f", tokens/s {numbers['tokens_per_sec']:,.0f}"
    for name, value in numbers.items():
        if name.startswith("loss/"):
            told += f", {name.removeprefix('loss/')} {value:.4f}"
    return told


def preferring(numbers: dict, prefix: str = "") -> str:
    """Return how well DPO's model tells replies apart."""
    accuracy, margin = (numbers[f"{prefix}reward_{name}"] for name in ("accuracy", "margin"))
    return f"accuracy {accuracy:.1%}, margin {margin:.3f}"


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token


def goodness(numbers: dict) -> float:
    """Return what is higher in a better validation; minus infinity where there was none.

    It is what training raises: the share of sampled responses that pass, or a loss below zero.
    """
    loss = numbers.get("val_loss")
    return numbers.get("val_pass@1", -math.inf) if loss is None else -loss


def validation(numbers: dict) -> str:
    """Return the figures of a validation, as `1.300 nats = 1.875 bits/byte`; "" without one."""
    told = []
    passes = [name for name in numbers if name.startswith("val_pass@")]
    for name, value in numbers.items():
        if not name.startswith("val_") or value is None or name in passes[1:-1]:
            continue
        if name == "val_reward_margin":
            told.append(preferring(numbers, "val_"))
        elif name.startswith("val_reward_"):
            continue
        elif name == "val_bits_per_byte":
            told[-1] += f" = {value:.3f} bits/byte"
        elif name == "val_loss":
            # videos have a squared error, pairs of replies a loss of their own
            bare = numbers.keys() & {"video_tokens", "reward_accuracy"}
            told.append(f"{value:.3f}{'' if bare else ' nats'}")
        else:
            told.append(f"{name.removeprefix('val_').replace('_', ' ')} {value:.1%}")
    return ", ".join(told)


def closing_lines(
    config: Config, lines: list[dict], first: int, seconds: float, mfu_of: str
) -> list[str]:
    """Return what to say at a run's end, six titles and what stands behind each.

    lines: of metrics.jsonl. first: steps that were done before this run, which took `seconds`.
    mfu_of: the rate that MFU is a share of.
    """
    tested = [line for line in lines if validation(line)]
    told = "none was asked for (validation.every, data.validation)"
    if tested:
        best = max(tested, key=goodness)
        told = f"{validation(best)} at step {best['step']:,}"
        if len(tested) > 1:
            told = f"best {told}"
        if best is not tested[-1]:
            told += f"; last {validation(tested[-1])}"
    # the first step also compiles and allocates; others may have edited the file
    names = ("tokens_per_sec", "mfu", "peak_memory_gib")
    timed = [[line[name] for name in names] for line in lines if line.keys() >= {*names}]
    speed, mfu, memory = zip(*timed[1:] or timed or [[math.nan] * 3], strict=True)
    kind = "adapters" if config.lora else "model"
    busy = " (above 100 %: it was measured while the machine was busy)" if fmean(mfu) > 1 else ""
    parts = {
        "time": f"{counted(config.steps - first, 'step')} in {timedelta(seconds=round(seconds))}",
        "validation": told,
        "speed": f"{fmean(speed):,.0f} tokens/s, MFU {fmean(mfu):.1%} of {mfu_of}{busy}",
        "memory": f"{max(memory):.2f} GiB at the peak, on the first rank",
        "files": f"{config.out_dir} holds the {kind}, metrics.jsonl, curves.svg, checkpoints/",
        "next": next_command(config, config.out_dir),
    }
    if config.checkpoint.best and tested and best is not tested[-1]:
        out = shlex.quote(config.out_dir)
        parts["next"] = f"minitrain export --run {out} --step best --out FOLDER"
    return [
        wrapped(text, f"{title:<11} ", " " * 12, end=" \\" if title == "next" else "")
        for title, text in parts.items()
    ]


def next_command(config: Config, folder: str) -> str:
    """Return a command that uses what a run has made, in a folder that may be another than its own."""
    out = shlex.quote(folder)
    base = config.model.path
    videos = config.task == "diffusion"
    # adapters of random weights, which no file holds, and models of tokens without a tokenizer
    if (config.lora and not base) or not (videos or has_tokenizer(config)):
        return f"minitrain curves {shlex.quote(config.out_dir)}"
    made = f"--model {shlex.quote(base)} --adapter {out}" if config.lora else f"--model {out}"
    if config.data.kind == "shapes":
        made += f" --task diffusion --prompts shapes --out {out}/sheet.png"
    elif videos:
        made += f" --task diffusion --encoders FOLDER --prompts FILE --size FRAMES HEIGHT WIDTH --out {out}/videos.mp4"
    else:
        made += ' --prompt "..."' if config.task == "pretrain" else ' --chat --prompt "..."'
    return f"minitrain generate {made}"
