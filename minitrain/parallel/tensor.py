"""Tensor and sequence parallelism: split each weight matrix of a block over tp ranks.

Attention and MLP each begin with column-parallel matrices (q, k, v; gate, up) and end with a
row-parallel one (o; down). Of a column-parallel matrix W [out, in] a rank holds some outputs: some
heads of attention, some channels of an MLP. It computes them for all tokens. Of a row-parallel
matrix it holds the inputs that belong to those heads or channels. Its product is one term of a sum
over ranks. Nothing is exchanged in between.

Norms and residuals treat each token by itself. There a rank holds seq / tp tokens of every sequence
(sequence parallelism). One reduce-scatter sums the terms and splits the sequence:

    forward pass                                              its backward pass
      norm                    [batch, seq / tp, hidden]       sum the weight's gradient over ranks
      all-gather              -> [batch, seq, hidden]         reduce-scatter
      q, k, v | gate, up      column-parallel, Shard(0)
      attention | activation  heads / tp | channels / tp
      o | down                row-parallel, Shard(1)
      reduce-scatter          -> [batch, seq / tp, hidden]    all-gather

Cost per layer: 2 all-gathers and 2 reduce-scatters in the forward pass, and as many in the backward
pass. Each moves (tp - 1) / tp of the bytes of [batch, seq, hidden] per rank. Embedding and head
together add one of each to either pass. Full recomputation runs the collectives of the forward pass
again, except a block's last reduce-scatter, whose output the backward pass does not need. In
compiled blocks, gradients of weights are computed during three of the four collectives of the
backward pass (overlap.py).

Embedding and head are split by vocabulary. A rank embeds the tokens of its part of the vocabulary,
writes 0 for all others, and a reduce-scatter sums over ranks. The head needs an all-gather of the
last norm's output. Its loss exchanges three numbers per token (training/loss.py), never logits.

The other parts of a decoder:

    latent attention  The down-projections q_a_proj and kv_a_proj_with_mqa are replicated, and
                      compute this rank's tokens. Their narrow outputs are gathered: in DeepSeek-V3,
                      0.3 of the bytes of hidden states. All else is split by heads.
    Mamba-2           Split by groups of heads. Convolution and norm stay within a group.
    gated DeltaNet    The same, by heads of keys, each with its heads of values.
    experts           Every expert is split by channels. The ranks gather tokens, expert indices and
                      router weights. Router and latent projections are replicated, and compute this
                      rank's tokens. Expert parallelism splits by expert instead: then each rank
                      dispatches its own tokens, and nothing is gathered here.
    shared experts    Split as an MLP, with its own all-gather and reduce-scatter.

A norm over all heads of queries or keys sums their squares over ranks, one number per token.

With more ranks than key/value heads, k_proj and v_proj are replicated, and a rank uses the rows of
the one head that its queries attend to. The bias of a row-parallel matrix is replicated, and each
rank adds 1 / tp of it. The gradient of a replicated parameter is a sum over ranks: DTensor marks it
as Partial, and FSDP reduces it.

Adapters (models/lora.py) are split with their Linear: of a column-parallel one lora_B is Shard(0)
and lora_A replicated, of a row-parallel one lora_A is Shard(1) and lora_B replicated. The update of
the latter is a term of the same sum, so no further collective is needed.

With FP8 (models/fp8.py) of one scale per tensor, an all-gather moves one byte per element if only
FP8 products read its result: inputs of q, k, v, gate and up as e4m3, gradients of the outputs of o
and down as e5m2. Adapters read the input unrounded, and a bias of o or down sums those gradients,
so with either the all-gather is not in FP8. Nor is it with scales of rows or blocks, of which one
product has others than the next. A maximum over the ranks, one number, gives all of them one scale.
So each rank rounds only its own tokens, and gets the FP8 numbers that one process would get.

Parameters are DTensors, and modules compute with local tensors (parts.py).
Left out: fewer groups of recurrent mixers than ranks, and uneven shards;
run/config/layout_checks.py refuses both.
Sources: Megatron-LM (Shoeybi et al. 2019); sequence parallelism (Korthikanti et al. 2022).
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.models.quantize import E4M3, E5M2, cast, dequantize, largest, power_of_two_scale
from minitrain.models.variants import set_variant
from minitrain.models.video import upcast
from minitrain.parallel import collectives
from minitrain.parallel.parts import split_parameters, use_local_tensors


def split_block(
    block: Module,
    mesh: DeviceMesh,
    column: tuple[str, ...],
    row: tuple[str, ...],
    parts: Iterable[Module],
) -> None:
    """Split a block in place over the 1-D `mesh`.

    Afterwards it takes and returns [batch, seq / tp, hidden].
    column, row: suffixes of the names of column-parallel and row-parallel modules. Others are
        replicated. Raises InputError for a suffix that no name has.
    parts: modules of the block, such as attention and MLP. Each has one row-parallel Linear, and
        two exchange points: `gather` takes its input, `reduce` its output.
    """
    for suffix in set(column + row) - set(present(block, column + row)):
        raise InputError(
            f"no module of a {type(block).__name__} has a name that ends in {suffix!r}"
        )
    all_gather, reduce_scatter = along_sequence(mesh)
    for name, module in block.named_modules():
        placement = Replicate()
        # local_rows: there are fewer key/value heads than ranks, see `share_heads`
        if name.endswith(column) and not hasattr(module, "local_rows"):
            placement = Shard(0)
        elif name.endswith(row):
            placement = Shard(1)
        split_parameters(module, mesh, placement)
    for part in parts:
        # the last one is row-parallel; the others read what `gather` returns
        linears = {name: x for name, x in part.named_modules() if isinstance(x, nn.Linear)}
        last = linears.pop(next(name for name in linears if name.endswith(row)))
        in_fp8 = all(map(only_multiplies_in_fp8, linears.values()))
        part.gather = partial(all_gather, in_fp8=in_fp8)
        # the gradient of a bias is a sum of the gradients that `reduce` gathers
        in_fp8 = only_multiplies_in_fp8(last) and last.bias is None
        part.reduce = partial(reduce_scatter, in_fp8=in_fp8)
    # FSDP's own hook, which gathers the weights, goes before it
    block.register_forward_pre_hook(use_local_tensors)


def present(block: Module, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """Return those suffixes that names of the block's modules end in: blocks differ in a hybrid."""
    names = [name for name, _ in block.named_modules()]
    return tuple(each for each in suffixes if any(name.endswith(each) for name in names))


