"""The shapes of the published models, fields of `DecoderConfig`: a file per kind of layer."""

_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_attention_heads")


def size(*sizes: int, **others) -> dict:
    """Return the four sizes that are always given as fields, beside others."""
    return dict(zip(_SIZES, sizes, strict=True)) | others
