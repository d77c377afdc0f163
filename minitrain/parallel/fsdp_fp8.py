"""FP8 weights under FSDP: rounded where their shards lie, once per optimizer step, and gathered as
bytes.

Left alone, models/fp8.py rounds a weight in each forward pass: the whole weight's work for every
rank and micro-batch, after a gather in bf16. Here each rank rounds its shard, 1/n of the work, all
micro-batches gather the same bytes, half of bf16's, and a frozen weight is rounded once for ever.
The scale is the whole weight's: the largest elements of the shards are compared over all ranks that
have parts of it, tensor-parallel ones too, in one all-reduce per mesh dimension for all weights of
the rank together. So a weight has the same FP8 numbers whatever the layout.

Experts that compute in FP8 are gathered so, too, if expert parallelism has split them: each has a
scale of its own, which only the ranks that have parts of this expert compare. Unsplit ones are
gathered as they are, and rounded then.

Activations are compared over ranks only where tensor parallelism gathers them (parallel/tensor.py).
Elsewhere each rank scales what it multiplies, which costs nothing and loses nothing.

Memory: a byte more for each parameter that the rank holds, a byte less for each that is gathered.
The backward pass needs weights transposed; to spare that for every micro-batch, copies of whole
weights can be kept until they change, of frozen ones for ever, a byte for each parameter before
sharding. That is for layouts that keep weights gathered anyway.

FSDP asks a shard for two methods, in torchao those of a tensor subclass. A plain tensor can have
them as attributes, and so optimizers, checkpoints and DTensor see plain tensors in fp32. What
stands in the parameter's place while it is gathered is a `placeholder` that has no memory and
receives the gradient; the bytes are in the module beside it.
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

from minitrain.models.fp8 import Fp8Experts, Fp8Linear, pad_rows, placeholder, transposed
from minitrain.models.quantize import E4M3, cast, largest, power_of_two_scale


def gather_in_fp8(model: Module, keep_transposed: bool) -> None:
    """Make FSDP gather weights in FP8 that are multiplied so. To be called when they are sharded
    and have storage.
    """
    linears = [(module, "weight") for module in model.modules() if isinstance(module, Fp8Linear)]
    split = [
        module for module in model.modules() if isinstance(module, Fp8Experts) and are_split(module)
    ]
    stacks = [(module, name) for module in split for name in (module.first, "down_proj")]
    for owners in filter(None, (linears, stacks)):
        shards = Fp8Shards([module.get_parameter(name) for module, name in owners], keep_transposed)
        for number, (module, name) in enumerate(owners):
            module.shards = getattr(module, "shards", {}) | {name: (shards, number)}
            # FSDP asks this very object, which to_local() may not give
            shard = shards.weights[number]._local_tensor
            shard.fsdp_pre_all_gather = partial(before_gather, name)
            shard.fsdp_post_all_gather = after_gather


def are_split(experts: Fp8Experts) -> bool:
    """By expert parallelism, and not by FSDP?"""
    return "ep" in experts.down_proj.device_mesh.mesh_dim_names


class Fp8Shards:
    """This rank's shards of weights, DTensors on one mesh, in FP8: made anew when used after a
    change.

    weights: all [out, in], with one scale, or all [experts, out, in], with one for each expert.

    A change is a step of any optimizer, unless a weight is frozen, and any write to a weight or to
    its local part but
    one: a `foreach` operation on DTensors outside of an optimizer leaves no trace.
    """

    def __init__(self, weights: list[DTensor], keep_transposed: bool):
        self.weights = weights
        self.keep_transposed = keep_transposed
        self.steps = 0
        self.seen: list[tuple | None] = [None] * len(weights)
        self.shards: list[tuple[Tensor, Tensor] | None] = [None] * len(weights)
        self.copies: list[Tensor | None] = [None] * len(weights)
        hook = register_optimizer_step_post_hook(partial(count_step, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def state(self, number: int) -> tuple[int, int, int]:
        """What differs after a change."""
        weight = self.weights[number]
        return self.steps * weight.requires_grad, weight._version, weight._local_tensor._version

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """A weight's shard in FP8, and its inverse scale, fp32. All ranks of the mesh must call it
        together.
        """
        if self.seen[number] != self.state(number):
            self.update([n for n in range(len(self.weights)) if self.seen[n] != self.state(n)])
        return self.shards[number]

    @torch.no_grad()
    def update(self, changed: list[int]) -> None:
        parts = [self.weights[number].to_local() for number in changed]
        each = parts[0].ndim == 3
        mesh = self.weights[0].device_mesh
        amax = torch.stack([largest(part, each) for part in parts])
        for dim, placement in enumerate(self.weights[0].placements):
            has_other_experts = each and placement.is_shard(0)
            if mesh.size(dim) > 1 and not has_other_experts:
                dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group(dim))
        scales = power_of_two_scale(amax, E4M3)
        # cuBLAS refuses a scale that does not begin at a multiple of 16 bytes, so each has four
        # numbers' room
        inverses = F.pad((1 / scales)[..., None], (0, 3))[..., 0]
        for number, part, scale, inverse in zip(changed, parts, scales, inverses, strict=True):
            self.shards[number], self.copies[number] = (cast(part, scale, E4M3), inverse), None
            self.seen[number] = self.state(number)

    def copy_of(self, number: int, weight8: Tensor) -> Tensor | None:
        """A column-major copy of the matrix in `weight8`, as gathered, that lasts until its next
        change, if one is to be kept and `weight8` is not the stack of several experts, which are
        multiplied otherwise."""
        matrix = weight8.squeeze(0)
        if self.keep_transposed and self.copies[number] is None and matrix.ndim == 2:
            self.copies[number] = transposed(matrix).t()
        return self.copies[number]


def count_step(shards: weakref.ref, *step) -> None:
    if shards() is not None:
        shards().steps += 1


# The methods hold nothing but what FSDP gives them: Python does not find cycles of references that
# go through a tensor.


def before_gather(
    name: str, mesh: DeviceMesh, size: torch.Size, stride: tuple, module: Module, policy
) -> tuple[tuple, tuple]:
    """What FSDP gathers over the 1-D `mesh` for a weight of this `size`, its shard in bytes; notes
    for `after_gather`.

    Of a matrix FSDP wants all shards as long as the longest; those of a stack are.
    """
    shards, number = module.shards[name]
    shard, inverse = shards[number]
    if len(size) == 2:
        shard = pad_rows(shard, -(-size[0] // mesh.size()))
    return (shard.view(torch.uint8),), (module, name, size, inverse)


def after_gather(
    gathered: tuple[Tensor], notes: tuple, dtype: torch.dtype, *, out: Tensor | None = None
):
    """Give the module its weight in FP8, and FSDP, the first time, what stands in the parameter's
    place: NaN, which nothing reads, and which only gets the gradient."""
    module, name, size, inverse = notes
    # which tensor parallelism may say
    own_rows = getattr(module, "own_rows", slice(size[0]))
    weight8, (shards, number) = (
        gathered[0].view(E4M3).view(-1, *size[1:])[own_rows],
        module.shards[name],
    )
    module.gathered[name] = weight8, inverse, shards.copy_of(number, weight8)
    return (
        None if out is not None else (placeholder(size, inverse, dtype).as_subclass(Standing), [])
    )


class Standing(Tensor):
    """A placeholder on its way through FSDP, which takes a contiguous view of what it gets: this
    one stays as it is.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return (
                args[0].as_subclass(Tensor)
                if function is torch.as_strided
                else function(*args, **kwargs or {})
            )
