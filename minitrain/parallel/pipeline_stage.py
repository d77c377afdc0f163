"""A stage of torch.distributed.pipelining for pipeline.py, and changes to torch's schedules.

All private names of torch's pipelining stand in this file. None has a public one in torch 2.13.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, _batch_p2p


class Stage(PipelineStage):
    """A stage whose forward pass is compute(index of the micro-batch, *hidden).

    Tokens and labels do not go through torch: 2.11 cannot split a backward pass with inputs that
    have no gradients.

    splits_loss: split the last stage's backward pass too. torch 2.11 cannot split at an
        autograd.Function, such as the loss. Under FSDP the second pass through the loss looks like
        the end of a micro-batch: FSDP casts the gradients so far to its reduce type, and later
        refuses to add the others.
    keeps_sends: torch's schedules of several stages keep every send, and the tensor sent, until the
        step ends. So the stage starts its sends itself and drops those that are done. NCCL tells;
        gloo only when waited for.
    """

    def __init__(
        self, compute: Callable[..., Tensor], *args, keeps_sends: bool, splits_loss: bool, **kwargs
    ):
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
        """Start sends, if they are the stage's; return those that the schedule is to start."""
        if not self.keeps_sends:
            return operations
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
        self.index = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, (), {}, **options)

    def forward_maybe_with_nosync(self, *hidden: Tensor) -> Tensor:
        return self.compute(self.index, *hidden)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss=None, full_backward=True, last_backward=False
    ) -> None:
        full = full_backward or not self.is_split
        super().backward_one_chunk(bwd_chunk_id, loss, full, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward=False) -> None:
        if self.is_split:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Open NCCL's connections alone: gloo has none from a rank to itself, as a V would need."""
        if dist.get_backend(self.group) == "nccl":
            return super()._get_init_p2p_neighbors_ops()
        return []


def keep_weights(schedule, rank: int) -> None:
    """Drop a rank's UNSHARD actions but each stage's first, and its RESHARD actions but the last."""
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
    actions[:] = [a for i, a in enumerate(actions) if i in kept or a.computation_type not in others]


def skip_vote(schedule) -> None:
    """Skip torch 2.13's vote on whether shapes are known: a fake process group does not answer."""

    def know_shapes(stages: list[Stage], *args) -> None:
        from torch.distributed.pipelining._utils import InferenceMode  # new in 2.13

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = know_shapes
