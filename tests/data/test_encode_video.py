"""minitrain encode-video, and videos out of generate: the latents, texts and pixels of diffusers' own pipelines.

The networks are tiny ones with random weights.
"""

import shutil
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    WanVideoToVideoPipeline,
)
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from minitrain import generate, train
from minitrain.__main__ import dispatch
from minitrain.commands import generate_video
from minitrain.data.video.encoders import Encoders, read_frames, sampled, write_mp4
from minitrain.errors import InputError
from tests.helpers.videos import CAPTION, write_pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pipeline(tmp_path_factory.mktemp("wan"))


def parts(folder, dtype=torch.bfloat16) -> dict:
    return {
        "tokenizer": PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer"),
        "text_encoder": UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=dtype),
        "vae": AutoencoderKLWan.from_pretrained(folder / "vae"),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
        ),
        "transformer": None,
    }


def encode(folder, out, *more) -> None:
    """Run encode-video on a folder's videos. more: words that add options or replace these defaults."""
    defaults = {"--encoders": [str(folder)], "--size": ["32", "48"]}
    given = [
        word for name, values in defaults.items() if name not in more for word in (name, *values)
    ]
    videos = str(folder / "videos")
    dispatch(["encode-video", "--out", str(out), *given, "--device", "cpu", videos, *more])


@pytest.mark.parametrize("name", ["{}.png", "frame_{:02}.png", "a.{:04}.png"])
def test_frames_come_by_number(tmp_path, name):
    """As ffmpeg writes them, with zeros before the number or without."""
    for number in range(12):
        Image.new("RGB", (4, 2), (number, 0, 0)).save(tmp_path / name.format(number))
    (tmp_path / ".DS_Store").write_bytes(b"of a file manager")
    assert read_frames(tmp_path, [2, 4], 99)[:, 0, 0, 0].tolist() == list(range(9))


@torch.no_grad()
def test_latents_and_texts_are_those_of_diffusers(folder, tmp_path, capsys):
    encode(folder, tmp_path / "latents", "--frames", "6")
    pipeline = WanVideoToVideoPipeline(**parts(folder))
    # which would make them noisy
    pipeline.scheduler.add_noise = lambda latents, noise, timestep: latents
    for clip, count in (("one", 5), ("two", 5), ("three", 5)):
        files = sorted((folder / "videos" / clip).iterdir())[:count]
        frames = pipeline.video_processor.preprocess_video(
            [Image.open(file) for file in files], 32, 48
        )
        wanted = pipeline.prepare_latents(
            frames, 1, 16, 32, 48, torch.float32, torch.device("cpu")
        )[0]
        found = load_file(tmp_path / "latents" / f"{clip}.safetensors")
        torch.testing.assert_close(found["latents"], wanted, atol=1e-5, rtol=1e-5)
        for name, caption, tokens in (("text", CAPTION, 8), ("negative", "", 1)):
            text = WanPipeline(**parts(folder))._get_t5_prompt_embeds(
                caption, max_sequence_length=16
            )[0]
            assert found[name].shape == (tokens, 64) and not text[tokens:].any()
            torch.testing.assert_close(found[name], text[:tokens], atol=0.02, rtol=0.02)
    assert "latents holds 3 videos" in capsys.readouterr().out


def test_changed_videos_are_encoded_anew(folder, tmp_path, capsys):
    """Each change gives the files of an empty folder; without any, none is written again."""
    source = tmp_path / "wan"
    shutil.copytree(folder, source)
    clip = source / "videos" / "clip"
    shutil.rmtree(source / "videos")
    clip.mkdir(parents=True)
    for number in range(5):
        Image.new("RGB", (48, 32), (40 * number, 0, 0)).save(clip / f"{number}.png")
    caption = source / "videos" / "clip.txt"
    caption.write_text("a red a")
    file = tmp_path / "latents" / "clip.safetensors"
    encode(source, file.parent)

    def changes(*words) -> bool:
        before = file.stat().st_mtime_ns
        encode(source, file.parent, *words)
        fresh = tmp_path / "fresh"
        encode(source, fresh, *words)
        found, wanted = load_file(file), load_file(fresh / "clip.safetensors")
        shutil.rmtree(fresh)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        return file.stat().st_mtime_ns != before

    assert not changes()
    caption.write_text("a blue a")
    assert changes() and not changes()
    assert changes("--size", "48", "32") and changes("--frames", "1") and changes()
    Image.new("RGB", (48, 32), (0, 99, 0)).save(clip / "2.png")
    assert changes() and not changes()
    weights = source / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({name: x * 1.5 for name, x in load_file(weights).items()}, weights)
    assert changes() and not changes()
    # a file of an earlier version says nothing of what it was made of
    save_file(load_file(file), file)
    assert changes() and not changes()
    capsys.readouterr()
    shutil.copy(file, file.with_name("old.safetensors"))
    encode(source, file.parent)
    assert "also holds 1 others, such as old.safetensors" in capsys.readouterr().out


