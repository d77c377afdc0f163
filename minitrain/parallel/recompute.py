"""Activation recomputation (Chen et al. 2016): keep only a block's input, run its forward again in the backward pass.

Memory falls from all activations of all blocks to one [batch, seq, hidden] per block plus one block's activations;
compute grows by one more forward pass, about a third.
"""

from torch.nn import Module
from torch.utils.checkpoint import checkpoint


def recompute(block: Module) -> None:
    """Make `block` recompute its forward in place; its parameter names stay."""
    forward = block.forward

    def recomputed(*args, **kwargs):  # torch.compile sees through this, but skips a forward that is `checkpoint` itself
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed
