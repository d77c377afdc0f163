"""Pipeline parallelism (Huang et al. 2018): every rank has some of the layers, and micro-batches
pass through them.

The model is cut into pp x vp stages; embedding and head count as a layer each, or the head as more
(`head_layers`): with layers in FP8, a head of 128k words takes as long as two layers of Llama 3
70B, and all ranks wait for its rank. A stage sends its output to the next one and, in the backward
pass, the gradient of its input to the one before. Which micro-batch a rank works on next is the
schedule, from torch.distributed.pipelining. With n ranks, v stages on each, m micro-batches, F, I
and W the time that one rank's layers take for a micro-batch's forward and its gradients with
respect to inputs and weights:

    schedule                idle time of a rank          micro-batches whose       from
                            (work: m (F + I + W))        activations are held
    GPipe                   (n - 1)(F + I + W)           m                         Huang et al. 2018
    1F1B                    (n - 1)(F + I + W)           n                         Narayanan et al. 2019, 2021
    LoopedBFS               (n - 1)(F + I + W) / v       m                         Lamy-Poirier 2022
    Interleaved1F1B         (n - 1)(F + I + W) / v       n + (n - 1) / v           Narayanan et al. 2021
    InterleavedZeroBubble   (n - 1)(F + I - W) / v       n                         Qi et al. 2023, ZB1P
    ZBVZeroBubble           (n - 1) F / 2 if F = I = W   n                         Qi et al. 2023, section 6
    DualPipeV               (n - 1) F / 2 if F = I = W   n + 1/2                   DeepSeek-AI 2024, Qi et al. 2025

Stages go round the ranks (stage s is on rank s mod n), except for the last two schedules, in which
they go down the ranks and back up: rank 0 has the first and the last. The last three put off W to
fill idle time.

Cost per micro-batch: each boundary between stages sends [micro, seq / cp / tp, hidden] forward and
its gradient back, nothing else: the last stage computes the loss, every rank reads tokens and
labels by itself. Gradients are reduced once a step and weights stay gathered over its micro-batches
(ZeRO-2), since gathering anew for each would cost m times as much; with `reshard_after_forward`,
only those of the three stages that a rank runs next: it has fewer whole, and gathers each up to m /
n times forward and backward. torch keeps two buffers of a boundary's size per stage and
micro-batch.

Tied embeddings: the first stage owns the matrix. The last gets a copy before each step and sends
its gradient back after it, so norms, optimizer and checkpoints see one parameter.

Left out: skip connections between stages; balancing stages by measured time.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn import Module

from minitrain.parallel.agreement import gather
from minitrain.parallel.pipeline_stage import Stage, keep_weights, skip_vote
from minitrain.parallel.shards import Slices, assemble, cut_slices, full_slice, to_local

if TYPE_CHECKING:
    from minitrain.settings import Parallel

Batch = dict[str, Tensor]
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# on the last stage only where it is tied to the head, as a copy
EMBEDDING = "model.embed_tokens.weight"

# ------------------------------------------------------------------------------------------------------- who has what


def rank_of(stage: int, ranks: int, v_shaped: bool) -> int:
    """Which of the pipeline's ranks has a stage: 0 1 2 0 1 2 for three ranks with two stages each,
    or 0 1 2 2 1 0.
    """
    return min(stage, 2 * ranks - 1 - stage) if v_shaped else stage % ranks


def cut(
    layers: int, stages: int, layers_per_stage: list[int] | None = None, head: int = 1
) -> list[dict]:
    """What each stage holds: `layers`, a range, and whether it is `first` and `last`, with
    embedding or head.

    layers_per_stage: how many of the layers + 2 slots (embedding, layers, head) each takes. By
    default equally many, of which the head fills as many as `head` says; if they do not divide
    evenly, the first stage takes one more, then the last ones.
    """
    each, more = divmod(layers + 1 + head, stages)
    longer = {0, *range(stages - more + 1, stages)} if more else ()
    even = [each + (stage in longer) for stage in range(stages)]
    slots = layers_per_stage or [*even[:-1], even[-1] - (head - 1)]
    # layer i is in slot i + 1
    ends = list(accumulate(slots))
    return [
        dict(
            layers=range(max(end - n - 1, 0), min(end - 1, layers)),
            first=end == n,
            last=end == layers + 2,
        )
        for n, end in zip(slots, ends, strict=True)
    ]


def local_stages(parallel: "Parallel", layers: int, rank: int) -> dict[int, dict]:
    """What `cut` says of the stages that a rank of the pipeline has, by their number."""
    parts = cut(layers, parallel.pp * parallel.vp, parallel.layers_per_stage, parallel.head_layers)
    v_shaped = parallel.schedule in V_SHAPED
    return {
        number: part
        for number, part in enumerate(parts)
        if rank_of(number, parallel.pp, v_shaped) == rank
    }


class Pipeline(nn.Module):
    """This rank's stages as one model: what they hold goes by the names of the full model.

    stages: by their number in the whole pipeline, laid out in all other ways already.
    mesh: 1-D, this pipeline's ranks; they call all methods together, except for those of nn.Module.
    tp: into how many parts a row is split between blocks. dtype: that of hidden states.
    keeps_weights: keep the weights of all stages gathered for a step; else of the three that run
    next. A rank's only
        stage always keeps its own.
    """

    def __init__(
        self,
        stages: dict[int, Module],
        schedule: str,
        mesh: DeviceMesh,
        tp: int,
        dtype: torch.dtype,
        keeps_weights: bool,
    ):
        super().__init__()
        self.stages = nn.ModuleDict(
            {str(number): stage for number, stage in sorted(stages.items())}
        )
        self.config = next(iter(stages.values())).config
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.tp = tp
        self.dtype = dtype
        self.keeps_weights = keeps_weights
        self.count = len(stages) * mesh.size()
        self.ranks = [
            rank_of(number, mesh.size(), schedule in V_SHAPED) for number in range(self.count)
        ]
        self.schedule_class = get_schedule_class(schedule)
        self.schedule = None
        self.scheduled_for = None
        # the stages as that schedule knows them
        self.scheduled: list[Stage] = []

    def named_parameters(self, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from (
                (name, p) for name, p in stage.named_parameters(**kwargs) if owns(stage, name)
            )

    def state_dict(self, **kwargs) -> dict[str, Tensor]:
        stages = self.stages.values()
        return {
            name: x
            for stage in stages
            for name, x in stage.state_dict(**kwargs).items()
            if owns(stage, name)
        }

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        next(iter(self.stages.values())).initialize_parameter(name, tensor, generator)

    def forward_backward(self, objective, batches: list[Batch], count: Tensor) -> Tensor:
        """Add the gradients of the batches' loss sum / count to the parameters; returns that loss,
        on every rank.
        """
        self.copy_tied_weight()
        self.objective = objective
        self.batches = batches
        if self.scheduled_for != (shapes := (len(batches), batches[0]["tokens"].shape)):
            self.schedule = self.new_schedule()
            self.scheduled_for = shapes
        losses = []
        self.schedule.step(target=count.expand(len(batches)), losses=losses, return_outputs=False)
        for stage in self.scheduled:
            stage.finish_sends()
        self.add_tied_gradient()
        return self.total(losses)

    def evaluate(self, objective, batches: list[Batch]) -> Tensor:
        """The batches' loss sum, on every rank."""
        return self.total(self.outputs(objective, batches))

    @torch.no_grad()
    def outputs(self, objective, batches: list[Batch]) -> list[Tensor]:
        """What the objective makes of each batch, on the last stage's rank; others get an empty
        list.

        In step t, stage s works on batch t - s, if there is one.
        """
        self.copy_tied_weight()
        self.objective = objective
        self.batches = batches
        results = []
        inputs = {}
        for step in range(len(batches) + self.count - 1):
            outputs = {n: self.run(n, step - n, *inputs.get(n, ())) for n in self.working(step)}
            if self.count - 1 in outputs:
                results.append(outputs.pop(self.count - 1))
            inputs = self.pass_on(outputs, [n for n in self.working(step + 1) if n > 0])
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return results

    def run(self, number: int, index: int, *hidden: Tensor) -> Tensor:
        """What a stage makes of a micro-batch: hidden states, or at the end the sum of losses.

        The objective sees the stage as the model; from the second one on, hidden states come in
        place of its tokens.
        """
        stage = self.stages[str(number)]
        batch = self.batches[index]
        if "positions" not in batch:
            # hidden states are split over tensor-parallel ranks and do not tell
            batch = batch | {
                "positions": torch.arange(batch["tokens"].shape[1], device=self.device)[None]
            }
        return self.objective.loss(
            lambda tokens, **inputs: stage(*(hidden or (tokens,)), **inputs), batch
        )

    def boundary(self) -> Tensor:
        """What passes between stages, [micro, seq / cp / tp, hidden], without data. Tokens are
        split by cp already.
        """
        micro, length = self.batches[0]["tokens"].shape
        shape = micro, length // self.tp, self.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    @property
    def device(self) -> torch.device:
        return next(self.stages.parameters()).device

    # ----------------------------------------------------------------------------------------------------- training

    def new_schedule(self):
        """torch's schedule for the current batches."""
        self.scheduled = stages = [self.new_stage(int(number)) for number in self.stages]
        one = issubclass(self.schedule_class, PipelineScheduleSingle)
        schedule = self.schedule_class(
            stages[0] if one else stages,
            n_microbatches=len(self.batches),
            loss_fn=lambda loss, count: loss / count.squeeze(),
            # by the number of micro-batches, as if each had a mean loss of its own
            scale_grads=False,
        )
        if dist.get_backend(self.group) == "fake":
            schedule._warmup_p2p = skip_vote
        if self.keeps_weights and not one:
            keep_weights(schedule.pipeline_order_with_comms[self.rank])
        return schedule

    def new_stage(self, number: int) -> Stage:
        hidden = self.boundary()
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        first = number == 0
        last = number == self.count - 1
        return Stage(
            partial(self.run, number),
            self.stages[str(number)],
            number,
            self.count,
            self.device,
            input_args=() if first else (hidden,),
            output_args=(loss if last else hidden,),
            group=self.group,
            keeps_sends=not issubclass(self.schedule_class, PipelineScheduleSingle),
            splits_loss=torch.__version__ >= "2.13" and len(self.batches) > 1,
        )

    def total(self, losses: list[Tensor]) -> Tensor:
        """The sum of what only the last stage's rank has, on every rank."""
        total = sum((loss.detach() for loss in losses), torch.zeros((), device=self.device))
        dist.all_reduce(total, group=self.group)
        return total

    # --------------------------------------------------------------------------------------------------- evaluation

    def working(self, step: int) -> list[int]:
        """This rank's stages that have a batch in this step of `evaluate`."""
        return [n for n in map(int, self.stages) if 0 <= step - n < len(self.batches)]

    def pass_on(self, outputs: dict[int, Tensor], coming: list[int]) -> dict[int, tuple[Tensor]]:
        """Send each stage's output to the stage behind it; returns what comes for this rank's
        stages `coming`.
        """
        here = {n + 1: output for n, output in outputs.items() if self.ranks[n + 1] == self.rank}
        there = {
            n: torch.empty_like(self.boundary(), device=self.device)
            for n in coming
            if n not in here
        }
        sends = [
            self.transfer(dist.isend, x, self.ranks[n + 1])
            for n, x in outputs.items()
            if n + 1 not in here
        ]
        receives = [self.transfer(dist.irecv, x, self.ranks[n - 1]) for n, x in there.items()]
        for work in dist.batch_isend_irecv(sends + receives) if sends + receives else []:
            work.wait()
        return {n: (x,) for n, x in (here | there).items()}

    def transfer(self, direction: Callable, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(
            direction, tensor.detach().contiguous(), group=self.group, group_peer=peer
        )

    # ----------------------------------------------------------------------------------------------- tied embeddings

    def tied_weights(self) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """The embedding and the last stage's copy of it; None for what another rank has."""
        ends = (
            self.stages[str(n)] if self.ranks[n] == self.rank else None for n in (0, self.count - 1)
        )
        return tuple(stage and stage.get_parameter(EMBEDDING) for stage in ends)

    @torch.no_grad()
    def copy_tied_weight(self) -> None:
        """Give the last stage the embedding as it is now."""
        if self.config.tie_word_embeddings:
            first, last = self.tied_weights()
            arrived = self.move(to_local(first), to_local(last), 0, self.count - 1)
            if last is not None:
                to_local(last).copy_(arrived)

    @torch.no_grad()
    def add_tied_gradient(self) -> None:
        """Add the gradient of the last stage's copy to that of the embedding."""
        first, last = self.tied_weights() if self.config.tie_word_embeddings else (None, None)
        if any(p is not None and p.requires_grad for p in (first, last)):
            arrived = self.move(
                to_local(last.grad if last is not None else None),
                to_local(first),
                self.count - 1,
                0,
            )
            if first is not None:
                to_local(first.grad).add_(arrived)
            if last is not None:
                last.grad = None

    def move(
        self, tensor: Tensor | None, like: Tensor | None, source: int, target: int
    ) -> Tensor | None:
        """`tensor` of the rank that has stage `source`, on the rank of stage `target`, where `like`
        has its shape.
        """
        source = self.ranks[source]
        target = self.ranks[target]
        if self.rank == source != target:
            dist.send(tensor, group=self.group, group_dst=target)
        if self.rank == target != source:
            tensor = torch.empty_like(like, device=self.device)
            dist.recv(tensor, group=self.group, group_src=source)
        return tensor

    # ------------------------------------------------------------------------------------------------------- export

    def full_tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor | None]]:
        """All stages' tensors of `wanted` names, in the full model's order, whole on rank 0; None
        elsewhere.

        A piece at a time is gathered from its stage's ranks and sent to the first.
        """
        mine = {
            name: (int(number), tensor)
            for number, stage in self.stages.items()
            for name, tensor in stage.state_dict().items()
            if owns(stage, name) and wanted(name)
        }
        listing = [
            (number, name, cut_slices(x), x.shape, x.dtype) for name, (number, x) in mine.items()
        ]
        entries = [entry for listing in gather(listing, self.group) for entry in listing]

        def moved(number: int, name: str, where: Slices, like: Tensor) -> Tensor | None:
            piece = full_slice(mine[name][1], where).contiguous() if name in mine else None
            return self.move(piece, like[where], number, 0)

        for number, name, places, shape, dtype in sorted(entries, key=lambda entry: entry[0]):
            like = torch.empty(shape, dtype=dtype, device="meta")
            yield (
                name,
                assemble(
                    ((where, moved(number, name, where, like)) for where in places), shape, dtype
                ),
            )


def owns(stage: Module, name: str) -> bool:
    """Return whether a parameter is the stage's own, not a copy of another stage's."""
    return stage.first or name != EMBEDDING


def pipeline_needs(p: "Parallel", micro_batches: int) -> str | None:
    """Return how many micro-batches the schedule needs, if it cannot run `micro_batches`."""
    least = {"1F1B": p.pp, "DualPipeV": 2 * p.pp}.get(p.schedule, 1)
    rounds = max(1, micro_batches // p.pp) if p.schedule.startswith("Interleaved") else 1
    if p.pp > 1 and micro_batches < least:
        return f"at least {least}"
    if p.pp > 1 and micro_batches % rounds:
        return f"a multiple of {p.pp}, or fewer than {2 * p.pp},"
    return None