def only_multiplies_in_fp8(linear: nn.Linear) -> bool:
    """Return True for an FP8 Linear without adapters, which would read its input unrounded."""
    return getattr(linear, "multiplies_in_fp8", False) and not hasattr(linear, "lora_A")


def split_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Split an embedding by vocabulary, in place."""
    split_parameters(embedding, mesh, Shard(0))
    set_variant(embedding, VocabParallelEmbedding)


class VocabParallelEmbedding(nn.Embedding):
    """An embedding split by vocabulary: tokens [batch, seq] -> [batch, seq / tp, hidden]."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return [batch, seq / tp, hidden]. tokens: int [batch, seq], the same on all ranks."""
        mesh = self.weight.device_mesh
        # [vocab / tp, hidden]
        weight = self.weight.to_local()
        # [batch, seq]: the row of `weight` for each token, outside of it for other ranks' tokens
        rows = tokens - mesh.get_local_rank() * len(weight)
        mine = (rows >= 0) & (rows < len(weight))
        # [batch, seq, hidden]: other ranks' tokens look up row 0, then become 0
        x = torch.where(mine[..., None], F.embedding(rows * mine, weight), 0)
        _, reduce_scatter = along_sequence(mesh)
        return reduce_scatter(x)


def norm_over_heads(norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
    """Let a norm over the heads of a token know those of all ranks, in place."""
    set_variant(norm, RMSNormOverHeads)
    norm.group_name = mesh.get_group().group_name
    norm.ranks = mesh.size()


class RMSNormOverHeads(nn.RMSNorm):
    """RMSNorm in fp32 over the heads of all ranks. x: [batch, seq, dim / tp], this rank's heads.

    If several ranks have the same head, each counts it: the mean is over as many copies of all.
    """

    # the process group of the ranks, and their number
    group_name: str
    ranks: int

    def forward(self, x: Tensor) -> Tensor:
        # [batch, seq, 1]
        squares = upcast(x).square().sum(-1, keepdim=True)
        mean = AllReduce.apply(squares, self.group_name) / (x.shape[-1] * self.ranks)
        return (x * torch.rsqrt(mean + self.eps)).type_as(x) * self.weight


class AllReduce(torch.autograd.Function):
    """Sum x [...] over ranks. Each uses the sum for its own heads, so gradients are summed too."""

    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return collectives.all_reduce(x, "sum", name)

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_reduce(grad, "sum", ctx.name), None


# --- collectives of [batch, seq, hidden] along seq


def along_sequence(mesh: DeviceMesh) -> tuple[Callable, Callable]:
    """Return differentiable all_gather(x, in_fp8=False) and reduce_scatter(x, in_fp8=False).

    Each is the backward pass of the other. Shapes: see `AllGather` and `ReduceScatter`.
    in_fp8: round what the all-gather moves to FP8, in the forward pass of the one and in the
        backward pass of the other.
    """
    size = mesh.size()
    name = mesh.get_group().group_name
    return (
        lambda x, in_fp8=False: AllGather.apply(x, size, name, in_fp8),
        lambda x, in_fp8=False: ReduceScatter.apply(x, size, name, in_fp8),
    )


class AllGather(torch.autograd.Function):
    """[batch, seq / tp, hidden] -> [batch, seq, hidden]. Backward sums all ranks' gradients."""

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group = size, name
        return (
            all_gather_fp8(x, size, name, E4M3)
            if in_fp8
            else collectives.all_gather(x, size, name)
        )

    @staticmethod
    def backward(ctx, grad):
        return collectives.reduce_scatter(grad, *ctx.group), None, None, None


class ReduceScatter(torch.autograd.Function):
    """[batch, seq, hidden], one term of a sum over ranks -> the sum's [batch, seq / tp, hidden]."""

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group = size, name
        ctx.in_fp8 = in_fp8
        return collectives.reduce_scatter(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        # grad: [batch, seq / tp, hidden]; e5m2, as for all gradients in FP8 products
        if ctx.in_fp8:
            return all_gather_fp8(grad, *ctx.group, E5M2), None, None, None
        return collectives.all_gather(grad, *ctx.group), None, None, None


def all_gather_fp8(x: Tensor, size: int, name: str, dtype: torch.dtype) -> Tensor:
    """Gather [batch, seq / tp, hidden] in FP8; return [batch, seq, hidden] in the type of x.

    The FP8 product that reads the result quantizes it again. That changes no value, since both
    scales are powers of two.
    """
    # one scale for all ranks
    scale = power_of_two_scale(collectives.all_reduce(largest(x), "max", name), dtype)
    # as bytes: not every backend knows FP8
    gathered = collectives.all_gather(cast(x, scale, dtype).view(torch.uint8), size, name)
    return dequantize(gathered.view(dtype), 1 / scale, x.dtype)
