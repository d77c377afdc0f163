"""Run GRPO as a `Task`: checkpoints, files and export around the steps of grpo/policy_loop.py."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from minitrain.data.chat.chat_templates import choose_template
from minitrain.data.chat.dialogs import ChatDialog
from minitrain.data.chat.problems import Problems, open_problems
from minitrain.data.datasets import with_steps
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError
from minitrain.formats.hf import load_pretrained
from minitrain.grpo.environments import EnvironmentFactory, load_environment
from minitrain.grpo.policy_loop import PolicyLoop, Ranks
from minitrain.grpo.responses import Group
from minitrain.grpo.rewards import keeps_state, load_reward, reward_state
from minitrain.grpo.rollouts import sampling_settings
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import routing_width
from minitrain.parallel.agreement import gather, lead, together, wait_for_all
from minitrain.rollout.drafting import MTP
from minitrain.run.checkpoint.checkpoint_folders import complete_steps
from minitrain.run.checkpoint.checkpointer import (
    Checkpointer,
    checkpoint_group,
    resume,
    save_step,
)
from minitrain.run.checkpoint.fingerprint import agreed_fingerprint
from minitrain.run.launch.start import pick_device, set_timeout, start
from minitrain.run.monitor.progress import amount, validation
from minitrain.run.tasks.exports import export
from minitrain.run.tasks.initial_weights import fill_weights, make_teachers
from minitrain.run.tasks.reward_model import reward_model
from minitrain.run.tasks.rollout_files import read_rollouts, remove_rollouts, write_rollouts
from minitrain.run.tasks.task import is_due
from minitrain.settings import Config
from minitrain.training.build import fp8_notes
from minitrain.user_code import call


class PolicyData(NamedTuple):
    """The data of a GRPO run."""

    # the run's, with epochs converted to steps
    config: Config
    reward: Callable
    problems: Problems
    held_out: Problems | None
    tokenizer: Tokenizer
    # tokens that end a response
    ends: tuple[int, ...]
    # None without grpo.environment
    environments: EnvironmentFactory | None
    # a line on how often training goes over the problems
    amount: str


def open_policy_data(config: Config) -> PolicyData:
    """Open the reward and the problems of a run. Raises InputError for mistakes in them."""
    name = config.grpo.reward
    if os.path.isdir(name):
        reward = reward_model(name, pick_device(config.device), config.grpo.prompt_key)
    else:
        reward = load_reward(name)
    make = config.grpo.environment and load_environment(config.grpo.environment)
    problems, held_out, tokenizer, ends = open_problems(config)
    template = choose_template(config.data.template, tokenizer)
    dialog = partial(ChatDialog, template, tokenizer)
    environments = EnvironmentFactory(make, dialog) if make else None
    prompts = config.grpo.prompts
    with_number = with_steps(config, len(problems), prompts)
    line = amount(config, with_number.steps, len(problems), prompts, "problem")
    return PolicyData(
        with_number, reward, problems, held_out, tokenizer, ends, environments, line
    )


class GrpoTask:
    """A GRPO run as a Task (task.py).

    folder: holds responses (rollouts/step-*.jsonl), checkpoints/, and, with a KL term but without
    adapters, the weights of the reference model (reference/). None: write nothing, for benchmarks.
    """

    data = bytes_per_token = None

    def __init__(self, config: Config, folder: Path | None, opened: PolicyData | None = None):
        opened = opened or open_policy_data(config)
        config = opened.config
        self.reward = opened.reward
        self.problems = opened.problems
        self.amount = opened.amount
        grpo = config.grpo
        # no balancing of experts: the sampler would not follow changes of the trainer's router
        shape = replace(config.model.config, router_aux_loss_coef=0.0, bias_update_speed=0.0)
        self.config = config = replace(config, model=replace(config.model, config=shape))
        self.folder = folder
        self.updates = grpo.prompts * grpo.group // config.batch.global_
        meshes = start(config)
        self.files = agreed_fingerprint(config)
        world = dist.get_world_size()
        training = range(world - grpo.generation_ranks)
        self.trainers = checkpoint_group(config, training)
        ranks = divide_ranks(config, training, meshes.batch.device_type)
        self.everyone = ranks.everyone
        if folder is not None and dist.get_rank() in training:
            self.checkpointer = self.new_checkpointer("checkpoints", config.checkpoint.keep)
        self.loop = PolicyLoop(
            config,
            meshes,
            ranks,
            problems=self.problems,
            held_out=opened.held_out,
            tokenizer=opened.tokenizer,
            ends=opened.ends,
            reward=self.reward,
            fill=fill_weights,
            record=self.record,
            environments=opened.environments,
            draft=self.load_draft(ranks, meshes.batch.device_type),
        )
        self.policy = self.loop.policy
        if self.policy and config.teachers:
            teachers = make_teachers(config, meshes)
            self.policy.teacher = teachers.get(config.distill.teacher)

    def load_draft(self, ranks: Ranks, device_type: str) -> Decoder | None:
        """Return the model that drafts on this rank, if it samples."""
        folder = self.config.rollout.draft
        if folder not in ("", MTP) and dist.get_rank() in ranks.sampling:
            return load_pretrained(folder, device=device_type)

    def begin(self) -> int:
        """Load the newest checkpoint, or warm up; return the number of steps that are done."""
        first = 0
        last = {}
        states = in_flight = None
        grpo = self.config.grpo
        if self.policy:
            if self.folder is not None:
                first, last, extra = resume(self.checkpointer, self.config, self.policy.trainer)
                states = extra.get("rewards")
                in_flight = extra.get("in_flight") if grpo.in_flight else None
            if not first:
                self.policy.warm_up(self.problems)
            # with adapters, the reference is the model without them
            if grpo.kl and self.config.lora is None:
                kept = self.folder and self.new_checkpointer("reference", keep=1)
                self.policy.keep_reference(kept, resumed=first > 0)
        wait_for_all()
        known = self.loop.from_rank((first, last, states, in_flight), 0)
        self.first, self.last, states, in_flight = known
        together(self.everyone, self.load_reward, states)
        taken = self.last.get("problems", self.first * grpo.prompts * grpo.generations)
        self.loop.begin(taken, self.first, in_flight)
        return self.first

    def about(self) -> Iterator[str]:
        if self.config.precision == "fp8":
            yield "precision=fp8: the sampler computes in bf16"
        if self.config.grpo.replay_routing:
            size = 2 * routing_width(self.config.model.config)
            yield (
                f"grpo.replay_routing: {size:,} bytes of experts per token, in the sampler's pages, and of a step's "
                f"responses on the host"
            )
        if self.policy:
            trainer = self.policy.trainer
            yield from fp8_notes(trainer.model, trainer.config, trainer.meshes)
        if not self.first:
            yield self.problems.about
            yield self.amount
            if self.config.validation.every:
                yield f"step 0  val {validation(self.loop.evaluate())}"

    def new_checkpointer(self, name: str, keep: int) -> Checkpointer:
        return Checkpointer(
            self.folder / name, keep, self.config.checkpoint.asynchronous, self.trainers
        )

    def steps(
        self, first: int, stays: Callable[[int], bool] = lambda step: True
    ) -> Iterator[dict[str, Any]]:
        # `stays` is not needed: the host reads the samples, so it waits for the device in every step
        grpo = self.config.grpo
        # in flight, what has been drawn is in the checkpoint
        queued = grpo.lag if first and not grpo.in_flight else 0
        coming = map(self.kept, range(first, min(first + queued, self.config.steps)))
        return self.loop.steps(first, takewhile(bool, coming))

    def load_reward(self, kept: dict | None) -> None:
        """Load the state that a checkpoint has kept of this rank's reward, if any."""
        name = self.config.grpo.reward
        if not keeps_state(self.reward):
            return
        # raises an error for a state that cannot be stored, before hours of training
        reward_state(self.reward, name)
        if kept is None or kept["reward"] != name:
            return
        states = kept["states"]
        if len(states) != dist.get_world_size():
            raise InputError(
                f"grpo.reward={name} has kept the states of {len(states)} processes, and these are "
                f"{dist.get_world_size()} (use as many, or another out_dir)"
            )
        state = states[dist.get_rank()]
        call(f"grpo.reward={name}", "in load_state_dict()", self.reward.load_state_dict, state)

    def save(self, numbers: dict[str, Any]) -> None:
        """Write a checkpoint of the step with these numbers."""
        more = {}
        if keeps_state(self.reward):
            name = self.config.grpo.reward
            state = together(self.everyone, reward_state, self.reward, name)
            more["rewards"] = {"reward": name, "states": gather(state, self.everyone)}
        if self.config.grpo.in_flight:
            more["in_flight"] = self.loop.in_flight()
        if self.policy:
            self.loop.memory.hold("training")
            save_step(self.checkpointer, numbers, self.policy.trainer, **more)
        if self.config.grpo.offload:
            # an evaluation may follow
            self.loop.update_sampler()
        wait_for_all()

    def pin(self, step: int) -> None:
        """Keep the checkpoint of a step, and of no other, beside the newest ones."""
        if self.policy:
            self.checkpointer.pin(step)

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""
        if self.policy:
            self.checkpointer.wait()

    def finish(self, numbers: dict[str, Any], stopping: Callable[[], str]) -> bool:
        """Add the rewards on held-out problems, if they are due."""
        every = self.config.validation.every
        if every and is_due(numbers["step"], every, self.config.steps):
            numbers |= self.loop.evaluate()
        return True

    def end(self, say: Callable[[str], None]) -> None:
        if self.policy:
            export(self.policy.trainer, self.config, self.folder)

    def origin(self, step: int) -> str:
        return f"responses in {self.rollouts(step - 1)}"

    def kept(self, step: int) -> list[Group] | None:
        """Return the responses for `step` (from 0) that were sampled before the run was resumed.

        None if there are none, or if they do not fit the present settings. Rank 0 reads them for all,
        because others may see its files later, and would then sample while it does not.
        """

        def read() -> list[Group] | None:
            if self.rollouts(step).exists():
                groups = read_rollouts(self.rollouts(step))
                if fits(groups, self.config, step):
                    return groups

        return lead(self.everyone, read)

    def record(self, groups: list[Group], step: int) -> None:
        """Write the responses of `step` (from 0), and remove old ones."""
        failures = [response.failure for response in chain(*groups) if response.failure]
        if failures and dist.get_rank() == 0:
            told = (
                f"step {step + 1}: {len(failures)} environments failed, the first: {failures[0]}"
            )
            print(told, file=sys.stderr, flush=True)
        if self.folder is not None:
            write_rollouts(self.rollouts(step), groups, self.everyone)
            self.remove_old_rollouts(step)

    def remove_old_rollouts(self, step: int) -> None:
        """Remove all responses except the newest, and those needed to resume from any checkpoint."""
        keep = self.config.grpo.keep_rollouts
        if keep and dist.get_rank() == 0:
            oldest = min(complete_steps(self.checkpointer.folder), default=step + 1)
            remove_rollouts(self.rollouts(step).parent, min(step + 2 - keep, oldest + 1))

    def rollouts(self, step: int) -> Path:
        """Return the file of the responses of `step` (from 0); its name and metrics count from 1."""
        return self.folder / "rollouts" / f"step-{step + 1:08d}.jsonl"


