"""The training side of GRPO: updates the policy from groups of rewarded responses."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.grpo.advantages import advantages
from minitrain.grpo.batches import Example, pack_micro_batches, reply_example, response_example
from minitrain.grpo.objective import PolicyGradient
from minitrain.grpo.responses import Group, ProblemSet, rewards
from minitrain.grpo.weight_sync import Shards
from minitrain.models.lora import adapter_names, is_adapter, merged_weight, without_adapters
from minitrain.models.router import replay_routing
from minitrain.parallel.context import local_tokens
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.shards import full_tensor, local_shard, to_local
from minitrain.settings import Config
from minitrain.training.adamw import random_bits, round_stochastically, states_on_device
from minitrain.training.build import build_model
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.log_probs import label_log_probs
from minitrain.training.loop import Trainer, apply_update, is_finite
from minitrain.training.mtp_loss import make_mtp_loss, with_next_tokens
from minitrain.training.optim import make_optimizer
from minitrain.training.packing import Batch


class PolicyTrainer:
    """A Trainer of the policy, the reference model if grpo.kl needs one, and a teacher.

    phase(name): a context around a part of a step: `logprobs` or `training`. It loads what the
        part needs in memory (offload.py), and counts its time.
    fill: see `build_model`.
    """

    def __init__(
        self,
        config: Config,
        meshes: Meshes,
        phase: Callable[[str], AbstractContextManager],
        fill: Callable[[Config, Module], None] | None = None,
    ):
        self.config = config
        self.meshes = meshes
        self.phase = phase
        self.mtp = make_mtp_loss(config)
        objective = PolicyGradient(
            config.grpo, config.rollout.temperature, config.rollout.max_tokens, self.mtp
        )
        self.trainer = Trainer(config, meshes, objective, fill)
        self.model = self.trainer.model
        self.device = self.trainer.device
        self.reference: Module | None = None
        # set by who makes it; None: the policy without its adapters, if distill.teacher says so
        self.teacher: Module | None = None

    # --- training

    def learn(self, groups: list[Group], step: int) -> dict[str, float]:
        """Run one update per batch.global responses; return the step's metrics.

        With a single update `old` is left out: the update itself computes these log-probabilities.
        """
        grpo = self.config.grpo
        size = self.config.batch.global_
        with self.phase("logprobs"):
            # one advantage for each response, in the order of `groups`
            values = [0.0] * sum(map(len, groups))
            # a teacher gives each token its own
            if not self.config.teachers:
                given = advantages(rewards(groups), grpo.baseline, grpo.std_scaling)
                values = given.flatten().tolist()
            pairs = zip(chain(*groups), values, strict=True)
            samples = [
                response_example(response, value, self.config) for response, value in pairs
            ]
            updates = [self.batches(samples[n : n + size]) for n in range(0, len(samples), size)]
            # the micro-batches of all updates: their log-probabilities precede the first update
            every = list(chain(*updates))
            if len(updates) > 1:
                self.add_log_probs("old", self.model, every)
            if self.reference is not None or grpo.kl:
                self.add_log_probs("reference", self.reference, every)
            if self.config.teachers:
                temperature = self.config.distill.temperature
                self.add_log_probs("teacher", self.teacher, every, temperature)
        with self.phase("training"):
            results = [self.trainer.update(batches, step) for batches in updates]
            if grpo.replay_routing:
                # the sampler may use the same model
                replay_routing(self.model, None)
            # only now does the host wait for the device
            results = [{key: value.item() for key, value in result.items()} for result in results]
            numbers = {
                key: sum(result[key] for result in results) / len(results) for key in results[0]
            }
            numbers["lr"] = self.trainer.optimizer.param_groups[0]["lr"]
            numbers["skipped"] = sum(not is_finite(result) for result in results)
            objective = self.trainer.objective
            return numbers | objective.metrics(self.trainer.total(objective.sums()).tolist())

    def batches(self, samples: list[Example]) -> list[Batch]:
        """Return this rank's micro-batches of the samples, values [micro, seq / cp].

        They stay on the host, where counting labels need not wait for the device.
        """
        ranks = self.meshes.batch
        cp = self.meshes.cp
        batches = pack_micro_batches(samples, self.config, ranks.get_local_rank(), ranks.size())
        if self.mtp:
            batches = [with_next_tokens(each, self.mtp.depths) for each in batches]
        return [local_tokens(each, cp, self.config.parallel.context) for each in batches]

    def add_log_probs(
        self,
        name: str,
        model: Module | None,
        batches: list[Batch],
        temperature: float | None = None,
    ) -> None:
        """Add the labels' log-probabilities under `model` to each batch, fp32 [micro, seq / cp].

        model: None for the policy without its adapters. temperature: by default the sampler's.
        In a pipeline only the last stage has them.
        """
        temperature = temperature or self.config.rollout.temperature
        compute = partial(label_log_probs, temperature=temperature)
        inputs = batches
        if model is not self.model:
            # other models route as they do; without adapters it is this one, which has the last
            # batch's experts
            if self.config.grpo.replay_routing:
                replay_routing(self.model, None)
            inputs = [{k: v for k, v in batch.items() if k != "routes"} for batch in batches]
        with without_adapters(self.model) if model is None else nullcontext():
            outputs = self.trainer.outputs(compute, inputs, model)
        # earlier stages of a pipeline have no outputs
        for batch, output in zip(batches, outputs, strict=False):
            batch[name] = output

    def states(self) -> list[Tensor]:
        """Return the optimizer's state tensors [...], but for step counts, which are scalars.

        Those that optim.offload keeps on the host are left out.
        """
        return [state for state in states_on_device(self.trainer.optimizer) if state.ndim]

    def reference_weights(self) -> list[Tensor]:
        """Return the parameters of the reference and the teacher, each [...], where they are models."""
        models = filter(None, [self.reference, self.teacher])
        return [parameter for model in models for parameter in model.parameters()]

    def warm_up(self, problems: ProblemSet) -> float:
        """Train on right replies with an optimizer of its own; return the last loss.

        GRPO needs a policy that is right now and then; a model with initial weights never is.
        """
        # the average of the weights begins after warming up
        optim = dataclasses.replace(self.config.optim, lr=self.config.grpo.warmup_lr, ema=0.0)
        config = dataclasses.replace(self.config, optim=optim)
        optimizer = make_optimizer(self.model, optim)
        # with sums of its own, which are not of the policy's first step
        objective = LanguageModeling(mtp=make_mtp_loss(config))
        loss = torch.zeros(())
        for step in range(config.grpo.warmup_steps):
            chosen = problems.take(step * config.batch.global_, config.batch.global_)
            batches = self.batches(
                [reply_example(problem.prompt, problem.reply) for problem in chosen]
            )
            loss = apply_update(
                self.model, optimizer, objective, batches, self.meshes, config, step
            )["loss"]
        return loss.item()

    # --- weights that are kept

    def keep_reference(self, checkpointer, resumed: bool = False) -> None:
        """Make the reference model from the current weights, and save it by `checkpointer`, if any.

        A resumed run loads the weights that it saved when it began. With adapters there is no
        reference model: the policy without them is the reference. Raises InputError if the run
        began without a reference.
        """
        # the transposed copies of FP8 weights are for backward passes
        fp8 = dataclasses.replace(self.config.fp8, keep_transposed=False)
        config = dataclasses.replace(self.config, fp8=fp8)
        self.reference = build_model(config, self.meshes, fill=lambda *_: None, trained=False)
        # checkpoints hold an optimizer, too; this one never makes a step
        optimizer = make_optimizer(self.reference, self.config.optim)
        if resumed:
            if checkpointer.latest() is None:
                raise InputError(
                    f"grpo.kl={self.config.grpo.kl}: the run that is resumed has kept no reference in "
                    f"{checkpointer.folder} (use grpo.kl=0, or another out_dir)"
                )
            checkpointer.load(self.reference, optimizer)
        else:
            weights = self.model.state_dict()
            # both models are sharded alike, so each rank copies its own shards
            with torch.no_grad():
                for name, tensor in self.reference.state_dict().items():
                    to_local(tensor).copy_(to_local(weights[name]))
            if checkpointer is not None:
                checkpointer.save(0, self.reference, optimizer, {})
                checkpointer.wait()
        self.reference.requires_grad_(False)

    def weights(self) -> Shards:
        """Return this rank's shards of the policy's weights and buffers, adapters merged.

        All training ranks call it together. In bf16, merged weights are rounded stochastically, with
        fixed random bits. Rounding to nearest would drop adapters that change a weight by less than
        1 in 512: the sampler would lag behind the policy.
        """
        # with FSDP these are the shards that the optimizer updates, not gathered copies of them
        state = self.model.state_dict()
        parts = {
            name: local_shard(tensor) for name, tensor in state.items() if not is_adapter(name)
        }
        for name, (part, where) in parts.items():
            # A and B, if the weight has adapters
            adapters = [state[adapter] for adapter in adapter_names(name) if adapter in state]
            if adapters:
                # the shard's slices of W, [..., out, in]; a stack of experts has one dimension more
                *stack, rows, columns = where
                # A [..., rank, in] and B [..., out, rank]: the shard needs columns of A, rows of B
                a, b = map(full_tensor, adapters)
                a = a[(*stack, slice(None), columns)]
                b = b[(*stack, rows)]
                weight = merged_weight(part.float(), a, b, self.config.lora)
                if part.dtype == torch.bfloat16:
                    # in place of a step number: equal weights are rounded alike in every sync
                    always = torch.zeros((), device=part.device)
                    weight = round_stochastically(weight, random_bits(name, always, where))
                parts[name] = weight, where
        return parts
