"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

    ours                                           in the file, behind `base_model.model.`
    model.layers.0.self_attn.q_proj.lora_A         model.layers.0.self_attn.q_proj.lora_A.weight
    model.layers.0.mlp.experts.down_proj_lora_A    model.layers.0.mlp.experts.lora_A.weight
        [experts, rank, in]                            [experts x rank, in]
    model.layers.0.mlp.experts.down_proj_lora_B    model.layers.0.mlp.experts.lora_B.weight
        [experts, out, rank]                           [out, rank x experts]
    ...experts.gate_up_proj_lora_A                 the same, and where both are adapted ...experts.base_layer.lora_A.weight

The names are those of transformers' modules, which for some families differ from the hub's tensors. Experts are what
PEFT calls `target_parameters`. Asked for their gate_proj and up_proj, it gives the joint one twice the rank and alpha
(`rank_pattern`): here all adapters then have the largest rank, the others filled up with zeros, which training leaves
as they are. Some of what can be adapted has no form in PEFT, see `UNREADABLE`: such adapters can be read here only, and
a run says so when it begins. Wan's adapters are written once more, see `for_pipelines`: diffusers' pipelines leave out,
but for a warning, what has PEFT's names. Of Wan's, what others have written is read, too: one file, in the names of
diffusers, ComfyUI or musubi-tuner (see `adapter_place`), whose scale is 1 unless it holds alphas or its header has
settings. Left out: what such files change of biases and norms; GPT-3, whose q, k and v are one matrix on the hub; all
variants of LoRA.
"""  # noqa: E501

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitrain.errors import InputError, hub_hint, located
from minitrain.formats.config_hf import read_json, write_json
from minitrain.formats.hf import StoredTensor, check_stored, stored_tensors
from minitrain.formats.layouts_hf import interleave, mamba_parts
from minitrain.formats.magic import ADAPTER_CONFIG, kind_of_folder, library_of
from minitrain.formats.tensor_files import FLOATS, open_tensors, write_tensors
from minitrain.formats.wan_names import adapter_place, original_name
from minitrain.models.lora import add_adapters, check_targets, is_adapter, is_expert_stack, matches
from minitrain.models.mamba import by_group, by_part
from minitrain.models.wan import WanConfig
from minitrain.models.zoo import empty_model
from minitrain.parallel.shards import Slices, all_of
from minitrain.settings import LARGEST_ALPHA, LARGEST_RANK, Lora

TARGETS = ("target_modules", "target_parameters")  # keys of adapter_config.json
PATTERNS = ("rank_pattern", "alpha_pattern")
MIXERS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mamba": ("in_proj", "out_proj"),
}  # the rest: mlp
CONFIG = ADAPTER_CONFIG
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of all names in it
PIPELINE_WEIGHTS = (
    "pytorch_lora_weights.safetensors"  # what diffusers' load_lora_weights looks for in a folder
)
UNREADABLE = {
    "deepseek_v3": (
        "gate_proj",
        "up_proj",
        "down_proj",
    ),  # PEFT takes them for the stacks of experts
    "nemotron_h": ("out_proj",),  # PEFT refuses it: the kernels of Mamba go around it
}
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
    """What adapter_config.json in folder `path` says, but for dropout, or what a file of Wan's
    adapters does.

    Raises InputError for what is no plain LoRA.
    """
    file, raw, stored = _open(path)
    variants = [key for key in VARIANTS if raw.get(key)] + ["bias"] * (
        raw.get("bias", "none") != "none"
    )
    if isinstance(start := raw.get("init_lora_weights"), str) and start not in (
        "gaussian",
        "eva",
        "orthogonal",
    ):
        variants.append(f"init_lora_weights={start}")  # these change the base weights
    if raw.get("peft_type") != "LORA" or variants:
        raise InputError(
            f"{file}: only plain LoRA is supported, not {', '.join(variants) or raw.get('peft_type')}"
        )
    targets = [
        _our_target(target, key) for key in TARGETS for target in _names(raw, key, file, stored)
    ]
    sizes = _sizes(raw, file)
    for rank, alpha in sizes:
        if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
            raise InputError(
                f"{file}: r={rank!r} must be a whole number from 1 to {LARGEST_RANK:,}"
            )
        if type(alpha) not in (int, float) or not abs(alpha) <= LARGEST_ALPHA:  # nan is not
            raise InputError(f"{file}: lora_alpha={alpha!r} must be a number")
    settings = [
        Lora(rank, float(alpha), rslora=bool(raw.get("use_rslora")), targets=targets)
        for rank, alpha in sizes
    ]
    if len({lora.scale for lora in settings}) > 1:
        raise InputError(
            f"{file}: only plain LoRA is supported, not a rank_pattern that changes the scale of updates"
        )
    return max(settings, key=lambda lora: lora.rank)


def _sizes(raw: dict, file: Path) -> list[tuple]:
    """Every (rank, alpha) of adapter_config.json: the usual ones, and those of patterns."""
    ranks, alphas = (raw.get(key) or {} for key in PATTERNS)
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        raise InputError(f"{file}: {' and '.join(PATTERNS)} must give numbers by name")
    rank = raw.get("r")
    alpha = raw.get("lora_alpha")
    return [(rank, alpha)] + [
        (ranks.get(name, rank), alphas.get(name, alpha)) for name in ranks | alphas
    ]


def adapter_files(path: str | Path) -> tuple[Path | None, Path]:
    """Settings and tensors of the adapters at `path`: PEFT's two files in a folder, or one that
    says all.
    """
    path = Path(path)
    folder = path.parent if os.path.isfile(path) and path.name == WEIGHTS else path
    pipelines = folder / PIPELINE_WEIGHTS
    if not os.path.exists(folder / CONFIG) and (os.path.isfile(path) or os.path.exists(pipelines)):
        return None, path if os.path.isfile(path) else pipelines
    return folder / CONFIG, folder / WEIGHTS


def _open(path: str | Path) -> tuple[Path, dict, dict[str, StoredTensor]]:
    """The file that has the settings, these as adapter_config.json says them, and the tensors by
    PEFT's names.
    """
    if not os.path.exists(path) and (hint := hub_hint(str(path), "give ")):
        raise InputError(f"{path} is no folder{hint}")
    config, weights = adapter_files(path)
    if config and os.path.isdir(path) and not os.path.exists(config):
        raise InputError(f"{path} holds no {CONFIG}{kind_of_folder(Path(path))}")
    raw = read_json(config) if config else None
    if raw and raw.get("peft_type") != "LORA":
        raise InputError(f"{config}: only plain LoRA is supported, not {library_of(raw)}")
    pickled = weights.with_suffix(".bin")
    if os.path.exists(pickled) and not os.path.exists(weights):
        raise InputError(
            f"{pickled} is not read (save the adapters again with PEFT's save_pretrained)"
        )
    raw = raw if config else _told_in_header(weights)
    stored = {}
    ranks = {}
    alphas = {}
    for name, tensor in stored_tensors([weights]).items():
        module, role = adapter_place(name) or (None, None)
        if role == "alpha" and raw is None:
            alphas[module] = _number(tensor)
        elif role in ("A", "B"):
            stored[f"{PREFIX}{module}.lora_{role}.weight"] = tensor
            ranks |= {module: tensor.shape[0] if tensor.shape else 0} if role == "A" else {}
        else:
            stored[name] = tensor
    if raw is None:
        if not ranks:
            known = "named as by diffusers, ComfyUI or musubi-tuner"
            raise InputError(f"{weights}: without an {CONFIG} it must be a LoRA of Wan, {known}")
        alphas = ranks | alphas  # without an alpha the scale is 1
        rank, alpha = (next(iter(each.values())) for each in (ranks, alphas))
        raw = dict(
            peft_type="LORA", r=rank, lora_alpha=alpha, rank_pattern=ranks, alpha_pattern=alphas
        )
    return config or weights, raw | (dict(target_modules=list(ranks)) if ranks else {}), stored


def _told_in_header(file: Path) -> dict | None:
    """The settings, where the file's header has them, as diffusers and finetrainers write it."""
    with open_tensors(file) as contents:
        header = contents.metadata() or {}
    told = header.get("lora_adapter_metadata") or header.get("lora_config")
    if not told:
        return None
    try:
        raw = {key.removeprefix("transformer."): value for key, value in json.loads(told).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{file}: the settings in its header are no JSON object: {error}"
        ) from None
    return dict(peft_type="LORA") | raw


