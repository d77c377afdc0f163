"""Arrange the ranks of a process group as named meshes."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from minitrain.errors import InputError


@dataclass(frozen=True)
class Meshes:
    """The same ranks, seen by what is split over them.

    Neighbouring ranks, which share the fastest links, are tensor-parallel; then come context,
    shards, replicas, stages.
    """

    parameters: DeviceMesh  # 2-D (dp_replicate, dp_shard): copied over the first, sharded over the second, cp included
    batch: DeviceMesh  # 1-D: the ranks that take different rows of a batch
    loss: DeviceMesh  # 1-D, batch x cp: the ranks that see different tokens, whose losses add up
    tokens: DeviceMesh  # 1-D, batch x cp x tp: the ranks that see different tokens between blocks, and in routers
    row: DeviceMesh  # 1-D, cp x tp: those of them that share rows
    cp: DeviceMesh
    tp: DeviceMesh
    pp: DeviceMesh
    experts: (
        DeviceMesh | None
    )  # if ep > 1, 3-D (dp_replicate, dp_shard, ep): split over the last, sharded as above

    @property
    def device(self) -> torch.device:
        """This rank's: its CPU, or the GPU that is torch's current one."""
        kind = self.tp.device_type
        return (
            torch.device(kind, torch.cuda.current_device())
            if kind == "cuda"
            else torch.device(kind)
        )


def build_meshes(
    device_type: str,
    dp_replicate: int = 1,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    spare: int = 0,
) -> Meshes:
    """Arrange the ranks of the running process group; those that the sizes leave shard the
    parameters.

    spare: how many of the last ranks stand apart: they get meshes of the same shapes, which nothing
    uses. FSDP wants its mesh and tensor parallelism's to be slices of one; meshes that cut the
    ranks otherwise stand apart.
    """
    world = dist.get_world_size()
    ranks = world - spare
    # context-parallel ranks share the work of holding parameters
    shards = ranks // (dp_replicate * tp * pp)
    rows = ranks // (cp * tp * pp)

    def grid(**sizes: int) -> DeviceMesh:
        if ranks < world:
            sizes = {"role": world // ranks, **sizes}
        return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    for_parameters = grid(pp=pp, dp_replicate=dp_replicate, dp_shard=shards, tp=tp)
    # no public name; one all-reduce for the gradient norm, not two
    loss = for_parameters["dp_shard"]
    tokens = for_parameters["dp_shard", "tp"]._flatten("shards")
    # else these serve for both: each communicator takes memory of the GPU
    if dp_replicate > 1:
        loss = for_parameters["dp_replicate", "dp_shard"]._flatten("loss")
        tokens = for_parameters["dp_replicate", "dp_shard", "tp"]._flatten("tokens")
    for_rows = grid(pp=pp, batch=rows, cp=cp, tp=tp)
    for_experts = None
    if ep > 1:
        for_experts = grid(pp=pp, dp_replicate=dp_replicate, dp_shard=shards * tp // ep, ep=ep)
        for_experts["dp_shard", "ep"]._flatten("expert_shards")
        for_experts = for_experts["dp_replicate", "dp_shard", "ep"]
    return Meshes(
        parameters=for_parameters["dp_replicate", "dp_shard"],
        batch=for_rows["batch"],
        loss=loss,
        tokens=tokens,
        row=for_rows["cp", "tp"]._flatten("row"),
        cp=for_rows["cp"],
        tp=for_parameters["tp"],
        pp=for_parameters["pp"],
        experts=for_experts,
    )


def sum_over(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in place."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, group=mesh.get_group())
    return tensor


def own_chunk(mesh: DeviceMesh, row: Tensor) -> Tensor:
    """This rank's of the equal stretches of a row [batch, seq, ...]. Raises InputError if its ranks
    do not divide it: messages of different lengths would end in a crash, or not at all."""
    if row.shape[1] % mesh.size():
        raise InputError(
            f"a row of {row.shape[1]} tokens does not divide by {mesh.size()} ranks (use another size)"
        )
    return row.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]
