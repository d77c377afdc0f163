"""A LoRA step against two others, in turns: the same by peft on transformers; and training the whole model instead."""

import dataclasses

from torch.nn import Module

from minitrain.bench.measure import activation_bytes
from minitrain.bench.versus import TransformersTrainer, in_turns
from minitrain.config import Config
from minitrain.errors import InputError
from minitrain.models.checkpoint_peft import adapter_config, adapter_shapes
from minitrain.models.lora import DTYPES
from minitrain.parallel.mesh import Meshes
from minitrain.training.datasets import open_dataset
from minitrain.training.loop import Trainer
from minitrain.training.optim import make_optimizer


class PeftTrainer(TransformersTrainer):
    """transformers' model with peft's adapters, its frozen weights in the same type as `ours` has them."""

    def __init__(self, ours: Trainer):
        super().__init__(ours)
        self.model = self.adapt(self.model.to(next(ours.model.parameters()).dtype), ours.config)
        self.optimizer = make_optimizer(self.model, ours.config.optim)

    def adapt(self, model: Module, config: Config) -> Module:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise InputError("--versus peft needs the package: pip install 'minitrain[test]'") from None
        shape, lora = config.model.config, config.lora
        settings = adapter_config(shape, lora, adapter_shapes(shape, lora), base="") | {"inference_mode": False}
        settings.pop("peft_type")
        model = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[lora.dtype])
        return model


def versus_peft(config: Config, meshes: Meshes, row: str, steps: int, warmup: int) -> dict:
    """See `in_turns`."""
    return in_turns(config, meshes, row, steps, warmup, "peft", PeftTrainer)


def versus_full(config: Config, meshes: Meshes, row: str, steps: int, warmup: int) -> dict:
    """See `in_turns`; and the GiB that each takes: weights, gradients, optimizer states and activations."""
    trainers = []

    def whole_model(ours: Trainer) -> Trainer:
        trainers.extend([ours, Trainer(dataclasses.replace(config, lora=None), meshes)])
        return trainers[1]

    outcome = in_turns(config, meshes, row, steps, warmup, "full", whole_model)
    return outcome | {"versus_memory_gib": [training_bytes(trainer) / 2**30 for trainer in trainers]}


def check_adapters(config: Config, rival: str) -> None:
    """Raises InputError for a config that these two have nothing to say about."""
    if config.lora is None:
        raise InputError(f"--versus {rival} is about adapters, and the config has none (give it a lora section)")


def training_bytes(trainer: Trainer) -> int:
    """What a step works with at most, once the optimizer has its states."""
    parameters = list(trainer.model.parameters())
    lasting = sum(p.nbytes * (2 if p.requires_grad else 1) for p in parameters)  # with its gradient
    states = sum(x.nbytes for state in trainer.optimizer.state.values() for x in state.values())
    return lasting + states + activation_bytes(trainer, open_dataset(trainer.config)[0])
