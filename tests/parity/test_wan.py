"""Wan against diffusers: output and every gradient, in both kinds; then what no layout or precision may change."""

import dataclasses

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from minitrain.errors import InputError
from minitrain.formats.wan_names import diffusers_name
from minitrain.models.video import rotary_tables_3d
from minitrain.models.wan import Wan, WanConfig
from minitrain.models.zoo import model_config
from tests.helpers.gradients import assert_same_gradients
from tests.helpers.oracle import relative_error
from tests.helpers.wan import CONFIGS, diffusers_twin, inputs, pair, run_diffusers

PARAMETERS = {  # counted in the published checkpoints
    "wan2.1-14b": 14_288_491_584,
    "wan2.1-1.3b": 1_418_996_800,
}


def gradients(model, out: torch.Tensor) -> dict[str, torch.Tensor]:
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)))
    return {diffusers_name(name): parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_output_and_gradients_equal_diffusers(kind):
    theirs, ours = pair(kind)
    given = inputs(CONFIGS[kind])
    given["latents"].requires_grad_()
    expected = run_diffusers(theirs, **given)
    expected_gradients = gradients(theirs, expected)
    input_gradient, given["latents"].grad = given["latents"].grad, None
    found = ours(**given)
    assert_same_gradients(gradients(ours, found), expected_gradients)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert relative_error(given["latents"].grad, input_gradient) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_timesteps_of_other_types(dtype):
    theirs, ours = pair("t2v")
    given = inputs(CONFIGS["t2v"]) | {"timestep": torch.tensor([998, 20], dtype=dtype)}
    torch.testing.assert_close(
        ours(**given), run_diffusers(theirs, **given), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("head_dim", [4, 128])
def test_rotations_equal_diffusers(head_dim):
    """As far out as in published videos, where angles in fp32 would be off by 1e-5."""
    cos, sin = WanRotaryPosEmbed(head_dim, (1, 2, 2), 1024)(torch.empty(1, 16, 21, 6, 160))
    signed = torch.stack([-sin[..., ::2], sin[..., 1::2]], -1).flatten(-2)
    torch.testing.assert_close(
        rotary_tables_3d((21, 3, 80), head_dim, "cpu"), (cos, signed), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_as_published(name):
    with torch.device("meta"):
        model = Wan(model_config(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_image_to_video_parameters_as_published():
    with torch.device("meta"):
        model = Wan(
            dataclasses.replace(model_config("wan2.1-14b"), in_channels=36, image_dim=1280)
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == 16_394_878_784


@pytest.mark.parametrize("name", PARAMETERS)
def test_tiny_twins(name):
    config = model_config(name + "-tiny")
    assert sum(parameter.numel() for parameter in Wan(config).parameters()) < 500_000
    assert config.num_layers % 4 == 0 and config.num_attention_heads % 4 == 0
    run_diffusers(diffusers_twin(config), **inputs(config))


def test_initial_weights():
    """Zero velocity at first; the rest with the spread that the original gives it."""
    config = WanConfig(
        num_attention_heads=8, attention_head_dim=32, ffn_dim=512, num_layers=1, text_dim=64
    )
    model = Wan(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(torch.nan)
        model.initialize_parameter(name, parameter.data, generator)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert (
        model(torch.randn(1, 16, 1, 4, 4), torch.tensor([500.0]), torch.randn(1, 3, 64)) == 0
    ).all()
    block, embedder = model.blocks[0], model.condition_embedder
    spreads = {
        block.attn1.to_q.weight: (2 / (256 + 256)) ** 0.5,
        block.ffn.net["2"].weight: (2 / (256 + 512)) ** 0.5,
        model.patch_embedding.weight: (2 / (256 + 64)) ** 0.5,
        embedder.text_embedder.linear_1.weight: 0.02,
        embedder.time_embedder.linear_2.weight: 0.02,
        embedder.time_proj.weight: (2 / (256 + 6 * 256)) ** 0.5,
        block.adaln.scale_shift_table: 256**-0.5,
    }
    for parameter, expected in spreads.items():
        assert parameter.std().item() == pytest.approx(expected, rel=0.05)
    model.config, weight = (
        dataclasses.replace(config, embedder_std=0.1),
        embedder.text_embedder.linear_1.weight,
    )
    model.initialize_parameter(
        "condition_embedder.text_embedder.linear_1.weight", weight, generator
    )
    assert weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert (
        (block.norm2.weight == 1).all()
        and (block.attn2.norm_k.weight == 1).all()
        and (block.norm2.bias == 0).all()
    )


def test_mistakes():
    t2v, i2v = (Wan(config) for config in CONFIGS.values())
    given = inputs(CONFIGS["t2v"])
    with pytest.raises(
        InputError,
        match=r"\[3, 5, 10\] frames, rows, columns do not divide into patches \(1, 2, 2\)",
    ):
        t2v(**given | dict(latents=given["latents"][..., :5, :]))
    with pytest.raises(InputError, match="takes no image"):
        t2v(**given, image=torch.zeros(2, 5, 20))
    with pytest.raises(InputError, match="needs an image"):
        i2v(**inputs(CONFIGS["i2v"]) | dict(image=None))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("attention_head_dim", 15, "=15 must be even"),
        ("freq_dim", 33, "=33 must be even"),
        ("num_layers", 0, "=0 must be at least 1"),
        ("num_attention_heads", 1 << 16, "model.dim=8388608 must be at most"),
        ("patch_size", (2, 2), "=[2, 2] must be three numbers"),
        ("patch_size", (0, 2, 2), "=[0, 2, 2] must be three numbers"),
        ("patch_size", (1, 2, 257), "=[1, 2, 257] must be three numbers"),
        ("image_dim", 0, "=0 must be at least 1"),
        ("eps", -1e-6, "=-1e-06 must be at least 0"),
        ("embedder_std", -1, "=-1 must be at least 0"),
    ],
)
def test_sizes_that_no_model_can_have(field, value, message):
    with pytest.raises(InputError) as error:
        WanConfig(**{field: value})
    assert message in str(error.value)
