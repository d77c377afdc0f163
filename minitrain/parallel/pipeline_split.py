"""Cut a model into pipeline stages, and assign the stages to ranks.

Stage s is on rank s mod ranks. In V-shaped schedules the stages of three ranks are on 0 1 2 2 1 0,
so that rank 0 has the first and the last.

Stages are balanced by counting layers. The embedding counts as one layer. So does the head, or as
more (`head_layers`): with layers in FP8, the head of a vocabulary of 128k takes as long as two
layers of Llama 3 70B, and all ranks would wait for its rank. Layers of multi-token prediction are
on the head's stage, and count as layers there as far as they fit.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from minitrain.settings import Parallel

TORCH = "torch.distributed.pipelining.schedules.Schedule"


class Schedule(NamedTuple):
    """What the package must know of a schedule; see the table in pipeline.py for what each costs.

    path: of its class, of torch or like those. stages: of a rank; None: any number.
    v_shaped: see `rank_of`. splits_backward: gradients of weights are computed apart, later.
    all_at_once: every forward pass comes before the first backward pass.
    least: micro-batches that it needs, for each of the pipeline's ranks; 0: one is enough.
    in_rounds: it works in equal rounds of about as many micro-batches as there are ranks.
    """

    path: str
    stages: int | None = None
    v_shaped: bool = False
    splits_backward: bool = False
    all_at_once: bool = False
    least: int = 0
    in_rounds: bool = False


# To add your own schedule, add a line here, and its name in settings.py.
SCHEDULES = {
    "GPipe": Schedule(TORCH + "GPipe", stages=1, all_at_once=True),
    "1F1B": Schedule(TORCH + "1F1B", stages=1, least=1),
    "Interleaved1F1B": Schedule(TORCH + "Interleaved1F1B", in_rounds=True),
    "LoopedBFS": Schedule(TORCH + "LoopedBFS", all_at_once=True),
    "InterleavedZeroBubble": Schedule(
        TORCH + "InterleavedZeroBubble", splits_backward=True, in_rounds=True
    ),
    "ZBVZeroBubble": Schedule(
        TORCH + "ZBVZeroBubble", stages=2, v_shaped=True, splits_backward=True
    ),
    "DualPipeV": Schedule(
        TORCH + "DualPipeV", stages=2, v_shaped=True, splits_backward=True, least=2
    ),
}


def rank_of(stage: int, ranks: int, v_shaped: bool) -> int:
    """Return the pipeline rank of a stage.

    Three ranks with two stages each: 0 1 2 0 1 2, or 0 1 2 2 1 0 if the schedule is V-shaped.
    """
    return min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


def split_layers(
    layers: int, stages: int, layers_per_stage: list[int] | None = None, head: int = 1
) -> list[dict]:
    """Return each stage's `layers`, a range, and bools `first` (embedding) and `last` (head).

    layers_per_stage: how many of the layers + 2 units (embedding, layers, head) each stage gets. By
        default all get equally many. Of a remainder, the first stage gets one, then the last ones.
    head: the number of units that the head counts as, in the default.
    """
    each, more = divmod(layers + 1 + head, stages)
    longer = {0, *range(stages - more + 1, stages)} if more else ()
    even = [each + (stage in longer) for stage in range(stages)]
    slots = layers_per_stage or [*even[:-1], even[-1] - (head - 1)]
    parts = []
    # the embedding is unit 0, layer i is unit i + 1; `end` is the first unit of the next stage
    for count, end in zip(slots, accumulate(slots), strict=True):
        held = range(max(end - count - 1, 0), min(end - 1, layers))
        parts.append(dict(layers=held, first=end == count, last=end == layers + 2))
    return parts


def head_fits(head: int, layers: int, stages: int) -> bool:
    """Return whether a stage's even share has room for a head of so many units."""
    each, more = divmod(layers + 1 + head, stages)
    return head <= each + (more > 1)


def local_stages(
    parallel: "Parallel", layers: int, rank: int, mtp_layers: int = 0
) -> dict[int, dict]:
    """Return what `split_layers` gives to a pipeline rank's stages, by their numbers.

    mtp_layers: the number of layers of multi-token prediction.
    """
    stages = parallel.pp * parallel.vp
    head = parallel.head_layers
    while mtp_layers and head_fits(head + 1, layers, stages):
        head += 1
        mtp_layers -= 1
    parts = split_layers(layers, stages, parallel.layers_per_stage, head)
    v_shaped = SCHEDULES[parallel.schedule].v_shaped
    return {n: part for n, part in enumerate(parts) if rank_of(n, parallel.pp, v_shaped) == rank}


def pipeline_needs(schedule: str, ranks: int, micro_batches: int) -> str | None:
    """Return words for the micro-batches that a schedule needs, or None if it accepts this number."""
    if ranks == 1:
        return None
    needs = SCHEDULES[schedule]
    least = max(1, needs.least * ranks)
    rounds = max(1, micro_batches // ranks) if needs.in_rounds else 1
    if micro_batches < least:
        return f"at least {least}"
    if micro_batches % rounds:
        return f"a multiple of {ranks}, or fewer than {2 * ranks},"
    return None
