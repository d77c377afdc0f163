"""Expert parallelism (GShard, Lepikhin et al. 2020): every rank has some of the experts, and tokens
travel to them.

The ep ranks of a group each have tokens of their own, and E / ep neighbouring ones of the E
experts. In a layer:

    choose    each rank routes its tokens; for each token and rank there are weights, or NOT_CHOSEN, of E / ep experts
    send      a token goes to every rank that has one of its experts: once, however many of them it has there
    expand    where it arrives it is copied for each of these experts, sorted by expert, and they compute
    add up    the weighted outputs of its experts there, so that one row goes back for one that came
    return    and its own rank adds up what the ranks send back

Cost: if a token goes to r other ranks, a rank sends, per layer and forward pass,

    tokens x r x (2 width + E / ep) numbers      a row there and a row back, as wide as what experts see, and weights

and as many in the backward pass; recomputation repeats the forward's. If all experts are equally
likely, a given rank has none of a token's with probability q = C(E - E / ep, top_k) / C(E, top_k),
so r = (ep - 1) (1 - q); if they are neighbours, as with the fake gate of benchmarks, r is about 1.
A row per chosen expert would be r = top_k (ep - 1) / ep.

How many rows a rank will receive only the senders know: one more all-to-all, of two numbers per rank, tells it, and
there the host waits, once per layer. With the fake gate the numbers are known in advance and nothing waits. No token is
dropped, no rows are padded, and a rank may get none at all. Either way a block compiles as one graph; on CUDA, torch
2.11 cannot launch it for no rows (ZeroDivisionError; 2.13 can), so there a rank must get some.

Experts have a mesh of their own, (dp_replicate, dp_shard, ep). They are DTensors, split by expert
over ep, which FSDP then shards along another dimension over dp_shard, the ranks that have the same
experts. On this mesh data-, context- and tensor-parallel ranks are all alike: each has other
tokens. Routers, shared experts and all else stay where they were. Left out: computing while
sending, and reaching several ranks of a node through one of them.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed._functional_collectives as collectives  # no public ones are differentiable and compile
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import Module

from minitrain.models.moe import Experts, MoE
from minitrain.models.router import Router
from minitrain.parallel.parts import split_parameters, use_local_tensors

# where a weight would be, and none is negative
NOT_CHOSEN = -1.0


def expert_parallel(model: Module, mesh: DeviceMesh) -> None:
    """Split the experts of a decoder, or of a stage, in place over the 1-D `mesh`. To be followed
    by FSDP.
    """
    for block in model.blocks:
        if isinstance(block.mlp, MoE):
            split_parameters(block.mlp.experts, mesh, Shard(0))
            block.register_forward_pre_hook(use_own_experts)
            block.mlp.dispatch = partial(dispatch, mesh, make_size_exchange(block.mlp.gate, mesh))


# as `use_parts`: so that compiled graphs take plain tensors
@torch.compiler.disable
def use_own_experts(block: Module, inputs: tuple) -> None:
    """Let a block compute with this rank's experts, as a forward pre-hook that runs after
    FSDP's.
    """
    use_local_tensors(block.mlp.experts, inputs)


# ------------------------------------------------------------------------------------------------------------- dispatch


def dispatch(
    mesh: DeviceMesh,
    get_sizes: Callable,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: Experts,
) -> Tensor:
    """Each token's weighted sum over its experts, wherever they are.

    x: [tokens, width] of this rank; indices, weights: [tokens, top_k]. Every rank of `mesh` calls
    it with its own.
    """
    table = x.new_full((len(x), experts.num_experts), NOT_CHOSEN).scatter(1, indices, weights)
    # [tokens, ranks, experts of a rank]
    table = table.unflatten(1, (mesh.size(), -1))
    chosen = table.detach() != NOT_CHOSEN
    sizes = get_sizes(chosen)
    to_ranks = list_copies(chosen.any(-1), sum(sizes.sends))
    # [rows, width]
    rows = exchange(CopyRows.apply(x, to_ranks), mesh, sizes.sends, sizes.receives)
    # [rows, experts of this rank]
    weights = exchange(at_copies(table, to_ranks), mesh, sizes.sends, sizes.receives)
    # [rows, width]
    sums = expand(rows, weights, experts, sizes.pairs)
    return AddRows.apply(exchange(sums, mesh, sizes.receives, sizes.sends), to_ranks)


def expand(rows: Tensor, weights: Tensor, experts: Experts, pairs: int) -> Tensor:
    """Each row's weighted sum over the experts of this rank. weights: [rows, experts], `pairs` of
    them chosen.
    """
    chosen = weights.detach() != NOT_CHOSEN
    if weights.shape[1] == 1:
        # which is why the rows are here: no copies
        return experts(rows, weights.squeeze(1), chosen.sum(0))
    to_experts = list_copies(chosen, pairs)
    outputs = experts(
        CopyRows.apply(rows, to_experts), at_copies(weights, to_experts), chosen.sum(0)
    )
    return AddRows.apply(outputs, to_experts)


def exchange(x: Tensor, mesh: DeviceMesh, sends: list[int], receives: list[int]) -> Tensor:
    """[rows to rank 0, then to rank 1, ..., width] -> [rows from rank 0, ..., width]. Gradients are
    sent back.
    """
    return collectives.all_to_all_single_autograd(x, receives, sends, mesh)


# --------------------------------------------------------------------------------------------------------------- sizes


class Sizes(NamedTuple):
    """What the host must know of a layer's all-to-alls."""

    sends: list[int]  # rows to each rank
    receives: list[int]  # rows from each rank
    pairs: int  # of received rows and experts of this rank


