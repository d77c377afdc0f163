"""Compile blocks by torch.compile.

Settings of the compiler hold for all that the process compiles afterwards. Those that have no
public name as of torch 2.13 stand here; one more, for recomputation, is in recompute.py.
"""

import torch
import torch._functorch.config
from torch.nn import Module

from minitrain.parallel.overlap import make_pass

# graphs of a process: one per kind of layer, in training, in evaluation and frozen; torch allows 8
GRAPHS = 64
INDUCTOR = {
    # tensors that one expression may read; torch allows 8, LoRA's rotated queries with dropout
    # need 10
    "realize_acc_reads_threshold": 12,
    # sums of fewer are written out, not looped over: of a token's rows, of up to 8 experts
    "unroll_reductions_threshold": 9,
    # with padding, Mamba-2's gradients would be copied for their matrix product
    "comprehensive_padding": False,
}


def compile_blocks(blocks: list[Module], dynamic: bool | None, communicates: bool) -> None:
    """Compile each block in place, as one graph.

    dynamic: compile for varying sizes; None: once a second size occurs.
    communicates: there are collectives inside. Then kernels run as the program has them, but for
        what overlap.py moves. Else the compiler may save memory by another order.
    """
    torch.compiler.config.recompile_limit = GRAPHS
    # else Mamba-2's gate would be kept in fp32
    torch._functorch.config.ban_recompute_long_fusible_chains = False
    options = INDUCTOR | {"reorder_for_peak_memory": not communicates}
    if communicates:
        options["post_grad_custom_post_pass"] = make_pass()
    for block in blocks:
        block.compile(fullgraph=True, dynamic=dynamic, options=options)
