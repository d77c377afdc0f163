"""The Mamba-2 mixer (Dao & Gu 2024, "Transformers are SSMs") of Nemotron-H, as matrix products.

Each head of P channels keeps a state S [P, N], which every token decays, adds to and reads from:

    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T    A = -exp(A_log) < 0: one number per head
    y_t = S_t C_t + D x_t                         dt_t = softplus(input + dt_bias) > 0: one
                                                  number per head and token

One projection makes x [P] per head, B and C [N], and dt of a token. The heads of a group share B
and C, as query heads share keys and values in grouped-query attention. Unrolled, with
a = cumsum(dt A),

    y_t = sum_(j <= t) (C_t . B_j) exp(a_t - a_j) dt_j x_j + D x_t

which is attention without softmax, with a decaying mask. `scan` cuts a sequence into chunks of Q
tokens (section 6 of the paper), and `a` starts at 0 in each:

    inside a chunk      the sum above over the chunk's tokens, as a masked [Q, Q] matrix per head
    added by a chunk    S_c = sum_j exp(a_Q - a_j) dt_j x_j B_j^T, to the state
    state at its start  S = sum of earlier chunks' S_c, each decayed by the chunks in between: a
                        product with a [chunks, chunks] matrix
    read by token i     exp(a_i) S C_i, from the state at the start

Decays are exponentials of fp32 differences, none above 0. They become 0 at the first token of a
document. Decoding is the same scan, one token long, from the state that earlier tokens left.

Rows of in_proj and channels of the convolution are ordered by group, [z x B C dt] of group 0 first.
So a range of rows is a range of whole heads, and tensor parallelism can split every parameter
evenly. Hub checkpoints have all of z first, then all of x, ...; `by_group` and `by_part` convert.
Left out: fused kernels; torch.compile fuses what is pointwise.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.layers import identity
from minitrain.models.shapes.mixers import MambaShape
from minitrain.models.variants import KeepsFP32


def by_group(tensor: Tensor, parts: list[int], groups: int) -> Tensor:
    """Reorder the rows of a tensor [rows, ...] from part by part to group by group.

    From [part 1 | part 2 | ...] to [group 1 of every part | group 2 of every part | ...].
    parts: the number of rows of each part.
    """
    split = [part.unflatten(0, (groups, -1)) for part in tensor.split(parts)]
    return torch.cat(split, dim=1).flatten(0, 1)


def by_part(tensor: Tensor, parts: list[int], groups: int) -> Tensor:
    """Undo `by_group` on a tensor [rows, ...]."""
    split = tensor.unflatten(0, (groups, -1)).split([rows // groups for rows in parts], dim=1)
    return torch.cat([part.flatten(0, 1) for part in split])


class GroupedRMSNorm(nn.Module):
    """RMSNorm of x silu(z) over each group of channels. x, z: [batch, seq, groups, channels]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        # [batch, seq, groups, channels]
        gated = x.float() * F.silu(z.float())
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(z.dtype)


class Dynamics(KeepsFP32):
    """The parameters of each head's recurrence, in fp32.

    A_log and D act over whole sequences, and dt_bias learns in tiny steps.
    """

    def __init__(self, heads: int, *names: str):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.empty(heads)))


ALL = slice(None)
# what decoding keeps of earlier tokens: the convolution's last taps - 1 inputs,
# [batch, taps - 1, groups, channels], and the scan's state, fp32 [batch, groups, *states of the shape]
State = tuple[Tensor, Tensor]


