"""Hybrids, and GPT-2, which has GPT-3's architecture, against transformers."""

import dataclasses
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from minitrain import InputError, load_pretrained, save_pretrained
from minitrain.formats.config_hf import config_to_hf
from minitrain.formats.hf import read_config, save_tensors
from minitrain.formats.nemotron_h import NO_EXPERTS
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import ZOO, model_config
from minitrain.training.build import initialize
from tests.helpers.hf_models import (
    HYBRID_CONFIGS,
    build,
    call_refused,
    compare_and_differentiate,
    compare_with_transformers,
    edit_json,
    packed,
    random_tokens,
    reload,
)

HYBRIDS = [name for name in HYBRID_CONFIGS if name.startswith("nemotron_h")]
PUBLISHED = [
    dict(layers_block_type=None, hybrid_override_pattern="ME*-ME"),
    dict(layers_block_type=["mamba", "moe", "attention", "mlp", "mamba", "moe"]),
]


def initial_twin(name):
    """A tiny twin with initial weights."""
    model = Decoder(model_config(name))
    initialize(model, seed=0)
    return model


@pytest.fixture(params=HYBRID_CONFIGS)
def pair(request, tmp_path):
    """The same weights in transformers and here, through a checkpoint on disk."""
    theirs = build(request.param)
    theirs.save_pretrained(tmp_path / "theirs")
    return theirs, load_pretrained(tmp_path / "theirs")


def assert_same_gradients(ours, theirs, path):
    """Ours are written as a checkpoint, so that transformers tells which of its parameters each belongs to."""
    tensors = ours.state_dict(keep_vars=True)
    gradients = {
        name: tensor.grad if tensor.requires_grad else tensor for name, tensor in tensors.items()
    }
    save_tensors(gradients.items(), ours.config, torch.float32, path)
    found = dict(reload(path).named_parameters())
    for name, parameter in theirs.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (found[name] - gradient).norm() <= 1e-3 * gradient.norm(), name
        assert gradient.norm() > 0, name


def test_logits_and_gradients(pair, tmp_path):
    theirs, ours = pair
    tokens = random_tokens(2, 44)
    expected, found = theirs(tokens).logits, ours(tokens)
    compare_and_differentiate(found, expected)
    assert_same_gradients(ours, theirs, tmp_path / "gradients")


def test_packed_documents_equal_each_document_alone(pair, tmp_path):
    theirs, ours = pair
    rows = [[9, 1, 20, 14], [32, 12]]
    tokens = random_tokens(2, 44)
    expected, document_ids, positions = packed(theirs, tokens, rows)
    found = ours(tokens, positions=positions, document_ids=document_ids)
    compare_and_differentiate(found, expected)
    assert_same_gradients(ours, theirs, tmp_path / "gradients")


def test_tie_word_embeddings_has_no_meaning_for_nemotron_h(tmp_path):
    """transformers gives it a head of its own, whatever config.json says."""
    theirs = build("nemotron_h")
    theirs.config.tie_word_embeddings = True
    theirs.save_pretrained(tmp_path)
    compare_with_transformers(tmp_path)


@pytest.mark.parametrize("family", HYBRIDS)
def test_both_spellings_of_the_pattern(family, tmp_path):
    build(family).save_pretrained(tmp_path)
    expected = read_config(tmp_path)
    assert expected.layer_pattern == "ME*-ME"
    # letters: it is as long as it is
    for spelling in (PUBLISHED[1], PUBLISHED[0] | dict(num_hidden_layers=9)):
        edit_json(tmp_path / "config.json", **spelling)
        assert read_config(tmp_path) == expected


@pytest.mark.parametrize(
    "more", [dict(rms_norm_eps=0.1), dict(hidden_act="silu"), dict(mamba_dt_min=0.5)], ids=str
)
def test_keys_mean_what_transformers_takes_them_for(more, tmp_path):
    """Of two spellings it reads one: other families' names say nothing there."""
    build("nemotron_h").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **more)
    compare_with_transformers(tmp_path)