def divide_ranks(config: Config, training: range, device_type: str) -> Ranks:
    """Return which ranks train and which sample: those after the `training` ones, or else all."""
    world = dist.get_world_size()
    sampling = range(len(training), world) if len(training) < world else training
    timeout = timedelta(seconds=config.timeout_s)
    samplers = dist.new_group(list(sampling), timeout=timeout, backend="gloo")
    everyone = dist.new_group(timeout=timeout, backend="gloo")
    shape = world // config.rollout.tp, config.rollout.tp
    tp = init_device_mesh(device_type, shape, mesh_dim_names=("replica", "tp"))["tp"]
    set_timeout(config.timeout_s, tp.get_all_groups())
    sampler = None
    if (config.grpo.environment or config.grpo.in_flight) and config.rollout.tp > 1:
        sampler, _ = dist.new_subgroups(config.rollout.tp, timeout=timeout, backend="gloo")
    return Ranks(training, sampling, samplers, everyone, tp, sampler)


def fits(groups: list[Group], config: Config, step: int) -> bool:
    """Return True if these groups were sampled with the present settings, and are those of one step.

    None of their tokens may be older than `step` allows.
    """
    settings = sampling_settings(config)
    sizes = [len(group) for group in groups]
    return sizes == [config.grpo.group] * config.grpo.prompts and all(
        response.settings == settings
        and response.problems
        and all(step - version <= config.grpo.lag for _, version in response.versions)
        for response in chain(*groups)
    )
