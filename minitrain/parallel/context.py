"""Context parallelism: the ranks of a group share each row's tokens, for rows too long for one.

Everything but attention and Mamba-2 treats each token alone and needs no communication. Around
attention, one of two exchanges:

allgather (Llama 3 paper, section 3.3.2). Every rank gathers all keys and values, and attends from
its own queries; the
    backward pass reduce-scatters the gradients of keys and values to their owners. Causal attention
    gives late tokens more work, so the row is cut into 2 cp chunks and rank r holds chunks r and 2
    cp - 1 - r: all ranks then have equally many pairs. Any number of heads will do. A rank
    receives, per layer and direction,
        (cp - 1) / cp x [rows, seq, 2 kv_heads head_dim],
    one collective, once more if the layer is recomputed. Its queries are two pieces of the row, so
    even plain causal attention needs a mask, and runs on FlexAttention. The mask's tiles are found
    once per length and kept; with documents once per forward pass, during which each pair of query
    and key briefly takes a few bytes.

ulysses (DeepSpeed-Ulysses, Jacobs et al. 2023). All-to-alls turn shards of the row into shards of
the heads: each rank
    runs ordinary attention over the whole row for 1 / cp of the heads, and a last all-to-all turns
    the output back. The row is cut into cp chunks in order; plain causal attention stays plain, on
    the fastest kernel. The key/value heads must divide by cp. A rank receives, per layer and
    direction, in four collectives,
        (cp - 1) / cp x [rows, seq / cp, 2 (heads + kv_heads) head_dim],
    once more if recomputed; that is less than the other form's if heads + kv_heads < kv_heads cp.

Mamba-2, whose state runs through the row, has only the second kind, under either name and in either
order of tokens: around its convolution and scan, all-to-alls turn shards of the row into shards of
the groups of heads and back. The groups must divide by cp. A rank receives, per such layer and
direction, in two collectives,
    (cp - 1) / cp x [rows, seq / cp, 2 heads head_dim + 2 groups state + heads],
and going forward the numbers of all tokens' documents, if there are any.

Left out: ring attention, which overlaps the exchange with attention but needs a kernel that returns
partial softmaxes.
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
    """Make `model` attend over whole rows while every rank of the 1-D `mesh` holds only its
    `own_tokens`.

    form: `allgather` or `ulysses`. Replaces `model.make_mask`, and `attend` or `mix` of every
    module that has one. A model with `split_cp` and `gather` takes and returns whole rows, and
    attends to all of them: tokens stay in order.
    """
    zigzag = is_zigzag(form)
    if hasattr(model, "split_cp"):
        zigzag = False
        gather = model.gather
        model.split_cp = partial(own_chunk, mesh)
        model.gather = lambda share: gather_row(gather(share), 1, mesh, zigzag)
    model.make_mask = whole_row_mask(model.make_mask, mesh, form, zigzag)
    exchange = {
        "allgather": partial(attend_to_all_keys, zigzag=zigzag),
        "ulysses": attend_with_own_heads,
    }[form]
    for module in model.modules():
        if hasattr(module, "attend"):
            module.attend = partial(exchange, module.attend, mesh)
        if hasattr(module, "mix"):
            module.mix = partial(mix_own_groups, module.mix, mesh, zigzag)


# ----------------------------------------------------------------------------------------------- who holds which tokens


def is_zigzag(form: str) -> bool:
    """Does a rank hold an early and a late chunk of a row, and not one stretch of it?"""
    return form == "allgather"


def chunks(rank: int, size: int, zigzag: bool) -> list[int]:
    """Which of a row's equal chunks `rank` of `size` holds, in this order."""
    return [rank, 2 * size - 1 - rank] if zigzag else [rank]


def token_indices(
    length: int, mesh: DeviceMesh, zigzag: bool, device: torch.device | str = "cpu"
) -> Tensor:
    """int [length / cp]: where in a row of `length` tokens this rank's tokens stand."""
    return cut_row(torch.arange(length, device=device), 0, mesh.size(), zigzag)[
        mesh.get_local_rank()
    ]


def own_tokens(batch: dict[str, Tensor], mesh: DeviceMesh, form: str) -> dict[str, Tensor]:
    """This rank's tokens of a micro-batch: every value [rows, seq] becomes [rows, seq / cp].

    seq must be a multiple of 2 cp (allgather) or cp (ulysses). A batch without `positions` gets
    them: 0, 1, 2, ... is no longer what they are.
    """
    # of videos, the model takes this rank's patches
    if mesh.size() == 1 or "tokens" not in batch:
        return batch
    rows, length = batch["tokens"].shape
    held = token_indices(length, mesh, is_zigzag(form))
    batch = {"positions": torch.arange(length).expand(rows, -1), **batch}
    return {key: value[:, held] for key, value in batch.items()}