@pytest.mark.parametrize("key", ["time_step_limit", "mamba_dt_limit"])
@pytest.mark.parametrize("endless", [None, math.inf, {"__float__": "Infinity"}], ids=str)
@pytest.mark.parametrize("layers", PUBLISHED, ids=["letters", "names"])
def test_dt_of_published_models_is_bounded_by_its_limit(key, layers, endless, tmp_path):
    """As in NVIDIA's code, and not by `time_step_min`, from which dt starts there: 0.001 in the files."""
    theirs, tokens = build("nemotron_h"), random_tokens(1, 40)
    theirs.save_pretrained(tmp_path)
    limit = {} if endless is None else {key: [0.0, endless]}
    edit_json(
        tmp_path / "config.json", **layers | dict(time_step_min=0.6, time_step_limit=None) | limit
    )
    torch.testing.assert_close(
        load_pretrained(tmp_path)(tokens), theirs(tokens).logits, atol=1e-4, rtol=0
    )


def test_weights_of_further_predictions_are_ignored(tmp_path):
    """Nemotron 3 Super comes with layers that predict more than one token."""
    ours = initial_twin("nemotron3-super-120b-a12b-tiny")
    extra = {"mtp.layers.0.eh_proj.weight": torch.ones(2, 2)}
    save_tensors(
        [*ours.state_dict().items(), *extra.items()], ours.config, torch.float32, tmp_path
    )
    tokens = random_tokens(1, 8)
    assert torch.equal(load_pretrained(tmp_path)(tokens), ours(tokens))


