"""Compile blocks by torch.compile, and let the compiler overlap tensor parallelism's collectives.

Settings of the compiler that have no public name as of torch 2.13 stand here. They hold for all
that the process compiles afterwards. One more, for recomputation, is in recompute.py.
"""

import warnings
from collections.abc import Callable

import torch
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from minitrain.errors import InputError

# graphs of a process: one per kind of layer, in training, in evaluation and frozen; torch allows 8
GRAPHS = 64
INDUCTOR = {
    # tensors that one expression may read; torch allows 8, LoRA's rotated queries with dropout
    # need 10
    "realize_acc_reads_threshold": 12,
    # with padding, Mamba-2's gradients would be copied for their matrix product
    "comprehensive_padding": False,
}


def compile_blocks(blocks: list[Module], dynamic: bool | None) -> None:
    """Compile each block in place, as one graph.

    dynamic: compile for varying sizes; None: once a second size occurs.
    """
    torch._dynamo.config.recompile_limit = GRAPHS
    # else Mamba-2's gate would be kept in fp32
    torch._functorch.config.ban_recompute_long_fusible_chains = False
    for block in blocks:
        block.compile(fullgraph=True, dynamic=dynamic, options=INDUCTOR)


def overlap_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler overlap collectives with the matrix products next to them (CUDA only).

    It cuts both into chunks. See `check_overlap`.
    """
    import torch._inductor.config  # takes a second to import
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    with warnings.catch_warnings():
        # torch 2.13 says that there is no need, and its pass still asks
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(mesh.get_group().group_name)


def check_overlap(step: Callable[[], list[Tensor]]) -> None:
    """Raise InputError if `step`, compiled, returns wrong tensors, as torch 2.12 silently did.

    step: returns tensors of any shapes [...], such as gradients.
    Wrong: norm(difference) / norm(expected) is above 0.05. bf16 differs by 0.01, a lost chunk by
    far more.
    """
    with torch.compiler.set_stance("force_eager"):
        expected = step()
    for actual, right in zip(step(), expected, strict=True):
        error = ((actual - right).norm() / right.norm().clamp(min=1e-12)).item()
        if not error <= 0.05:
            raise InputError(
                f"parallel.async_tp=true: torch {torch.__version__} computes wrong results with it, off by {error:.1e} "
                f"relative to the synchronous ones (use false)"
            )