def test_training_on_own_videos_and_generating_from_lines_of_text(folder, tmp_path):
    encode(folder, tmp_path / "latents")
    shapes = [
        load_file(file)["latents"].shape for file in sorted((tmp_path / "latents").iterdir())
    ]
    assert shapes == [(16, 2, 4, 6), (16, 3, 4, 6), (16, 2, 4, 6)]
    (tmp_path / "empty.yaml").write_text("")
    words = f"""task=diffusion model={folder}/transformer data.kind=latents data.path={tmp_path}/latents batch.global=2
    batch.micro=1 batch.seq_len=18 steps=2 device=cpu out_dir={tmp_path}/out""".split()
    train.main(["--config", str(tmp_path / "empty.yaml"), *words])
    assert len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) == 2
    encoders = Encoders(str(folder), torch.device("cpu"))
    (tmp_path / "lines.txt").write_text(f"{CAPTION}\n\na blue a\n")
    prompts = generate_video.embed_lines(encoders, tmp_path / "lines.txt", "red", 16)
    model = generate_video.load_merged(
        str(tmp_path / "out"), None, torch.float32, torch.device("cpu")
    )
    latents = generate_video.generate(model, prompts, [2, 4, 6], steps=3, guidance=2.5, seed=4)
    noise = torch.randn(2, 16, 2, 4, 6, generator=torch.Generator().manual_seed(4))
    theirs = WanPipeline(
        **parts(folder) | {"transformer": WanTransformer3DModel.from_pretrained(tmp_path / "out")}
    )
    videos = theirs(
        [CAPTION, "a blue a"], "red", 32, 48, 5, 3, 2.5, latents=noise, max_sequence_length=16
    ).frames
    for video, wanted in zip(latents, videos, strict=True):
        pixels = encoders.decode(video).permute(0, 2, 3, 1).numpy()
        assert np.abs(pixels - wanted * 255).max() < 3


def test_frames_are_scaled_to_cover_and_cut_at_the_center(tmp_path):
    picture = np.zeros((40, 100, 3), np.uint8)
    picture[:, 50:] = 200
    Image.fromarray(picture).save(tmp_path / "0.png")
    video = read_frames(tmp_path, [80, 80], 1)
    assert video.shape == (1, 3, 80, 80)
    assert (video[..., :36] == 0).all() and (video[..., 44:] == 200).all()


def test_a_video_file_is_read_at_the_rate_asked_for(folder, tmp_path):
    pytest.importorskip("av")
    levels = torch.arange(33, dtype=torch.uint8) * 7
    write_mp4(tmp_path / "a.mp4", levels[:, None, None, None].expand(33, 3, 32, 48))
    for rate, step in ((16, 1), (8, 2), (4, 4)):
        video = read_frames(tmp_path / "a.mp4", [32, 48], 9, rate)
        assert video.shape == (9, 3, 32, 48)
        seen = video.float().mean((1, 2, 3))
        torch.testing.assert_close(seen, levels[: 9 * step : step].float(), atol=3, rtol=0)
    (tmp_path / "lines.txt").write_text("red\nblue\n")
    generate.main(
        f"""--task diffusion --model {folder}/transformer --encoders {folder} --prompts {tmp_path}/lines.txt
    --size 2 4 6 --steps 1 --device cpu --out {tmp_path}/made.mp4""".split()
    )
    for number in (1, 2):
        assert read_frames(tmp_path / f"made-{number}.mp4", [32, 48], 9).shape == (5, 3, 32, 48)


