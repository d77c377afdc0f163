"""The toy world: what is drawn, what the components keep, how it judges, and PNG files that others can read."""

import numpy as np
import pytest
import torch
from PIL import Image

from minitrain.examples.shapes import (
    COLORS,
    DIRECTIONS,
    SPEED,
    Clip,
    ShapesWorld,
    all_clips,
    all_prompts,
    embed_text,
    render,
    write_sheet,
)


@pytest.fixture(scope="module")
def world():
    return ShapesWorld(seed=0)


def test_clips_show_their_words():
    """All pixels are shades of the color; the center of mass moves SPEED pixels a frame, and nothing is cut off."""
    for clip in all_clips():
        video = render(clip)
        assert video.shape == (4, 16, 16, 3) and video.min() == 0 and video.max() <= 1
        color = np.array(COLORS[clip.words[0]])
        assert (
            np.allclose(video / color, (video / color)[..., :1], atol=1e-5) and video.max() > 0.5
        )
        mass = video.sum(-1)
        assert np.allclose(mass.sum((1, 2)), mass[0].sum(), rtol=0.15)
        pixels = np.arange(16) + 0.5
        x, y = ((mass.sum(axis) * pixels).sum(1) / mass.sum((1, 2)) for axis in (1, 2))
        vx, vy = DIRECTIONS[clip.words[2]]
        assert np.allclose(x, clip.x + vx * SPEED * np.arange(4), atol=0.3)
        assert np.allclose(y, clip.y + vy * SPEED * np.arange(4), atol=0.3)


def test_shapes_differ_where_they_should():
    """A square is filled; a ring is empty in the middle, a cross between its arms."""
    for shape, middle, diagonal in (
        ("square", True, True),
        ("ring", False, True),
        ("cross", True, False),
    ):
        frame = render(Clip(("red", shape, "left"), 8.5, 8.5))[0, :, :, 0]
        assert (frame[8, 8] > 0.5) == middle
        assert (frame[10, 10] > 0.5) == diagonal


def test_latents_have_unit_variance_and_decode_to_the_clips(world):
    assert world.latents.shape == (432, 8, 4, 4, 4)
    deviations = world.latents.transpose(0, 1).flatten(1).std(1)
    torch.testing.assert_close(deviations, torch.ones(8), atol=1e-3, rtol=0)
    patches = torch.nn.functional.unfold(
        world.videos.flatten(0, 1).permute(0, 3, 1, 2), 4, stride=4
    )
    values = torch.linalg.svdvals(
        (patches - patches.mean((0, 2), keepdim=True)).transpose(1, 2).flatten(0, 1)
    )
    left_out = values[8:].square().sum() / world.videos.numel()
    error = (world.decode(world.latents) - world.videos).square().mean()
    assert 0.5 * left_out < error <= left_out  # clipping to 0 to 1 brings some of it back


def test_every_clip_is_judged_by_its_own_words(world):
    prompts = [clip.words for clip in world.clips]
    assert world.judge(world.decode(world.latents), prompts) == {
        "color": 1,
        "shape": 1,
        "direction": 1,
    }
    wrong = [(color, shape, "left") for color, shape, _ in prompts]
    assert world.judge(world.videos, wrong) == {"color": 1, "shape": 1, "direction": 0.25}


def test_an_epoch_is_every_clip_with_its_text(world):
    rows = [world.row(n) for n in range(432, 864)]
    order = [(world.latents == row["latents"]).flatten(1).all(1).nonzero().item() for row in rows]
    assert sorted(order) == list(range(432)) and order != sorted(order)
    for index, row in zip(order[:20], rows, strict=False):
        assert torch.equal(row["text"], embed_text(world.clips[index].words))
    assert len(torch.stack([embed_text(words) for words in all_prompts()]).unique(dim=0)) == 48


def test_sheet_is_a_grid_and_an_animation_that_others_read(world, tmp_path):
    prompts = all_prompts()
    assert len(prompts) == 48
    write_sheet(tmp_path / "sheet.png", world.videos[:48], [" ".join(words) for words in prompts])
    picture = Image.open(tmp_path / "sheet.png")
    moving = Image.open(tmp_path / "sheet.apng")
    assert moving.n_frames == 4
    frames = []
    for number in range(4):
        moving.seek(number)
        frames.append(np.asarray(moving.convert("RGB")))
    picture = np.asarray(picture)
    for pixels in (picture, *frames):
        assert pixels.shape[0] <= 900 and pixels.shape[1] <= 1200
    # cells of 10 rows and 5 columns
    high, wide = picture.shape[0] // 10, picture.shape[1] // 5
    tall, broad = frames[0].shape[0] // 10, frames[0].shape[1] // 5
    for video in (0, 4, 5, 47):
        row, column = divmod(video, 5)
        for frame in range(4):
            wanted = (world.videos[video, frame] * 255).byte().numpy()
            left = wide * column + 51 * frame
            assert np.array_equal(picture[high * row :, left:][:48:3, :48:3], wanted)
            assert np.array_equal(
                frames[frame][tall * row :, broad * column :][:64:4, :64:4], wanted
            )
    # a caption stands below each
    assert picture[high - 13 : high, :wide].any() and not picture[9 * high :, 3 * wide :].any()
