"""Time the same training step by another library, alternating with ours in one process.

Alternation makes noise of the machine affect both alike. The libraries are transformers, peft (on
transformers' models) and diffusers. "full" is minitrain itself, training all weights instead of
adapters.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median_high

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from minitrain.bench.measure import activation_bytes, progress
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.formats import gpt2
from minitrain.formats.config_hf import config_to_hf
from minitrain.formats.peft import adapter_config, adapter_shapes
from minitrain.formats.wan_names import config_to_json
from minitrain.models.lora import ADAPTER_DTYPES
from minitrain.parallel.mesh import Meshes
from minitrain.run.monitor.hardware import timed
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.settings import Config
from minitrain.training.loop import Trainer, to_device
from minitrain.training.mtp_loss import trains_mtp
from minitrain.training.optim import clip_gradients, make_optimizer


def versus(
    config: Config, meshes: Meshes, row: str, steps: int, warmup: int, library: str
) -> dict:
    """Time `steps` training steps of ours and of `library`; for "full", also measure memory."""
    data, _ = open_dataset(config)
    ours = make_trainer(config, meshes)
    trainers = ours, RIVALS[library](ours)
    for trainer in trainers if library == "full" else trainers[:1]:
        trainer.prepare(data, warmup + steps)
    pairs = []
    for step in progress(warmup + steps, f"{row} versus {library}"):
        runs = [partial(trainer.step, data, step) for trainer in trainers]
        pairs.append([timed(run, ours.device) for run in runs])
    outcome = versus_result(library, pairs[warmup:])
    if library == "full":
        outcome["versus_memory_gib"] = [training_bytes(trainer) / 2**30 for trainer in trainers]
    return outcome


def versus_result(library: str, pairs: list[list[float]]) -> dict:
    """Return the keys of a result that compare with `library`. A ratio above 1: ours is faster.

    pairs: seconds of our step and of the library's.
    """
    ratios = [theirs / ours for ours, theirs in pairs]
    return {
        "versus": library,
        "versus_ratio": median_high(ratios),
        "versus_ratio_range": [min(ratios), max(ratios)],
        "versus_step_time_s": [median_high(column) for column in zip(*pairs, strict=True)],
    }


def check_installed(library: str) -> None:
    """Raise InputError if the library's package is not installed."""
    if library != "full" and importlib.util.find_spec(library) is None:
        raise InputError(f"--versus {library} needs the package: pip install -e '.[test]'")


def check_versus(config: Config, library: str) -> None:
    """Raise InputError for a config whose training step `library` cannot do."""
    video = config.task == "diffusion"
    if config.task == "grpo":
        raise InputError(
            f"--versus {library} is for training steps, not for task=grpo (sampling has --generate)"
        )
    others = config.task in ("dpo", "reward") or config.teachers or trains_mtp(config)
    if library != "full" and others:
        raise InputError(
            f"--versus {library}: it learns next tokens alone (use task=sft, and mtp_weight=0)"
        )
    if library != "full" and video != (library == "diffusers"):
        raise InputError(
            f"--versus {library} is not for task={config.task} (use {'diffusers' if video else 'transformers'})"
        )
    if library in ("peft", "full") and config.lora is None:
        raise InputError(
            f"--versus {library} is about adapters, and the config has none (give it a lora section)"
        )
    if library in ("transformers", "diffusers") and config.lora is not None:
        use = "full" if video else "peft"
        raise InputError(
            f"--versus {library} trains whole models, and the config has adapters (use {use})"
        )
    if config.precision == "fp8":
        raise InputError(f"--versus {library}: it does not train in FP8 (use precision=bf16)")
    if library != "full" and config.recompute not in ("none", "full"):
        raise InputError(
            f"--versus {library}: {library} has no recompute={config.recompute} (use none or full)"
        )


def training_bytes(trainer: Trainer) -> int:
    """Return the peak bytes of a step: parameters, gradients, optimizer states, activations."""
    parameters = list(trainer.model.parameters())
    # parameters, with a gradient of the same size for each one that is trained
    lasting = sum(p.nbytes * (1 + p.requires_grad) for p in parameters)
    states = sum(x.nbytes for state in trainer.optimizer.state.values() for x in state.values())
    return lasting + states + activation_bytes(trainer, open_dataset(trainer.config)[0])


# --- the libraries


