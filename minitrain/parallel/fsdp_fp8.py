"""FP8 weights under FSDP: each rank rounds its shards once per optimizer step and gathers bytes.

Without this file FSDP gathers a weight in bf16, and every rank rounds all of it in every forward
pass (models/fp8.py). Here a rank rounds its shard alone, 1 / n of the work. All micro-batches
gather the same bytes, half of bf16's. A frozen weight is rounded once.

The scale is that of the full weight: the maxima of its shards are reduced over all ranks that hold
some of it, tensor-parallel ones too. One all-reduce per mesh dimension serves all weights. So a
weight has the same FP8 numbers in any layout. An expert has a scale of its own, reduced over the
ranks that hold some of it. (Scales of activations are reduced in tensor.py.)

With blocks of 128 x 128 (models/fp8_forms.py) the scales are gathered as the numbers are, if every
shard has whole blocks. FSDP gathers other weights in bf16, and `gathered_wide` counts them: those
whose blocks a shard would cut, and forms that round a weight twice, which would be as many bytes.

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

import math
import weakref
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook

from minitrain.models.fp8_forms import FORMS
from minitrain.models.quantize import (
    E4M3,
    WHOLE,
    Block,
    cast,
    largest,
    pad_rows,
    power_of_two_scale,
    quantize,
    transposed,
    weight_placeholder,
)


def gather_in_fp8(model: Module, keep_transposed: bool) -> None:
    """Make FSDP gather the weights of FP8 products in FP8, after sharding and `to_empty`.

    keep_transposed: keep transposed copies of gathered weights, see above.
    """
    owners = [each for each in fp8_weights(model) if shards_have_whole_blocks(*each)]
    # stacks of experts have a mesh of their own
    stacks = [each for each in owners if each[0].get_parameter(each[1]).ndim > 2]
    linears = [each for each in owners if each not in stacks]
    for alike in filter(None, (linears, stacks)):
        shards = Fp8Shards(
            [module.get_parameter(name) for module, name in alike],
            keep_transposed,
            block_of(alike[0][0]),
        )
        for number, (module, name) in enumerate(alike):
            module.shards = getattr(module, "shards", {}) | {name: (shards, number)}
            # FSDP asks this very object; to_local() may return another
            shard = shards.weights[number]._local_tensor
            shard.fsdp_pre_all_gather = partial(before_gather, name)
            shard.fsdp_post_all_gather = after_gather


def gathered_wide(model: Module) -> int:
    """Return of how many FP8 weights FSDP gathers the parameters, not the FP8 numbers."""
    return sum(name not in getattr(module, "shards", {}) for module, name in fp8_weights(model))


def fp8_weights(model: Module) -> Iterator[tuple[Module, str]]:
    """Yield the modules that multiply in FP8, with the name of each weight: see `to_fp8`."""
    for module in model.modules():
        for name in getattr(module, "gathered", ()):
            yield module, name


def block_of(module: Module) -> Block:
    """Return which rows and columns of the module's weights share a scale."""
    return FORMS[module.form].weight_block


def shards_have_whole_blocks(module: Module, name: str) -> bool:
    """Return whether FSDP can gather a weight's FP8 numbers with scales from its shards."""
    rows, _ = block = block_of(module)
    weight = module.get_parameter(name)
    if block == WHOLE:
        return True
    if not FORMS[module.form].square_blocks or weight.ndim > 2:
        return False
    sizes = zip(weight.placements, weight.device_mesh.shape, strict=True)
    # torch's strided shards, of tensor parallelism and FSDP together, do not answer is_shard
    ranks = math.prod(size for placement, size in sizes if getattr(placement, "dim", None) == 0)
    return len(weight) % (rows * ranks) == 0


class Fp8Shards:
    """This rank's shards of weights in FP8, rounded again at their first use after a change.

    weights: DTensors on one mesh: all [out, in], or all stacks [experts, out, in] of which each
        rank has one expert.
    block: that share a scale: whole weights, or blocks that no shard cuts.
    A change is a step of any optimizer, unless the weight is frozen, or a write to a weight or its
    local tensor. A `foreach` operation on DTensors outside of an optimizer goes unnoticed.
    """

    def __init__(self, weights: list[DTensor], keep_transposed: bool, block: Block = WHOLE):
        self.weights = weights
        self.block = block
        self.keep_transposed = keep_transposed
        self.steps = 0
        # by weight: its `state` when rounded, its FP8 shard and inverse scales, a transposed copy
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
        """Return a shard, FP8 [out / ranks, in] or [1, ...], and its inverse scales, fp32.

        These are [] for a whole weight, else of the shard's blocks.
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
        if self.block == WHOLE:
            rounded = self.round_whole(parts)
        else:
            rounded = (quantize(part, E4M3, self.block) for part in parts)
        for number, pair in zip(changed, rounded, strict=True):
            self.shards[number] = pair
            self.copies[number] = None
            self.seen[number] = self.state(number)

    def round_whole(self, parts: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shards in FP8 and inverse scales of the full weights, fp32 []."""
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
        for part, scale, inverse in zip(parts, scales, inverses, strict=True):
            yield cast(part, scale, E4M3), inverse

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
    # on one rank FSDP takes the first tensor alone
    if inverse.ndim and mesh.size() > 1:
        return (shard.view(torch.uint8), inverse), (module, name, size, None)
    # FSDP gathers shards of equal size: pad to [ceil(out / ranks), in]
    if len(size) == 2:
        shard = pad_rows(shard, -(-size[0] // mesh.size()))
    return (shard.view(torch.uint8),), (module, name, size, inverse)


def after_gather(
    gathered: tuple[Tensor], metadata: tuple, dtype: torch.dtype, *, out: Tensor | None = None
):
    """Give the module its gathered FP8 weight, and FSDP a placeholder for the parameter.

    gathered: uint8 [rows of all ranks' shards, ...], and inverse scales of blocks, if there are
        any. metadata: from `before_gather`.
    The placeholder is NaN, which nothing reads; it only receives the gradient.
    out: given when FSDP gathers again; then the first placeholder stays.
    """
    module, name, size, inverse = metadata
    # set by tensor parallelism if ranks share key/value heads
    local_rows = getattr(module, "local_rows", slice(0, size[0]))
    weight8 = gathered[0].view(E4M3).view(-1, *size[1:])[local_rows].squeeze(0)
    rows, columns = block_of(module)
    if inverse is None:
        inverse = gathered[1].view(-1, size[1] // columns)
    if inverse.ndim:
        inverse = inverse[local_rows.start // rows : local_rows.stop // rows]
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
