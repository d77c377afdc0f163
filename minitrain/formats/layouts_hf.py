"""How each family stores its weights on the hub: names, stacked or separate experts, FP8 and MXFP4.

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
from minitrain.models.wan import WanConfig
from minitrain.parallel.shards import Slices

FP8_BLOCK = 128
FP8_SCALE = "_scale_inv"
MXFP4_BLOCK = 32
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without sign
Fetch = Callable[[str, Slices], Tensor]  # key of a stored tensor, which part -> that part
EXPERT_KEYS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
MIXTRAL_KEYS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class Piece(NamedTuple):
    """region: what of the parameter it holds. needs: shape and possible types of the stored tensors
    it is read from.

    read(fetch, slices): the part `slices` of the region.
    """

    region: Slices
    needs: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
    read: Callable[[Fetch, Slices], Tensor]


def stored_name(name: str, family: str) -> str:
    """Our name of a parameter -> its name on the hub; for stacked experts see `expert_key`."""
    if family == "mixtral":
        return name.replace(".mlp.", ".block_sparse_moe.")
    if family == "gpt_oss":
        return name.replace(".mlp.gate.", ".mlp.router.")
    if family == "nemotron_h":
        return nemotron_h.stored_name(name)
    return name


def pieces(
    name: str, shape: tuple[int, ...], config: DecoderConfig | WanConfig, stored: Mapping[str, str]
) -> list[Piece]:
    """Where the parameter `name` comes from. stored: the safetensors dtype of every tensor there
    is.
    """
    whole = tuple(slice(0, n) for n in shape)
    family = config.family
    if family == "gpt2":
        return [gpt2_matrix(name, whole)]
    if parts := mamba_parts(name, config):
        key = stored_name(name, family)
        return [
            rows_from(theirs, key, shape, (slice(ours, ours + n), *whole[1:]))
            for ours, theirs, n in config.mamba.rows(parts)
        ]
    prefix, _, last = name.rpartition(".experts.")
    if (
        not prefix
    ):  # our own name is also transformers 5's of Mixtral's router, in its files with stacks
        return [matrix(name if name in stored else stored_name(name, family), shape, stored)]
    if family == "gpt_oss":
        return stacked_experts(name, shape, stored)
    found = []
    parts = EXPERT_KEYS[last]
    for expert in range(shape[0]):
        if name in stored:
            rows = [in_stack(name, shape, expert, i, len(parts)) for i in range(len(parts))]
        else:
            keys = [expert_key(name, family, expert, part) for part in parts]
            rows = [
                of_expert(expert, matrix(key, (shape[1] // len(parts), shape[2]), stored))
                for key in keys
            ]
        found.append(rows[0] if len(rows) == 1 else in_turn(*rows))
    return found


def mamba_parts(name: str, config: DecoderConfig | WanConfig) -> list[int] | None:
    """Of what the rows of a parameter consist that the hub has in another order (see mamba.py);
    None if it does not.
    """
    if ".mamba.in_proj." in name:
        return config.mamba.projected
    return config.mamba.convolved if ".mamba.conv1d." in name else None


def expert_key(name: str, family: str, expert: int, part: str) -> str:
    """layers.0.mlp.experts.down_proj, expert 3 -> layers.0.mlp.experts.3.down_proj.weight, or
    Mixtral's spelling.
    """
    part = MIXTRAL_KEYS[part] if family == "mixtral" else part
    return stored_name(f"{name.rpartition('.')[0]}.{expert}.{part}.weight", family)


def to_stored(name: str, tensor: Tensor, config: DecoderConfig) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors that a whole parameter becomes, one after the other. Not for GPT-2: see
    gpt2.py.
    """
    prefix, _, last = name.rpartition(".experts.")
    family = config.family
    if parts := mamba_parts(name, config):
        yield stored_name(name, family), by_part(tensor, parts, config.mamba.groups)
    elif not prefix:
        yield stored_name(name, family), tensor
    elif family == "gpt_oss":
        yield name, tensor if last.endswith("_bias") else tensor.transpose(1, 2)
    else:
        for expert, weights in enumerate(tensor):
            parts = EXPERT_KEYS[last]
            for part, rows in zip(
                parts, weights.unflatten(0, (-1, len(parts))).unbind(1), strict=True
            ):
                yield expert_key(name, family, expert, part), rows


def is_ignored(key: str, config: DecoderConfig | WanConfig) -> bool:
    """Stored tensors without a place here: multi-token prediction (layers after the last), old
    tables and masks, a tied head; and a norm of Wan's image to video that has nothing to do, in
    diffusers either."""
    if isinstance(config, WanConfig):
        return key.endswith(".attn2.norm_added_q.weight")
    layer = re.match(r"model\.layers\.(\d{1,9})\.", key) if config.family == "deepseek_v3" else None
    predicts_more = bool(layer) and int(layer[1]) >= config.num_layers
    predicts_more |= config.family == "nemotron_h" and key.startswith("mtp.")
    tied_head = config.tie_word_embeddings and key == "lm_head.weight"
    causal_mask = config.family == "gpt2" and key.endswith((".attn.bias", ".attn.masked_bias"))
    return predicts_more or tied_head or causal_mask or key.endswith(".rotary_emb.inv_freq")


# ------------------------------------------------------------------------------------------------------ single tensors


