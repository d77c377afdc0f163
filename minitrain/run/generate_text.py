"""Continue texts and answer chats in the terminal: what python -m minitrain.generate does."""

import sys
from argparse import Namespace
from pathlib import Path

from minitrain.data.chat import encode_question, end_of_reply
from minitrain.data.chat_templates import Message, choose_template
from minitrain.data.tokenizer import (
    check_same_ids,
    load_tokenizer,
    tokenizer_folder,
)
from minitrain.errors import InputError, hub_hint, refused
from minitrain.formats.hf import read_config
from minitrain.formats.peft import load_merged
from minitrain.models.wan_config import WanConfig
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.run import cli
from minitrain.run.launch import pick_device


def run(options: Namespace) -> None:
    """Stream what the model makes of --prompt to the terminal."""
    cli.use_huge_pages()
    check_folders(options)
    config = read_config(options.model)
    if isinstance(config, WanConfig):
        raise InputError(
            f"--model {options.model} is a diffusion model, which needs --task diffusion"
        )
    source = options.tokenizer or tokenizer_folder(options.model, options.adapter)
    check_same_ids(source, options.model, "--tokenizer ")
    tokenizer = load_tokenizer(source)
    template = choose_template("auto", tokenizer) if options.chat else None
    replied = template and end_of_reply(template, tokenizer)
    with refused("--prompt is not UTF-8"):
        options.prompt.encode()
    if template is None:
        prompt = tokenizer.encode_prompt(options.prompt)
    else:
        chat = [Message("user", options.prompt)]
        prompt = encode_question(chat, template, tokenizer, "--prompt")
    if not prompt:
        raise InputError("--prompt is empty: give at least one character")
    params = SamplingParams(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.max_tokens,
        options.n,
        () if replied is None else (replied,),
        tuple(options.stop),
        options.seed,
    )
    model = load_merged(options.model, options.adapter, device=pick_device(options.device))
    sampler = Sampler(model, tokenizer, samples=options.n, longest=len(prompt) + options.max_tokens)
    for number, sample in enumerate(sampler.submit(prompt, params), 1):
        if options.n > 1:
            print(f"--- sample {number} of {options.n}")
        sys.stdout.write("" if options.chat else options.prompt)
        for piece in sampler.follow(sample):
            print(piece, end="", flush=True)
        print()


def check_folders(options: Namespace) -> None:
    """Raise InputError where --model or --adapter names no folder."""
    for name in ("model", "adapter"):
        if (folder := getattr(options, name)) and not Path(folder).is_dir():
            hint = (
                hub_hint(folder, f"--{name} ")
                or " (give one in Hugging Face layout, such as a run's out_dir)"
            )
            raise InputError(f"--{name} {folder} is no folder{hint}")
