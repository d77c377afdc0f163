"""Bytes of optimizer states, and a plain loss, for tests of a training step."""

from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo.backends import debugging

from minitrain.parallel.overlap import fill_waits
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


def filled_waits():
    """Let the backends without kernels run graphs in the order that overlap.py gives them."""
    boxed_nop = debugging.boxed_nop

    def run(graph, inputs):
        fill_waits(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return boxed_nop(graph, inputs)

    return mock.patch.object(debugging, "boxed_nop", run)


def in_flight(run, operators=("aten::mm",), collectives=("all_to_all_single",)):
    """For each collective of `run`, in order of their ends: calls of operators between its start and its end.

    collectives: names of functional ones, all that there are but all-reduces.
    """
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    found, flying = [], []
    starts = [f"_c10d_functional::{name}" for name in collectives]
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if event.name in (*starts, "_c10d_functional::all_reduce"):
            flying.append(0)
        elif event.name == "_c10d_functional::wait_tensor":
            found.append(flying.pop(0))
        elif event.name in operators:
            flying = [count + 1 for count in flying]
    return found
