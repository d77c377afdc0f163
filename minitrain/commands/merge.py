"""Add adapters to the weights that they belong to: python -m minitrain.merge --help.

--model is a folder in Hugging Face layout. --adapter is a folder in PEFT's format, such as a LoRA
run's out_dir; for Wan it can also be a file as diffusers, ComfyUI or musubi-tuner write it. --out, a
new folder, becomes a model like any other, in the base model's type. Its tokenizer and chat template
are the adapter's, or else the base model's.

Adapters of a run with lora.base=nf4 were trained beside rounded weights. With --base nf4 they are
added to these, as in training; without it, to those of --model, which is usually as good.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from minitrain.errors import InputError
from minitrain.run.launch import cli

if TYPE_CHECKING:
    from minitrain.data.tokenizer import Tokenizer
    from minitrain.models.decoder_config import DecoderConfig
    from minitrain.models.wan_config import WanConfig

OPTIONS = dict.fromkeys(
    ("--model", "--adapter", "--out"), (cli.home_path, ..., "a folder: see above")
) | {"--base": (["bf16", "fp8", "nf4"], "bf16", "the run's lora.base: see above")}


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="python -m minitrain.merge", description=__doc__)
    options = parser.parse_args(arguments)
    for name in ("model", "adapter"):
        if Path(options.out).resolve() == Path(getattr(options, name)).resolve():
            raise InputError(
                f"--out {options.out} is --{name}, which would be overwritten (use another folder)"
            )
    from minitrain.models.wan_config import WanConfig

    with cli.new_folder(options.out) as folder:
        shape = merge(options.model, options.adapter, folder, options.base)
    print(f"{options.out} holds the model with the adapters merged into it")
    videos = "--task diffusion " if isinstance(shape, WanConfig) else ""
    if not shape.num_labels:
        print(f"next: minitrain generate {videos}--model {quote(options.out)} (see its --help)")


def merge(
    base: str, adapter: str, out: Path, stored: str = "bf16"
) -> "DecoderConfig | WanConfig":
    """Add the adapter's weights to the base model's, and write the result with its tokenizer.

    stored: the lora.base of its training, see `load_merged`. Returns the model's config.
    """
    from minitrain.data.tokenizer import check_same_ids, load_tokenizer, tokenizer_folder
    from minitrain.data.tokenizer_files import CHAT_TEMPLATE
    from minitrain.formats.config_hf import end_also_at
    from minitrain.formats.hf import save_pretrained
    from minitrain.formats.peft import load_merged
    from minitrain.models.decoder import Decoder

    source = tokenizer_folder(base, adapter)
    tokenizer = load_tokenizer(source) if Path(source, "tokenizer.json").exists() else None
    if tokenizer:
        check_same_ids(source, base, "--adapter ")
    template = Path(source, CHAT_TEMPLATE)
    end = None
    if tokenizer and (tokenizer.chat_template or template.exists()):
        end = chat_end(tokenizer)
    model = load_merged(base, adapter, base=stored)
    # video models have no end token
    if isinstance(model, Decoder):
        if model.config.eos_token_id is None and tokenizer:
            model.config = replace(model.config, eos_token_id=tokenizer.eos_id)
        if end is not None:
            model.config = end_also_at(model.config, end)
    save_pretrained(model, out)
    if tokenizer:
        tokenizer.save(out)
    if template.exists():
        # ByteTokenizer.save does not copy it
        shutil.copyfile(template, Path(out, CHAT_TEMPLATE))
    return model.config


def chat_end(tokenizer: "Tokenizer") -> int | None:
    """Return the token that ends a reply in a tokenizer's chat template, if that can be told."""
    from minitrain.data.chat.chat_templates import choose_template
    from minitrain.data.chat.chats import end_of_reply

    try:
        return end_of_reply(choose_template("auto", tokenizer), tokenizer)
    # what merges weights need not understand it
    except (InputError, ImportError):
        return None