class Rival:
    """Another library's model, trained with the optimizer, precision and micro-batches of `ours`.

    blocks: the modules to compile if ours are compiled. loss(batch, count): the sum of a
    micro-batch's loss terms over `count`, the number of terms in the whole batch.
    """

    def __init__(
        self,
        ours: Trainer,
        model: Module,
        blocks: Iterable[Module],
        loss: Callable[[dict, int], Tensor],
    ):
        self.ours = ours
        self.model = model
        self.loss = loss
        if ours.config.compile:
            for block in blocks:
                block.compile(dynamic=False)
        self.optimizer = make_optimizer(model, ours.config.optim)

    def step(self, dataset, step: int) -> None:
        config = self.ours.config
        device = self.ours.device
        batches = self.ours.micro_batches(dataset, step)
        count = sum(self.ours.objective.count(batch) for batch in batches)
        mixed = config.precision == "bf16"
        for batch in batches:
            batch = to_device(batch, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
                loss = self.loss(batch, count)
            loss.backward()
        clip_gradients(list(self.model.parameters()), config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def transformers_rival(ours: Trainer) -> Rival:
    return decoder_rival(ours, trained_transformers_model(ours.config, ours.device))


def decoder_rival(ours: Trainer, model: Module) -> Rival:
    """Return a model of transformers as a rival. Its first ModuleList holds its layers."""
    layers = next(module for module in model.modules() if isinstance(module, ModuleList))
    return Rival(ours, model, layers, partial(transformers_loss, model))


def transformers_model(config: Config, device: torch.device, dtype: torch.dtype) -> Module:
    """Return transformers' model of the config's shape, randomly initialized, on `device`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    # only GPT-2 has these, with dropout by default
    no_dropout = dict.fromkeys(gpt2.DROPOUTS, 0.0)
    hf_config = AutoConfig.for_model(**config_to_hf(config.model.config, dtype) | no_dropout)
    with device:
        return AutoModelForCausalLM.from_config(hf_config, dtype=dtype)


def trained_transformers_model(config: Config, device: torch.device) -> Module:
    dtype = torch.bfloat16 if config.precision == "bf16-pure" else torch.float32
    model = transformers_model(config, device, dtype)
    if config.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def transformers_loss(model: Module, batch: dict[str, Tensor], count: int) -> Tensor:
    """Return a micro-batch's share of the loss.

    transformers finds the packed documents by restarting positions. Its GPT-OSS does not: there
    tokens attend across documents, which takes as long.
    """
    return model(
        input_ids=batch["tokens"],
        labels=batch["labels"],
        shift_labels=batch["labels"],
        position_ids=batch.get("positions"),
        num_items_in_batch=count,
        use_cache=False,
    ).loss


def peft_rival(ours: Trainer) -> Rival:
    """Return transformers' model with peft's adapters, frozen weights in the dtype of ours."""
    from peft import LoraConfig, get_peft_model

    dtype = next(ours.model.parameters()).dtype
    model = trained_transformers_model(ours.config, ours.device).to(dtype)
    shape = ours.config.model.config
    lora = ours.config.lora
    settings = adapter_config(shape, lora, adapter_shapes(shape, lora), base="")
    settings["inference_mode"] = False
    del settings["peft_type"]
    adapted = get_peft_model(model, LoraConfig(**settings), autocast_adapter_dtype=False)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(ADAPTER_DTYPES[lora.dtype])
    return decoder_rival(ours, adapted)


def diffusers_rival(ours: Trainer) -> Rival:
    """Return diffusers' Wan under our objective."""
    from diffusers import WanTransformer3DModel

    with ours.device:
        model = WanTransformer3DModel.from_config(config_to_json(ours.config.model.config))
    if ours.config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    if ours.config.recompute == "full":
        model.enable_gradient_checkpointing()

    def velocity(latents, timestep, text, image=None):
        # diffusers' model does not cast its inputs
        latents, text = latents.to(model.dtype), text.to(model.dtype)
        image = image if image is None else image.to(model.dtype)
        (found,) = model(
            latents, timestep, text, encoder_hidden_states_image=image, return_dict=False
        )
        return found

    def loss(batch, count):
        return ours.objective.loss(velocity, batch) / count

    return Rival(ours, model, model.blocks, loss)


def whole_model(ours: Trainer) -> Trainer:
    """Return a trainer of all weights, without adapters."""
    return make_trainer(dataclasses.replace(ours.config, lora=None), ours.meshes)


RIVALS = {
    "transformers": transformers_rival,
    "diffusers": diffusers_rival,
    "peft": peft_rival,
    "full": whole_model,
}
