"""Gated DeltaNet (Yang et al. 2024, "Gated Delta Networks"), as matrix products.

Each head of P value channels keeps a state S [K, P], a memory from keys to values. A token decays
it, reads what it holds for the token's key, and moves that toward the token's value:

    S_t = d_t S_(t-1) + k_t u_t^T               d_t = exp(g_t), g_t = -exp(A_log) softplus(a + dt_bias)
    u_t = b_t (v_t - d_t S_(t-1)^T k_t)         b_t = sigmoid(b): 1 replaces it, 0 keeps it
    y_t = S_t^T q_t / sqrt(K)                   |q_t| = |k_t| = 1

Several heads share a key head, which is a group here. `scan` cuts a sequence into chunks of Q
tokens (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule"). With
c = cumsum(g), which starts at 0 in each chunk, and S, the state at its start, the u_i [P] of a chunk
are the solution of a triangular system, and of all chunks at once the parts of it that S does not
change:

    (1 + L) U = b (V - exp(c) K S)              L_ij = b_i exp(c_i - c_j) (k_i . k_j) for j < i
    U = new - erased S                          new = (1 + L)^-1 b V, erased = (1 + L)^-1 b exp(c) K
    next S = step S + added                     step = exp(c_Q) - K'^T erased, added = K'^T new,
                                                where K'_j = exp(c_Q - c_j) k_j
    y_i = exp(c_i) S^T q_i + sum_(j <= i) exp(c_i - c_j) (q_i . k_j) u_j

A step is a matrix [K, K] of norm at most 1, since a token's own is d (1 - b k k^T). So two chunks
are one step too, and `carry` finds the states by pairs of chunks, pairs of pairs, and so on: few
large products instead of a chain as long as the sequence. Decays are exponentials of fp32
differences, none above 0. They become 0 at the first token of a document. Decoding is the same
scan, one token long, from the state that earlier tokens left.

Rows of projections and channels of the convolution are ordered by group, [q k v] of group 0 first,
as Mamba-2's are (mamba.py), for tensor parallelism. Left out: fused kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.layers import identity, project
from minitrain.models.mamba import (
    ALL,
    Dynamics,
    State,
    causal_conv,
    exp_where,
    into_chunks,
    number_runs,
    running_sum,
)
from minitrain.models.mamba import initialize_parameter as initialize_mamba
from minitrain.models.shapes.mixers import DeltaShape
from minitrain.models.video import upcast

# tokens that are computed at once
CHUNK = 64


class GatedRMSNorm(nn.Module):
    """RMSNorm of each head's channels, times silu(z). x, z: [..., head_dim]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        # [..., head_dim]
        normed = F.rms_norm(upcast(x), x.shape[-1:], upcast(self.weight), self.eps)
        return (normed * F.silu(upcast(z))).to(z.dtype)