class Mamba2(nn.Module):
    """out_proj(norm(scan(silu(conv([x B C])), dt) * silu(z))), with [z x B C dt] = in_proj(x).

    `mix` is an exchange point: context parallelism exchanges groups for tokens around it.
    """

    def __init__(self, hidden: int, shape: MambaShape, norm_eps: float):
        super().__init__()
        self.shape = shape
        # exchange points of tensor parallelism
        self.gather = self.reduce = identity
        channels = sum(shape.convolved)
        self.in_proj = nn.Linear(hidden, sum(shape.projected), bias=False)
        # holds the parameters of `causal_conv`
        self.conv1d = nn.Conv1d(channels, channels, shape.conv, groups=channels)
        self.dynamics = Dynamics(shape.heads, "A_log", "D", "dt_bias")
        self.norm = GroupedRMSNorm(shape.width, norm_eps)
        self.out_proj = nn.Linear(shape.width, hidden, bias=False)

    def forward(self, x: Tensor, document_ids: Tensor | None = None, cache=None) -> Tensor:
        """Return [batch, seq, hidden], as x.

        document_ids: int [batch, seq]; a change clears state and convolution.
        cache: the states of earlier tokens (rollout/caches.py).
        """
        group_heads = self.shape.heads // self.shape.groups
        head_dim = self.shape.head_dim
        n_state = self.shape.state
        split = [group_heads * head_dim, group_heads * head_dim + 2 * n_state, group_heads]
        # [batch, seq, groups, z + x + B + C + dt]
        projected = self.in_proj(self.gather(x)).unflatten(-1, (-1, sum(split)))
        # mixed: x, B, C, which the convolution mixes along seq
        z, mixed, dt = projected.split(split, dim=-1)
        y = self.mix(mixed, dt, document_ids) if cache is None else cache.mix(self.mix, mixed, dt)
        y = self.norm(y.flatten(-2), z)
        return self.reduce(self.out_proj(y.flatten(-2)))

    def mix(
        self,
        mixed: Tensor,
        dt: Tensor,
        document_ids: Tensor | None = None,
        state: State | None = None,
        groups: slice = ALL,
    ) -> Tensor:
        """Apply convolution and scan. Return [batch, seq, groups, heads of a group, head_dim].

        mixed: x, B, C as projected, [batch, seq, groups, channels].
        dt: as projected, [batch, seq, groups, heads of a group].
        document_ids: int [batch, seq].
        state: of earlier tokens, overwritten by that after the last.
        groups: those of this mixer's that mixed and dt have (context parallelism).
        """
        group_heads = dt.shape[-1]
        head_dim = self.shape.head_dim
        conv, ssm = (None, None) if state is None else state

        def of_groups(parameter: Tensor, channels: int) -> Tensor:
            """Return [groups x channels, ...] as [groups, channels, ...], of the given groups."""
            return parameter.unflatten(0, (-1, channels))[groups]

        weight = of_groups(self.conv1d.weight, mixed.shape[-1])
        bias = of_groups(self.conv1d.bias, mixed.shape[-1])
        mixed = causal_conv(mixed, weight, bias, document_ids, conv)
        # not F.silu: the compiler would keep its fp32 intermediate
        mixed = mixed * torch.sigmoid(mixed)
        n_state = self.shape.state
        x, b, c = mixed.split([group_heads * head_dim, n_state, n_state], dim=-1)
        dt = F.softplus(dt.float() + of_groups(self.dynamics.dt_bias, group_heads))
        if self.shape.dt_min:
            dt = dt.clamp(min=self.shape.dt_min)
        a = -of_groups(self.dynamics.A_log, group_heads).exp()
        d = of_groups(self.dynamics.D, group_heads)
        # [batch, seq, groups, heads, head_dim]
        x = x.unflatten(-1, (group_heads, head_dim))
        chunk = min(self.shape.chunk, x.shape[1])
        return scan(x, dt, a, d, b, c, chunk, document_ids, ssm)


