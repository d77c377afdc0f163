"""Map parameters to stored tensors of each family: names, stacked or separate experts, FP8, MXFP4.

A parameter is filled from one or several `Piece`s: stored tensors, or single experts of a stored stack, each holding a
region of it. A piece is read in full or in part, so that a process reads only what it owns. Writing goes the other way,
always unquantised: one parameter becomes one or several stored tensors.

    ours                            Mixtral                        Qwen3, DeepSeek, Kimi               GPT-OSS
    mlp.gate                        block_sparse_moe.gate          mlp.gate                            mlp.router
    mlp.experts.gate_up_proj [e]    block_sparse_moe.experts.e.w1  mlp.experts.e.gate_proj.weight      mlp.experts.gate_up_proj
        rows of both in turn        ... and .w3, up                ... and .up_proj                    transposed
    mlp.experts.down_proj [e]       ....w2                         ....down_proj                       transposed
"""  # noqa: E501

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from minitrain.formats import gpt2, nemotron_h
from minitrain.formats.tensor_files import FLOATS
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.mamba import by_part
from minitrain.models.wan_config import WanConfig
from minitrain.parallel.shards import Slices

FP8_BLOCK = 128
FP8_SCALE = "_scale_inv"
MXFP4_BLOCK = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without sign
# key and slices of a stored tensor -> that part of it
Fetch = Callable[[str, Slices], Tensor]
# names of stored tensors -> their safetensors dtypes
Stored = Mapping[str, str]
Shape = tuple[int, ...]
Config = DecoderConfig | WanConfig
MIXTRAL_KEYS = {
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


class Piece(NamedTuple):
    """A region of a parameter, and where it is stored.

    needs: stored tensor -> its shape and possible dtypes.
    read(fetch, slices): return the part `slices` of the region.
    """

    region: Slices
    needs: dict
    read: Callable[[Fetch, Slices], Tensor]


def full(shape: Shape) -> Slices:
    """Return the slices of a whole tensor."""
    return tuple(slice(0, n) for n in shape)


def stored_name(name: str, family: str) -> str:
    """Return the hub's name of our parameter. For stacked experts see `expert_key`."""
    if family == "mixtral":
        return name.replace(".mlp.", ".block_sparse_moe.")
    if family == "gpt_oss":
        return name.replace(".mlp.gate.", ".mlp.router.")
    return nemotron_h.stored_name(name) if family == "nemotron_h" else name


def pieces(name: str, shape: Shape, config: Config, stored: Stored) -> list[Piece]:
    """Return the pieces that make up the parameter `name`."""
    family = config.family
    if family == "gpt2":
        return [gpt2_matrix(name, shape)]
    if parts := mamba_parts(name, config):
        key = stored_name(name, family)
        return [
            rows_from(theirs, key, shape, (slice(ours, ours + n), *full(shape[1:])))
            for ours, theirs, n in config.mamba.rows(parts)
        ]
    prefix, _, last = name.rpartition(".experts.")
    if not prefix:
        # our own name is also transformers 5's of Mixtral's router, in its files with stacks
        return [matrix(name if name in stored else stored_name(name, family), shape, stored)]
    if family == "gpt_oss":
        return stacked_experts(name, shape, stored)
    found = []
    parts = expert_parts(last)
    each = (shape[1] // len(parts), shape[2])
    for expert in range(shape[0]):
        if name in stored:
            rows = [in_stack(name, shape, expert, i, len(parts)) for i in range(len(parts))]
        else:
            keys = [expert_key(name, family, expert, part) for part in parts]
            rows = [of_expert(expert, matrix(key, each, stored)) for key in keys]
        found.append(rows[0] if len(rows) == 1 else in_turn(*rows))
    return found


def mamba_parts(name: str, config: Config) -> list[int] | None:
    """Return the sizes of the parts whose rows the hub has in another order (see mamba.py), if so."""
    if ".mamba.in_proj." in name:
        return config.mamba.projected
    return config.mamba.convolved if ".mamba.conv1d." in name else None


def expert_parts(name: str) -> list[str]:
    """Return the stored matrices of one expert that a stack holds."""
    return ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]


def expert_key(name: str, family: str, expert: int, part: str) -> str:
    """Return the stored name of an expert's matrix.

    layers.0.mlp.experts.down_proj, expert 3 -> layers.0.mlp.experts.3.down_proj.weight, or
    Mixtral's spelling.
    """
    part = MIXTRAL_KEYS[part] if family == "mixtral" else part
    return stored_name(f"{name.rpartition('.')[0]}.{expert}.{part}.weight", family)


def to_stored(name: str, tensor: Tensor, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a whole parameter. Not for GPT-2: see gpt2.py."""
    prefix, _, last = name.rpartition(".experts.")
    family = config.family
    if parts := mamba_parts(name, config):
        yield stored_name(name, family), by_part(tensor, parts, config.mamba.groups)
    elif not prefix:
        yield stored_name(name, family), tensor
    elif family == "gpt_oss":
        yield name, tensor if last.endswith("_bias") else tensor.transpose(1, 2)
    else:
        parts = expert_parts(last)
        for expert, weights in enumerate(tensor):
            for i, part in enumerate(parts):
                yield expert_key(name, family, expert, part), weights[i :: len(parts)]


def is_ignored(key: str, config: Config) -> bool:
    """Return whether a stored tensor has no place here, and needs none.

    Those are layers after the last and others of multi-token prediction, old tables and masks, and
    a tied head. And a norm of Wan's image to video that has nothing to do, in diffusers either.
    """
    family = config.family
    if isinstance(config, WanConfig):
        return key.endswith(".attn2.norm_added_q.weight")
    if key == "lm_head.weight":
        return config.tie_word_embeddings
    layer = re.match(r"model\.layers\.(\d{1,9})\.", key)
    if layer and family == "deepseek_v3" and int(layer[1]) >= config.num_layers:
        return True
    if family == "gpt2" and key.endswith((".attn.bias", ".attn.masked_bias")):
        return True
    predicts_more = family == "nemotron_h" and key.startswith("mtp.")
    return predicts_more or key.endswith(".rotary_emb.inv_freq")


# ------------------------------------------------------------------------------------------------------ single tensors


def matrix(key: str, shape: Shape, stored: Stored) -> Piece:
    """Return the piece of a stored tensor as it is, in FP8 where it is stored so."""
    if stored.get(key) != "F8_E4M3":
        return rows_from(0, key, shape, full(shape))
    scales = tuple(-(-n // FP8_BLOCK) for n in shape)
    needs = {key: (shape, ("F8_E4M3",)), key + FP8_SCALE: (scales, FLOATS)}
    return Piece(full(shape), needs, partial(read_fp8, key))


def of_expert(expert: int, piece: Piece) -> Piece:
    """Return an expert's own stored matrix as its part of a stack."""
    region = (slice(expert, expert + 1), *piece.region)
    return Piece(region, piece.needs, lambda fetch, slices: piece.read(fetch, slices[1:])[None])


def in_stack(key: str, shape: Shape, expert: int, part: int, parts: int) -> Piece:
    """Return an expert's rows of gate or up in a stack that has those of gate first.

    transformers 5 holds stacks so, and saves them with save_original_format=False.
    """
    stack = slice(expert, expert + 1)
    rows = shape[1] // parts
    first = part * rows

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        place = slice(first + slices[1].start, first + slices[1].stop)
        return fetch(key, (stack, place, slices[2]))

    return Piece((stack, *full((rows, shape[2]))), {key: (shape, FLOATS)}, read)


def in_turn(gate: Piece, up: Piece) -> Piece:
    """Return a piece whose rows are gate 0, up 0, gate 1, up 1, ... It reads no more than needed."""

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        expert, rows, columns = slices
        pairs = slice(rows.start // 2, -(-rows.stop // 2))
        value = interleave(*(part.read(fetch, (expert, pairs, columns)) for part in (gate, up)))
        return value[:, rows.start - 2 * pairs.start : rows.stop - 2 * pairs.start]

    expert, rows, columns = gate.region
    return Piece((expert, slice(0, 2 * rows.stop), columns), gate.needs | up.needs, read)


def gpt2_matrix(name: str, shape: Shape) -> Piece:
    """Return a piece of GPT-2: matrices are stored transposed, and q, k and v are one."""
    key = gpt2.stored_name(name)
    part = gpt2.fused_part(name)
    rows, *columns = shape
    first = 0
    if part is not None:
        first = part * rows
        rows = 3 * rows
    return rows_from(first, key, (rows, *columns), full(shape), gpt2.is_transposed(name))


def rows_from(
    first: int, key: str, shape: Shape, region: Slices, transposed: bool = False
) -> Piece:
    """Return a region that is stored in the rows from `first` on.

    shape: of the stored tensor, before it was transposed.
    """

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        slices = (slice(first + slices[0].start, first + slices[0].stop), *slices[1:])
        return fetch(key, slices[::-1]).T if transposed else fetch(key, slices)

    return Piece(region, {key: (shape[::-1] if transposed else shape, FLOATS)}, read)


def read_fp8(key: str, fetch: Fetch, slices: Slices) -> Tensor:
    """Return fp32: each block of 128 x 128 values times its own scale (DeepSeek-V3)."""
    scale = fetch(key + FP8_SCALE, ()).float()
    for dim, part in enumerate(slices):
        scale = scale.index_select(dim, torch.arange(part.start, part.stop) // FP8_BLOCK)
    return fetch(key, slices).float() * scale


# ---------------------------------------------------------------------------------------------------- stacks of GPT-OSS


def stacked_experts(name: str, shape: Shape, stored: Stored) -> list[Piece]:
    """Return one piece per expert, of which all rows are read, or one for the biases of all."""
    if name.endswith("_bias"):
        return [matrix(name, shape, stored)]
    experts, out, into = shape
    needs = {name: ((experts, into, out), FLOATS)}
    read_expert = read_transposed
    if name + "_blocks" in stored:
        scales = (experts, out, into // MXFP4_BLOCK)
        blocks = (*scales, MXFP4_BLOCK // 2)
        needs = {name + "_blocks": (blocks, ("U8",)), name + "_scales": (scales, ("U8",))}
        read_expert = read_mxfp4

    def read(expert: slice, fetch: Fetch, slices: Slices) -> Tensor:
        return read_expert(name, fetch, expert)[(slice(None), *slices[1:])]

    each = [slice(e, e + 1) for e in range(experts)]
    return [Piece((e, *full((out, into))), needs, partial(read, e)) for e in each]


def read_transposed(name: str, fetch: Fetch, expert: slice) -> Tensor:
    return fetch(name, (expert,)).transpose(1, 2)


def read_mxfp4(name: str, fetch: Fetch, expert: slice) -> Tensor:
    """Return fp32 [1, out, in] from blocks of 32 values that share a power of two.

    A byte holds two values, the first in its low half.
    """
    # [1, out, in / 32, 16]
    blocks = fetch(name + "_blocks", (expert,))
    exponents = fetch(name + "_scales", (expert,)).int() - 127
    values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
    # [1, out, in / 32, 32]
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    return torch.ldexp(values[halves], exponents[..., None]).flatten(-2)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Join two stacks [experts, rows, ...] as [experts, 2 x rows, ...]: gate 0, up 0, gate 1, ..."""
    return torch.stack([gate, up], dim=2).flatten(1, 2)
