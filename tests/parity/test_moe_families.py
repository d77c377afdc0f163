"""Mixture-of-experts families against transformers: what test_decoder.py does not see, files, the balancing loss."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from minitrain import load_pretrained, save_pretrained
from minitrain.formats.hf import read_config
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.layers import attention_factor, rotary_frequencies
from minitrain.models.router import Router
from tests.helpers.hf_models import MOE_CONFIGS, assert_same, build, random_tokens, reload


# Each value of the oracle's config must matter, or the tests above would not see it wrong.
@pytest.mark.parametrize(
    "family, changes",
    [
        ("mixtral", dict(num_experts_per_tok=3)),
        ("deepseek-v3", dict(topk_group=3)),
        ("deepseek-v3", dict(n_group=2)),
        ("deepseek-v3", dict(routed_scaling_factor=2.4)),
        ("deepseek-v3", dict(beta_fast=32.0)),
        ("deepseek-v3", dict(mscale_all_dim=0.9)),
        ("deepseek-v3", dict(mscale=0.9)),
        ("gpt-oss", dict(sliding_window=9)),
        ("gpt-oss", dict(truncate=True)),
    ],
)
def test_oracle_has_the_quirk_on(family, changes):
    theirs, tokens = build(family), random_tokens(2, 40)
    rope = theirs.config.rope_parameters
    in_rope = {key: value for key, value in changes.items() if key in rope}
    changed = build(family, **(dict(rope_parameters=rope | in_rope) if in_rope else changes))
    with torch.no_grad():
        assert (changed(tokens).logits - theirs(tokens).logits).abs().max() > 1e-2


def test_gpt_oss_clamps_some_activations(tmp_path):
    """Inside the oracle's experts, both limits are met, so that gradients outside of them are compared too."""
    theirs = build("gpt-oss")
    theirs.save_pretrained(tmp_path)
    ours, seen = load_pretrained(tmp_path), []
    experts = ours.model.layers["1"].mlp.experts
    gated, experts.gated = (
        experts.gated,
        lambda gate, up: seen.append((gate, up)) or gated(gate, up),
    )
    ours(random_tokens(2, 40))
    ((gate, up),) = seen
    assert (gate > 7).any() and (up.abs() > 7).any() and (gate < 7).float().mean() > 0.5


@pytest.mark.parametrize("family", ["deepseek-v3", "kimi-k2", "gpt-oss"])
def test_yarn_frequencies(family, tmp_path):
    theirs = build(family)
    theirs.save_pretrained(tmp_path)
    config, oracle = read_config(tmp_path), theirs.model.rotary_emb
    found = rotary_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
    torch.testing.assert_close(found, oracle.inv_freq, atol=0, rtol=1e-6)
    assert attention_factor(config.rope_scaling) == pytest.approx(
        oracle.attention_scaling, rel=1e-12
    )


