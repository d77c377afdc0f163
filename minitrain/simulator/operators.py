"""Derive the cost of an operator call (kind of kernel, FLOPs, bytes) from its name and shapes.

Views and allocations cost nothing.
"""

from collections.abc import Callable
from math import ceil, prod

import torch
from torch import Tensor

# no public names
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import minitrain.models.fp8
import minitrain.models.lora
import minitrain.models.merged_attention  # noqa: F401  these three files define operators
from minitrain.errors import InputError

aten = torch.ops.aten
# operators that read only as many rows of their large operand as they write
ROWS_READ = ("embedding", "index_select", "gather", "index", "scatter", "scatter_add")
ALLOCATING = ("set_", "resize_", "_unsafe_view", "_reshape_alias")


def wrapped_operator(
    op: HigherOrderOperator | OpOverload, args: tuple
) -> tuple[OpOverload, tuple]:
    """Return the operator that a higher-order operator runs, with its arguments.

    Others are returned unchanged. Recomputation wraps operators that draw random numbers in such
    operators, which save or restore the random state (run_and_save_rng_state).
    """
    if not isinstance(op, HigherOrderOperator):
        return op, args
    places = [place for place, value in enumerate(args) if isinstance(value, OpOverload)]
    if len(places) != 1:
        raise InputError(
            f"--simulate does not know what the operator {op} costs (use compile=false)"
        )
    return args[places[0]], args[places[0] + 1 :]


def is_free(op: OpOverload) -> bool:
    """Return whether an operator moves no data: views, profiler marks, `item()`."""
    infos = [result.alias_info for result in op._schema.returns]
    if infos and all(info is not None and not info.is_write for info in infos):
        return True
    return op.namespace in ("profiler", "prim") or op.__name__.startswith("_local_scalar")


def is_allocation(name: str) -> bool:
    return name.startswith(("empty", "new_empty")) or name in ALLOCATING


def tensors(tree, kind: type = Tensor) -> list:
    """Return the tensors, or the objects of another `kind`, in nested lists, tuples and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, kind)]


def storage_address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage object. Fake tensors have no data whose address would do."""
    return storage._cdata


def argument_names(op: OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def written_arguments(op: OpOverload, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors that the operator changes in place."""
    schema = op._schema.arguments
    given = {a.name: value for a, value in zip(schema, args, strict=False)} | kwargs
    changed = [given.get(a.name) for a in schema if a.alias_info and a.alias_info.is_write]
    return tensors(changed)


def traffic(tensor: Tensor) -> int:
    """Return the bytes moved by reading or writing a tensor; expanded elements count once."""
    # a dimension with stride 0 repeats the same elements
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(n for n, stride in strides if stride) * tensor.element_size()


def operator_work(op: OpOverload, name: str, args, kwargs, out) -> dict[str, object]:
    """Return the kind and FLOPs of an Event, and its sizes if its cost depends on them."""
    packet = op.overloadpacket
    if packet in FACTORS:
        # [..., m, k] and [..., k, n]
        a, b = FACTORS[packet](*args)
        batch = len(a) if a.dim() == 3 else 1
        m, k = a.shape[-2:]
        n = b.shape[-1]
        kind = "gemm"
        sizes = batch, m, n, k
        if packet in (aten._grouped_mm, torch.ops.minitrain.scaled_grouped_mm):
            kind = "grouped"
            experts = len(b if b.dim() == 3 else out)
            # rows are grouped by expert: forward pass, or gradient of the input
            sizes = experts, ceil(m / experts), n, k
            if b.dim() == 2:
                # the inner dimension is grouped by expert: gradient of the stacked weights
                sizes = experts, m, n, ceil(k / experts)
        return {"kind": kind, "flops": 2 * batch * m * n * k, "sizes": sizes}
    if packet in ATTENTION_WORK:
        return ATTENTION_WORK[packet](*args)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=out)
        return {"kind": "attention" if "attention" in name else "gemm", "flops": flops}
    return {"kind": "memory", "flops": 0}


# matrix product -> function that picks the two factors among its arguments
FACTORS: dict[object, Callable] = {
    **dict.fromkeys(
        (aten.mm, aten.bmm, aten._grouped_mm, aten._scaled_mm, torch.ops.minitrain.scaled_mm),
        lambda a, b, *_: (a, b),
    ),
    # both factors sum over their columns
    torch.ops.minitrain.scaled_grouped_mm: lambda a, b, *_: (a, b.mT),
    # addmm_ computes the head's weight gradient in fp32
    **dict.fromkeys(
        (aten.addmm, aten.addmm_, aten.baddbmm, torch.ops.minitrain.add_product),
        lambda total, a, b, *_: (a, b),
    ),
    torch.ops.minitrain.linear_fp32: lambda x, weight: (x, weight.mT),
}


def attention_work(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    pairs: float | None = None,
    backward: bool = False,
) -> dict[str, object]:
    """Return the kind, FLOPs, sizes and form of an attention Event.

    q, k, v: [batch, heads, seq, head_dim].
    pairs: query-key pairs per row that FlexAttention's mask allows. None for plain attention: all
        pairs, or half of them if causal.
    The backward pass has five matrix products: the scores again, and the gradients of probabilities,
    values, queries and keys.
    """
    rows, heads, queries, channels = q.shape
    form = "flex" if pairs is not None else "causal" if causal else "full"
    if pairs is None:
        pairs = queries * k.shape[2] / (2 if causal else 1)
    # multiply-adds per pair and head; forward: scores, and probabilities times values
    products = 3 * channels + 2 * v.shape[-1] if backward else channels + v.shape[-1]
    return {
        "kind": "attention",
        "flops": int(2 * rows * heads * pairs * products),
        "sizes": (channels, round(pairs / queries)),
        "form": form,
    }


ATTENTION_WORK: dict[object, Callable] = {
    aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, dropout=0.0, causal=False, *_: attention_work(q, k, v, causal)
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, out, log_sum, dropout=0.0, causal=False, *_: attention_work(
            q, k, v, causal, backward=True
        )
    ),
    torch.ops.minitrain.attention_part: attention_work,
    torch.ops.minitrain.attention_part_backward: (
        lambda q, k, v, grad, out, log_sum, causal: attention_work(q, k, v, causal, backward=True)
    ),
}