def gather_row(x: Tensor, dim: int, mesh: DeviceMesh, zigzag: bool) -> Tensor:
    """All ranks' tokens in the row's order: seq / cp along `dim` becomes seq. Gradients are summed
    to the owners.
    """
    return join_row(stack_ranks(x, mesh).unbind(), dim, zigzag)


def join_row(shares: Sequence[Tensor], dim: int, zigzag: bool) -> Tensor:
    """The row along `dim`, from what each rank holds of it."""
    order = [number for rank in range(len(shares)) for number in chunks(rank, len(shares), zigzag)]
    pieces = [piece for share in shares for piece in share.chunk(len(order) // len(shares), dim)]
    return torch.cat([pieces[order.index(number)] for number in range(len(order))], dim)


def cut_row(row: Tensor, dim: int, size: int, zigzag: bool) -> list[Tensor]:
    """The inverse of `join_row`: what each of `size` ranks holds of a row."""
    held = [chunks(rank, size, zigzag) for rank in range(size)]
    pieces = row.chunk(size * len(held[0]), dim)
    shares = [[pieces[number] for number in numbers] for numbers in held]
    return [share[0] if len(share) == 1 else torch.cat(share, dim) for share in shares]


# ------------------------------------------------------------------------------------------------------- into the model


def whole_row_mask(make_mask: Callable, mesh: DeviceMesh, form: str, zigzag: bool) -> Callable:
    """`make_mask` for a rank that knows only its own tokens: the documents of the others are
    gathered, once a call.
    """

    def build(length, device, documents=None, **rule):
        if form == "allgather":
            rule["q_positions"] = token_indices(length, mesh, zigzag, device)
        return make_mask(length, device, documents, **rule)

    build_once = cache(build)

    def make(length, device, documents=None, **rule):
        if documents is None:
            return build_once(length * mesh.size(), device, **rule)
        return build(length * mesh.size(), device, gather_row(documents, 1, mesh, zigzag), **rule)

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
    """This rank's queries, all keys and values.

    q, k, v: [batch, heads or kv_heads, seq / cp, head_dim]; sinks: [heads]. Returns [batch, heads,
    seq / cp, head_dim].
    """
    row = gather_row(torch.cat([k, v], dim=-1), 2, mesh, zigzag)
    return attend(q, *row.split([k.shape[-1], v.shape[-1]], dim=-1), mask, sinks)


def attend_with_own_heads(
    attend: Callable,
    mesh: DeviceMesh,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask,
    sinks: Tensor | None = None,
) -> Tensor:
    """All queries, keys and values of 1 / cp of the heads. Shapes as in `attend_to_all_keys`."""
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
    documents: Tensor | None = None,
) -> Tensor:
    """All tokens of 1 / cp of the groups of heads of Mamba-2.

    mixed, dt: [batch, seq / cp, groups, ...], see `Mamba2.mix`; documents: int [batch, seq / cp].
    Returns [batch, seq / cp, groups, ...].
    """
    row = to_heads(torch.cat([mixed, dt], dim=-1), 2, 1, mesh, zigzag)
    if documents is not None:
        documents = gather_row(documents, 1, mesh, zigzag)
    first = mesh.get_local_rank() * row.shape[2]
    count = row.shape[2]
    y = mix(
        *row.split([mixed.shape[-1], dt.shape[-1]], dim=-1),
        documents,
        groups=slice(first, first + count),
    )
    return to_tokens(y, 2, 1, mesh, zigzag)


def to_heads(x: Tensor, heads: int, row: int, mesh: DeviceMesh, zigzag: bool = False) -> Tensor:
    """All-to-all: of dimension `heads` a part for each rank; what arrives makes the row along
    dimension `row`.
    """
    return join_row(
        all_to_all(torch.stack(x.chunk(mesh.size(), heads)), mesh).unbind(), row, zigzag
    )


def to_tokens(x: Tensor, heads: int, row: int, mesh: DeviceMesh, zigzag: bool = False) -> Tensor:
    """The inverse of `to_heads`."""
    return torch.cat(
        all_to_all(torch.stack(cut_row(x, row, mesh.size(), zigzag)), mesh).unbind(), heads
    )
