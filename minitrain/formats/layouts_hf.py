"""Map parameters to stored tensors: names, stacked or separate experts, FP8, MXFP4.

A parameter is filled from one or several `Piece`s. A piece is a region of the parameter and its source: a stored tensor,
or one expert of a stored stack. A process reads only the part of a piece that it owns. Saving is the reverse,
unquantized or in FP8: one parameter becomes one or several stored tensors.

    ours                            Mixtral                        Qwen3, DeepSeek, Kimi               GPT-OSS
    mlp.gate                        block_sparse_moe.gate          mlp.gate                            mlp.router
    mlp.experts.gate_up_proj [e]    block_sparse_moe.experts.e.w1  mlp.experts.e.gate_proj.weight      mlp.experts.gate_up_proj
        gate and up rows alternate  ... and .w3, up                ... and .up_proj                    transposed
    mlp.experts.down_proj [e]       ....w2                         ....down_proj                       transposed
"""  # noqa: E501

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count, zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.formats.families import FAMILIES
from minitrain.formats.family import PLAIN, Stacks
from minitrain.formats.tensor_files import (
    FLOATS,
    StoredTensor,
    open_tensors,
    stored_tensors,
    weight_files,
)
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.frozen import Frozen
from minitrain.models.mamba import by_part
from minitrain.models.quantize import E4M3, join, quantize, split, spread
from minitrain.models.wan_config import WanConfig
from minitrain.parallel.shards import Slices
from minitrain.settings import Config as Settings

# the output head, which some files hold although it is tied to the embedding
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SCORE = "score.weight"
FP8_BLOCK = 128
FP8_SCALE = "_scale_inv"
MXFP4_BLOCK = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without sign
# those of a block's matrices that such files have in FP8: not its router, nor `eh_proj`
IN_FP8 = re.compile(r".*\.layers\.\d+\.(?!eh_proj).*(_proj(_with_mqa)?|\.w[123])\.weight")
FP8_SETTINGS = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
# key and slices of a stored tensor -> that part of it
Fetch = Callable[[str, Slices], Tensor]
Stored = dict[str, StoredTensor]
Shape = tuple[int, ...]
Config = DecoderConfig | WanConfig


class Piece(NamedTuple):
    """A region of a parameter, and how to read it."""

    # one slice per dimension of the parameter; a slice may have a step
    region: Slices
    # stored tensor -> its shape and possible dtypes
    needs: dict
    # read(fetch, slices): return part of the region. slices: relative to its start, without steps
    read: Callable[[Fetch, Slices], Tensor]
    # of a matrix in FP8: pieces of its bytes, and of its scales for each row and 128 columns
    in_fp8: "tuple[Piece, Piece] | None" = None


def full(shape: Shape) -> Slices:
    """Return the slices of a whole tensor."""
    return tuple(slice(0, n) for n in shape)


def pieces(name: str, shape: Shape, config: Config, stored: Stored) -> list[Piece]:
    """Return the pieces that make up the parameter `name`."""
    family = FAMILIES.get(config.family, PLAIN)
    if family.as_ours:
        return [stored_part(name, shape, full(shape))]
    prefix, _, last = name.rpartition(".experts.")
    if not prefix:
        key = family.stored_name(name, config.num_layers)
        if name in stored and any(part in name for part in family.also_ours):
            key = name
        if order := row_order(name, config):
            return [
                stored_part(key, shape, (slice(ours, ours + n), *full(shape[1:])), (theirs,))
                for ours, theirs, n in moved_rows(*order)
            ]
        part, count = family.fused_part(name)
        if count > 1 or family.transposed(name):
            rows, *columns = shape
            whole = (count * rows, *columns)
            starts, transposed = (part * rows,), family.transposed(name)
            return [stored_part(key, whole, full(shape), starts, transposed)]
        return [matrix(key, shape, full(shape), stored)]
    if last.endswith("_bias"):
        return [matrix(name, shape, full(shape), stored)]
    experts, rows, columns = shape
    found = []
    for expert in range(experts):
        whole = (slice(expert, expert + 1), *full((rows, columns)))
        if name + "_blocks" in stored:
            found.append(mxfp4_expert(name, shape, whole))
        else:
            found += expert_pieces(name, shape, expert, config, stored)
    return found


