"""The Mamba-2 mixer (Dao & Gu 2024, "Transformers are SSMs"), as Nemotron-H uses it, in matrix
products alone.

Each head h of width P keeps a state of N vectors, S [P, N], that every token decays, adds to and
reads from:

    S_t = exp(dt_t A) S_(t-1) + dt_t x_t B_t^T        A = -exp(A_log) < 0: one number per head
    y_t = S_t C_t + D x_t                             dt_t = softplus(input + dt_bias), one per head and token

x, B, C and dt are made from the token by one projection; B and C are shared by the heads of a
group, as keys and values are in grouped-query attention. Unrolled, y_t = sum_(j <= t) (C_t . B_j)
exp(a_t - a_j) dt_j x_j with a = cumsum(dt A): attention without softmax whose mask decays. `scan`
cuts the row into chunks of Q tokens (section 6 of the paper):

    inside a chunk           the sum above as a masked [Q, Q] matrix per head
    what a chunk adds        S_c = sum_j exp(a_Q - a_j) dt_j x_j B_j^T
    state at its start       sum of the earlier S_c, each decayed by the chunks between: a [chunks, chunks] matrix
    what that gives token i  exp(a_i) S C_i

Decays are always exponentials of fp32 differences, of which none is above 0; a document's first
token cuts them off.

Rows of in_proj and channels of the convolution are ordered by group, [z x B C dt] of the first
group first, where Hub checkpoints have all of z first. So a range of rows is a range of whole
heads, with all that they need, and tensor parallelism can split every parameter here evenly;
`by_group` and `by_part` turn one order into the other. A row can also go on from the state that
earlier tokens left: decoding is the same scan, one token long. Left out: fused kernels;
torch.compile fuses what is pointwise.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.models.decoder_config import MambaShape
from minitrain.models.layers import KeepsFP32


def by_group(tensor: Tensor, parts: list[int], groups: int) -> Tensor:
    """Reorder the first dimension from [part 1 | part 2 | ...], `parts` rows each, to [group 1 of
    every part | ...].
    """
    return torch.cat(
        [part.unflatten(0, (groups, -1)) for part in tensor.split(parts)], dim=1
    ).flatten(0, 1)


def by_part(tensor: Tensor, parts: list[int], groups: int) -> Tensor:
    """The inverse of `by_group`."""
    split = tensor.unflatten(0, (groups, -1)).split([rows // groups for rows in parts], dim=1)
    return torch.cat([part.flatten(0, 1) for part in split])


class GroupedRMSNorm(nn.Module):
    """RMSNorm over each group of channels by itself, after gating by silu(z). x, z: [batch, seq,
    groups, channels].
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        gated = x.float() * F.silu(z.float())
        normed = F.rms_norm(gated, gated.shape[-1:], eps=self.eps)
        return (normed * self.weight.float().view(x.shape[-2:])).to(z.dtype)


