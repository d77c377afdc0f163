"""Build this rank's shard of a config's model: on the meta device, then sharded, then filled.

No rank ever holds the full model: storage is allocated after sharding, and values are written into
the shards.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import Module

from minitrain.hashing import seed_of
from minitrain.models.cpu import use_cpu_linears
from minitrain.models.decoder import Decoder
from minitrain.models.fp8 import to_fp8
from minitrain.models.fp8_forms import dequantized_note
from minitrain.models.frozen import freeze, frozen_weights, further_parts
from minitrain.models.lora import add_adapters, initialize_adapter, is_adapter
from minitrain.models.router import Router
from minitrain.models.wan import Wan
from minitrain.models.zoo import empty_model
from minitrain.parallel.collectives import sum_over_
from minitrain.parallel.fsdp_fp8 import gather_in_fp8, gathered_wide
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.parallelize import parallelize
from minitrain.parallel.pipeline import Pipeline
from minitrain.parallel.shards import local_shard
from minitrain.settings import Config
from minitrain.training.footprint import check_fits
from minitrain.training.mtp_loss import trains_mtp


def build_model(
    config: Config,
    meshes: Meshes,
    fill: Callable[[Config, Module], None] | None = None,
    trained: bool = True,
) -> Decoder | Wan | Pipeline:
    """Return the config's model, parallelized over the ranks.

    fill(config, model): sets the parameters, which a config with a path to files needs; by default
        random initial values.
    trained: the model will have gradients and optimizer states.
    Raises InputError if they do not fit this rank's memory.
    """
    if fill is None and (config.model.path or (config.lora and config.lora.path)):
        raise ValueError(
            "model.path and lora.path need `fill` (see run/tasks/initial_weights.py)"
        )
    model = lay_out(partial(make_model, config), config, meshes)
    check_fits(model, config, meshes, trained)
    allocate(model, config, meshes.device)
    if meshes.device.type == "cpu":
        use_cpu_linears(model)
    if fill is None:
        initialize(model, config.seed)
    else:
        fill(config, model)
    return model


def lay_out(make: Callable[..., Module], config: Config, meshes: Meshes) -> Module:
    """Return the model that `make` builds on the meta device, parallelized over the ranks.

    make: as `parallelize` takes it, which calls it once for each stage of a pipeline.
    """
    model = parallelize(make, config, meshes)
    balance_over_ranks(model, config, meshes)
    return model


def allocate(model: Module, config: Config, device: torch.device) -> None:
    """Allocate memory for this rank's shards, whose values are still undefined."""
    model.to_empty(device=device)
    if config.precision == "fp8":
        gather_in_fp8(model, config.fp8.keep_transposed)


def make_model(config: Config, **stage) -> Decoder | Wan:
    """Return the config's model on the meta device, or one pipeline stage of it (see Decoder)."""
    model = empty_model(config.model.config, **stage)
    # frozen weights are stored in the compute type
    if config.precision == "bf16-pure" or (config.lora and config.precision != "fp32"):
        model.to(torch.bfloat16)
    if config.lora:
        add_adapters(model, config.lora)
        if getattr(model, "score", None):
            model.score.float().requires_grad_(True)
    if config.precision == "fp8":
        p = config.parallel
        to_fp8(
            model.blocks,
            config.fp8.fast_accumulation,
            tp=p.tp,
            experts=fp8_experts(config),
            form=config.fp8.form,
            experts_tp=1 if p.ep > 1 else p.tp,
        )
    if config.lora and config.lora.base != "bf16":
        freeze(model.blocks, config.lora.base)
    if getattr(model, "mtp_layers", ()) and not trains_mtp(config):
        for layer in model.mtp_layers:
            layer.requires_grad_(False)
    return model


def fp8_experts(config: Config) -> bool:
    """Tell whether routed experts compute in FP8: with a scale per tensor, only one on each rank."""
    ep = config.parallel.ep
    one_each = ep > 1 and ep == getattr(config.model.config, "num_experts", 0)
    return config.fp8.experts and (one_each or config.fp8.form != "tensor")


def fp8_notes(model: Module, config: Config, meshes: Meshes) -> Iterator[str]:
    """Yield lines on what is not in FP8 though the config asks for it: products, all-gathers."""
    if config.precision != "fp8":
        return
    form = config.fp8.form
    if note := dequantized_note(form, config.fp8.experts, meshes.device):
        yield note
    if meshes.parameters.size() > 1 and (wide := gathered_wide(model)):
        yield (
            f"note: fp8.form={form}: FSDP gathers {wide} of this rank's FP8 weights in bf16: their "
            f"shards have not all that rounds them"
        )


def balance_over_ranks(model: Module, config: Config, meshes: Meshes) -> None:
    """Let auxiliary losses count the routing of all ranks' tokens, or of full sequences."""
    for module in model.modules():
        if isinstance(module, Router):
            mesh = meshes.sequence if config.model.config.seq_aux else meshes.tokens
            module.sum_counts = partial(sum_over_, mesh)


@torch.no_grad()
def initialize(
    model: Decoder | Wan, seed: int, wanted: Callable[[str], bool] = lambda name: True
) -> None:
    """Fill parameters and buffers with values that depend only on the seed and their names.

    wanted(name): says whether to fill a tensor.
    Each rank draws one full tensor at a time and keeps its shard, so layouts do not matter.
    """
    tensors = model.state_dict()
    frozen = frozen_weights(model)
    further = further_parts(frozen)
    for name, parameter in tensors.items():
        if not wanted(name) or name in further:
            continue
        # a DTensor's shape is that of the full tensor
        shape = frozen[name].shape if name in frozen else parameter.shape
        generator = torch.Generator(parameter.device).manual_seed(seed_of(f"{seed}/{name}"))
        full = torch.empty(shape, dtype=torch.float32, device=parameter.device)
        fill = initialize_adapter if is_adapter(name) else model.initialize_parameter
        fill(name, full, generator)
        parts = frozen[name].parts(full) if name in frozen else {name: full}
        for each, values in parts.items():
            part, slices = local_shard(tensors[each])
            part.copy_(values[slices])
