"""Activation recomputation (Chen et al. 2016): keep less for the backward pass, and compute the
rest again when needed.

A block of width h saves about 34 h bytes per token in bf16 (Korthikanti et al. 2022). What
`recompute` keeps of them, and what that costs:

    none        everything                                        nothing
    full        each block's input: 2 h bytes                     one more forward pass: a third more compute
    k = 2, 3..  of every k-th block only its input                1/k of that
    attention   a block's input and what attention returns:       one more forward pass but for attention, which is
                4 h bytes where its heads are h wide together     most of it where sequences are long
    selective   outputs of matrix products, of attention, of      norms, activations and rotations run twice:
                all-to-alls and reduce-scatters                   a few percent

In the backward pass one block's activations come on top.

Recomputing runs a block's other collectives again, in the same order on every rank, since all ranks
recompute the same blocks; what an all-gather returns is too large to keep. Left out: offloading to
host memory.
"""

from functools import partial

import torch
import torch._dynamo.config  # the setting has no public name
from torch.nn import Module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import minitrain.models.fp8  # noqa: F401  defines the operators that are ours, with what it imports

_ops = torch.ops.aten
_collectives = torch.ops._c10d_functional
ATTENTION = {
    _ops._scaled_dot_product_cudnn_attention.default,
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
EXPENSIVE = ATTENTION | {
    _ops.mm.default,
    _ops.addmm.default,
    _ops.bmm.default,
    torch.ops.minitrain.onednn_linear.default,
    _ops._grouped_mm.default,
    torch.ops.minitrain.grouped_mm.default,
    torch.ops.minitrain.linear_fp32.default,
    _ops._scaled_mm.default,
    torch.ops.minitrain.scaled_mm.default,
    _collectives.all_to_all_single.default,
    _collectives.reduce_scatter_tensor.default,
}
# A token's experts, and its place among their rows: from activations that a second run may round
# otherwise, they could be others than those whose outputs are kept.
CHOICES = {_ops.topk.default, _ops.sort.stable}
# the operations whose outputs a setting keeps
KEPT = {"attention": ATTENTION, "selective": EXPENSIVE | CHOICES}


def recompute(blocks: list[Module], setting: str | int, random: bool = False) -> None:
    """Make `blocks` recompute in place, before they are compiled; parameter names stay.

    setting: `none`, `full`, `attention`, `selective`, or a whole number k: every k-th block,
    counted from the first.
    random: do the blocks draw random numbers, for dropout? Then the second run must draw the same
    again.
    """
    # what a block changes outside itself, counts of tokens per expert, the second run must not
    # change again
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    if setting == "none":
        return
    context = {"preserve_rng_state": random}
    if setting in KEPT:
        context["context_fn"] = partial(
            create_selective_checkpoint_contexts, partial(keep, KEPT[setting])
        )
    for block in blocks[:: setting if isinstance(setting, int) else 1]:
        wrap(block, **context)


def wrap(block: Module, **context) -> None:
    """Run `block`'s forward under torch's checkpoint."""
    forward = block.forward

    # torch.compile sees through this, but skips a forward that is `checkpoint` itself
    def recomputed(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **context, **kwargs)

    block.forward = recomputed


def keep(kept: set, _, op, *args, **kwargs) -> CheckpointPolicy:
    """The policy for an operation's outputs: those of `kept` stay in memory."""
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE
