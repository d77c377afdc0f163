"""Tensor and sequence parallelism of decoders: which parts of their blocks are split, and how. See
tensor.py.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from minitrain.parallel.mesh import own_chunk
from minitrain.parallel.parts import split_parameters
from minitrain.parallel.tensor import collectives, split_block, split_embedding, split_last_norm

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
TO_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")


def tensor_parallel(model: "Decoder", mesh: DeviceMesh) -> None:
    """Split a decoder, or one of its pipeline stages, in place over the 1-D `mesh`. To be followed
    by FSDP.

    Between blocks, and between stages, hidden states are [batch, seq / tp, hidden] afterwards.
    Tokens, labels, positions and the head's input stay whole; the head's weight is a DTensor, split
    by vocabulary, so the model needs a `head` that takes one (training/loss.py).
    """
    gather, scatter = collectives(mesh)
    for block in model.blocks:
        split_decoder_block(block, mesh, gather, scatter)
    outer = model.model
    if "embed_tokens" in outer:
        split_embedding(outer["embed_tokens"], mesh)
    if "embed_positions" in outer:
        split_parameters(outer["embed_positions"], mesh, Replicate())
        outer["embed_positions"].forward = partial(embed_positions, outer["embed_positions"], mesh)
    if "norm" in outer:
        split_last_norm(outer["norm"], mesh)
    if model.lm_head is not None:
        split_parameters(model.lm_head, mesh, Shard(0))
    model.sequence_split = mesh.size()


def split_decoder_block(
    block: "Block", mesh: DeviceMesh, gather: Callable, scatter: Callable
) -> None:
    """Split a block in place: its kinds of attention and MLP are told by their modules' names."""
    attention = block.self_attn
    mlp = block.mlp
    parts = [block.mamba]
    # grouped-query attention; latent attention gathers its latents instead of its input
    if hasattr(attention, "k_proj"):
        share_heads(attention, mesh)
        parts.append(attention)
    for name, module in block.named_modules():
        if name.endswith(TO_LATENTS):
            module.register_forward_hook(lambda module, inputs, output: gather(output))
    # mixture of experts
    if hasattr(mlp, "experts"):
        split_experts(mlp, mesh, gather, scatter)
        mlp.register_forward_pre_hook(partial(use_own_documents, mesh))
        mlp = mlp.shared_experts
    parts.append(mlp)
    split_block(block, mesh, COLUMN, ROW, [part for part in parts if part is not None])


def share_heads(attention: "GroupedQueryAttention", mesh: DeviceMesh) -> None:
    """Let ranks that outnumber the key/value heads use the rows of k and v of one head each."""
    heads = len(attention.k_proj.weight) // attention.head_dim
    if mesh.size() > heads:
        first = mesh.get_local_rank() * heads // mesh.size() * attention.head_dim
        for module in (attention.k_proj, attention.v_proj):
            module.own_rows = slice(first, first + attention.head_dim)


def split_experts(moe: "MoE", mesh: DeviceMesh, gather: Callable, scatter: Callable) -> None:
    """Split the channels of all experts, unless expert parallelism has split the experts
    already.
    """
    experts = moe.experts
    if not isinstance(experts.down_proj, DTensor):
        split_parameters(experts, mesh, Shard(1), experts.first)
        split_parameters(experts, mesh, Shard(2), "down_proj")
        moe.dispatch = partial(dispatch_to_all, moe.dispatch, gather, scatter)


def use_own_documents(
    mesh: DeviceMesh, moe: "MoE", inputs: tuple[Tensor, Tensor | None]
) -> tuple | None:
    """A forward pre-hook: of the numbers of whole rows, [batch, seq], give the router those of this
    rank's tokens.
    """
    x, documents = inputs
    return None if documents is None else (x, own_chunk(mesh, documents))


def dispatch_to_all(
    dispatch: Callable,
    gather: Callable,
    scatter: Callable,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: "Experts",
) -> Tensor:
    """`dispatch` of all ranks' tokens, whose results are terms of a sum. x: [tokens, width], this
    rank's, as returned.

    indices, weights: [tokens, top_k].
    """
    x, indices, weights = (gather(tensor[None])[0] for tensor in (x, indices, weights))
    return scatter(dispatch(x, indices, weights, experts)[None])[0]


def embed_positions(embedding: nn.Embedding, mesh: DeviceMesh, positions: Tensor) -> Tensor:
    """positions: [batch or 1, seq]. Returns the embeddings of this rank's: [batch or 1, seq / tp,
    hidden].
    """
    return F.embedding(
        own_chunk(mesh, positions), embedding.weight.to_local(grad_placements=[Partial()])
    )
