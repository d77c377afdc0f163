"""Mixture of experts (Shazeer et al. 2017): each token is computed by a few of many small MLPs.

    route     score all experts for a token in fp32, select top_k and their weights (router.py)
    dispatch  copy each token top_k times and sort the copies by expert
    experts   multiply by stacks [experts, out, in]: one grouped_mm for all experts (grouped_mm.py)
    combine   sum each token's top_k rows, which have been multiplied by the router's weights

No token is dropped and no expert's rows are padded. Only the device knows how many rows an expert
has, and the host never waits for it. The backward pass of dispatch is combine, and the other way
round. Both read rows by index (gather), and need no atomic additions (scatter). So results are the
same bits every time.

Memory: [tokens x top_k, hidden] and [tokens x top_k, 2 x intermediate]. No tensor has tokens x
experts x channels.
Left out: capacity limits; expert parallelism, which replaces `MoE.dispatch` (parallel/expert.py).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.grouped_mm import grouped_mm
from minitrain.models.layers import MLPS, identity, squared_relu
from minitrain.models.router import Router, count_tokens

if TYPE_CHECKING:
    from minitrain.models.decoder_config import DecoderConfig


class MoE(nn.Module):
    """Routed experts and, where the family has one, a shared expert that sees every token.

    Qwen3-Next multiplies the shared expert's output by a gate, one number per token.
    With moe_latent_size, experts work on a projection of that width (Nemotron 3 Super), while
    router and shared expert see the full hidden state.
    """

    def __init__(self, config: "DecoderConfig"):
        super().__init__()
        hidden = config.hidden_size
        latent = config.moe_latent_size
        shared = config.shared_expert_intermediate_size
        self.gate = Router(config)
        self.experts = Experts(
            config.num_experts,
            latent or hidden,
            config.moe_intermediate_size,
            config.mlp,
            config.expert_bias,
        )
        # exchange points: expert and tensor parallelism move tokens between ranks in `dispatch`;
        # tensor-parallel ranks take the document ids of their own tokens in `split`
        self.dispatch = dispatch
        self.split = identity
        self.shared_experts = MLPS[config.mlp](hidden, shared) if shared else None
        gated = shared and config.shared_expert_gate
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False) if gated else None
        self.fc1_latent_proj = nn.Linear(hidden, latent, bias=False) if latent else nn.Identity()
        self.fc2_latent_proj = nn.Linear(latent, hidden, bias=False) if latent else nn.Identity()

    def forward(self, x: Tensor, document_ids: Tensor | None = None, cache=None) -> Tensor:
        """Return the experts' output, [batch, seq, hidden] as x.

        document_ids: int [batch, seq], see `Router.forward`. cache: the layer's, which may record
            the selected experts.
        """
        if document_ids is not None:
            # x has this rank's tokens already
            document_ids = self.split(document_ids)
        # [tokens, top_k] each
        indices, weights = self.gate(x, document_ids)
        if cache is not None:
            cache.record(indices)
        # [tokens, hidden or latent]
        tokens = self.fc1_latent_proj(x).flatten(0, -2)
        finish = self.dispatch(tokens, indices, weights.to(x.dtype), self.experts)
        # while tokens are sent to the ranks of their experts
        shared = None if self.shared_experts is None else self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = shared * torch.sigmoid(self.shared_expert_gate(x))
        routed = self.fc2_latent_proj(finish()).view_as(x)
        return routed if shared is None else routed + shared


# --- dispatch and combine


def dispatch(
    x: Tensor, indices: Tensor, weights: Tensor, experts: "Experts"
) -> Callable[[], Tensor]:
    """Dispatch tokens to `experts`, compute, and combine: the weighted sum over a token's experts.

    x: [tokens, hidden]; indices: int [tokens, top_k], of experts; weights: [tokens, top_k].
    Returns a function that returns it, [tokens, hidden]: between ranks, tokens take time to arrive.
    """
    top_k = indices.shape[1]
    # Number the copies token by token: copy c is of token c // top_k. [tokens x top_k]: the copy in
    # each row once they are sorted by expert. int32 keys make radix sort faster.
    order = indices.flatten().to(torch.int32).argsort(stable=True)
    # its inverse, [tokens x top_k]: the row of each copy
    inverse = torch.empty_like(order)
    inverse = inverse.scatter(0, order, torch.arange(len(order), device=order.device))
    # [tokens x top_k]: the token in each row. The compiler divides again for each channel that it
    # copies, which is cheap for int32 without a sign.
    tokens = order.to(torch.int32).div(top_k, rounding_mode="trunc")
    counts = count_tokens(indices, experts.num_experts)
    # [tokens x top_k, hidden]
    rows = Permute.apply(x, tokens, inverse, top_k)
    # the weight of each row's copy
    rows = experts(rows, Permute.apply(weights.flatten(), order, inverse, 1), counts)
    combined = Unpermute.apply(rows, tokens, inverse, top_k)
    return lambda: combined


class Permute(torch.autograd.Function):
    """[tokens, ...] -> [tokens x top_k, ...]: row i is a copy of token tokens[i].

    inverse: int [tokens x top_k], the rows of token 0's top_k copies, then of token 1's, ...
    Backward is `Unpermute`.
    """

    @staticmethod
    def forward(ctx, x, tokens, inverse, top_k):
        ctx.save_for_backward(tokens, inverse)
        ctx.top_k = top_k
        return x.index_select(0, tokens)

    @staticmethod
    def backward(ctx, grad):
        return Unpermute.apply(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


class Unpermute(torch.autograd.Function):
    """[tokens x top_k, ...] -> [tokens, ...]: the sum of each token's rows.

    Backward is `Permute`.
    """

    @staticmethod
    def forward(ctx, rows, tokens, inverse, top_k):
        ctx.save_for_backward(tokens, inverse)
        ctx.top_k = top_k
        return rows.index_select(0, inverse).unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        return Permute.apply(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


# --- experts


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up; all are [rows, intermediate]."""
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return GPT-OSS's SwiGLU; all are [rows, intermediate].

    Inputs are limited to 7, the sigmoid is steeper, and the linear part is shifted by one.
    """
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)


# the MLPs of experts that have a gate; relu2 has none
GATED = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


class Experts(nn.Module):
    """The weights of all experts, as stacks [experts, out, in].

    gate_up_proj has the rows of gate and up interleaved: gate 0, up 0, gate 1, ... So a range of
    rows is a range of whole channels, and tensor parallelism can split every stack evenly.
    Experts without a gate have up_proj in its place.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, mlp: str, bias: bool):
        super().__init__()
        self.num_experts = num_experts
        # a function of gate and up, or None: squared ReLU of up alone
        self.gated = GATED.get(mlp)
        # the name of the first of the two stacks
        self.first = "gate_up_proj" if self.gated else "up_proj"
        width = 2 * intermediate if self.gated else intermediate
        for name, out, into in ((self.first, width, hidden), ("down_proj", hidden, intermediate)):
            biases = nn.Parameter(torch.empty(num_experts, out)) if bias else None
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, out, into)))
            self.register_parameter(name + "_bias", biases)

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Return each row's expert output times its weight, [rows, hidden].

        x: [rows, hidden], sorted by expert; weights: [rows]; counts: int64 [experts], their rows.
        The weight multiplies the input of down_proj. That is narrower than the output, and then the
        backward pass does not need the output.
        """
        offsets = counts.cumsum(0, dtype=torch.int32)
        weights = weights[:, None]
        # [rows, 2 x intermediate], or [rows, intermediate] without a gate
        hidden = self._linear(self.first, x, torch.ones_like(weights), offsets)
        if self.gated:
            # they are interleaved: [rows, intermediate] each
            gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
            if not torch.compiler.is_compiling():
                # eager CPU kernels are far faster on contiguous copies
                gate, up = gate.contiguous(), up.contiguous()
            hidden = self.gated(gate, up)
        else:
            hidden = squared_relu(hidden)
        # its bias is multiplied by the weight too
        return self._linear("down_proj", hidden * weights, weights, offsets)

    def _linear(self, name: str, x: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
        """Return x W_e^T + scale b_e for each row and its expert e, [rows, out].

        x: [rows, in]; scale: [rows, 1]; offsets: int32 [experts], the end of each expert's rows.
        """
        y = self._product(name, x, offsets)
        bias = getattr(self, name + "_bias")
        return y if bias is None else y + RowBiases.apply(bias, scale, offsets)

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        # [rows, in] -> [rows, out]
        return grouped_mm(x, getattr(self, name).transpose(-2, -1), offsets)


class RowBiases(torch.autograd.Function):
    """scale [rows, 1] times the bias of each row's expert, of bias [experts, out]: [rows, out].

    There are few biases, which stay in the cache, so they are read for every row at no cost. Their
    gradient is a grouped product; autograd would scatter it row by row.
    """

    @staticmethod
    def forward(ctx, bias, scale, offsets):
        rows = torch.arange(len(scale), dtype=offsets.dtype, device=scale.device)
        # [rows]
        expert = torch.bucketize(rows, offsets, right=True)
        ctx.save_for_backward(bias, scale, expert, offsets)
        return bias[expert] * scale

    @staticmethod
    def backward(ctx, grad):
        bias, scale, expert, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_bias = None
        grad_scale = None
        if ctx.needs_input_grad[0]:
            # grouped_mm needs rows of 16 bytes
            padded = F.pad(scale.to(grad.dtype), (0, 7))
            # [experts, out]; not (padded.T @ grad): the compiler would copy padded.T
            grad_bias = grouped_mm(grad.T, padded, offsets)[..., 0]
        if ctx.needs_input_grad[1]:
            grad_scale = (grad * bias[expert]).sum(-1, keepdim=True)
        return grad_bias, grad_scale, None
