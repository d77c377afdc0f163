"""Datasets of latents of videos with their text embeddings: from safetensors files, or random.

Encoding videos takes an autoencoder and a text encoder, both large and frozen, so it is done once
before training, by `minitrain encode-video` or your own script. Each file holds one video:

    latents    [channels, frames, height, width]       normalized per channel: for Wan, less latents_mean and
                                                       divided by latents_std of its autoencoder's config
    text       [tokens, text_dim]                      without padding
    negative   [tokens, text_dim]                      optional: replaces the text where it is dropped
    condition  [more channels, frames, height, width]  for image-to-video models
    image      [tokens, image_dim]                     for models that use CLIP features

Where training drops a text (diffusion.text_dropout), the model gets `negative`, or zeros without it.
For published models it should be the embedding of an empty prompt, which guidance uses with them.
Wan's condition has two parts. First comes a mask of 4 channels, one for each of the 4 frames that a
latent frame stands for; it is 1 where a frame is given. The first latent frame stands for a single
frame, for which all 4 channels are set. Then come the latents, normalized alike, of the video with
gray frames in place of those that are not given.

Videos of one shape form a bucket, and a micro-batch comes from one bucket. The headers of all files
are checked before training. Values must be finite, which is checked when a file is read; with
data.on_error=skip, all files are read before training, to find those to leave out. Pickled files are
not supported, because they could run any code.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.data.faults.skips import Skips
from minitrain.data.files import check_unchanged, find_files, stamp_of
from minitrain.data.held_out import split_off
from minitrain.data.toys import load_toy
from minitrain.errors import InputError, located
from minitrain.formats.tensor_files import FLOATS, open_tensors, read_headers, write_tensors
from minitrain.hashing import nth, shuffled
from minitrain.models.wan_config import WanConfig
from minitrain.settings import Config
from minitrain.training.flow import Noised, generator
from minitrain.training.packing import ENDLESS

# name of a tensor -> number of its dimensions
DIMENSIONS = {"latents": 4, "text": 2, "negative": 2, "condition": 4, "image": 2}
TEXTS = "text", "negative"
# diffusers' WanTransformer3DModel assumes this number of text tokens in image-to-video models
DIFFUSERS_TEXT = 512
# tokens of CLIP's features of an image
IMAGE_TOKENS = 257

Row = dict[str, Tensor]
# name of a tensor -> shape, with "tokens" for any number
Shapes = dict[str, tuple[int | str, ...]]


def open_latents(config: Config) -> tuple[Noised, Noised]:
    """Return the datasets to train on and to validate on; the latter has fixed noise.

    data.validation is the share of files to validate on. If it is 0, or there are no files, the
    training videos are validated on, under other noise. Raises InputError for videos that do not fit
    the model.
    """
    data = config.data
    model = config.model.config
    seed = config.seed
    noised = partial(Noised, settings=config.diffusion, seed=seed)
    if data.kind != "latents":
        shapes = model_shapes(model, data.size, data.text_tokens, IMAGE_TOKENS)
        videos = MockLatents(shapes, seed) if data.kind == "mock" else load_toy(data.kind)(seed)
        shapes = {name: tuple(x.shape) for name, x in videos.row(0).items()}
        with located(f"data.kind={data.kind}"):
            check_fit(shapes, config)
        return noised(videos), noised(videos, held_out=True)
    skips = Skips(data.on_error == "skip")
    buckets = find_buckets(config, skips)
    held = buckets
    if data.validation:
        buckets, held = split_buckets(buckets, data.validation, seed)
    cache = partial(
        LatentCache, text_tokens=data.text_tokens, group=config.batch.micro, seed=seed
    )
    train = noised(cache(buckets))
    held = noised(cache(held), held_out=True)
    notes = [skips.note]
    if model.image_dim is not None and data.text_tokens != DIFFUSERS_TEXT:
        notes.append(
            f"data.text_tokens={data.text_tokens}: diffusers splits what an image-to-video model sees at "
            f"{DIFFUSERS_TEXT} tokens of text, whatever it was trained on (use {DIFFUSERS_TEXT})"
        )
    train.about = "; ".join(filter(None, notes))
    return train, held


def check_fit(shapes: Shapes, config: Config) -> None:
    """Raise InputError if the config's model cannot train on such videos, in its layout."""
    model = config.model.config
    parallel = config.parallel
    size = shapes["latents"][1:]
    check_shapes(shapes, model_shapes(model, size))
    if any(n % patch for n, patch in zip(size, model.patch_size, strict=True)):
        patches = list(model.patch_size)
        raise InputError(f"latents {list(size)} do not divide into patches {patches}")
    tokens = math.prod(size) // math.prod(model.patch_size)
    if tokens > config.batch.seq_len:
        raise InputError(f"{tokens} patches are more than batch.seq_len={config.batch.seq_len}")
    if tokens % (parallel.cp * parallel.tp):
        raise InputError(
            f"{tokens} patches do not divide by parallel.cp={parallel.cp} x tp={parallel.tp}"
        )