def _number(tensor: StoredTensor) -> float:
    if math.prod(tensor.shape) != 1:
        raise InputError(
            f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, expected one number"
        )
    with open_tensors(tensor.file) as contents:
        return contents.get_tensor(tensor.name).item()


def _names(raw: dict, key: str, file: Path, stored: dict[str, StoredTensor]) -> list[str]:
    names = raw.get(key) or []
    if key == "target_modules" and isinstance(
        names, str
    ):  # a regular expression: what it found, the tensors tell
        found = (
            re.fullmatch(r"base_model\.model\.(.*)\.lora_A\.weight", tensor) for tensor in stored
        )
        return [
            match[1]
            for match in found
            if match and not match[1].endswith((".experts", ".experts.base_layer"))
        ]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{file}: {key} must be a list of names, not {names!r}")
    return names


def load_adapter(model: nn.Module, path: str | Path) -> None:
    """Give an unsharded model the adapters of folder `path`, in place; the model is frozen.

    Raises InputError, before anything is changed, for a folder that is no plain LoRA or does not
    fit the model.
    """
    lora = read_adapter_config(path)
    stored = _read_tensors(model.config, lora, Path(path))
    add_adapters(model, lora)
    _fill(model, stored, all_of)


def fill_adapters(
    model: nn.Module, lora: Lora, path: str | Path, owned: Callable[[Tensor], tuple[Tensor, Slices]]
) -> None:
    """Read adapters that the model has already. owned: what of a parameter this process holds, see
    `load_weights`.
    """
    _fill(model, _read_tensors(model.config, lora, Path(path)), owned)


