"""Tensor and sequence parallelism of decoders: the modules to split, by the means of tensor.py."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from minitrain.models.variants import set_variant
from minitrain.parallel.mesh import local_chunk
from minitrain.parallel.parts import split_parameters, use_local_tensors
from minitrain.parallel.tensor import (
    along_sequence,
    norm_over_heads,
    present,
    split_block,
    split_embedding,
)

if TYPE_CHECKING:
    from minitrain.models.attention import GroupedQueryAttention
    from minitrain.models.decoder import Block, Decoder
    from minitrain.models.moe import Experts, MoE

# suffixes of the names of modules whose parameters are column-parallel, split along dim 0
COLUMN = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "q_b_proj",
    "kv_b_proj",
    "mamba.in_proj",
    "mamba.conv1d",
    "mamba.dynamics",
    "mamba.norm",
    "linear_attn.in_proj_qkvz",
    "linear_attn.in_proj_ba",
    "linear_attn.in_proj_qkv",
    "linear_attn.in_proj_z",
    "linear_attn.in_proj_b",
    "linear_attn.in_proj_a",
    "linear_attn.conv1d",
    "linear_attn.dynamics",
    # only for the attention's own parameter `sinks`, [heads]
    "self_attn",
)
# row-parallel, split along dim 1; out_proj is Mamba-2's and gated DeltaNet's
ROW = ("o_proj", "down_proj", "out_proj")


def tensor_parallel(model: "Decoder", mesh: DeviceMesh) -> None:
    """Split a decoder, or a pipeline stage of it, in place over the 1-D `mesh`. FSDP follows.

    Between blocks, and between stages, hidden states become [batch, seq / tp, hidden]. Every rank
    gets all tokens, labels and positions, [batch, seq], and all of the head's input. The head's
    weight becomes a DTensor, split by vocabulary, so the model must be called with a `head` that
    takes one (training/loss.py).
    """
    all_gather, reduce_scatter = along_sequence(mesh)
    for block in model.blocks:
        split_decoder_block(block, mesh, all_gather, reduce_scatter)
    # of these a pipeline stage has some
    outer = model.model
    if "embed_tokens" in outer:
        split_embedding(outer["embed_tokens"], mesh)
    if "embed_positions" in outer:
        # all positions on every rank, which looks up those of its tokens
        split_parameters(outer["embed_positions"], mesh, Replicate())
        set_variant(outer["embed_positions"], LocalPositions)
    if "norm" in outer:
        split_parameters(outer["norm"], mesh, Replicate())
        outer["norm"].register_forward_pre_hook(use_local_tensors)
        model.gather = all_gather
        model.split = partial(local_chunk, mesh)
    if model.lm_head is not None:
        split_parameters(model.lm_head, mesh, Shard(0))
    # too few labels to split: a rank multiplies its channels, as a row-parallel matrix does
    if model.score is not None:
        split_parameters(model.score, mesh, Shard(1))


def split_decoder_block(
    block: "Block", mesh: DeviceMesh, all_gather: Callable, reduce_scatter: Callable
) -> None:
    """Split a block in place. The names of its modules tell its kinds of attention and MLP.

    all_gather, reduce_scatter: from `along_sequence`.
    """
    column = COLUMN
    attention = block.self_attn
    mlp = block.mlp
    if hasattr(attention, "k_proj"):
        column += share_heads(attention, mesh)
    if hasattr(mlp, "experts"):
        split_experts(mlp, mesh, all_gather, reduce_scatter)
        mlp = mlp.shared_experts
    parts = (attention, block.mamba, block.linear_attn, mlp)
    parts = [part for part in parts if part is not None]
    split_block(block, mesh, present(block, column), present(block, ROW), parts)
    if hasattr(attention, "kv_b_proj"):
        # latent attention gathers latents, which norms read: `split_block` may have chosen FP8
        attention.gather = all_gather


def share_heads(attention: "GroupedQueryAttention", mesh: DeviceMesh) -> tuple[str, ...]:
    """Let each rank use the rows of k and v of one head, if ranks outnumber key/value heads.

    Return the names of norms that are split as q and k are, since they are over all heads.
    `use_local_tensors` reads `local_rows`, the rows of the weight that a rank computes with.
    """
    heads = len(attention.k_proj.weight) // attention.head_dim
    if mesh.size() > heads:
        # with 2 heads on 4 ranks: head 0, 0, 1, 1
        first = mesh.get_local_rank() * heads // mesh.size() * attention.head_dim
        shared = [attention.k_proj, attention.v_proj]
        if attention.normalizes_over_heads:
            shared.append(attention.k_norm)
        for module in shared:
            module.local_rows = slice(first, first + attention.head_dim)
    if not attention.normalizes_over_heads:
        return ()
    norm_over_heads(attention.q_norm, mesh)
    norm_over_heads(attention.k_norm, mesh)
    return "q_norm", "k_norm"


def split_experts(
    moe: "MoE", mesh: DeviceMesh, all_gather: Callable, reduce_scatter: Callable
) -> None:
    """Split the channels of all experts, unless expert parallelism has split them by expert."""
    experts = moe.experts
    # document ids [batch, seq] -> those of this rank's tokens, for the router
    moe.split = partial(local_chunk, mesh)
    if not isinstance(experts.down_proj, DTensor):
        # gate_up_proj, [experts, 2 x channels, width], or up_proj; its bias lacks the last dim
        split_parameters(experts, mesh, Shard(1), experts.first)
        # [experts, width, channels]; its bias [experts, width] has no channels to split
        split_parameters(experts, mesh, Shard(2), "down_proj")
        moe.dispatch = partial(dispatch_to_all, moe.dispatch, all_gather, reduce_scatter)


def dispatch_to_all(
    dispatch: Callable,
    all_gather: Callable,
    reduce_scatter: Callable,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: "Experts",
) -> Callable[[], Tensor]:
    """Run `dispatch` on the tokens of all tensor-parallel ranks, and sum the results over ranks.

    A rank has some channels of all experts, so it computes one term of each token's result.
    x: [tokens, width], this rank's tokens, as the result; indices, weights: [tokens, top_k].
    """
    # [tokens x tp, ...]; the collectives take [batch, seq, width], so all tokens are one sequence
    x, indices, weights = (all_gather(tensor[None])[0] for tensor in (x, indices, weights))
    finish = dispatch(x, indices, weights, experts)
    return lambda: reduce_scatter(finish()[None])[0]


class LocalPositions(nn.Embedding):
    """An embedding of positions [batch or 1, seq] -> this rank's [batch or 1, seq / tp, hidden]."""

    def forward(self, positions: Tensor) -> Tensor:
        # [max positions, hidden]; this rank's tokens give one term of the gradient
        weight = self.weight.to_local(grad_placements=[Partial()])
        return F.embedding(local_chunk(self.weight.device_mesh, positions), weight)


def tensor_parallel_size(model: "Decoder") -> int:
    """Return over how many ranks `tensor_parallel` has split a decoder; 1 if it has not."""
    weight = model.head_weight
    if not isinstance(weight, DTensor):
        return 1
    mesh = weight.device_mesh
    # the mesh of a tensor-parallel sampler has one dimension without a name
    names = mesh.mesh_dim_names or ("tp",)
    if "tp" not in names:
        return 1
    return mesh.size(names.index("tp"))
