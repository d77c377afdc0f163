"""Diffusion in every layout, through config, data and loop: loss, gradients and numbers of one process.

In fp64: with random weights, some gradients nearly cancel, and fp32 alone moves them by more than the tolerance.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters  # no public name for what the compiler has done

from minitrain import load_pretrained, save_pretrained
from minitrain.data.datasets import open_dataset
from minitrain.data.video.latents import save_video
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.training.build import initialize
from minitrain.training.loop import forward_backward
from minitrain.training.objectives import make_objective
from minitrain.training.packing import rows
from tests.helpers.oracle import check_close, double_precision, in_double_precision, snapshot
from tests.helpers.training import logged

SIZES = [(2, 4, 4), (1, 4, 4), (4, 4, 2), (1, 4, 8)]  # 8, 4, 8 and 8 patches


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An image-to-video model without zeros, so that no gradient hides, and 8 videos of four shapes."""
    path = tmp_path_factory.mktemp("wan")
    generator = torch.Generator().manual_seed(0)
    model = Wan(
        model_config("wan2.1-1.3b-tiny", num_layers=2, in_channels=20, image_dim=10, text_dim=12)
    )
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1 if parameter.ndim > 1 else 0.3, generator=generator)
        if parameter.ndim == 1:
            parameter.data += 1
    save_pretrained(model, path)
    (path / "videos").mkdir()
    for i in range(8):
        size = SIZES[i % 4]
        shapes = {
            "latents": (16, *size),
            "text": (1 + i % 3, 12),
            "condition": (4, *size),
            "image": (3, 10),
        }
        video = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        save_video(path / f"videos/{i}.safetensors", **video)
    return path


def tree(folder, data: dict | None = None, **settings) -> dict:
    mock = {"kind": "mock", "size": [2, 4, 4], "text_tokens": 5}
    return {
        "task": "diffusion",
        "device": "cpu",
        "model": {"path": str(folder)},
        "data": mock
        if data is None
        else {"kind": "latents", "path": str(folder / "videos"), "text_tokens": 4} | data,
        "batch": {"global": 4, "micro": 2, "seq_len": 8},
        "diffusion": {"weighting": "linear", "text_dropout": 0.5},
    } | settings


def one_process(tree: dict) -> tuple[float, dict, dict]:
    """Mean weighted error, its gradients, and the numbers for the log, by the whole batch at once."""
    config = from_dict(tree)
    model, objective = load_pretrained(config.model.path, torch.float64), make_objective(config)
    if config.lora:
        add_adapters(model, config.lora)
        initialize(model, config.seed, is_adapter)
        disturb_adapters(model)
    data, _ = open_dataset(config)
    micro = config.batch.micro
    batches = [rows(data, range(n, n + micro)) for n in range(0, config.batch.global_, micro)]
    loss = sum(objective.loss(model, batch) for batch in batches) / sum(
        map(objective.count, batches)
    )
    loss.backward()
    return loss.item(), gradients(model), logged(objective)


def one_rank(tree: dict) -> tuple[float, dict, dict]:
    """The same, as a rank of the running group finds it on the product's own path."""
    config = from_dict(tree)
    trainer = make_trainer(config, start(config))
    disturb_adapters(trainer.model)
    data, _ = open_dataset(config)
    batches = trainer.micro_batches(data, 0)
    loss = forward_backward(
        trainer.model, trainer.objective, batches, trainer.meshes, trainer.device
    )

    def sum_over(totals):
        torch.distributed.all_reduce(totals, group=trainer.meshes.batch.get_group())
        return totals

    return loss.item(), gradients(trainer.model), logged(trainer.objective, sum_over)


@torch.no_grad()
def disturb_adapters(model) -> None:
    """They start with an update of zero, whose one factor has no gradient."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.fill_(0.1)


def gradients(model) -> dict:
    return snapshot((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)


def check(pool, ranks: int, tree: dict, run=one_rank, tolerance: float = 1e-6) -> None:
    with double_precision():
        loss, expected, numbers = one_process(tree)
    assert all(gradient.norm() > 0 for gradient in expected.values()) and len(numbers) > 2
    for found_loss, found, found_numbers in pool.run(ranks, in_double_precision, run, tree):
        assert found_loss == pytest.approx(loss, rel=1e-6)
        check_close([found], expected, tolerance, "gradients")
        assert found_numbers == pytest.approx(numbers, rel=1e-6)


@pytest.mark.parametrize(
    "ranks, parallel, more",
    [
        (2, {"dp_shard": 2}, {"recompute": 2}),
        (
            4,
            {"dp_replicate": 2, "dp_shard": 2},
            {"batch": {"global": 8, "micro": 1, "seq_len": 8}},
        ),
        (2, {"tp": 2}, {}),
        (4, {"tp": 4}, {"recompute": "selective"}),
        (4, {"tp": 2, "dp_shard": 2}, {"recompute": "full"}),
        (2, {"cp": 2, "context": "allgather"}, {"recompute": "full"}),
        (4, {"cp": 4, "context": "ulysses"}, {"recompute": "selective"}),
    ],
    ids=str,
)
def test_layouts(pool, folder, ranks, parallel, more):
    check(pool, ranks, tree(folder, parallel=parallel, **more))


def test_adapters(pool, folder):
    """These stay in fp32 here too, and what ranks add up is rounded to it before."""
    lora = {"rank": 2, "targets": ["to_q", "add_k_proj", "to_out.0", "net.0.proj", "net.2"]}
    settings = tree(
        folder, parallel={"tp": 2, "cp": 2, "context": "ulysses"}, lora=lora, recompute="full"
    )
    check(pool, 4, settings, tolerance=1e-5)


@pytest.mark.parametrize(
    "ranks, parallel",
    [
        (2, {"dp_shard": 2}),
        (4, {"tp": 2, "cp": 2, "context": "allgather"}),
        (4, {"tp": 2, "cp": 2, "context": "ulysses"}),
    ],
    ids=str,
)
def test_videos_of_many_shapes(pool, folder, ranks, parallel):
    batch = {"global": 4, "micro": 2, "seq_len": 8}
    check(pool, ranks, tree(folder, {}, parallel=parallel, batch=batch))


def compiled_rank(tree: dict) -> tuple[float, dict, dict]:
    """`one_rank` with graphs that go to autograd instead of to a C++ compiler."""
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        return one_rank(tree)


def test_all_blocks_compile_as_one_graph(pool, folder):
    """With all that layouts hang into them: torch stops at a ninth version of the same code."""
    settings = tree(
        folder, parallel={"tp": 2, "cp": 2, "context": "ulysses"}, compile=True, recompute="full"
    )
    assert pool.run(4, count_graphs, settings) == [1] * 4


def count_graphs(tree: dict) -> int:
    torch.compiler.reset()
    counters.clear()
    compiled_rank(tree)
    return counters["stats"]["unique_graphs"]
