"""How a model is changed in place, in three ways, and variants of its modules.

Models are plain modules, whose parameters have the names of Hugging Face checkpoints. LoRA, FP8,
parallelism and the sampler change them in place:

    way                            who uses it
    (a) a variant: a subclass      Fp8Linear, Fp8Experts (fp8.py), CpuLinear (cpu.py),
        that holds the same        LoraLinear, LoraExperts (lora.py), around any of these;
        parameters. `set_variant`  VocabParallelEmbedding, LocalPositions, RMSNormOverHeads
                                   (parallel/tensor*.py); Recomputing, of a block
                                   (parallel/recompute.py); the sampler's JoinedLinear, and its
                                   blocks (rollout/weights.py, compiled.py)
    (b) an exchange point: a       gather, reduce, split: tensor parallelism
        function that a module     dispatch: expert and tensor parallelism
        calls. Its default, for    attend, mix, make_mask, split_cp, gather (Wan's): context
        one rank, is set in the    parallelism
        constructor, or is a       split_tp, gather (Wan's): tensor parallelism
        method (Mamba2.mix)        sum_counts: balancing of experts over ranks
    (c) a hook of torch            FSDP's own; parallel/parts.py: `use_local_tensors` runs before a
                                   block, and lets a rank's plain tensors hide the DTensor
                                   parameters of the same names; LoRA's, on the embedding

The sampler's variants last no longer than sampling: training goes on with the classes it had.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class KeepsFP32(nn.Module):
    """Parameters that stay in fp32 when the model is cast, because bf16 is too coarse for them.

    It is never called: other modules read its parameters, and parallel/fsdp.py casts none of them.
    """

    def _apply(self, fn, recurse=True):
        # torch calls this for .to(), .bfloat16(), .cuda() and the like
        return super()._apply(at_least_fp32(fn), recurse)


def at_least_fp32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `fn`, which casts or moves a tensor [...], so that its result has fp32 or more."""

    def keep(tensor: Tensor) -> Tensor:
        changed = fn(tensor)
        if changed.dtype.itemsize >= 4:
            return changed
        return tensor.to(changed.device, torch.float32)

    return keep


def base_class(module: nn.Module) -> type:
    """Return the module's class, without the adapters that may be around it."""
    kind = type(module)
    # an adapted class has bases (LoraLinear or LoraExperts, the class inside): see lora.py
    return kind.__bases__[-1] if hasattr(kind, "around") else kind


def set_variant(module: nn.Module, variant: type) -> None:
    """Turn a module into a `variant` of its class, in place: way (a).

    Parameters, their names, hooks and adapters stay.
    """
    # an adapted class makes one of the same adapters around the variant
    around = getattr(type(module), "around", None)
    module.__class__ = around(variant) if around else variant


def in_tuples(kind: type, flat: Sequence) -> list:
    """Return NamedTuples of a `kind` from their fields, which stand one after the other in `flat`.

    An autograd.Function of several Linears takes its tensors so.
    """
    size = len(kind._fields)
    return [kind(*flat[start : start + size]) for start in range(0, len(flat), size)]


def has_hooks(module: nn.Module) -> bool:
    """Return True if calling the module does more than its `forward`."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)
