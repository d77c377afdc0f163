"""Tell which data a config names: its sources, what is held out, and whether it has a tokenizer.

Files are not looked at.
"""

from dataclasses import replace

from minitrain.errors import InputError
from minitrain.settings import Config, Data


def train_and_held_out(config: Config) -> tuple[Config, Config]:
    """Return two configs without data.validation_path: for the training data, and for the held-out files."""
    data = replace(config.data, validation=0.0, validation_path="")
    held = replace(data, path=config.data.validation_path, sources=[])
    return replace(config, data=data), replace(config, data=held)


def data_by_source(data: Data) -> dict[str, Data]:
    """Return the data of each source by its name; `data` itself if it has no sources."""
    if not data.sources:
        return {"": data}
    found = {}
    for source in data.sources:
        if source.label in found:
            raise InputError(
                f"data.sources has two of the name {source.label!r} (name them apart)"
            )
        kind = source.kind or data.kind
        key = data.field if source.field is None else source.field
        found[source.label] = replace(data, sources=[], path=source.path, kind=kind, field=key)
    return found


def has_tokenizer(config: Config) -> bool:
    """Return True if the run's tokens are those of data.tokenizer.

    Files of tokens are assumed to be so only if a tokenizer is named.
    """
    kinds = {data.kind for data in data_by_source(config.data).values()}
    named = "tokens" in kinds and config.data.tokenizer != "bytes"
    return bool(kinds & {"text", "jsonl"}) or config.task == "grpo" or named
