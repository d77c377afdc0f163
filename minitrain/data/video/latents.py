"""Videos as latents with their text embeddings: a cache of safetensors files, or random ones.

Encoding videos takes an autoencoder and a text encoder, both large and frozen, so it happens once,
before training (minitrain encode-video, or a script of one's own). Each file of the cache is one video:

    latents    [channels, frames, height, width]       normalized per channel: for Wan, less latents_mean and
                                                       divided by latents_std of its autoencoder's config
    text       [tokens, text_dim]                      the real tokens only
    negative   [tokens, text_dim]                      optional: the text where training hides it
    condition  [more channels, frames, height, width]  for image-to-video models
    image      [tokens, image_dim]                     for those that see CLIP features

Where training hides a text (diffusion.text_dropout) the model sees `negative`, or zeros. Published
models are to see the embedding of an empty prompt, since that is what they are guided away from.
Wan's condition has two parts. First comes a mask of 4 channels, 1 where a frame is given: one
channel for each of the 4 frames that a latent frame stands for. The first latent frame stands for
one frame, which all 4 channels tell of. Then come the latents, normalized alike, of the video with
all frames gray that are not given.

Videos of one shape form a bucket, and a micro-batch comes from one bucket. Every file's header is
checked before training. Its values are checked (are they finite?) when they are read; with
data.on_error=skip all are read before training, to know which files to leave out.
Left out: pickled files, which could run any code.
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

from minitrain.data.files import check_unchanged, find_files, stamp_of
from minitrain.data.held_out import split_off
from minitrain.data.records import Skips
from minitrain.data.toys import load_toy
from minitrain.errors import InputError, located
from minitrain.formats.tensor_files import FLOATS, open_tensors, read_headers, write_tensors
from minitrain.hashing import nth, shuffled
from minitrain.models.wan_config import WanConfig
from minitrain.settings import Config
from minitrain.training.flow import Noised, generator
from minitrain.training.packing import ENDLESS

DIMENSIONS = {"latents": 4, "text": 2, "negative": 2, "condition": 4, "image": 2}
TEXTS = "text", "negative"
# tokens behind those of the image: a constant in diffusers' attention of WanTransformer3DModel
DIFFUSERS_TEXT = 512
# of CLIP's features of one image
IMAGE_TOKENS = 257

Row = dict[str, Tensor]
# by name; "tokens" where any number will do
Shapes = dict[str, tuple[int | str, ...]]


def open_latents(config: Config) -> tuple[Noised, Noised]:
    """Return the videos to train on, and those to validate on, under noise held fixed.

    The latter are data.validation of the files; if that is 0, or there are none, they are those to
    train on, under other noise. Raises InputError for videos that the model does not take.
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

    size: frames, height and width. "tokens": any number.
    """
    shapes = {"latents": (model.out_channels, *size), "text": (text_tokens, model.text_dim)}
    if model.in_channels > model.out_channels:
        shapes["condition"] = (model.in_channels - model.out_channels, *size)
    if model.image_dim is not None:
        shapes["image"] = (image_tokens, model.image_dim)
    return shapes


def check_shapes(found: Shapes, wanted: Shapes) -> None:
    """Raise InputError for tensors that are not the model's inputs. `negative` may be like the text."""
    if "negative" in found:
        wanted = wanted | {"negative": wanted["text"]}
    for name in wanted | found:
        given = found.get(name, ())
        taken = wanted.get(name, ())
        matching = [b in (a, "tokens") for a, b in zip(given, taken, strict=False)]
        if len(given) != len(taken) or not all(matching):
            told = [f"[{', '.join(map(str, x))}]" if x else "none" for x in (given, taken)]
            raise InputError(f"{name} is {told[0]}, the model takes {told[1]}")


class MockLatents:
    """Normal tensors of given shapes, as latents [channels, frames, height, width]: for benchmarks."""

    def __init__(self, shapes: Shapes, seed: int):
        self.shapes = shapes
        self.seed = seed

    def __len__(self) -> int:
        return ENDLESS

    def row(self, n: int) -> Row:
        random = generator(self.seed, n)
        return {key: torch.randn(shape, generator=random) for key, shape in self.shapes.items()}


class LatentCache:
    """Videos in files, by bucket, as `find_buckets` returns them.

    Row n is a pure function of (seed, n). An epoch visits the buckets in groups of `group` videos,
    in an order that differs from epoch to epoch; a bucket that `group` does not divide repeats a
    few of its videos. So rows k * group ... k * group + group - 1, one micro-batch, have the same
    shape.
    text_tokens: texts, negative ones too, are padded with zeros to it, as Wan was trained.
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
    """Return the files of data.path, by the shapes of their tensors, texts apart.

    All headers are checked. Raises InputError for a file that is not a video, or not one that the
    config's model takes.
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
    """Yield the buckets without, and with nothing but, a random `share` of all their files."""
    for side in map(set, split_off(list(chain(*buckets)), share, seed)):
        yield [[file for file in files if file in side] for files in buckets]


def read_usable(path: Path, config: Config, with_values: bool) -> Shapes:
    """Return `read_shapes` of a file that the config's model takes.

    with_values: its values must be finite, too.
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
    """Return those of the named tensors that a file holds, in fp32.

    Raises InputError for values that are not finite, or no floats.
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
    """Write one file of a cache. more: `negative`; for image-to-video `condition` and `image`."""
    tensors = {"latents": latents, "text": text, **more}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_tensors(tensors, path, metadata)
