"""Wan checkpoints in both spellings: diffusers reads what we write, and we read what it writes."""

import dataclasses
import json

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from safetensors.torch import load_file, save_file

from minitrain import InputError, load_pretrained, save_pretrained
from minitrain.formats.wan_names import diffusers_name
from minitrain.models.decoder import Decoder
from minitrain.models.wan import Wan, WanConfig
from minitrain.models.zoo import model_config
from tests.helpers.hf_models import call_refused, edit_json
from tests.helpers.wan import CONFIGS, diffusers_twin

SHARDED = 20_000  # bytes: a handful of files


def assert_same_tensors(found: dict, expected: dict) -> None:
    found, expected = (
        {diffusers_name(name): tensor for name, tensor in side.items()}
        for side in (found, expected)
    )
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name


@pytest.mark.parametrize("size", ["20KB", "1GB"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_we_read_what_diffusers_writes(kind, size, tmp_path):
    theirs = diffusers_twin(CONFIGS[kind])
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "20KB")
    ours = load_pretrained(tmp_path)
    assert ours.config == CONFIGS[kind]
    assert_same_tensors(ours.state_dict(), theirs.state_dict())


def test_a_norm_without_use_of_published_image_to_video(tmp_path):
    """Which diffusers leaves out, too."""
    kind = next(kind for kind, config in CONFIGS.items() if config.image_dim)
    diffusers_twin(CONFIGS[kind]).save_pretrained(tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    expected = load_pretrained(tmp_path).state_dict()
    save_file(
        load_file(file) | {"blocks.0.attn2.norm_added_q.weight": torch.ones(CONFIGS[kind].dim)},
        file,
    )
    assert_same_tensors(load_pretrained(tmp_path).state_dict(), expected)


@pytest.mark.parametrize("size", [SHARDED, 10**9])
@pytest.mark.parametrize("kind", CONFIGS)
def test_diffusers_reads_what_we_write(kind, size, tmp_path):
    ours = Wan(CONFIGS[kind])
    save_pretrained(ours, tmp_path, max_shard_bytes=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == SHARDED)
    theirs, report = WanTransformer3DModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert_same_tensors(theirs.state_dict(), ours.state_dict())
    assert load_pretrained(tmp_path).config == ours.config


def test_dtype_is_that_of_most_tensors_unless_given(tmp_path):
    """diffusers keeps norms and tables in fp32 when it loads bf16, and so writes files of two types."""
    diffusers_twin(CONFIGS["t2v"]).save_pretrained(tmp_path / "fp32")
    mixed = WanTransformer3DModel.from_pretrained(tmp_path / "fp32", torch_dtype=torch.bfloat16)
    assert len({parameter.dtype for parameter in mixed.parameters()}) == 2
    mixed.save_pretrained(tmp_path / "mixed")
    for dtype in (None, torch.float32):
        model = load_pretrained(tmp_path / "mixed", dtype)
        assert {p.dtype for p in model.blocks[0].attn1.parameters()} == {dtype or torch.bfloat16}
        assert (
            model.blocks[0].norm2.weight.dtype
            == model.adaln.scale_shift_table.dtype
            == torch.float32
        )


@pytest.mark.parametrize("original", [False, True])
def test_what_a_bf16_model_keeps_in_fp32_is_stored_in_fp32(original, tmp_path):
    ours = Wan(CONFIGS["t2v"]).to(torch.bfloat16)
    save_pretrained(ours, tmp_path, original_names=original)
    again = load_pretrained(tmp_path, torch.bfloat16)
    for (name, tensor), found in zip(
        ours.state_dict().items(), again.state_dict().values(), strict=True
    ):
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
    if not original:
        theirs = WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
        assert_same_tensors(theirs.state_dict(), ours.state_dict())


ORIGINALS = {
    "wan2.1 t2v": CONFIGS["t2v"],
    "wan2.1 i2v": dataclasses.replace(CONFIGS["i2v"], image_dim=1280, patch_size=(1, 2, 2)),
    "wan2.2 i2v": dataclasses.replace(CONFIGS["i2v"], image_dim=None, patch_size=(1, 2, 2)),
}


@pytest.mark.parametrize("size", [SHARDED, 10**9])
@pytest.mark.parametrize("kind", ORIGINALS)
def test_original_names_are_what_diffusers_converts(kind, size, tmp_path):
    ours = Wan(ORIGINALS[kind])
    save_pretrained(ours, tmp_path, max_shard_bytes=size, original_names=True)
    stored = {}
    for file in tmp_path.glob("diffusion_pytorch_model*.safetensors"):
        stored |= load_file(file)
    assert "blocks.0.self_attn.q.weight" in stored and "head.modulation" in stored
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["model_type"], written["text_dim"]) == (
        kind.split()[-1],
        ours.config.text_dim,
    )
    assert_same_tensors(convert_wan_transformer_to_diffusers(dict(stored)), ours.state_dict())
    again = load_pretrained(tmp_path)
    assert again.config == ours.config
    assert_same_tensors(again.state_dict(), ours.state_dict())


def test_original_model_of_text_and_image(tmp_path):
    """Wan-AI/Wan2.2-TI2V-5B, which in diffusers is a text-to-video model of 48 channels."""
    config = dataclasses.replace(CONFIGS["t2v"], in_channels=48, out_channels=48)
    ours = Wan(config)
    save_pretrained(ours, tmp_path, original_names=True)
    edit_json(tmp_path / "config.json", model_type="ti2v")
    again = load_pretrained(tmp_path)
    assert again.config == config
    assert_same_tensors(again.state_dict(), ours.state_dict())


def test_published_original_config(tmp_path):
    """Wan-AI/Wan2.1-T2V-14B's config.json, at 1 / 40 of its width and with three of its layers."""
    published = dict(
        _class_name="WanModel",
        _diffusers_version="0.30.0",
        dim=5120,
        eps=1e-06,
        ffn_dim=13824,
        freq_dim=256,
        in_dim=16,
        model_type="t2v",
        num_heads=40,
        num_layers=40,
        out_dim=16,
        text_len=512,
    )
    small = dict(dim=128, ffn_dim=64, num_heads=1, num_layers=3)
    config = WanConfig(num_attention_heads=1, ffn_dim=64, num_layers=3)
    save_pretrained(Wan(config), tmp_path, original_names=True)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {key: written[key] for key in published if key != "_diffusers_version"} == {
        key: value for key, value in (published | small).items() if key != "_diffusers_version"
    }
    for changed in (
        published | small,
        {key: value for key, value in (published | small).items() if key != "eps"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        assert load_pretrained(tmp_path).config == config


def test_zoo_is_what_diffusers_defaults_to():
    """Its defaults are those of the 14B text-to-video model."""
    with torch.device("meta"):
        theirs = WanTransformer3DModel()
        ours = Wan(model_config("wan2.1-14b"))
    shapes = {name: parameter.shape for name, parameter in theirs.named_parameters()}
    assert {
        diffusers_name(name): parameter.shape for name, parameter in ours.named_parameters()
    } == shapes


@pytest.mark.parametrize(
    "spelling, changes, message",
    [
        (
            "diffusers",
            dict(_class_name="WanVACETransformer3DModel"),
            "_class_name='WanVACETransformer3DModel' is not supp",
        ),
        (
            "original",
            dict(_class_name="VaceWanModel", model_type="vace"),
            "(known: WanTransformer3DModel, WanModel)",
        ),
        ("diffusers", dict(qk_norm=None), "qk_norm=None is not supported"),
        ("diffusers", dict(cross_attn_norm=False), "cross_attn_norm=False is not supported"),
        ("diffusers", dict(pos_embed_seq_len=514), "pos_embed_seq_len=514 is not supported"),
        ("diffusers", dict(added_kv_proj_dim=32), "added_kv_proj_dim=32 is not supported"),
        ("diffusers", dict(num_layers="2"), "num_layers='2' must be a whole number"),
        ("diffusers", dict(patch_size=2), "patch_size=2 must be a list"),
        ("diffusers", dict(eps=0), "eps=0 must be a number above 0"),
        ("diffusers", dict(attention_head_dim=15), "attention_head_dim=15 must be even"),
        (
            "diffusers",
            dict(num_layers=3),
            "blocks.2.attn1.to_q.weight of shape [32, 32] is missing",
        ),
        ("diffusers", dict(num_layers=1), "has no place in the model"),
        ("original", dict(model_type="flf2v"), "model_type='flf2v' is not supported"),
        ("original", dict(num_heads=3), "num_heads=3 does not divide dim=32"),
        ("original", dict(num_heads=0), "num_heads=0 does not divide dim=32"),
        ("original", dict(qk_norm=False), "qk_norm=False is not supported"),
        (
            "original",
            dict(ffn_dim=40),
            "blocks.0.ffn.net.0.proj.weight has shape [48, 32], expected [40, 32]",
        ),
    ],
    ids=str,
)
def test_configs_that_do_not_fit(spelling, changes, message, tmp_path):
    save_pretrained(Wan(CONFIGS["t2v"]), tmp_path, original_names=spelling == "original")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    call_refused(lambda: load_pretrained(tmp_path), message, tmp_path)


def test_a_missing_key_is_named(tmp_path):
    save_pretrained(Wan(CONFIGS["t2v"]), tmp_path)
    edit_json(tmp_path / "config.json", ffn_dim=None)
    call_refused(lambda: load_pretrained(tmp_path), "config.json: key ffn_dim is missing")


def test_the_folder_of_a_pipeline(tmp_path):
    save_pretrained(Wan(CONFIGS["t2v"]), tmp_path / "transformer")
    with pytest.raises(
        InputError, match=rf"a pipeline of diffusers, not a model \(use {tmp_path}/transformer\)"
    ):
        load_pretrained(tmp_path)
    save_pretrained(Wan(CONFIGS["t2v"]), tmp_path / "transformer_2")
    call_refused(
        lambda: load_pretrained(tmp_path),
        f"(use {tmp_path}/transformer or {tmp_path}/transformer_2)",
    )


def test_what_has_no_original_spelling(tmp_path):
    with pytest.raises(
        InputError,
        match=r"model\.image_dim=20 cannot be saved as WanModel \(must be None or 1280\)",
    ):
        save_pretrained(Wan(CONFIGS["i2v"]), tmp_path, original_names=True)
    with pytest.raises(
        InputError, match=r"model\.patch_size=\(1, 2, 1\) cannot be saved as WanModel"
    ):
        save_pretrained(
            Wan(dataclasses.replace(CONFIGS["i2v"], image_dim=None)),
            tmp_path,
            original_names=True,
        )
    with pytest.raises(InputError, match="original_names=True is for Wan models"):
        save_pretrained(Decoder(model_config("llama3-8b-tiny")), tmp_path, original_names=True)
