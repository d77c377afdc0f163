"""The cache of latents: every video once an epoch, one shape per micro-batch, files that are refused; packing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minitrain.data.faults.skips import Skips
from minitrain.data.video.latents import LatentCache, MockLatents, find_buckets, save_video
from minitrain.errors import InputError
from minitrain.run.config.load import from_dict
from minitrain.settings import Diffusion
from minitrain.training.flow import Noised

SHAPES = [(2, 1, 2, 4), (2, 3, 4, 4)]


@pytest.fixture
def folder(tmp_path):
    """Five videos of the first shape and four of the second, filled with their own number, texts of 1 to 4 tokens."""
    for i in range(9):
        latents = torch.full(SHAPES[i >= 5], float(i), dtype=torch.float16)
        save_video(tmp_path / f"{i}.safetensors", latents, torch.full((1 + i % 4, 6), 1.0 + i))
    return tmp_path


def config_of(path, exclude=(), **model):
    """Of a model that takes those videos, in patches of (1, 2, 2)."""
    model = {
        "name": "wan2.1-1.3b-tiny",
        "in_channels": 2,
        "out_channels": 2,
        "text_dim": 6,
    } | model
    data = {"kind": "latents", "path": path, "exclude": list(exclude), "text_tokens": 4}
    return from_dict(
        {"task": "diffusion", "model": model, "data": data, "batch": {"seq_len": 14}}
    )


def open_cache(folder: Path, group: int = 1, seed: int = 0, **model) -> LatentCache:
    return LatentCache(
        find_buckets(config_of(str(folder), **model), Skips()),
        text_tokens=4,
        group=group,
        seed=seed,
    )


def number(row: dict) -> int:
    return int(row["latents"].flatten()[0])


def test_an_epoch_is_every_video_in_groups_of_one_shape(folder):
    cache = open_cache(folder, group=2)
    assert len(cache) == 6 + 4  # five videos take three groups of two: one video comes twice
    orders = []
    for epoch in range(2):
        rows = [cache.row(n) for n in range(epoch * 10, epoch * 10 + 10)]
        orders.append([number(row) for row in rows])
        assert set(orders[-1]) == set(range(9))
        for one, other in zip(rows[::2], rows[1::2], strict=True):
            assert one["latents"].shape == other["latents"].shape
    other = open_cache(folder, group=2, seed=1)
    visits = [*orders, [number(other.row(n)) for n in range(10)]]
    groups = [sorted(sorted(order[n : n + 2]) for n in range(0, 10, 2)) for order in visits]
    assert groups[0] != groups[1] and groups[2] not in groups[:2]  # each time others are together
    kinds = [[i < 5 for i in order[::2]] for order in visits]
    assert kinds[0] != kinds[1] and kinds[2] not in kinds[:2]
    again = open_cache(folder, group=2)
    assert [number(again.row(n)) for n in reversed(range(20))] == (orders[0] + orders[1])[::-1]


def test_rows_are_fp32_and_texts_padded_with_zeros(folder):
    cache = open_cache(folder)
    for n in range(9):
        row = cache.row(n)
        i = number(row)
        assert row["latents"].dtype == torch.float32
        assert torch.equal(row["latents"], torch.full(SHAPES[i >= 5], float(i)))
        expected = torch.zeros(4, 6)
        expected[: 1 + i % 4] = 1 + i
        assert torch.equal(row["text"], expected)


def test_files_with_and_without_a_negative_text_share_buckets(folder):
    """It is padded as the text is, and takes its place where that is hidden."""
    negative = torch.full((2, 6), -1.0)
    save_video(
        folder / "9.safetensors", torch.full(SHAPES[1], 9.0), torch.ones(1, 6), negative=negative
    )
    cache = open_cache(folder)
    assert [len(bucket) for bucket in cache.buckets] == [5, 5]
    rows = [cache.row(n) for n in range(10)]
    padded = torch.tensor([-1.0, -1, 0, 0])[:, None].expand(4, 6)
    assert [number(row) for row in rows if "negative" in row] == [9]
    assert all(torch.equal(row["negative"], padded) for row in rows if "negative" in row)
    for row in map(Noised(cache, Diffusion(text_dropout=1.0), seed=0).row, range(10)):
        assert torch.equal(row["text"], padded if number(row) == 9 else torch.zeros(4, 6))


def test_image_to_video_files(tmp_path):
    more = {"condition": torch.randn(3, 1, 2, 4), "image": torch.randn(5, 7)}
    save_video(tmp_path / "a.safetensors", torch.randn(2, 1, 2, 4), torch.randn(2, 6), **more)
    row = open_cache(tmp_path, in_channels=5, image_dim=7).row(0)
    assert all(torch.equal(row[key], more[key]) for key in more)
    # micro-batches stack images
    other = {"condition": more["condition"], "image": torch.randn(4, 7)}
    save_video(tmp_path / "b.safetensors", torch.randn(2, 1, 2, 4), torch.randn(2, 6), **other)
    assert [
        len(bucket) for bucket in open_cache(tmp_path, in_channels=5, image_dim=7).buckets
    ] == [1, 1]


def test_mock_latents_are_normal_and_reproducible():
    dataset = MockLatents({"latents": (4, 2, 6, 8), "text": (5, 16)}, seed=0)
    row = dataset.row(7)
    assert row["latents"].shape == (4, 2, 6, 8) and row["text"].shape == (5, 16)
    again = MockLatents({"latents": (4, 2, 6, 8), "text": (5, 16)}, seed=0)
    assert torch.equal(row["latents"], again.row(7)["latents"])
    for other in (dataset.row(8), MockLatents({"latents": (4, 2, 6, 8)}, seed=1).row(7)):
        assert not torch.equal(row["latents"], other["latents"])
    values = torch.cat([dataset.row(n)["latents"].flatten() for n in range(20)])
    assert values.mean().abs() < 0.05 and values.std().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"latents": torch.zeros(2, 1, 2, 4)}, "tensor text is missing"),
        ({"text": torch.zeros(2, 6)}, "tensor latents is missing"),
        (
            {"latents_1x2x4_bfloat16": torch.zeros(2, 1, 2, 4)},
            "latents is missing (it holds latents_1x2x4_bfloat16; see",
        ),
        (
            {"latents": torch.zeros(1, 2, 1, 2, 4), "text": torch.zeros(2, 6)},
            "tensor latents has shape [1, 2, 1, 2, 4]",
        ),
        (
            {"latents": torch.zeros(2, 1, 2, 4), "text": torch.zeros(0, 6)},
            "shape [0, 6], expected 2 dimensions, none of",
        ),
        (
            {"latents": torch.zeros(2, 1, 2, 4), "text": torch.zeros(9, 6)},
            "text has 9 tokens, more than the 4 of a row",
        ),
        (
            {"latents": torch.zeros(2, 1, 2, 4), "text": torch.zeros(2, 5)},
            "x.safetensors: text is [2, 5], the model takes",
        ),
        (
            {
                "latents": torch.zeros(2, 1, 2, 4),
                "text": torch.zeros(2, 6),
                "image": torch.zeros(1, 1),
            },
            "image is [1, 1]",
        ),
        (
            {
                "latents": torch.zeros(2, 1, 2, 4),
                "text": torch.zeros(2, 6),
                "negative": torch.zeros(9, 6),
            },
            "negative has 9",
        ),
        (
            {
                "latents": torch.zeros(2, 1, 2, 4),
                "text": torch.zeros(2, 6),
                "negative": torch.zeros(2, 5),
            },
            "negative is [2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_refused(folder, tensors, message):
    save_file(tensors, folder / "x.safetensors")
    with pytest.raises(InputError) as error:
        open_cache(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(InputError, match="no file matches"):
        open_cache(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"pickle")
    with pytest.raises(InputError, match=r"x\.safetensors cannot be read as safetensors"):
        open_cache(tmp_path)


def test_paths_and_exclude_are_those_of_all_kinds_of_data(folder):
    path, exclude = (
        [f"{folder}/[0-3].safetensors", f"{folder}/8.safetensors"],
        ["*/2.safetensors", "*/8.*"],
    )
    buckets = find_buckets(config_of(path, exclude), Skips())
    assert [file.stem for files in buckets for file in files] == ["0", "1", "3"]
