"""Expert parallelism (GShard, Lepikhin et al. 2020): ranks hold different experts, and tokens are
sent to them.

Each of the ep ranks of a group has its own tokens, and E / ep consecutive experts of E. A layer:

    route      each rank's router chooses top_k experts per token, in a [tokens, ranks, E / ep] table of weights
    dispatch   all-to-all: a token is sent once to every rank that has one of its experts, with its weights there
    compute    there it is copied for each of these experts, sorted by expert, and the experts compute
    sum        the outputs are weighted and summed there, so one row is returned for each row that came
    combine    all-to-all back; the token's own rank sums the rows that the ranks return

Cost: a token that is sent to r other ranks takes, per layer and forward pass,

    r x (2 width + E / ep) numbers      a row there and a row back, as wide as the experts' input, and weights

and as many in the backward pass; recomputation repeats the forward's. If all experts are equally
likely, a rank has none of a token's with probability q = C(E - E / ep, top_k) / C(E, top_k), so r =
(ep - 1) (1 - q). If a token's experts are consecutive, as with the fake gate of benchmarks, r is
about 1. One row per chosen expert would be r = top_k (ep - 1) / ep.

Only the senders know how many rows a rank receives. So one more all-to-all sends two numbers per
rank, and the host waits for it, once per layer. With the fake gate the numbers are known in advance
and nothing waits. No token is dropped, no row is padded, and a rank may get no rows at all. Either
way a block compiles as one graph. On CUDA, torch 2.11 cannot launch it for no rows
(ZeroDivisionError; 2.13 can), so there a rank must get some.

Experts have a mesh of their own, (dp_replicate, dp_shard, ep). They are DTensors, split by expert
over ep. FSDP shards them along another dimension over dp_shard, the ranks with the same experts.
On this mesh data-, context- and tensor-parallel ranks are alike: each has other tokens. Routers,
shared experts and all else stay where they are. Left out: computing while sending, and reaching
several ranks of a node through one of them.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import Module

from minitrain.models.moe import Experts, MoE
from minitrain.models.router import Router
from minitrain.parallel.collectives import all_to_all
from minitrain.parallel.parts import split_parameters, use_local_tensors

# entry of the table for experts that a token is not routed to; no weight is negative
NOT_CHOSEN = -1.0


def expert_parallel(model: Module, mesh: DeviceMesh) -> None:
    """Split the experts of a decoder, or of a pipeline stage, in place over the 1-D `mesh`.

    FSDP follows. Sets the exchange point `MoE.dispatch`.
    """
    for block in model.blocks:
        if isinstance(block.mlp, MoE):
            split_parameters(block.mlp.experts, mesh, Shard(0))
            block.register_forward_pre_hook(use_local_tensors)
            block.mlp.dispatch = partial(dispatch, mesh, make_size_exchange(block.mlp.gate, mesh))


# --- dispatch and combine


def dispatch(
    mesh: DeviceMesh,
    get_sizes: Callable,
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    experts: Experts,
) -> Tensor:
    """Return each token's weighted sum over its experts on all ranks, [tokens, width].

    get_sizes: see `make_size_exchange`.
    x: [tokens, width], this rank's tokens.
    indices, weights: [tokens, top_k].
    experts: this rank's.
    All ranks of `mesh` call this together.
    """
    table = x.new_full((len(x), experts.num_experts), NOT_CHOSEN).scatter(1, indices, weights)
    # [tokens, ranks, experts of a rank]
    table = table.unflatten(1, (mesh.size(), -1))
    chosen = table.detach() != NOT_CHOSEN
    sizes = get_sizes(chosen)
    routing = make_routing(chosen.any(-1), sum(sizes.sends))
    # [received rows, width]
    rows = all_to_all(GatherRows.apply(x, routing), mesh, sizes.receives, sizes.sends)
    # [received rows, experts of this rank]
    weights = all_to_all(select_pairs(table, routing), mesh, sizes.receives, sizes.sends)
    # [received rows, width]
    sums = compute(rows, weights, experts, sizes.pairs)
    sums = all_to_all(sums, mesh, sizes.sends, sizes.receives)
    return ScatterAddRows.apply(sums, routing)


def compute(rows: Tensor, weights: Tensor, experts: Experts, pairs: int) -> Tensor:
    """Return each row's weighted sum over this rank's experts, [rows, width].

    weights: [rows, experts of this rank], of which `pairs` are chosen.
    """
    chosen = weights.detach() != NOT_CHOSEN
    tokens_per_expert = chosen.sum(0)
    if weights.shape[1] == 1:
        # every row was sent for the only expert: no copies
        return experts(rows, weights.squeeze(1), tokens_per_expert)
    routing = make_routing(chosen, pairs)
    weights = select_pairs(weights, routing)
    outputs = experts(GatherRows.apply(rows, routing), weights, tokens_per_expert)
    return ScatterAddRows.apply(outputs, routing)


# --- sizes of the all-to-alls


class Sizes(NamedTuple):
    """The sizes of a layer's all-to-alls, on the host."""

    sends: list[int]  # rows to each rank
    receives: list[int]  # rows from each rank
    pairs: int  # pairs of received rows and this rank's experts


