"""Open the datasets of a config."""

import math
from dataclasses import replace

from minitrain.data.chat.preferences import open_pairs
from minitrain.data.chat.sft import open_chats
from minitrain.data.files import apart, held_out_apart
from minitrain.data.mixed import Mixed
from minitrain.data.text.text_rows import open_data
from minitrain.data.video.latents import open_latents
from minitrain.settings import Config


def open_dataset(config: Config) -> tuple:
    """Return the training dataset, and the held-out one or None; `open_data` describes them.

    Raises InputError for files that are missing, damaged or do not fit the model.
    """
    if config.data.validation_path:
        trained, held = map(open_dataset, held_out_apart(config))
        # videos to validate on are under noise held fixed
        return trained[0], held[1] or held[0]
    if config.data.sources:
        return open_sources(config)
    if config.task == "diffusion":
        return open_latents(config)
    if config.task == "dpo":
        return open_pairs(config)
    if config.task in ("sft", "lora"):
        return open_chats(config)
    return open_data(
        config.data, config.batch.seq_len, config.model.config.vocab_size, config.seed
    )


def open_sources(config: Config) -> tuple[Mixed, Mixed | None]:
    """Return the sources' training datasets mixed, and their held-out ones likewise."""
    sources = apart(config.data)
    weights = [source.weight for source in config.data.sources]
    opened = [open_dataset(replace(config, data=data)) for data in sources.values()]
    trained, held = zip(*opened, strict=True)
    names = list(sources)
    mixed_held = None
    if config.data.validation:
        mixed_held = Mixed(held, names, weights)
    return Mixed(trained, names, weights), mixed_held


def with_steps(config: Config, rows: int, per_step: int) -> Config:
    """Return the config with its epochs as steps: passes over `rows`, of which a step takes some."""
    if not config.epochs:
        return config
    return replace(config, steps=math.ceil(config.epochs * rows / per_step), epochs=0.0)
