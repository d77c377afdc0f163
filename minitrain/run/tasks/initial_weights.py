"""Build the models of a run with the weights that its config names: model.path, lora.path, teachers."""

from dataclasses import replace
from functools import partial

from torch.nn import Module

from minitrain.formats.hf import load_weights, read_config
from minitrain.formats.peft import fill_adapters
from minitrain.models.lora import is_new
from minitrain.parallel.mesh import Meshes
from minitrain.settings import Config, Model
from minitrain.training.build import build_model, initialize
from minitrain.training.distillation import BASE, Distillation
from minitrain.training.loop import Trainer


def make_trainer(config: Config, meshes: Meshes) -> Trainer:
    """Return a Trainer with the weights of `model.path` and `lora.path`, where there are such."""
    trainer = Trainer(config, meshes, fill=fill_weights)
    if isinstance(trainer.objective, Distillation):
        trainer.objective.make_teachers = partial(make_teachers, config, meshes)
    return trainer


def make_teachers(config: Config, meshes: Meshes) -> dict[str, Module]:
    """Return the frozen model of each teacher's folder, laid out as the run's; none for BASE."""
    return {
        folder: build_model(
            teacher_config(config, folder), meshes, fill_weights, trained=False
        ).requires_grad_(False)
        for folder in dict.fromkeys(config.teachers)
        if folder != BASE
    }


def teacher_config(config: Config, folder: str) -> Config:
    """Return the config of a teacher's model, stored in the compute type. Raises InputError if there is none."""
    precision = "fp32" if config.precision == "fp32" else "bf16-pure"
    shape = read_config(folder)
    # ranks among which there are no experts to divide
    ep = config.parallel.ep if getattr(shape, "num_experts", 0) else 1
    return replace(
        config,
        model=Model(path=folder, config=shape),
        parallel=replace(config.parallel, ep=ep),
        lora=None,
        precision=precision,
        mtp_weight=0.0,
    )


def fill_weights(config: Config, model: Module) -> None:
    """Read the weights of `model.path` and `lora.path` into a model.

    Weights that are in no file get initial values.
    """
    path = config.model.path
    lora = config.lora
    if path:
        # first, since files of a classifier have its head
        initialize(model, config.seed, is_new)
        load_weights(model, path)
    else:
        initialize(model, config.seed)
    if lora and lora.path:
        fill_adapters(model, lora, lora.path)