class GatedDeltaNet(nn.Module):
    """out_proj(norm(scan(silu(conv([q k v])), b, a)) * silu(z)), all of it projected from x.

    `mix` is an exchange point: context parallelism exchanges groups for tokens around it.
    """

    def __init__(self, hidden: int, shape: DeltaShape, norm_eps: float):
        super().__init__()
        self.shape = shape
        # exchange points of tensor parallelism
        self.gather = self.reduce = identity
        heads, key_dim, head_dim = shape.states
        values = heads * head_dim
        mixed = 2 * key_dim + values
        # projection -> the channels that it makes of a group: `mixed`, which are q, k and v, then
        # z, then the heads' b and a
        self.projections = {
            "in_proj_qkv": [mixed],
            "in_proj_z": [values],
            "in_proj_b": [heads],
            "in_proj_a": [heads],
        }
        if shape.fused:
            self.projections = {"in_proj_qkvz": [mixed, values], "in_proj_ba": [2 * heads]}
        for name, parts in self.projections.items():
            self.add_module(name, nn.Linear(hidden, shape.groups * sum(parts), bias=False))
        # the sampler computes them as one product
        self.same_input = tuple(self.projections)
        channels = shape.groups * mixed
        # holds the parameters of `causal_conv`
        self.conv1d = nn.Conv1d(channels, channels, shape.conv, groups=channels, bias=False)
        self.dynamics = Dynamics(shape.heads, "A_log", "dt_bias")
        self.norm = GatedRMSNorm(head_dim, norm_eps)
        self.out_proj = nn.Linear(shape.width, hidden, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None, cache=None) -> Tensor:
        """Return [batch, seq, hidden], as x.

        document_ids: int [batch, seq]; a change clears state and convolution.
        cache: the states of earlier tokens (rollout/caches.py).
        """
        projected = project(self.gather(x), *(getattr(self, name) for name in self.projections))
        # [batch, seq, groups, channels of a group] each
        mixed, z, *gates = (
            part
            for y, parts in zip(projected, self.projections.values(), strict=True)
            for part in y.unflatten(-1, (-1, sum(parts))).split(parts, dim=-1)
        )
        gates = torch.cat(gates, dim=-1)
        # [batch, seq, groups, heads, head_dim]
        if cache is None:
            y = self.mix(mixed, gates, document_ids)
        else:
            y = cache.mix(self.mix, mixed, gates)
        y = self.norm(y, z.unflatten(-1, y.shape[-2:]))
        return self.reduce(self.out_proj(y.flatten(2)))

    def mix(
        self,
        mixed: Tensor,
        gates: Tensor,
        document_ids: Tensor | None = None,
        state: State | None = None,
        groups: slice = ALL,
    ) -> Tensor:
        """Apply convolution and scan. Return [batch, seq, groups, heads of a group, head_dim].

        mixed: q, k, v as projected, [batch, seq, groups, channels].
        gates: b and a as projected, [batch, seq, groups, 2 x heads of a group].
        document_ids: int [batch, seq].
        state: of earlier tokens, overwritten by that after the last.
        groups: those of this mixer's that mixed and gates have (context parallelism).
        """
        heads, key_dim, head_dim = self.shape.states
        conv, memory = (None, None) if state is None else state
        weight = self.conv1d.weight.unflatten(0, (-1, mixed.shape[-1]))[groups]
        mixed = causal_conv(mixed, weight, None, document_ids, conv)
        # not F.silu: the compiler would keep its fp32 intermediate
        mixed = mixed * torch.sigmoid(mixed)
        q, k, v = mixed.split([key_dim, key_dim, heads * head_dim], dim=-1)
        q = unit(q) * key_dim**-0.5
        # [batch, seq, groups, heads] each
        b, a = upcast(gates).chunk(2, dim=-1)
        a_log, dt_bias = (
            x.unflatten(0, (-1, heads))[groups]
            for x in (self.dynamics.A_log, self.dynamics.dt_bias)
        )
        log_decay = -a_log.exp() * F.softplus(a + dt_bias)
        v = v.unflatten(-1, (heads, head_dim))
        chunk = min(CHUNK, v.shape[1])
        return scan(q, unit(k), v, log_decay, b.sigmoid(), chunk, document_ids, memory)


def unit(x: Tensor) -> Tensor:
    """Return x [..., channels] divided by its norm; 1e-6 as in Qwen3-Next."""
    wide = upcast(x)
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def initialize_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Fill a mixer's parameter [...] as flash-linear-attention does; else return False.

    Its rules are Mamba-2's but for A, which is uniform. transformers' dt_bias of 1 makes heads that
    forget within a token.
    """
    if name == "dynamics.A_log":
        tensor.uniform_(0.01, 16, generator=generator).log_()
    elif name == "norm.weight":
        tensor.fill_(1)
    else:
        return initialize_mamba(name, tensor, generator)
    return True


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    chunk: int,
    document_ids: Tensor | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """Compute the recurrence at the top of this file, chunk by chunk. Return v's shape and type.

    q, k: [batch, seq, G, K], q with its factor 1 / sqrt(K).
    v: [batch, seq, G, R, P], for R heads of each of G groups.
    log_decay, beta: fp32 [batch, seq, G, R]; log_decay is at most 0.
    document_ids: int [batch, seq]; the state is cleared where they change.
    initial: fp32 [batch, G, R, K, P], the state before the first token, overwritten by that after
        the last. Only without documents.
    """
    length = v.shape[1]
    runs = into_chunks(number_runs(document_ids, beta[:, :, 0, 0]), chunk)
    # [batch, chunks, G, 1, Q, K], [batch, chunks, G, R, Q, P] and, without channels, [..., Q]
    q, k = (into_chunks(x, chunk).transpose(2, 3)[:, :, :, None] for x in (q, k))
    v = into_chunks(v, chunk).permute(0, 1, 3, 4, 2, 5)
    # contiguous: compiled, cumsum would have other strides than the compiler expects
    log_decay, beta = (
        into_chunks(x, chunk).permute(0, 1, 3, 4, 2).contiguous() for x in (log_decay, beta)
    )
    reads, keeps, whole, between = decays(log_decay, runs)
    lower = upcast(k @ k.mT) * between * beta[..., None]
    # [..., Q, P + K], for one product: b V and b exp(c) K
    right = torch.cat([v * beta[..., None], k * (beta * reads)[..., None]], dim=-1)
    solved = Inverse.apply(lower).to(v.dtype) @ right.to(v.dtype)
    widths = [v.shape[-1], k.shape[-1]]
    new, erased = solved.split(widths, dim=-1)
    first = initial
    if initial is None:
        first = v.new_zeros(len(v), *v.shape[2:4], *widths[::-1])
    # products with a state that is given are as exact as it
    dtype = torch.promote_types(first.dtype, v.dtype)
    # by all chunks but the last, [..., K, P + K]: K'^T new and K'^T erased
    sums = k[:, :-1].mT @ (solved * keeps[..., None])[:, :-1].to(v.dtype)
    added, removed = sums.split(widths, dim=-1)
    # [..., K, P]: the state at each chunk's start
    states = carry(whole[:, :-1], removed.to(dtype), added.to(dtype), first.to(dtype))
    u = new - erased.to(dtype) @ states
    scores = upcast(q @ k.mT) * (between + torch.eye(between.shape[-1], device=v.device))
    y = (q.to(dtype) @ states) * reads[..., None] + scores.to(dtype) @ u
    if initial is not None:
        kept = k[:, -1].mT.to(dtype) @ (u * keeps[..., None])[:, -1]
        initial.copy_(whole[:, -1, ..., None, None] * states[:, -1] + kept)
    return y.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)[:, :length].to(v.dtype)


def decays(log_decay: Tensor, runs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return how much is left, at each token of a chunk and at its end; 0 in another document.

    log_decay: [batch, chunks, G, R, Q]; runs: [batch, chunks, Q], see `number_runs`.
    Returns, of the state at the chunk's start: at each token, [batch, chunks, G, R, Q]; of a token's
    own part: at the chunk's end, the same; of the state at the start: at the end, [batch, chunks, G,
    R]; of token j's: at a later token i, [batch, chunks, G, R, i, j].
    """
    since = running_sum(log_decay, -1)
    # [batch, chunks]: the run at each chunk's end, and at the end of the chunk before
    last = runs[:, :, -1]
    before = F.pad(last, (1, 0))[:, :-1]
    reads = since.exp() * (runs == before[..., None])[:, :, None, None]
    keeps = (since[..., -1:] - since).exp() * (runs == last[..., None])[:, :, None, None]
    whole = since[..., -1].exp() * (last == before)[..., None, None]
    # without the diagonal: its gradients would hide those of small decays by rounding
    earlier = (runs[..., :, None] == runs[..., None, :]).tril(-1)[:, :, None, None]
    between = exp_where(earlier, since[..., :, None] - since[..., None, :])
    return reads, keeps, whole, between


