"""A stage of torch.distributed.pipelining for pipeline.py, and changes to torch's schedules.

All private names of torch's pipelining stand in this file. None has a public one in torch 2.13.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

# the simulator replays these
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops  # noqa: F401
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, _batch_p2p

from minitrain.parallel.pipeline_split import SCHEDULES


def schedule_class(name: str) -> type:
    """Return the class of a schedule in SCHEDULES."""
    module, _, kind = SCHEDULES[name].path.rpartition(".")
    return getattr(import_module(module), kind)


class Stage(PipelineStage):
    """A stage whose forward pass is compute(index of the micro-batch, *hidden).

    hidden: [micro, seq / cp / tp, hidden] from the stage before; none for the first stage.
    `compute` finds tokens and labels by the index. They do not go through torch: 2.11 cannot split
    a backward pass into B and W if some inputs have no gradients.

    splits_loss: split the last stage's backward pass into B and W too. torch 2.11 cannot split at
        an autograd.Function, such as the loss. Under FSDP a second pass through the loss can look
        like the end of a micro-batch: FSDP casts the gradients so far to its reduce type, and later
        refuses to add the others.
    keeps_sends: the schedule keeps every send, and the tensor sent, until the step ends, as torch's
        schedules of several stages do. Then the stage starts its sends itself, and drops those that
        are done. (NCCL reports that; gloo does so only when waited for.)
    """

    def __init__(
        self,
        compute: Callable[..., Tensor],
        *args,
        keeps_sends: bool,
        splits_loss: bool,
        **kwargs,
    ):
        # compute returns [micro, seq / cp / tp, hidden], or from the last stage the loss []
        super().__init__(*args, **kwargs)
        self.compute = compute
        self.keeps_sends = keeps_sends
        self.is_split = splits_loss or not self.is_last
        # sends that may be running
        self.sends: list[dist.Work] = []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self.start_sends(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self.start_sends(super().get_bwd_send_ops(bwd_chunk_id))

    def start_sends(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """Start sends if the stage does so itself; return those left for the schedule to start."""
        if not self.keeps_sends:
            return operations
        # dropping a send frees its tensor
        self.sends = [work for work in self.sends if not work.is_completed()]
        self.sends += _batch_p2p(operations)
        return []

    def finish_sends(self) -> None:
        for work in self.sends:
            work.wait()
        self.sends = []

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, **options
    ) -> Tensor:
        """Return `compute`'s [micro, seq / cp / tp, hidden] or loss [] for a micro-batch."""
        self.index = fwd_chunk_id
        # no inputs of torch's own beside what it has received
        return super().forward_one_chunk(fwd_chunk_id, (), {}, **options)

    def forward_maybe_with_nosync(self, *hidden: Tensor) -> Tensor:
        """Return `compute`'s result. hidden: [micro, seq / cp / tp, hidden], or none."""
        return self.compute(self.index, *hidden)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss=None, full_backward=True, last_backward=False
    ) -> None:
        # B and W in one
        full = full_backward or not self.is_split
        super().backward_one_chunk(bwd_chunk_id, loss, full, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward=False) -> None:
        if self.is_split:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return torch's first messages, which open NCCL's connections.

        gloo needs none, and could not send from a rank to itself, as V-shaped schedules would ask.
        """
        if dist.get_backend(self.group) == "nccl":
            return super()._get_init_p2p_neighbors_ops()
        return []


def keep_weights(schedule, rank: int) -> None:
    """Gather each stage's weights once per step: keep its first UNSHARD and last RESHARD alone."""
    actions = schedule.pipeline_order_with_comms[rank]
    gathers = {}
    releases = {}
    for index, action in enumerate(actions):
        if action.computation_type == UNSHARD:
            gathers.setdefault(action.stage_index, index)
        elif action.computation_type == RESHARD:
            releases[action.stage_index] = index
    kept = {*gathers.values(), *releases.values()}
    others = (UNSHARD, RESHARD)
    actions[:] = [
        a for i, a in enumerate(actions) if i in kept or a.computation_type not in others
    ]


def skip_vote(schedule) -> None:
    """Skip the exchange in which torch 2.13's ranks agree that all know their shapes.

    A fake process group does not answer.
    """

    def know_shapes(stages: list[Stage], *args) -> None:
        from torch.distributed.pipelining._utils import InferenceMode  # new in 2.13

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = know_shapes
