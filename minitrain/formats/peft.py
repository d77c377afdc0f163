"""Read and write LoRA adapters in PEFT's format: adapter_config.json, adapter_model.safetensors.

Names and shapes are in peft_names.py.

    Experts       PEFT adapts them as `target_parameters`. If both gate_proj and up_proj are named,
                  it gives their joint matrix twice the rank and alpha (`rank_pattern`). Here all
                  adapters have the largest rank; smaller ones are padded with zeros, which stay zero
                  during training.
    UNREADABLE    PEFT cannot read some adapters: a run warns when it begins.
    Wan, saving   A second file is written for diffusers' pipelines, which ignore PEFT's names: see
                  `for_pipelines`.
    Wan, loading  One file of another program is read too: see `adapter_place`. Its scale is 1 unless
                  the file holds alphas, or its header has settings.

Not supported: biases and norms in such files; GPT-3, whose q, k, v are one matrix in files; variants
of LoRA.
"""

import json
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.errors import InputError, located
from minitrain.formats.hf import load_pretrained
from minitrain.formats.json_files import read_from_folder, write_json
from minitrain.formats.layouts_hf import SCORE, Config
from minitrain.formats.magic import ADAPTER_CONFIG, library_of
from minitrain.formats.peft_names import (
    PREFIX,
    from_peft,
    our_target,
    peft_module,
    peft_name,
    to_peft,
)
from minitrain.formats.tensor_files import (
    FLOATS,
    StoredTensor,
    check_stored,
    open_tensors,
    stored_tensors,
    write_tensors,
)
from minitrain.formats.wan_names import adapter_place, original_name
from minitrain.models.decoder_config import as_classifier
from minitrain.models.frozen import freeze, thaw
from minitrain.models.lora import (
    add_adapters,
    check_targets,
    is_adapter,
    is_expert_stack,
    matches,
    merge_adapters,
)
from minitrain.models.wan_config import WanConfig
from minitrain.models.zoo import empty_model
from minitrain.parallel.shards import local_shard
from minitrain.settings import MAX_LORA_ALPHA, MAX_LORA_RANK, Lora

# keys of adapter_config.json
TARGETS = ("target_modules", "target_parameters")
PATTERNS = ("rank_pattern", "alpha_pattern")
WEIGHTS = "adapter_model.safetensors"
# the file that diffusers' load_lora_weights looks for in a folder
PIPELINE_WEIGHTS = "pytorch_lora_weights.safetensors"
# family -> Linears whose adapters PEFT cannot read
UNREADABLE = {
    # PEFT would apply these names to the stacks of experts
    **dict.fromkeys(
        ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text"),
        ("down_proj", "gate_proj", "up_proj"),
    ),
    # PEFT refuses this one, because Mamba's kernels read its weight without calling the module
    "nemotron_h": ("out_proj",),
    # transformers has gate and up as one Linear, and other names in layers with experts
    "granitemoehybrid": (
        "gate_proj",
        "up_proj",
        "down_proj",
        "experts.gate_up_proj",
        "experts.down_proj",
    ),
}
# a classifier's head is in the file as a whole; PEFT saves it under either name
HEAD = PREFIX + SCORE
HEADS = (["score"], ["classifier", "score"])
# values of init_lora_weights that do not change the base weights
PLAIN_STARTS = ("gaussian", "eva", "orthogonal")
# keys of adapter_config.json that turn on variants of LoRA
VARIANTS = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "use_qalora",
    "layers_to_transform",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_bdlora",
    "exclude_modules",
)


def read_adapter_config(path: str | Path) -> Lora:
    """Return the settings (except dropout) of the adapters in a folder, or in a file of Wan's.

    Raises InputError for anything but plain LoRA.
    """
    file, raw, stored = _open(path)
    with located(file):
        targets = [our_target(name, key) for key in TARGETS for name in _names(raw, key, stored)]
        rslora = bool(raw.get("use_rslora"))
        settings = [
            Lora(r, float(alpha), rslora=rslora, targets=targets) for r, alpha in _sizes(raw)
        ]
        if len({lora.scale for lora in settings}) > 1:
            raise InputError(
                "only plain LoRA is supported, not a rank_pattern that changes the scale of updates"
            )
        return max(settings, key=lambda lora: lora.rank)


def _refuse_variants(raw: dict) -> None:
    """Raise InputError for anything but plain LoRA."""
    found = [key for key in VARIANTS if raw.get(key) and raw[key] not in HEADS]
    if raw.get("bias", "none") != "none":
        found.append("bias")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start not in PLAIN_STARTS:
        found.append(f"init_lora_weights={start}")
    if raw.get("peft_type") != "LORA":
        found = [library_of(raw)]
    if found:
        raise InputError(f"only plain LoRA is supported, not {', '.join(found)}")


