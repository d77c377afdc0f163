"""How tokens are chosen: the exact distribution, transformers' filters, and noise that depends on the request alone."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from minitrain.errors import InputError
from minitrain.hashing import ROUNDS, mix_, mix_int
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.rollout import compiled as compiled_blocks
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import (
    MIN_TEMPERATURE,
    NOISE_CHUNK,
    SamplingParams,
    SamplingState,
    argmax,
    compiled_sample_tokens,
    exponential_noise,
    filter_logits,
    sample_key,
    sample_tokens,
    token_keys,
)
from minitrain.settings import Rollout
from minitrain.training.loss import VocabShard

LOGITS = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -3.0, 1.5, 0.2])


def choice(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """For all rows alike, or of a list of temperatures one for each."""
    keys = torch.tensor([sample_key(seed, row, 0) for row in range(rows)], dtype=torch.int32)
    warmth, top_p, min_p = (
        torch.tensor(x, dtype=torch.float).repeat(rows)[:rows]
        for x in (temperature, top_p, min_p)
    )
    filtered = top_k > 0 or bool((top_p < 1).any() or (min_p > 0).any())
    greedy, noisy = bool((warmth == 0).any()), bool((warmth > 0).any())
    return SamplingState(
        keys, torch.full((rows,), top_k), warmth, top_p, min_p, greedy, noisy, filtered
    )


def chi_square(drawn, expected):
    """Over the tokens that can be drawn; none of the others may be."""
    counts = drawn.bincount(minlength=len(expected)).double()
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    return ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"top_k": 3}, [1, 2, 6]),
        ({"top_p": 0.7}, [1, 2, 6]),
        ({"min_p": 0.2}, [1, 2, 4, 6]),
    ],
    ids=str,
)
def test_chi_square_against_the_exact_distribution(params, kept):
    """40,000 rows and positions; the statistic exceeds the bound with a probability of 1 in 1000 or less."""
    rows, drawn, logprobs = 8000, [], []
    settings = choice(rows, **params)
    for position in range(5):
        tokens, logprob = sample_tokens(
            LOGITS.expand(rows, -1), settings, torch.full((rows,), position), VocabShard()
        )
        drawn.append(tokens)
        logprobs.append(logprob)
    scaled = LOGITS.double() / params.get("temperature", 1.0)
    allowed = torch.full_like(scaled, -torch.inf).index_fill(0, torch.tensor(kept), 0)
    exact = (scaled + allowed).log_softmax(0)
    drawn = torch.cat(drawn)
    # the 0.1 % point for 7 degrees of freedom
    assert chi_square(drawn, exact.exp() * len(drawn)) < 24.3
    torch.testing.assert_close(torch.cat(logprobs).double(), exact[drawn], atol=1e-6, rtol=0)


def test_noise_is_exponential_and_unrelated_between_neighbours():
    """Of keys, positions and ids that differ by one: the usual weakness of hashed noise."""
    keys = torch.tensor([sample_key(0, 0, i) for i in range(64)], dtype=torch.int32)
    noise = torch.stack(
        [exponential_noise(token_keys(keys, torch.full((64,), t)), 0, 256) for t in range(64)]
    ).double()
    assert noise.min() > 0 and noise.mean().item() == pytest.approx(1, abs=0.005)
    sorted_, n = noise.flatten().sort().values, noise.numel()
    gap = (-torch.expm1(-sorted_) - torch.arange(n) / n).abs().max().item()
    assert gap * n**0.5 < 1.95  # Kolmogorov-Smirnov, 0.1 %
    for dim in range(3):
        pair = torch.stack(
            [
                noise.narrow(dim, 0, noise.shape[dim] - 1).flatten(),
                noise.narrow(dim, 1, noise.shape[dim] - 1).flatten(),
            ]
        )
        assert abs(torch.corrcoef(pair)[0, 1].item()) * n**0.5 < 4


def test_noise_is_never_nothing():
    """Where all bits of a number are 0: of a token's key that is the hash of an id."""
    ids = torch.arange(8, dtype=torch.int32)
    assert exponential_noise(mix_(ids.clone()), 0, 8).diagonal().tolist() == pytest.approx(
        [2.0**-32] * 8, rel=1e-6
    )


