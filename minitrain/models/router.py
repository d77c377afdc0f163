"""The router of a mixture of experts: select top_k experts for each token, and their weights.

Three fields of the config balance the load of experts. All are off by default:

    bias_update_speed     update the selection bias (auxiliary-loss-free balancing, DeepSeek-V3)
    router_aux_loss_coef  add an auxiliary loss (Switch Transformer, Fedus et al. 2021)
    fake_balanced_gate    select experts in turn, as when the published throughputs were measured

Left out: router noise and z-loss.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.variants import at_least_fp32

if TYPE_CHECKING:
    from minitrain.models.decoder_config import DecoderConfig


class Router(nn.Module):
    """A linear layer over experts, followed by top-k selection.

    scoring_func: `softmax` over the logits of all experts, or `sigmoid` of each (DeepSeek-V3).
    norm_topk_prob: divide the weights of the selected experts by their sum, as all published models
        do.
    Sigmoid routers select by score + e_score_correction_bias, a buffer without a gradient, and
    multiply weights by routed_scaling_factor. With n_group > 1 they first select topk_group groups
    of experts, by the sum of a group's two best scores, and then experts of these groups alone.
    """

    def __init__(self, config: "DecoderConfig"):
        super().__init__()
        self.config = config
        self.is_fake = config.fake_balanced_gate
        self.sigmoid = config.scoring_func == "sigmoid"
        self.num_experts = config.num_experts
        self.top_k = config.num_experts_per_tok
        # int64 [tokens, top_k]: experts to select in the forward passes to come, where they are not
        # negative (`replay_routing`); None: the router's own
        self.replayed: Tensor | None = None
        # int64 [experts]: tokens per expert since the last update of the bias
        self.load: Tensor | None = None
        # []: the tokens that the auxiliary loss is averaged over, of all ranks and micro-batches;
        # None: those of the forward pass
        self.tokens_per_step: Tensor | None = None
        # exchange point: sum over the ranks whose tokens are balanced together
        self.sum_counts: Callable = lambda counts: counts
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(self.num_experts)) if config.expert_bias else None
        if self.sigmoid:
            bias = torch.zeros(self.num_experts, dtype=torch.float32)
            self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the selected experts, int64 [tokens, top_k], and their weights in fp32.

        x: [batch, seq, hidden].
        document_ids: int [batch, seq], below 0 for padding. Padding is routed, but not counted for
            load balancing: it is one token many times, which would fill the same few experts.
        """
        if self.is_fake:
            return balanced_routing(x.shape[:-1].numel(), self.top_k, self.num_experts, x.device)
        # [tokens, experts]
        logits = linear_fp32(x.flatten(0, -2), self.weight)
        if self.bias is not None:
            logits = logits + self.bias.float()
        # softmax keeps the order of logits, so they serve to select
        scores = logits.sigmoid() if self.sigmoid else logits
        indices = self._select(scores.detach())
        if self.replayed is not None:
            indices = self.replayed.where(self.replayed >= 0, indices)
        weights = self._weigh(scores, indices)
        valid = None if document_ids is None else document_ids.flatten() >= 0
        training = torch.is_grad_enabled()
        if training and self.config.bias_update_speed and not is_recomputing():
            counts = count_tokens(indices, self.num_experts, valid)
            self.load = counts if self.load is None else self.load + counts
        if training and self.config.router_aux_loss_coef:
            # [tokens, experts], each token's sum is 1
            shares = scores / scores.sum(-1, keepdim=True) if self.sigmoid else scores.softmax(-1)
            sequences = x.shape[:-2].numel() if self.config.seq_aux else 1
            loss = self._aux_loss(shares, indices, sequences, valid)
            weights = AttachLoss.apply(weights, loss)
        return indices, weights

    def _apply(self, fn, recurse=True):
        """Cast or move the module, but keep the selection bias in fp32: bf16 would lose steps of 1e-3."""
        before = getattr(self, "e_score_correction_bias", None)
        super()._apply(fn, recurse)
        if before is not None:
            self.e_score_correction_bias = at_least_fp32(fn)(before)
        return self

    def _select(self, scores: Tensor) -> Tensor:
        """Return the top-k experts, int64 [tokens, top_k]. scores: [tokens, experts]."""
        if self.sigmoid:
            scores = scores + self.e_score_correction_bias
        if self.config.n_group > 1:
            # [tokens, groups, experts per group]
            grouped = scores.unflatten(-1, (self.config.n_group, -1))
            # [tokens, groups]
            group_scores = grouped.topk(2, dim=-1).values.sum(-1)
            best = group_scores.topk(self.config.topk_group, dim=-1).indices
            # bool [tokens, groups]
            dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(dropped[..., None], -torch.inf).flatten(1)
        return scores.topk(self.top_k, dim=-1).indices

    def _weigh(self, scores: Tensor, indices: Tensor) -> Tensor:
        """Return the weights of the selected experts, [tokens, top_k].

        scores: [tokens, experts], logits or their sigmoids; indices: [tokens, top_k].
        """
        selected = scores.gather(1, indices)
        normalize = self.config.norm_topk_prob
        if self.sigmoid:
            if normalize:
                selected = selected / (selected.sum(-1, keepdim=True) + 1e-20)
            return selected * self.config.routed_scaling_factor
        if normalize:
            # equal to the softmax over all experts, divided by the sum of the selected
            return selected.softmax(-1)
        return (selected - scores.logsumexp(-1, keepdim=True)).exp()

    def _aux_loss(
        self, shares: Tensor, indices: Tensor, sequences: int, valid: Tensor | None = None
    ) -> Tensor:
        """Return this forward pass's term of the auxiliary loss coef x E sum_e f_e P_e, [].

        f_e: the fraction of selections that fell on expert e; P_e: the mean of e's `shares`. Both
        are over all tokens of the forward pass (Fedus et al. 2021, eq. 4), or with seq_aux over
        those of each sequence (DeepSeek-V3, eq. 17). The loss is a mean over a step's tokens, and
        equals coef if experts are balanced.
        shares: [tokens, experts]; indices: [tokens, top_k].
        sequences: how many to balance each by itself; 1: all tokens together.
        valid: bool [tokens]: the tokens that count; None: all.
        """
        experts = self.num_experts
        if valid is None:
            valid = torch.ones(len(shares), dtype=torch.bool, device=shares.device)
        # to count all sequences at once, number the experts of sequence i from i x experts on
        first = experts * torch.arange(sequences, device=indices.device)[:, None, None]
        indices = (indices.view(sequences, -1, self.top_k) + first).flatten(0, 1)
        counts = count_tokens(indices, sequences * experts, valid).view(sequences, experts)
        # over the ranks that balance these tokens together
        counts = self.sum_counts(counts).float()
        f = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        # [sequences, experts]: P_e times the tokens of each sequence, so that f x P is summed over
        # tokens
        summed = (shares * valid[:, None]).view(sequences, -1, experts).sum(1)
        tokens = valid.sum() if self.tokens_per_step is None else self.tokens_per_step
        coefficient = self.config.router_aux_loss_coef * experts
        return coefficient * (f * summed).sum() / tokens.clamp(min=1)


