"""The GRPO loop: sample, reward, train, and bring the new weights to the sampler.

    step k     responses to the step's prompts -> rewards -> advantages -> packed micro-batches ->
               log-probabilities under the step's first weights and the reference, where needed ->
               one or several updates -> weight sync

On policy (grpo.lag=0) the responses come from the weights that are trained. One step off (lag=1),
those of step k + 1 are sampled with the weights that step k begins with; then some ranks can sample
(grpo.generation_ranks) while the others train, in lockstep: at a step's end responses go one way
and weights the other. No queue and no threads: a response's age is 1 by construction, and the same
run in one process gives the same.

All ranks know all responses and compute from them what is cheap; only the model's work is divided.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from minitrain.data.chat.problems import open_problems
from minitrain.data.datasets import with_steps
from minitrain.grpo.offload import Memory
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.grpo.rewards import load_reward
from minitrain.grpo.rollouts import Group, RolloutWorker, most_samples, rewards, sampling_settings
from minitrain.grpo.weight_sync import WeightSync, shards_of
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import empty_model
from minitrain.parallel.agreement import broadcast, lead, wait_for_all
from minitrain.parallel.expert import expert_parallel
from minitrain.parallel.pipeline import Pipeline
from minitrain.parallel.tensor_decoder import tensor_parallel
from minitrain.rollout.engine import Sampler
from minitrain.run.checkpoint.checkpoint_files import complete_steps
from minitrain.run.checkpoint.checkpointer import Checkpointer, resume, save_step
from minitrain.run.checkpoint.fingerprint import agreed_fingerprint
from minitrain.run.launch.start import (
    checkpoint_group,
    fill_weights,
    pick_device,
    set_timeout,
    start,
)
from minitrain.run.monitor.progress import validation
from minitrain.run.tasks.exports import export
from minitrain.run.tasks.rollout_files import read_rollouts, remove_rollouts, write_rollouts
from minitrain.settings import Config
from minitrain.training.loop import is_due

PHASES = ("generation", "logprobs", "training", "refit")


class Run:
    """This rank's part in a run: `policy`, a PolicyTrainer, and `worker`, a RolloutWorker.

    policy is None on a rank that only samples, worker on one that only trains.

    folder: where responses (rollouts/step-*.jsonl) and checkpoints go, and with a KL term, but
    without adapters, the weights from which divergence is measured (reference/); None: nowhere, for
    measurements. What run/tasks/task.py asks of a task is here.
    """

    data = bytes_per_token = None

    def __init__(self, config: Config, folder: Path | None):
        reward = load_reward(config.grpo.reward)
        self.problems, self.held_out, tokenizer, ends = open_problems(config)
        grpo = config.grpo
        config = with_steps(config, len(self.problems), grpo.prompts)
        # sampler and trainer would disagree on a router that changes for reasons of its own
        shape = replace(config.model.config, router_aux_loss_coef=0.0, bias_update_speed=0.0)
        self.config = config = replace(config, model=replace(config.model, config=shape))
        self.folder = folder
        # by PHASES, of the current step
        self.seconds = Counter()
        self.updates = grpo.prompts * grpo.group // config.batch.global_
        meshes = start(config)
        self.files = agreed_fingerprint(config)
        rank = dist.get_rank()
        world = dist.get_world_size()
        training = range(world - grpo.generation_ranks)
        # colocated: all ranks train and sample
        self.colocated = not grpo.generation_ranks
        sampling = training if self.colocated else range(len(training), world)
        self.first_sampler = sampling[0]
        # the sampler's memory is the trainer's in between
        self.frees = self.colocated and not grpo.keep_cache
        self.trainers = checkpoint_group(config, training)
        timeout = timedelta(seconds=config.timeout_s)
        samplers = dist.new_group(list(sampling), timeout=timeout, backend="gloo")
        self.everyone = dist.new_group(timeout=timeout, backend="gloo")
        self.policy = self.worker = None
        if rank in training:
            if folder is not None:
                self.checkpointer = self.new_checkpointer("checkpoints", config.checkpoint.keep)
            self.policy = PolicyTrainer(config, meshes, self.phase, fill_weights)
        # ranks that only sample must not time out while trainers load weights from disk
        wait_for_all()
        model, self.weight_sync = self.connect(meshes.batch.device_type, rank in sampling)
        if model is not None:
            replica = sampling.index(rank) // config.rollout.tp
            replicas = len(sampling) // config.rollout.tp
            longest = config.batch.seq_len + 1
            sampler = Sampler(
                model, tokenizer, config.rollout, most_samples(config, replicas), longest
            )
            self.worker = RolloutWorker(
                config, sampler, tokenizer, ends, reward, replica, replicas, samplers
            )
        kept = {}
        lost = {}
        # then every rank trains and samples
        if grpo.offload:
            kept = {"training": self.policy.states, "logprobs": self.policy.reference_weights}
            if self.weight_sync:
                lost = {"generation": model.parameters}
        self.memory = Memory(kept, lost)
        self.memory.hold("training")

    def connect(
        self, device_type: str, samples: bool
    ) -> tuple[Decoder | None, WeightSync | None]:
        """Return the model that this rank samples from, and what brings it the trainer's weights.

        Where a trainer's model is whole on its rank, that is the model, and there is nothing to
        bring.
        """
        config = self.config
        shape = dist.get_world_size() // config.rollout.tp, config.rollout.tp
        tp = init_device_mesh(device_type, shape, mesh_dim_names=("replica", "tp"))["tp"]
        set_timeout(config.timeout_s, tp.get_all_groups())
        if self.colocated and is_whole(self.policy.model) and config.rollout.tp == 1:
            return self.policy.model, None
        model = make_sampler_model(config, tp) if samples else None
        source = self.policy.weights if self.policy else dict
        return model, WeightSync(
            source, partial(shards_of, model) if samples else dict, self.everyone
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Hold the memory that one of PHASES needs, and book the time spent here under it."""
        began = time.perf_counter()
        self.memory.hold("generation" if name == "refit" else name)
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - began

    # ----------------------------------------------------------------------------------------------- from start to end

    def begin(self) -> int:
        """Load the newest checkpoint, or warm up; returns the number of steps that are done."""
        first = 0
        last = {}
        grpo = self.config.grpo
        if self.policy:
            if self.folder is not None:
                first, last = resume(self.checkpointer, self.config, self.policy.trainer)
            if not first:
                self.policy.warm_up(self.problems)
            # adapters diverge from the model without them
            if grpo.kl and self.config.lora is None:
                kept = self.folder and self.new_checkpointer("reference", keep=1)
                self.policy.keep_reference(kept, resumed=first > 0)
        wait_for_all()
        self.first, self.last = self.tell((first, last), 0)
        # problems, by the steps that have been sampled
        self.taken = self.last.get("problems", first * grpo.prompts * grpo.generations)
        self.update_sampler()
        return self.first

    def about(self) -> Iterator[str]:
        if self.config.precision == "fp8":
            yield "precision=fp8: the sampler computes in bf16"
        if not self.first:
            yield self.problems.about
            if self.config.validation.every:
                yield f"step 0  val {validation(self.evaluate())}"

    def new_checkpointer(self, name: str, keep: int) -> Checkpointer:
        return Checkpointer(
            self.folder / name, keep, self.config.checkpoint.asynchronous, self.trainers
        )

    def steps(self, first: int) -> Iterator[dict[str, Any]]:
        """Run the steps from `first` on, yielding the numbers of each, for the log."""
        config = self.config
        lag = config.grpo.lag
        began = time.perf_counter()
        coming = self.kept(first) if lag and first else None
        if coming:
            self.taken = coming[0][0].problems
        for step in range(first, config.steps):
            # is the next step sampled while this one trains?
            ahead = lag and step + 1 < config.steps
            groups = coming or self.share(self.collect(), step)
            sampled = self.collect() if ahead else None
            learned = self.policy.learn(groups, step) if self.policy else {}
            coming = self.share(sampled, step + 1) if ahead else None
            self.update_sampler()
            # also to ranks that only sample: all judge alike how it went
            learned = self.tell(learned, 0)
            timing = self.timing(groups, time.perf_counter() - began)
            yield {"step": step + 1} | learned | describe_responses(groups) | timing
            began = time.perf_counter()

    def save(self, numbers: dict[str, Any]) -> None:
        """Write a checkpoint of a step. numbers: what `steps` gave for it."""
        if self.policy:
            self.memory.hold("training")
            save_step(self.checkpointer, numbers, self.policy.trainer)
        if self.config.grpo.offload:
            # the next thing to come may be an evaluation
            self.update_sampler()
        wait_for_all()

    def wait(self) -> None:
        """Return when the last checkpoint is written."""
        if self.policy:
            self.checkpointer.wait()

    def finish(self, numbers: dict[str, Any], stopping: Callable[[], str]) -> bool:
        """Add the rewards on held-out problems."""
        every = self.config.validation.every
        if every and is_due(numbers["step"], every, self.config.steps):
            numbers |= self.evaluate()
        return True

    def end(self) -> Iterator[str]:
        if self.policy:
            export(self.policy.trainer, self.config, self.folder)
        yield from ()

    def origin(self, step: int) -> str:
        return f"responses in {self.rollouts(step - 1)}"

    # -------------------------------------------------------------------------------------------------- parts of a step

    def collect(self) -> tuple[list[Group], float] | None:
        """Return the next step's groups and their seconds; nothing on a rank that only trains."""
        if not self.worker:
            return None
        with self.phase("generation"):
            groups = self.worker.collect(self.problems, self.taken)
            self.taken = groups[0][0].problems
            if self.frees:
                self.worker.sampler.free()
        return groups, self.seconds["generation"]

    def kept(self, step: int) -> list[Group] | None:
        """Return the responses for `step` that the run had sampled before it was resumed.

        None if it had ended before, or if they do not make up a step of its settings now.
        Rank 0 reads for all: others might see its files later, and disagree on whether to sample.
        """

        def read() -> list[Group] | None:
            if self.rollouts(step).exists():
                groups = read_rollouts(self.rollouts(step))
                if fits(groups, self.config):
                    return groups

        return lead(self.everyone, read)

    def share(self, collected: tuple[list[Group], float] | None, step: int) -> list[Group]:
        """Share what was collected for `step`, on all ranks and on disk."""
        with self.phase("refit"):
            groups, self.seconds["generation"] = self.tell(collected, self.first_sampler)
            if self.folder is not None:
                write_rollouts(self.rollouts(step), groups, self.everyone)
                self.remove_old_rollouts(step)
        return groups

    def remove_old_rollouts(self, step: int) -> None:
        """Remove all responses but the newest, and those that a resumed run could need.

        It may resume from the oldest checkpoint.
        """
        keep = self.config.grpo.keep_rollouts
        if keep and dist.get_rank() == 0:
            oldest = min(complete_steps(self.checkpointer.folder), default=step + 1)
            remove_rollouts(self.rollouts(step).parent, min(step + 2 - keep, oldest + 1))

    def tell(self, value: Any, source: int) -> Any:
        """Return rank `source`'s value on all ranks; where they are colocated each has it."""
        return value if self.colocated else broadcast(value, source, self.everyone)

    def update_sampler(self) -> None:
        with self.phase("refit"):
            if self.weight_sync:
                self.weight_sync()
            if self.worker:
                self.worker.sampler.refresh()

    def evaluate(self) -> dict[str, float]:
        """Return val_greedy and val_pass@k on held-out problems, or those that are trained on."""
        numbers = {}
        if self.worker:
            count = self.config.validation.batches * self.config.grpo.prompts
            found = self.worker.evaluate(self.held_out or self.problems, count)
            numbers = {f"val_{name}": value for name, value in found.items()}
            # as a run finds it that resumes here
            sampler = self.worker.sampler
            sampler.free() if self.frees else sampler.forget()
        return self.tell(numbers, self.first_sampler)

    def rollouts(self, step: int) -> Path:
        return self.folder / "rollouts" / f"step-{step + 1:08d}.jsonl"

    def timing(self, groups: list[Group], seconds: float) -> dict[str, float]:
        """Return seconds of the step and its phases, and tokens, those of prompts and responses."""
        tokens = sum(len(rollout.prompt) + len(rollout.response) for rollout in chain(*groups))
        phases = {f"{name}_s": self.seconds[name] for name in PHASES}
        self.seconds.clear()
        return phases | {
            "step_time_s": seconds,
            "step_tokens": tokens,
            "tokens_per_sec": tokens / seconds,
        }


