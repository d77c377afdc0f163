"""What the sampler does with the trainer's model, and how it leaves it: weights that it packs, joins or shares."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from minitrain import Sampler, SamplingParams, load_pretrained, save_pretrained
from minitrain.models import cpu
from minitrain.models.layers import project
from minitrain.models.lora import add_adapters
from minitrain.parallel.recompute import recompute
from minitrain.rollout import cpu as cpu_attention
from minitrain.rollout import weights
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.settings import Lora, Rollout
from minitrain.training.build import build_model
from tests.helpers.sampling import NEW, make, prompts_of, uncached

pytestmark = pytest.mark.usefixtures("pack_everything")


@pytest.fixture
def joined(monkeypatch):
    """Products as on CUDA."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(weights, "can_join", lambda device: True)


@pytest.mark.parametrize(
    "name", ["llama3.1-8b", "qwen2.5-7b", "deepseek-v3", "gpt3-175b", "gpt-oss-20b"]
)
def test_matrices_of_one_input_are_one_product(name, joined, tmp_path):
    """Read as one where they lie, whatever changes them; and to all others they are what they were."""
    model, prompts = make(name), prompts_of((9, 3))
    parameters = {key: (p, p.clone()) for key, p in model.named_parameters()}
    sampler, places = Sampler(model, settings=Rollout(slots=4, page_size=4, pages=100)), []
    for factor in (1.0, 1.1):
        for parameter in model.parameters():
            parameter.mul_(factor)
        sampler.refresh()
        greedy = SamplingParams(temperature=0.0, max_tokens=6)
        assert [c.tokens for c in sampler.generate(prompts, greedy)] == [
            uncached(model, p, 6) for p in prompts
        ]
        places.append([parameter.data_ptr() for parameter in model.parameters()])
    assert places[0] == places[1]  # which CUDA graphs rely on
    attention = model.blocks[0].self_attn
    linears = [getattr(attention, name) for name in getattr(attention, "same_input", ())]
    products = []
    with sampler.weights.in_use(), mock.patch.object(F, "linear", side_effect=F.linear) as linear:
        if name != "deepseek-v3":
            project(torch.zeros(1, 1, model.config.hidden_size), *linears)
            products = linear.call_args_list
    assert len(products) == (name != "deepseek-v3")
    assert not any("forward" in linear.__dict__ for linear in linears)
    assert all(type(linear) is nn.Linear for linear in linears)
    if name != "deepseek-v3":
        seen = []
        hook = attention.k_proj.register_forward_hook(lambda *_: seen.append("a hook of others"))
        with sampler.weights.in_use():
            project(torch.zeros(1, 1, model.config.hidden_size), *linears)
        assert len(seen) == 1
        hook.remove()
    for key, parameter in model.named_parameters():
        assert parameter is parameters[key][0]
        torch.testing.assert_close(parameter, parameters[key][1] * 1.1)
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path)
    assert all(torch.equal(p, loaded.get_parameter(key)) for key, p in model.named_parameters())
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 1.01 * sum(p.nbytes for p in model.parameters()) + 50_000


def test_linears_that_train_by_cpu_linears_are_packed_too(monkeypatch):
    monkeypatch.setattr(cpu, "FASTER", True)
    model, prompts = make("qwen3-32b"), prompts_of((9, 3))
    cpu.use_cpu_linears(model)
    sampler = Sampler(model, settings=Rollout(slots=4, page_size=4, pages=100))
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    assert [c.tokens for c in sampler.generate(prompts, greedy)] == [
        uncached(model, p, 6) for p in prompts
    ]
    packed = {
        linear for owner in sampler.weights.packed if isinstance(owner, tuple) for linear in owner
    }
    assert packed == {
        module
        for block in model.blocks
        for module in block.modules()
        if isinstance(module, nn.Linear)
    }


@torch.no_grad()
@pytest.mark.parametrize(
    "targets", [["q_proj", "up_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"]], ids=str
)
def test_linears_with_adapters_are_packed_too(targets):
    model, prompts = make("qwen3-32b"), prompts_of((9, 3))
    add_adapters(model, Lora(targets=targets))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(
                torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                / 10
            )
    expected = [uncached(model, prompt, 6) for prompt in prompts]
    sampler = Sampler(model, settings=Rollout(slots=4, page_size=4, pages=100))
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    with mock.patch.object(weights, "multiply", wraps=weights.multiply) as products:
        assert [c.tokens for c in sampler.generate(prompts, greedy)] == expected
    assert products.call_count > 4 * len(model.blocks)
    packed = {
        linear for owner in sampler.weights.packed if isinstance(owner, tuple) for linear in owner
    }
    assert packed == {
        module
        for block in model.blocks
        for module in block.modules()
        if isinstance(module, nn.Linear)
    }
    # adapters are still there
    assert [uncached(model, prompt, 6) for prompt in prompts] == expected