def carry(whole: Tensor, removed: Tensor, added: Tensor, first: Tensor) -> Tensor:
    """Return the states between chunks, S_(c+1) = whole_c S_c - removed_c S_c + added_c, from S_0 on.

    whole: fp32 [batch, chunks, G, R]; removed: [batch, chunks, G, R, K, K]; added: [batch, chunks, G,
    R, K, P]. first: S_0, [batch, G, R, K, P]; the result has dimension chunks + 1 after batch.
    A decay of almost 1, which a state keeps over many chunks, stays a number of fp32: in bf16 it would
    be 1.
    """
    whole = whole[..., None, None]
    if not whole.shape[1]:
        return first[:, None]

    def follow(chunks: slice, states: Tensor) -> Tensor:
        """Return whole S - removed S of these chunks, for states [batch, as many, G, R, K, any]."""
        return whole[:, chunks] * states - removed[:, chunks] @ states

    pairs = whole.shape[1] // 2
    one, other = slice(0, 2 * pairs, 2), slice(1, None, 2)
    # two chunks as one: (w' - r') (w - r) = w' w - (w r' + w' r - r' r)
    both = whole[:, one] * whole[:, other]
    both_removed = whole[:, one] * removed[:, other] + follow(other, removed[:, one])
    both_added = follow(other, added[:, one]) + added[:, other]
    # S_0, S_2, S_4, ...
    even = carry(
        both[..., 0, 0], both_removed.to(removed.dtype), both_added.to(added.dtype), first
    )
    # S_1, S_3, S_5, ..., of which there may be one more than pairs
    each = slice(0, None, 2)
    count = whole.shape[1] - pairs
    between = (follow(each, even[:, :count]) + added[:, each]).to(first.dtype)
    mixed = torch.stack([even[:, :count], between], dim=2).flatten(1, 2)
    return torch.cat([mixed, even[:, count:]], dim=1)


class Inverse(torch.autograd.Function):
    """(1 + lower)^-1 of strictly lower triangular matrices [..., Q, Q].

    By blocks: the inverse of [[A, 0], [C, B]] is M - M C M, where M is that of [[A, 0], [0, B]].
    From blocks of one row on, each round doubles them.
    """

    @staticmethod
    def forward(ctx, lower):
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower)
        block = 1
        while block < size:
            half = index // block
            # pairs of a block's two halves
            corner = (half[:, None] // 2 == half // 2) & (half[:, None] > half)
            inverse = inverse - inverse @ (lower * corner) @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT).tril(-1)
