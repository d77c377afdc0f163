"""Context parallelism: the ranks of a group share the tokens of each row, if rows are too long for one.

Everything but attention and Mamba-2 treats each token by itself, and needs no communication. There
are two forms of it around attention.

allgather (Llama 3 paper, section 3.3.2). A rank gathers all keys and values, and computes attention
of its own queries. The backward pass reduce-scatters the gradients of keys and values. Under a
causal mask late tokens see more keys. So a row is cut into 2 cp chunks, and rank r has chunks r and
2 cp - 1 - r ("zigzag"): all ranks then have equally many query-key pairs. Any number of heads will
do. A rank's queries are not consecutive, so even plain causal attention needs a mask, and runs on
FlexAttention. A rank receives, per layer and direction, in one collective:

    (cp - 1) / cp x [rows, seq, 2 kv_heads head_dim]

ulysses (DeepSpeed-Ulysses, Jacobs et al. 2023). All-to-alls turn a rank's share of the tokens into
a share of the heads, and back after attention, which sees whole rows. A row is cut into cp chunks
in order, so plain causal attention stays plain, on the fastest kernel. cp must divide the key/value
heads. A rank receives, per layer and direction, in four collectives:

    (cp - 1) / cp x [rows, seq / cp, 2 (heads + kv_heads) head_dim]

That is less than allgather if heads + kv_heads < kv_heads cp. Recomputation repeats either.

Mamba-2's state runs along the row. Under both forms, all-to-alls turn tokens into groups of heads
around its convolution and scan. cp must divide the groups. A rank receives, per layer and
direction, in two collectives:

    (cp - 1) / cp x [rows, seq / cp, 2 heads head_dim + 2 groups state + heads]

Document ids are gathered too, if there are any. Left out: ring attention, which overlaps the
exchange with attention, but needs a kernel that returns partial softmaxes.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from minitrain.parallel.collectives import all_to_all, stack_ranks
from minitrain.parallel.mesh import own_chunk


def context_parallel(model: Module, mesh: DeviceMesh, form: str) -> None:
    """Let `model` attend over whole rows, while each rank of the 1-D `mesh` has its `own_tokens`.

    form: `allgather` or `ulysses`.
    Sets the exchange points `model.make_mask` and `attend` or `mix` of every module that has one. A
    model with `split_cp` and `gather` takes and returns whole rows. It attends to all tokens, so
    they stay in order.
    """
    zigzag = form == "allgather"
    if hasattr(model, "split_cp"):
        zigzag = False
        gather = model.gather
        model.split_cp = partial(own_chunk, mesh)
        model.gather = lambda share: gather_row(gather(share), 1, mesh, zigzag)
    model.make_mask = whole_row_mask(model.make_mask, mesh, form, zigzag)
    attend = attend_with_own_heads
    if form == "allgather":
        attend = partial(attend_to_all_keys, zigzag=zigzag)
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = partial(attend, module.attend, mesh)
        if hasattr(module, "mix"):
            module.mix = partial(mix_own_groups, module.mix, mesh, zigzag)


# --- which tokens a rank has


def chunks(rank: int, size: int, zigzag: bool) -> list[int]:
    """Return the numbers of the equal chunks of a row that `rank` of `size` has.

    zigzag: an early and a late one, not one alone.
    """
    return [rank, 2 * size - 1 - rank] if zigzag else [rank]


def token_indices(
    length: int, mesh: DeviceMesh, zigzag: bool, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the indices of this rank's tokens in a row of `length` tokens, int [length / cp]."""
    row = torch.arange(length, device=device)
    return cut_row(row, 0, mesh.size(), zigzag)[mesh.get_local_rank()]


def own_tokens(batch: dict[str, Tensor], mesh: DeviceMesh, form: str) -> dict[str, Tensor]:
    """Return this rank's tokens of a micro-batch: each value [rows, seq] becomes [rows, seq / cp].

    seq must be a multiple of 2 cp (allgather) or cp (ulysses). Adds `positions` if there are none,
    since local order is no longer 0, 1, 2, ... A batch of videos stays: the model splits it.
    """
    if mesh.size() == 1 or "tokens" not in batch:
        return batch
    rows, length = batch["tokens"].shape
    indices = token_indices(length, mesh, form == "allgather")
    batch = {"positions": torch.arange(length).expand(rows, -1), **batch}
    return {key: value[:, indices] for key, value in batch.items()}


def gather_row(x: Tensor, dim: int, mesh: DeviceMesh, zigzag: bool) -> Tensor:
    """Gather all ranks' tokens in the row's order: size seq / cp along `dim` becomes seq.

    Gradients are summed to the owners.
    """
    return join_row(stack_ranks(x, mesh).unbind(), dim, zigzag)