def make_size_exchange(router: Router, mesh: DeviceMesh) -> Callable[[Tensor], Sizes]:
    """Return a function from chosen, bool [tokens, ranks, experts of a rank], to `Sizes`."""
    if router.config.fake_balanced_gate:
        known = router.top_k, router.num_experts, mesh.size(), mesh.get_local_rank()
        return lambda chosen: known_sizes(*known, len(chosen))
    return partial(exchange_sizes, mesh)


def exchange_sizes(mesh: DeviceMesh, chosen: Tensor) -> Sizes:
    """Exchange the sizes; waits for the device and for the other ranks' routing."""
    # [ranks, 2]: rows, pairs
    rows = chosen.any(-1).sum(0)
    pairs = chosen.sum((0, 2))
    mine = torch.stack([rows, pairs], dim=1)
    theirs = all_to_all(mine, mesh)
    sends, receives, pairs = torch.stack([rows, *theirs.unbind(1)]).tolist()
    return Sizes(sends, receives, sum(pairs))


@torch.compiler.assume_constant_result
def known_sizes(*case: int) -> Sizes:
    """Call `balanced_sizes`: the compiler would trace a cached function, not look it up."""
    return balanced_sizes(*case)


@cache
def balanced_sizes(top_k: int, num_experts: int, ranks: int, rank: int, tokens: int) -> Sizes:
    """Return the sizes for the fake gate: all ranks route alike, whatever their tokens are."""
    chosen = np.zeros((tokens, num_experts), dtype=bool)
    indices = np.arange(tokens * top_k).reshape(tokens, top_k) % num_experts
    np.put_along_axis(chosen, indices, True, axis=1)
    chosen = chosen.reshape(tokens, ranks, -1)
    sends = chosen.any(-1).sum(0).tolist()
    receives = [sends[rank]] * ranks
    pairs = ranks * int(chosen[:, rank].sum())
    return Sizes(sends, receives, pairs)


# --- gather and scatter-add of rows


class Routing(NamedTuple):
    """Pairs of rows and targets as a sparse matrix, sorted by target (CSC) and by row (CSR)."""

    rows: Tensor  # int64 [pairs], sorted by target: the row of each pair
    targets: Tensor  # int64 [pairs], ascending: the target of each pair
    indices: Tensor  # int64 [pairs], sorted by row: the number of each pair in the order above
    offsets: Tensor  # int64 [rows]: the start of each row in `indices`


def make_routing(wanted: Tensor, pairs: int) -> Routing:
    """Return the routing of a mask [rows, targets], of which `pairs` are true.

    The host knows the number of pairs, so it does not wait for the device.
    """
    targets, rows = torch.nonzero_static(wanted.T, size=pairs).unbind(1)
    # number of each wanted pair when sorted by target, [targets, rows]
    number = (wanted.T.reshape(-1).cumsum(0) - 1).view(wanted.T.shape)
    row, target = torch.nonzero_static(wanted, size=pairs).unbind(1)
    per_row = wanted.sum(1)
    return Routing(rows, targets, number[target, row], per_row.cumsum(0) - per_row)


def select_pairs(table: Tensor, routing: Routing) -> Tensor:
    """Select the entries of a table [rows, targets, ...] for each pair: [pairs, ...]."""
    return table.flatten(0, 1).index_select(0, routing.rows * table.shape[1] + routing.targets)


def scatter_add(x: Tensor, routing: Routing) -> Tensor:
    """Sum x [pairs, width] by row: [rows, width], 0 for rows without pairs. Uses no atomics."""
    return F.embedding_bag(routing.indices, x.detach(), routing.offsets, mode="sum")


class GatherRows(torch.autograd.Function):
    """Copy each pair's row: [rows, width] -> [pairs, width]. Backward is `ScatterAddRows`."""

    @staticmethod
    def forward(ctx, x, routing):
        ctx.save_for_backward(*routing)
        return x.index_select(0, routing.rows)

    @staticmethod
    def backward(ctx, grad):
        return scatter_add(grad, Routing(*ctx.saved_tensors)), None


class ScatterAddRows(torch.autograd.Function):
    """Sum each row's pairs: [pairs, width] -> [rows, width]. Backward is `GatherRows`."""

    @staticmethod
    def forward(ctx, x, routing):
        ctx.save_for_backward(*routing)
        return scatter_add(x, routing)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, Routing(*ctx.saved_tensors).rows), None
