"""Pipeline parallelism (Huang et al. 2018): each rank has some layers, and micro-batches pass through them.

The model is cut into pp x vp stages (pipeline_split.py). A stage sends its output to the next one.
In the backward pass it sends the gradient of its input to the one before. The schedule, of
torch.distributed.pipelining, says which micro-batch a rank works on next. Of a micro-batch in one
rank's layers, let F be the time of the forward pass, B of the gradients of inputs, and W of those
of weights. With n ranks, v stages on each and m micro-batches:

    schedule                bubble: idle time of a rank  micro-batches whose       from
                            (work: m (F + B + W))        activations are kept
    GPipe                   (n - 1)(F + B + W)           m                         Huang et al. 2018
    1F1B                    (n - 1)(F + B + W)           n                         Narayanan et al. 2019, 2021
    LoopedBFS               (n - 1)(F + B + W) / v       m                         Lamy-Poirier 2022
    Interleaved1F1B         (n - 1)(F + B + W) / v       n + (n - 1) / v           Narayanan et al. 2021
    InterleavedZeroBubble   (n - 1)(F + B - W) / v       n                         Qi et al. 2023, ZB1P
    ZBVZeroBubble           (n - 1) F / 2 if F = B = W   n                         Qi et al. 2023, section 6
    DualPipeV               (n - 1) F / 2 if F = B = W   n + 1/2                   DeepSeek-AI 2024, Qi et al. 2025

The last three delay W to fill the bubble.

Cost per micro-batch: each boundary between stages sends [micro, seq / cp / tp, hidden] forward, and
its gradient back. Nothing else is sent: the last stage computes the loss, and every rank reads
tokens and labels by itself. torch keeps two buffers of a boundary's size per stage and micro-batch.

FSDP reduces gradients once per step. By default it keeps weights gathered over all micro-batches
(ZeRO-2), since gathering for each would cost m times as much. With `reshard_after_forward`, only
the three stages that a rank runs next are gathered. That takes less memory, and gathers each stage
up to m / n times, in the forward and in the backward pass.

Tied embeddings: the first stage owns the matrix. The last one gets a copy before each step, and
sends the copy's gradient back after it. So gradient norm, optimizer and checkpoints see one
parameter.

Left out: skip connections between stages; balancing stages by measured time.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn import Module

from minitrain.parallel.agreement import gather
from minitrain.parallel.pipeline_split import V_SHAPED, rank_of
from minitrain.parallel.pipeline_stage import Stage, keep_weights, skip_vote
from minitrain.parallel.shards import Slices, assemble, cut_slices, full_slice, to_local

Batch = dict[str, Tensor]
# the last stage has a copy if embeddings are tied
EMBEDDING = "model.embed_tokens.weight"


class Pipeline(nn.Module):
    """This rank's stages as one model. Parameters have the names of the full model.

    stages: by their number in the whole pipeline, parallelized in all other ways already.
    schedule: the name of torch's class, see the table above.
    mesh: 1-D, the ranks of this pipeline. They call all methods together, except those of
        nn.Module.
    tp: number of ranks that shard hidden states along seq.
    dtype: of hidden states.
    keeps_weights: keep the weights of all stages gathered during a step, not only of the three that
        run next. A rank's only stage always keeps its own.
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
        # sorted by number
        self.stages = nn.ModuleDict({str(number): stages[number] for number in sorted(stages)})
        self.config = next(iter(stages.values())).config
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.tp = tp
        self.dtype = dtype
        self.keeps_weights = keeps_weights
        # number of stages of the whole pipeline
        self.count = len(stages) * mesh.size()
        v_shaped = schedule in V_SHAPED
        # the rank of each stage
        self.ranks = [rank_of(number, mesh.size(), v_shaped) for number in range(self.count)]
        self.schedule_class = get_schedule_class(schedule)
        # torch's schedule, and the number and shape of micro-batches that it was made for
        self.schedule = None
        self.scheduled_for = None
        # the stages as that schedule knows them
        self.scheduled: list[Stage] = []

    def named_parameters(self, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(**kwargs):
                if owns(stage, name):
                    yield name, parameter

    def state_dict(self, **kwargs) -> dict[str, Tensor]:
        tensors = {}
        for stage in self.stages.values():
            state = stage.state_dict(**kwargs)
            tensors |= {name: x for name, x in state.items() if owns(stage, name)}
        return tensors

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        next(iter(self.stages.values())).initialize_parameter(name, tensor, generator)

    def forward_backward(self, objective, batches: list[Batch], count: Tensor) -> Tensor:
        """Add the gradients of (loss sum of all micro-batches) / count, and return that loss.

        count: a scalar. The loss is a scalar, equal on every rank.
        """
        self.copy_tied_weight()
        self.objective = objective
        self.batches = batches
        shapes = len(batches), batches[0]["tokens"].shape
        if self.scheduled_for != shapes:
            self.schedule = self.new_schedule()
            self.scheduled_for = shapes
        losses = []
        self.schedule.step(target=count.expand(len(batches)), losses=losses, return_outputs=False)
        for stage in self.scheduled:
            stage.finish_sends()
        self.add_tied_gradient()
        return self.total(losses)

    def run(self, number: int, index: int, *hidden: Tensor) -> Tensor:
        """Run stage `number` on micro-batch `index`; return hidden states, or from the last stage a loss.

        The objective calls the stage as its model. Stages after the first get `hidden`, [micro,
        seq / cp / tp, hidden], in place of the objective's tokens.
        """
        stage = self.stages[str(number)]
        batch = dict(self.batches[index])
        if "positions" not in batch:
            # hidden states do not tell how many: tensor-parallel ranks shard them
            length = batch["tokens"].shape[1]
            batch["positions"] = torch.arange(length, device=self.device)[None]

        def model(tokens: Tensor, **inputs) -> Tensor:
            return stage(*(hidden or (tokens,)), **inputs)

        return self.objective.loss(model, batch)

    def boundary(self) -> Tensor:
        """Return hidden states between stages without data, [micro, seq / cp / tp, hidden]."""
        # tokens are sharded over cp already
        micro, length = self.batches[0]["tokens"].shape
        shape = micro, length // self.tp, self.config.hidden_size
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    @property
    def device(self) -> torch.device:
        return next(self.stages.parameters()).device

    def new_schedule(self):
        """Return torch's schedule for the current micro-batches."""
        self.scheduled = [self.new_stage(int(number)) for number in self.stages]
        single = issubclass(self.schedule_class, PipelineScheduleSingle)
        schedule = self.schedule_class(
            self.scheduled[0] if single else self.scheduled,
            n_microbatches=len(self.batches),
            loss_fn=lambda loss, count: loss / count.squeeze(),
            # torch would divide by the number of micro-batches, as if each had a mean loss
            scale_grads=False,
        )
        if dist.get_backend(self.group) == "fake":
            skip_vote(schedule)
        if self.keeps_weights and not single:
            keep_weights(schedule, self.rank)
        return schedule

    def new_stage(self, number: int) -> Stage:
        """Return stage `number` for torch's schedule."""
        hidden = self.boundary()
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        last = number == self.count - 1
        return Stage(
            partial(self.run, number),
            self.stages[str(number)],
            number,
            self.count,
            self.device,
            input_args=(hidden,) if number > 0 else (),
            output_args=(loss if last else hidden,),
            group=self.group,
            keeps_sends=not issubclass(self.schedule_class, PipelineScheduleSingle),
            splits_loss=torch.__version__ >= "2.13" and len(self.batches) > 1,
        )

    def total(self, losses: list[Tensor]) -> Tensor:
        """Sum losses, which only the last stage's rank has; return the sum on every rank."""
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total, group=self.group)
        return total

    # --- evaluation: forward passes alone

    def evaluate(self, objective, batches: list[Batch]) -> Tensor:
        """Return the loss sum of the micro-batches, a scalar, on every rank."""
        return self.total(self.outputs(objective, batches))

    @torch.no_grad()
    def outputs(self, objective, batches: list[Batch]) -> list[Tensor]:
        """Return the objective's result for each micro-batch, on the last stage's rank; others get [].

        In step t, stage s runs micro-batch t - s, if there is one.
        """
        self.copy_tied_weight()
        self.objective = objective
        self.batches = batches
        results = []
        inputs = {}
        for step in range(len(batches) + self.count - 1):
            outputs = {n: self.run(n, step - n, *inputs.get(n, ())) for n in self.running(step)}
            if self.count - 1 in outputs:
                results.append(outputs.pop(self.count - 1))
            inputs = self.exchange(outputs, [n for n in self.running(step + 1) if n > 0])
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return results

    def running(self, step: int) -> list[int]:
        """Return this rank's stages that run a micro-batch in this step of `outputs`."""
        return [n for n in map(int, self.stages) if 0 <= step - n < len(self.batches)]

    def exchange(self, outputs: dict[int, Tensor], wanted: list[int]) -> dict[int, tuple[Tensor]]:
        """Send each stage's output to the next stage, and receive the inputs of the `wanted` ones.

        Both are by the stage's number, [micro, seq / cp / tp, hidden].
        """
        inputs = {}
        operations = []
        for number, x in outputs.items():
            target = self.ranks[number + 1]
            if target == self.rank:
                inputs[number + 1] = (x,)
            else:
                operations.append(
                    dist.P2POp(dist.isend, x.contiguous(), group=self.group, group_peer=target)
                )
        for number in wanted:
            if number not in inputs:
                x = torch.empty_like(self.boundary(), device=self.device)
                inputs[number] = (x,)
                source = self.ranks[number - 1]
                operations.append(dist.P2POp(dist.irecv, x, group=self.group, group_peer=source))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return inputs

    # --- tied embeddings

    def tied_weights(self) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        """Return the embedding and the last stage's copy; None for what another rank has."""
        weights = []
        for number in (0, self.count - 1):
            here = self.ranks[number] == self.rank
            weights.append(self.stages[str(number)].get_parameter(EMBEDDING) if here else None)
        return tuple(weights)

    @torch.no_grad()
    def copy_tied_weight(self) -> None:
        """Copy the embedding to the last stage."""
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
            grad = None if last is None else to_local(last.grad)
            arrived = self.move(grad, to_local(first), self.count - 1, 0)
            if first is not None:
                to_local(first.grad).add_(arrived)
            if last is not None:
                last.grad = None

    def move(
        self, tensor: Tensor | None, like: Tensor | None, source: int, target: int
    ) -> Tensor | None:
        """Send `tensor` from the rank of stage `source` to that of `target`, and return it there.

        like: a tensor of its shape, on the target's rank.
        """
        source = self.ranks[source]
        target = self.ranks[target]
        if self.rank == source != target:
            dist.send(tensor, group=self.group, group_dst=target)
        if self.rank == target != source:
            tensor = torch.empty_like(like, device=self.device)
            dist.recv(tensor, group=self.group, group_src=source)
        return tensor

    # --- export

    def full_tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield all stages' tensors of `wanted` names, full on rank 0, None elsewhere, in order.

        All ranks iterate together. One slice at a time is gathered in its stage and sent to rank 0.
        """
        mine = {}
        for number, stage in self.stages.items():
            for name, tensor in stage.state_dict().items():
                if owns(stage, name) and wanted(name):
                    mine[name] = int(number), tensor
        own = [
            (number, name, cut_slices(x), x.shape, x.dtype) for name, (number, x) in mine.items()
        ]
        entries = [entry for listing in gather(own, self.group) for entry in listing]

        def moved(number: int, name: str, where: Slices, like: Tensor) -> Tensor | None:
            piece = full_slice(mine[name][1], where).contiguous() if name in mine else None
            return self.move(piece, like[where], number, 0)

        for number, name, slices, shape, dtype in sorted(entries, key=lambda entry: entry[0]):
            like = torch.empty(shape, dtype=dtype, device="meta")
            parts = ((where, moved(number, name, where, like)) for where in slices)
            yield name, assemble(parts, shape, dtype)


def owns(stage: Module, name: str) -> bool:
    """Return False for a parameter that is a copy of another stage's."""
    return stage.first or name != EMBEDDING
