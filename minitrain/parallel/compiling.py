"""Compile blocks by torch.compile, and let the compiler overlap tensor parallelism's collectives.

All settings of the compiler that have no public name stand here, as of torch 2.13. They hold for
everything that the process compiles from then on. One more, of recomputation, is in recompute.py.
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

# of a process's blocks: all kinds of layers, each in training, in evaluation and frozen; torch
# allows 8
GRAPHS = 64
INDUCTOR = {
    # tensors that one expression may combine; torch allows 8. LoRA's queries with dropout, rotated,
    # take 10
    "realize_acc_reads_threshold": 12,
    # Mamba-2's padded gradients would be copied for their matrix product
    "comprehensive_padding": False,
}


def compile_blocks(blocks: list[Module], dynamic: bool | None) -> None:
    """Compile each block in place, as one graph.

    dynamic: whether sizes may vary; None: from the second one on.
    """
    torch._dynamo.config.recompile_limit = GRAPHS
    # else Mamba-2's gate would be kept in fp32
    torch._functorch.config.ban_recompute_long_fusible_chains = False
    for block in blocks:
        block.compile(fullgraph=True, dynamic=dynamic, options=INDUCTOR)


def overlap_collectives(mesh: DeviceMesh) -> None:
    """Let the compiler cut a collective and the matrix product next to it into pieces, and overlap
    them (CUDA only). See `check_overlap`.
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

    Wrong: norm(difference) / norm(expected) is above 0.05. bf16 differs by 0.01, a lost piece by
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