def _sizes(raw: dict) -> list[tuple]:
    """Return all pairs (rank, alpha) of adapter_config.json: the usual one, and those of patterns.

    Raises InputError for values that are no numbers within their limits.
    """
    ranks, alphas = (raw.get(key) or {} for key in PATTERNS)
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise InputError(f"{' and '.join(PATTERNS)} must give numbers by name")
    usual = raw.get("r"), raw.get("lora_alpha")
    special = [(ranks.get(name, usual[0]), alphas.get(name, usual[1])) for name in ranks | alphas]
    for rank, alpha in (usual, *special):
        if type(rank) is not int or not 1 <= rank <= MAX_LORA_RANK:
            raise InputError(f"r={rank!r} must be a whole number from 1 to {MAX_LORA_RANK:,}")
        # also refuses nan
        if type(alpha) not in (int, float) or not abs(alpha) <= MAX_LORA_ALPHA:
            raise InputError(f"lora_alpha={alpha!r} must be a number")
    return [usual, *special]


def adapter_files(path: str | Path) -> tuple[Path | None, Path]:
    """Return the file of the settings (None: they are in that of the tensors), and the tensors' file."""
    path = Path(path)
    folder = path.parent if os.path.isfile(path) and path.name == WEIGHTS else path
    if not os.path.exists(folder / ADAPTER_CONFIG):
        if os.path.isfile(path):
            return None, path
        if os.path.exists(folder / PIPELINE_WEIGHTS):
            return None, folder / PIPELINE_WEIGHTS
    return folder / ADAPTER_CONFIG, folder / WEIGHTS


class Opened(NamedTuple):
    """Adapters on disk."""

    # the file that has the settings
    file: Path
    # the content of adapter_config.json
    settings: dict
    # PEFT's name -> tensor
    tensors: dict[str, StoredTensor]


def _open(path: str | Path) -> Opened:
    """Open a folder of PEFT's, or a file of Wan's. Raises InputError for anything but plain LoRA."""
    config, weights = adapter_files(path)
    if config:
        return _open_with_settings(config, read_from_folder(config), weights)
    if settings := _header_settings(weights):
        return _open_with_settings(weights, settings, weights)
    return _open_bare(weights)


def _open_with_settings(file: Path, settings: dict, weights: Path) -> Opened:
    """Open adapters whose settings are in adapter_config.json, or in the header of the weights."""
    with located(file):
        _refuse_variants(settings)
    pickled = weights.with_suffix(".bin")
    if os.path.exists(pickled) and not os.path.exists(weights):
        raise InputError(
            f"{pickled} is not read (save the adapters again with PEFT's save_pretrained)"
        )
    tensors, ranks = _by_peft_names(weights)
    if ranks:
        settings = settings | dict(target_modules=list(ranks))
    return Opened(file, settings, tensors)


def _open_bare(weights: Path) -> Opened:
    """Open a file of Wan's that has no settings: shapes give the ranks, `alpha` tensors the alphas."""
    tensors, ranks = _by_peft_names(weights)
    alphas = {}
    for name in [*tensors]:
        module, role = adapter_place(name) or (None, None)
        if role == "alpha":
            alphas[module] = _number(tensors.pop(name))
    if not ranks:
        known = "named as by diffusers, ComfyUI or musubi-tuner"
        raise InputError(
            f"{weights}: without an {ADAPTER_CONFIG} it must be a LoRA of Wan, {known}"
        )
    # without an alpha the scale is 1
    alphas = ranks | alphas
    settings = dict(
        peft_type="LORA",
        r=next(iter(ranks.values())),
        lora_alpha=next(iter(alphas.values())),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        target_modules=list(ranks),
    )
    return Opened(weights, settings, tensors)


def _by_peft_names(weights: Path) -> tuple[dict[str, StoredTensor], dict[str, int]]:
    """Return a file's tensors by PEFT's names, and the ranks of modules named by another program."""
    tensors = {}
    ranks = {}
    for name, tensor in stored_tensors([weights]).items():
        module, role = adapter_place(name) or (None, None)
        if role == "A":
            ranks[module] = sum(tensor.shape[:1])
        if role in ("A", "B"):
            name = f"{PREFIX}{module}.lora_{role}.weight"
        tensors[name] = tensor
    return tensors, ranks


