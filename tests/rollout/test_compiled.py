"""Compiled decoding steps: the same tokens from few graphs, and nothing of the trainer's is compiled again."""

import gc
import weakref
from functools import partial
from itertools import product

import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.models.lora import add_adapters
from minitrain.models.router import Router
from minitrain.parallel.recompute import recompute
from minitrain.rollout import compiled, engine, weights
from minitrain.rollout import cpu as cpu_attention
from minitrain.rollout.batch import DecodingBatch
from minitrain.settings import Lora, Rollout
from tests.helpers.sampling import (
    Counter,
    as_on_cuda,
    compiling_batch,
    compiling_drafts,
    kinds_of_layers,
    make,
    prompts_of,
    trainer_logprobs,
    uncached,
)

SETTINGS = Rollout(slots=4, page_size=4, pages=100)
NEW = 5


@pytest.fixture(params=["CUDA", "CPU"])
def sampler_graphs(request, monkeypatch):
    """Blocks compile as they do there; on CUDA apart from their caches, with products joined in place of packed."""
    counter = Counter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    monkeypatch.setattr(engine, "DecodingBatch", compiling_batch)
    monkeypatch.setattr(engine, "DraftingBatch", compiling_drafts)
    if request.param == "CUDA":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        monkeypatch.setattr(weights, "can_join", lambda device: True)
        monkeypatch.setattr(compiled, "cache_for_compiler", as_on_cuda)
        monkeypatch.setattr(engine.Sampler, "compiles_prefill", True)
    else:
        monkeypatch.setattr(cpu_attention, "MIN_PACKED_ELEMENTS", 0)
    compiled.compiled_forward.cache_clear()
    # else what is beyond it runs as it is
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield counter
    compiled.compiled_forward.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("qwen3-32b", (4, 2, 1)), ("deepseek-v3", (2, 1)), ("nemotron3-nano-30b-a3b", (4, 2, 1))],
)
def test_few_graphs_give_the_same_tokens(name, sizes, sampler_graphs):
    """At several numbers of rows, and when weights change in place. No graph keeps the pools that it was made with."""
    model, prompts = make(name), prompts_of((9, 1))
    sampler, counts = Sampler(model, settings=SETTINGS), []
    for factor in (1.0, 1.1):
        for parameter in model.parameters():
            parameter.mul_(factor)
        sampler.refresh()
        expected = [uncached(model, prompt, NEW) for prompt in prompts]
        for rows in sizes:
            params = SamplingParams(temperature=0, max_tokens=NEW, n=max(1, rows // 2))
            found = sampler.generate(prompts[:rows], params)
            assert [each.tokens for each in found] == [
                tokens for tokens in expected[:rows] for _ in range(params.n)
            ]
        longer = prompts[0] + expected[0]  # whose pages the steps have filled
        (found,) = sampler.generate([longer], SamplingParams(temperature=0, max_tokens=1))
        assert found.tokens == uncached(model, longer, 1)
        counts.append(sampler_graphs.graphs)
    # in a layer one, or up to four around caches; for the first number of rows, for any number, and for one
    on_cuda, kinds = compiled.cache_for_compiler is as_on_cuda, kinds_of_layers(model.config)
    most = (4 if on_cuda or model.config.mamba else 1) * len(sizes) * kinds
    if on_cuda:  # prefills have as many, and one of the last layer, which leaves its MLP out
        most += 3 * (4 * kinds + 1)
    assert 0 < counts[0] == counts[1] <= most
    pools = [
        weakref.ref(pool)
        for layer in sampler.caches.layers
        for pool in getattr(layer, "pools", [])
    ]
    sampler.free()
    gc.collect()
    assert pools and not any(pool() is not None for pool in pools)


def test_drafts_are_verified_in_few_graphs(sampler_graphs):
    """Of two models: of the draft model, over several tokens of a row and over one."""
    model, prompts = make("qwen3-32b"), prompts_of((9, 1))
    draft = make("qwen3-32b", seed=1, num_layers=1)
    expected = [uncached(model, prompt, NEW) for prompt in prompts]
    sampler, counts = Sampler(model, settings=SETTINGS, draft=draft), []
    params = SamplingParams(temperature=0, max_tokens=NEW)
    for _ in range(2):
        for rows in (2, 1):
            found = sampler.generate(prompts[:rows], params)
            assert [each.tokens for each in found] == expected[:rows]
        counts.append(sampler_graphs.graphs)
    on_cuda = compiled.cache_for_compiler is as_on_cuda
    # three kinds of passes, each for the first number of rows and for one; and prefills
    assert 0 < counts[0] == counts[1] <= (4 * (3 * 2 + 2) if on_cuda else 3 * 2)


def test_a_first_prompt_of_one_token(sampler_graphs):
    """No step of prompts has made the pools."""
    model, (prompt,) = make("qwen3-32b"), prompts_of((1,))
    (found,) = Sampler(model, settings=SETTINGS).generate(
        [prompt], SamplingParams(temperature=0, max_tokens=NEW)
    )
    assert found.tokens == uncached(model, prompt, NEW)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "nemotron3-nano-30b-a3b"])
