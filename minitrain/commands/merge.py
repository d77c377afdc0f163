"""Write a model with its adapters merged into it: what python -m minitrain.merge does."""

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from shlex import quote

from minitrain.data.chat.chat_templates import choose_template
from minitrain.data.chat.chats import end_of_reply
from minitrain.data.tokenizer import (
    CHAT_TEMPLATE,
    Tokenizer,
    check_free_of_tokenizer,
    check_same_ids,
    load_tokenizer,
    tokenizer_folder,
)
from minitrain.errors import InputError
from minitrain.formats.config_hf import end_also_at
from minitrain.formats.hf import save_pretrained
from minitrain.formats.peft import load_merged
from minitrain.models.decoder import Decoder


def merge(options: Namespace) -> None:
    """Add --adapter to --model's weights and write the result to --out."""
    for name in ("model", "adapter"):
        if Path(options.out).resolve() == Path(getattr(options, name)).resolve():
            raise InputError(
                f"--out {options.out} is --{name}, which would be overwritten (use another folder)"
            )
    source = tokenizer_folder(options.model, options.adapter)
    tokenizer = load_tokenizer(source) if Path(source, "tokenizer.json").exists() else None
    if tokenizer is None:
        check_free_of_tokenizer(options.out)
    else:
        check_same_ids(source, options.model, "--adapter ")
    template = Path(source, CHAT_TEMPLATE)
    end = chat_end(tokenizer, template)
    model = load_merged(options.model, options.adapter)
    if isinstance(model, Decoder):  # of videos none has a token that ends it
        if model.config.eos_token_id is None and tokenizer:
            model.config = replace(model.config, eos_token_id=tokenizer.eos_id)
        model.config = end_also_at(model.config, end)
    save_pretrained(model, options.out)
    if tokenizer:
        tokenizer.save(options.out)
    if template.exists():
        shutil.copyfile(template, Path(options.out, CHAT_TEMPLATE))  # of bytes, too
    print(f"{options.out} holds the model with the adapters merged into it")
    videos = "" if isinstance(model, Decoder) else "--task diffusion "
    print(f"next: minitrain generate {videos}--model {quote(options.out)} (see its --help)")


def chat_end(tokenizer: Tokenizer | None, template: Path) -> int | None:
    """Return the token that ends a reply in a tokenizer's chat template, if there is one."""
    if tokenizer is None or not (tokenizer.chat_template or template.exists()):
        return None
    try:
        return end_of_reply(choose_template("auto", tokenizer), tokenizer)
    except (InputError, ImportError):  # what merges weights need not understand it
        return None