class Dynamics(KeepsFP32):
    """What each head's state evolves by. A_log and D act over whole rows, and dt_bias learns in
    tiny steps.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))


ALL = slice(None)
# the last taps - 1 inputs of the convolution, and the scan's state: see `mix`
State = tuple[Tensor, Tensor]


class Mamba2(nn.Module):
    """out_proj(norm(scan(silu(conv([x B C])), dt) * silu(z))), all of z, x, B, C, dt from
    in_proj.
    """

    def __init__(self, hidden: int, shape: MambaShape, norm_eps: float):
        super().__init__()
        self.shape = shape
        channels = sum(shape.convolved)
        self.in_proj = nn.Linear(hidden, sum(shape.projected), bias=False)
        # a place for its parameters
        self.conv1d = nn.Conv1d(channels, channels, shape.conv, groups=channels)
        self.dynamics = Dynamics(shape.heads)
        self.norm = GroupedRMSNorm(shape.width, norm_eps)
        self.out_proj = nn.Linear(shape.width, hidden, bias=False)

    def forward(self, x: Tensor, documents: Tensor | None = None, cache=None) -> Tensor:
        """x: [batch, seq, hidden]; documents: int [batch, seq], a change of which clears state and
        convolution.

        cache: holds what earlier tokens have left (rollout/caches.py).
        """
        heads = self.shape.heads // self.shape.groups
        head_dim = self.shape.head_dim
        state = self.shape.state
        split = [heads * head_dim, heads * head_dim + 2 * state, heads]
        # [batch, seq, groups, z x B C dt]
        projected = self.in_proj(x).unflatten(-1, (-1, sum(split)))
        z, mixed, dt = projected.split(split, dim=-1)
        y = self.mix(mixed, dt, documents) if cache is None else cache.mix(self.mix, mixed, dt)
        return self.out_proj(self.norm(y.flatten(-2), z).flatten(-2))

    def mix(
        self,
        mixed: Tensor,
        dt: Tensor,
        documents: Tensor | None = None,
        state: State | None = None,
        groups: slice = ALL,
    ) -> Tensor:
        """Convolution and scan. mixed: x B C and dt as projected. Returns y: [batch, seq, groups,
        heads, head_dim].

        state: what earlier tokens left, which is overwritten by what these leave. groups: which
        ones are given.
        """
        heads = dt.shape[-1]
        head_dim = self.shape.head_dim
        conv, ssm = (None, None) if state is None else state
        weight, bias = (
            p.unflatten(0, (-1, mixed.shape[-1]))[groups]
            for p in (self.conv1d.weight, self.conv1d.bias)
        )
        mixed = causal_conv(mixed, weight, bias, documents, conv)
        # of F.silu, the compiler would store the fp32 that it computes in
        mixed = mixed * torch.sigmoid(mixed)
        x, b, c = mixed.split([heads * head_dim, self.shape.state, self.shape.state], dim=-1)
        dynamics = self.dynamics.A_log, self.dynamics.D, self.dynamics.dt_bias
        a_log, d, dt_bias = (p.unflatten(0, (-1, heads))[groups] for p in dynamics)
        dt = F.softplus(dt.float() + dt_bias)
        if self.shape.dt_min:
            dt = dt.clamp(min=self.shape.dt_min)
        x, chunk = x.unflatten(-1, (heads, head_dim)), min(self.shape.chunk, x.shape[1])
        return scan(x, dt, -a_log.exp(), d, b, c, chunk, documents, ssm)


def initialize_parameter(name: str, tensor: Tensor, generator: torch.Generator) -> bool:
    """Fill a mixer's parameter as NeMo AutoModel does; False, and nothing done, for one without a
    rule of its own.
    """
    name = name.removeprefix("dynamics.")
    # A = -1, -2, ..., -H; mamba_ssm and Megatron draw it between -16 and -1
    if name == "A_log":
        tensor.copy_(torch.arange(1, len(tensor) + 1).log())
    elif name == "D":
        tensor.fill_(1)
    elif name == "dt_bias":
        # softplus of it is log-uniform between 0.001 and 0.1
        dt = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
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
    bias: Tensor,
    documents: Tensor | None = None,
    earlier: Tensor | None = None,
) -> Tensor:
    """y_t = bias + sum_k weight[..., 0, -1 - k] x_(t - k), each channel by itself, over tokens of
    t's document.

    x: [batch, seq, groups, channels]; weight: [groups, channels, 1, taps]; bias: [groups,
    channels]. Shifted products instead of a convolution: the compiler fuses them with what
    surrounds them, and documents cost nothing. Products are shifted, not inputs: the backward pass
    then needs x alone, and no copy of it that is padded.
    earlier: [batch, taps - 1, ...], the tokens before x, which is overwritten by the last ones of
    x.
    """
    seq = x.shape[1]
    taps = weight.shape[-1]
    if earlier is not None:
        x = torch.cat([earlier, x], dim=1)
        earlier.copy_(x[:, seq:])
    y = bias
    for k in range(taps):
        window = x if earlier is None else x[:, taps - 1 - k :][:, :seq]
        product = window * weight[..., 0, -1 - k]
        if k and earlier is None:
            product = F.pad(product, (0, 0, 0, 0, k, 0))[:, :seq]
        if k and documents is not None:
            same = documents == F.pad(documents, (k, 0))[:, :seq]
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
    documents: Tensor | None = None,
    initial: Tensor | None = None,
) -> Tensor:
    """The recurrence at the top of this file, a chunk of tokens at a time. R: heads of a group.

    Letters in einsum: z batch, k chunk, q token of a chunk, g group, r head of it, p channel, n of
    the state; i and j are two tokens of a chunk, in `_carry` two chunks.

    x: [batch, seq, G, R, P]; dt: fp32 [batch, seq, G, R], above 0; a (below 0) and d: fp32 [G, R];
    b, c: [batch, seq, G, N]; documents: int [batch, seq], the state is cleared where they change.
    Returns x's shape and type.
    initial: fp32 [batch, G, R, P, N], the state before the first token, which is overwritten by
    that after the last; without documents.
    """
    length = x.shape[1]
    runs = (
        _runs(documents)
        if documents is not None
        else torch.zeros_like(x[:, :, 0, 0, 0], dtype=torch.int)
    )
    xs, dts, bs, cs, runs = (_chunks(tensor, chunk) for tensor in (x, dt, b, c, runs))
    # [batch, chunks, Q, G, R]: log of what is left of a chunk's initial state
    decay = _running_sum(dts * a, 2)
    # [batch, chunks]: the document alive at each chunk's end
    last = runs[:, :, -1]
    # and at the end of the chunk before
    before = F.pad(last, (1, 0))[:, :-1]
    inside = _inside((xs * dts[..., None]).to(x.dtype), bs, cs, decay, runs)
    added = _added(xs, dts, bs, decay, runs == last[..., None])
    carried = _carry(added if initial is None else added.float(), decay[:, :, -1], last, before)
    if initial is not None:
        carried = carried + _continue(initial, added, carried, decay[:, :, -1])
    read = torch.einsum("zkqgn,zkgrpn->zkqgrp", cs, carried.to(c.dtype))
    left = decay.exp() * (runs == before[..., None])[..., None, None]
    y = (inside + read * left[..., None]).flatten(1, 2)[:, :length]
    return (y + x * d[..., None]).to(x.dtype)


def _runs(documents: Tensor) -> Tensor:
    """Number each row's documents 0, 1, 2, ..., so that equal numbers mean that nothing was cleared
    in between.
    """
    return F.pad(documents[:, 1:] != documents[:, :-1], (1, 0)).cumsum(1)


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[batch, seq, ...] -> [batch, chunks, Q, ...], filled up with zeros: with dt = 0 a token does
    nothing.
    """
    # padding by nothing would copy
    if missing := -x.shape[1] % chunk:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def _inside(x: Tensor, b: Tensor, c: Tensor, decay: Tensor, runs: Tensor) -> Tensor:
    """What the tokens of a chunk get from each other: [batch, chunks, Q, G, R, P]. x: times dt."""
    # [batch, chunks, G, R, Q]
    decay = decay.permute(0, 1, 3, 4, 2)
    causal = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=x.device).tril()
    # [batch, chunks, Q, Q]
    seen = causal & (runs[..., :, None] == runs[..., None, :])
    weight = _exp_where(seen[:, :, None, None], decay[..., :, None] - decay[..., None, :])
    scores = torch.einsum("zkign,zkjgn->zkgij", c, b)
    return torch.einsum("zkgrij,zkjgrp->zkigrp", (scores[:, :, :, None] * weight).to(x.dtype), x)