def expert_pieces(
    name: str, shape: Shape, expert: int, config: Config, stored: Stored
) -> Iterator[Piece]:
    """Yield the pieces of one expert in a stack: gate's rows and up's take turns in ours.

    On the hub every expert has matrices of its own, or the family has `stacks`. transformers 5 has
    stacks too, where gate's rows come first, and saves them with save_original_format=False.
    """
    _, rows, columns = shape
    family = FAMILIES.get(config.family, PLAIN)
    stacks = family.stacks or (Stacks() if name in stored else None)
    parts = expert_parts(name.rpartition(".")[2])
    if stacks and stacks.alternating:
        parts = parts[:1]
    size = rows // len(parts)
    for i, part in enumerate(parts):
        region = (slice(expert, expert + 1), slice(i, rows, len(parts)), slice(0, columns))
        if stacks:
            key = family.stored_name(name, config.num_layers) if family.stacks else name
            yield stored_part(key, shape, region, (expert, i * size), stacks.transposed)
        else:
            yield matrix(expert_key(name, config, expert, part), (size, columns), region, stored)


def row_order(name: str, config: Config) -> tuple[list[int], int] | None:
    """Return the parts' rows and the groups of a weight that files have part by part; None for others.

    We have it group by group: see `by_group`.
    """
    if ".mamba.in_proj." in name:
        return config.mamba.projected, config.mamba.groups
    if ".mamba.conv1d." in name:
        return config.mamba.convolved, config.mamba.groups
    if ".linear_attn.in_proj_qkv." in name or ".linear_attn.conv1d." in name:
        return config.delta.convolved, config.delta.groups
    return None


def moved_rows(parts: list[int], groups: int) -> Iterator[tuple[int, int, int]]:
    """Yield how `by_group` moves ranges of rows: (first row after it, before it, count)."""
    after = 0
    for group in range(groups):
        for i, part in enumerate(parts):
            size = part // groups
            yield after, sum(parts[:i]) + group * size, size
            after += size


def expert_parts(name: str) -> list[str]:
    """Return the names of an expert's matrices that one of our stacks holds."""
    return ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]


def expert_key(name: str, config: Config, expert: int, part: str) -> str:
    """Return the stored name of an expert's matrix.

    layers.0.mlp.experts.down_proj, expert 3 -> layers.0.mlp.experts.3.down_proj.weight, or
    Mixtral's spelling.
    """
    family = FAMILIES.get(config.family, PLAIN)
    part = family.expert_matrices.get(part, part)
    ours = f"{name.rpartition('.')[0]}.{expert}.{part}.weight"
    return family.stored_name(ours, config.num_layers)


