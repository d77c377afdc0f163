"""LoRA (Hu et al. 2021): train a low-rank update beside each of some frozen matrices.

    y = x W^T + scale (dropout(x) A^T) B^T, or dropout of the whole second term

    W  [out, in]    frozen: its gradient is neither computed nor stored
    A  [rank, in]   random at first
    B  [out, rank]  zero at first, so that training starts from the base model
    scale           alpha / rank, or alpha / sqrt(rank) with rslora (Kalajdzievski 2023)

An adapted Linear is still a Linear with its weight, under the same names. A and B are further
parameters of it, `lora_A` and `lora_B`, so checkpoints, sharding and number formats of the base
(fp8.py, frozen.py) need not know of adapters. A stack of experts [experts, out, in] gets stacks of As and Bs. Tensor
parallelism splits both with the Linear: see parallel/tensor.py.

The products with A and B are thin: memory traffic bounds them. Therefore

- Linears of the same input share one product with their As, which reads the input once;
- the update and the input's gradient are one tensor each, to which the large products add in place
  (the update only without dropout; with it, the compiler fuses the sum into what reads the output);
- the scale multiplies B, not the output.

Training never computes W + B A: bf16 would lose updates that are smaller than W's rounding.
Left out: adapters outside the blocks (embedding, head), several adapters at once, and DoRA.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.errors import InputError
from minitrain.models.frozen import thaw
from minitrain.models.grouped_mm import grouped_mm
from minitrain.models.moe import Experts
from minitrain.models.variants import base_class, in_tuples, set_variant
from minitrain.settings import TARGETS, Lora

ADAPTER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze `model` in place and add adapters without values: see `initialize_adapter`.

    Raise InputError for a model that has adapters: both would be added.
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        raise InputError(
            "lora: the model has adapters already (use merge_adapters first, or a fresh model)"
        )
    model.requires_grad_(False)
    for module, name in find_targets(model, lora.targets).values():
        weight = getattr(module, name)
        *stack, out, into = weight.shape
        name_a, name_b = adapter_names(name)
        for adapter, shape in ((name_a, (lora.rank, into)), (name_b, (out, lora.rank))):
            values = weight.new_empty(*stack, *shape, dtype=ADAPTER_DTYPES[lora.dtype])
            module.register_parameter(adapter, nn.Parameter(values))
        module.lora = lora
        if not hasattr(module, "around"):
            set_variant(module, adapted_class(type(module)))
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "patch_embedding")):
            module.lora_hook = module.register_forward_hook(require_gradient)


def find_targets(model: nn.Module, targets: Iterable[str]) -> dict[str, tuple[nn.Module, str]]:
    """Return the weights that `targets` name: path -> (module, name of its parameter).

    A target is the path of a Linear in the model's blocks, or its last parts (`q_proj`,
    `self_attn.q_proj`). It names stacks of routed experts only if it contains `experts.`
    (`experts.down_proj`); `down_proj` means Linears alone.
    """
    found = {}
    for path, weight in adaptable_weights(model).items():
        if any(matches(path, target) for target in targets):
            found[path] = weight
    return found


def adaptable_weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return all weights that can be targets, in the form of `find_targets`."""
    inside = {id(module) for block in model.blocks for module in block.modules()}
    weights = {}
    for path, module in model.named_modules():
        if id(module) in inside and isinstance(module, nn.Linear):
            weights[path] = module, "weight"
        elif isinstance(module, Experts):
            weights |= {f"{path}.{name}": (module, name) for name in (module.first, "down_proj")}
    return weights


def check_targets(model: nn.Module, targets: list[str]) -> None:
    """Raise InputError for a target that names nothing in a complete `model`.

    A family has only some of the usual TARGETS: those may be missing, as long as one is there.
    """
    paths = adaptable_weights(model)
    missing = [target for target in targets if not any(matches(path, target) for path in paths)]
    # those that are not usual, or all, if none of them is there
    unknown = [target for target in missing if target not in TARGETS or missing == targets]
    if unknown or not targets:
        names = ", ".join(sorted({_short(path) for path in paths}))
        # targets that list every block by its path may be hundreds
        more = f" and {len(unknown) - 4} more" if len(unknown) > 4 else ""
        raise InputError(
            f"lora.targets: the model has no {', '.join(unknown[:4]) or 'target'}{more} (it has {names})"
        )


def is_expert_stack(path: str) -> bool:
    """Return whether a path or target is a stack of routed experts. Shared ones are Linears."""
    return ".experts." in f".{path}"


