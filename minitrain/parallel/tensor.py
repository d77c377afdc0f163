"""Tensor and sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022): every matrix is split over tp ranks.

In a block, the first matrices (q, k, v, gate, up) are split by output (column-parallel): each rank has some heads, or
some channels of the MLP, and computes them from all tokens. The last ones (o, down) are split by input (row-parallel),
so a rank's product is one term of a sum over ranks. In between nothing is exchanged. Norms and the residual stream
treat each token by itself, so there a rank has seq / tp of every row instead; the sum over ranks and that split are one
reduce-scatter.

    [batch, seq / tp, hidden]                                            in the backward pass
      norm                      every rank has the whole weight          its gradient is a sum over ranks
      all-gather                -> [batch, seq, hidden]                  reduce-scatter
      q, k, v | gate, up        rows of the weight, Shard(0)
      attention | activation    heads / tp | channels / tp
      o | down                  columns of the weight, Shard(1)
      reduce-scatter            -> [batch, seq / tp, hidden]             all-gather

Embedding and head are split by vocabulary. A rank embeds the tokens that it has rows for, and the reduce-scatter adds
the others' zeros. The last norm's output is gathered for the head, whose loss needs three numbers per token from each
rank (training/loss.py), never the logits of the whole vocabulary.

Cost per layer: 2 all-gathers and 2 reduce-scatters forward and the same backward, each moving (tp - 1) / tp of the
bytes of [batch, seq, hidden] per rank; around the layers, one of each per direction. Full recomputation repeats the
forward's, but for the last reduce-scatter. Gradients of norms are all-reduced whenever gradients are reduced: they are
marked as partial sums, and FSDP adds them up.

Other parts of a block follow the same scheme, which for each starts and ends with a rank's own tokens:

    latent attention   projections to latents and their norms are whole, and latents are gathered, not what they are
                       made from: 0.3 of the bytes in DeepSeek-V3; from there on, heads / tp
    Mamba-2            groups of heads / tp, with all that they need; the convolution and the norm stay within a group
    experts            every rank has channels / tp of all experts; tokens are gathered with the experts they go to. The
                       router, and projections to what experts see, are whole and get a rank's own tokens. So do
                       experts under expert parallelism, which has then split them already
    shared experts     as an MLP, with an all-gather and a reduce-scatter of their own

If there are more ranks than key-value heads, k and v are whole on all of them, and each uses the rows of one head, the
one that its queries attend to; gradients of these rows are sums over the ranks that use them.

Biases of matrices that are split by input must be added once: every rank adds 1 / tp of them.

With FP8 (models/fp8.py) an all-gather moves half the bytes where nothing reads what comes but FP8 products: inputs of
q, k, v, gate and up go as e4m3, gradients of what o and down return as e5m2, unless there are adapters, or a bias whose
gradient is their sum. The ranks first compare their largest elements, one number each, for the scale that the whole
tensor would have. So the products get the same FP8 numbers as without, and each rank rounds only its own tokens.

Parameters are DTensors, which FSDP shards once more and checkpoints store whole. But modules compute with their rank's
parts, plain tensors, and the collectives stand between modules: no operation is dispatched through DTensor on the host,
and a block compiles as one graph. Left out: fewer Mamba groups than ranks, and uneven parts, which run/config_checks.py
refuses.
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.models.attention import GroupedQueryAttention
from minitrain.models.fp8 import E4M3, E5M2, Fp8Linear, cast, dequantize, largest, power_of_two_scale
from minitrain.models.mla import LatentAttention
from minitrain.models.moe import Experts, MoE
from minitrain.parallel.mesh import own_stretch

BY_OUTPUT = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj",
    "q_b_proj", "kv_b_proj",  # of latent attention
    "mamba.in_proj", "mamba.conv1d", "mamba.dynamics", "mamba.norm",
    "self_attn",  # its own parameters are sinks
)  # fmt: skip
BY_INPUT = ("o_proj", "down_proj", "out_proj")
TO_LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
RANK_DIM = {"lora_A": -2, "lora_B": -1}  # of adapters, which is not split where the matrix is


def tensor_parallel(model: Module, mesh: DeviceMesh) -> None:
    """Split a decoder, or one of its pipeline stages, in place over the 1-D `mesh`. To be followed by FSDP.

    Between blocks, and between stages, hidden states are [batch, seq / tp, hidden] afterwards. Tokens, labels,
    positions and the head's input stay whole; the head's weight is a DTensor, split by vocabulary, so the model
    needs a `head` that takes one (training/loss.py).
    """
    gather, scatter = collectives(mesh)
    for block in model.blocks:
        split_block(block, mesh, gather, scatter)
    outer = model.model
    if "embed_tokens" in outer:
        split_parameters(outer["embed_tokens"], mesh, Shard(0))
        outer["embed_tokens"].forward = partial(embed, outer["embed_tokens"], mesh, scatter)
    if "embed_positions" in outer:
        split_parameters(outer["embed_positions"], mesh, Replicate())
        outer["embed_positions"].forward = partial(embed_positions, outer["embed_positions"], mesh)
    if "norm" in outer:
        split_parameters(outer["norm"], mesh, Replicate())
        outer["norm"].register_forward_pre_hook(use_parts)
        outer["norm"].register_forward_hook(lambda module, inputs, output: gather(output))
    if model.lm_head is not None:
        split_parameters(model.lm_head, mesh, Shard(0))
    model.sequence_split = mesh.size()


def split_block(block: Module, mesh: DeviceMesh, gather: Callable, scatter: Callable) -> None:
    if isinstance(block.self_attn, GroupedQueryAttention):
        share_heads(block.self_attn, mesh)
    split_modules(block, mesh, scatter, BY_OUTPUT, BY_INPUT)
    for name, module in block.named_modules():
        if name.endswith(TO_LATENTS):
            module.register_forward_hook(lambda module, inputs, output: gather(output))
    if isinstance(block.mlp, MoE):
        split_experts(block.mlp, mesh, gather, scatter)
        block.mlp.register_forward_pre_hook(partial(use_own_documents, mesh))
    dense = block.mlp.shared_experts if isinstance(block.mlp, MoE) else block.mlp
    for part in (block.self_attn, block.mamba, dense):
        if part is not None and not isinstance(part, LatentAttention):
            part.register_forward_pre_hook(partial(gather_input, gather, BY_INPUT))
    block.register_forward_pre_hook(use_parts)


def gather_input(gather: Callable, last: tuple[str, ...], part: Module, inputs: tuple) -> tuple:
    """A forward pre-hook of attention, Mamba-2 or an MLP. last: how the names of Linears end that read no input."""
    first = (module for name, module in part.named_modules() if not name.endswith(last))
    in_fp8 = all(only_multiplies_in_fp8(module) for module in first if isinstance(module, nn.Linear))
    return gather(inputs[0], in_fp8), *inputs[1:]


def scatter_output(scatter: Callable, last: nn.Linear, inputs: tuple, output: Tensor) -> Tensor:
    """A forward hook of what is split by input."""
    return scatter(output, only_multiplies_in_fp8(last) and last.bias is None)


def only_multiplies_in_fp8(linear: nn.Linear) -> bool:
    return isinstance(linear, Fp8Linear) and not hasattr(linear, "lora_A")


def share_heads(attention: GroupedQueryAttention, mesh: DeviceMesh) -> None:
    """Where ranks outnumber key-value heads, let those that have one head's queries use the same rows of k and v."""
    heads = len(attention.k_proj.weight) // attention.head_dim
    if mesh.size() > heads:
        first = mesh.get_local_rank() * heads // mesh.size() * attention.head_dim
        for module in (attention.k_proj, attention.v_proj):
            module.own_rows = slice(first, first + attention.head_dim)


