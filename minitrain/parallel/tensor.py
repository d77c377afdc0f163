"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022): every matrix is
split over tp ranks.

In a block, the first matrices (q, k, v, gate, up) are split by output (column-parallel): each rank
has some heads, or some channels of the MLP, and computes them from all tokens. The last ones (o,
down) are split by input (row-parallel), so a rank's product is one term of a sum over ranks. In
between nothing is exchanged. Norms and the residual stream treat each token by itself, so there a
rank has seq / tp of every row instead; the sum over ranks and that split are one reduce-scatter.

    [batch, seq / tp, hidden]                                            in the backward pass
      norm                      every rank has the whole weight          its gradient is a sum over ranks
      all-gather                -> [batch, seq, hidden]                  reduce-scatter
      q, k, v | gate, up        rows of the weight, Shard(0)
      attention | activation    heads / tp | channels / tp
      o | down                  columns of the weight, Shard(1)
      reduce-scatter            -> [batch, seq / tp, hidden]             all-gather

Embedding and head are split by vocabulary. A rank embeds the tokens that it has rows for, and the
reduce-scatter adds the others' zeros. The last norm's output is gathered for the head, whose loss
needs three numbers per token from each rank (training/loss.py), never the logits of the whole
vocabulary.

Cost per layer: 2 all-gathers and 2 reduce-scatters forward and the same backward, each moving (tp -
1) / tp of the bytes of [batch, seq, hidden] per rank; around the layers, one of each per direction.
Full recomputation repeats the forward's, but for the last reduce-scatter. Gradients of norms are
all-reduced whenever gradients are reduced: they are marked as partial sums, and FSDP adds them up.

Other parts of a block follow the same scheme, which for each starts and ends with a rank's own
tokens:

    latent attention   projections to latents and their norms are whole, and latents are gathered, not what they are
                       made from: 0.3 of the bytes in DeepSeek-V3; from there on, heads / tp
    Mamba-2            groups of heads / tp, with all that they need; the convolution and the norm stay within a group
    experts            every rank has channels / tp of all experts; tokens are gathered with the experts they go to. The
                       router, and projections to what experts see, are whole and get a rank's own
                       tokens. So do experts under expert parallelism, which has then split them
                       already
    shared experts     as an MLP, with an all-gather and a reduce-scatter of their own

If there are more ranks than key-value heads, k and v are whole on all of them, and each uses the
rows of one head, the one that its queries attend to; gradients of these rows are sums over the
ranks that use them.

Biases of matrices that are split by input must be added once: every rank adds 1 / tp of them.

With FP8 (models/fp8.py) an all-gather moves half the bytes where nothing reads what comes but FP8
products: inputs of q, k, v, gate and up go as e4m3, gradients of what o and down return as e5m2,
unless there are adapters, or a bias whose gradient is their sum. The ranks first compare their
largest elements, one number each, for the scale that the whole tensor would have. So the products
get the same FP8 numbers as without, and each rank rounds only its own tokens.

Parameters are DTensors, and modules compute with their local tensors (parts.py). Left out: fewer
Mamba groups than ranks, and uneven parts, which run/parallel_checks.py refuses.
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
    """Split a block in place over the 1-D `mesh`; between blocks hidden states are [batch, seq /
    tp, hidden] then.

    column, row: how the names of column-parallel and row-parallel modules end; what is not named
    stays whole. Outputs of row-parallel modules are terms of a sum over ranks, which a
    reduce-scatter adds up.
    parts: those of the block, such as attention and MLP, whose first input is gathered: [batch,
    seq, hidden].
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
        linears = {n: each for n, each in part.named_modules() if isinstance(each, nn.Linear)}
        last = linears.pop(next(name for name in linears if name.endswith(row)))
        in_fp8 = all(map(only_multiplies_in_fp8, linears.values()))
        part.gather = partial(gather, in_fp8=in_fp8)
        part.reduce = partial(scatter, in_fp8=only_multiplies_in_fp8(last) and last.bias is None)
    block.register_forward_pre_hook(use_local_tensors)


def only_multiplies_in_fp8(linear: nn.Linear) -> bool:
    """Return True for a Linear whose products are all in FP8: one without adapters."""
    return getattr(linear, "multiplies_in_fp8", False) and not hasattr(linear, "lora_A")


class VocabParallelEmbedding(nn.Embedding):
    """An embedding that is split by vocabulary: tokens [batch, seq] -> [batch, seq / tp, hidden]."""

    def forward(self, tokens: Tensor) -> Tensor:
        mesh = self.weight.device_mesh
        # [vocab / tp, hidden]
        weight = self.weight.to_local()
        rows = tokens - mesh.get_local_rank() * len(weight)
        mine = (rows >= 0) & (rows < len(weight))
        # [batch, seq, hidden], 0 for the tokens of other ranks, which the sum over ranks adds
        x = torch.where(mine[..., None], F.embedding(rows * mine, weight), 0)
        return collectives(mesh)[1](x)


def split_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Make an embedding a `VocabParallelEmbedding`, in place."""
    split_parameters(embedding, mesh, Shard(0))
    set_variant(embedding, VocabParallelEmbedding)


# ------------------------------------------------------------------------------------------------------- collectives


def collectives(mesh: DeviceMesh) -> tuple[Callable, Callable]:
    """all_gather and reduce_scatter of dimension 1 over `mesh`, both differentiable; each is the
    other's backward.

    A second argument of either says whether all that reads what its all-gather returns are FP8
    products.
    """
    size = mesh.size()
    name = mesh.get_group().group_name
    return (
        lambda x, in_fp8=False: AllGather.apply(x, size, name, in_fp8),
        lambda x, in_fp8=False: ReduceScatter.apply(x, size, name, in_fp8),
    )


class AllGather(torch.autograd.Function):
    """[batch, seq / tp, hidden] -> [batch, seq, hidden]. What a rank computes from it gives a part
    of the gradient.
    """

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group = size, name
        return all_gather_fp8(x, size, name, E4M3) if in_fp8 else all_gather(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, *ctx.group), None, None, None


class ReduceScatter(torch.autograd.Function):
    """[batch, seq, hidden], a term of the sum over ranks -> [batch, seq / tp, hidden], of the
    sum.
    """

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group = (size, name)
        ctx.in_fp8 = in_fp8
        return reduce_scatter(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        gathered = (
            all_gather_fp8(grad, *ctx.group, E5M2) if ctx.in_fp8 else all_gather(grad, *ctx.group)
        )
        return gathered, None, None, None


def all_gather_fp8(x: Tensor, size: int, name: str, dtype: torch.dtype) -> Tensor:
    """What an FP8 product makes of the gathered x, in the type of x: rounding it once more, as that
    does, is exact.
    """
    amax = all_reduce(largest(x), "max", name)
    scale = power_of_two_scale(amax, dtype)
    gathered = all_gather(cast(x, scale, dtype).view(torch.uint8), size, name)
    return dequantize(gathered.view(dtype), 1 / scale, x.dtype)
