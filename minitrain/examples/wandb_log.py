"""Log a run to Weights & Biases: metrics.logger=minitrain.examples.wandb_log:log.

W&B's own environment variables say where and how: WANDB_PROJECT, WANDB_MODE=offline, and for a run
that is resumed the same WANDB_RUN_ID each time. A logger of your own needs no more than these
lines: it is called on rank 0 with each step's numbers, and its `close`, if it has one, at the end.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

# at once, not when the first step is done
if find_spec("wandb") is None:
    raise ImportError("it needs the package wandb: pip install wandb")


@cache
def board() -> Any:
    """Return W&B's run, which begins with the first step."""
    import wandb

    return wandb.init(resume="allow")


def log(numbers: dict) -> None:
    board().log(numbers, step=numbers["step"])


def close() -> None:
    if board.cache_info().currsize:
        board().finish()


log.close = close
