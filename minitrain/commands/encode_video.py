"""Encode videos once, before training: minitrain encode-video --encoders FOLDER --out FOLDER VIDEOS.

VIDEOS is a folder of video files, or of folders of frames; the caption of clip.mp4, or of the frames
in clip/, is the text of clip.txt beside it. Each becomes a file of --out, for data.kind=latents.
Videos whose files are there already are left out, so that the same command continues; those whose
frames, caption or encoders have changed, or that are asked for in another size, are encoded anew.
"""

import hashlib
from argparse import Namespace
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from shlex import quote

from minitrain.data.files import stamp_of
from minitrain.errors import InputError, reading
from minitrain.run.launch import cli

SIDE = cli.positive(int, most=1 << 14)
OPTIONS = {
    "--encoders": (cli.home_path, ..., "with vae/, text_encoder/ and tokenizer/"),
    "--out": (cli.home_path, ..., "a folder"),
    "--frames": (cli.positive(int), 81, "the first ones, at most: 1, 5, 9, ..."),
    "--rate": (cli.positive(float), 16.0, "frames per second to take from video files"),
    "--device": (["auto", "cpu", "cuda"], "auto", "where to compute"),
}


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain encode-video", description=__doc__)
    parser.add_argument("--size", type=SIDE, nargs=2, default=[480, 832], help="height and width")
    parser.add_argument("videos", help="a folder")
    options = parser.parse_args(arguments)
    if any(side % 16 for side in options.size):
        raise InputError(f"--size {options.size} must be multiples of 16")
    captions = find_captions(Path(options.videos))
    from minitrain.data.video.encoders import PIPELINE_PARTS, Encoders, read_frames
    from minitrain.data.video.latents import save_video
    from minitrain.run.launch.start import pick_device

    encoders = Encoders(options.encoders, pick_device(options.device))
    of_encoders = stamps_of(Path(options.encoders, part) for part in PIPELINE_PARTS)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    # where training hides the caption
    negative = encoders.encode_text("")
    work = out / ".next"
    try:
        for path, caption in cli.bar(captions.items(), len(captions), "video"):
            file = out / f"{path.name}.safetensors"
            made_of = digest_of(path, caption, options, of_encoders)
            if stored_digest(file) != made_of:
                frames = read_frames(path, options.size, options.frames, options.rate)
                text = encoders.encode_text(caption)
                latents = encoders.encode(frames)
                save_video(work, latents, text, {"made_of": made_of}, negative=negative)
                work.replace(file)
    finally:
        work.unlink(missing_ok=True)
    print(f"{out} holds {len(captions):,} videos of {options.videos}")
    names = {f"{path.name}.safetensors" for path in captions}
    if others := {file.name for file in out.glob("*.safetensors")} - names:
        count = f"{len(others):,} others, such as {min(others)}"
        print(f"note: {out} also holds {count} (remove them if they are not to be trained on)")
    print(f"next: minitrain train --config train/wan-lora {quote(f'data.path={out}')}")


def digest_of(path: Path, caption: str, options: Namespace, of_encoders: list) -> str:
    """Return a digest of all that decides what a video's file holds."""
    rate = None if path.is_dir() else options.rate
    made_of = caption, stamps_of([path]), options.size, options.frames, rate, of_encoders
    return hashlib.sha256(repr(made_of).encode()).hexdigest()


def stored_digest(file: Path) -> str | None:
    """Return the digest that a file was written with, None if there is none."""
    from minitrain.formats.tensor_files import open_tensors

    with suppress(InputError), open_tensors(file) as video:
        return (video.metadata() or {}).get("made_of")
    return None


def stamps_of(paths: Iterable[Path]) -> list[tuple]:
    """Return names, sizes and times of the files that paths are, or that lie below them."""
    files = []
    for path in paths:
        below = sorted(path.rglob("*")) if path.is_dir() else [path]
        files += [(file.name, *stamp_of(file)) for file in below if file.is_file()]
    return files


def find_captions(folder: Path) -> dict[Path, str]:
    """Return the caption of each video, by its path."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder (of videos, each with a caption)")
    captions = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".txt" or path.name.startswith("."):
            continue
        text = folder / f"{path.name if path.is_dir() else path.stem}.txt"
        with reading(text):
            captions[path] = text.read_text(encoding="utf-8")
    if not captions:
        raise InputError(f"{folder} holds no videos")
    return captions