def write_frames(path, times, levels, size=(48, 32), codec="libx264", **stream_settings) -> None:
    """Write gray frames at given times, in milliseconds; without times where the container has none."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=16)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for name, value in stream_settings.items():
            setattr(stream, name, value)
        stream.codec_context.time_base = Fraction(1, 1000)
        for time, level in zip(times, levels, strict=True):
            frame = av.VideoFrame.from_ndarray(
                np.full((size[1], size[0], 3), level, np.uint8), format="rgb24"
            )
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


def levels_of(video) -> list[int]:
    return [round(level / 7) for level in video.float().mean((1, 2, 3)).tolist()]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.ts", "a.flv", "a.h264"])
@pytest.mark.parametrize("offset", [0, 5000])
def test_a_video_begins_with_its_first_frame_whatever_its_clock_says(tmp_path, name, offset):
    times = [round(i * 1000 / 16) + offset for i in range(33)]
    if name == "a.h264":
        # a raw stream, which has no times
        pytest.importorskip("av")
        levels = 7 * torch.arange(33, dtype=torch.uint8)
        write_mp4(tmp_path / name, levels[:, None, None, None].expand(33, 3, 32, 48))
    else:
        write_frames(tmp_path / name, times, [7 * i for i in range(33)])
    assert levels_of(read_frames(tmp_path / name, [32, 48], 17, 16)) == list(range(17))
    assert levels_of(read_frames(tmp_path / name, [32, 48], 9, 8)) == list(range(0, 18, 2))


@pytest.mark.parametrize("times", [[0, 2000, 4000, 6000], [0, 105, 125, 230, 250, 355, 375, 480]])
def test_the_picture_on_screen_is_taken_from_a_video_of_any_rate(tmp_path, times):
    """By brute force: the last one that came at or before each time."""
    write_frames(tmp_path / "a.mkv", times, [7 * i for i in range(len(times))])
    found = levels_of(read_frames(tmp_path / "a.mkv", [32, 48], 97, 16))
    asked = [1000 * n / 16 for n in range(1 + int(times[-1] * 16 / 1000))]
    expected = [max(i for i, time in enumerate(times) if time <= now + 1) for now in asked]
    shared = min(len(found), len(expected))
    assert found[:shared] == expected[:shared] and shared > len(expected) - 4


def test_phones_videos_are_turned_upright(tmp_path):
    """As the matrix of the track's header says; left of the coded picture is white."""
    av = pytest.importorskip("av")
    picture = np.zeros((32, 48, 3), np.uint8)
    picture[:, :24] = 255
    write_mp4(
        tmp_path / "a.mp4", torch.from_numpy(picture).movedim(-1, 0)[None].expand(5, -1, -1, -1)
    )
    raw = bytearray((tmp_path / "a.mp4").read_bytes())
    place = raw.index(b"tkhd") + 44
    # x' = h - y, y' = x: clockwise, so that the left side comes to the top
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 32 << 16, 0, 1 << 30)
    raw[place : place + 36] = matrix
    (tmp_path / "b.mp4").write_bytes(raw)
    with av.open(str(tmp_path / "b.mp4")) as file:
        assert next(file.decode(video=0)).rotation == -90
    video = read_frames(tmp_path / "b.mp4", [48, 32], 1).float()
    assert video[..., :22, :].mean() > 250 and video[..., 26:, :].mean() < 5


def test_pixels_that_are_not_square_are_made_so(tmp_path):
    write_frames(tmp_path / "a.mkv", [0], [80], sample_aspect_ratio=Fraction(2, 1))
    shown = next(sampled(tmp_path / "a.mkv", 16))
    assert shown.size == (96, 32)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_as_exif_says(tmp_path, orientation):
    random = np.random.default_rng(0).integers(255, size=(6, 12, 3)).astype(np.uint8)
    picture = Image.fromarray(random).resize((96, 48))
    exif = Image.Exif()
    exif[274] = orientation
    picture.save(tmp_path / "0.jpg", exif=exif, quality=100)
    wanted = ImageOps.exif_transpose(Image.open(tmp_path / "0.jpg"))
    found = read_frames(tmp_path, [wanted.height, wanted.width], 1)[0].movedim(0, -1)
    assert np.array_equal(found.numpy(), np.asarray(wanted))


def test_pictures_of_16_bits_keep_their_levels(tmp_path):
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "0.png")
    found = read_frames(tmp_path, [64, 64], 1)[0, 0].numpy()
    assert np.abs(found - ramp / 257).max() <= 0.5


def test_mistakes(folder, tmp_path, monkeypatch):
    for words, message in (
        (["--size", "40", "48"], r"--size \[40, 48\] must be multiples of 16"),
        (["--encoders", str(tmp_path)], "vae/ is missing"),
    ):
        with pytest.raises(InputError, match=message):
            encode(folder, tmp_path / "out", *words)
    (folder / "videos" / "four").mkdir()
    with pytest.raises(InputError, match="four.txt cannot be read"):
        encode(folder, tmp_path / "out")
    (folder / "videos" / "four.txt").write_text("a")
    with pytest.raises(InputError, match="four holds no frame"):
        encode(folder, tmp_path / "out", "--frames", "1")
    (folder / "videos" / "four" / "a.png").write_text("no picture")
    with pytest.raises(InputError, match="a.png cannot be read as a picture"):
        encode(folder, tmp_path / "out", "--frames", "1")
    with pytest.raises(InputError, match="with --encoders it is an .mp4 file"):
        generate.main(
            [
                "--task",
                "diffusion",
                "--model",
                "x",
                "--prompts",
                __file__,
                "--out",
                str(tmp_path / "a.mp4"),
            ]
        )
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[video\]'"):
        encode(folder, tmp_path / "out")
