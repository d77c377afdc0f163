"""LoRA (Hu et al. 2021): train a low-rank update beside each of some frozen matrices.

    y = x W^T + scale (dropout(x) A^T) B^T, or dropout of the whole second term

    W  [out, in]    frozen: its gradient is neither computed nor stored
    A  [rank, in]   random at first
    B  [out, rank]  zero at first, so that training starts from the base model
    scale           alpha / rank, or alpha / sqrt(rank) with rslora (Kalajdzievski 2023)

A Linear keeps its class, its weight and their names; A and B are further parameters of it, `lora_A`
and `lora_B`, and its forward adds their product to its output. So checkpoints, sharding and number
formats of the base need not know of adapters. A stack of experts [experts, out, in] gets stacks of
As and Bs.

The update's matrix products are thin: what it costs is memory traffic, a pass over each adapted
input and output. That is why Linears of the same input share one product with their As, why the
terms of that input's gradient are added up by the products that compute them, why the update is one
sum, which the compiler merges into whatever reads the output, and why the scale is applied to B. W
+ BA is not formed for training: in bf16 it would lose updates that are smaller than W's rounding.

Left out: adapters of the embedding, the head and what else is outside the blocks; several adapters
at once; DoRA.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.errors import InputError
from minitrain.models.grouped_mm import grouped_mm
from minitrain.models.layers import has_hooks
from minitrain.models.moe import Experts
from minitrain.settings import TARGETS, Lora

ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze `model` in place and give it adapters, whose values are still to be set: see
    `initialize_adapter`.

    Raises InputError for a model that has some: both would be added.
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        raise InputError(
            "lora: the model has adapters already (use merge_adapters first, or a fresh model)"
        )
    model.requires_grad_(False)
    for module, name in find_targets(model, lora.targets).values():
        weight = getattr(module, name)
        *stack, out, into = weight.shape
        for adapter, shape in zip(
            adapter_names(name), ((lora.rank, into), (out, lora.rank)), strict=True
        ):
            values = torch.empty(
                *stack, *shape, dtype=ADAPTER_DTYPES[lora.dtype], device=weight.device
            )
            module.register_parameter(adapter, nn.Parameter(values))
        module.lora = lora
        if isinstance(module, Experts):
            module._linear = partial(adapted_product, module)
        else:
            # the compiler takes a partial for a constant
            module.forward = MethodType(adapted_linear, module)
    for module in model.modules():
        if hasattr(module, "project"):
            module.project = partial(project, [getattr(module, name) for name in module.same_input])
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "patch_embedding")):
            module.lora_hook = module.register_forward_hook(require_gradient)


def find_targets(model: nn.Module, targets: Iterable[str]) -> dict[str, tuple[nn.Module, str]]:
    """The weights that `targets` name: path -> (module, name of its parameter).

    A target is the path of a Linear in the model's blocks or the end of one (`q_proj`,
    `self_attn.q_proj`). Stacks of experts are only meant where `experts.` says so
    (`experts.down_proj`).
    """
    weights = adaptable(model)
    return {
        path: weights[path] for path in weights if any(matches(path, target) for target in targets)
    }


def adaptable(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """All that can be a target, as `find_targets` gives it."""
    inside = {id(module) for block in model.blocks for module in block.modules()}
    weights = {}
    for path, module in model.named_modules():
        if id(module) in inside and isinstance(module, nn.Linear):
            weights[path] = module, "weight"
        elif isinstance(module, Experts):
            weights |= {f"{path}.{name}": (module, name) for name in (module.first, "down_proj")}
    return weights


def check_targets(model: nn.Module, targets: list[str]) -> None:
    """Raises InputError for a target that names nothing in a complete `model`.

    Of the usual TARGETS a family has some: others may be missing, as long as one target is there.
    """
    paths = adaptable(model)
    missing = [target for target in targets if not any(matches(path, target) for path in paths)]
    unknown = [target for target in missing if target not in TARGETS or missing == targets]
    if unknown or not targets:
        names = ", ".join(sorted({_short(path) for path in paths}))
        # of a larger model's blocks: hundreds
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise InputError(
            f"lora.targets: the model has no {', '.join(unknown[:4]) or 'target'}{more} (it has {names})"
        )


def is_stack(path: str) -> bool:
    """Is it a parameter of routed experts, or a target that means one? Shared experts have Linears
    like any MLP.
    """
    return ".experts." in f".{path}"


def _short(path: str) -> str:
    """The end of a path that says enough: of a Linear in a list its number is not."""
    return (
        path[path.index(".experts.") + 1 :]
        if is_stack(path)
        else re.search(r"[^.\d][^.]*(\.\d+)*$", path)[0]
    )


def matches(path: str, target: str) -> bool:
    """Does `target` name the weight at `path`? A Linear's is the Linear's own, a stack's ends with
    the parameter.
    """
    return f".{path}".endswith(f".{target}") and (not is_stack(path) or is_stack(target))


def adapter_names(weight: str) -> tuple[str, str]:
    """The names of a weight's A and B, with the path before them if `weight` has one.

    Of a Linear's `q_proj.weight` they are `q_proj.lora_A` and `q_proj.lora_B`, of a stack
    `experts.down_proj` `experts.down_proj_lora_A` and `experts.down_proj_lora_B`.
    """
    stem = weight.removesuffix("weight") if weight.endswith("weight") else f"{weight}_"
    return f"{stem}lora_A", f"{stem}lora_B"


def is_adapter(name: str) -> bool:
    """Is this the name of an adapter's parameter?"""
    return name.endswith(("lora_A", "lora_B"))


