"""Frozen weights in FP8 and in NF4: the numbers of bitsandbytes, and gradients through what is stored."""

import dataclasses
import hashlib
from statistics import NormalDist

import pytest
import torch
from torch import nn

from minitrain import load_pretrained, merge, save_pretrained
from minitrain.errors import InputError
from minitrain.formats.peft import adapter_shapes, save_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.frozen import (
    NF4,
    STORES,
    FrozenExperts,
    FrozenLinear,
    freeze,
    frozen_weights,
    to_nf4,
    widen,
)
from minitrain.models.lora import is_adapter, merge_adapters, merged_weight
from minitrain.models.variants import base_class
from minitrain.models.zoo import empty_model, model_config
from minitrain.run.config.load import from_dict
from minitrain.training.build import initialize
from tests.helpers.gradients import assert_same_gradients
from tests.helpers.oracle import plain_model, ragged_batch

EXPERTS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
TREE = {
    "batch": {"global": 2, "micro": 2, "seq_len": 16},
    "lora": {"rank": 8, "targets": ["q_proj", "o_proj", "down_proj"]},
}


def widened(store, weight):
    """What is stored, number by number, in Python."""
    into = weight.shape[-1]
    parts = STORES[store].quantize(weight)
    rows = [x.reshape(-1, x.shape[-1]).tolist() for x in parts if x.dtype != torch.uint8]
    first = parts[0].reshape(-1, parts[0].shape[-1])
    if store == "fp8":
        numbers = first.view(torch.float8_e4m3fn).double()
        scales = torch.tensor(rows[0], dtype=torch.float64).repeat_interleave(128, -1)
        return (numbers * scales[:, :into]).view(weight.shape).float()
    scales = parts[1].reshape(-1, parts[1].shape[-1]).tolist()
    found = []
    for row, bytes_, (least, step) in zip(scales, first.tolist(), rows[0], strict=True):
        halves = [half for byte in bytes_ for half in divmod(byte, 16)]
        found.append(
            [NF4[n] * (least + step * row[i // 64]) for i, n in enumerate(halves[:into])]
        )
    return torch.tensor(found).view(weight.shape)


def test_nf4_has_the_quantiles_of_a_normal_distribution():
    """Their closed form gives the published numbers, which were computed in fp32, to 1.1e-7."""
    quantile = NormalDist().inv_cdf
    start = 0.9677083

    def steps(count):
        return [quantile(start + (0.5 - start) * i / count) for i in range(count)]

    numbers = sorted([*steps(8), 0.0, *(-q for q in steps(7))])
    assert pytest.approx([q / numbers[-1] for q in numbers], abs=1.1e-7) == NF4
    # appendix E of the paper
    published = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634
    0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
    assert [*map(float, published.split())] == list(NF4)


def test_nf4_has_the_bytes_of_bitsandbytes():
    """The digest is of what bitsandbytes 0.50.2 made of these weights on a CPU."""
    i = torch.arange(48 * 320)
    weight = ((i * 7919 % 1009 - 504) * (1 + i // 64 % 7)).float().view(48, 320) / 4096
    found = to_nf4(weight)[0]
    digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
    assert digest == "a61b34b114fd41e8d58c01a76377467098c265ad1769ec4d073181cb8efcbcaf"


@pytest.mark.parametrize("shape", [(5, 192), (130, 200), (2, 3, 130)], ids=str)
def test_each_weight_becomes_the_nearest_number(shape):
    """With a scale that is off by at most half of 255 steps between a row's least and largest."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[..., 0, :] = 0
    halves, scales, ends = to_nf4(weight)
    assert halves.shape == (*shape[:-1], shape[-1] // 2)
    for row, codes, steps, (least, step) in zip(
        weight.flatten(0, -2).tolist(),
        halves.flatten(0, -2).tolist(),
        scales.flatten(0, -2).tolist(),
        ends.flatten(0, -2).tolist(),
        strict=True,
    ):
        blocks = [row[i : i + 64] for i in range(0, len(row), 64)]
        largest = [max(map(abs, block)) for block in blocks]
        assert least == min(largest) and step == pytest.approx(
            (max(largest) - least) / 255, rel=1e-6
        )
        numbers = [NF4[half] for code in codes for half in divmod(code, 16)]
        for i, (value, number) in enumerate(zip(row, numbers, strict=True)):
            scale = largest[i // 64]
            off = abs(value - number * scale)
            assert off <= min(abs(value - each * scale) for each in NF4) + 1e-6 * scale
            assert abs(least + step * steps[i // 64] - scale) <= 0.501 * step + 1e-6 * scale


def test_fp8_has_one_scale_for_128_x_128_of_a_matrix():
    weight = torch.randn(300, 200) * torch.logspace(0, 2, 300)[:, None]
    numbers, inverse = STORES["fp8"].quantize(weight)
    assert numbers.shape == (300, 200) and inverse.shape == (300, 2)
    for row, column in ((0, 0), (128, 0), (256, 128)):
        block = weight[row : row + 128, column : column + 128]
        scale = inverse[row : row + 128, column // 128]
        assert (scale == scale[0]).all() and scale[0].log2() % 1 == 0
        # the least power of two with which the largest fits
        assert 224 < (block.abs().max() / scale[0]) <= 448
        exact = (block / scale[0]).to(torch.float8_e4m3fn)
        assert torch.equal(
            numbers[row : row + 128, column : column + 128], exact.view(torch.uint8)
        )


def frozen_and_wide(name, store, lora=None, **model):
    """The same model twice, on random weights: stored, and with the weights that this stands for."""
    tree = TREE | {"model": {"name": name, "vocab_size": 128, "initializer_range": 0.2} | model}
    tree["lora"] = TREE["lora"] | (lora or {})
    stored = plain_model(from_dict(tree | {"lora": tree["lora"] | {"base": store}}))
    wide = plain_model(from_dict(tree))
    frozen = frozen_weights(stored)
    with torch.no_grad():
        for key, parameter in wide.named_parameters():
            if key in frozen:
                parameter.copy_(widened(store, parameter))
            elif is_adapter(key):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(key)))
                stored.get_parameter(key).copy_(parameter)
    return stored, wide, ragged_batch(from_dict(tree), 0)["tokens"]


def gradients(model, tokens):
    y = model(tokens)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    (y * weights).sum().backward()
    return y, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("store", ["fp8", "nf4"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama3-8b-tiny", None),
        ("gpt-oss-20b-tiny", EXPERTS[:2]),
        ("deepseek-v3-tiny", ["kv_b_proj", "experts.gate_up_proj"]),
        ("nemotron3-nano-30b-a3b-tiny", ["in_proj", "experts.up_proj"]),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_weights_that_are_stored(name, targets, store):
    lora = {"targets": targets} if targets else {}
    stored, wide, tokens = frozen_and_wide(name, store, lora)
    kinds = {base_class(module) for block in stored.blocks for module in block.modules()}
    assert FrozenLinear in kinds and nn.Linear not in kinds
    assert (FrozenExperts in kinds) == bool(stored.config.num_experts)
    (y, found), (expected_y, expected) = gradients(stored, tokens), gradients(wide, tokens)
    torch.testing.assert_close(y, expected_y, atol=1e-5, rtol=1e-5)
    assert found.keys() == expected.keys() and all(map(is_adapter, found))
    assert_same_gradients(found, expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("store", ["fp8", "nf4"])
def test_no_wide_weight_stays_for_the_backward_pass(store, compiled):
    """The compiler, too, computes it anew."""
    torch.compiler.reset()
    linear = nn.Linear(128, 256, bias=False).requires_grad_(False)
    freeze([nn.ModuleList([linear])], store)
    run = torch.compile(linear, backend="aot_eager_decomp_partition") if compiled else linear
    x = torch.randn(4, 128, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        y = run(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert {part.data_ptr() for part in linear.parameters()} <= {part.data_ptr() for part in kept}
    assert not [part for part in kept if part.is_floating_point() and part.numel() >= 128 * 256]
    torch.testing.assert_close(x.grad, upstream @ widen(linear, "weight", torch.float32))
    torch.compiler.reset()


@pytest.mark.parametrize("store", ["fp8", "nf4"])
def test_merged_weights_are_those_that_were_trained_with(store):
    lora = {"targets": EXPERTS}
    stored, wide, _ = frozen_and_wide("qwen3-30b-a3b-tiny", store, lora)
    merge_adapters(stored)
    merge_adapters(wide)
    expected = wide.state_dict()
    found = stored.state_dict()
    assert found.keys() == expected.keys() and not frozen_weights(stored)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)
    assert {type(m) for m in stored.modules()} == {type(m) for m in wide.modules()}
    assert all(p.requires_grad for p in stored.parameters())


def test_adapters_are_merged_into_what_they_were_trained_beside(tmp_path):
    """By minitrain.merge --base nf4, from files in the types of a run."""
    tree = TREE | {"model": {"name": "llama3-8b-tiny", "vocab_size": 128, "eos_token_id": 2}}
    config = from_dict(tree)
    base = Decoder(config.model.config)
    initialize(base, 0)
    save_pretrained(base, tmp_path / "base")
    lora = config.lora
    adapters = {
        name: torch.randn(shape) for name, shape in adapter_shapes(base.config, lora).items()
    }
    save_adapter(adapters.items(), base.config, lora, tmp_path / "adapter")
    folders = [f"--{name}={tmp_path / name}" for name in ("model", "adapter", "out")]
    folders[0] = f"--model={tmp_path / 'base'}"
    merge.main([*folders, "--base=nf4"])
    found = load_pretrained(tmp_path / "out").state_dict()
    frozen = 0
    for name, weight in base.state_dict().items():
        if name.endswith("_proj.weight"):
            frozen += 1
            weight = widened("nf4", weight)
            stem = name.removesuffix("weight")
            if f"{stem}lora_A" in adapters:
                weight = merged_weight(
                    weight, adapters[f"{stem}lora_A"], adapters[f"{stem}lora_B"], lora
                )
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-6)
    assert frozen == 7 * config.model.config.num_layers


def test_a_model_of_32_billion_weights_fits_one_gpu():
    """Qwen3-32B: half a byte for each weight, a byte for 64 and 8 bytes for each row, in 64 layers."""
    config = model_config("qwen3-32b")
    one = empty_model(dataclasses.replace(config, num_layers=1)).to(torch.bfloat16)
    matrices = [p for p in one.blocks[0].parameters() if p.ndim > 1]
    expected = sum(p.numel() / 2 + p.numel() / 64 + 8 * len(p) for p in matrices)
    norms = sum(p.nbytes for p in one.blocks[0].parameters() if p.ndim == 1)
    freeze(one.blocks, "nf4")
    layer = sum(p.nbytes for p in one.blocks[0].parameters())
    assert layer == expected + norms
    outside = 2 * 2 * config.vocab_size * config.hidden_size
    assert 64 * layer + outside < 19.3e9


def test_what_does_not_go_together_is_refused():
    def refused(**changes):
        with pytest.raises(InputError) as caught:
            from_dict({"model": "llama3-8b-tiny"} | changes)
        return str(caught.value)

    told = refused(task="lora", lora={"base": "nf4"}, precision="fp8")
    assert "lora.base=nf4" in told and "fp8.form=block" in told
    assert "task=grpo" in refused(task="grpo", lora={"base": "nf4"})