def join_row(shares: Sequence[Tensor], dim: int, zigzag: bool) -> Tensor:
    """Join the shares of all ranks, in rank order, to a row along `dim`."""
    order = []
    pieces = []
    for rank, share in enumerate(shares):
        numbers = chunks(rank, len(shares), zigzag)
        order += numbers
        pieces += share.chunk(len(numbers), dim)
    return torch.cat([pieces[order.index(number)] for number in range(len(order))], dim)


def cut_row(row: Tensor, dim: int, size: int, zigzag: bool) -> list[Tensor]:
    """Cut a row along `dim` into the shares of `size` ranks: the inverse of `join_row`."""
    pieces = row.chunk(2 * size if zigzag else size, dim)
    shares = []
    for rank in range(size):
        own = [pieces[number] for number in chunks(rank, size, zigzag)]
        shares.append(torch.cat(own, dim) if zigzag else own[0])
    return shares


# --- exchange points of the model


def whole_row_mask(make_mask: Callable, mesh: DeviceMesh, form: str, zigzag: bool) -> Callable:
    """Return `make_mask` for a rank that knows its own tokens alone.

    Document ids, int [rows, seq / cp], are gathered at each call. Masks without them are kept.
    """

    def build(length, device, document_ids=None, **rule):
        if form == "allgather":
            rule["q_positions"] = token_indices(length, mesh, zigzag, device)
        return make_mask(length, device, document_ids, **rule)

    build_once = cache(build)

    def make(length, device, document_ids=None, **rule):
        # of whole rows
        length = length * mesh.size()
        if document_ids is None:
            return build_once(length, device, **rule)
        return build(length, device, gather_row(document_ids, 1, mesh, zigzag), **rule)

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
    """Compute attention of this rank's queries to all keys, gathered from all ranks.

    q, k, v: [batch, heads or kv_heads, seq / cp, head_dim]; sinks: [heads].
    Returns [batch, heads, seq / cp, head_dim].
    """
    # one collective for both: [batch, kv_heads, seq, k's and v's head_dim]
    row = gather_row(torch.cat([k, v], dim=-1), 2, mesh, zigzag)
    k, v = row.split([k.shape[-1], v.shape[-1]], dim=-1)
    return attend(q, k, v, mask, sinks)


def attend_with_own_heads(
    attend: Callable,
    mesh: DeviceMesh,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over whole rows for 1 / cp of the heads. Shapes: `attend_to_all_keys`."""
    # [batch, heads / cp or kv_heads / cp, seq, head_dim]
    q, k, v = (to_heads(x, 1, 2, mesh) for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.chunk(mesh.size())[mesh.get_local_rank()]
    return to_tokens(attend(q, k, v, mask, sinks), 1, 2, mesh)


def mix_own_groups(
    mix: Callable,
    mesh: DeviceMesh,
    zigzag: bool,
    mixed: Tensor,
    dt: Tensor,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Run Mamba-2's convolution and scan over whole rows for 1 / cp of its groups of heads.

    mixed, dt: [batch, seq / cp, groups, ...], see `Mamba2.mix`; document_ids: int [batch, seq / cp].
    Returns [batch, seq / cp, groups, ...].
    """
    # [batch, seq, groups / cp, ...]
    row = to_heads(torch.cat([mixed, dt], dim=-1), 2, 1, mesh, zigzag)
    if document_ids is not None:
        document_ids = gather_row(document_ids, 1, mesh, zigzag)
    first = mesh.get_local_rank() * row.shape[2]
    groups = slice(first, first + row.shape[2])
    mixed, dt = row.split([mixed.shape[-1], dt.shape[-1]], dim=-1)
    return to_tokens(mix(mixed, dt, document_ids, groups=groups), 2, 1, mesh, zigzag)


def to_heads(x: Tensor, heads: int, row: int, mesh: DeviceMesh, zigzag: bool = False) -> Tensor:
    """Exchange tokens for heads by all-to-all: the sizes of dimensions `heads` and `row` become 1 / cp
    and cp times as large.
    """
    parts = torch.stack(x.chunk(mesh.size(), heads))
    return join_row(all_to_all(parts, mesh).unbind(), row, zigzag)


def to_tokens(x: Tensor, heads: int, row: int, mesh: DeviceMesh, zigzag: bool = False) -> Tensor:
    """Exchange heads for tokens by all-to-all: the inverse of `to_heads`."""
    parts = torch.stack(cut_row(x, row, mesh.size(), zigzag))
    return torch.cat(all_to_all(parts, mesh).unbind(), heads)
