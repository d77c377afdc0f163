"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022): each matrix is split over tp ranks.

A part of a block, attention or MLP, has two kinds of matrices. The first ones (q, k, v, gate, up)
are column-parallel: a rank has some of their outputs, which are some heads, or some channels of the
MLP, and computes these from all tokens. The last one (o, down) is row-parallel: a rank has the rows
of W^T for its heads or channels, and its product is one term of a sum over ranks. In between
nothing is exchanged.

Norms and the residual stream treat each token by itself. There a rank has seq / tp of the tokens of
every row (sequence parallelism). One reduce-scatter adds up the terms and splits the tokens.

    [batch, seq / tp, hidden]                                            in the backward pass
      norm                      every rank has the full weight           its gradient is a sum over ranks
      all-gather                -> [batch, seq, hidden]                  reduce-scatter
      q, k, v | gate, up        column-parallel, Shard(0)
      attention | activation    heads / tp | channels / tp
      o | down                  row-parallel, Shard(1)
      reduce-scatter            -> [batch, seq / tp, hidden]             all-gather

Cost per layer: 2 all-gathers and 2 reduce-scatters in the forward pass, and as many in the backward
pass. Each moves (tp - 1) / tp of the bytes of [batch, seq, hidden] per rank. Embedding and head
take one of each per direction. Full recomputation repeats the forward pass's, but for the last
reduce-scatter.

Embedding and head are split by vocabulary. A rank embeds the tokens whose rows it has, as 0 all
others, and a reduce-scatter adds the ranks' results. The last norm's output is gathered for the
head. Its loss needs three numbers per token from each rank (training/loss.py), never all logits.

The other parts of a decoder:

    latent attention   q_a_proj and kv_a_proj_with_mqa are whole and see a rank's own tokens. Their outputs are
                       gathered, in DeepSeek-V3 0.3 of the bytes of their input. The rest is split by heads
    Mamba-2            is split by groups of heads; convolution and norm stay within a group
    experts            are split by channels, and tokens are gathered with their experts and weights. The router and
                       the projections to and from latents are whole and see a rank's own tokens. Under expert
                       parallelism experts are split already, and each rank sends its own tokens
    shared experts     are split as an MLP, with an all-gather and a reduce-scatter of their own

With more ranks than key/value heads, every rank holds k and v in full and uses the rows of one
head, which its queries attend to. Each rank adds 1 / tp of the bias of a row-parallel matrix.
Gradients of parameters that ranks hold in full are sums over ranks: DTensor marks them as partial
sums, and FSDP reduces them.

With FP8 (models/fp8.py) an all-gather moves half the bytes, if only FP8 products read its result:
inputs of q, k, v, gate and up travel as e4m3, gradients of the outputs of o and down as e5m2. It
does not with adapters, nor with a bias, whose gradient is a sum of these gradients. The ranks first
exchange their largest elements, one number each, for a common scale. So products get the same FP8
numbers as one process, and each rank rounds only its own tokens.

Parameters are DTensors, and modules compute with local tensors (parts.py). Left out: fewer Mamba
groups than ranks, and uneven shards, which run/parallel_checks.py refuses.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import Module

from minitrain.models.layers import set_variant
from minitrain.models.quantize import E4M3, E5M2, cast, dequantize, largest, power_of_two_scale
from minitrain.parallel.collectives import all_gather, all_reduce, reduce_scatter
from minitrain.parallel.parts import split_parameters, use_local_tensors


def split_block(
    block: Module,
    mesh: DeviceMesh,
    column: tuple[str, ...],
    row: tuple[str, ...],
    parts: Iterable[Module],
) -> None:
    """Split a block in place over the 1-D `mesh`; it then takes and returns [batch, seq / tp, hidden].

    column, row: suffixes of the names of column-parallel and row-parallel modules. Others stay
        whole.
    parts: modules of the block, such as attention and MLP. Each has one row-parallel Linear, and two
        exchange points: `gather`, of its input, and `reduce`, of its output.
    """
    gather, scatter = collectives(mesh)
    for name, module in block.named_modules():
        placement = Replicate()
        if name.endswith(column) and not hasattr(module, "own_rows"):
            placement = Shard(0)
        elif name.endswith(row):
            placement = Shard(1)
        split_parameters(module, mesh, placement)
    for part in parts:
        linears = {name: x for name, x in part.named_modules() if isinstance(x, nn.Linear)}
        last = linears.pop(next(name for name in linears if name.endswith(row)))
        in_fp8 = all(map(only_multiplies_in_fp8, linears.values()))
        part.gather = partial(gather, in_fp8=in_fp8)
        part.reduce = partial(scatter, in_fp8=only_multiplies_in_fp8(last) and last.bias is None)
    block.register_forward_pre_hook(use_local_tensors)


def only_multiplies_in_fp8(linear: nn.Linear) -> bool:
    """Return True for an FP8 Linear without adapters."""
    return getattr(linear, "multiplies_in_fp8", False) and not hasattr(linear, "lora_A")


def split_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Split an embedding by vocabulary, in place."""
    split_parameters(embedding, mesh, Shard(0))
    set_variant(embedding, VocabParallelEmbedding)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding split by vocabulary: tokens [batch, seq] -> [batch, seq / tp, hidden]."""

    def forward(self, tokens: Tensor) -> Tensor:
        mesh = self.weight.device_mesh
        # [vocab / tp, hidden]
        weight = self.weight.to_local()
        rows = tokens - mesh.get_local_rank() * len(weight)
        mine = (rows >= 0) & (rows < len(weight))
        # [batch, seq, hidden]
        x = torch.where(mine[..., None], F.embedding(rows * mine, weight), 0)
        _, scatter = collectives(mesh)
        return scatter(x)


# --- collectives of [batch, seq, hidden] along seq


def collectives(mesh: DeviceMesh) -> tuple[Callable, Callable]:
    """Return all_gather and reduce_scatter over `mesh`; each is the backward pass of the other.

    Both are functions of x and in_fp8=False: what the all-gather moves may be rounded to FP8.
    """
    size = mesh.size()
    name = mesh.get_group().group_name
    return (
        lambda x, in_fp8=False: AllGather.apply(x, size, name, in_fp8),
        lambda x, in_fp8=False: ReduceScatter.apply(x, size, name, in_fp8),
    )


class AllGather(torch.autograd.Function):
    """[batch, seq / tp, hidden] -> [batch, seq, hidden]. Backward sums the gradients of all ranks."""

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group = size, name
        return all_gather_fp8(x, size, name, E4M3) if in_fp8 else all_gather(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, *ctx.group), None, None, None


class ReduceScatter(torch.autograd.Function):
    """[batch, seq, hidden], one term of a sum over ranks -> [batch, seq / tp, hidden] of the sum."""

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group = size, name
        ctx.in_fp8 = in_fp8
        return reduce_scatter(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        if ctx.in_fp8:
            return all_gather_fp8(grad, *ctx.group, E5M2), None, None, None
        return all_gather(grad, *ctx.group), None, None, None


def all_gather_fp8(x: Tensor, size: int, name: str, dtype: torch.dtype) -> Tensor:
    """Gather [batch, seq / tp, hidden] as FP8; return [batch, seq, hidden] in the type of x.

    An FP8 product rounds the result once more, to the same FP8 numbers.
    """
    scale = power_of_two_scale(all_reduce(largest(x), "max", name), dtype)
    gathered = all_gather(cast(x, scale, dtype).view(torch.uint8), size, name)
    return dequantize(gathered.view(dtype), 1 / scale, x.dtype)
