"""Frozen Linears with adapters as one autograd.Function, for compiled blocks (see lora.py)."""

import torch
import torch.nn.functional as F
from torch import Tensor


class FrozenLinears(torch.autograd.Function):
    """u = x A^T, and y = x W^T + bias + u_i B^T of each Linear i, whose part of u is u_i.

    Inputs: x [..., in], a [ranks, in] (the As stacked), then weight [out, in], bias and scaled b
    [out, rank] of each Linear. A bias may be None. If a b is None, y lacks the term with B.
    Outputs: u [..., ranks], then y [..., out] of each.

    A large product adds its term to what a thin one has computed, hidden behind its arithmetic: to
    the update u_i B^T, and to the gradient dx = du A + dy W + .... By autograd each term would be a
    tensor, to be read once more (of Qwen 2.5 7B, the updates for 2.5 % of a step).
    For compiled blocks only: a zero-bubble pipeline could not split this backward pass.
    """

    @staticmethod
    # *inputs alone: the compiler miscounts where some have names
    def forward(ctx, *inputs):
        x, a, *frozen = inputs
        shape = x.shape[:-1]
        x = x.flatten(0, -2)
        # [tokens, ranks]
        inner = x @ a.T
        weights = frozen[0::3]
        bs = frozen[2::3]
        # the u_i, [tokens, rank] each
        parts = []
        outputs = []
        first = 0
        for weight, bias, b in zip(weights, frozen[1::3], bs, strict=True):
            if b is None:
                y = F.linear(x, weight, bias)
            else:
                parts.append(inner[:, first : first + b.shape[1]])
                first += b.shape[1]
                y = F.linear(parts[-1], b, bias)
                torch.ops.minitrain.add_product(y, x, weight.T)
            outputs.append(y.unflatten(0, shape))
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
        # of each Linear's weight, bias and b
        frozen = []
        for grad, b in zip(outer, bs, strict=True):
            grad_b = None
            if b is not None:
                terms.append(grad @ b)
                grad_b = grad.T @ next(parts)
            frozen += [None, None, grad_b]
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
        return dx, grad_inner.T @ x, *frozen


torch.library.define("minitrain::add_product", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")


@torch.library.impl("minitrain::add_product", "CompositeExplicitAutograd")
def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to total [m, n], in place. a: [m, k]; b: [k, n].

    With torch's own operator the compiler would copy the total.
    """
    total.addmm_(a, b)


torch.library.register_fake("minitrain::add_product", lambda total, a, b: None)