def make_size_exchange(router: Router, mesh: DeviceMesh) -> Callable[[Tensor], Sizes]:
    """How a rank learns the sizes from what it chose for its tokens: bool [tokens, ranks, experts
    of a rank].
    """
    if router.config.fake_balanced_gate:
        known = router.top_k, router.num_experts, mesh.size(), mesh.get_local_rank()
        return lambda chosen: known_sizes(*known, len(chosen))
    return partial(exchange_sizes, mesh)


def exchange_sizes(mesh: DeviceMesh, chosen: Tensor) -> Sizes:
    """Here are the one wait for the device and the one for what the other ranks chose."""
    # [ranks, 2]: rows, pairs
    mine = torch.stack([chosen.any(-1).sum(0), chosen.sum((0, 2))], dim=1)
    theirs = collectives.all_to_all_single(mine, None, None, mesh)
    sends, receives, pairs = torch.stack([mine[:, 0], *theirs.unbind(1)]).tolist()
    return Sizes(sends, receives, sum(pairs))


@torch.compiler.assume_constant_result
def known_sizes(*case: int) -> Sizes:
    """`balanced_sizes`, for the compiler, which does not look up what is cached but would trace
    it.
    """
    return balanced_sizes(*case)


@cache
def balanced_sizes(top_k: int, num_experts: int, ranks: int, rank: int, tokens: int) -> Sizes:
    """The same without waiting, for the fake gate: all ranks choose alike for so many tokens,
    whatever those are.
    """
    chosen = np.zeros((tokens, num_experts), dtype=bool)
    np.put_along_axis(
        chosen, np.arange(tokens * top_k).reshape(tokens, top_k) % num_experts, True, axis=1
    )
    chosen = chosen.reshape(tokens, ranks, -1)
    sends = chosen.any(-1).sum(0).tolist()
    return Sizes(sends, [sends[rank]] * ranks, ranks * int(chosen[:, rank].sum()))


# -------------------------------------------------------------------------------------------------------------- copies


class Copies(NamedTuple):
    """Which rows are copied to which targets, in the order of the targets: a sparse matrix and its
    transpose.
    """

    source: Tensor  # int64 [copies]: the row that a copy is of
    target: Tensor  # int64 [copies]: where it is to go, ascending
    place: Tensor  # int64 [copies]: the numbers of row 0's copies, then of row 1's, ...
    first: Tensor  # int64 [rows]: where in `place` a row's begin


def list_copies(wanted: Tensor, total: int) -> Copies:
    """wanted: bool [rows, targets], of which `total` are true, as the host must know to wait for
    nothing.
    """
    target, source = torch.nonzero_static(wanted.T, size=total).unbind(1)
    # of the copy, where it is wanted
    number = (wanted.T.reshape(-1).cumsum(0) - 1).view(wanted.T.shape)
    row, column = torch.nonzero_static(wanted, size=total).unbind(1)
    per_row = wanted.sum(1)
    return Copies(source, target, number[column, row], per_row.cumsum(0) - per_row)


def at_copies(table: Tensor, copies: Copies) -> Tensor:
    """[rows, targets, ...] -> [copies, ...]: what the table says of each copy's row and target."""
    return table.flatten(0, 1).index_select(0, copies.source * table.shape[1] + copies.target)


def add_rows(x: Tensor, copies: Copies) -> Tensor:
    """[copies, width] -> [rows, width]: the sum of each row's copies, without atomic additions; 0
    if there are none.
    """
    return F.embedding_bag(copies.place, x.detach(), copies.first, mode="sum")


class CopyRows(torch.autograd.Function):
    """[rows, width] -> [copies, width]. Backward is `AddRows`."""

    @staticmethod
    def forward(ctx, x, copies):
        ctx.save_for_backward(*copies)
        return x.index_select(0, copies.source)

    @staticmethod
    def backward(ctx, grad):
        return add_rows(grad, Copies(*ctx.saved_tensors)), None


class AddRows(torch.autograd.Function):
    """[copies, width] -> [rows, width]: the sum of each row's copies. Backward is `CopyRows`."""

    @staticmethod
    def forward(ctx, x, copies):
        ctx.save_for_backward(*copies)
        return add_rows(x, copies)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, Copies(*ctx.saved_tensors).source), None