def _short(path: str) -> str:
    """Return the end of a path that tells kinds of weights apart, as a target may be written."""
    if is_expert_stack(path):
        return path[path.index(".experts.") + 1 :]
    # the last part that is not a number, with numbers after it: `to_out.0`
    return re.search(r"[^.\d][^.]*(\.\d+)*$", path)[0]


def matches(path: str, target: str) -> bool:
    """Return whether `target` names the weight at `path`, see `find_targets`."""
    return f".{path}".endswith(f".{target}") and (
        not is_expert_stack(path) or is_expert_stack(target)
    )


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the A and B of the parameter `weight`, a name with or without its path.

    q_proj.weight (a Linear): q_proj.lora_A, q_proj.lora_B.
    experts.down_proj (a stack): experts.down_proj_lora_A, ..._lora_B.
    """
    stem = weight.removesuffix("weight") if weight.endswith("weight") else f"{weight}_"
    return f"{stem}lora_A", f"{stem}lora_B"


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name is an adapter's A or B."""
    return name.endswith(("lora_A", "lora_B"))


def is_new(name: str) -> bool:
    """Return whether a parameter is trained beside frozen weights: an adapter, or a classifier's head."""
    return is_adapter(name) or name == "score.weight"


@torch.no_grad()
def initialize_adapter(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill an A [..., rank, in] at random, or a B [..., out, rank] with 0."""
    if name.endswith("A"):
        # uniform, as the weights of torch's Linears and peft's A
        bound = tensor.shape[-1] ** -0.5
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        tensor.zero_()


# --- computing


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let `model`, or a pipeline's stages, compute as if it had no adapters."""
    adapted = [m for m in model.modules() if isinstance(m, (LoraLinear, LoraExperts))]
    # None: the class says it
    before = [vars(module).get("is_adapted") for module in adapted]
    for module in adapted:
        module.is_adapted = False
    try:
        yield
    finally:
        for module, was in zip(adapted, before, strict=True):
            del module.is_adapted
            if was is not None:
                module.is_adapted = was


@cache
def adapted_class(kind: type) -> type:
    """Return the class of `kind`, a class of Linears or Experts, with adapters around it."""
    mixin = LoraExperts if issubclass(kind, Experts) else LoraLinear
    return type(f"Lora{kind.__name__}", (mixin, kind), {})


class LoraLinear(nn.Linear):
    """A frozen Linear with adapters lora_A and lora_B. x: [..., in]; returns [..., out].

    `adapted_class` puts it around nn.Linear or a variant, which computes the product with W.
    """

    # the settings of all adapters of a model
    lora: Lora
    # False while `without_adapters`
    is_adapted = True

    # for `set_variant`: makes an adapted class of another variant
    around = staticmethod(adapted_class)

    def forward(self, x: Tensor) -> Tensor:
        # [..., in] -> [..., out]
        return adapted_linears([self], x)[0] if self.is_adapted else self.product(x)

    def product(self, x: Tensor) -> Tensor:
        """Compute x W^T + bias, [..., in] -> [..., out], by the class that this one is around."""
        return super().forward(x)

    def together(self, linears: list[nn.Linear], x: Tensor) -> Sequence[Tensor] | None:
        """Return the outputs [..., out] for x [..., in], which is read once for all adapters.

        None if each Linear applies its own dropout to x, or none. See `project` in layers.py.
        """
        one_by_one = dropout_active(self.lora, "pre") or not self.is_adapted
        return None if one_by_one else adapted_linears(linears, x)


class LoraExperts(Experts):
    """Frozen experts with stacks of adapters of gate_up_proj or down_proj."""

    lora: Lora
    is_adapted = True

    around = staticmethod(adapted_class)

    def _linear(self, name: str, x: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
        # shapes as in `Experts._linear`: x [rows, in] -> y [rows, out]
        y = super()._linear(name, x, scale, offsets)
        name_a, name_b = adapter_names(name)
        if not (self.is_adapted and hasattr(self, name_a)):
            return y
        lora = self.lora
        # grouped_mm needs rows of 16 bytes: pad the rank to a multiple of 8
        missing = -lora.rank % 8
        a = F.pad(getattr(self, name_a), (0, 0, 0, missing)).to(x.dtype)
        b = F.pad(getattr(self, name_b) * update_scale(lora), (0, missing)).to(x.dtype)
        # [rows, rank]
        inner = grouped_mm(dropout(lora, x, "pre"), a.transpose(-2, -1), offsets)
        return y + dropout(lora, grouped_mm(inner, b.transpose(-2, -1), offsets), "post")


def adapted_linears(linears: list[nn.Linear], x: Tensor) -> Sequence[Tensor]:
    """Return the outputs [..., out] of Linears, some of them adapted, for the same x [..., in].

    x A^T of all is one product, of the As stacked, so that x is read once.
    """
    adapted = [linear for linear in linears if isinstance(linear, LoraLinear)]
    lora = adapted[0].lora
    # [sum of ranks, in]
    a = torch.cat([linear.lora_A for linear in adapted]).to(x.dtype)
    # not eager: there a pipeline may split the backward pass, and `FrozenLinears` cannot be split
    compiled = torch.compiler.is_compiling() and torch.is_grad_enabled()
    if compiled and all(map(is_frozen, linears)) and not dropout_active(lora, "pre"):
        frozen = []
        for linear in linears:
            # with dropout of the update, B multiplies below
            joined = linear in adapted and not dropout_active(lora)
            b = scaled_b(linear, x.dtype) if joined else None
            frozen.append(Frozen(linear.weight, linear.bias, b))
        inner, *outputs = FrozenLinears.apply(x, a, *chain(*frozen))
        if not dropout_active(lora):
            return outputs
        # the updates follow below; torch 2.11 compiles the outputs as a tuple
        outputs = list(outputs)
    else:
        inner = F.linear(dropout(lora, x, "pre"), a)
        outputs = products(linears, x)
    # x A^T of each adapted Linear, [..., rank]
    inner = dict(zip(adapted, inner.split(lora.rank, dim=-1), strict=True))
    for i, linear in enumerate(linears):
        if linear in inner:
            outputs[i] = outputs[i] + low_rank_update(linear, inner[linear])
    return outputs


def products(linears: list[nn.Linear], x: Tensor) -> list[Tensor]:
    """Return x W^T + bias, [..., out], of Linears, some of them adapted, without the adapters.

    The variant inside computes all at once, if it has `products` that does not return None.
    """
    inside = base_class(linears[0])
    outputs = inside.products(linears, x) if hasattr(inside, "products") else None
    if outputs is not None:
        return list(outputs)
    return [
        linear.product(x) if isinstance(linear, LoraLinear) else linear(x) for linear in linears
    ]


def is_frozen(linear: nn.Linear) -> bool:
    """Return whether this is a plain nn.Linear that trains nothing but its adapters."""
    learns = linear.weight.requires_grad or (
        linear.bias is not None and linear.bias.requires_grad
    )
    return base_class(linear) is nn.Linear and not learns


def low_rank_update(linear: nn.Linear, inner: Tensor) -> Tensor:
    """Return scale inner B^T, [..., out]. inner: x A^T, [..., rank]."""
    return dropout(linear.lora, F.linear(inner, scaled_b(linear, inner.dtype)), "post")


def scaled_b(linear: LoraLinear, dtype: torch.dtype) -> Tensor:
    """Return scale B, [out, rank], rounded once to the type of the products."""
    return (linear.lora_B * update_scale(linear.lora)).to(dtype)


def dropout_active(lora: Lora, position: str | None = None) -> bool:
    """Return whether dropout is on, at `position` or at all: only while gradients are computed."""
    here = position in (None, lora.dropout_position)
    return lora.dropout > 0 and torch.is_grad_enabled() and here


def update_scale(lora: Lora) -> float:
    """Return the factor on B A, divided by the share that dropout keeps: `dropout` does not."""
    return lora.scale / (1 - lora.dropout) if dropout_active(lora) else lora.scale


def dropout(lora: Lora, x: Tensor, position: str) -> Tensor:
    """Apply dropout to x [..., width], without scaling it up, if the settings put it at `position`.

    position: where this is called, "pre" (of A's input) or "post" (of B's output).
    An element's random bits are a random number of its token times one of its channel
    (multiply-shift hashing, Dietzfelbinger et al. 1997). That is one instruction, where torch's
    Philox takes 80, and more time than the memory traffic. And the compiler computes it again in
    the backward pass, where it would keep a mask. Recomputation draws the same: the numbers come
    from torch's default generator.
    """
    if not dropout_active(lora, position):
        return x
    # [..., 1] and [width]
    shapes = (*x.shape[:-1], 1), x.shape[-1:]
    rows, columns = (
        torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=x.device)
        for shape in shapes
    )
    # modulo 2^32; uniform, since one factor is odd
    bits = (rows | 1) * columns
    # int32 from -2^31: a share `dropout` of all values is below the bound
    return torch.where(bits < round(lora.dropout * (1 << 32)) - (1 << 31), 0, x)


def require_gradient(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
    """Let the embedding's frozen output [...] require a gradient, as a forward hook.

    Else the input of the first block would be the only one that requires none, and the compiler
    would make a second graph for it.
    """
    return output.requires_grad_(torch.is_grad_enabled())


# --- frozen Linears in compiled blocks


class Frozen(NamedTuple):
    """A frozen Linear, or the gradients of its tensors.

    weight: [out, in]. bias: [out] or None. b: scale B, [out, rank]; if None, the term with B is left
    out.
    """

    weight: Tensor | None
    bias: Tensor | None
    b: Tensor | None


class FrozenLinears(torch.autograd.Function):
    """u = x A^T, and y = x W^T + bias + u_i B^T of each Linear i, whose part of u is u_i.

    Inputs: x [..., in], a [ranks, in] (the As stacked), then the three of a `Frozen` for each Linear.
    Outputs: u [..., ranks], then y [..., out] of each.

    A large product adds its term to what a thin one has computed, hidden behind its arithmetic: to
    the update u_i B^T, and to the gradient dx = du A + dy W + .... By autograd each term would be a
    tensor, to be read once more (of Qwen 2.5 7B, the updates for 2.5 % of a step).
    For compiled blocks only: a zero-bubble pipeline could not split this backward pass.
    """

    @staticmethod
    # *inputs alone: the compiler miscounts where some have names
    def forward(ctx, *inputs):
        x, a, *rest = inputs
        linears = in_tuples(Frozen, rest)
        shape = x.shape[:-1]
        x = x.flatten(0, -2)
        # [tokens, ranks]
        inner = x @ a.T
        # the u_i, [tokens, rank] each
        parts = []
        outputs = []
        first = 0
        for weight, bias, b in linears:
            if b is None:
                y = F.linear(x, weight, bias)
            else:
                parts.append(inner[:, first : first + b.shape[1]])
                first += b.shape[1]
                y = F.linear(parts[-1], b, bias)
                torch.ops.minitrain.add_product(y, x, weight.T)
            outputs.append(y.unflatten(0, shape))
        weights = [linear.weight for linear in linears]
        bs = [linear.b for linear in linears]
        ctx.save_for_backward(x, a, *weights, *bs, *parts)
        return inner.unflatten(0, shape), *outputs

    @staticmethod
    def backward(ctx, *grads):
        shape = grads[0].shape[:-1]
        # du [tokens, ranks], and dy [tokens, out] of each
        grad_inner, *outer = (grad.flatten(0, -2) for grad in grads)
        x, a, *saved = ctx.saved_tensors
        weights = saved[: len(outer)]
        bs = saved[len(outer) : 2 * len(outer)]
        parts = iter(saved[2 * len(outer) :])
        # the gradient of each u_i
        terms = []
        gradients = []
        for grad, b in zip(outer, bs, strict=True):
            grad_b = None
            if b is not None:
                terms.append(grad @ b)
                grad_b = grad.T @ next(parts)
            gradients.append(Frozen(None, None, grad_b))
        if terms:
            # then nothing else reads u
            grad_inner = torch.cat(terms, dim=1)
        dx = None
        if ctx.needs_input_grad[0]:
            # [tokens, in]
            dx = grad_inner @ a
            for grad, weight in zip(outer, weights, strict=True):
                torch.ops.minitrain.add_product(dx, grad, weight)
            dx = dx.unflatten(0, shape)
        return dx, grad_inner.T @ x, *chain(*gradients)


torch.library.define("minitrain::add_product", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")


@torch.library.impl("minitrain::add_product", "CompositeExplicitAutograd")
def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total [m, n], in place. a: [m, k]; b: [k, n].

    With torch's own operator the compiler would copy the total.
    """
    total.addmm_(a, b)


torch.library.register_fake("minitrain::add_product", lambda total, a, b: None)


# --- merging


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add every update to its weight, remove the adapters, and unfreeze `model`, not sharded.

    Weights that are stored in fewer bits (frozen.py) become what products took them for, in the
    type of the model's first parameter.
    """
    thaw(model, next(model.parameters()).dtype)
    for module, name in adaptable_weights(model).values():
        name_a, name_b = adapter_names(name)
        if not hasattr(module, name_a):
            continue
        weight = getattr(module, name)
        a = getattr(module, name_a)
        b = getattr(module, name_b)
        weight.copy_(merged_weight(weight, a, b, module.lora))
        delattr(module, name_a)
        delattr(module, name_b)
    for module in model.modules():
        module.__class__ = base_class(module)
        if hasattr(module, "lora_hook"):
            module.lora_hook.remove()
    model.requires_grad_(True)


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, lora: Lora) -> Tensor:
    """Return W + scale B A, [..., out, in], rounded to W's type once.

    weight: [..., out, in]; a: [..., rank, in]; b: [..., out, rank].
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    update = lora.scale * (b.to(wide) @ a.to(wide))
    merged = weight.to(wide) + update
    return merged.to(weight.dtype)