@pytest.mark.parametrize(
    ("dim", "theta", "changes"),
    [
        (64, 10000.0, {}),
        (64, 10000.0, {"truncate": False}),
        # all pairs turn less often than beta_fast
        (8, 10000.0, {"original_max_position_embeddings": 64}),
        (8, 2.0, {"beta_slow": 1e-3}),  # and all of these more often than beta_slow
        # no pair is between
        (8, 10000.0, {"beta_fast": 3.0, "beta_slow": 3.0, "truncate": False}),
        # nor here, where all but the first are divided
        (16, 10000.0, {"original_max_position_embeddings": 6}),
        (16, 500.0, {"factor": 1.0}),
        (16, 500.0, {"factor": 0.5, "mscale": 0.7, "mscale_all_dim": 1.0}),
        (16, 500.0, {"mscale": 0.7}),  # which counts only with the other
        (16, 500.0, {"mscale_all_dim": 0.7}),
    ],
    ids=str,
)
def test_corners_of_yarn(dim, theta, changes):
    settings = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
    } | changes
    config = LlamaConfig(
        head_dim=dim,
        max_position_embeddings=1 << 17,
        rope_parameters=settings | {"rope_theta": theta},
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(
        rotary_frequencies(dim, theta, settings), expected, atol=0, rtol=1e-6
    )
    assert attention_factor(settings) == pytest.approx(magnitude, rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_weights_that_are_not_divided_by_their_sum(family, tmp_path):
    theirs, tokens = build(family, norm_topk_prob=False), random_tokens(2, 40)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert_same(ours(tokens), theirs(tokens).logits, ours, theirs)
    save_pretrained(ours, tmp_path / "ours")
    assert read_config(tmp_path / "ours") == ours.config and not ours.config.norm_topk_prob
    with torch.no_grad():
        assert torch.equal(reload(tmp_path / "ours")(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("left", [{}, dict(rope_parameters={}), dict(rope_scaling={})], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_rotary_settings_that_config_json_leaves_out(family, left, tmp_path):
    build(family).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= left
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokens = random_tokens(1, 40)
    torch.testing.assert_close(
        load_pretrained(tmp_path)(tokens), reload(tmp_path)(tokens).logits, atol=1e-4, rtol=0
    )


def test_gpt_oss_without_yarn(tmp_path):
    """Where config.json gives no scaling, transformers takes GPT-OSS's own."""
    theirs, tokens = (
        build("gpt-oss", rope_parameters=dict(rope_type="default", rope_theta=100.0)),
        random_tokens(1, 40),
    )
    theirs.save_pretrained(tmp_path / "theirs")
    save_pretrained(load_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(reload(tmp_path / "ours")(tokens).logits, theirs(tokens).logits)


@pytest.mark.parametrize("family", MOE_CONFIGS)
def test_same_tensor_names_as_transformers_writes(family, tmp_path):
    build(family).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    save_pretrained(
        load_pretrained(tmp_path / "theirs"), tmp_path / "ours", max_shard_bytes=20_000
    )
    names = [
        json.loads((tmp_path / who / "model.safetensors.index.json").read_text())
        for who in ("ours", "theirs")
    ]
    ours, theirs = (set(index["weight_map"]) for index in names)
    assert ours == theirs


def test_minimax_has_its_experts_in_fp8(tmp_path):
    """Their names are Mixtral's."""
    build("minimax-m2").save_pretrained(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "fp8", fp8=True)
    stored = load_file(tmp_path / "fp8/model.safetensors")
    experts = [key for key in stored if re.search(r"\.experts\.\d\.w[123]\.weight$", key)]
    assert len(experts) == 2 * 8 * 3
    assert {stored[key].dtype for key in experts} == {torch.float8_e4m3fn}
    again = load_pretrained(tmp_path / "fp8", dtype=torch.float32)
    for layer, ours in model.model.layers.items():
        stack = again.model.layers[layer].mlp.experts.gate_up_proj
        torch.testing.assert_close(stack, ours.mlp.experts.gate_up_proj, rtol=0.07, atol=0.01)


def test_selection_bias_stays_in_fp32(tmp_path):
    theirs = build("deepseek-v3")
    bias = theirs.model.layers[1].mlp.gate.e_score_correction_bias.clone()
    theirs.save_pretrained(tmp_path / "fp32")
    model = load_pretrained(tmp_path / "fp32", dtype=torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.layers["1"].mlp.gate.e_score_correction_bias, bias)
    save_pretrained(model, tmp_path / "bf16")
    assert torch.equal(
        load_pretrained(tmp_path / "bf16").model.layers["1"].mlp.gate.e_score_correction_bias,
        bias,
    )
    cast = load_pretrained(tmp_path / "fp32").to(torch.bfloat16)
    assert torch.equal(cast.model.layers["1"].mlp.gate.e_score_correction_bias, bias)


# -------------------------------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize("padded", [False, True])
def test_auxiliary_loss_has_the_gradient_of_transformers(padded):
    """Theirs has f sum to top_k, ours to 1; both over all tokens of one layer but padding."""
    torch.manual_seed(0)
    shape = DecoderConfig(
        hidden_size=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        router_aux_loss_coef=0.3,
    )
    router, x = Router(shape), torch.randn(2, 20, 16)
    torch.nn.init.normal_(router.weight)
    document_ids = (
        torch.where(torch.arange(20) < torch.tensor([[20], [7]]), 0, -1) if padded else None
    )
    _, weights = router(x, document_ids)
    # what is left is the attached loss
    (found,) = torch.autograd.grad(weights.sum() * 0, router.weight)
    seen = None if document_ids is None else document_ids >= 0
    loss = 0.3 * load_balancing_loss_func((x.flatten(0, 1) @ router.weight.T,), 6, 2, seen) / 2
    (expected,) = torch.autograd.grad(loss, router.weight)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-4)