def test_other_types_than_fp32_are_not_packed():
    sampler = Sampler(make("qwen3-32b").bfloat16())
    sampler.generate(prompts_of((9,)), SamplingParams(max_tokens=2))
    assert set(sampler.weights.packed.values()) == {None}


def test_linears_that_are_not_packed_multiply_as_in_training(monkeypatch):
    monkeypatch.setattr(cpu, "FASTER", True)
    monkeypatch.setattr(cpu, "MIN_FLOPS", 1)
    monkeypatch.setattr(cpu_attention, "MIN_PACKED_ELEMENTS", 1 << 40)
    model, prompts = make("qwen3-32b"), prompts_of((9, 3))
    expected = [uncached(model, prompt, 2) for prompt in prompts]
    cpu.use_cpu_linears(model)
    sampler, greedy = Sampler(model), SamplingParams(temperature=0.0, max_tokens=2)
    operator = torch.ops.minitrain.cpu_linear
    with mock.patch.object(torch.ops.minitrain, "cpu_linear", wraps=operator) as products:
        assert [c.tokens for c in sampler.generate(prompts, greedy)] == expected
    linears = sum(
        isinstance(module, nn.Linear) for block in model.blocks for module in block.modules()
    )
    assert products.call_count > linears


def test_sampling_recomputes_nothing():
    model = make("llama3-8b")
    recompute(model.blocks, "full")
    with mock.patch("minitrain.parallel.recompute.checkpoint", wraps=checkpoint) as recomputed:
        Sampler(model).generate(prompts_of((9,)), SamplingParams(max_tokens=2))
        assert not recomputed.called
        model(torch.tensor(prompts_of((9,))))
    assert recomputed.call_count == len(model.blocks)


def test_adapters_are_sampled_with_and_dropout_is_not():
    """On every Linear: latent attention's kv_b_proj, which a cache folds into others, is one of them."""
    model = make("deepseek-v3")
    linears = (
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "experts.down_proj",
    )
    add_adapters(model, Lora(rank=4, dropout=0.5, targets=list(linears)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    prompts = prompts_of((6, 9))
    expected = [uncached(model, prompt, 6) for prompt in prompts]
    found = Sampler(model).generate(prompts, SamplingParams(temperature=0, max_tokens=6))
    assert [each.tokens for each in found] == expected


def test_the_model_is_left_as_it_was():
    model = make("qwen3-32b")
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph

    for block in model.blocks:
        block.compile(backend=backend)
    tokens = torch.tensor(prompts_of((7,)))
    before = model(tokens)
    compiled, state = len(calls), {id(m): dict(m.__dict__) for m in model.modules()}
    found = Sampler(model).generate(tokens.tolist(), SamplingParams(temperature=0, max_tokens=3))
    assert found[0].tokens[0] == before[0, -1].argmax()
    assert {id(m): dict(m.__dict__) for m in model.modules()} == state
    assert torch.equal(model(tokens), before) and len(calls) == compiled > 0


def sampled_by_ranks(tree: dict, prompts, params) -> list[list[int]]:
    config = configs.from_dict(tree | {"device": "cpu"})
    model = build_model(config, start(config))
    sampler = Sampler(model, settings=Rollout(slots=5, page_size=4, pages=20, chunk=9))
    found = sampler.generate(prompts, params)
    again = Sampler(model).generate(prompts, params)  # in a pool as large as memory allows
    assert [each.tokens for each in again] == [each.tokens for each in found]
    return (
        [each.tokens for each in found],
        [each.logprobs for each in found],
        sampler.scheduler.preemptions,
    )


def test_several_ranks_sample_as_one(pool):
    """The trainer's own model, sharded by tensor parallelism and FSDP: the same prompts, the same tokens, on each."""
    tree = {
        "model": {"name": "nemotron4-15b-tiny", "initializer_range": 0.08},
        "batch": {"global": 4, "micro": 1, "seq_len": 64},
    }
    params = SamplingParams(temperature=0.8, max_tokens=NEW, n=3)
    tokens, logprobs, _ = pool.run(1, sampled_by_ranks, tree, prompts_of(), params)[0]
    for found, theirs, preemptions in pool.run(
        4, sampled_by_ranks, tree | {"parallel": {"tp": 2, "dp_shard": 2}}, prompts_of(), params
    ):
        assert found == tokens and preemptions > 0
        torch.testing.assert_close(
            torch.tensor(theirs), torch.tensor(logprobs), atol=1e-5, rtol=0
        )
