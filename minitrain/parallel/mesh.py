"""Arrange the ranks of a process group as device meshes with named dimensions."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minitrain.errors import InputError


@dataclass(frozen=True)
class Meshes:
    """The ranks as meshes, one for each way in which work is split over them.

    Ranks are numbered so that tensor-parallel ones are neighbors, which share the fastest links.
    Then come context parallelism, shards, replicas and pipeline stages.
    """

    # 2-D (dp_replicate, dp_shard): replicate over the first, shard over the second, which includes
    # context-parallel ranks
    parameters: DeviceMesh
    # 1-D: ranks with different sequences
    batch: DeviceMesh
    # 1-D, batch x cp: ranks with different tokens, whose losses are summed
    loss: DeviceMesh
    # 1-D, batch x cp x tp: ranks with different tokens between blocks, and in routers
    tokens: DeviceMesh
    # 1-D, cp x tp: ranks with tokens of the same sequences
    sequence: DeviceMesh
    # 1-D each: context parallelism, tensor parallelism, pipeline stages
    cp: DeviceMesh
    tp: DeviceMesh
    pp: DeviceMesh
    # if ep > 1, 3-D (dp_replicate, dp_shard, ep): experts are split over the last dimension, and
    # over the others as in `parameters`, whose dp_shard is cp times the setting; this one's is
    # cp x tp / ep times
    experts: DeviceMesh | None

    @cached_property
    def device(self) -> torch.device:
        """Return this rank's device: its CPU, or torch's current GPU."""
        kind = self.tp.device_type
        return torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)


def build_meshes(
    device_type: str,
    dp_replicate: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    spare: int = 0,
) -> Meshes:
    """Arrange the ranks of the running process group; what the sizes leave over is dp_shard.

    spare: number of last ranks that take no part; they get meshes of the same shapes.
    FSDP needs its mesh and tensor parallelism's to be slices of one mesh. Meshes that divide the
    ranks otherwise are separate.
    """
    world = dist.get_world_size()
    ranks = world - spare
    # context-parallel ranks hold shards of the parameters too
    shards = ranks // (dp_replicate * tp * pp)
    batches = ranks // (cp * tp * pp)

    def grid(**sizes: int) -> DeviceMesh:
        # the spare ranks are further meshes of the same sizes
        if ranks < world:
            sizes = {"role": world // ranks, **sizes}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    for_parameters = grid(pp=pp, dp_replicate=dp_replicate, dp_shard=shards, tp=tp)
    # `_flatten` has no public name. With it the gradient norm takes one all-reduce over both
    # dimensions, not two. Without replicas the same meshes serve for losses and tokens: another
    # communicator would take GPU memory.
    loss = for_parameters["dp_shard"]
    tokens = for_parameters["dp_shard", "tp"]._flatten("shards")
    if dp_replicate > 1:
        loss = for_parameters["dp_replicate", "dp_shard"]._flatten("loss")
        tokens = for_parameters["dp_replicate", "dp_shard", "tp"]._flatten("tokens")
    for_batches = grid(pp=pp, batch=batches, cp=cp, tp=tp)
    for_experts = None
    if ep > 1:
        for_experts = grid(pp=pp, dp_replicate=dp_replicate, dp_shard=shards * tp // ep, ep=ep)
        for_experts["dp_shard", "ep"]._flatten("expert_shards")
        for_experts = for_experts["dp_replicate", "dp_shard", "ep"]
    return Meshes(
        parameters=for_parameters["dp_replicate", "dp_shard"],
        batch=for_batches["batch"],
        loss=loss,
        tokens=tokens,
        sequence=for_batches["cp", "tp"]._flatten("sequence"),
        cp=for_batches["cp"],
        tp=for_parameters["tp"],
        pp=for_parameters["pp"],
        experts=for_experts,
    )


def local_chunk(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Return this rank's contiguous chunk of x [batch, seq, ...]: [batch, seq / ranks, ...].

    Raises InputError if the ranks do not divide seq: collectives of unequal sizes crash or hang.
    """
    length = x.shape[1]
    ranks = mesh.size()
    if length % ranks:
        raise InputError(
            f"a sequence of {length} tokens does not divide by {ranks} ranks (use another size)"
        )
    return x.chunk(ranks, dim=1)[mesh.get_local_rank()]