@torch.no_grad()
def initialize_adapter(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """A: uniform within +-1 / sqrt(in), as the Linears of torch and the As of peft start; B:
    zero.
    """
    if name.endswith("A"):
        bound = tensor.shape[-1] ** -0.5
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        tensor.zero_()


# ------------------------------------------------------------------------------------------------------------ computing


@contextmanager
def without_adapters(lora: Lora) -> Iterator[None]:
    """The model whose adapters share these settings computes as if it had none."""
    alpha = lora.alpha
    lora.alpha = 0.0
    try:
        yield
    finally:
        lora.alpha = alpha


def adapted_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    """In place of a Linear's own `forward`. x: [..., in]; returns [..., out]."""
    return adapted_linears([linear], x)[0]


def project(linears: list[nn.Linear], x: Tensor) -> list[Tensor]:
    """In place of a module's own `project`, which calls its Linears one by one, as is done here
    where they do more than
    multiply: for hooks of others, or if each drops elements of x for itself."""
    if any(
        has_hooks(linear) or (hasattr(linear, "lora") and drops(linear.lora, "pre"))
        for linear in linears
    ):
        return [linear(x) for linear in linears]
    return adapted_linears(linears, x)


def adapted_linears(linears: list[nn.Linear], x: Tensor) -> list[Tensor]:
    """The outputs [..., out] of Linears, not all of which need have adapters, for the same x [...,
    in]. x A^T of all is one product, so that x is read once for it, and its gradient gets one more
    term, not one of each Linear."""
    adapted = [linear for linear in linears if hasattr(linear, "lora_A")]
    if not adapted:
        return [linear(x) for linear in linears]
    lora = adapted[0].lora
    a = torch.cat([linear.lora_A for linear in adapted]).to(x.dtype)
    # else a pipeline may split the backward pass
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled()
    if compiled and all(map(is_frozen, linears)) and not drops(lora, "pre"):
        frozen = [tensor for linear in linears for tensor in (linear.weight, linear.bias)]
        inner, *outputs = BesideFrozen.apply(x, a, *frozen)
    else:
        inner = F.linear(drop(lora, x, "pre"), a)
        outputs = [product(linear, x) for linear in linears]
    inner = dict(zip(adapted, inner.split(lora.rank, dim=-1), strict=True))
    outputs = zip(linears, outputs, strict=True)
    return [y + expand(linear, inner[linear]) if linear in inner else y for linear, y in outputs]


def product(linear: nn.Linear, x: Tensor) -> Tensor:
    """x W^T + bias, as the Linear's class computes it, or whoever put a `product` of its own there
    (the sampler).
    """
    return linear.product(x) if hasattr(linear, "product") else type(linear).forward(linear, x)


def is_frozen(linear: nn.Linear) -> bool:
    """Is it just a product with a matrix that does not learn?"""
    learns = linear.weight.requires_grad or (linear.bias is not None and linear.bias.requires_grad)
    return type(linear) is nn.Linear and not learns


class BesideFrozen(torch.autograd.Function):
    """x A^T, and x W^T + bias of each of some frozen Linears. Inputs: x [..., in], a [ranks, in],
    weight, bias, ...

    The gradient of x, dx = du A + dy W + ..., is one tensor to which each large product adds its
    own: a matrix product hides that behind its arithmetic. As tensors of their own all terms would
    be read once more. For compiled blocks: a pipeline that computes gradients of inputs first,
    which only runs others, cannot split this.
    """

    @staticmethod
    # the compiler miscounts where some have names and some have not
    def forward(ctx, *inputs):
        x, a, *frozen = inputs
        weights = frozen[::2]
        biases = frozen[1::2]
        ctx.save_for_backward(x, a, *weights)
        return F.linear(x, a), *map(partial(F.linear, x), weights, biases)

    @staticmethod
    def backward(ctx, *grads):
        x, a, *weights = ctx.saved_tensors
        grad_inner, *outer = (grad.flatten(0, -2) for grad in grads)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grad_inner @ a
            for grad, weight in zip(outer, weights, strict=True):
                torch.ops.minitrain.add_product(dx, grad, weight)
            dx = dx.view(x.shape)
        return dx, grad_inner.T @ x.flatten(0, -2), *[None] * (2 * len(outer))


torch.library.define("minitrain::add_product", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")


@torch.library.impl("minitrain::add_product", "CompositeExplicitAutograd")
def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in place also where the compiler copies what torch's own operator adds to."""
    total.addmm_(a, b)


torch.library.register_fake("minitrain::add_product", lambda total, a, b: None)


def expand(linear: nn.Linear, inner: Tensor) -> Tensor:
    """The update from x A^T."""
    b = (linear.lora_B * update_scale(linear.lora)).to(inner.dtype)
    return drop(linear.lora, F.linear(inner, b), "post")


def drops(lora: Lora, position: str | None = None) -> bool:
    """Is anything dropped, here or anywhere? Dropout is for training only: while gradients are
    computed.
    """
    return (
        lora.dropout > 0 and torch.is_grad_enabled() and position in (None, lora.dropout_position)
    )


def update_scale(lora: Lora) -> float:
    """The factor on B A; with dropout also divided by the share that is kept, so that the mean
    stays.
    """
    return lora.scale / (1 - lora.dropout) if drops(lora) else lora.scale


def drop(lora: Lora, x: Tensor, position: str) -> Tensor:
    """x [..., width] with zeros where dropout has it, if `position`, where this is called, is that
    of the settings.

    From the default generator: recomputation must draw the same again. A random number of the row
    times one of the column decides (multiply-shift hashing, Dietzfelbinger et al. 1997). That is an
    instruction in place of the 80 of torch's Philox numbers, which take longer than memory does,
    and the compiler repeats it in the backward pass in place of keeping a mask.
    """
    if not drops(lora, position):
        return x
    shapes = (*x.shape[:-1], 1), x.shape[-1:]
    rows, columns = (
        torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=x.device)
        for shape in shapes
    )
    # modulo 2^32, and uniform as one factor is odd
    bits = (rows | 1) * columns
    return torch.where(bits < round(lora.dropout * (1 << 32)) - (1 << 31), 0, x)


def adapted_product(
    experts: Experts, name: str, x: Tensor, scale: Tensor, offsets: Tensor
) -> Tensor:
    """In place of `Experts._linear`. x: [rows, in], sorted by expert; returns [rows, out]."""
    y = type(experts)._linear(experts, name, x, scale, offsets)
    name_a, name_b = adapter_names(name)
    if not hasattr(experts, name_a):
        return y
    a = getattr(experts, name_a)
    b = getattr(experts, name_b) * update_scale(experts.lora)
    # grouped_mm wants rows of 16 bytes
    missing = -experts.lora.rank % 8
    if missing:
        a = F.pad(a, (0, 0, 0, missing))
        b = F.pad(b, (0, missing))
    inner = grouped_mm(drop(experts.lora, x, "pre"), a.to(x.dtype).transpose(-2, -1), offsets)
    return y + drop(
        experts.lora, grouped_mm(inner, b.to(x.dtype).transpose(-2, -1), offsets), "post"
    )


def require_gradient(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """A forward hook of the embedding: let its frozen output require a gradient, as the adapted
    blocks' outputs do.

    Otherwise the first block's input would be the only one without, and the compiler would build
    every block twice.
    """
    return output.requires_grad_(torch.is_grad_enabled())


# -------------------------------------------------------------------------------------------------------------- merging


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add every update to its weight, remove the adapters, and thaw the model. For unsharded
    models.
    """
    for module, name in adaptable(model).values():
        weight = getattr(module, name)
        adapters = adapter_names(name)
        if not hasattr(module, adapters[0]):
            continue
        weight.copy_(
            merged(weight, *(getattr(module, adapter) for adapter in adapters), module.lora)
        )
        for adapter in adapters:
            delattr(module, adapter)
        for name in ("forward", "_linear"):
            module.__dict__.pop(name, None)
    for module in model.modules():
        module.__dict__.pop("project", None)
        if hasattr(module, "lora_hook"):
            module.lora_hook.remove()
    model.requires_grad_(True)


def merged(weight: Tensor, a: Tensor, b: Tensor, lora: Lora) -> Tensor:
    """W + scale B A, rounded once, to W's type."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + lora.scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)