def initialize_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Fill a mixer's parameter [...] as NeMo AutoModel does; return False if it has no own rule."""
    name = name.removeprefix("dynamics.")
    if name == "A_log":
        # A = -1, -2, ..., -H; mamba_ssm and Megatron draw it between -16 and -1
        tensor.copy_(torch.arange(1, len(tensor) + 1).log())
    elif name in ("D", "norm.weight"):
        tensor.fill_(1)
    elif name == "dt_bias":
        # its softplus, dt, is log-uniform between 0.001 and 0.1
        dt = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
        # the inverse of softplus
        tensor.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif name == "conv1d.weight":
        bound = tensor.shape[-1] ** -0.5
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        return False
    return True


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    document_ids: Tensor | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """Return y_t = bias + sum_k weight[..., 0, -1 - k] x_(t - k), over the tokens of t's document.

    Each channel is convolved by itself.
    x: [batch, seq, groups, channels], as y.
    weight: [groups, channels, 1, taps]; bias: [groups, channels], or None.
    document_ids: int [batch, seq].
    earlier: [batch, taps - 1, groups, channels], the inputs before x, overwritten by x's last ones.

    This sums shifted products in place of a convolution: the compiler fuses them with their
    surroundings, and documents cost nothing. Products are shifted, not inputs, so that the backward
    pass needs x alone and no padded copy.
    """
    seq = x.shape[1]
    taps = weight.shape[-1]
    if earlier is not None:
        x = torch.cat([earlier, x], dim=1)
        earlier.copy_(x[:, seq:])
    y = 0 if bias is None else bias
    for k in range(taps):
        # x_(t - k) with `earlier`; without it x, and the product is shifted below
        window = x if earlier is None else x[:, taps - 1 - k :][:, :seq]
        product = window * weight[..., 0, -1 - k]
        if k and earlier is None:
            product = F.pad(product, (0, 0, 0, 0, k, 0))[:, :seq]
        if k and document_ids is not None:
            same = document_ids == F.pad(document_ids, (k, 0))[:, :seq]
            product = product * same[..., None, None]
        y = y + product
    return y


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    d: Tensor,
    b: Tensor,
    c: Tensor,
    chunk: int,
    document_ids: Tensor | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """Compute the recurrence at the top of this file, chunk by chunk. Return x's shape and type.

    x: [batch, seq, G, R, P], for R heads of each of G groups.
    dt: fp32 [batch, seq, G, R], above 0.
    a, d: fp32 [G, R]; a is below 0.
    b, c: [batch, seq, G, N].
    document_ids: int [batch, seq]; the state is cleared where they change.
    initial: fp32 [batch, G, R, P, N], the state before the first token, overwritten by that after
        the last. Only without documents.

    Letters in einsum: z batch, k chunk, q token of a chunk, g group, r head, p channel, n state; i
    and j are two tokens of a chunk, or in `_carry` two chunks.
    """
    length = x.shape[1]
    runs = number_runs(document_ids, x[:, :, 0, 0, 0])
    # [batch, chunks, Q, ...] each
    xs, dts, bs, cs, runs = (into_chunks(tensor, chunk) for tensor in (x, dt, b, c, runs))
    # [batch, chunks, Q, G, R]: log of the decay since the chunk's start
    decay = running_sum(dts * a, 2)
    # [batch, chunks]: the run at each chunk's end, and at the end of the chunk before
    last = runs[:, :, -1]
    before = F.pad(last, (1, 0))[:, :-1]
    # [batch, chunks, Q, G, R, P]
    inside = _inside((xs * dts[..., None]).to(x.dtype), bs, cs, decay, runs)
    # [batch, chunks, G, R, P, N], as `carried`
    added = _added(xs, dts, bs, decay, runs == last[..., None])
    # [batch, chunks, G, R]: log of the decay over a whole chunk
    decays = decay[:, :, -1]
    # the state at each chunk's start
    carried = _carry(added if initial is None else added.float(), decays, last, before)
    if initial is not None:
        carried = carried + _continue(initial, added, carried, decays)
    # what tokens read from it, and how much of it is left at each: 0 in a later document
    read = torch.einsum("zkqgn,zkgrpn->zkqgrp", cs, carried.to(c.dtype))
    left = decay.exp() * (runs == before[..., None])[..., None, None]
    y = (inside + read * left[..., None]).flatten(1, 2)[:, :length]
    return (y + x * d[..., None]).to(x.dtype)


def number_runs(document_ids: Tensor | None, like: Tensor) -> Tensor:
    """Number runs of equal ids 0, 1, 2, ...: between equal numbers no state is cleared.

    document_ids, like: [batch, seq], as the result; without ids there is one run.
    """
    if document_ids is None:
        return torch.zeros_like(like, dtype=torch.int)
    begins = document_ids[:, 1:] != document_ids[:, :-1]
    return F.pad(begins, (1, 0)).cumsum(1)


