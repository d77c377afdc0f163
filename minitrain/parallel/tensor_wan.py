"""Tensor and sequence parallelism of Wan, by the means of tensor.py.

Both attentions and the MLP are split as a language model's are, heads or channels within them,
tokens between. But:

Queries and keys are normalised over all heads together, and a rank has only its own. The ranks add
up their sums of squares, one number per token, where gathering the heads would send them all. Every
rank has the whole text, timestep and image, and computes their embeddings in full; but what flows
back to them comes from the rank's own heads and tokens, so their gradients are sums over ranks, as
those of norms are. The last projection is small, so it is whole and sees this rank's tokens. All
ranks then join the velocities and compute the same loss.

Cost per layer and direction: 3 all-gathers (of bytes in FP8) and 3 reduce-scatters of [batch, seq,
dim], 4 all-reduces of [batch, seq].
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from minitrain.models.layers import set_variant
from minitrain.models.video import upcast
from minitrain.parallel.collectives import all_gather, all_reduce
from minitrain.parallel.mesh import own_chunk
from minitrain.parallel.parts import split_parameters, use_local_tensors
from minitrain.parallel.tensor import split_block

if TYPE_CHECKING:
    from minitrain.models.wan import Block, Wan

COLUMN = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "proj")
OVER_HEADS = ("norm_q", "norm_k", "norm_added_k")
ROW = ("to_out.0", "net.2")


def tensor_parallel_wan(model: "Wan", mesh: DeviceMesh) -> None:
    """Split `model` in place over the 1-D `mesh`. To be followed by FSDP.

    The number of tokens must be a multiple of the ranks. Inputs and the result are whole, and the
    same on all ranks.
    """
    for block in model.blocks:
        split_wan_block(block, mesh)
    outer = [model.patch_embedding, model.condition_embedder, model.proj_out, model.adaln]
    for module in (module for unit in outer for module in unit.modules()):
        split_parameters(module, mesh, Replicate())
    model.patch_embedding.register_forward_pre_hook(partial(use_all, outer))
    model.split_tp = partial(own_chunk, mesh)
    model.gather = lambda own: GatherTokens.apply(
        own, mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name
    )


def use_all(units: list[nn.Module], first: nn.Module, inputs: tuple) -> None:
    """A hook on what runs first, by when FSDP has gathered the parameters of all `units`."""
    for unit in units:
        use_local_tensors(unit, inputs)


def split_wan_block(block: "Block", mesh: DeviceMesh) -> None:
    for name, module in block.named_modules():
        if name.endswith(OVER_HEADS):
            set_variant(module, RMSNormOverHeads)
            module.group_name = mesh.get_group().group_name
    split_block(block, mesh, COLUMN + OVER_HEADS, ROW, (block.attn1, block.attn2, block.ffn))


class RMSNormOverHeads(nn.RMSNorm):
    """What a norm becomes: over the heads of all ranks, in fp32. A class, so that all blocks
    compile as one graph.

    x: [batch, seq, dim / tp], this rank's heads.
    """

    # the process group of the ranks
    group_name: str

    def forward(self, x: Tensor) -> Tensor:
        squares = upcast(x).square().sum(-1, keepdim=True)
        mean = AllReduce.apply(squares, self.group_name) / self.normalized_shape[0]
        return (x * torch.rsqrt(mean + self.eps)).type_as(x) * self.weight


class AllReduce(torch.autograd.Function):
    """The sum over ranks. Each rank uses it for something else, so its gradient is a sum over ranks
    too.
    """

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return all_reduce(x, "sum", name)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, "sum", ctx.name), None


class GatherTokens(torch.autograd.Function):
    """[batch, seq / tp, dim] -> [batch, seq, dim]. All ranks go on alike, so each keeps its own
    tokens' gradient.
    """

    @staticmethod
    def forward(ctx, x, size, rank, name):
        ctx.share = size, rank
        return all_gather(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        size, rank = ctx.share
        return grad.chunk(size, dim=1)[rank], None, None, None
