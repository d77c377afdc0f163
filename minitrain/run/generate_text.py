"""Continue texts and answer chats in the terminal: what python -m minitrain.generate does."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from minitrain.data.chat import encode_question, end_of_reply
from minitrain.data.chat_templates import Message, choose_template
from minitrain.data.tokenizer import (
    check_same_ids,
    load_tokenizer,
    stream,
    tokenizer_folder,
)
from minitrain.errors import InputError, hub_hint
from minitrain.formats.hf import read_config
from minitrain.formats.peft import load_merged
from minitrain.models.decoder_config import find_ends
from minitrain.models.wan_config import WanConfig
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
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
    ends = find_ends(config, tokenizer.eos_id, replied)
    text = text_of(options.prompt)
    if template is None:
        prompt = tokenizer.encode_prompt(text)
    else:
        prompt = encode_question([Message("user", text)], template, tokenizer, "--prompt")
    if not prompt:
        raise InputError("--prompt is empty: give at least one character")
    params = SamplingParams(
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        options.max_tokens,
        options.n,
        ends,
        tuple(options.stop),
        options.seed,
    )
    model = load_merged(options.model, options.adapter, device=pick_device(options.device))
    sampler = Sampler(model, tokenizer, samples=options.n, longest=len(prompt) + options.max_tokens)
    for number, sample in enumerate(sampler.submit(prompt, params), 1):
        if options.n > 1:
            print(f"--- sample {number} of {options.n}")
        sys.stdout.write("" if options.chat else options.prompt)
        with sampler.weights.in_use():
            for piece in stream(tokenizer, follow(sampler, sample, ends), prompt):
                sys.stdout.write(piece)
                sys.stdout.flush()
        sys.stdout.write("\n")


def check_folders(options: Namespace) -> None:
    """Raise InputError where --model or --adapter names no folder."""
    for name in ("model", "adapter"):
        if (folder := getattr(options, name)) and not Path(folder).is_dir():
            hint = (
                hub_hint(folder, f"--{name} ")
                or " (give one in Hugging Face layout, such as a run's out_dir)"
            )
            raise InputError(f"--{name} {folder} is no folder{hint}")


def text_of(prompt: str) -> str:
    """Return what was typed. Raise InputError for bytes that Python could not read as text."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"--prompt is not UTF-8 at character {error.start + 1}") from error
    return prompt


def follow(sampler: Sampler, sample: Sample, ends: tuple[int, ...]) -> Iterator[int]:
    """Yield the tokens of `sample` but the one that ends it, each as soon as it is there."""
    seen = 0
    while seen < len(sample.produced) or sample.finish_reason is None:
        if seen == len(sample.produced):
            sampler.step()
            continue
        if sample.produced[seen] not in ends:
            yield sample.produced[seen]
        seen += 1
