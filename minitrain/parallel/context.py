"""Context parallelism: split long sequences over cp ranks, which communicate where tokens interact.

Tokens interact in attention and recurrent mixers. Norms, MLPs and the head treat each token by
itself, and need no communication. There are two forms of attention, which differ in what a rank
gathers and in which tokens it holds:

allgather (Llama 3 paper, section 3.3.2). A rank gathers all keys and values, and computes attention
for its own queries. The backward pass reduce-scatters the gradients of keys and values. Under a
causal mask late queries see more keys. To balance the work, a sequence is cut into 2 cp chunks, and
rank r holds chunks r and 2 cp - 1 - r ("zigzag"). Its queries are then not consecutive. Plain
causal attention is put together from SDPA's fast kernels all the same: a chunk is causal with its
own keys, and sees all earlier ones (models/merged_attention.py). Documents and windows need a mask
tensor, and run on FlexAttention. Any number of heads will do. A rank receives, per layer and
direction, in one collective:

    (cp - 1) / cp x [batch, seq, 2 kv_heads head_dim]

ulysses (DeepSpeed-Ulysses, Jacobs et al. 2023). An all-to-all trades tokens for heads: a rank gets
all tokens of 1 / cp of the heads, computes attention, and trades back. A sequence is cut into cp
chunks in order, so causal attention needs no mask tensor, and keeps SDPA's fast kernel. cp must
divide the heads. If there are fewer key/value heads than ranks, each is repeated for the ranks that
share it, and kv_heads in the formula is cp. A rank receives, per layer and direction, in four
collectives (for q, k, v and the output):

    (cp - 1) / cp x [batch, seq / cp, 2 (heads + kv_heads) head_dim]

That is less than with allgather if heads + kv_heads < kv_heads cp. Recomputation runs the
collectives of either form again.

Mamba-2 carries a state along the sequence. In both forms all-to-alls trade tokens for groups of
heads before its convolution, and back after its scan. cp must divide the groups. A rank receives,
per layer and direction, in two collectives:

    (cp - 1) / cp x [batch, seq / cp, 2 heads head_dim + 2 groups state + heads]

Gated DeltaNet does the same, with heads of keys as groups, and 2 heads head_dim + 2 groups key_dim +
2 heads in place of the last dimension.

Document ids, if there are any, are gathered too.

What a model must have: `make_mask(length, device, document_ids=None, q_positions=None)`, which it
calls with the length of its own tokens, and whose result it hands to modules with an exchange point
`attend(q, k, v, mask, sinks=None)`. `q_positions`, int [queries], are the places of the queries among
the keys, where they are not all of them: only allgather passes it. If the result is a dataclass with
a field `chunks`, allgather sets it for masks of j <= i alone: the numbers of the chunks, of 2 cp
equal ones, that the queries are.
Left out: ring attention, which overlaps the exchange with attention. Its kernel must return partial
softmaxes, as those of models/merged_attention.py do, and its backward pass must send keys and
values round again: autograd alone would keep them all, as allgather does. Who adds a form adds it
to `context_parallel`, to settings.py and to context_faults in run/config/layout_checks.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from minitrain.parallel.collectives import all_to_all, stack_ranks
from minitrain.parallel.mesh import local_chunk


def context_parallel(model: Module, mesh: DeviceMesh, form: str) -> None:
    """Let `model` attend over full sequences, of which each rank of the 1-D `mesh` has some tokens.

    form: `allgather` or `ulysses`.
    Sets the exchange points `model.make_mask`, and `attend` or `mix` of every module that has one.
    A decoder then takes what `local_tokens` returns. A model with an exchange point `split_cp`
    (Wan) takes and returns full sequences, and splits them itself.
    """
    zigzag = form == "allgather"
    if hasattr(model, "split_cp"):
        # no causal mask, so there is no work to balance
        zigzag = False
        # of tensor parallelism, if any: it gathers this rank's tokens before all ranks' are
        gather = model.gather
        model.split_cp = partial(local_chunk, mesh)
        model.gather = lambda share: gather_sequence(gather(share), 1, mesh, zigzag)
    model.make_mask = full_sequence_mask(model.make_mask, mesh, form, zigzag)
    attend = attend_with_local_heads
    if form == "allgather":
        attend = partial(attend_to_all_keys, zigzag=zigzag)
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = partial(attend, module.attend, mesh)
        if hasattr(module, "mix"):
            module.mix = partial(mix_local_groups, module.mix, mesh, zigzag)


# --- which tokens a rank has


def chunks(rank: int, size: int, zigzag: bool) -> list[int]:
    """Return the numbers of the chunks of a sequence that `rank` of `size` has, in order.

    There are `size` equal chunks and each rank has one; with zigzag, 2 x size, an early and a late
    one for each.
    """
    return [rank, 2 * size - 1 - rank] if zigzag else [rank]


def token_indices(
    length: int, mesh: DeviceMesh, zigzag: bool, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the indices of this rank's tokens in a sequence of `length`, int64 [length / cp]."""
    indices = torch.arange(length, device=device)
    return split_sequence(indices, 0, mesh.size(), zigzag)[mesh.get_local_rank()]