def split_modules(
    block: Module, mesh: DeviceMesh, scatter: Callable, by_output: tuple[str, ...], by_input: tuple[str, ...]
) -> None:
    """Split the parameters of all modules but experts, as the ends of their names say; what is not named stays whole.

    Outputs of what is split by input are terms of a sum over ranks, which `scatter` adds up.
    """
    for name, module in block.named_modules():
        if name.endswith(by_output) and not hasattr(module, "own_rows"):
            split_parameters(module, mesh, Shard(0))
        elif name.endswith(by_input):
            split_parameters(module, mesh, Shard(1))
            module.register_forward_hook(partial(scatter_output, scatter))
        elif not isinstance(module, Experts):
            split_parameters(module, mesh, Replicate())


def split_experts(moe: MoE, mesh: DeviceMesh, gather: Callable, scatter: Callable) -> None:
    """Split the channels of all experts, unless expert parallelism has split the experts already."""
    experts = moe.experts
    if not isinstance(experts.down_proj, DTensor):
        split_parameters(experts, mesh, Shard(1), experts.first)
        split_parameters(experts, mesh, Shard(2), "down_proj")
        moe.dispatch = partial(dispatch_to_all, moe.dispatch, gather, scatter)


def use_own_documents(mesh: DeviceMesh, moe: MoE, inputs: tuple[Tensor, Tensor | None]) -> tuple | None:
    """A forward pre-hook: of the numbers of whole rows, [batch, seq], give the router those of this rank's tokens."""
    x, documents = inputs
    return None if documents is None else (x, own_stretch(mesh, documents))