def _added(x: Tensor, dt: Tensor, b: Tensor, decay: Tensor, alive: Tensor) -> Tensor:
    """The state that each chunk leaves behind on its own: [batch, chunks, G, R, P, N]. alive: until
    the chunk's end.
    """
    weight = (decay[:, :, -1:] - decay).exp() * dt * alive[..., None, None]
    # in memory chunks come first: `_carry` then multiplies it as it lies
    return torch.einsum("zkqgrp,zkqgn->kzgrpn", (x * weight[..., None]).to(x.dtype), b).transpose(
        0, 1
    )


def _carry(added: Tensor, decay: Tensor, last: Tensor, before: Tensor) -> Tensor:
    """The state at the start of each chunk: the sum of what earlier ones added, decayed since.
    [..., G, R, P, N]

    decay: [batch, chunks, G, R], of whole chunks. A state survives if its document is still alive
    at the chunk before. In the type of `added`: in fp32 it would move twice the bytes, and to round
    the weights as states are rounded anyway adds a twentieth to the error of the whole scan at
    most.
    """
    chunks = decay.shape[1]
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=decay.device).tril(-1)
    # summed from chunk j on and not as a difference of sums from the start, which are large: [...,
    # chunk i, chunk j]
    through = _running_sum(decay.permute(0, 2, 3, 1)[..., None] * earlier, -2)
    # from the end of chunk j to the start of chunk i
    since = F.pad(through, (0, 0, 1, -1))
    survives = earlier & (before[:, :, None] == last[:, None, :])
    weight = _exp_where(survives[:, None, None], since)
    return torch.einsum("zgrij,zjgrpn->zigrpn", weight.to(added.dtype), added)


def _continue(initial: Tensor, added: Tensor, carried: Tensor, decay: Tensor) -> Tensor:
    """What is left of `initial` at the start of each chunk; it becomes the state after the last.
    Shapes: `_carry`.
    """
    # [batch, chunks + 1, G, R]
    through = F.pad(_running_sum(decay, 1), (0, 0, 0, 0, 1, 0)).exp()
    left = through[..., None, None] * initial[:, None]
    initial.copy_(left[:, -1] + carried[:, -1] * decay[:, -1].exp()[..., None, None] + added[:, -1])
    return left[:, :-1]


def _running_sum(x: Tensor, dim: int) -> Tensor:
    """cumsum. Where runs must repeat to the bit, by doubling: CUDA's kernel adds up in no fixed
    order.
    """
    if not torch.are_deterministic_algorithms_enabled():
        return x.cumsum(dim)
    x = x.movedim(dim, -1)
    shift = 1
    while shift < x.shape[-1]:
        x = x + F.pad(x[..., :-shift], (shift, 0))
        shift *= 2
    return x.movedim(-1, dim)


def _exp_where(condition: Tensor, x: Tensor) -> Tensor:
    """exp(x) where the condition holds, else 0: masked before the exponential, which could overflow
    where it is not.
    """
    return torch.where(condition, x, float("-inf")).exp()
