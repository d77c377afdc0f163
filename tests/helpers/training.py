"""Bytes of optimizer states, and a plain loss, for tests of a training step."""

import torch
import torch.nn.functional as F

from minitrain.training.loss import IGNORE

# precision, optim.states, bytes per parameter of (weights, gradients, states), as in configs/train/README.md
BYTES = [
    ("fp32", "fp32", (4, 4, 8)),
    ("fp32", "bf16", (4, 4, 4)),
    ("bf16", "fp32", (4, 4, 8)),
    ("bf16", "bf16", (4, 4, 4)),
    ("bf16-pure", "fp32", (2, 2, 8)),
    ("bf16-pure", "bf16", (2, 2, 4)),
]


def materialised(hidden, weight, labels):
    """Return the summed loss from the whole logits."""
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


def one_graph(function, weight):
    """Compile a function as `fused` would on a GPU, but without generating kernels."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def logged(objective, sum_over=lambda sums: sums) -> dict[str, float]:
    """An objective's numbers for the log, as the loop asks for them. sum_over: adds up over ranks."""
    sums = objective.sums()
    return {} if sums is None else objective.metrics(sum_over(sums).tolist())
