"""Tensor and sequence parallelism of decoders: which modules of a block are split, and how (see tensor.py)."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from minitrain.models.layers import set_variant
from minitrain.parallel.mesh import own_chunk
from minitrain.parallel.parts import split_parameters, use_local_tensors
from minitrain.parallel.tensor import collectives, split_block, split_embedding

if TYPE_CHECKING:
    from minitrain.models.attention import GroupedQueryAttention
    from minitrain.models.decoder import Block, Decoder
    from minitrain.models.moe import Experts, MoE

COLUMN = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "q_b_proj",
    "kv_b_proj",  # of latent attention
    "mamba.in_proj",
    "mamba.conv1d",
    "mamba.dynamics",
    "mamba.norm",
    "self_attn",  # its own parameters are sinks
)
ROW = ("o_proj", "down_proj", "out_proj")


def tensor_parallel(model: "Decoder", mesh: DeviceMesh) -> None:
    """Split a decoder, or a pipeline stage of it, in place over the 1-D `mesh`. FSDP follows.

    Between blocks, and between stages, hidden states are [batch, seq / tp, hidden] then. Tokens,
    labels, positions and the head's input stay whole. The head's weight is a DTensor, split by
    vocabulary, so the model needs a `head` that takes one (training/loss.py).
    """
    gather, scatter = collectives(mesh)
    for block in model.blocks:
        split_decoder_block(block, mesh, gather, scatter)
    outer = model.model
    if "embed_tokens" in outer:
        split_embedding(outer["embed_tokens"], mesh)
    if "embed_positions" in outer:
        split_parameters(outer["embed_positions"], mesh, Replicate())
        set_variant(outer["embed_positions"], OwnPositions)
    if "norm" in outer:
        split_parameters(outer["norm"], mesh, Replicate())
        outer["norm"].register_forward_pre_hook(use_local_tensors)
        model.gather = gather
    if model.lm_head is not None:
        split_parameters(model.lm_head, mesh, Shard(0))


def split_decoder_block(
    block: "Block", mesh: DeviceMesh, gather: Callable, scatter: Callable
) -> None:
    """Split a block in place. Names of its modules tell its kinds of attention and MLP."""
    attention = block.self_attn
    mlp = block.mlp
    if hasattr(attention, "k_proj"):
        share_heads(attention, mesh)
    if hasattr(mlp, "experts"):
        split_experts(mlp, mesh, gather, scatter)
        mlp = mlp.shared_experts
    parts = [part for part in (attention, block.mamba, mlp) if part is not None]
    split_block(block, mesh, COLUMN, ROW, parts)
    if hasattr(attention, "kv_b_proj"):
        # latents, which no FP8 product reads
        attention.gather = gather


def share_heads(attention: "GroupedQueryAttention", mesh: DeviceMesh) -> None:
    """Let each rank use the rows of k and v of one head, if ranks outnumber key/value heads."""
    heads = len(attention.k_proj.weight) // attention.head_dim
    if mesh.size() > heads:
        first = mesh.get_local_rank() * heads // mesh.size() * attention.head_dim
        for module in (attention.k_proj, attention.v_proj):
            module.own_rows = slice(first, first + attention.head_dim)


def split_experts(moe: "MoE", mesh: DeviceMesh, gather: Callable, scatter: Callable) -> None:
    """Split the channels of all experts, unless expert parallelism has split the experts."""
    experts = moe.experts
    moe.split = partial(own_chunk, mesh)
    if not isinstance(experts.down_proj, DTensor):
        split_parameters(experts, mesh, Shard(1), experts.first)
        split_parameters(experts, mesh, Shard(2), "down_proj")
        moe.dispatch = partial(dispatch_to_all, moe.dispatch, gather, scatter)


def dispatch_to_all(
    dispatch: Callable,
    gather: Callable,
    scatter: Callable,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: "Experts",
) -> Tensor:
    """Run `dispatch` on the tokens of all ranks, and sum the results, of a share of the channels.

    x: [tokens, width], of this rank's tokens, as the result; indices, weights: [tokens, top_k].
    """
    x, indices, weights = (gather(tensor[None])[0] for tensor in (x, indices, weights))
    return scatter(dispatch(x, indices, weights, experts)[None])[0]


class OwnPositions(nn.Embedding):
    """An embedding of positions [batch or 1, seq] that returns this rank's, [..., seq / tp, hidden]."""

    def forward(self, positions: Tensor) -> Tensor:
        weight = self.weight.to_local(grad_placements=[Partial()])
        return F.embedding(own_chunk(self.weight.device_mesh, positions), weight)


def tensor_parallel_size(model: "Decoder") -> int:
    """Return the number of ranks over which `tensor_parallel` has split a decoder; 1 if it has not."""
    weight = model.head_weight
    if not isinstance(weight, DTensor):
        return 1
    mesh = weight.device_mesh
    # a sampler's ranks are a mesh without names
    names = mesh.mesh_dim_names or ("tp",)
    if "tp" not in names:
        return 1
    return mesh.size(names.index("tp"))
