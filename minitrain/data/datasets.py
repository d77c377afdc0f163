"""Open the datasets of a config."""

from minitrain.data.latents import open_latents
from minitrain.data.sft import open_chats
from minitrain.data.text import open_data
from minitrain.settings import Config


def open_dataset(config: Config) -> tuple:
    """Return the training dataset, and the held-out one or None; `open_data` describes them.

    Raises InputError for files that are missing, damaged or do not fit the model.
    """
    if config.task == "diffusion":
        return open_latents(config)
    if config.task in ("sft", "lora"):
        return open_chats(config)
    return open_data(config.data, config.batch.seq_len, config.model.config.vocab_size, config.seed)
