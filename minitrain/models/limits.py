"""The largest sizes that a model may claim: above any that exists, below what overflows or takes
minutes to lay out.

A config is a claim by whoever wrote the file, and models are built from it before their weights are
looked at.
"""

from minitrain.errors import InputError

LARGEST = {
    "num_layers": 1_000,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "moe_latent_size",
            "ffn_dim",
            "dim",
        ),
        1 << 20,
    ),
}
# numbers of heads and experts, widths of heads, ranks of projections
OTHERS = 1 << 16


def check_size(name: str, value: int, least: int = 1) -> None:
    """Raises InputError for a size `name` of a model that is below `least` or absurdly large."""
    if value < least:
        raise InputError(f"model.{name}={value} must be at least {least}")
    if value > LARGEST.get(name, OTHERS):
        raise InputError(f"model.{name}={value} must be at most {LARGEST.get(name, OTHERS):,}")
