"""Write a run's result: the model in Hugging Face layout, or its adapters, with its tokenizer."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from minitrain.data.sources import has_tokenizer
from minitrain.data.tokenizer import Tokenizer, check_free_of_tokenizer, load_tokenizer
from minitrain.data.tokenizer_files import CHAT_TEMPLATE
from minitrain.errors import InputError
from minitrain.formats.config_hf import end_also_at
from minitrain.formats.hf import check_free_of_adapters, save_tensors
from minitrain.formats.peft import save_adapter
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.lora import is_new
from minitrain.models.zoo import model_config
from minitrain.parallel.pipeline import Pipeline
from minitrain.parallel.shards import full_tensors
from minitrain.run.launch.start import remove_timeouts
from minitrain.settings import Config
from minitrain.training.loop import Trainer


def export(
    trainer: Trainer, config: Config, folder: Path, asks: str | None = None, fp8: bool = False
) -> None:
    """Write the model in Hugging Face layout, with fp8 as `save_tensors`, or its adapters in PEFT's.

    All ranks call it; rank 0 writes.
    asks: the prompt before replies in training, if it differs from that of the tokenizer's template.
    """
    wanted = is_new if config.lora else lambda name: True
    model = trainer.model
    if isinstance(model, Pipeline):
        tensors = model.full_tensors(wanted)
    else:
        tensors = full_tensors(model, wanted)
    # the other ranks wait while rank 0 writes, however long; launch/watch.py notices dead ranks
    if dist.get_world_size() > 1:
        remove_timeouts()
    if dist.get_rank() != 0:
        for _ in tensors:
            pass
        return
    shape = config.model.config
    end = document_end(config)
    if has_tokenizer(config):
        tokenizer = load_tokenizer(config.data.tokenizer)
        tokenizer.save(folder)
        if config.task != "pretrain":
            end = save_template(config, tokenizer, folder, asks)
        if shape.eos_token_id is None:
            shape = replace(shape, eos_token_id=tokenizer.eos_id)
    if end is not None:
        # transformers stops generating at this token
        shape = end_also_at(shape, end)
    if config.lora:
        save_adapter(tensors, shape, config.lora, folder, config.model.path or config.model.name)
    else:
        # the dtype of the shards; parameters that are still gathered after a validation have another
        dtype = torch.bfloat16 if config.precision == "bf16-pure" else torch.get_default_dtype()
        save_tensors(tensors, shape, dtype, folder, fp8=fp8)


def save_template(
    config: Config, tokenizer: Tokenizer, folder: Path, asks: str | None
) -> int | None:
    """Write the chat template that training used; return the token that ends a reply."""
    from minitrain.data.chat.chat_templates import choose_template
    from minitrain.data.chat.chats import end_of_reply
    from minitrain.data.chat.jinja import asking_with

    template = choose_template(config.data.template, tokenizer)
    text = None
    # the tokenizer's own has been saved with it
    if not template.is_own:
        text = template.jinja(tokenizer)
    elif asks is not None:
        text = asking_with(asks, tokenizer.chat_template)
    if text is not None:
        (folder / CHAT_TEMPLATE).write_text(text, encoding="utf-8")
    return end_of_reply(template, tokenizer)


def check_free_of_others(config: Config, folder: Path) -> None:
    """Raise InputError if `folder` has files of an earlier run that would be taken for this run's."""
    if config.lora is None and config.task != "diffusion":
        check_free_of_adapters(folder)
    if config.lora and (folder / "config.json").exists():
        raise InputError(
            f"{folder} holds a model, which adapters beside it do not belong to (use another out_dir)"
        )
    if not has_tokenizer(config):
        check_free_of_tokenizer(folder)


def with_ids_of_data(config: Config) -> Config:
    """Return the config with the ids of bos, eos and pad of its data, if weights start at random.

    They replace those of the zoo. Raises InputError for an eos or bos in the settings that is
    neither the zoo's nor the tokenizer's.
    """
    shape = config.model.config
    if config.model.path or config.task == "diffusion":
        return config
    if has_tokenizer(config):
        tokenizer = load_tokenizer(config.data.tokenizer)
        ids = {"bos_token_id": tokenizer.named_id("bos"), "eos_token_id": tokenizer.eos_id}
        pad = tokenizer.named_id("pad")
        zoo = model_config(config.model.name) if config.model.name else DecoderConfig()
        for key, own in ids.items():
            given = getattr(shape, key)
            if isinstance(given, list) and own in given:
                ids[key] = given
            elif given not in (None, own, getattr(zoo, key)):
                raise InputError(
                    f"model.{key}={given}, but data.tokenizer={config.data.tokenizer} has {own}"
                )
        if pad is not None and pad >= shape.vocab_size:
            pad = None
        extra = shape.extra_config | {"pad_token_id": pad}
        shape = replace(shape, **ids, extra_config=extra)
    elif (end := document_end(config)) is not None:
        shape = replace(shape, eos_token_id=end)
    return replace(config, model=replace(config.model, config=shape))


def document_end(config: Config) -> int | None:
    """Return the token that ends a document in files of tokens, or None."""
    return config.data.document_end if config.data.kind == "tokens" else None