def all_to_stored(
    tensors: Iterable[tuple[str, Tensor]], config: DecoderConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of our named parameters; those that are parts of one once all have come."""
    family = FAMILIES[config.family]
    waiting = {}
    for name, tensor in tensors:
        part, count = family.fused_part(name)
        if count > 1:
            parts = waiting.setdefault(family.stored_name(name, config.num_layers), {})
            parts[part] = tensor
            if len(parts) < count:
                continue
            tensor = torch.cat([parts.pop(i) for i in range(count)])
        yield from to_stored(name, tensor, config)


def to_stored(name: str, tensor: Tensor, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a whole parameter, or of all those that are stored as one."""
    prefix, _, last = name.rpartition(".experts.")
    family = FAMILIES[config.family]
    if family.as_ours:
        yield name, tensor
    elif order := row_order(name, config):
        key = family.stored_name(name, config.num_layers)
        yield key, by_part(tensor, *order)
    elif not prefix:
        stored = tensor.T if family.transposed(name) else tensor
        yield family.stored_name(name, config.num_layers), stored
        for copy in (key for key, ours in copies(config).items() if ours == name):
            # a file's tensors must not share memory
            yield copy, tensor.clone()
    elif family.stacks:
        if last == "gate_up_proj" and not family.stacks.alternating:
            tensor = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
        swapped = family.stacks.transposed and not last.endswith("_bias")
        stored = tensor.transpose(1, 2) if swapped else tensor
        yield family.stored_name(name, config.num_layers), stored
    else:
        parts = expert_parts(last)
        for expert, weights in enumerate(tensor):
            for i, part in enumerate(parts):
                yield expert_key(name, config, expert, part), weights[i :: len(parts)]


def copies(config: DecoderConfig) -> dict[str, str]:
    """Return the copies that layers of multi-token prediction have in files: stored name -> ours."""
    layers = config.all_layers[config.num_layers :]
    copied = FAMILIES.get(config.family, PLAIN).copied
    ours = {TIED_HEAD: EMBEDDING} if config.tie_word_embeddings else {}
    return {
        key.format(layer): ours.get(name, name)
        for name, key in copied.items()
        for layer in layers
    }


def held_depths(config: DecoderConfig, stored: Stored) -> int:
    """Return the number of depths of multi-token prediction that are stored."""
    family = FAMILIES.get(config.family, PLAIN)
    layers = config.num_layers
    names = (f"model.layers.{layers + depth}.eh_proj.weight" for depth in count())
    return next(i for i, x in enumerate(names) if family.stored_name(x, layers) not in stored)


def is_ignored(key: str, config: Config) -> bool:
    """Return True for a stored tensor that is not needed.

    These are the tensors that a family ignores, old tables of rotary embeddings, a tied head, and a
    norm of Wan's image-to-video models that diffusers does not use either.
    """
    if isinstance(config, WanConfig):
        return key.endswith(".attn2.norm_added_q.weight")
    if key == TIED_HEAD:
        return config.tie_word_embeddings or config.num_labels > 0
    family = FAMILIES[config.family]
    depth = family.depth_of(key, config.num_layers) if family.depth_of else None
    if depth is not None:
        return depth >= config.num_nextn_predict_layers or key in copies(config)
    patterns = r".*\.rotary_emb\.inv_freq", family.ignored
    return any(re.fullmatch(pattern, key) for pattern in patterns)


# --- from pieces into parameters


def fill(local: Tensor, slices: Slices, piece: Piece, fetch: Fetch) -> None:
    """Copy the part of a piece that falls into `local`. slices: `local`'s place in the parameter."""
    inside = []
    wanted = []
    for own, held in zip(slices, piece.region, strict=True):
        step = held.step or 1
        stop = min(own.stop, held.stop)
        # the piece's first row within `local`, and the one after its last
        first = max(0, -((held.start - own.start) // step))
        end = -((held.start - stop) // step)
        if first >= end:
            return
        wanted.append(slice(first, end))
        inside.append(slice(held.start + first * step - own.start, stop - own.start, step))
    local[tuple(inside)].copy_(piece.read(fetch, tuple(wanted)))


def fill_frozen(
    frozen: Frozen, shards: list[tuple[Tensor, Slices]], sources: list[Piece], fetch: Fetch
) -> None:
    """Fill this rank's shards of what stores a frozen matrix, one expert after the other.

    FP8 of files stays as it is where the store is FP8. Else every rank reads and rounds all of a
    matrix, so that shards have the numbers of one process.
    """
    as_stored = [piece.in_fp8 for piece in sources]
    if frozen.store == "fp8" and all(as_stored):
        for (local, slices), pieces in zip(shards, zip(*as_stored, strict=True), strict=True):
            for piece in pieces:
                fill(local, slices, piece, fetch)
        return
    everything = tuple(slice(0, n) for n in frozen.shape)
    # a stack's shards have the same experts
    (local, (first, *_)), *_ = shards
    stack = len(frozen.shape) == 3
    for expert in range(first.start, first.stop) if stack else [None]:
        where = (slice(expert, expert + 1), *everything[1:]) if stack else everything
        wide = torch.empty([s.stop - s.start for s in where], device=local.device)
        for piece in sources:
            if not stack or piece.region[0].start in (expert, 0):
                fill(wide, where, piece, fetch)
        parts = frozen.parts(wide).values()
        for (local, slices), part in zip(shards, parts, strict=True):
            if stack:
                local[expert - first.start].copy_(part[0][slices[1:]])
            else:
                local.copy_(part[slices])


# --- single pieces


def matrix(key: str, shape: Shape, region: Slices, stored: Stored) -> Piece:
    """Return the piece of a whole stored tensor, which may be in FP8."""
    if key not in stored or stored[key].dtype != "F8_E4M3":
        return stored_part(key, shape, region)
    scales = tuple(-(-n // FP8_BLOCK) for n in shape)
    needs = {key: (shape, ("F8_E4M3",)), key + FP8_SCALE: (scales, FLOATS)}
    blocks = (*region[:-1], slice(0, scales[-1]))
    in_fp8 = (
        Piece(region, needs, lambda fetch, where: fetch(key, where[-2:]).view(torch.uint8)),
        Piece(blocks, needs, partial(read_scales, key)),
    )
    return Piece(region, needs, partial(read_fp8, key), in_fp8)


def stored_part(
    key: str, shape: Shape, region: Slices, starts: Shape = (), transposed: bool = False
) -> Piece:
    """Return the piece of a region that begins at `starts` (default: 0) in stored tensor `key`.

    shape: of the stored tensor; if its last two dimensions are transposed, the shape before that. The
    region may have one more dimension in front.
    """

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        places = zip_longest(slices[-len(shape) :], starts, fillvalue=0)
        where = tuple(slice(first + part.start, first + part.stop) for part, first in places)
        return fetch(key, swap(where)).mT if transposed else fetch(key, where)

    return Piece(region, {key: (swap(shape) if transposed else shape, FLOATS)}, read)


def swap(dimensions: tuple) -> tuple:
    """Swap the last two of a tuple's items."""
    return (*dimensions[:-2], dimensions[-1], dimensions[-2])


def read_fp8(key: str, fetch: Fetch, slices: Slices) -> Tensor:
    """Return the values in fp32: each block of 128 x 128 times its own scale (DeepSeek-V3)."""
    rows, columns = slices[-2:]
    scale = read_scales(key, fetch, (rows, slice(0, None)))
    scale = scale[:, torch.arange(columns.start, columns.stop) // FP8_BLOCK]
    return fetch(key, (rows, columns)).float() * scale


def read_scales(key: str, fetch: Fetch, slices: Slices) -> Tensor:
    """Return the scales of rows and of blocks of columns, fp32 [rows, columns / 128]."""
    rows, blocks = slices[-2:]
    scale = fetch(key + FP8_SCALE, ()).float()
    return scale[torch.arange(rows.start, rows.stop) // FP8_BLOCK, blocks]


def write_fp8(key: str, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a matrix [out, in] in FP8 and the scales of its blocks: what `read_fp8` reads.

    Scales are powers of two, so fp8.form=block multiplies these very numbers. But a block that
    `read_fp8` made, with DeepSeek's scale of max / 448, becomes the same bytes again.
    """
    out, into = matrix.shape
    square = FP8_BLOCK, FP8_BLOCK
    padded = F.pad(matrix.float(), (0, -into % FP8_BLOCK, 0, -out % FP8_BLOCK))
    x8, inverse = quantize(padded, E4M3, square)
    # [out / 128, 128, in / 128, 128]
    parts = split(padded, square)
    chosen = split(x8.float(), square)
    nearest = parts.abs().amax((-3, -1)) / torch.finfo(E4M3).max
    # 448 times the scale was rounded: it may be one of the neighbors, too
    for toward in (nearest, torch.zeros_like(nearest), torch.full_like(nearest, torch.inf)):
        scale = nearest.nextafter(toward)
        numbers = (parts / spread(scale)).to(E4M3).float()
        # [out / 128, in / 128]
        same = (numbers * spread(scale) == parts).all(-1).all(-2) & (scale > 0)
        chosen = torch.where(spread(same), numbers, chosen)
        inverse = torch.where(same, scale, inverse)
    yield key, join(chosen).to(E4M3)[:out, :into]
    yield key + FP8_SCALE, inverse


def fp8_note(config: Settings) -> list[str]:
    """Return a note for the user if numbers of FP8 files are not multiplied as they are, or nothing."""
    path = config.model.path
    stored = stored_tensors(weight_files(path)) if path else {}
    scales = [key for key in stored if key.endswith(FP8_SCALE)]
    lora = config.lora
    if not scales or (lora and lora.base == "fp8"):
        return []
    note = f"note: model.path={path} has weights in FP8"
    if lora:
        return [f"{note}, which are stored as lora.base={lora.base} (fp8 keeps them as they are)"]
    with open_tensors(stored[scales[0]].file) as file:
        exponents = file.get_tensor(scales[0]).float().log2()
    if config.precision != "fp8" or (
        config.fp8.form == "block" and torch.equal(exponents, exponents.round())
    ):
        return []
    why = f"fp8.form={config.fp8.form} has other scales"
    if config.fp8.form == "block":
        why = "trained weights have scales that are powers of two, theirs are others"
    return [f"{note}, which are rounded anew: {why}"]


def mxfp4_expert(name: str, shape: Shape, region: Slices) -> Piece:
    """Return the piece of one expert in GPT-OSS's MXFP4. All of its rows are read, as fp32.

    32 values share a power of two as their scale. A byte holds two values, the first one in its low
    four bits.
    """
    experts, out, into = shape
    scales = (experts, out, into // MXFP4_BLOCK)
    blocks = (*scales, MXFP4_BLOCK // 2)
    needs = {name + "_blocks": (blocks, ("U8",)), name + "_scales": (scales, ("U8",))}

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        # [1, out, in / 32, 16]
        blocks = fetch(name + "_blocks", region[:1])
        exponents = fetch(name + "_scales", region[:1]).int() - 127
        values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
        # [1, out, in / 32, 32]
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
        return torch.ldexp(values[halves], exponents[..., None]).flatten(-2)[slices]

    return Piece(region, needs, read)