def model_shapes(
    model: WanConfig,
    size: Sequence[int],
    text_tokens: int | str = "tokens",
    image_tokens: int | str = "tokens",
) -> Shapes:
    """Return the shapes of a model's inputs for one video.

    size: frames, height and width of latents. "tokens": any number.
    """
    shapes = {"latents": (model.out_channels, *size), "text": (text_tokens, model.text_dim)}
    if model.in_channels > model.out_channels:
        shapes["condition"] = (model.in_channels - model.out_channels, *size)
    if model.image_dim is not None:
        shapes["image"] = (image_tokens, model.image_dim)
    return shapes


def check_shapes(found: Shapes, wanted: Shapes) -> None:
    """Raise InputError unless tensors have the shapes of a model's inputs; `negative` is optional."""
    if "negative" in found:
        wanted = wanted | {"negative": wanted["text"]}
    for name in wanted | found:
        given = found.get(name, ())
        taken = wanted.get(name, ())
        matching = [b in (a, "tokens") for a, b in zip(given, taken, strict=False)]
        if len(given) != len(taken) or not all(matching):
            own, model = (f"[{', '.join(map(str, x))}]" if x else "none" for x in (given, taken))
            raise InputError(f"{name} is {own}, the model takes {model}")


class MockLatents:
    """Normally distributed tensors of given shapes, for benchmarks."""

    def __init__(self, shapes: Shapes, seed: int):
        self.shapes = shapes
        self.seed = seed

    def __len__(self) -> int:
        return ENDLESS

    def row(self, n: int) -> Row:
        random = generator(self.seed, n)
        return {key: torch.randn(shape, generator=random) for key, shape in self.shapes.items()}