def unmix(x):
    """Of which number `mix_int` makes x."""
    x ^= x >> 16
    for shift, factor in reversed(ROUNDS):
        x = x * pow(factor, -1, 1 << 32) % (1 << 32)
        x ^= x >> shift ^ x >> 2 * shift
    return x


def seed_of_bits(bits, token, position):
    """A seed for which the noise of the first row's `token` at `position` is made of these 31 bits."""
    x = unmix(unmix(bits) ^ mix_int(token)) ^ mix_int(position)  # the sample's key
    for _ in range(4):
        x = unmix((x - 0x9E3779B9) % (1 << 32))
    return x


def test_the_longest_waiting_times_are_finite():
    """Of the 64 largest of 2^31 hashes, which fp32 rounds to 2^31; those of all others are as they are without this."""
    bits = torch.tensor([0x7FFFFFFF - 64 * i - j for i in range(8) for j in (0, 63)])
    keys = torch.tensor([unmix(number) for number in bits.tolist()]).to(torch.int32) ^ mix_(
        torch.tensor([3]).int()
    )
    noise = exponential_noise(keys, 3, 1)[:, 0]
    expected = -torch.log1p(-(bits.float() + 0.5) * 2**-31)
    assert expected[:2].isinf().all() and noise[:2].tolist() == [expected[2]] * 2
    assert torch.equal(noise[2:], expected[2:])


LONE = [{"top_k": 1}, {"top_p": 0.1}, {"min_p": 1.0}, {"temperature": 0.01}]


def lone_token():
    """Logits, and for the longest waiting time of the likeliest token, next to which others have no chance, a seed."""
    return torch.full((1, 300), -1.0).index_fill(1, torch.tensor(170), 3.0), seed_of_bits(
        0x7FFFFFFF, 170, 5
    )


@pytest.mark.parametrize("params", LONE, ids=str)
def test_a_token_that_waits_longest_is_drawn_if_it_is_the_only_one(params):
    logits, seed = lone_token()
    tokens, logprobs = sample_tokens(
        logits, choice(1, seed=seed, **params), torch.tensor([5]), VocabShard()
    )
    assert tokens.tolist() == [170] and logprobs.tolist() == [0]


def test_a_sampler_draws_the_only_token_whatever_the_seed():
    """The first of these seeds used to be told that the logits are not finite."""
    torch.manual_seed(0)
    sampler = Sampler(Decoder(model_config("qwen3-32b-tiny")))
    token = sampler.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))[0].tokens[
        0
    ]
    for seed in (seed_of_bits(0x7FFFFFFF, token, 3), seed_of_bits(0x7FFFFFC0, token, 3), 0):
        assert sampler.generate([[1, 2, 3]], SamplingParams(top_k=1, max_tokens=1, seed=seed))[
            0
        ].tokens == [token]


def test_samples_whose_keys_are_neighbours_share_no_noise():
    """At no two of their positions."""
    keys, positions = torch.tensor([4, 5], dtype=torch.int32), torch.arange(4000)
    assert (
        len({key for each in keys for key in token_keys(each.expand(4000), positions).tolist()})
        == 8000
    )


def test_a_seed_has_64_bits():
    keys = {sample_key(seed, 0, 0) for seed in (0, 1, 1 << 31, 1 << 32, 1 << 63)}
    assert len(keys) == 5 and all(-(1 << 31) <= key < 1 << 31 for key in keys)


def test_a_row_draws_the_same_among_others():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0))
    settings, positions = choice(6), torch.tensor([3, 5, 3, 9, 1, 0])
    together, _ = sample_tokens(logits, settings, positions, VocabShard())
    order = torch.tensor([4, 2])
    fields = {
        name: getattr(settings, name)[order]
        for name in ("keys", "temperature", "top_k", "top_p", "min_p")
    }
    apart, _ = sample_tokens(
        logits[order], SamplingState(**fields), positions[order], VocabShard()
    )
    assert apart.tolist() == together[order].tolist()
    others, _ = sample_tokens(logits, choice(6, seed=1), positions, VocabShard())
    assert others.tolist() != together.tolist()


