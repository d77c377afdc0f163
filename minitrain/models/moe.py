"""Mixture of experts (Shazeer et al. 2017): a router sends every token to a few of many small MLPs.

    choose    the router scores all experts for a token, in fp32, and picks top_k of them with their weights
    dispatch  tokens are copied and sorted by expert, so that each expert's rows are contiguous
    experts   grouped matrix products over stacks [experts, out, in]: one kernel for all experts, whatever their loads
    combine   each token adds up its experts' outputs; the weights are already in them

No token is dropped and no expert's rows are padded; an expert without tokens is an empty group. How
many rows an expert has is known to the device only, so nothing waits for it. Copying rows out and
adding them up are each other's
transposes: forward and backward both gather, without atomic additions, and so give the same bits
every time. Largest tensors: [tokens x top_k, hidden] and [tokens x top_k, 2 x intermediate]; none
has tokens x experts x channels.

Balance, all off by default: `bias_update_speed` for the selection bias of DeepSeek-V3,
`router_aux_loss_coef` for an auxiliary loss, and `fake_balanced_gate`, with which the published
throughput tables were measured. Left out: capacity limits, router noise and z-loss; and expert
parallelism, which replaces `MoE.dispatch` (parallel/expert.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.layers import GatedMLP, SquaredReluMLP
from minitrain.models.onednn import grouped_matmul, takes


class MoE(nn.Module):
    """Routed experts plus, where the family has one, a shared expert that sees every token. x:
    [..., hidden].

    documents: int [...], as `Router` takes it. With moe_latent_size, experts work on a projection
    of that width (Nemotron 3 Super); router and shared expert see x.
    """

    def __init__(self, config: DecoderConfig):
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
        # expert parallelism puts its all-to-alls in its place
        self.dispatch = dispatch
        dense = SquaredReluMLP if config.mlp == "relu2" else GatedMLP
        self.shared_experts = dense(hidden, shared) if shared else None
        self.fc1_latent_proj = nn.Linear(hidden, latent, bias=False) if latent else nn.Identity()
        self.fc2_latent_proj = nn.Linear(latent, hidden, bias=False) if latent else nn.Identity()

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        indices, weights = self.gate(x, documents)
        tokens = self.fc1_latent_proj(x).flatten(0, -2)
        routed = self.dispatch(tokens, indices, weights.to(x.dtype), self.experts)
        routed = self.fc2_latent_proj(routed).view_as(x)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


# -------------------------------------------------------------------------------------------------------------- routing


class Router(nn.Module):
    """Which experts a token goes to, and with which weights.

    scoring_func: `softmax` over all experts' logits, or `sigmoid` of each (DeepSeek-V3). With
    norm_topk_prob, as all published models have it, the weights of the chosen are divided by their
    sum; sigmoid's are then multiplied by routed_scaling_factor. Sigmoid routers choose by score +
    e_score_correction_bias, a buffer that no gradient reaches; with n_group > 1, only from the
    topk_group groups of experts whose two best sum highest.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.sigmoid = config.scoring_func == "sigmoid"
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        # int64 [experts]: tokens per expert since the last update of the bias
        self.load: Tensor | None = None
        # of all ranks and micro-batches; None: this forward pass is all
        self.tokens_per_step: Tensor | None = None
        # over the ranks that share the tokens that are balanced
        self.sum_counts: Callable = lambda counts: counts
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(self.num_experts)) if config.expert_bias else None
        if self.sigmoid:
            self.register_buffer(
                "e_score_correction_bias", torch.zeros(self.num_experts, dtype=torch.float32)
            )

    def forward(self, x: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x: [..., hidden] -> experts int64 [tokens, top_k], weights fp32 [tokens, top_k].

        documents: int [...], below 0 for padding. That is routed like any token but nothing is
        balanced by it: all of a row's padding is the same token, and would fill the same few
        experts.
        """
        if self.config.fake_balanced_gate:
            return balanced_choice(x.shape[:-1].numel(), self.top_k, self.num_experts, x.device)
        logits = linear_fp32(x.flatten(0, -2), self.weight)
        if self.bias is not None:
            logits = logits + self.bias.float()
        scores = logits.sigmoid() if self.sigmoid else logits
        indices = self._choose(scores.detach())
        weights = self._weigh(scores, indices)
        real = None if documents is None else documents.flatten() >= 0
        if self.config.bias_update_speed and torch.is_grad_enabled() and not is_recomputing():
            counts = count_tokens(indices, self.num_experts, real)
            self.load = counts if self.load is None else self.load + counts
        if self.config.router_aux_loss_coef and torch.is_grad_enabled():
            shares = scores / scores.sum(-1, keepdim=True) if self.sigmoid else scores.softmax(-1)
            weights = AttachLoss.apply(
                weights, self._aux_loss(shares, indices, x.shape[:-2].numel(), real)
            )
        return indices, weights

    def _apply(self, fn, recurse=True):
        """Whatever type the model is cast to, the selection bias stays in fp32: steps of 1e-3 would
        be lost in bf16.
        """
        before = getattr(self, "e_score_correction_bias", None)
        super()._apply(fn, recurse)
        if before is not None and self.e_score_correction_bias.dtype != torch.float32:
            self.e_score_correction_bias = before.to(self.e_score_correction_bias.device)
        return self

    def _choose(self, scores: Tensor) -> Tensor:
        if not self.sigmoid:
            return scores.topk(self.top_k, dim=-1).indices
        choice = scores + self.e_score_correction_bias
        config = self.config
        if config.n_group > 1:
            # [tokens, groups, experts per group]
            groups = choice.unflatten(-1, (config.n_group, -1))
            rank = groups.topk(2, dim=-1).values.sum(-1)
            kept = (
                torch.zeros_like(rank)
                .scatter(1, rank.topk(config.topk_group, dim=-1).indices, 1)
                .bool()
            )
            choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return choice.topk(self.top_k, dim=-1).indices

    def _weigh(self, scores: Tensor, indices: Tensor) -> Tensor:
        chosen = scores.gather(1, indices)
        if self.sigmoid:
            weights = (
                chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
                if self.config.norm_topk_prob
                else chosen
            )
            return weights * self.config.routed_scaling_factor
        if self.config.norm_topk_prob:
            # the same as over all, divided by the sum of the chosen
            return chosen.softmax(-1)
        return (chosen - scores.logsumexp(-1, keepdim=True)).exp()

    def _aux_loss(
        self, shares: Tensor, indices: Tensor, rows: int, real: Tensor | None = None
    ) -> Tensor:
        """coef x mean over the step's tokens of E sum_e f_e P_e: 1 x coef if all experts are chosen
        alike.

        f_e: the share of choices that fell on expert e, P_e: its mean `shares` [tokens, experts],
        both over all tokens of this forward pass (Fedus et al. 2021, eq. 4) or, per sequence, over
        each of its rows (DeepSeek-V3, eq. 17).
        real: bool [tokens], those that count; None: all.
        """
        rows = rows if self.config.seq_aux else 1
        real = (
            torch.ones(len(shares), dtype=torch.bool, device=shares.device)
            if real is None
            else real
        )
        row = torch.arange(rows, device=indices.device)[:, None, None]
        indices = (indices.view(rows, -1, self.top_k) + self.num_experts * row).flatten(0, 1)
        counts = self.sum_counts(
            count_tokens(indices, rows * self.num_experts, real).view(rows, -1)
        ).float()
        f = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        # a row's P times its tokens
        summed = (shares * real[:, None]).view(rows, -1, self.num_experts).sum(1)
        tokens = real.sum() if self.tokens_per_step is None else self.tokens_per_step
        return (
            self.config.router_aux_loss_coef
            * self.num_experts
            * (f * summed).sum()
            / tokens.clamp(min=1)
        )


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in fp32. x: [tokens, in]; weight: [out, in]; whatever their types."""
    if x.dtype == weight.dtype == torch.bfloat16:
        return _linear_fp32(x, weight)
    return F.linear(x.float(), weight.float())


@torch.library.custom_op("minitrain::linear_fp32", mutates_args=())
def _linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Of bf16 factors. fp32 holds their products exactly, and tensor cores sum them up in fp32;
    with fp32 copies of the factors they would be of no use, and the product could take 15 times as
    long."""
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


@_linear_fp32.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(len(x), len(weight), dtype=torch.float32)


def _linear_fp32_backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """As any Linear's in bf16, of a rounded gradient."""
    x, weight = ctx.saved_tensors
    grad = grad.to(x.dtype)
    need_x, need_weight = ctx.needs_input_grad
    return grad @ weight if need_x else None, grad.T @ x if need_weight else None


def _keep_factors(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


_linear_fp32.register_autograd(_linear_fp32_backward, setup_context=_keep_factors)


def balanced_choice(tokens: int, top_k: int, num_experts: int, device) -> tuple[Tensor, Tensor]:
    """The fake gate of published benchmarks: experts in turn, top_k neighbouring ones for each
    token, equal weights.

    A token's experts depend on its place in the forward pass, so what is learned depends on how a
    step is cut up.
    """
    indices = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % num_experts
    return indices, torch.full((tokens, top_k), 1 / top_k, device=device)


def count_tokens(indices: Tensor, num_experts: int, real: Tensor | None = None) -> Tensor:
    """int64 [num_experts]: how often each occurs in `indices` [tokens, top_k], of the tokens where
    `real` is true.

    real: bool [tokens]; None: of all. Unlike bincount, does not wait for the device.
    """
    ones = torch.ones_like(indices) if real is None else real.long()[:, None].expand_as(indices)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add(0, indices.flatten(), ones.flatten())


def is_recomputing() -> bool:
    """Is this a second forward pass, run inside a backward pass? A compiled block keeps what the
    first one counted.
    """
    # there is no public name
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class AttachLoss(torch.autograd.Function):
    """Returns `x` and gives `loss`, a scalar, the gradient 1, as if it were added to what is
    differentiated.
    """

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


@torch.no_grad()
def update_selection_bias(
    model: nn.Module,
    speed: float | Tensor,
    sum_load: Callable[[Tensor], Tensor] = lambda load: load,
):
    """After an optimizer step: bias += speed x sign(mean load - load) in every sigmoid router
    (DeepSeek-V3, 2.1.2).

    sum_load: [routers, experts] -> the same, summed over all ranks that saw other tokens.
    """
    routers = [m for m in model.modules() if isinstance(m, Router) and m.load is not None]
    if not routers:
        return
    load = sum_load(torch.stack([router.load for router in routers])).float()
    changes = speed * torch.sign(load.mean(-1, keepdim=True) - load)
    for router, change in zip(routers, changes, strict=True):
        router.e_score_correction_bias += change
        router.load = None


# ------------------------------------------------------------------------------------------------------------- dispatch


def dispatch(x: Tensor, indices: Tensor, weights: Tensor, experts: "Experts") -> Tensor:
    """Each token's weighted sum over its experts. x: [tokens, hidden]; indices, weights: [tokens,
    top_k].
    """
    # token x top_k + choice, sorted by expert; a sort passes over its keys once for every few bits
    # that they have
    order = indices.flatten().to(torch.int32).argsort(stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    counts = count_tokens(indices, experts.num_experts)
    top_k = indices.shape[1]
    rows = Permute.apply(x, order // top_k, place, top_k)
    rows = experts(rows, Permute.apply(weights.flatten(), order, place, 1), counts)
    return Unpermute.apply(rows, order // top_k, place, top_k)


class Permute(torch.autograd.Function):
    """[tokens, ...] -> [tokens x top_k, ...]: row i is token source[i].

    place [tokens x top_k]: in which row a token's 1st, 2nd, ... copy is. Backward is `Unpermute`.
    """

    @staticmethod
    def forward(ctx, x, source, place, top_k):
        ctx.save_for_backward(source, place)
        ctx.top_k = top_k
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad):
        return Unpermute.apply(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


class Unpermute(torch.autograd.Function):
    """[tokens x top_k, ...] -> [tokens, ...]: the sum of each token's rows. Backward is
    `Permute`.
    """

    @staticmethod
    def forward(ctx, rows, source, place, top_k):
        ctx.save_for_backward(source, place)
        ctx.top_k = top_k
        return rows.index_select(0, place).unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def backward(ctx, grad):
        return Permute.apply(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


# -------------------------------------------------------------------------------------------------------------- experts


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """GPT-OSS: both inputs are limited to 7, the sigmoid is steeper, and the linear part is shifted
    by one.
    """
    gate = gate.clamp(max=7.0)
    return (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)


# and relu2, of decoder_config.EXPERT_MLPS, without a gate
GATED = {"swiglu": swiglu, "clamped_swiglu": clamped_swiglu}


class Experts(nn.Module):
    """All experts' weights. gate_up_proj: gate and up rows interleaved (gate 0, up 0, gate 1, ...);
    without a gate, up_proj.

    So a range of rows is a range of whole channels, and tensor parallelism can split every
    parameter here evenly.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, mlp: str, bias: bool):
        super().__init__()
        self.num_experts = num_experts
        self.gated = GATED.get(mlp)
        self.first = "gate_up_proj" if self.gated else "up_proj"
        width = 2 * intermediate if self.gated else intermediate
        for name, out, into in ((self.first, width, hidden), ("down_proj", hidden, intermediate)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, out, into)))
            self.register_parameter(
                name + "_bias", nn.Parameter(torch.empty(num_experts, out)) if bias else None
            )

    def forward(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """x: [rows, hidden], sorted by expert; weights: [rows]; counts: int64 [experts]. Returns
        x's shape.

        A row's output is multiplied by its weight, before the last product: on fewer channels, and
        its backward then needs no output.
        """
        offsets = counts.cumsum(0, dtype=torch.int32)
        weights = weights[:, None]
        hidden = self._linear(self.first, x, torch.ones_like(weights), offsets)
        if self.gated:
            gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
            # copies, without the compiler: far faster on CPU
            hidden = self.gated(gate.contiguous(), up.contiguous())
        else:
            hidden = F.relu(hidden).square()
        return self._linear("down_proj", hidden * weights, weights, offsets)

    def _linear(self, name: str, x: Tensor, scale: Tensor, offsets: Tensor) -> Tensor:
        """x W_e^T + scale b_e."""
        y = self._product(name, x, offsets)
        bias = getattr(self, name + "_bias")
        return y if bias is None else y + RowBiases.apply(bias, scale, offsets)

    def _product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        return grouped_mm(x, getattr(self, name).transpose(-2, -1), offsets)


class RowBiases(torch.autograd.Function):
    """[rows, out]: scale [rows, 1] x its expert's row of bias [experts, out].

    A few biases stay in the cache: looking them up costs no memory traffic. Their gradient, which
    autograd would scatter row by row, is a product.
    """

    @staticmethod
    def forward(ctx, bias, scale, offsets):
        rows = torch.arange(len(scale), dtype=offsets.dtype, device=scale.device)
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
            # grouped_mm wants rows of 16 bytes
            padded = F.pad(scale.to(grad.dtype), (0, 7))
            # a padded.T would be copied by the compiler
            grad_bias = grouped_mm(grad.T, padded, offsets)[..., 0]
        if ctx.needs_input_grad[1]:
            grad_scale = (grad * bias[expert]).sum(-1, keepdim=True)
        return grad_bias, grad_scale, None


def grouped_mm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """Rows that are sorted by expert, each expert's on their own. offsets: int32 [experts], where
    each one's rows end.

    x: [rows, in], y: a stack [experts, in, out]: each row times its expert's matrix, [rows, out].
    Or x: [in, rows],
    y: [rows, out]: the stack [experts, in, out] of the products of each expert's rows, 0 for an
    expert without any. The compiler knows the shapes of torch's operator in bf16 only, so in other
    types it gets ours, which is the same, or made of oneDNN's products.
    """
    garbage = leaves_garbage(x.device.type)
    if garbage and y.ndim == 3:
        y = CleanGradient.apply(y, offsets)
    ours = torch.compiler.is_compiling() and x.dtype != torch.bfloat16
    product = (
        _grouped_mm(x, y, offsets) if ours or _by_onednn(x, y) else F.grouped_mm(x, y, offs=offsets)
    )
    return zero_where_empty(product, offsets) if garbage and y.ndim == 2 else product


@torch.compiler.assume_constant_result
def leaves_garbage(device: str) -> bool:
    """On Blackwell, torch's product of no rows is whatever was there before (pytorch's issue
    172439, open in 2.13).
    """
    return device == "cuda" and torch.cuda.get_device_capability() >= (10, 0)


def zero_where_empty(stack: Tensor, offsets: Tensor) -> Tensor:
    empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
    # which keeps the layout
    return torch.where(empty[:, None, None], 0, stack)


class CleanGradient(torch.autograd.Function):
    """A stack whose gradient is 0 for experts without rows, whatever was written there."""

    @staticmethod
    def forward(ctx, stack, offsets):
        ctx.save_for_backward(offsets)
        return stack.view_as(stack)

    @staticmethod
    def backward(ctx, grad):
        return zero_where_empty(grad, *ctx.saved_tensors), None


def _by_onednn(x: Tensor, y: Tensor) -> bool:
    return takes(x, 2 * x.numel() * y.shape[-1])


@torch.library.custom_op("minitrain::grouped_mm", mutates_args=())
def _grouped_mm(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    if _by_onednn(x, y):
        return grouped_matmul(x, y, offsets.tolist())
    return F.grouped_mm(x, y, offs=offsets)


@_grouped_mm.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    # of matrices alone, what they have in common is cut by expert
    stacked = () if y.ndim == 3 else offsets.shape
    return x.new_empty(*stacked, x.shape[0], y.shape[-1])


def _grouped_mm_backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """A stack is weights transposed, and so is its gradient: the weights' is contiguous, and
    nothing copies it.
    """
    x, stack, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    # [experts, out, in]
    grad_weights = _grouped_mm(grad.T, x, offsets)
    return _grouped_mm(grad, stack.transpose(-2, -1), offsets), grad_weights.transpose(-2, -1), None


_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_keep_factors)
