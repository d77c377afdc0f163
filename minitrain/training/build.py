"""From a config to this rank's part of its model: made on the meta device, laid out, filled with weights.

No rank ever holds the whole: storage is allocated after sharding, and files or initial values are read into the parts.
"""

import hashlib
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from minitrain.config import Config
from minitrain.models.checkpoint_hf import load_weights
from minitrain.models.decoder import Decoder
from minitrain.models.moe import Router
from minitrain.parallel.mesh import Meshes, owned, pick_device
from minitrain.parallel.parallelize import lay_out
from minitrain.parallel.pipeline import Pipeline


def build_model(config: Config, meshes: Meshes) -> Decoder | Pipeline:
    """The config's model, laid out over the ranks, with the weights of `model.path` or else initial ones."""
    model = lay_out(partial(make_model, config), config, meshes)
    balance_over_ranks(model, config, meshes)
    model.to_empty(device=pick_device(config.device))
    if config.model.path:
        load_weights(model, config.model.path, owned)
    else:
        initialize(model, config.seed)
    return model


def make_model(config: Config, **stage) -> Decoder:
    """The config's model on the meta device, or one stage of it (see Decoder)."""
    with torch.device("meta"):
        model = Decoder(config.model.config, **stage)
    return model.to(torch.bfloat16) if config.precision == "bf16-pure" else model


def balance_over_ranks(model: Module, config: Config, meshes: Meshes) -> None:
    """Let auxiliary losses see the tokens of all ranks, or of whole sequences, and weigh them as in one process."""
    mesh = meshes.cp if config.model.config.seq_aux else meshes.loss
    for module in model.modules():
        if isinstance(module, Router):
            module.tokens_per_step = config.batch.global_ * config.batch.seq_len
            module.sum_counts = partial(sum_over, mesh)


def sum_over(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, in place."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, group=mesh.get_group())
    return tensor


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Fill the parameters with values that depend on the seed and their names alone, however they are sharded.

    Each rank draws every parameter in full and keeps its part, one parameter at a time.
    """
    for name, parameter in model.state_dict().items():  # with buffers
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8]) >> 1)
        full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        model.initialize_parameter(name, full, generator)
        part, slices = owned(parameter)
        part.copy_(full[slices])