def test_the_compiled_choice_is_the_same(monkeypatch):
    """In one piece, where without the compiler the CPU takes several; also as a sampler asks for it. Without a word."""
    calls, compile = [], partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(
        torch, "compile", lambda function: calls.append(function) or compile(function)
    )
    compiled_sample_tokens.cache_clear()
    logits, positions = (
        torch.randn(6, 40_000, generator=torch.Generator().manual_seed(0)),
        torch.arange(6),
    )
    assert logits.numel() > NOISE_CHUNK
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo")
        for settings in (choice(6), choice(6, temperature=0.7), choice(6, temperature=0)):
            tokens, logprobs = sample_tokens(logits, settings, positions, VocabShard())
            found, theirs = compiled_sample_tokens()(logits, settings, positions, VocabShard())
            assert found.tolist() == tokens.tolist()
            torch.testing.assert_close(theirs, logprobs, atol=1e-5, rtol=0)
    model = Decoder(model_config("qwen3-32b-tiny"))
    eager, compiled = (Sampler(model, settings=Rollout(compile=on)) for on in (False, True))
    compiled_sample_tokens.cache_clear()
    monkeypatch.setattr(compiled_blocks, "compiled_forward", lambda kind: kind.forward)
    runs = [
        sampler.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4))
        for sampler in (eager, compiled)
    ]
    assert [each.tokens for each in runs[0]] == [each.tokens for each in runs[1]]
    assert calls == [sample_tokens, sample_tokens]
    compiled_sample_tokens.cache_clear()


def test_bf16_logits_are_computed_with_in_fp32():
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    for params in ({}, {"temperature": [0.0, 0.7]}, {"top_p": 0.9}):
        state = choice(6, **params)
        found, exact = (
            sample_tokens(x, state, torch.arange(6), VocabShard())
            for x in (logits, logits.float())
        )
        assert torch.equal(found[0], exact[0]) and torch.equal(found[1], exact[1])


def test_the_coldest_draw_is_the_likeliest():
    """With logits far from zero, whose quotients are near the end of fp32."""
    assert SamplingParams(temperature=MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
    logits, positions = (
        torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 1e4,
        torch.arange(6),
    )
    for params in ({}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
        state = choice(6, temperature=MIN_TEMPERATURE, **params)
        tokens, logprobs = sample_tokens(logits, state, positions, VocabShard())
        assert tokens.tolist() == logits.argmax(1).tolist() and logprobs.tolist() == [0.0] * 6


def test_the_first_of_the_largest_wins():
    """In one stage and in two, with ties within a block of 64 and between blocks."""
    for width in (50, 640):
        x = torch.randint(4, (300, width), generator=torch.Generator().manual_seed(0)).float()
        x[0] = -torch.inf
        x[1, 7] = torch.inf
        first = [row.index(max(row)) for row in x.tolist()]
        assert argmax(x, in_blocks=True)[:, 0].tolist() == first


def test_greedy_and_drawing_rows_share_a_batch():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).expand(2000, -1)
    positions = torch.zeros(2000, dtype=torch.long)
    tokens, logprobs = sample_tokens(logits, choice(2000, [0, 1] * 1000), positions, VocabShard())
    assert (tokens[::2] == logits[0].argmax()).all() and len(tokens[1::2].unique()) > 20
    torch.testing.assert_close(logprobs, logits[0].log_softmax(0)[tokens])


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}],
)
def test_filters_keep_what_those_of_transformers_keep(params):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 7] = 90  # so likely that fp32 rounds its probability to 1
    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    theirs = LogitsProcessorList([warpers[name](value) for name, value in params.items()])(
        None, logits
    )
    ours = filter_logits(logits, choice(50, **params))
    assert torch.equal(ours, theirs) and 0 < theirs.isinf().sum() < logits.numel()


def chosen_over_ranks(logits, params, positions):
    """On this rank's part of the vocabulary; and the largest shape that was exchanged."""
    mesh = init_device_mesh("cpu", (2,))
    size = logits.shape[1] // 2
    gathered = []

    class Recording(VocabShard):
        def gather(self, x):
            gathered.append(x.shape[1])
            return super().gather(x)

    part = Recording(mesh.get_local_rank() * size, mesh.get_group())
    mine = logits[:, part.first : part.first + size]
    return (*sample_tokens(mine, choice(len(logits), **params), positions, part), gathered)


