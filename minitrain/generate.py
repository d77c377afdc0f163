"""Continue a prompt: python -m minitrain.generate --model DIR --prompt TEXT, streamed to the terminal.

DIR is any model folder in Hugging Face layout with a tokenizer.json, such as a training run's out_dir. Each token
recomputes the whole prefix: simple and slow, for looking at a model. With --task diffusion, DIR is a Wan model, and
videos come out: see --task diffusion --help.
"""

import argparse
import operator
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from minitrain import cli
from minitrain.errors import InputError
from minitrain.models.checkpoint_hf import load_pretrained
from minitrain.models.checkpoint_peft import load_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.lora import merge_adapters
from minitrain.parallel.mesh import pick_device
from minitrain.tokenizer import load_tokenizer


def main(arguments: list[str]) -> None:
    chooser = cli.Parser(add_help=False, allow_abbrev=False)
    chooser.add_argument("--task", choices=["text", "diffusion"], default="text")
    chosen, rest = chooser.parse_known_args(arguments)
    if chosen.task == "diffusion":
        from minitrain import generate_video  # which imports this file

        return generate_video.main(rest)
    parser = cli.Parser(prog="python -m minitrain.generate", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--adapter", metavar="DIR", help="LoRA adapters of the model, in PEFT's format")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--max-tokens", type=positive(int), default=200)
    parser.add_argument("--temperature", type=positive(float, zero=True), default=0.8, help="0: the likeliest token")
    parser.add_argument("--top-k", type=positive(int), default=None, help="choose among the K likeliest tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args(rest)

    device = pick_device(options.device)
    model, tokenizer = load_pretrained(options.model, device=device), load_tokenizer(options.model)
    if options.adapter:
        load_adapter(model, options.adapter)
        merge_adapters(model)
    prompt = tokenizer.encode(options.prompt)
    if not prompt:
        raise InputError("--prompt is empty: give at least one character")
    generator = torch.Generator(device).manual_seed(options.seed)
    tokens = sample(model, prompt, options.max_tokens, options.temperature, options.top_k, tokenizer.eos_id, generator)
    sys.stdout.write(options.prompt)
    for piece in tokenizer.stream(tokens):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@torch.no_grad()
def sample(
    model: Decoder, prompt: list[int], count: int, temperature: float, top_k: int | None, end: int | None,
    generator: torch.Generator,
) -> Iterator[int]:
    """Yield up to `count` tokens that follow `prompt`, stopping before `end`; the context is cut to the model's."""
    tokens = torch.tensor([prompt], device=generator.device)
    for _ in range(count):
        context = tokens[:, -model.config.max_position_embeddings :]
        token = choose(model(context)[0, -1].float(), temperature, top_k, generator)
        if token.item() == end:
            return
        yield token.item()
        tokens = torch.cat([tokens, token.view(1, 1)], dim=1)


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token from logits [vocab]: softmax(logits / temperature) over the top_k largest; at 0, the largest."""
    if temperature == 0:
        return logits.argmax()
    if top_k is not None:
        smallest = logits.topk(min(top_k, len(logits))).values[-1]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]


def exact_match(model: Decoder, questions: list[tuple[list[int], list[int]]]) -> float:
    """The share of (prompt, reply) pairs whose whole reply is what the model finds likeliest, token by token."""
    generator = torch.Generator(next(model.parameters()).device)
    model.eval()
    answers = (sample(model, prompt, len(reply), 0, None, None, generator) for prompt, reply in questions)
    right = sum(all(map(operator.eq, answer, reply)) for answer, (_, reply) in zip(answers, questions, strict=True))
    model.train()
    return right / len(questions)


def positive(kind: type, zero: bool = False):
    """An argparse type: a number above 0 (or at least 0)."""

    def parse(text: str):
        value = kind(text)
        if not (value > 0 or (zero and value == 0)) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be {'at least' if zero else 'above'} 0")
        return value

    return parse


if __name__ == "__main__":
    cli.run(main)
