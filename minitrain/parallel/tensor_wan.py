"""Tensor and sequence parallelism of Wan, by the means of tensor.py.

Both attentions and the MLP are split as those of a decoder are: by heads or channels inside, by
tokens in between. Three things differ.

Queries and keys are normalized over all heads together, but a rank holds only some. The ranks sum
their squares, one number per token, so that heads need not be gathered.

Every rank gets all of text, timestep and image, and computes their embeddings in full. Their
gradients come from the rank's own heads and tokens only. So the embeddings' parameters are
replicated, and their gradients summed over ranks, like those of norms.

The last projection is small: it is replicated, and computes the rank's tokens. Then all ranks
gather the velocities, and compute the same loss.

Cost per layer and direction: 3 all-gathers (of bytes in FP8) and 3 reduce-scatters of
[batch, seq, dim], 4 all-reduces of [batch, seq].
"""

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from minitrain.parallel.collectives import all_gather
from minitrain.parallel.mesh import local_chunk
from minitrain.parallel.parts import split_parameters, use_local_tensors
from minitrain.parallel.tensor import norm_over_heads, present, split_block

if TYPE_CHECKING:
    from minitrain.models.wan import Wan

COLUMN = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "net.0.proj")
OVER_HEADS = ("norm_q", "norm_k", "norm_added_k")
ROW = ("to_out.0", "net.2")


def tensor_parallel_wan(model: "Wan", mesh: DeviceMesh) -> None:
    """Split `model` in place over the 1-D `mesh`. FSDP follows.

    The number of tokens must be a multiple of the ranks. Inputs and result are full, and equal on
    all ranks.
    """
    name = mesh.get_group().group_name
    for block in model.blocks:
        for path, module in block.named_modules():
            if path.endswith(OVER_HEADS):
                norm_over_heads(module, mesh)
        column = present(block, COLUMN + OVER_HEADS)
        split_block(block, mesh, column, ROW, (block.attn1, block.attn2, block.ffn))
    outer = [model.patch_embedding, model.condition_embedder, model.proj_out, model.adaln]
    for unit in outer:
        for module in unit.modules():
            split_parameters(module, mesh, Replicate())
    # its forward runs first, when FSDP has gathered the parameters of all of them
    model.patch_embedding.register_forward_pre_hook(partial(use_all, outer))
    model.split_tp = partial(local_chunk, mesh)
    model.gather = lambda x: GatherTokens.apply(x, mesh.size(), mesh.get_local_rank(), name)


def use_all(units: list[nn.Module], first: nn.Module, inputs: tuple) -> None:
    """Let all `units` compute with local tensors, as a forward pre-hook of one of them."""
    for unit in units:
        use_local_tensors(unit, inputs)


class GatherTokens(torch.autograd.Function):
    """[batch, seq / tp, dim] -> [batch, seq, dim]. Backward keeps the gradient of own tokens.

    It is not summed over ranks: all compute the same loss from the result.
    """

    @staticmethod
    def forward(ctx, x, size, rank, name):
        ctx.share = size, rank
        return all_gather(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        size, rank = ctx.share
        return grad.chunk(size, dim=1)[rank], None, None, None
