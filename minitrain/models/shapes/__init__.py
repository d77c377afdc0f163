"""The published models' shapes, a file per kind of layer, and in mixers.py those of mixers."""

_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_attention_heads")


def size(*sizes: int, **others) -> dict:
    """Return the four sizes that are always given as fields, beside others."""
    return dict(zip(_SIZES, sizes, strict=True)) | others