def _header_settings(file: Path) -> dict | None:
    """Return the settings that diffusers and finetrainers write into a file's header, or None."""
    with open_tensors(file) as contents:
        header = contents.metadata() or {}
    text = header.get("lora_adapter_metadata") or header.get("lora_config")
    if not text:
        return None
    try:
        raw = {key.removeprefix("transformer."): value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file}: the settings in its header are no JSON object: {error}"
        ) from None
    return dict(peft_type="LORA") | raw


def _number(tensor: StoredTensor) -> float:
    """Return the value of a stored tensor with one element. Raises InputError for more."""
    if math.prod(tensor.shape) != 1:
        shape = list(tensor.shape)
        raise InputError(
            f"{tensor.file}: tensor {tensor.name} has shape {shape}, expected one number"
        )
    with open_tensors(tensor.file) as contents:
        return contents.get_tensor(tensor.name).item()


def _names(raw: dict, key: str, stored: dict[str, StoredTensor]) -> list[str]:
    """Return the names under a key of TARGETS. Raises InputError for other values."""
    names = raw.get(key) or []
    # for a regular expression, the names of stored tensors show which modules it matched
    if key == "target_modules" and isinstance(names, str):
        linear = r"^base_model\.model\.(.*)(?<!\.experts)(?<!\.base_layer)\.lora_A\.weight$"
        return re.findall(linear, "\n".join(stored), re.M)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{key} must be a list of names, not {names!r}")
    return names


def load_adapter(model: nn.Module, path: str | Path) -> None:
    """Add the adapters of folder `path` to an unsharded model in place, and freeze all else.

    Raises InputError, before the model is changed, for anything but plain LoRA, and for adapters that
    do not fit the model.
    """
    lora = read_adapter_config(path)
    config = model.config
    head = _open(path).tensors.get(HEAD)
    if head:
        config = as_classifier(config, *head.shape[:1])
    stored = _read_tensors(config, lora, Path(path))
    if head:
        model.config = config
        model.score = nn.Linear(*reversed(head.shape), bias=False).to(model.head_weight)
        model.lm_head = None
    add_adapters(model, lora)
    _fill(model, stored)


def load_merged(
    path: str | Path,
    adapter: str | Path | None,
    dtype: torch.dtype | None = None,
    device=None,
    base: str = "bf16",
) -> nn.Module:
    """Return a model as `load_pretrained` does, with the adapters of a folder merged into it.

    base: the lora.base of their training: first round the model's weights so.
    """
    model = load_pretrained(path, dtype, device)
    if base != "bf16":
        freeze(model.blocks, base)
        thaw(model, next(model.parameters()).dtype)
        model.requires_grad_(True)
    if adapter:
        load_adapter(model, adapter)
        merge_adapters(model)
    return model


def fill_adapters(model: nn.Module, lora: Lora, path: str | Path) -> None:
    """Load stored values into a model's existing adapters; the model may be sharded."""
    _fill(model, _read_tensors(model.config, lora, Path(path)))


