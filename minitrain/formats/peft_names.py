"""Convert names and shapes of adapters to PEFT's format and back.

    ours                                           in the file, after `base_model.model.`
    model.layers.0.self_attn.q_proj.lora_A         model.layers.0.self_attn.q_proj.lora_A.weight
    model.layers.0.mlp.experts.down_proj_lora_A    model.layers.0.mlp.experts.lora_A.weight
        [experts, rank, in]                            [experts x rank, in]
    model.layers.0.mlp.experts.down_proj_lora_B    model.layers.0.mlp.experts.lora_B.weight
        [experts, out, rank]                           [out, rank x experts]
    ...experts.gate_up_proj_lora_A                 the same, and where both are adapted ...experts.base_layer.lora_A.weight

PEFT's names are those of transformers' modules, which differ from the names of stored tensors for
some families.
"""  # noqa: E501

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from minitrain.formats.families import FAMILIES
from minitrain.formats.family import PLAIN
from minitrain.formats.layouts_hf import Config, row_order
from minitrain.models.mamba import by_group, by_part

# the prefix of all names in an adapter file
PREFIX = "base_model.model."
# Linear of Nemotron-H -> the part of our block that holds it; others are in mlp
MIXERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    "in_proj": "mamba",
    "out_proj": "mamba",
}


def peft_name(name: str, names: Iterable[str], config: Config) -> str:
    """Return PEFT's name of an adapter parameter. names: of all adapter parameters."""
    path = name[: -len("lora_A")]
    module = path.rstrip("._")
    # a stack of experts: PEFT names the module that holds it
    if path.endswith("_"):
        module, _, stack = module.rpartition(".")
        if stack != "down_proj" and f"{module}.down_proj_lora_A" in names:
            module += ".base_layer"
    return f"{PREFIX}{peft_module(module, config)}.lora_{name[-1]}.weight"


def peft_module(path: str, config: Config) -> str:
    """Return transformers' path of a module, or of the end of a path.

    In Nemotron-H attention, Mamba and MLP are all called `mixer`.
    """
    if getattr(config, "shared_expert_gate", False):
        # Qwen's
        path = path.replace("shared_experts.", "shared_expert.")
    if config.family == "nemotron_h":
        return re.sub(r"\b(self_attn|mamba|mlp)\.", "mixer.", path)
    return path


def our_target(target: str, key: str) -> str:
    """Return our name of a target of PEFT's, the end of a path. key: one of TARGETS.

    Parameters are those of experts. In Nemotron-H a Linear's own name shows which mixer holds it.
    """
    target = target.replace("shared_expert.", "shared_experts.")
    last = target.rpartition(".")[2]
    if key == "target_parameters" and target == last:
        return f"experts.{last}"
    return re.sub(r"\bmixer\.", f"{MIXERS.get(last, 'mlp')}.", target)


def to_peft(name: str, tensor: Tensor, config: Config) -> Tensor:
    """Return our adapter's tensor in PEFT's shape."""
    order = row_order(name, config)
    if order and name.endswith("B"):
        tensor = by_part(tensor, *order)
    if tensor.ndim == 2:
        return tensor
    if name.endswith("A"):
        return tensor.flatten(0, 1)
    if _is_separated(name, config):
        tensor = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
    return tensor.permute(1, 2, 0).flatten(1)


def from_peft(name: str, tensor: Tensor, shape: torch.Size, config: Config) -> Tensor:
    """Return PEFT's tensor in the shape of our adapter; the inverse of `to_peft`."""
    order = row_order(name, config)
    if order and name.endswith("B"):
        tensor = by_group(tensor, *order)
    if len(shape) == 2:
        return tensor
    if name.endswith("A"):
        return tensor.view(shape)
    tensor = tensor.view(shape[1], shape[2], shape[0]).permute(2, 0, 1)
    if _is_separated(name, config):
        # gate 0, up 0, gate 1, ...
        tensor = torch.stack(tensor.chunk(2, dim=1), dim=2).flatten(1, 2)
    return tensor


def _is_separated(name: str, config: Config) -> bool:
    """Return True if PEFT has all gate rows before all up rows, as for all families but GPT-OSS."""
    stacks = FAMILIES.get(config.family, PLAIN).stacks
    return "gate_up_proj" in name and not (stacks and stacks.alternating)