class LatentCache:
    """A dataset of videos in files. buckets: see `find_buckets`.

    Row n is a pure function of (seed, n). Rows k * group to (k + 1) * group - 1, a micro-batch, come
    from one bucket and so have the same shape. An epoch visits all groups in an order of its own; if
    `group` does not divide a bucket, some of its videos are repeated.
    text_tokens: texts and negative texts are padded with zeros to this length, as in Wan's training.
    """

    def __init__(self, buckets: list[list[Path]], text_tokens: int, group: int, seed: int):
        self.buckets = buckets
        self.text_tokens = text_tokens
        self.group = group
        self.seed = seed
        self.stamps = {file: stamp_of(file) for files in buckets for file in files}
        self.firsts = list(accumulate((-(-len(files) // group) for files in buckets), initial=0))

    def __len__(self) -> int:
        return self.firsts[-1] * self.group

    def row(self, n: int) -> Row:
        """Return fp32 latents, text [text_tokens, text_dim], and the file's other tensors."""
        path = self.file(n)
        check_unchanged(path, path, self.stamps[path])
        row = read_video(path)
        for name in TEXTS:
            if name in row:
                missing = self.text_tokens - len(row[name])
                row[name] = F.pad(row[name], (0, 0, 0, missing))
        return row

    def origin(self, n: int) -> str:
        return str(self.file(n))

    def file(self, n: int) -> Path:
        """Return the file of row n."""
        group, place = divmod(int(n), self.group)
        epoch, group = nth(group, self.firsts[-1], self.seed)
        bucket = bisect_right(self.firsts, group) - 1
        files = self.buckets[bucket]
        place = ((group - self.firsts[bucket]) * self.group + place) % len(files)
        return files[shuffled(place, len(files), self.seed, epoch, bucket)]


def find_buckets(config: Config, skips: Skips) -> list[list[Path]]:
    """Return the files of data.path, grouped by the shapes of their tensors other than texts.

    Checks all headers. Raises InputError for a file that is not a video, or does not fit the model.
    """
    buckets: dict[tuple, list[Path]] = {}
    for path in find_files(config.data):
        shapes = skips.read(read_usable, path, config, skips.allowed)
        if shapes is not None:
            key = tuple(item for item in shapes.items() if item[0] not in TEXTS)
            buckets.setdefault(key, []).append(path)
    if not buckets:
        raise InputError(f"data.path={config.data.path!r} holds no usable videos{skips.aside}")
    return [files for _, files in sorted(buckets.items())]


def split_buckets(
    buckets: list[list[Path]], share: float, seed: int
) -> Iterator[list[list[Path]]]:
    """Yield the buckets without a random `share` of all files, then the buckets of only this share."""
    for side in map(set, split_off(list(chain(*buckets)), share, seed)):
        yield [[file for file in files if file in side] for files in buckets]


def read_usable(path: Path, config: Config, with_values: bool) -> Shapes:
    """Return the shapes of a file. Raises InputError if it does not fit the config's model.

    with_values: also check that all values are finite.
    """
    shapes = read_shapes(path)
    with located(path):
        limit = config.data.text_tokens
        for name in TEXTS:
            tokens = shapes[name][0] if name in shapes else 0
            if tokens > limit:
                raise InputError(f"{name} has {tokens} tokens, more than the {limit} of a row")
        check_fit(shapes, config)
    if with_values:
        read_video(path)
    return shapes


def read_shapes(path: Path) -> Shapes:
    """Return the shapes of a file's tensors, from its header.

    Raises InputError for a file that is not a video.
    """
    headers = read_headers(path)
    for name in ("latents", "text"):
        if name not in headers:
            held = ", ".join(list(headers)[:3]) or "nothing"
            raise InputError(
                f"{path}: tensor {name} is missing (it holds {held}; see minitrain/data/video/latents.py)"
            )
    shapes = {}
    for name, dimensions in DIMENSIONS.items():
        if name in headers:
            shape, dtype = headers[name]
            if len(shape) != dimensions or 0 in shape:
                expected = f"expected {dimensions} dimensions, none of them 0"
                raise InputError(f"{path}: tensor {name} has shape {list(shape)}, {expected}")
            check_dtype(path, name, dtype)
            shapes[name] = shape
    return shapes


def check_dtype(path: Path, name: str, dtype: str) -> None:
    if dtype not in FLOATS:
        known = ", ".join(FLOATS)
        raise InputError(f"{path}: tensor {name} is stored as {dtype}, not one of {known}")


def read_video(path: Path, names: Iterable[str] = tuple(DIMENSIONS)) -> Row:
    """Return the named tensors of a file, as far as it has them, in fp32.

    Raises InputError for values that are not floats, or not finite.
    """
    video = {}
    with open_tensors(path) as file:
        for name in [name for name in names if name in file.keys()]:  # noqa: SIM118
            check_dtype(path, name, file.get_slice(name).get_dtype())
            video[name] = file.get_tensor(name).float()
            if not video[name].isfinite().all():
                raise InputError(f"{path}: tensor {name} holds values that are not finite")
    return video


def save_video(
    path: str | Path,
    latents: Tensor,
    text: Tensor,
    metadata: dict[str, str] | None = None,
    **more: Tensor,
) -> None:
    """Write the file of one video. more: `negative`; for image-to-video, `condition` and `image`."""
    tensors = {"latents": latents, "text": text, **more}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_tensors(tensors, path, metadata)