def local_tokens(batch: dict[str, Tensor], mesh: DeviceMesh, form: str) -> dict[str, Tensor]:
    """Return this rank's tokens of a micro-batch, [batch, seq] -> [batch, seq / cp] for each value.

    seq must be a multiple of 2 cp (allgather) or cp (ulysses). Adds `positions` if there are none,
    since a rank's tokens are not at 0, 1, 2, ... A batch of videos stays: the model splits it.
    """
    if mesh.size() == 1 or "tokens" not in batch:
        return batch
    batch_size, length = batch["tokens"].shape
    indices = token_indices(length, mesh, form == "allgather")
    # positions that the batch has replace these
    batch = {"positions": torch.arange(length).expand(batch_size, -1), **batch}
    return {key: value[:, indices] for key, value in batch.items()}


def gather_sequence(x: Tensor, dim: int, mesh: DeviceMesh, zigzag: bool) -> Tensor:
    """Gather all ranks' tokens along `dim`, in sequence order: [..., seq / cp] -> [..., seq].

    Backward sums each token's gradients over ranks.
    """
    return join_sequence(stack_ranks(x, mesh).unbind(), dim, zigzag)


def join_sequence(shares: Sequence[Tensor], dim: int, zigzag: bool) -> Tensor:
    """Join the shares of all ranks, in rank order: [..., seq / cp, ...] each -> [..., seq, ...].

    dim: that of seq.
    """
    # the numbers of all chunks, and the chunks, rank by rank
    order = []
    pieces = []
    for rank, share in enumerate(shares):
        numbers = chunks(rank, len(shares), zigzag)
        order += numbers
        pieces += share.chunk(len(numbers), dim)
    return torch.cat([pieces[order.index(number)] for number in range(len(order))], dim)


def split_sequence(x: Tensor, dim: int, size: int, zigzag: bool) -> list[Tensor]:
    """Split x [..., seq, ...] along `dim` into the tokens of each of `size` ranks.

    The inverse of `join_sequence`. Each is [..., seq / size, ...].
    """
    pieces = x.chunk(2 * size if zigzag else size, dim)
    shares = []
    for rank in range(size):
        own = [pieces[number] for number in chunks(rank, size, zigzag)]
        shares.append(torch.cat(own, dim) if zigzag else own[0])
    return shares


# --- exchange points of the model


def full_sequence_mask(
    make_mask: Callable, mesh: DeviceMesh, form: str, zigzag: bool
) -> Callable:
    """Return a `make_mask` for full sequences, to be called with what a rank knows of its tokens.

    Masks without document ids depend on the length alone: those of the last 16 lengths are cached.
    """

    def build(length, device, document_ids=None, **rule):
        if form == "allgather":
            # this rank's queries, but all keys
            rule["q_positions"] = token_indices(length, mesh, zigzag, device)
        built = make_mask(length, device, document_ids, **rule)
        causal = rule.get("causal", True) and rule.get("window") is None
        if zigzag and causal and document_ids is None and hasattr(built, "chunks"):
            own = chunks(mesh.get_local_rank(), mesh.size(), zigzag)
            built = replace(built, chunks=tuple(own))
        return built

    # videos come in many lengths, and a mask may hold as much memory as a block's activations
    build_once = lru_cache(maxsize=16)(build)

    def make(length, device, document_ids=None, **rule):
        # length: of this rank's tokens; document_ids: int [batch, seq / cp]; rule: causal, window
        length = length * mesh.size()
        if document_ids is None:
            return build_once(length, device, **rule)
        return build(length, device, gather_sequence(document_ids, 1, mesh, zigzag), **rule)

    return make