def into_chunks(x: Tensor, chunk: int) -> Tensor:
    """Cut x [batch, seq, ...] into [batch, chunks, Q, ...], padded with zeros.

    A token with dt = 0 changes nothing.
    """
    # F.pad by 0 would copy
    if missing := -x.shape[1] % chunk:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def _inside(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, runs: Tensor) -> Tensor:
    """Return what tokens read from others of their chunk, [batch, chunks, Q, G, R, P].

    x: x dt, [batch, chunks, Q, G, R, P]; b, c: [batch, chunks, Q, G, N].
    decay: [batch, chunks, Q, G, R], logs; runs: [batch, chunks, Q].
    """
    # [batch, chunks, G, R, Q]
    decay = decay.permute(0, 1, 3, 4, 2)
    size = decay.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    # [batch, chunks, Q, Q]
    seen = causal & (runs[..., :, None] == runs[..., None, :])
    # [batch, chunks, G, R, Q, Q]: exp(a_i - a_j)
    difference = decay[..., :, None] - decay[..., None, :]
    weight = exp_where(seen[:, :, None, None], difference)
    # [batch, chunks, G, Q, Q], for all heads of a group
    scores = torch.einsum("zkign,zkjgn->zkgij", c, b)
    weight = (scores[:, :, :, None] * weight).to(x.dtype)
    return torch.einsum("zkgrij,zkjgrp->zkigrp", weight, x)


def _added(x: Tensor, dt: Tensor, b: Tensor, decay: Tensor, alive: Tensor) -> Tensor:
    """Return the state that each chunk adds, [batch, chunks, G, R, P, N].

    x, dt, b, decay: [batch, chunks, Q, ...], as in `scan`.
    alive: bool [batch, chunks, Q], tokens whose document lasts until the chunk's end.
    """
    weight = (decay[:, :, -1:] - decay).exp() * dt * alive[..., None, None]
    # chunks first in memory, as `_carry` multiplies it, without a copy
    added = torch.einsum("zkqgrp,zkqgn->kzgrpn", (x * weight[..., None]).to(x.dtype), b)
    return added.transpose(0, 1)


def _carry(added: Tensor, decay: Tensor, last: Tensor, before: Tensor) -> Tensor:
    """Return the state at each chunk's start: the sum of what earlier ones added, decayed since.

    added: [batch, chunks, G, R, P, N], as the result.
    decay: [batch, chunks, G, R], of whole chunks.
    last, before: [batch, chunks], see `scan`. The state of chunk j survives until chunk i if its
        last run still lasts at the end of chunk i - 1.
    It is computed in the type of `added`. fp32 would move twice the bytes, and rounding the weights
    adds at most a twentieth to the error of the scan, whose states are rounded anyway.
    """
    chunks = decay.shape[1]
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=decay.device).tril(-1)
    # [batch, G, R, chunk i, chunk j]: the decay of chunks j + 1 to i, summed from there on; as a
    # difference of two running sums it would be less exact
    through = running_sum(decay.permute(0, 2, 3, 1)[..., None] * earlier, -2)
    # from the end of chunk j to the start of chunk i
    since = F.pad(through, (0, 0, 1, -1))
    survives = earlier & (before[:, :, None] == last[:, None, :])
    weight = exp_where(survives[:, None, None], since)
    return torch.einsum("zgrij,zjgrpn->zigrpn", weight.to(added.dtype), added)


def _continue(initial: Tensor, added: Tensor, carried: Tensor, decay: Tensor) -> Tensor:
    """Return what is left of `initial` at each chunk's start; set it to the state after the last.

    initial: [batch, G, R, P, N]. The rest and the result as in `_carry`, [batch, chunks, ...].
    """
    # [batch, chunks + 1, G, R]
    through = F.pad(running_sum(decay, 1), (0, 0, 0, 0, 1, 0)).exp()
    left = through[..., None, None] * initial[:, None]
    last = decay[:, -1].exp()[..., None, None]
    initial.copy_(left[:, -1] + carried[:, -1] * last + added[:, -1])
    return left[:, :-1]


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Return x.cumsum(dim) of x [...], by doubling if torch must be deterministic.

    CUDA's kernel of cumsum is not.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(dim)
    x = x.movedim(dim, -1)
    shift = 1
    while shift < x.shape[-1]:
        x = x + F.pad(x[..., :-shift], (shift, 0))
        shift *= 2
    return x.movedim(-1, dim)


def exp_where(condition: Tensor, x: Tensor) -> Tensor:
    """Return exp(x) of x [...] where the condition holds, else 0: where not, exp could overflow."""
    return torch.where(condition, x, float("-inf")).exp()