def test_numbers_that_small_steps_add_up_in_are_stored_in_fp32(tmp_path):
    ours = initial_twin("nemotron3-nano-30b-a3b-tiny")
    save_tensors(ours.state_dict().items(), ours.config, torch.bfloat16, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("A_log", "D", "dt_bias"):
        expected = ours.get_parameter(f"model.layers.0.mamba.dynamics.{name}")
        assert torch.equal(stored[f"backbone.layers.0.mixer.{name}"], expected)
    assert stored["backbone.layers.0.mixer.norm.weight"].dtype == torch.bfloat16
    assert reload(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_there_and_back(dtype):
    """What is kept in fp32 goes up with the rest, and down again to fp32."""
    ours = initial_twin("nemotron3-nano-30b-a3b-tiny").double()
    dynamics = ours.model.layers["0"].mamba.dynamics
    assert dynamics.A_log.dtype == torch.float64
    ours.to(dtype)
    assert {parameter.dtype for parameter in dynamics.parameters()} == {torch.float32}
    assert ours(random_tokens(1, 8)).dtype == dtype


@pytest.mark.parametrize("name", ["nemotron3-nano-30b-a3b-tiny", "gpt3-175b-tiny"])
def test_dtype_is_the_embeddings_where_config_json_has_none(name, tmp_path):
    save_pretrained(initial_twin(name).to(torch.bfloat16), tmp_path)
    edit_json(tmp_path / "config.json", torch_dtype=None)
    assert load_pretrained(tmp_path).head_weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name",
    [
        "nemotron3-nano-30b-a3b",
        "nemotron3-super-120b-a12b",
        "qwen3-next-80b-a3b",
        "qwen3.5-9b",
        "qwen3.5-35b-a3b",
        "gpt3-175b",
    ],
)
def test_models_of_the_zoo_can_be_saved(name, tmp_path):
    """transformers builds the tiny twin from what we write, and computes what it computes."""
    ours = initial_twin(name + "-tiny")
    save_pretrained(ours, tmp_path)
    tokens = random_tokens(1, 40)
    torch.testing.assert_close(ours(tokens), reload(tmp_path)(tokens).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "family, changes, parts",
    [
        ("nemotron_h", dict(layers_block_type=["moe", "conv"]), ["layers_block_type", "'conv'"]),
        (
            "nemotron_h",
            dict(layers_block_type=[["moe"]]),
            ["layers_block_type has ['moe'], which is none of"],
        ),
        ("nemotron_h", dict(layers_block_type=5), ["layers_block_type has 5, which is none of"]),
        ("nemotron_h", dict(layers_block_type=None), ["hybrid_override_pattern", "missing"]),
        (
            "nemotron_h",
            dict(layers_block_type=None, hybrid_override_pattern="MXM"),
            ["hybrid_override_pattern='MXM'"],
        ),
        ("nemotron_h", dict(use_bias=True), ["use_bias"]),
        ("nemotron_h", dict(use_conv_bias=False), ["use_conv_bias"]),
        ("nemotron_h", dict(mlp_hidden_act="silu"), [": mlp_hidden_act='silu'", "relu2"]),
        ("nemotron_h", dict(layer_norm_epsilon=None), [": key layer_norm_epsilon is missing"]),
        ("nemotron_h", dict(mamba_dt_min="no"), [": mamba_dt_min='no'"]),
        (
            "nemotron_h",
            PUBLISHED[0] | dict(time_step_limit=["no", math.inf]),
            [": time_step_limit='no' must be"],
        ),
        (
            "nemotron_h",
            PUBLISHED[0] | dict(time_step_limit=[0, 1]),
            [": time_step_limit=[0, 1] is not supported"],
        ),
        (
            "nemotron_h",
            PUBLISHED[1] | dict(mamba_dt_limit=0.1),
            [": mamba_dt_limit=0.1 is not supported"],
        ),
        ("nemotron_h", dict(n_groups=3), [": n_groups=3", "mamba_num_heads=8"]),
        (
            "nemotron_h",
            dict(num_experts_per_tok=9),
            ["num_experts_per_tok=9", "n_routed_experts=8"],
        ),
        (
            "granite-4",
            dict(layer_types=["mamba", "conv"]),
            ["layer_types has 'conv', which is none"],
        ),
        ("granite-4", dict(layer_types=["mamba"]), ["layer_pattern='m' has 1 letters"]),
        ("granite-4", dict(mamba_proj_bias=True), ["mamba_proj_bias=True"]),
        (
            "granite-4",
            dict(mamba_d_head=13),
            ["mamba_d_head=13 must be mamba_expand x hidden_size"],
        ),
        ("granite-4", dict(mamba_d_head="x"), ["mamba_d_head='x' must be a whole number"]),
        ("granite-4", dict(time_step_limit=[0.0, 1.0]), ["time_step_limit=[0.0, 1.0]"]),
        ("granite-4", dict(shared_intermediate_size=0), ["shared_intermediate_size=0 must be"]),
        ("granite-4", dict(logits_scaling=0), ["logits_scaling=0.0 must be above 0"]),
        ("qwen3-next", dict(decoder_sparse_step=2), ["decoder_sparse_step=2"]),
        ("qwen3-next", dict(mlp_only_layers=[1]), ["mlp_only_layers=[1]"]),
        (
            "qwen3-next",
            dict(num_nextn_predict_layers=2),
            ["num_nextn_predict_layers=2", "0 or 1"],
        ),
        ("qwen3-next", dict(linear_num_key_heads=4), ["linear_num_key_heads=4 does not divide"]),
        (
            "qwen3-next",
            dict(layer_types=["mamba"] * 3),
            ["layer_types has 'mamba', which is none"],
        ),
        ("qwen3.5", dict(layer_types=None, full_attention_interval="4"), ["interval='4'"]),
        ("qwen3.5", dict(num_hidden_layers=4), ["'dda' has 3 letters", "num_hidden_layers=4"]),
        ("qwen3.5", dict(attn_output_gate=False), ["attn_output_gate=False"]),
        ("gpt2", dict(scale_attn_weights=False), ["scale_attn_weights"]),
        ("gpt2", dict(add_cross_attention=True), ["add_cross_attention"]),
        ("gpt2", dict(activation_function="relu"), [": activation_function='relu'", "gelu_new"]),
        ("gpt2", dict(n_layer=None), [": key n_layer is missing"]),
        ("gpt2", dict(n_embd=None, n_inner=None), [": key n_embd is missing"]),
        ("gpt2", dict(n_layer=0), [": n_layer=0 must be at least 1"]),
        ("gpt2", dict(layer_norm_epsilon=-1), [": layer_norm_epsilon=-1.0 must be at least 0"]),
    ],
)
def test_configs_that_the_decoder_cannot_compute(family, changes, parts, tmp_path):
    """What is wrong is told by the names that the file has for it."""
    build(family).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    call_refused(lambda: read_config(tmp_path), tmp_path / "config.json", *parts)


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_the_language_model_in_files_of_one_that_sees(family, tmp_path):
    """As on the hub: transformers' AutoModelForCausalLM reads the same part of them."""
    theirs, tokens = build(family), random_tokens(1, 40)
    theirs.save_pretrained(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())
    kind = theirs.config.model_type.removesuffix("_text")
    outer = dict(
        architectures=[
            theirs.config.architectures[0].replace("CausalLM", "ConditionalGeneration")
        ],
        model_type=kind,
        text_config=inner,
        vision_config=dict(model_type=f"{kind}_vision"),
    )
    (tmp_path / "config.json").write_text(json.dumps(outer))
    stored = load_file(tmp_path / "model.safetensors")
    tensors = {
        re.sub(r"^model\.(?!language_model)", "model.language_model.", name): tensor
        for name, tensor in stored.items()
    }
    tensors["model.visual.merger.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ours = load_pretrained(tmp_path)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    compare_with_transformers(tmp_path)


@pytest.mark.parametrize("family", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_the_layer_of_multi_token_prediction_is_read_and_written(family, tmp_path):
    """By vLLM's names and in its order: fc [embedding, hidden], under norms of their own."""
    theirs = build(family)
    theirs.save_pretrained(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    last = re.escape(f"model.layers.{max_attention(theirs.config)}.")
    block = {
        re.sub(last, "mtp.layers.0.", name): tensor.clone()
        for name, tensor in stored.items()
        if re.match(last, name)
    }
    further = {
        "mtp.fc.weight": random_tokens(48, 96).float() / 96,
        "mtp.pre_fc_norm_embedding.weight": torch.full((48,), 0.1),
        "mtp.pre_fc_norm_hidden.weight": torch.full((48,), 0.2),
        "mtp.norm.weight": torch.full((48,), 0.3),
    }
    save_file(stored | block | further, tmp_path / "theirs" / "model.safetensors")
    ours = load_pretrained(tmp_path / "theirs")
    (layer,) = ours.mtp_layers
    assert torch.equal(layer.eh_proj.weight, further["mtp.fc.weight"])
    assert (layer.enorm.weight == 0.1).all() and (layer.hnorm.weight == 0.2).all()
    assert (layer.shared_head.norm.weight == 0.3).all()
    attention = ours.model.layers[str(max_attention(theirs.config))].self_attn
    assert torch.equal(layer.self_attn.q_proj.weight, attention.q_proj.weight)
    save_pretrained(ours, tmp_path / "ours")
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert {name for name in written if name.startswith("mtp.")} >= further.keys()
    again = load_pretrained(tmp_path / "ours").state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again[name], tensor), name
    # transformers leaves it out
    tokens = random_tokens(1, 40)
    torch.testing.assert_close(
        ours(tokens), reload(tmp_path / "ours")(tokens).logits, atol=1e-4, rtol=0
    )


def max_attention(config):
    """The number of the last layer with attention."""
    return max(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")


def test_gpt2_as_openai_published_it(tmp_path):
    """Without the first part of the names, and with the causal mask as a tensor of each layer."""
    theirs, tokens = build("gpt2"), random_tokens(1, 20)
    tensors = {
        name: tensor.contiguous() for name, tensor in theirs.transformer.state_dict().items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    # which some files have, under its own name
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    theirs.save_pretrained(tmp_path)
    expected = load_pretrained(tmp_path)(tokens)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_pretrained(tmp_path)(tokens), expected)


def test_gpt2_tells_its_context_as_openai_did(tmp_path):
    """By both names: transformers reads one of them, llama.cpp's converter the other."""
    build("gpt2").save_pretrained(tmp_path / "theirs")
    save_pretrained(load_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    settings = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert settings["n_ctx"] == settings["n_positions"] == 64


def test_gpt2_defaults(tmp_path):
    """Files on the hub leave out the width of the MLP and that embeddings are tied."""
    build("gpt2").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["n_inner"], raw["tie_word_embeddings"], raw["scale_attn_weights"]
    raw["hidden_size"] = raw.pop("n_embd")  # as in Llama's files, which transformers takes too
    for absent in ({}, {"n_inner": None}):
        (tmp_path / "config.json").write_text(json.dumps(raw | absent))
        config = read_config(tmp_path)
        assert (config.hidden_size, config.intermediate_size) == (48, 4 * 48)
        assert config.tie_word_embeddings


@pytest.mark.parametrize(
    "name, changes",
    [
        ("gpt3-175b-tiny", dict(num_key_value_heads=4)),
        ("gpt3-175b-tiny", dict(head_dim=32)),
        ("gpt3-175b-tiny", dict(num_attention_heads=5, num_key_value_heads=5, head_dim=12)),
        ("gpt3-175b-tiny", dict(position_embedding="rotary")),
        ("gpt3-175b-tiny", dict(o_bias=False)),
        ("nemotron3-nano-30b-a3b-tiny", dict(position_embedding="rotary")),
        ("nemotron3-nano-30b-a3b-tiny", dict(tie_word_embeddings=True)),
        ("nemotron3-nano-30b-a3b-tiny", dict(scoring_func="softmax", routed_scaling_factor=1.0)),
        ("llama3-8b-tiny", dict(layer_pattern="*-*-")),
        ("llama3-8b-tiny", dict(time_step_min=0.1)),
        ("gpt-oss-20b-tiny", dict(sliding_window=0)),
        ("deepseek-v3-tiny", dict(kv_lora_rank=0)),
        ("nemotron3-nano-30b-a3b-tiny", dict(shared_expert_intermediate_size=0)),
    ],
)
def test_models_without_a_place_in_transformers(name, changes, tmp_path):
    config = dataclasses.replace(model_config(name), **changes)
    with torch.device("meta"), pytest.raises(InputError, match=next(iter(changes))):
        save_pretrained(Decoder(config), tmp_path / "ours")


def test_what_our_own_reader_would_refuse_is_not_written():
    config = model_config("nemotron3-nano-30b-a3b-tiny", layer_pattern="")
    with pytest.raises(
        InputError, match="cannot be saved as NemotronHForCausalLM: .*layers_block_type"
    ):
        config_to_hf(config, torch.float32)


def test_a_pattern_without_experts_needs_no_keys_of_them(tmp_path):
    """Nemotron-H before Nemotron 3."""
    ours = Decoder(model_config("nemotron3-nano-30b-a3b-tiny", layer_pattern="M*-M"))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0, 0.1)
    save_pretrained(ours, tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    # whose logarithm transformers takes
    assert ours.config.time_step_min == 0 < raw["time_step_min"]
    file.write_text(json.dumps({key: raw[key] for key in raw.keys() - NO_EXPERTS.keys()}))
    assert read_config(tmp_path).num_experts == 0
    compare_with_transformers(tmp_path)


def test_heads_have_a_width_of_their_own_where_config_json_does_not_say(tmp_path):
    """As in Nemotron-H 4B, whose file has another key for it: hidden_size / num_attention_heads would be 96."""
    build("nemotron_h-wide-heads").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({"attention_head_dim": raw.pop("head_dim")} | raw))
    compare_with_transformers(tmp_path)


def test_every_model_survives_its_config_json(tmp_path):
    for config in (model_config(name + size) for name in ZOO for size in ("", "-tiny")):
        (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config, torch.float32)))
        assert read_config(tmp_path) == config
