"""Make tiny models to sample from, and compute what they must generate, without caches, pages or graphs."""

import torch

from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.rollout import compiled
from minitrain.rollout.batch import DecodingBatch
from minitrain.rollout.drafting import DraftingBatch
from minitrain.rollout.pages import Pages

PROMPT_LENGTHS = (1, 6, 21, 21)
NEW = 10


def make(name: str, seed: int = 0, **fields) -> Decoder:
    """Return a tiny twin with random parameters, and without an end-of-text token.

    No parameter has a value that would hide it, logits differ, and samples have the lengths that tests ask for.
    """
    torch.manual_seed(seed)
    model = Decoder(
        model_config(f"{name}-tiny", **{"eos_token_id": None} | fields)
    ).requires_grad_(False)
    for key, parameter in model.named_parameters():
        around_0 = model.config.norm.endswith("1p") and "linear_attn" not in key
        scale = key.endswith(("norm.weight", "norm1.weight")) and not around_0
        parameter.normal_(float(scale), 0.3 if scale else 0.08)
    return model


def prompts_of(lengths=PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(512, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def uncached(model: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def trainer_logprobs(
    model: Decoder, prompt: list[int], tokens: list[int], temperature: float = 1.0
) -> torch.Tensor:
    logits = model(torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def check_books(pages: Pages, owned: list[list[int]]):
    """Check that every page is free, evictable or owned, and that its ref count is its number of owners."""
    counts = [0] * pages.count
    for each in owned:
        for page in each:
            counts[page] += 1
    assert pages.ref_count == counts
    states = sorted(
        [
            *pages.free_list,
            *pages.evictable,
            *(page for page in range(pages.count) if counts[page]),
        ]
    )
    assert states == list(range(pages.count))
    assert sorted(pages.page_of.values()) == sorted(pages.prefix_of) and set(
        pages.evictable
    ) <= set(pages.prefix_of)


class Counter:
    """A backend of torch.compile that counts graphs and runs them uncompiled."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


def compiling_batch(*args, **named) -> DecodingBatch:
    batch = DecodingBatch(*args, **named)
    batch.compiles = True
    return batch


def compiling_drafts(*args, **named) -> DraftingBatch:
    batch = DraftingBatch(*args, **named)
    batch.compiles = True
    return batch


def as_on_cuda(layer):
    return compiled.OpaqueCache(layer)


def kinds_of_layers(config) -> int:
    return len({config.kind(layer) for layer in range(config.num_layers)})
