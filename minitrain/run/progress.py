"""Say in a terminal how a run goes: the bar, the line of a validation, the six lines at the end."""

import math
import shutil

from minitrain.models.zoo import empty_model
from minitrain.run.launch import pick_device
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


def telling(numbers: dict, bytes_per_token: float | None = None) -> str:
    """Return the figures of a step that tell most. bytes_per_token: of text, for bits per byte."""
    if "reward" in numbers:
        told = f"reward {numbers['reward']:.3f}"
    else:
        told = f"loss {numbers['loss']:.4f}"
    if bytes_per_token:
        told += f" = {bits_per_byte(numbers['loss'], bytes_per_token):.3f} bits/byte"
    return f"{told}, tokens/s {numbers['tokens_per_sec']:,.0f}"


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token


def goodness(numbers: dict) -> float:
    """Return what is higher in a better validation; minus infinity where there was none."""
    loss = numbers.get("val_loss")
    return numbers.get("val_greedy", -math.inf) if loss is None else -loss


def validation(numbers: dict) -> str:
    """Return the figures of a validation, as `1.300 nats = 1.875 bits/byte`; "" without one."""
    told = []
    for name, value in numbers.items():
        if not name.startswith("val_") or value is None:
            continue
        if name == "val_bits_per_byte":
            told[-1] += f" = {value:.3f} bits/byte"
        elif name == "val_loss":
            # videos have a squared error
            told.append(f"{value:.3f}{'' if 'video_tokens' in numbers else ' nats'}")
        else:
            told.append(f"{name.removeprefix('val_').replace('_', ' ')} {value:.1%}")
    return ", ".join(told)
