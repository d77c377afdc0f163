"""Mark in a trace where micro-batches, passes, blocks and a pipeline's actions begin."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.models.variants import set_variant
from minitrain.parallel.fsdp import unreduced_gradients
from minitrain.parallel.pipeline_stage import Stage
from minitrain.parallel.shards import to_local
from minitrain.simulator.trace import Tracer
from minitrain.training.loop import Trainer


def parts(values: Iterable) -> list[Tensor]:
    """Return this rank's part of each value that is a tensor."""
    return [to_local(value) for value in values if isinstance(value, Tensor)]


@contextmanager
def marked_schedule(tracer: Tracer) -> Iterator[None]:
    """Mark where each action of a pipeline's stages begins and ends."""

    def marked(method: Callable, kind: Callable[..., str]) -> Callable:
        def run(stage, index, *args, **kwargs):
            tracer.mark((stage.stage_index, kind(**kwargs), index))
            result = method(stage, index, *args, **kwargs)
            tracer.mark(None)
            return result

        return run

    kinds = {
        "forward_one_chunk": lambda **_: "F",
        "backward_one_chunk": lambda full_backward=True, **_: "B" if full_backward else "I",
        "backward_weight_one_chunk": lambda **_: "W",
    }
    with ExitStack() as stack:
        for name, kind in kinds.items():
            stack.enter_context(patch.object(Stage, name, marked(getattr(Stage, name), kind)))
        yield


@contextmanager
def marked_passes(trainer: Trainer, tracer: Tracer) -> Iterator[None]:
    """Mark where each micro-batch's passes begin, and where the last one ends.

    At these marks, count memory that outlives a pass under its own kind: gradients and FP8 weights.
    """
    loss = trainer.objective.loss
    update = trainer.optimizer.step
    fp8 = {
        shards for m in trainer.model.modules() for shards, _ in getattr(m, "shards", {}).values()
    }

    # without no_grad, to_local would return a view that autograd tracks
    @torch.no_grad()
    def count_lasting() -> None:
        tracer.classify(parts(p.grad for p in trainer.model.parameters()), "gradients")
        tracer.classify(parts(unreduced_gradients(trainer.model)), "gradients")
        for kept in fp8:
            tracer.classify(
                (part for pair in filter(None, kept.shards) for part in pair), "parameters"
            )
            tracer.classify(parts(kept.copies), "gathered")

    def marked_loss(model: Module, batch) -> Tensor:
        count_lasting()
        tracer.mark("forward")
        terms = loss(model, batch)
        tracer.mark("backward")
        return terms

    def marked_update():
        count_lasting()
        tracer.mark("optimizer")
        return update()

    with (
        patch.object(trainer.objective, "loss", marked_loss),
        patch.object(trainer.optimizer, "step", marked_update),
    ):
        yield


def mark_blocks(model: Module, tracer: Tracer) -> None:
    """Mark from now on where the passes of each block begin, and where its forward pass ends."""

    def note(name: str | None) -> None:
        tracer.trace.blocks.append((len(tracer.trace.events), name))

    # one class per kind of block, so that its forward is compiled once, not for each block
    @cache
    def marked(kind: type) -> type:
        class MarkedBlock(kind):
            # `__call__` runs outside of the compiled part
            def __call__(self, *args, **kwargs):
                name = names[self]
                note(name)
                out = super().__call__(*args, **kwargs)
                note(None)
                if out.requires_grad:
                    out.register_hook(lambda gradient: note(name))
                return out

        return MarkedBlock

    blocks = {block for part in model.modules() for block in getattr(part, "blocks", ())}
    names = {module: name for name, module in model.named_modules() if module in blocks}
    for block in names:
        set_variant(block, marked(type(block)))