@torch.no_grad()
def _fill(model: nn.Module, stored: dict[str, Tensor], owned: Callable) -> None:
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            part, slices = owned(parameter)
            part.copy_(stored[name][slices])


def _read_tensors(config, lora: Lora, path: Path) -> dict[str, Tensor]:
    """Every adapter's tensors by our names, those of a lower rank filled up with zeros. config: the
    model's.
    """
    (source, raw, stored), file = _open(path), adapter_files(path)[1]
    with located(source):
        shapes = adapter_shapes(config, lora)
    keys = {name: stored_name(name, shapes, config) for name in shapes}
    stated = {rank for rank, _ in _sizes(raw, source)}
    own = {}
    for name, key in keys.items():
        a = stored.get(keys[f"{name[:-1]}A"])
        rank = a.shape[0] // math.prod(shapes[name][:-2]) if a and a.shape else 0
        own[name] = with_rank(name, shapes[name], rank if rank in stated else lora.rank)
        expected = to_stored(name, torch.empty(own[name], device="meta"), config).shape
        check_stored(stored, key, expected, FLOATS, file)
    places = set(keys.values())
    if extra := [key for key in stored if key not in places]:
        raise InputError(f"{file}: tensor {extra[0]} has no place in the model")
    if all(
        own[name] != shape for name, shape in shapes.items()
    ):  # all would be filled up, for nothing
        raise InputError(f"{source}: no adapter has the largest rank, {lora.rank}")
    with open_tensors(file) as contents:
        tensors = {
            name: from_stored(name, contents.get_tensor(stored[key].name), own[name], config)
            for name, key in keys.items()
        }
    return {name: filled_up(tensor, shapes[name]) for name, tensor in tensors.items()}


def with_rank(name: str, shape: torch.Size, rank: int) -> torch.Size:
    """The shape of an adapter's parameter if it had this rank."""
    *stack, rows, columns = shape
    return torch.Size((*stack, rank, columns) if name.endswith("A") else (*stack, rows, rank))


def filled_up(tensor: Tensor, shape: torch.Size) -> Tensor:
    """With zeros, at the ends of its last two dimensions."""
    return F.pad(tensor, (0, shape[-1] - tensor.shape[-1], 0, shape[-2] - tensor.shape[-2]))


def adapter_shapes(config, lora: Lora) -> dict[str, torch.Size]:
    """Name and shape of every adapter's parameters in the model of `config`. Raises InputError: see
    `check_targets`.
    """
    if config.family == "gpt2":
        raise InputError(
            "lora: adapters of GPT-3's q_proj, k_proj and v_proj have no form in PEFT: there they are one"
        )
    model = empty_model(config)
    check_targets(model, lora.targets)
    add_adapters(model, lora)
    return {
        name: parameter.shape for name, parameter in model.named_parameters() if is_adapter(name)
    }


