"""Muon (Jordan et al. 2024): the hidden layers' matrices are updated by orthogonalized momentum.

    M = 0.95 M + 0.05 G                     momentum of the gradient
    O = NewtonSchulz(0.05 G + 0.95 M)       Nesterov's; U V^T of U S V^T, nearly
    W = W - lr (decay W + 0.2 sqrt(max(rows, columns)) O)

The factor gives an update the root mean square of AdamW's, so both take one rate and decay (Liu et
al. 2025, "Muon is Scalable for LLM Training": Moonlight, Kimi K2). A stack of experts [experts,
out, in] is updated matrix by matrix, gate and up of gate_up_proj each by itself. Embeddings, head,
norms, biases, convolutions, routers and all outside of blocks have AdamW.

Momentum is sharded like its weight and updated in place. Newton-Schulz needs the whole matrix, so
each matrix is made whole on one of the ranks that share it:

    all-to-all   n matrices of one shape, sharded over n ranks, become one whole matrix on each
    compute      5 steps of 3 products: 5 (4 m^2 n + 2 m^3) FLOPs for [m, n], m <= n, once per group
    all-to-all   back: each rank gets its shard of every update

Cost: a rank sends (n - 1) / n of its shards each way, 2 bytes a number in bf16: 1/n of what FSDP
gathers for a forward pass. Matrices that FSDP and tensor parallelism split take an exchange over
each. Experts are whole over ep. Replicas (HSDP) send nothing and compute the same. A rank holds
about one whole matrix at a time, or its share of a stack of experts. If the number of matrices of a
shape is not a multiple of the ranks, it is padded with zero matrices, which travel, too, and whose
ranks compute for nothing.

Shards are padded with zeros to equal sizes, and rows of ranks may be interleaved, as where FSDP
shards tensor parallelism's shards. Neither matters: zero rows stay zero, and permuting a matrix's
rows permutes its update's. The heads of a projection are orthogonalized together, and so is what
Mamba's in_proj (z, x, B, C, dt) and MLA's kv_a_proj_with_mqa (latent, rotary key) compute at once.

Weights in bf16 need stochastic rounding, by which AdamW's step is counted here too: at a rate of
1e-5 updates rounded to nearest leave 98 % of the numbers as they were.

Left out: QK-clip (Kimi K2), which limits attention's largest logit. Only FlexAttention can return
that, and on CUDA it is 1.36 times as slow as cuDNN's kernel.
"""

import math
import re
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minitrain.parallel.shards import local_shard, to_local
from minitrain.training.adamw import AdamW

MOMENTUM = 0.95


def has_muon(name: str, parameter: Tensor) -> bool:
    """Return True for a block's matrix [rows, columns], or a stack of matrices [experts, ...].

    Not for a router: if all its logits shift, a softmax stays, so one direction of its gradient is
    rounding alone. Rounded to bf16, five steps would make that as large as the rest: 3.44^5 / 2^9.
    """
    if name.endswith(("bias", "mlp.gate.weight")):
        return False
    if not re.search(r"\b(layers|blocks)\.", name):
        return False
    dimensions = 3 if ".experts." in name else 2
    return parameter.ndim == dimensions


class Muon(AdamW):
    """Muon for parameter groups with a `newton_schulz`, the type of its products; AdamW for others.

    names: tell gate_up_proj, which has the rows of two matrices; a model without it needs none.
    """

    def update_group(self, group: dict, skip: Tensor | None) -> None:
        # skip: a scalar [], 1 if the update is skipped
        if "newton_schulz" not in group:
            super().update_group(group, skip)
            return
        alike = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            parts = 1
            if self.names.get(parameter, "").endswith("gate_up_proj"):
                parts = 2
            alike[parameter.shape, parts, *splits(parameter)].append(parameter)
        for (_, parts, *split), parameters in alike.items():
            # about one whole matrix on each rank at a time
            ranks = math.prod(ranks.size() for _, ranks in split)
            # no matrix: of fewer experts than ranks, this one has none
            stacked = math.prod(to_local(parameters[0]).shape[:-2])
            count = max(1, ranks // max(1, stacked))
            for start in range(0, len(parameters), count):
                some = parameters[start : start + count]
                self.update_matrices(some, parts, split, group, skip)

    def update_matrices(
        self,
        parameters: list[Tensor],
        parts: int,
        split: list[tuple],
        group: dict,
        skip: Tensor | None,
    ) -> None:
        """Update parameters of one shape and `split` in place, unless `skip` is 1.

        parameters: each [rows, columns] or [experts, rows, columns].
        parts: how many matrices a parameter has the rows of, in turn.
        """
        rate = group["lr"]
        if skip is not None:
            rate = rate * (1 - skip)
        updates = []
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter, dtype=group["states"])
            if self.stochastic and "step" not in state:
                state["step"] = torch.zeros((), device=parameter.device)
            momentum = to_local(state["momentum_buffer"])
            gradient = to_local(parameter.grad).to(momentum.dtype)
            if skip is not None:
                gradient = torch.where(skip > 0, momentum, gradient)
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp(momentum, MOMENTUM)
            updates.append(update.to(group["newton_schulz"]))
        stack = torch.stack(updates)
        shape = parameters[0].shape[-2:]
        # [matrices, rows, columns], of this rank's shards
        shards = stack.flatten(0, -3)
        shards = orthogonalize_shards(shards, shape, parts, split)
        updates = shards.reshape(stack.shape)
        scale = 0.2 * math.sqrt(max(shape[0] // parts, shape[1]))
        for parameter, update in zip(parameters, updates.float(), strict=True):
            weight, slices = local_shard(parameter)
            decay = group["weight_decay"] * weight.float()
            change = rate * (decay + scale * update)
            step = self.state[parameter].get("step")
            key = f"{self.names.get(parameter, '')}/weight"
            self.store(weight, weight - change, key, step, slices)
            if step is not None:
                step += 1 if skip is None else 1 - skip


def orthogonalize(x: Tensor) -> Tensor:
    """Return matrices with x's singular vectors and singular values near 1, by Newton-Schulz.

    x: [matrices, rows, columns], of any type, which is the products'.
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalize(x.mT).mT
    norm = x.norm(dim=(1, 2), keepdim=True)
    x = x / norm.clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        # Jordan's coefficients, chosen for the steepest slope at 0
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x


# --- exchange


def orthogonalize_shards(x: Tensor, shape: torch.Size, parts: int, split: list[tuple]) -> Tensor:
    """Orthogonalize matrices of which each rank has a shard; return this rank's shard of them.

    x: [matrices, rows, columns], this rank's shards. shape: of a whole matrix, whose rows are those
    of `parts` matrices in turn. split: see `splits`. All ranks that share them call this together.
    """
    count, rows, columns = x.shape
    ranks = 1
    most = list(shape)
    for dim, group in split:
        ranks *= group.size()
        most[dim] = math.ceil(most[dim] / group.size())
    # of columns, rows and matrices
    padding = (0, most[1] - columns, 0, most[0] - rows, 0, -count % ranks)
    x = F.pad(x, padding)
    for dim, group in split:
        x = transpose_shards(x, 0, dim, group)
    # [matrices x parts, rows / parts, columns]; stacks that have parts are never padded
    x = x.unflatten(1, (-1, parts)).transpose(1, 2)
    x = orthogonalize(x.flatten(0, 1))
    x = x.unflatten(0, (-1, parts)).transpose(1, 2)
    x = x.flatten(1, 2)
    for dim, group in reversed(split):
        x = transpose_shards(x, dim, 0, group)
    return x[:count, :rows, :columns]


def splits(parameter: Tensor) -> list[tuple[int, dist.ProcessGroup]]:
    """Return the dimensions, -2 or -1, in which matrices are split, and the groups that share them.

    parameter: [..., rows, columns]. FSDP's comes first, which cuts the others' shards.
    """
    found = []
    for i, placement in enumerate(getattr(parameter, "placements", ())):
        # experts are stacked: where they are split by expert, matrices are whole
        dim = getattr(placement, "dim", -1) - parameter.ndim
        if dim >= -2:
            found.append((dim, parameter.device_mesh.get_group(i)))
    return found


def transpose_shards(x: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Cut x [...] along one dimension, send each rank a part, join what comes along another."""
    parts = torch.stack(x.chunk(group.size(), cut))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(received.unbind(), join)
