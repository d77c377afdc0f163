"""Record in a trace what moves between a GPU and its host, and what the host updates.

On fake tensors all devices are one, so the functions that copy are replaced by ones that record an
event each, whose `dimension` is `host`:

    to_host, to_device   kind copy; one reads, the other writes the device's memory
    released             kind copied: the compute stream waits until what the event reads is copied
    update               kind host update: of the parameters whose states are there. It reads what
                         goes out and writes what returns. Its payload is all that the host's memory
                         moves, counted over the optimizer's own kernels
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from torch import Tensor

from minitrain.parallel import activation_offload
from minitrain.parallel.activation_offload import Run
from minitrain.parallel.shards import to_local
from minitrain.simulator.trace import Event, Tracer
from minitrain.training.adamw import AdamW


@contextmanager
def recorded_copies(tracer: Tracer, fake: type[Tensor]) -> Iterator[None]:
    """Record copies to the host and back, and updates there, inside a `with` statement.

    fake: the class of fake tensors, which are copied like plain ones.
    """
    copy_to_host = activation_offload.copy_to_host
    copy_to_device = activation_offload.copy_to_device
    release = Run.release
    update_group = AdamW.update_group

    def leave(x: Tensor) -> Tensor:
        with tracer.silent():
            copy = copy_to_host(x)
        tracer.hold_on_host(copy.nbytes)
        weakref.finalize(copy, tracer.hold_on_host, -copy.nbytes)
        tracer.record(copied("to_host", reads=[(tracer.number(x), x.nbytes)]))
        return copy

    def arrive(x: Tensor, buffer: Tensor) -> Tensor:
        number = tracer.number(buffer)
        with tracer.silent():
            copy_to_device(x, buffer)
        tracer.record(copied("to_device", writes=[(number, x.nbytes)]))
        return buffer

    def released(run: Run) -> None:
        away = [(tracer.number(x.device), 0) for x in run.stored.values() if x.host is not None]
        if away and not run.wanted:
            tracer.record(copied("released", "copied", reads=away))
        release(run)

    def updated(optimizer: AdamW, group: dict, skip: Tensor | None) -> None:
        if not group.get("on_host"):
            update_group(optimizer, group, skip)
            return
        learning = [p for p in group["params"] if p.grad is not None]
        weights = [(tracer.number(x), x.nbytes) for x in map(to_local, learning)]
        gradients = [(tracer.number(x), x.nbytes) for x in (to_local(p.grad) for p in learning)]
        with tracer.silent(), counted_updates(tracer) as counts:
            update_group(optimizer, group, skip)
        tracer.record(
            copied("update", "host update", weights + gradients, weights, payload=sum(counts))
        )

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (activation_offload, "copy_to_host", leave),
            (activation_offload, "copy_to_device", arrive),
            (activation_offload, "has_memory", lambda x: type(x) in (Tensor, fake)),
            (Run, "release", released),
            (AdamW, "update_group", updated),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def copied(
    name: str, kind: str = "copy", reads: list = (), writes: list = (), payload: int = 0
) -> Event:
    """Return an event between a GPU and its host."""
    return Event(name, kind, 0, list(reads), list(writes), payload=payload, dimension="host")


@contextmanager
def counted_updates(tracer: Tracer) -> Iterator[list[int]]:
    """Yield a list that gets the bytes which the kernels of each `AdamW.update` inside read and write."""
    update = AdamW.update
    counts = []

    def counted(*args) -> None:
        counter = Tracer(tracer.trace.groups)
        with counter:
            update(*args)
        Tracer.active = tracer
        events = counter.trace.events
        counts.append(sum(size for event in events for _, size in event.reads + event.writes))

    with patch.object(AdamW, "update", counted):
        yield counts