def matrix(key: str, shape: tuple[int, ...], stored: Mapping[str, str]) -> Piece:
    """A stored tensor as it is, FP8 where it is stored so."""
    region = tuple(slice(0, n) for n in shape)
    if stored.get(key) != "F8_E4M3":
        return rows_from(0, key, shape, region)
    scales = tuple(-(-n // FP8_BLOCK) for n in shape)
    needs = {key: (shape, ("F8_E4M3",)), key + FP8_SCALE: (scales, FLOATS)}
    return Piece(region, needs, partial(read_fp8, key))


def of_expert(expert: int, piece: Piece) -> Piece:
    """What is stored of one expert alone, as its part of a stack."""
    region = (slice(expert, expert + 1), *piece.region)
    return Piece(region, piece.needs, lambda fetch, slices: piece.read(fetch, slices[1:])[None])


def in_stack(key: str, shape: tuple[int, ...], expert: int, part: int, parts: int) -> Piece:
    """An expert's rows in a stack as transformers 5 holds it, and saves it with
    save_original_format=False: those of gate, then those of up."""
    stack = slice(expert, expert + 1)
    rows = shape[1] // parts

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        first, last = (part * rows + place for place in (slices[1].start, slices[1].stop))
        return fetch(key, (stack, slice(first, last), slices[2]))

    return Piece((stack, slice(0, rows), slice(0, shape[2])), {key: (shape, FLOATS)}, read)


def in_turn(gate: Piece, up: Piece) -> Piece:
    """A piece whose rows are gate 0, up 0, gate 1, up 1, ... Of both, as many are read as are
    needed.
    """

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        expert, rows, columns = slices
        pairs = slice(rows.start // 2, -(-rows.stop // 2))
        value = interleave(*(part.read(fetch, (expert, pairs, columns)) for part in (gate, up)))
        return value[:, rows.start - 2 * pairs.start : rows.stop - 2 * pairs.start]

    expert, rows, columns = gate.region
    return Piece((expert, slice(0, 2 * rows.stop), columns), {**gate.needs, **up.needs}, read)


def gpt2_matrix(name: str, whole: Slices) -> Piece:
    """A matrix is stored transposed, and q, k and v are the rows of one."""
    key = gpt2.stored_name(name)
    part = gpt2.fused_part(name)
    rows, *columns = (part.stop for part in whole)
    first, stored_rows = (0, rows) if part is None else (part * rows, 3 * rows)
    return rows_from(first, key, (stored_rows, *columns), whole, gpt2.is_transposed(name))


def rows_from(
    first: int, key: str, shape: tuple[int, ...], region: Slices, transposed: bool = False
) -> Piece:
    """A region that is stored in the rows from `first` on of a tensor of this `shape`, before it
    was transposed.
    """

    def read(fetch: Fetch, slices: Slices) -> Tensor:
        slices = (slice(first + slices[0].start, first + slices[0].stop), *slices[1:])
        return fetch(key, slices[::-1]).T if transposed else fetch(key, slices)

    return Piece(region, {key: (shape[::-1] if transposed else shape, FLOATS)}, read)


def read_fp8(key: str, fetch: Fetch, slices: Slices) -> Tensor:
    """fp32: each block of 128 x 128 values times its own scale (DeepSeek-V3)."""
    scale = fetch(key + FP8_SCALE, ()).float()
    for dim, part in enumerate(slices):
        scale = scale.index_select(dim, torch.arange(part.start, part.stop) // FP8_BLOCK)
    return fetch(key, slices).float() * scale


# ---------------------------------------------------------------------------------------------------- stacks of GPT-OSS


def stacked_experts(name: str, shape: tuple[int, ...], stored: Mapping[str, str]) -> list[Piece]:
    """One piece per expert, of which all rows are read; of biases one of all experts."""
    if name.endswith("_bias"):
        return [matrix(name, shape, stored)]
    experts, out, into = shape
    if name + "_blocks" in stored:
        scales = (experts, out, into // MXFP4_BLOCK)
        needs = {
            name + "_blocks": ((*scales, MXFP4_BLOCK // 2), ("U8",)),
            name + "_scales": (scales, ("U8",)),
        }
        read_expert = read_mxfp4
    else:
        needs = {name: ((experts, into, out), FLOATS)}
        read_expert = read_transposed

    def read(expert: slice, fetch: Fetch, slices: Slices) -> Tensor:
        return read_expert(name, fetch, expert)[(slice(None), *slices[1:])]

    each = [slice(e, e + 1) for e in range(experts)]
    rest = (slice(0, out), slice(0, into))
    return [Piece((expert, *rest), needs, partial(read, expert)) for expert in each]


def read_transposed(name: str, fetch: Fetch, expert: slice) -> Tensor:
    return fetch(name, (expert,)).transpose(1, 2)


def read_mxfp4(name: str, fetch: Fetch, expert: slice) -> Tensor:
    """fp32 [1, out, in]: 32 neighbours share a power of two; two values to a byte, the first in its
    low half.
    """
    blocks = fetch(name + "_blocks", (expert,))  # [1, out, in / 32, 16]
    exponents = fetch(name + "_scales", (expert,)).int() - 127
    values = torch.tensor([*MXFP4_VALUES, *(-value for value in MXFP4_VALUES)])
    halves = (
        torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    )  # [1, out, in / 32, 32]
    return torch.ldexp(values[halves], exponents[..., None]).flatten(-2)


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Two stacks [experts, rows, ...] -> [experts, 2 x rows, ...], whose rows are gate 0, up 0,
    gate 1, up 1, ...
    """
    return torch.stack([gate, up], dim=2).flatten(1, 2)