def save_adapter(
    tensors: Iterable[tuple[str, Tensor]], config, lora: Lora, path: str | Path, base: str = ""
) -> None:
    """Write whole adapters, by our names, so that `peft.PeftModel.from_pretrained(model, path)`
    loads them.

    config: the model's. base: its name or folder, as peft's Auto classes want to know it.
    """
    folder = Path(path)
    shapes = adapter_shapes(config, lora)
    stored = {
        stored_name(name, shapes, config): to_stored(
            name, tensor.detach().cpu(), config
        ).contiguous()
        for name, tensor in tensors
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {WEIGHTS: stored}
    if isinstance(config, WanConfig):
        files[PIPELINE_WEIGHTS] = for_pipelines(stored, lora.scale)
    for name, contents in files.items():
        write_tensors(contents, folder / f"{name}.tmp", metadata={"format": "pt"})
    write_json(folder / f"{CONFIG}.tmp", adapter_config(config, lora, shapes, base))
    (folder / CONFIG).unlink(
        missing_ok=True
    )  # whoever finds it shall find the weights that it describes
    for name in (*files, CONFIG):
        (folder / f"{name}.tmp").replace(folder / name)


def for_pipelines(stored: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Wan's adapters as diffusers' pipelines and ComfyUI load them: under the original names, and
    with the scale in B, since neither reads adapter_config.json. stored: in PEFT's names."""
    return {
        f"diffusion_model.{original_name(name.removeprefix(PREFIX))}": scale * x
        if ".lora_B." in name
        else x
        for name, x in stored.items()
    }


def adapter_config(config, lora: Lora, names: Iterable[str], base: str) -> dict:
    """adapter_config.json, with those targets that the model has. names: of all adapters'
    parameters.

    PEFT has no dropout for experts, so there it is not told of any.
    """
    paths = [name[: -len("_lora_A")] for name in names]
    targets = [target for target in lora.targets if any(matches(path, target) for path in paths)]
    experts = [target for target in targets if is_expert_stack(target)]
    return dict(
        peft_type="LORA",
        task_type=None if isinstance(config, WanConfig) else "CAUSAL_LM",
        base_model_name_or_path=base,
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0 if experts else lora.dropout,
        use_rslora=lora.rslora,
        target_modules=[_module(target, config) for target in targets if target not in experts],
        target_parameters=[_module(target, config) for target in experts] or None,
        bias="none",
        fan_in_fan_out=False,
        inference_mode=True,
    )


def unreadable_note(config, lora: Lora) -> list[str]:
    """A line for the user where PEFT cannot read adapters of such a model's, none otherwise."""
    paths = [name[: -len(".lora_A")] for name in adapter_shapes(config, lora) if not is_expert_stack(name)]
    lost = sorted(
        {
            name
            for name in UNREADABLE.get(config.family, ())
            for path in paths
            if matches(path, name)
        }
    )
    note = f"PEFT cannot read adapters of this model's {', '.join(lost)}, but minitrain.merge and generate can"
    return [note] if lost else []


# ------------------------------------------------------------------------------------------------- one tensor at a time


def stored_name(name: str, names: Iterable[str], config) -> str:
    """Our name of an adapter's parameter -> PEFT's. names: all that there are."""
    path = name[: -len("lora_A")]
    letter = name[-1]
    module = path.rstrip("._")
    if path.endswith("_"):  # a stack, of the module above
        module, _, stack = module.rpartition(".")
        if stack != "down_proj" and f"{module}.down_proj_lora_A" in names:
            module += ".base_layer"
    return f"{PREFIX}{_module(module, config)}.lora_{letter}.weight"


def _module(path: str, config) -> str:
    """The path of a module, or the end of one, as transformers has it: in Nemotron-H every part is
    a `mixer`.
    """
    return (
        re.sub(r"\b(self_attn|mamba|mlp)\.", "mixer.", path)
        if config.family == "nemotron_h"
        else path
    )


def _our_target(target: str, key: str) -> str:
    """The end of a path as it is here: which of Nemotron-H's mixers it is in, its own name tells.
    Parameters are those of experts."""
    last = target.rpartition(".")[2]
    if key == "target_parameters" and target == last:
        return f"experts.{last}"
    part = next((part for part, names in MIXERS.items() if last in names), "mlp")
    return re.sub(r"\bmixer\.", f"{part}.", target)


def to_stored(name: str, tensor: Tensor, config) -> Tensor:
    """Our adapter's tensor in PEFT's shape."""
    parts = mamba_parts(name, config)
    if parts and name.endswith("B"):
        tensor = by_part(tensor, parts, config.mamba.groups)
    if tensor.ndim == 2:
        return tensor
    if name.endswith("A"):
        return tensor.flatten(0, 1)
    if _is_separated(name, config):
        tensor = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], dim=1)
    return tensor.permute(1, 2, 0).flatten(1)


def from_stored(name: str, tensor: Tensor, shape: torch.Size, config) -> Tensor:
    """The other way round. shape: of ours."""
    parts = mamba_parts(name, config)
    if parts and name.endswith("B"):
        tensor = by_group(tensor, parts, config.mamba.groups)
    if len(shape) == 2:
        return tensor
    if name.endswith("A"):
        return tensor.view(shape)
    tensor = tensor.view(shape[1], shape[2], shape[0]).permute(2, 0, 1)
    return interleave(*tensor.chunk(2, dim=1)) if _is_separated(name, config) else tensor


def _is_separated(name: str, config) -> bool:
    """All but GPT-OSS have all gate rows first, then all up rows."""
    return config.family != "gpt_oss" and "gate_up_proj" in name
