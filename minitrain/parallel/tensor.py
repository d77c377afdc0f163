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

import warnings
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
        if name.endswith(column) and not hasattr(module, "own_rows"):
            split_parameters(module, mesh, Shard(0))
        elif name.endswith(row):
            split_parameters(module, mesh, Shard(1))
            module.register_forward_hook(partial(scatter_output, scatter))
        else:
            split_parameters(module, mesh, Replicate())
    for part in parts:
        part.register_forward_pre_hook(partial(gather_input, gather, row))
    block.register_forward_pre_hook(use_local_tensors)


def gather_input(gather: Callable, row: tuple[str, ...], part: Module, inputs: tuple) -> tuple:
    """Gather the input of a part, as a forward pre-hook. row: name suffixes of its row-parallel
    Linears.
    """
    first = (module for name, module in part.named_modules() if not name.endswith(row))
    in_fp8 = all(
        only_multiplies_in_fp8(module) for module in first if isinstance(module, nn.Linear)
    )
    return gather(inputs[0], in_fp8), *inputs[1:]


def scatter_output(scatter: Callable, last: nn.Linear, inputs: tuple, output: Tensor) -> Tensor:
    """Reduce-scatter the partial sums of a row-parallel Linear, as a forward hook."""
    return scatter(output, only_multiplies_in_fp8(last) and last.bias is None)


def only_multiplies_in_fp8(linear: nn.Linear) -> bool:
    return getattr(linear, "multiplies_in_fp8", False) and not hasattr(linear, "lora_A")


def split_embedding(embedding: nn.Embedding, mesh: DeviceMesh) -> None:
    """Split an embedding by vocabulary; it returns [batch, seq / tp, hidden]."""
    split_parameters(embedding, mesh, Shard(0))
    embedding.forward = partial(embed, embedding, mesh, collectives(mesh)[1])


def split_last_norm(norm: Module, mesh: DeviceMesh) -> None:
    """Let the norm before the head take [batch, seq / tp, hidden] and return [batch, seq,
    hidden].
    """
    gather, _ = collectives(mesh)
    split_parameters(norm, mesh, Replicate())
    norm.register_forward_pre_hook(use_local_tensors)
    norm.register_forward_hook(lambda module, inputs, output: gather(output))


def embed(embedding: nn.Embedding, mesh: DeviceMesh, scatter: Callable, tokens: Tensor) -> Tensor:
    """Embed those of `tokens` [batch, seq] that this rank has, add all ranks'. Returns [batch, seq
    / tp, hidden].
    """
    # [vocab / tp, hidden]
    weight = embedding.weight.to_local()
    rows = tokens - mesh.get_local_rank() * len(weight)
    mine = (rows >= 0) & (rows < len(weight))
    return scatter(torch.where(mine[..., None], F.embedding(rows * mine, weight), 0))


# ------------------------------------------------------------------------------------------------ asynchronous form


def overlap_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler cut a collective and the matrix product next to it into pieces, and overlap
    them (CUDA only).

    Holds for everything that this process compiles from now on. See `check_overlap`.
    """
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    # the option has no public name
    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 says that there is no need, and its pass still asks
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)


def check_overlap(step: Callable[[], list[Tensor]]) -> None:
    """Raises InputError if `step`, compiled, returns other tensors than without the compiler: 2.12
    was silently wrong.

    Other: norm(difference) / norm(expected) is above 0.05. bf16 differs by 0.01, a lost piece by
    far more.
    """
    with torch.compiler.set_stance("force_eager"):
        expected = step()
    for actual, right in zip(step(), expected, strict=True):
        error = ((actual - right).norm() / right.norm().clamp(min=1e-12)).item()
        if not error <= 0.05:
            raise InputError(
                f"parallel.async_tp=true: torch {torch.__version__} computes wrong results with it, off by {error:.1e} "
                f"relative to the synchronous ones (use false)"
            )


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


# The operators behind torch.distributed's functional collectives, whose public names differ between
# 2.11 and 2.13. With one row, the usual case in long training, gathering concatenates already: no
# copy is made to bring rows together. With more, these are the forms that the compiler's pass for
# `overlap_collectives` knows; with one, it finds those in front of a product in the backward pass,
# and those behind one in the forward pass.
_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, size: int, name: str) -> Tensor:
    batch, length, hidden = x.shape
    if batch > 1:
        return torch.cat(
            _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, name)).split(batch),
            dim=1,
        )
    row = _ops.wait_tensor(
        _ops.all_gather_into_tensor(x.contiguous().view(length, hidden), size, name)
    )
    return row.view(1, size * length, hidden)


def all_gather_fp8(x: Tensor, size: int, name: str, dtype: torch.dtype) -> Tensor:
    """What an FP8 product makes of the gathered x, in the type of x: rounding it once more, as that
    does, is exact.
    """
    amax = _ops.wait_tensor(_ops.all_reduce(largest(x), "max", name))
    scale = power_of_two_scale(amax, dtype)
    gathered = all_gather(cast(x, scale, dtype).view(torch.uint8), size, name)
    return dequantize(gathered.view(dtype), 1 / scale, x.dtype)


def reduce_scatter(x: Tensor, size: int, name: str) -> Tensor:
    batch, length, hidden = x.shape
    if batch > 1:
        parts = torch.cat(x.split(length // size, dim=1))
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", size, name))
    total = _ops.wait_tensor(
        _ops.reduce_scatter_tensor(x.contiguous().view(length, hidden), "sum", size, name)
    )
    # not registered as a view: FSDP warns of those where a pipeline's first stage is the embedding
    # and returns this
    return torch.ops.aten._unsafe_view(total, (1, length // size, hidden))
