"""Read what is particular to SmolLM3's config.json (see families.py)."""

from minitrain.errors import InputError
from minitrain.formats.json_files import read_number


def with_defaults(raw: dict) -> dict:
    """Return SmolLM3's config.json with what it leaves out.

    Raises InputError where its list of layers that rotate says another thing.
    """
    raw = dict(no_rope_layer_interval=4, tie_word_embeddings=True) | raw
    given = raw.get("no_rope_layers")
    every = read_number(raw, "no_rope_layer_interval")
    if given is None:
        return raw
    listed = given if isinstance(given, list) else []
    regular = all(turns == int(not every or i % every != 0) for i, turns in enumerate(listed, 1))
    if not regular or len(listed) < read_number(raw, "num_hidden_layers"):
        raise InputError(
            f"no_rope_layers={given!r} is not supported (must be 0 for one of "
            f"no_rope_layer_interval={every} layers, the last, and 1 for the others)"
        )
    return raw