def dispatch_to_all(
    dispatch: Callable, gather: Callable, scatter: Callable, x: Tensor, indices: Tensor, weights: Tensor,
    experts: Experts,
) -> Tensor:  # fmt: skip
    """`dispatch` of all ranks' tokens, whose results are terms of a sum. x: [tokens, width], this rank's, as returned.

    indices, weights: [tokens, top_k].
    """
    x, indices, weights = (gather(tensor[None])[0] for tensor in (x, indices, weights))
    return scatter(dispatch(x, indices, weights, experts)[None])[0]


def split_parameters(module: Module, mesh: DeviceMesh, placement: Placement, start: str = "") -> None:
    """Replace the module's own parameters, the same on all ranks, by DTensors that are placed so on `mesh`.

    start: only those whose names begin with it. Two kinds stay whole: of an adapter, the matrix whose split dimension
    is its rank; and a bias that lacks the split dimension, which every rank adds: `module.added_by_all` is its name.
    """
    split = placement.dim if isinstance(placement, Shard) else None
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not name.startswith(start):
            continue
        lacks_dim = split == parameter.ndim
        is_rank = name[-6:] in RANK_DIM and split == parameter.ndim + RANK_DIM[name[-6:]]
        if lacks_dim:
            module.added_by_all = name
        where = [Replicate() if lacks_dim or is_rank else placement]
        part = distribute_tensor(parameter.detach(), mesh, where, src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))


@torch.compiler.disable  # so that compiled graphs take plain tensors: in torch 2.13 some fail on DTensors
def use_parts(unit: Module, inputs: tuple) -> None:
    """A forward pre-hook, after FSDP's: give the modules of `unit` plain tensors, this rank's parts, as parameters.

    They are attributes that hide the parameters of the same names. They stay, for recomputation in the backward pass,
    and are views of what FSDP frees and gathers again.
    """
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # all ranks have such a parameter whole, and see its gradient for their own tokens or heads
            gradients = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
            part = parameter.to_local(grad_placements=gradients)
            if hasattr(module, "own_rows") and not name.endswith("lora_A"):
                part = part[module.own_rows]
            is_term = name == getattr(module, "added_by_all", None)
            module.__dict__[name] = part / parameter.device_mesh.size() if is_term else part


def embed(embedding: nn.Embedding, mesh: DeviceMesh, scatter: Callable, tokens: Tensor) -> Tensor:
    """Embed those of `tokens` [batch, seq] that this rank has, add all ranks'. Returns [batch, seq / tp, hidden]."""
    weight = embedding.weight.to_local()  # [vocab / tp, hidden]
    rows = tokens - mesh.get_local_rank() * len(weight)
    mine = (rows >= 0) & (rows < len(weight))
    return scatter(torch.where(mine[..., None], F.embedding(rows * mine, weight), 0))


def embed_positions(embedding: nn.Embedding, mesh: DeviceMesh, positions: Tensor) -> Tensor:
    """positions: [batch or 1, seq]. Returns the embeddings of this rank's: [batch or 1, seq / tp, hidden]."""
    return F.embedding(own_stretch(mesh, positions), embedding.weight.to_local(grad_placements=[Partial()]))


# ------------------------------------------------------------------------------------------------ asynchronous form


def overlap_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler cut a collective and the matrix product next to it into pieces, and overlap them (CUDA only).

    Holds for everything that this process compiles from now on. See `check_overlap`.
    """
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True  # the option has no public name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 says that there is no need, and its pass still asks
        enable_symm_mem_for_group(mesh.get_group().group_name)


def check_overlap(step: Callable[[], list[Tensor]]) -> None:
    """Raises InputError if `step`, compiled, returns other tensors than without the compiler: 2.12 was silently wrong.

    Other: norm(difference) / norm(expected) is above 0.05. bf16 differs by 0.01, a lost piece by far more.
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
    """all_gather and reduce_scatter of dimension 1 over `mesh`, both differentiable; each is the other's backward.

    A second argument of either says whether all that reads what its all-gather returns are FP8 products.
    """
    size, name = mesh.size(), mesh.get_group().group_name
    return (
        lambda x, in_fp8=False: AllGather.apply(x, size, name, in_fp8),
        lambda x, in_fp8=False: ReduceScatter.apply(x, size, name, in_fp8),
    )


class AllGather(torch.autograd.Function):
    """[batch, seq / tp, hidden] -> [batch, seq, hidden]. What a rank computes from it gives a part of the gradient."""

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group = size, name
        return all_gather_fp8(x, size, name, E4M3) if in_fp8 else all_gather(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, *ctx.group), None, None, None


class ReduceScatter(torch.autograd.Function):
    """[batch, seq, hidden], a term of the sum over ranks -> [batch, seq / tp, hidden], of the sum."""

    @staticmethod
    def forward(ctx, x, size, name, in_fp8):
        ctx.group, ctx.in_fp8 = (size, name), in_fp8
        return reduce_scatter(x, size, name)

    @staticmethod
    def backward(ctx, grad):
        gathered = all_gather_fp8(grad, *ctx.group, E5M2) if ctx.in_fp8 else all_gather(grad, *ctx.group)
        return gathered, None, None, None


# The operators behind torch.distributed's functional collectives, whose public names differ between 2.11 and 2.13.
# With one row, the usual case in long training, gathering concatenates already: no copy is made to bring rows together.
# With more, these are the forms that the compiler's pass for `overlap_collectives` knows; with one, it finds those in
# front of a product in the backward pass, and those behind one in the forward pass.
_ops = torch.ops._c10d_functional


def all_gather(x: Tensor, size: int, name: str) -> Tensor:
    batch, length, hidden = x.shape
    if batch > 1:
        return torch.cat(_ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, name)).split(batch), dim=1)
    row = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous().view(length, hidden), size, name))
    return row.view(1, size * length, hidden)


def all_gather_fp8(x: Tensor, size: int, name: str, dtype: torch.dtype) -> Tensor:
    """What an FP8 product makes of the gathered x, in the type of x: rounding it once more, as that does, is exact."""
    amax = _ops.wait_tensor(_ops.all_reduce(largest(x), "max", name))
    scale = power_of_two_scale(amax, dtype)
    gathered = all_gather(cast(x, scale, dtype).view(torch.uint8), size, name)
    return dequantize(gathered.view(dtype), 1 / scale, x.dtype)


def reduce_scatter(x: Tensor, size: int, name: str) -> Tensor:
    batch, length, hidden = x.shape
    if batch > 1:
        parts = torch.cat(x.split(length // size, dim=1))
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", size, name))
    total = _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous().view(length, hidden), "sum", size, name))
    # not registered as a view: FSDP warns of those where a pipeline's first stage is the embedding and returns this
    return torch.ops.aten._unsafe_view(total, (1, length // size, hidden))