def test_top_p_keeps_the_same_tokens_in_whatever_order_probabilities_are_summed(monkeypatch):
    """As CUDA does on each rank, in an order of its own; fp32 sums then fall on both sides of these limits."""
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    limits = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)[:, 100]
    settings, plain = choice(64, top_p=limits.tolist()), torch.Tensor.cumsum
    kept = filter_logits(logits, settings)

    def in_blocks(x, dim, dtype=None):
        blocks = plain(x.unflatten(dim, (-1, 50)), dim, dtype=dtype)
        return (blocks + plain(blocks[..., -1:], -2) - blocks[..., -1:]).flatten(-2)

    monkeypatch.setattr(torch.Tensor, "cumsum", in_blocks)
    assert torch.equal(filter_logits(logits, settings), kept)


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0}, {"temperature": [0, 0.7] * 20}, {"top_k": 7, "top_p": 0.9}],
    ids=["noisy", "greedy", "both", "filtered"],
)
def test_a_split_vocabulary_gives_the_same_tokens(pool, params):
    generator = torch.Generator().manual_seed(0)
    logits, positions = torch.randn(40, 300, generator=generator) * 2, torch.arange(40)
    tokens, logprobs = sample_tokens(logits, choice(40, **params), positions, VocabShard())
    for found in pool.run(2, chosen_over_ranks, logits, params, positions):
        assert torch.equal(found[0], tokens)
        torch.testing.assert_close(found[1], logprobs)
        # without filters never the logits
        assert found[2] == ([150] if "top_k" in params else [5])


@pytest.mark.parametrize("params", LONE, ids=str)
def test_a_split_vocabulary_draws_the_only_token(pool, params):
    logits, seed = lone_token()
    for found in pool.run(
        2, chosen_over_ranks, logits, params | {"seed": seed}, torch.tensor([5])
    ):
        assert found[0].tolist() == [170] and found[1].tolist() == [0]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"temperature": -1}, "temperature=-1 must be 0, or at least 1e-06"),
        ({"temperature": float("inf")}, "temperature=inf must be 0, or at least 1e-06"),
        ({"temperature": 1e-50}, "temperature=1e-50 must be 0, or at least 1e-06"),
        (
            {"top_k": 10**20},
            "top_k=100000000000000000000 must be at least 0, and below 2147483648",
        ),
        ({"stop": "end"}, "stop='end' must be a list of texts, none of them empty"),
        ({"stop": ("end", "")}, "stop=.'end', ''. must be a list of texts, none of them empty"),
        ({"top_p": 0}, "top_p=0 must be above 0 and at most 1"),
        ({"min_p": 2}, "min_p=2 must be between 0 and 1"),
        ({"n": 0}, "n=0 must be at least 1"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": "0.8"}, "temperature='0.8' must be a number"),
        ({"temperature": None}, "temperature=None must be a number"),
        ({"temperature": True}, "temperature=True must be a number"),
        ({"temperature": float("nan")}, "temperature=nan must be 0, or at least"),
        ({"top_p": [0.9]}, "top_p=.0.9. must be a number"),
        ({"top_k": 2.5}, "top_k=2.5 must be an integer"),
        ({"max_tokens": "20"}, "max_tokens='20' must be an integer"),
        ({"n": 2.0}, "n=2.0 must be an integer"),
        ({"seed": None}, "seed=None must be an integer"),
        ({"stop_tokens": 5}, "stop_tokens=5 must be a list of token ids"),
        ({"stop_tokens": ("end",)}, "stop_tokens=.'end',. must be a list of token ids"),
        ({"stop": (5,)}, "stop=.5,. must be a list of texts"),
        ({"stop": None}, "stop=None must be a list of texts"),
        ({"ignore_eos": 1}, "ignore_eos=1 must be true or false"),
    ],
)
def test_refusals(fields, line):
    with pytest.raises(InputError, match=line):
        SamplingParams(**fields)


def test_numbers_of_numpy_and_lists_are_settings_too():
    params = SamplingParams(
        np.float32(0.5), np.int64(3), 1, stop_tokens=[np.int64(5)], stop=["a"]
    )
    assert params.temperature == 0.5 and 5 in params.stop_tokens
