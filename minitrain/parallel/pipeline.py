"""Pipeline parallelism: each rank holds some layers, and micro-batches pass from rank to rank.

The model is cut into pp x vp stages (pipeline_split.py), vp on each rank. A stage sends its output
to the next one. In the backward pass it sends the gradient of its input to the one before. The
schedule, from torch.distributed.pipelining, decides which micro-batch a rank works on next.

Let F be the time of one micro-batch's forward pass through all layers of a rank. B is that of the
gradients of its inputs, W that of the gradients of its weights. A step of m micro-batches keeps
a rank busy for m (F + B + W), plus the bubble, in which it waits. On n ranks with v stages each:

    schedule               bubble                      micro-batches whose  source
                                                       activations it keeps
    GPipe                  (n - 1)(F + B + W)          m                    Huang et al. 2018
    1F1B                   (n - 1)(F + B + W)          n                    Narayanan et al. 2019
    LoopedBFS              (n - 1)(F + B + W) / v      m                    Lamy-Poirier 2022
    Interleaved1F1B        (n - 1)(F + B + W) / v      n + (n - 1) / v      Narayanan et al. 2021
    InterleavedZeroBubble  (n - 1)(F + B - W) / v      n                    Qi et al. 2023, ZB1P
    ZBVZeroBubble          (n - 1) F / 2 if F = B = W  n                    Qi et al. 2023, ZB-V
    DualPipeV              (n - 1) F / 2 if F = B = W  n + 1/2              DeepSeek-V3; Qi 2025

The last three delay W to fill the bubble.

Cost per micro-batch: each boundary between stages sends hidden states forward, of a decoder
[micro, seq / cp / tp, hidden], and their gradient back. Nothing else is sent: the last stage
computes the loss, and every rank reads tokens and labels by itself. torch keeps two buffers of a
boundary's size per stage and micro-batch.

FSDP reduces gradients once per step. With `keeps_weights` (parallel.reshard_after_forward=false) it
also gathers weights once per step and keeps them (ZeRO-2). Without, as by default, a rank gathers
only the three stages that it runs next. That saves memory, and gathers each stage up to m / n times
per step, for the forward and for the backward pass. A rank with one stage keeps them in any case.

A model of your own takes part if each stage is a module whose forward pass takes the input or
hidden states, returns hidden states of a known shape, and in the last stage the loss. See
tests/distributed/test_own_parts.py.

Left out: skip connections between stages; balancing stages by measured time.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn import Module

from minitrain.parallel.pipeline_moves import Places, TiedWeight, full_tensors
from minitrain.parallel.pipeline_split import SCHEDULES, rank_of
from minitrain.parallel.pipeline_stage import Stage, keep_weights, schedule_class, skip_vote

# a micro-batch: tokens, labels, ..., of a decoder [micro, seq] each
MicroBatch = dict[str, Tensor]
# from a model and a micro-batch, such as an objective's `loss`
Loss = Callable[[Callable[..., Tensor], MicroBatch], Tensor]


class Pipeline(nn.Module):
    """This rank's stages as one model. Parameters have the names of the full model.

    stages: this rank's, by their number in the whole pipeline, parallelized in all other ways
        already.
    schedule: a name in SCHEDULES (pipeline_split.py), see the table above.
    mesh: 1-D, the ranks of this pipeline. They call all methods together, except those of
        nn.Module.
    shape(batch): that of the hidden states between stages for a micro-batch.
    dtype: of hidden states.
    keeps_weights: keep the weights of all stages gathered during a step, not only of the three that
        run next. A rank that has one stage keeps them in any case.
    tied: the name of a parameter that first and last stage share, see `TiedWeight`.
    splits_loss: see `Stage`; False where the last stage has inputs besides hidden states, such as
        embeddings for multi-token prediction: B and W apart, torch forgets the gradients behind
        them.
    """

    def __init__(
        self,
        stages: dict[int, Module],
        schedule: str,
        mesh: DeviceMesh,
        shape: Callable[[MicroBatch], tuple[int, ...]],
        dtype: torch.dtype,
        keeps_weights: bool = True,
        tied: str = "",
        splits_loss: bool = True,
    ):
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stages[number] for number in sorted(stages)})
        # of a decoder, the same in all stages
        self.config = getattr(next(iter(stages.values())), "config", None)
        self.group = mesh.get_group()
        self.rank = mesh.get_local_rank()
        self.shape = shape
        self.dtype = dtype
        self.keeps_weights = keeps_weights
        self.splits_loss = splits_loss and torch.__version__ >= "2.13"
        # number of stages of the whole pipeline
        self.count = len(stages) * mesh.size()
        v_shaped = SCHEDULES[schedule].v_shaped
        self.ranks = [rank_of(number, mesh.size(), v_shaped) for number in range(self.count)]
        self.places = Places(self.group, self.ranks)
        self.tied = TiedWeight(tied, stages, self.places) if tied else None
        self.schedule_class = schedule_class(schedule)
        # torch's schedule object and its stages: made at the first step, and again when the number
        # or the shape of micro-batches changes
        self.schedule = None
        self.scheduled_for = None
        self.scheduled: list[Stage] = []
        # what `run` reads: those of the step, or of the evaluation, that is running
        self.loss: Loss | None = None
        self.batches: list[MicroBatch] = []

    def named_parameters(self, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        for number, stage in self.stages.items():
            for name, parameter in stage.named_parameters(**kwargs):
                if self.owns(number, name):
                    yield name, parameter

    def state_dict(self, **kwargs) -> dict[str, Tensor]:
        """Return all tensors, [...] each, but the last stage's copy of a tied one."""
        tensors = {}
        for number, stage in self.stages.items():
            state = stage.state_dict(**kwargs)
            tensors |= {name: x for name, x in state.items() if self.owns(number, name)}
        return tensors

    def owns(self, number: str, name: str) -> bool:
        """Return False for the last stage's copy of a tied parameter."""
        return number == "0" or self.tied is None or name != self.tied.name

    def full_tensors(self, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield all stages' tensors of `wanted` names, see `full_tensors` in pipeline_moves.py."""
        here = {
            name: (int(number), tensor)
            for number, stage in self.stages.items()
            for name, tensor in stage.state_dict().items()
            if self.owns(number, name) and wanted(name)
        }
        return full_tensors(here, self.places, self.device)

    def initialize_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill a full parameter [...]. Any stage has the rules for all names."""
        next(iter(self.stages.values())).initialize_parameter(name, tensor, generator)

    def forward_backward(self, loss: Loss, batches: list[MicroBatch], count: Tensor) -> Tensor:
        """Add the gradients of (sum of all micro-batches' losses) / count, and return that loss.

        loss(model, batch): calls the model on a micro-batch and returns its result, see `run`.
        count: [], the valid tokens of all ranks. The loss is fp32 [], equal on all of `mesh`.
        """
        if self.tied:
            self.tied.copy()
        self.loss = loss
        self.batches = batches
        shapes = len(batches), self.shape(batches[0])
        if self.scheduled_for != shapes:
            self.schedule = self.new_schedule()
            self.scheduled_for = shapes
        losses = []
        # torch hands each micro-batch one target: here, to its loss_fn, the count to divide by
        self.schedule.step(target=count.expand(len(batches)), losses=losses, return_outputs=False)
        for stage in self.scheduled:
            stage.finish_sends()
        if self.tied:
            self.tied.add_gradient()
        return self.total(losses)

    def run(self, number: int, index: int, *hidden: Tensor) -> Tensor:
        """Run stage `number` on micro-batch `index`; return hidden states or the last stage's loss.

        hidden: of `shape`, the input of all stages but the first.
        An objective computes its loss by a model that calls its `head`. Here it gets a stage as that
        model, and its "loss" is what the stage returns: hidden states, or a true loss [] from the
        last stage, which calls the head.
        """
        stage = self.stages[str(number)]
        batch = dict(self.batches[index])
        if "tokens" in batch and "positions" not in batch:
            # a stage that gets hidden states could not count the tokens: tp splits them
            length = batch["tokens"].shape[1]
            batch["positions"] = torch.arange(length, device=self.device)[None]

        def model(x: Tensor, **inputs) -> Tensor:
            """Run the stage. x: a model's input, such as tokens, which only the first stage reads."""
            return stage(*(hidden or (x,)), **inputs)

        return self.loss(model, batch)

    def boundary(self) -> Tensor:
        """Return hidden states between stages, on meta, of `shape`."""
        shape = self.shape(self.batches[0])
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    @property
    def device(self) -> torch.device:
        return next(self.stages.parameters()).device

    def new_schedule(self):
        """Return torch's schedule for the current micro-batches."""
        self.scheduled = [self.new_stage(int(number)) for number in self.stages]
        # GPipe and 1F1B take one stage, all others a list
        single = issubclass(self.schedule_class, PipelineScheduleSingle)
        schedule = self.schedule_class(
            self.scheduled[0] if single else self.scheduled,
            n_microbatches=len(self.batches),
            # both []: the stage has computed the sum, `target` has the count
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
        """Return stage `number` for torch's schedule, which must know shapes before it runs."""
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
            splits_loss=self.splits_loss and len(self.batches) > 1,
        )

    def total(self, losses: list[Tensor]) -> Tensor:
        """Return the sum of losses, [] each, on every rank. Only the last stage's rank has any."""
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss.detach()
        dist.all_reduce(total, group=self.group)
        return total

    # --- evaluation: forward passes alone

    @torch.no_grad()
    def outputs(self, loss: Loss, batches: list[MicroBatch]) -> list[Tensor]:
        """Return `loss`'s results by micro-batch on the last stage's rank, [] elsewhere.

        In step t, stage s runs micro-batch t - s, if there is one.
        """
        if self.tied:
            self.tied.copy()
        self.loss = loss
        self.batches = batches
        results = []
        # by the number of the stage that takes them
        inputs = {}
        for step in range(len(batches) + self.count - 1):
            # the first stage has no input: it reads tokens
            outputs = {n: self.run(n, step - n, *inputs.get(n, ())) for n in self.running(step)}
            if self.count - 1 in outputs:
                results.append(outputs.pop(self.count - 1))
            inputs = self.exchange(outputs, [n for n in self.running(step + 1) if n > 0])
        return results

    def running(self, step: int) -> list[int]:
        """Return this rank's stages that run a micro-batch in this step of `outputs`."""
        return [n for n in map(int, self.stages) if 0 <= step - n < len(self.batches)]

    def exchange(self, outputs: dict[int, Tensor], wanted: list[int]) -> dict[int, tuple[Tensor]]:
        """Send each stage's output to the next stage; return the inputs of the stages `wanted`.

        Both by the number of their stage, of `shape` each.
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
