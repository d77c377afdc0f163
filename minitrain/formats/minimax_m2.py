"""Read what is particular to MiniMax-M2's config.json (see families.py)."""

from minitrain.formats.json_files import read_number


def with_rotary_share(raw: dict) -> dict:
    """Return MiniMax-M2's config.json with `partial_rotary_factor`, where it has `rotary_dim`."""
    if raw.get("rotary_dim") is None or raw.get("partial_rotary_factor") is not None:
        return raw
    rotated = read_number(raw, "rotary_dim")
    share = rotated / max(1, read_number(raw, "head_dim", default=128))
    return raw | dict(partial_rotary_factor=share)
