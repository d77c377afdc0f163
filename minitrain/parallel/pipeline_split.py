"""Cut a model into pipeline stages, and give the stages to ranks.

Stages go round the ranks: stage s is on rank s mod ranks. In V-shaped schedules they go down the
ranks and back up, so rank 0 has the first and the last. Embedding and head count as one layer each,
or the head as more (`head_layers`): with layers in FP8, a head of 128k words takes as long as two
layers of Llama 3 70B, and all ranks wait for its rank.
"""

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minitrain.settings import Parallel

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def rank_of(stage: int, ranks: int, v_shaped: bool) -> int:
    """Return the pipeline rank of a stage.

    Three ranks with two stages each: 0 1 2 0 1 2, or 0 1 2 2 1 0 if the schedule is V-shaped.
    """
    return min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


def cut(
    layers: int, stages: int, layers_per_stage: list[int] | None = None, head: int = 1
) -> list[dict]:
    """Return what each stage holds: `layers`, a range, and `first` and `last`, bools.

    The first has the embedding, the last the head.
    layers_per_stage: the number of slots of each stage, of layers + 2: embedding, layers, head. By
        default all get equally many. What is left over goes to the first stage, then the last ones.
    head: number of slots that the head counts as, in the default.
    """
    each, more = divmod(layers + 1 + head, stages)
    longer = {0, *range(stages - more + 1, stages)} if more else ()
    even = [each + (stage in longer) for stage in range(stages)]
    slots = layers_per_stage or [*even[:-1], even[-1] - (head - 1)]
    parts = []
    # layer i is in slot i + 1
    for count, end in zip(slots, accumulate(slots), strict=True):
        held = range(max(end - count - 1, 0), min(end - 1, layers))
        parts.append(dict(layers=held, first=end == count, last=end == layers + 2))
    return parts


def local_stages(parallel: "Parallel", layers: int, rank: int) -> dict[int, dict]:
    """Return the parts of `cut` that a rank of the pipeline has, by the stage's number."""
    parts = cut(layers, parallel.pp * parallel.vp, parallel.layers_per_stage, parallel.head_layers)
    v_shaped = parallel.schedule in V_SHAPED
    return {n: part for n, part in enumerate(parts) if rank_of(n, parallel.pp, v_shaped) == rank}


def pipeline_needs(p: "Parallel", micro_batches: int) -> str | None:
    """Return how many micro-batches the schedule needs, if it cannot run `micro_batches`."""
    least = {"1F1B": p.pp, "DualPipeV": 2 * p.pp}.get(p.schedule, 1)
    rounds = max(1, micro_batches // p.pp) if p.schedule.startswith("Interleaved") else 1
    if p.pp > 1 and micro_batches < least:
        return f"at least {least}"
    if p.pp > 1 and micro_batches % rounds:
        return f"a multiple of {p.pp}, or fewer than {2 * p.pp},"
    return None
