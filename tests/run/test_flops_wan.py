"""Wan's FLOPs against torch's own counter, and the published rows."""

import math

import pytest
import torch

from minitrain.bench.figures import published_step_time
from minitrain.models.lora import add_adapters
from minitrain.models.wan import Wan, WanConfig
from minitrain.models.zoo import model_config
from minitrain.run.config.load import load
from minitrain.run.monitor.flops import forward_parts, training_flops
from minitrain.settings import Lora
from tests.helpers.commands import ROOT
from tests.helpers.oracle import count_flops
from tests.helpers.published import ROWS


@pytest.mark.parametrize("patch", [(1, 2, 2), (2, 1, 2)])
def test_formula_is_what_torch_counts(patch):
    """Forward, all but the timestep's three products."""
    config = WanConfig(
        num_attention_heads=2,
        attention_head_dim=16,
        ffn_dim=48,
        num_layers=3,
        text_dim=24,
        freq_dim=32,
        patch_size=patch,
    )
    model, grid, texts = Wan(config), (4, 4, 6), 7
    given = torch.randn(1, 16, *grid), torch.tensor([5.0]), torch.randn(1, texts, 24)
    counts = count_flops(lambda: model(*given))
    timestep = 2 * (config.freq_dim * config.dim + 7 * config.dim**2)
    tokens = math.prod(grid) // math.prod(patch)
    assert sum(counts.values()) == sum(forward_parts(config, tokens, texts).values()) + timestep


def test_training_is_three_times_forward_in_torch_too():
    """But for what needs no gradient: the text's and the patches' own."""
    config = model_config("wan2.1-1.3b-tiny")
    model = Wan(config)
    given = (
        torch.randn(1, 16, 2, 8, 8).requires_grad_(),
        torch.tensor([5.0]),
        torch.randn(1, 9, 64).requires_grad_(),
    )
    counts = count_flops(lambda: model(*given).sum().backward())
    timestep = 2 * (config.freq_dim * config.dim + 7 * config.dim**2)
    no_input_gradient = 2 * config.freq_dim * config.dim
    assert (
        sum(counts.values()) == training_flops(config, 32, 9) + 3 * timestep - no_input_gradient
    )


@pytest.mark.parametrize(
    "targets", [["to_q", "to_k", "to_v", "to_out.0"], ["to_k", "to_v", "ffn.net.2"]], ids=str
)
def test_frozen_weights_have_no_gradient_products(targets):
    config, lora = model_config("wan2.1-1.3b-tiny"), Lora(rank=4, targets=targets)
    model = Wan(config)
    add_adapters(model, lora)
    given = torch.randn(1, 16, 2, 8, 8), torch.tensor([5.0]), torch.randn(1, 9, 64)
    counts = count_flops(lambda: model(*given).sum().backward())
    timestep = 2 * (config.freq_dim * config.dim + 7 * config.dim**2)
    assert sum(counts.values()) == training_flops(config, 32, 9, lora) + timestep


@pytest.mark.parametrize(
    "name, tokens, petaflops, per_token",
    [
        ("wan2.1-14b", 37440, 6.184, 165.2),
        ("wan2.1-14b", 32760, 5.035, 153.7),
        ("wan2.1-14b", 75600, 19.570, 258.9),
        ("wan2.1-1.3b", 32760, 0.849, 25.9),
    ],
)
def test_figures_of_the_published_shapes(name, tokens, petaflops, per_token):
    """As its authors' formula gives them, evaluated apart from this code."""
    flops = training_flops(model_config(name), tokens)
    assert flops / 1e15 == pytest.approx(petaflops, abs=6e-4)
    assert flops / tokens / 1e9 == pytest.approx(per_token, abs=0.05)


@pytest.mark.parametrize(
    "name, seconds",
    [
        ("dfm-wan2.1-14b-gb200-32gpu", 15.70),
        ("dfm-wan2.1-14b-gb300-32gpu", 12.10),
        ("dfm-wan2.1-14b-h100-128gpu", 18.98),
        ("dfm-wan2.1-14b-h100-8gpu", 35.16),
        ("dfm-wan2.1-14b-h100-64gpu", 27.02),
    ],
)
def test_step_times_that_the_rows_imply(name, seconds):
    """6.184 PFLOP a video, by hand: x videos per GPU / the row's TFLOP/s."""
    config = load(
        ROOT / "configs/dfm" / f"{name.removeprefix('dfm-').replace('14b', '14b-pretrain')}.yaml"
    )
    assert published_step_time(config) == pytest.approx(seconds, abs=0.01)


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs/dfm").glob("*.yaml")), ids=lambda file: file.stem
)
def test_configs_are_the_published_rows(file):
    config = load(file)
    row, p = ROWS[config.reference["id"]], config.parallel
    assert config.model.config == model_config(row["arch"])
    assert (config.batch.global_, config.batch.micro, config.batch.seq_len) == (
        row["gbs"],
        row["mbs"],
        row["seq_len"],
    )
    assert (p.tp, p.cp, p.pp, p.tp * p.cp * p.dp_shard) == (
        row["tp"],
        row["cp"],
        row["pp"],
        row["gpus"],
    )
    assert (config.reference["tflops_per_gpu"], config.reference["system"]) == (
        row["tflops_per_gpu"],
        row["system"],
    )
