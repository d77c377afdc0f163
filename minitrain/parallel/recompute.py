"""Activation recomputation (checkpointing): save less of the forward pass, compute it again.

A block of width h saves about 34 h bytes per token in bf16 (Korthikanti et al. 2022).

    recompute   saved of each block                        cost
    none        everything                                 nothing
    full        its input: 2 h bytes                       another forward pass: 1/3 more compute
    k = 2, 3..  as full for every k-th block, else as      1 / k of that
                none
    attention   its input and the output of attention:     another forward pass without attention,
                4 h bytes if the heads are h wide          which dominates in long sequences
                together
    selective   outputs of matrix products, attention,     norms, activations and rotations run
                all-to-alls and reduce-scatters            twice: a few percent
    offload     everything, on the host; on the device     copies over the bus, hidden if blocks
                that of two blocks                         compute for longer (activation_offload.py)
    full-       its input, on the host                     as full, and copies of 2 h bytes
    offload

In the backward pass the activations of one block come on top.

Recomputation runs the other collectives of a block again, in the same order on every rank, since
all ranks recompute the same blocks. The outputs of all-gathers are too large to save.
Source: Chen et al. 2016.
"""

from functools import cache, partial

import torch
import torch._dynamo.config  # the setting has no public name
from torch.nn import Module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from minitrain.models.variants import set_variant
from minitrain.parallel.activation_offload import offload
from minitrain.parallel.collectives import operators

# settings that keep what blocks save on the host
OFFLOADED = ("offload", "full-offload")

_ops = torch.ops.aten
ATTENTION = {
    _ops._scaled_dot_product_cudnn_attention.default,
    _ops._scaled_dot_product_flash_attention.default,
    _ops._scaled_dot_product_efficient_attention.default,
    _ops._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
}
PRODUCTS = {
    _ops.mm.default,
    _ops.addmm.default,
    _ops.bmm.default,
    _ops._grouped_mm.default,
    _ops._scaled_mm.default,
}
RECEIVED = {operators.all_to_all_single.default, operators.reduce_scatter_tensor.default}
# attention, and matrix products, that files of models/ register as operators, when imported
OWN_ATTENTION = ("attention_part",)
OWN_PRODUCTS = (
    "add_product",
    "cpu_linear",
    "grouped_mm",
    "linear_fp32",
    "scaled_mm",
    "scaled_grouped_mm",
)
# The router's top-k, and the sort of tokens by expert. A second run may round its inputs
# differently, and select other experts than those whose outputs are saved.
ROUTING = {_ops.topk.default, _ops.sort.stable}


def saved_operators(setting: str | int) -> frozenset | None:
    """Return the operators whose outputs a setting saves; None: it saves a block's input only.

    Raises ValueError for a setting that the table does not have.
    """
    if setting == "attention":
        return frozenset(ATTENTION | registered(OWN_ATTENTION))
    if setting == "selective":
        return frozenset(
            ATTENTION | PRODUCTS | RECEIVED | ROUTING | registered(OWN_ATTENTION + OWN_PRODUCTS)
        )
    if setting not in ("full", "full-offload") and (isinstance(setting, str) or setting < 1):
        raise ValueError(
            f"recompute={setting!r} is none, full, attention, selective, offload, full-offload or k >= 1"
        )
    return None


def registered(names: tuple[str, ...]) -> set:
    """Return those of our own operators that exist."""
    own = torch.ops.minitrain
    return {getattr(own, name).default for name in names if hasattr(own, name)}


def recompute(blocks: list[Module], setting: str | int, random: bool = False) -> None:
    """Make `blocks` recompute in place, before they are compiled. Parameter names stay.

    setting: of the table above; an int k: every k-th block from the first.
    random: the blocks draw random numbers, for dropout, and must draw the same ones again.
    """
    if setting not in ("none", "offload"):
        run_again(blocks, setting, random)
    if setting in OFFLOADED:
        # around the recomputation, which saves a block's input
        offload(blocks)


def run_again(blocks: list[Module], setting: str | int, random: bool) -> None:
    """Make `blocks` recompute what `setting` does not save. random: as for `recompute`."""
    # the second run must not repeat side effects, such as counting tokens per expert
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    saved = saved_operators(setting)
    every = setting if isinstance(setting, int) else 1
    for block in blocks[::every]:
        set_variant(block, recomputing(type(block), saved, random))


# one class, however many stages a pipeline has: the compiler compiles each class's forward anew
@cache
def recomputing(kind: type, saved: frozenset | None, random: bool) -> type:
    """Return the variant of a block's class whose forward runs under torch's checkpoint.

    saved: as of `saved_operators`.
    """
    context = {"preserve_rng_state": random}
    if saved is not None:
        policy = partial(choose_policy, saved)
        context["context_fn"] = partial(create_selective_checkpoint_contexts, policy)

    class Recomputing(kind):
        # torch.compile traces this function, but skips a forward that is `checkpoint` itself
        def forward(self, *args, **kwargs):
            if not torch.is_grad_enabled():
                return super().forward(*args, **kwargs)
            return checkpoint(super().forward, *args, use_reentrant=False, **context, **kwargs)

    return Recomputing


def choose_policy(saved: frozenset, _, op, *args, **kwargs) -> CheckpointPolicy:
    """Save the outputs of the operators in `saved`, and recompute those of all others."""
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE
