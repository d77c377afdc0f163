"""FP8 weights under FSDP: each rank rounds its shards once per optimizer step and gathers bytes.

Without this file FSDP gathers a weight in bf16, and every rank rounds all of it in every forward
pass (models/fp8.py). Here a rank rounds its shard alone, 1 / n of the work. All micro-batches
gather the same bytes, half of bf16's. A frozen weight is rounded once.

The scale is that of the full weight: the maxima of its shards are reduced over all ranks that hold
some of it, tensor-parallel ones too. One all-reduce per mesh dimension serves all weights. So a
weight has the same FP8 numbers in any layout. An expert has a scale of its own, reduced over the
ranks that hold some of it. (Scales of activations are reduced in tensor.py.)

Memory: one byte more per parameter of the shards, one byte less per gathered parameter. The
backward pass needs transposed weights. With `keep_transposed` transposed copies stay until the
weights change, for one byte per parameter of the full weights: for layouts that keep weights
gathered anyway.

FSDP calls two methods of a shard, if it has them: fsdp_pre_all_gather returns what to gather, and
fsdp_post_all_gather makes the parameter of it. torchao defines them on a tensor subclass. Here they
are attributes of a plain tensor, so optimizers, checkpoints and DTensor see plain fp32 tensors. The
gathered bytes go to the module. FSDP gets a `weight_placeholder` without memory as the parameter,
which receives the gradient.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook

from minitrain.models.fp8 import Fp8Experts, Fp8Linear, pad_rows, transposed, weight_placeholder
from minitrain.models.quantize import E4M3, cast, largest, power_of_two_scale


def gather_in_fp8(model: Module, keep_transposed: bool) -> None:
    """Make FSDP gather the weights of FP8 products in FP8, after sharding and `to_empty`.

    keep_transposed: keep transposed copies of gathered weights, see above.
    """
    linears = [(module, "weight") for module in model.modules() if isinstance(module, Fp8Linear)]
    experts = [module for module in model.modules() if isinstance(module, Fp8Experts)]
    stacks = [(module, name) for module in experts for name in (module.first, "down_proj")]
    for owners in filter(None, (linears, stacks)):
        shards = Fp8Shards(
            [module.get_parameter(name) for module, name in owners], keep_transposed
        )
        for number, (module, name) in enumerate(owners):
            module.shards = getattr(module, "shards", {}) | {name: (shards, number)}
            # FSDP asks this very object; to_local() may return another
            shard = shards.weights[number]._local_tensor
            shard.fsdp_pre_all_gather = partial(before_gather, name)
            shard.fsdp_post_all_gather = after_gather


class Fp8Shards:
    """This rank's shards of weights in FP8, rounded again at their first use after a change.

    weights: DTensors on one mesh, with one scale each: all [out, in], or all stacks
        [experts, out, in] of which each rank has one expert.
    A change is a step of any optimizer, unless the weight is frozen, or a write to a weight or its
    local tensor. A `foreach` operation on DTensors outside of an optimizer goes unnoticed.
    """

    def __init__(self, weights: list[DTensor], keep_transposed: bool):
        self.weights = weights
        self.keep_transposed = keep_transposed
        self.steps = 0
        # by weight: its `state` when rounded, its FP8 shard and inverse scale, a transposed copy
        self.seen: list[tuple | None] = [None] * len(weights)
        self.shards: list[tuple[Tensor, Tensor] | None] = [None] * len(weights)
        self.copies: list[Tensor | None] = [None] * len(weights)
        hook = register_optimizer_step_post_hook(partial(count_step, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def state(self, number: int) -> tuple[int, int, int]:
        """Return numbers that differ after a change."""
        weight = self.weights[number]
        return self.steps * weight.requires_grad, weight._version, weight._local_tensor._version

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a shard, FP8 [out / ranks, in] or [1, ...], and its inverse scale, fp32 [].

        All ranks of the mesh call this together.
        """
        if self.seen[number] != self.state(number):
            numbers = range(len(self.weights))
            self.update([n for n in numbers if self.seen[n] != self.state(n)])
        return self.shards[number]

    @torch.no_grad()
    def update(self, changed: list[int]) -> None:
        """Round the weights of these numbers again."""
        parts = [self.weights[number].to_local() for number in changed]
        mesh = self.weights[0].device_mesh
        # [changed]
        amax = torch.stack([largest(part) for part in parts])
        for dim, placement in enumerate(self.weights[0].placements):
            # these ranks hold other experts, which have scales of their own
            has_other_experts = parts[0].ndim == 3 and placement.is_shard(0)
            if mesh.size(dim) > 1 and not has_other_experts:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        scales = power_of_two_scale(amax, E4M3)
        # cuBLAS needs scales aligned to 16 bytes: [changed, 4], of which the first are used
        inverses = F.pad((1 / scales)[..., None], (0, 3))[..., 0]
        for number, part, scale, inverse in zip(changed, parts, scales, inverses, strict=True):
            self.shards[number] = cast(part, scale, E4M3), inverse
            self.copies[number] = None
            self.seen[number] = self.state(number)

    def copy_of(self, number: int, weight8: Tensor) -> Tensor | None:
        """Return a column-major copy of a gathered matrix [out, in], if copies are kept, or None.

        It stays until the weight changes.
        """
        if self.keep_transposed and self.copies[number] is None:
            self.copies[number] = transposed(weight8).t()
        return self.copies[number]


def count_step(shards: weakref.ref, *step) -> None:
    # a strong reference in the optimizers' global hook would keep the model alive
    if shards() is not None:
        shards().steps += 1


# No closures here: Python never collects reference cycles through a tensor.


def before_gather(
    name: str, mesh: DeviceMesh, size: torch.Size, stride: tuple, module: Module, policy
) -> tuple[tuple, tuple]:
    """Return the shard's bytes, which FSDP gathers, and metadata for `after_gather`.

    mesh: 1-D, the ranks that shard the weight. size: the shape of the full weight.
    """
    shards, number = module.shards[name]
    shard, inverse = shards[number]
    # FSDP gathers shards of equal size: pad to [ceil(out / ranks), in]
    if len(size) == 2:
        shard = pad_rows(shard, -(-size[0] // mesh.size()))
    return (shard.view(torch.uint8),), (module, name, size, inverse)


def after_gather(
    gathered: tuple[Tensor], metadata: tuple, dtype: torch.dtype, *, out: Tensor | None = None
):
    """Give the module its gathered FP8 weight, and FSDP a placeholder for the parameter.

    gathered: one tensor, uint8 [rows of all ranks' shards, ...]. metadata: from `before_gather`.
    The placeholder is NaN, which nothing reads; it only receives the gradient.
    out: given when FSDP gathers again; then the first placeholder stays.
    """
    module, name, size, inverse = metadata
    # set by tensor parallelism if ranks share key/value heads
    local_rows = getattr(module, "local_rows", slice(size[0]))
    weight8 = gathered[0].view(E4M3).view(-1, *size[1:])[local_rows].squeeze(0)
    shards, number = module.shards[name]
    module.gathered[name] = weight8, inverse, shards.copy_of(number, weight8)
    if out is not None:
        return None
    return weight_placeholder(size, inverse, dtype).as_subclass(Unstrided), []


class Unstrided(Tensor):
    """A placeholder that FSDP's as_strided leaves alone, where it would get memory."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.as_strided:
                return args[0].as_subclass(Tensor)
            return function(*args, **kwargs or {})