@torch.no_grad()
def _fill(model: nn.Module, stored: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        if name in stored:
            part, slices = local_shard(parameter)
            part.copy_(stored[name][slices])


def _read_tensors(config: Config, lora: Lora, path: Path) -> dict[str, Tensor]:
    """Return all adapters' tensors by our names; lower ranks are padded with zeros.

    config: the model's.
    """
    source, raw, stored = _open(path)
    file = adapter_files(path)[1]
    with located(source):
        shapes = adapter_shapes(config, lora)
    keys = {name: peft_name(name, shapes, config) for name in shapes}
    stated = {rank for rank, _ in _sizes(raw)}
    own = {}
    for name, (*stack, rows, columns) in shapes.items():
        a = stored.get(keys[f"{name[:-1]}A"])
        rank = sum(a.shape[:1]) // math.prod(stack) if a else 0
        rank = rank if rank in stated else lora.rank
        ends = (rank, columns) if name.endswith("A") else (rows, rank)
        own[name] = torch.Size((*stack, *ends))
        expected = to_peft(name, torch.empty(own[name], device="meta"), config).shape
        check_stored(stored, keys[name], expected, FLOATS, file)
    # adapters of a language model have none: then it begins at random
    if HEAD in stored and config.num_labels:
        check_stored(stored, HEAD, (config.num_labels, config.hidden_size), FLOATS, file)
        keys[SCORE] = HEAD
    if extra := stored.keys() - keys.values():
        raise InputError(f"{file}: tensor {min(extra)} has no place in the model")
    # padding all of them would be useless
    if all(own[name] != shape for name, shape in shapes.items()):
        raise InputError(f"{source}: no adapter has the largest rank, {lora.rank}")
    tensors = {}
    with open_tensors(file) as contents:
        for name, (*_, rows, columns) in shapes.items():
            tensor = contents.get_tensor(stored[keys[name]].name)
            tensor = from_peft(name, tensor, own[name], config)
            padding = (0, columns - tensor.shape[-1], 0, rows - tensor.shape[-2])
            tensors[name] = F.pad(tensor, padding)
        if SCORE in keys:
            tensors[SCORE] = contents.get_tensor(HEAD)
    return tensors


def adapter_shapes(config: Config, lora: Lora) -> dict[str, torch.Size]:
    """Return the names and shapes of all adapter parameters in the model of `config`.

    Raises InputError as `check_targets` does.
    """
    if config.family == "gpt2":
        raise InputError(
            "lora: adapters of GPT-3's q_proj, k_proj and v_proj have no form in PEFT: there they are one"
        )
    model = empty_model(config)
    check_targets(model, lora.targets)
    add_adapters(model, lora)
    return {name: x.shape for name, x in model.named_parameters() if is_adapter(name)}


def save_adapter(
    tensors: Iterable[tuple[str, Tensor]],
    config: Config,
    lora: Lora,
    path: str | Path,
    base: str = "",
) -> None:
    """Write adapters so that `peft.PeftModel.from_pretrained(model, path)` loads them.

    tensors: full, by our names. config: the model's. base: the model's name or folder, which PEFT's
    Auto classes need.
    """
    folder = Path(path)
    shapes = adapter_shapes(config, lora)
    stored = {}
    for name, tensor in tensors:
        tensor = to_peft(name, tensor.detach().cpu(), config).contiguous()
        stored[HEAD if name == SCORE else peft_name(name, shapes, config)] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    files = {WEIGHTS: stored}
    if isinstance(config, WanConfig):
        files[PIPELINE_WEIGHTS] = for_pipelines(stored, lora.scale)
    for name, contents in files.items():
        write_tensors(contents, folder / f"{name}.tmp", metadata={"format": "pt"})
    write_json(folder / f"{ADAPTER_CONFIG}.tmp", adapter_config(config, lora, shapes, base))
    # removed first and moved last, so that it is never beside weights that it does not describe
    (folder / ADAPTER_CONFIG).unlink(missing_ok=True)
    for name in (*files, ADAPTER_CONFIG):
        (folder / f"{name}.tmp").replace(folder / name)


def for_pipelines(stored: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return Wan's adapters in the form that diffusers' pipelines and ComfyUI load.

    Names are those of Wan's code, and B is multiplied by the scale, because neither program reads
    adapter_config.json. stored: by PEFT's names.
    """
    return {
        f"diffusion_model.{original_name(name.removeprefix(PREFIX))}": scale * x
        if ".lora_B." in name
        else x
        for name, x in stored.items()
    }


def adapter_config(config: Config, lora: Lora, names: Iterable[str], base: str) -> dict:
    """Return adapter_config.json, with only those targets that the model has.

    names: of all adapter parameters. With experts, dropout is 0, because PEFT has none for them.
    """
    paths = [name[: -len("_lora_A")] for name in names]
    targets = [target for target in lora.targets if any(matches(path, target) for path in paths)]
    classifies = config.num_labels
    task = None if isinstance(config, WanConfig) else "CAUSAL_LM"
    experts = [peft_module(target, config) for target in targets if is_expert_stack(target)]
    return dict(
        peft_type="LORA",
        task_type="SEQ_CLS" if classifies else task,
        modules_to_save=HEADS[0] if classifies else None,
        base_model_name_or_path=base,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0 if experts else lora.dropout,
        use_rslora=lora.rslora,
        target_modules=[
            peft_module(target, config) for target in targets if not is_expert_stack(target)
        ],
        target_parameters=experts or None,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
    )


def other_dropout(lora: Lora) -> list[str]:
    """Return a note if the adapters of lora.path had another dropout, which PEFT would keep."""
    had = _open(lora.path).settings.get("lora_dropout") if lora.path else None
    if not had or had == lora.dropout:
        return []
    note = f"note: lora_dropout={had} of lora.path={lora.path} is not taken over"
    return [f"{note}: lora.dropout={lora.dropout} counts"]


def unreadable_note(config: Config, lora: Lora) -> list[str]:
    """Return a note for the user if PEFT cannot read some of these adapters, otherwise nothing."""
    paths = [name[: -len(".lora_A")] for name in adapter_shapes(config, lora)]
    names = UNREADABLE.get(config.family, ())
    lost = [name for name in names if any(matches(path, name) for path in paths)]
    note = f"PEFT cannot read adapters of this model's {', '.join(lost)}, but minitrain.merge and generate can"
    return [note] if lost else []