def fits(groups: list[Group], config: Config) -> bool:
    """Return True if these are the groups of a step, sampled with the settings of now.

    They must be as many, and as large, as a step trains on.
    """
    settings = sampling_settings(config)
    sizes = [len(group) for group in groups]
    return sizes == [config.grpo.group] * config.grpo.prompts and all(
        response.settings == settings and response.problems for response in chain(*groups)
    )


def describe_responses(groups: list[Group]) -> dict[str, float]:
    """Return what can be said of a step's responses without a model."""
    values = rewards(groups)
    rollouts = list(chain(*groups))
    lengths = [len(rollout.response) for rollout in rollouts]
    return {
        "reward": values.mean().item(),
        "reward_std": values.std().item(),
        "no_signal": groups[0][0].no_signal,
        "problems": groups[0][0].problems,
        "length": sum(lengths) / len(lengths),
        "longest": max(lengths),
        "truncated": sum(rollout.truncated for rollout in rollouts) / len(rollouts),
    }


def is_whole(model: Decoder | Pipeline) -> bool:
    """Return True if all parameters are on this rank, and not sharded or in stages."""
    return not isinstance(model, Pipeline) and not any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def make_sampler_model(config: Config, tp: DeviceMesh) -> Decoder:
    """Make a model to sample from, without values, split over the ranks of `tp`.

    It is in the type that the trainer computes in. With rollout.ep its experts are split as a
    whole, and tokens travel to them.
    """
    dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
    model = empty_model(config.model.config).to(dtype)
    if config.rollout.ep > 1:
        expert_parallel(model, tp)
    if tp.size() > 1:
        tensor_parallel(model, tp)
    return model.to_empty(device=pick_device(config.device)).requires_grad_(False)
