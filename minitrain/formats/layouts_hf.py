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
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.formats.families import FAMILIES, PLAIN
from minitrain.formats.tensor_files import FLOATS, StoredTensor
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.mamba import by_part
from minitrain.models.quantize import E4M3, quantize
from minitrain.models.wan_config import WanConfig
from minitrain.parallel.shards import Slices

# the output head, which some files hold although it is tied to the embedding
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SCORE = "score.weight"
FP8_BLOCK = 128
FP8_SCALE = "_scale_inv"
MXFP4_BLOCK = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without sign
# those of a block's matrices that such files have in FP8: not its router, nor `eh_proj`
IN_FP8 = re.compile(r".*\.layers\.\d+\.(?!eh_proj).*_proj(_with_mqa)?\.weight")
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


def full(shape: Shape) -> Slices:
    """Return the slices of a whole tensor."""
    return tuple(slice(0, n) for n in shape)


def pieces(name: str, shape: Shape, config: Config, stored: Stored) -> list[Piece]:
    """Return the pieces that make up the parameter `name`."""
    family = FAMILIES.get(config.family, PLAIN)
    if family.place:
        key, whole, starts, transposed = family.place(name, shape)
        return [stored_part(key, whole, full(shape), starts, transposed)]
    prefix, _, last = name.rpartition(".experts.")
    if not prefix:
        key = family.stored_name(name, config.num_layers)
        if name in stored and any(part in name for part in family.also_ours):
            key = name
        if parts := mamba_parts(name, config):
            return [
                stored_part(key, shape, (slice(ours, ours + n), *full(shape[1:])), (theirs,))
                for ours, theirs, n in config.mamba.rows(parts)
            ]
        return [matrix(key, shape, full(shape), stored)]
    if last.endswith("_bias"):
        return [matrix(name, shape, full(shape), stored)]
    experts, rows, columns = shape
    found = []
    for expert in range(experts):
        whole = (slice(expert, expert + 1), *full((rows, columns)))
        if name + "_blocks" in stored:
            found.append(mxfp4_expert(name, shape, whole))
        elif family.stacked:
            found.append(stored_part(name, shape, whole, (expert,), transposed=True))
        else:
            found += expert_pieces(name, shape, expert, config, stored)
    return found


def expert_pieces(
    name: str, shape: Shape, expert: int, config: Config, stored: Stored
) -> Iterator[Piece]:
    """Yield the pieces of one expert in a stack: gate's rows and up's take turns in ours.

    On the hub every expert has matrices of its own. transformers 5 has stacks too, where gate's
    rows come first, and saves them with save_original_format=False.
    """
    _, rows, columns = shape
    parts = expert_parts(name.rpartition(".")[2])
    size = rows // len(parts)
    for i, part in enumerate(parts):
        region = (slice(expert, expert + 1), slice(i, rows, len(parts)), slice(0, columns))
        if name in stored:
            yield stored_part(name, shape, region, (expert, i * size))
        else:
            yield matrix(expert_key(name, config, expert, part), (size, columns), region, stored)


def mamba_parts(name: str, config: Config) -> list[int] | None:
    """Return the sizes of the parts of a Mamba-2 weight whose rows files order differently, or None."""
    if ".mamba.in_proj." in name:
        return config.mamba.projected
    return config.mamba.convolved if ".mamba.conv1d." in name else None


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


def to_stored(name: str, tensor: Tensor, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a whole parameter. Not for a family that has its own `to_stored`."""
    prefix, _, last = name.rpartition(".experts.")
    family = FAMILIES[config.family]
    if parts := mamba_parts(name, config):
        key = family.stored_name(name, config.num_layers)
        yield key, by_part(tensor, parts, config.mamba.groups)
    elif not prefix:
        yield family.stored_name(name, config.num_layers), tensor
        for copy in (key for key, ours in copies(config).items() if ours == name):
            # a file's tensors must not share memory
            yield copy, tensor.clone()
    elif family.stacked:
        yield name, tensor if last.endswith("_bias") else tensor.transpose(1, 2)
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


# --- single pieces


def matrix(key: str, shape: Shape, region: Slices, stored: Stored) -> Piece:
    """Return the piece of a whole stored tensor, which may be in FP8."""
    if key not in stored or stored[key].dtype != "F8_E4M3":
        return stored_part(key, shape, region)
    scales = tuple(-(-n // FP8_BLOCK) for n in shape)
    needs = {key: (shape, ("F8_E4M3",)), key + FP8_SCALE: (scales, FLOATS)}
    return Piece(region, needs, partial(read_fp8, key))


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
    slices = slices[-2:]
    scale = fetch(key + FP8_SCALE, ()).float()
    for dim, part in enumerate(slices):
        scale = scale.index_select(dim, torch.arange(part.start, part.stop) // FP8_BLOCK)
    return fetch(key, slices).float() * scale


def write_fp8(key: str, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a matrix [out, in] in FP8 and the scales of its blocks: what `read_fp8` reads.

    Scales are powers of two, so fp8.form=block multiplies these very numbers.
    """
    out, into = matrix.shape
    padded = F.pad(matrix.float(), (0, -into % FP8_BLOCK, 0, -out % FP8_BLOCK))
    x8, inverse = quantize(padded, E4M3, (FP8_BLOCK, FP8_BLOCK))
    yield key, x8[:out, :into]
    yield key + FP8_SCALE, inverse


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
