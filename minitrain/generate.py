"""Continue a prompt: python -m minitrain.generate --model DIR --prompt TEXT, streamed to the
terminal.

DIR is any model folder in Hugging Face layout with a tokenizer.json, such as a training run's
out_dir. With --n, the samples are made together and shown one after the other. With --task
diffusion, DIR is a Wan model, and videos come out: see --task diffusion --help.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from minitrain.data.chat import encode_question, end_of_reply
from minitrain.data.chat_templates import ChatTemplate, Message, choose_template
from minitrain.data.tokenizer import (
    Tokenizer,
    check_same_ids,
    load_tokenizer,
    stream,
    tokenizer_folder,
)
from minitrain.errors import InputError, hub_hint
from minitrain.formats.hf import load_pretrained, read_config
from minitrain.formats.peft import load_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import find_ends
from minitrain.models.lora import merge_adapters
from minitrain.models.wan import WanConfig
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
from minitrain.run import cli, generate_video
from minitrain.run.cli import positive
from minitrain.run.launch import pick_device


def main(arguments: list[str]) -> None:
    chooser = cli.Parser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--task", choices=["text", "diffusion"], default="text")
    chosen, rest = chooser.parse_known_args(arguments)
    if chosen.task == "diffusion":
        return generate_video.main(rest)
    options = parse(rest)

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
    prompt = encode(text_of(options.prompt), tokenizer, template)
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
    model = load_pretrained(options.model, device=pick_device(options.device))
    if options.adapter:
        load_adapter(model, options.adapter)
        merge_adapters(model)
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


def parse(arguments: list[str]) -> Namespace:
    parser = cli.Parser(prog="python -m minitrain.generate", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", type=cli.home_path)
    parser.add_argument(
        "--adapter", metavar="DIR", type=cli.home_path, help="a LoRA run's out_dir, or PEFT's"
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="if not the adapter's or the model's own; or bytes"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument(
        "--chat", action="store_true", help="answer the prompt, in the model's chat template"
    )
    parser.add_argument("--max-tokens", type=positive(int), default=200)
    parser.add_argument(
        "--temperature", type=positive(float, zero=True), default=0.8, help="0: the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=positive(int), default=0, help="choose among the K likeliest tokens"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="... that hold this share of the probability"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="... at least this share as likely as the likeliest",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end after it (may be repeated)"
    )
    parser.add_argument("--n", type=positive(int, most=1 << 16), default=1, help="how many samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args(arguments)


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
    """What was typed; raises InputError for bytes that Python could not read as text."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"--prompt is not UTF-8 at character {error.start + 1}") from error
    return prompt


def encode(prompt: str, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """The tokens that the text of a model begins with: those of the prompt, or what asks for a
    reply to it.
    """
    if template is None:
        return tokenizer.encode_prompt(prompt)
    return encode_question([Message("user", prompt)], template, tokenizer, "--prompt")


def follow(sampler: Sampler, sample: Sample, ends: tuple[int, ...]) -> Iterator[int]:
    """The tokens of `sample` but the one that ends it, each as soon as it is there."""
    seen = 0
    while seen < len(sample.produced) or sample.finish_reason is None:
        if seen == len(sample.produced):
            sampler.step()
            continue
        if sample.produced[seen] not in ends:
            yield sample.produced[seen]
        seen += 1


def exact_match(model: Decoder, questions: list[tuple[list[int], list[int]]]) -> float:
    """The share of (prompt, reply) pairs whose whole reply is what the model finds likeliest, token
    by token.

    Pairs that are longer than the model has positions, as a chat that fills a row can be, are left
    out; NaN if all are.
    """
    questions = [
        pair
        for pair in questions
        if len(pair[0]) + len(pair[1]) <= model.config.max_position_embeddings
    ]
    if not questions:
        return math.nan
    params = [
        SamplingParams(temperature=0, max_tokens=len(reply), ignore_eos=True)
        for _, reply in questions
    ]
    longest = max(len(prompt) + len(reply) for prompt, reply in questions)
    sampler = Sampler(model, samples=len(questions), longest=longest)
    answers = sampler.generate([prompt for prompt, _ in questions], params)
    right = sum(
        answer.tokens == reply for answer, (_, reply) in zip(answers, questions, strict=True)
    )
    return right / len(questions)


if __name__ == "__main__":
    cli.run(main)