def attend_to_all_keys(
    attend: Callable,
    mesh: DeviceMesh,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask,
    sinks: Tensor | None = None,
    *,
    zigzag: bool,
) -> Tensor:
    """Run `attend` with this rank's queries and the keys and values of all ranks (allgather).

    q: [batch, heads, seq / cp, head_dim]; k, v: [batch, kv_heads, seq / cp, head_dim].
    sinks: [heads].
    Returns [batch, heads, seq / cp, head_dim].
    """
    # one collective for both: [batch, kv_heads, seq, k's head_dim + v's head_dim]
    kv = gather_sequence(torch.cat([k, v], dim=-1), 2, mesh, zigzag)
    k, v = kv.split([k.shape[-1], v.shape[-1]], dim=-1)
    return attend(q, k, v, mask, sinks)


def attend_with_local_heads(
    attend: Callable,
    mesh: DeviceMesh,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Run `attend` over full sequences for 1 / cp of the heads (ulysses).

    Takes and returns the shapes [batch, heads, seq / cp, head_dim] of `attend_to_all_keys`.
    """
    # fewer key/value heads than ranks: cp / kv_heads neighboring ranks have queries of the same one
    if mesh.size() > k.shape[1]:
        k, v = (x.repeat_interleave(mesh.size() // k.shape[1], dim=1) for x in (k, v))
    # [batch, heads / cp or kv_heads / cp, seq, head_dim]
    q, k, v = (to_heads(x, 1, 2, mesh) for x in (q, k, v))
    if sinks is not None:
        # [heads / cp]
        sinks = sinks.chunk(mesh.size())[mesh.get_local_rank()]
    return to_tokens(attend(q, k, v, mask, sinks), 1, 2, mesh)


def mix_local_groups(
    mix: Callable,
    mesh: DeviceMesh,
    zigzag: bool,
    mixed: Tensor,
    gates: Tensor,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Run `mix`, a mixer's convolution and scan, over full sequences for 1 / cp of its groups.

    mix: see `Mamba2.mix` or `GatedDeltaNet.mix`, also for the last dimensions of mixed and gates.
    mixed, gates: [batch, seq / cp, groups, ...]. document_ids: int [batch, seq / cp].
    Returns [batch, seq / cp, groups, heads of a group, head_dim].
    """
    # one collective for both: [batch, seq, groups / cp, ...]
    joint = to_heads(torch.cat([mixed, gates], dim=-1), 2, 1, mesh, zigzag)
    if document_ids is not None:
        # [batch, seq]
        document_ids = gather_sequence(document_ids, 1, mesh, zigzag)
    # the groups that this rank computes: the mixer holds the parameters of all
    first = mesh.get_local_rank() * joint.shape[2]
    groups = slice(first, first + joint.shape[2])
    mixed, gates = joint.split([mixed.shape[-1], gates.shape[-1]], dim=-1)
    return to_tokens(mix(mixed, gates, document_ids, groups=groups), 2, 1, mesh, zigzag)


def to_heads(x: Tensor, heads: int, seq: int, mesh: DeviceMesh, zigzag: bool = False) -> Tensor:
    """Trade tokens for heads: [..., heads, seq / cp, ...] -> [..., heads / cp, seq, ...].

    heads, seq: the dimensions of x that are heads (or groups) and tokens, in any order.
    """
    # [ranks, ...]: the heads of each rank
    parts = torch.stack(x.chunk(mesh.size(), heads))
    return join_sequence(all_to_all(parts, mesh).unbind(), seq, zigzag)


def to_tokens(x: Tensor, heads: int, seq: int, mesh: DeviceMesh, zigzag: bool = False) -> Tensor:
    """Trade heads for tokens: [..., heads / cp, seq, ...] -> [..., heads, seq / cp, ...].

    The inverse of `to_heads`, by all-to-all too.
    """
    # [ranks, ...]: the tokens of each rank
    parts = torch.stack(split_sequence(x, seq, mesh.size(), zigzag))
    return torch.cat(all_to_all(parts, mesh).unbind(), heads)