# --- fp32 logits


def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T in fp32, [tokens, out]. x: [tokens, in]; weight: [out, in]; of any type."""
    if x.dtype == weight.dtype == torch.bfloat16:
        return _linear_fp32(x, weight)
    return F.linear(x.float(), weight.float())


@torch.library.custom_op("minitrain::linear_fp32", mutates_args=())
def _linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply bf16 x [tokens, in] by weight [out, in] with an fp32 result [tokens, out].

    bf16 x bf16 is exact in fp32, and tensor cores accumulate in fp32. Inputs cast to fp32 could not
    use tensor cores, and would take up to 15 times as long.
    """
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())


@_linear_fp32.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    # [tokens, out]
    return x.new_empty(len(x), len(weight), dtype=torch.float32)


def _linear_fp32_backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weight, as of a bf16 Linear. grad: fp32 [tokens, out]."""
    x, weight = ctx.saved_tensors
    # rounded to bf16
    grad = grad.to(x.dtype)
    need_x, need_weight = ctx.needs_input_grad
    return grad @ weight if need_x else None, grad.T @ x if need_weight else None


_linear_fp32.register_autograd(
    _linear_fp32_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# --- replay


def replay_routing(model: nn.Module, routes: Tensor | None) -> None:
    """Let the routers select the experts that a sampler's routers have selected, until the next call.

    routes: int [batch, seq, routers x top_k], of the layers' routers in order; negative, or for None,
    they select their own. They stay for the second forward passes of recomputation.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for n, router in enumerate(routers):
        first = n * router.top_k
        # those of multi-token prediction, the last ones, are not sampled with
        known = routes is not None and first < routes.shape[-1]
        router.replayed = None
        if known:
            router.replayed = routes[..., first : first + router.top_k].flatten(0, -2).long()


# --- load balancing


def balanced_routing(tokens: int, top_k: int, num_experts: int, device) -> tuple[Tensor, Tensor]:
    """Select experts in turn with equal weights, as the fake gate of published benchmarks.

    Returns indices and weights, [tokens, top_k]: each token gets top_k neighboring experts. Which
    ones depends on its index in the forward pass, so results depend on the size of micro-batches.
    """
    indices = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % num_experts
    return indices, torch.full((tokens, top_k), 1 / top_k, device=device)


def count_tokens(indices: Tensor, num_experts: int, valid: Tensor | None = None) -> Tensor:
    """Count the tokens of each expert, int64 [num_experts].

    indices: int64 [tokens, top_k]. valid: bool [tokens], the tokens to count; None: all.
    Unlike torch.bincount it does not wait for the device.
    """
    # [tokens, top_k]: 1 for a selection that counts, else 0
    ones = torch.ones_like(indices) if valid is None else valid.long()[:, None].expand_as(indices)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add(0, indices.flatten(), ones.flatten())


def is_recomputing() -> bool:
    """Return whether this is a second forward pass, run by activation checkpointing.

    False while compiling: recompute.py makes compiled blocks skip side effects in a second pass.
    """
    # autograd is running; there is no public name for asking
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class AttachLoss(torch.autograd.Function):
    """The identity on x [...] that gives `loss` [] the gradient 1.

    That is as if `loss` were added to the loss that is differentiated.
    """

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.new_ones(())


@torch.no_grad()
def update_selection_bias(
    routers: Iterable[Router],
    factor: float | Tensor,
    sum_load: Callable[[Tensor], Tensor] = lambda load: load,
) -> None:
    """Add factor x bias_update_speed x sign(mean load - load) to the bias of routers, after a step.

    Only routers whose bias_update_speed is not 0 have counted a load.
    factor: a number or [], 0 if the step is skipped. sum_load: sum load [routers, experts] over the
    ranks that saw other tokens.
    Source: DeepSeek-V3, 2.1.2.
    """
    routers = [router for router in routers if router.load is not None]
    if not routers:
        return
    load = sum_load(torch.stack([router.load for router in routers])).float()
    changes = (
        routers[0].config.bias_update_speed
        * factor
        * torch.sign(load.mean(-1, keepdim=True) - load)
    )
    for router, change in zip(routers, changes, strict=True):
        router.e_score_correction_bias += change
        router.load = None
