"""Say in a terminal how a run goes: the bar, the line of a validation, the six lines at the end."""

import math
import shlex
import shutil
from datetime import timedelta
from statistics import fmean

from minitrain.data.files import has_tokenizer
from minitrain.models.zoo import empty_model
from minitrain.run.launch.start import pick_device
from minitrain.settings import Config

LAYOUT = "{n_fmt}/{total_fmt} |{bar}| {remaining} left{postfix}"


def opening(config: Config, ranks: int) -> str:
    """Return in a line what is trained, how, on what, and where it goes."""
    model = config.model
    size = sum(p.numel() for p in empty_model(model.config).parameters())
    weights = f"{model.name or 'a model'} with random weights"
    if model.path:
        weights = f"weights of {model.path}"
    if config.lora and config.lora.path:
        weights += f" and adapters of {config.lora.path}"
    length = f"{config.epochs:g} epochs" if config.epochs else f"{config.steps:,} steps"
    return (
        f"{weights}, {size / 1e6:,.1f}M parameters: {config.task} in {config.precision} on "
        f"{ranks} x {pick_device(config.device).type.upper()}, {length}, into {config.out_dir}"
    )


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
    told += f", tokens/s {numbers['tokens_per_sec']:,.0f}"
    for name, value in numbers.items():
        if name.startswith("loss/"):
            told += f", {name.removeprefix('loss/')} {value:.4f}"
    return told


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
        if name == "val_bits_per_byte":
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
) -> dict[str, str]:
    """Return what to say at a run's end, six lines by their titles.

    lines: of metrics.jsonl. first: steps that were done before this run, which took `seconds`.
    mfu_of: the rate that MFU is a share of.
    """
    tested = [line for line in lines if validation(line)]
    told = "none was asked for (validation.every, data.validation)"
    if tested:
        best = max(tested, key=goodness)
        told = f"best {validation(best)} at step {best['step']:,}"
        if best is not tested[-1]:
            told += f"; last {validation(tested[-1])}"
    # the first step also compiles and allocates; others may have edited the file
    names = ("tokens_per_sec", "mfu", "peak_memory_gib")
    timed = [[line[name] for name in names] for line in lines if line.keys() >= {*names}]
    speed, mfu, memory = zip(*timed[1:] or timed or [[math.nan] * 3], strict=True)
    kind = "adapters" if config.lora else "model"
    return {
        "time": f"{config.steps - first:,} steps in {timedelta(seconds=round(seconds))}",
        "validation": told,
        "speed": f"{fmean(speed):,.0f} tokens/s, MFU {fmean(mfu):.1%} of {mfu_of}",
        "memory": f"{max(memory):.2f} GiB at the peak, on the first rank",
        "files": f"{config.out_dir} holds the {kind}, metrics.jsonl, curves.svg and checkpoints/",
        "next": next_command(config, config.out_dir),
    }


def next_command(config: Config, folder: str) -> str:
    """Return a command that uses what a run has made, in a folder that may be another than its own."""
    out = shlex.quote(folder)
    base = config.model.path
    videos = config.task == "diffusion"
    # adapters of random weights, which no file holds, and models of tokens without a tokenizer
    if (config.lora and not base) or not (videos or has_tokenizer(config)):
        return f"python -m minitrain curves {shlex.quote(config.out_dir)}"
    made = f"--model {shlex.quote(base)} --adapter {out}" if config.lora else f"--model {out}"
    if config.data.kind == "shapes":
        made += f" --task diffusion --prompts shapes --out {out}/sheet.png"
    elif videos:
        made += f" --task diffusion --encoders FOLDER --prompts FILE --size FRAMES HEIGHT WIDTH --out {out}/videos.mp4"
    else:
        made += ' --prompt "..."' if config.task == "pretrain" else ' --chat --prompt "..."'
    return f"python -m minitrain.generate {made}"