def test_experts_are_recorded_as_the_routers_choose_them(name, sampler_graphs):
    model, (prompt,) = make(name), prompts_of((9,))
    sampler = Sampler(model, settings=SETTINGS)
    sampler.records = True
    (found,) = sampler.generate([prompt], SamplingParams(temperature=0, max_tokens=NEW))
    chosen = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, inputs, output: chosen.append(output[0]))
    model(torch.tensor([(prompt + found.tokens)[:-1]]))
    assert torch.equal(torch.from_numpy(found.routes).long(), torch.cat(chosen, -1))
    assert sampler_graphs.graphs > 0


@pytest.mark.parametrize("name", ["qwen3-32b", "gpt-oss-20b"])
def test_a_prompt_that_is_read_once(name, sampler_graphs, monkeypatch):
    """With and without windows and sinks; by one sample at first, and by four with the graphs of the one."""
    monkeypatch.setattr(cpu_attention, "MIN_SHARED_TOKENS", 1)
    model, (prompt,) = make(name), prompts_of((21,))
    sampler, expected = Sampler(model, settings=SETTINGS), uncached(model, prompt, NEW)
    for n in (1, 4):
        found = sampler.generate([prompt], SamplingParams(temperature=0, max_tokens=NEW, n=n))
        assert [each.tokens for each in found] == [expected] * n
        assert sampler.caches.step.rows.shared == (0 if n == 1 else 20)
        theirs = trainer_logprobs(model, prompt, expected)
        for each in found:
            torch.testing.assert_close(torch.tensor(each.logprobs), theirs, atol=1e-5, rtol=0)


def test_the_trainers_blocks_stay_as_they_are(sampler_graphs):
    """Compiled, recomputed and with adapters."""
    model, (prompt,) = make("mixtral-8x7b"), prompts_of((9,))
    add_adapters(model, Lora(rank=4, dropout=0.5, targets=["q_proj", "experts.down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.2)
    expected = uncached(model, prompt, NEW)
    recompute(model.blocks, "full", random=True)
    trainer_graphs, counts = Counter(), []
    for block in model.blocks:
        block.compile(backend=trainer_graphs, fullgraph=True, dynamic=False)
    for _ in range(2):
        model(torch.tensor([prompt])).square().mean().backward()
        counts.append(trainer_graphs.graphs)
        (found,) = Sampler(model, settings=SETTINGS).generate(
            [prompt], SamplingParams(temperature=0, max_tokens=NEW)
        )
        assert found.tokens == expected
        counts.append(sampler_graphs.graphs)
    most = 4 + 5 if compiled.cache_for_compiler is as_on_cuda else 4  # of the prefill, too
    assert counts[0] == counts[2] > 0 and 0 < counts[1] == counts[3] <= most


def test_which_steps_compile():
    """On a GPU, whose place "meta" takes, those that are captured as graphs."""
    model = make("qwen3-32b")
    sampler = Sampler(model, settings=Rollout(page_size=4, pages=9))
    sampler.generate([[1]], SamplingParams(max_tokens=1))
    compiling = []
    for device, compile, graphs in product(("cpu", "meta"), (False, True), (False, True)):
        arguments = model.to(device), sampler.weights, sampler.caches
        pool = (0, 1) if graphs else None
        batch = DecodingBatch(*arguments, 2, 9, 1, compiles_blocks=compile, graph_pool=pool)
        if batch.compiles:
            compiling.append((device, compile, graphs))
    assert compiling == [("cpu", True, False), ("cpu", True, True), ("meta", True, True)]
