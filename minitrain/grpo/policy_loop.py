"""The steps of a GRPO run: sample, reward, train, and bring the new weights to the sampler.

    step k     responses to the step's prompts -> rewards -> advantages -> packed micro-batches ->
               log-probabilities under the step's first weights and the reference, where needed ->
               one or several updates -> weight sync

On policy (grpo.lag=0) the responses come from the weights that are trained. With lag=k those of step
n + k are sampled with the weights that step n begins with, and wait in a queue; then some ranks can
sample (grpo.generation_ranks) while the others train, in lockstep: at a step's end responses go one
way and weights the other. There are no threads: a response's age is k by construction, and the same
run in one process gives the same.

In flight (grpo.in_flight) step n only waits for its own responses, while those of the next k steps
have begun, and go on with the new weights. No token is older than k steps. Ranks of their own sample
until the others have trained, so that time decides how far they come with which weights; where ranks
do both, a run gives the same again.

All ranks know all responses and compute from them what is cheap; only the model's work is divided.
What surrounds the steps, checkpoints, files and logs, is run/tasks/grpo_task.py.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Module

from minitrain.grpo.environments import EnvironmentFactory
from minitrain.grpo.episode_runner import EpisodeRunner
from minitrain.grpo.offload import Memory
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.grpo.responses import Group, ProblemSet, describe_ages, describe_responses
from minitrain.grpo.rewards import Reward
from minitrain.grpo.rollouts import RolloutWorker, most_samples
from minitrain.grpo.weight_sync import WeightSync, shards_of
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import empty_model
from minitrain.parallel.agreement import broadcast, wait_for_all
from minitrain.parallel.expert import expert_parallel
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.pipeline import Pipeline
from minitrain.parallel.tensor_decoder import tensor_parallel
from minitrain.rollout.engine import Sampler
from minitrain.rollout.texts import TextTokenizer
from minitrain.settings import Config

PHASES = ("generation", "logprobs", "training", "refit")


class Ranks(NamedTuple):
    """Which ranks do what; where they are colocated, all do both.

    samplers, everyone: the sampling ranks, and all, on gloo.
    tp: this rank's and the others of one sampler. sampler: the same on gloo, None if it is alone.
    """

    training: range
    sampling: range
    samplers: ProcessGroup
    everyone: ProcessGroup
    tp: DeviceMesh
    sampler: ProcessGroup | None = None


class PolicyLoop:
    """This rank's part in the steps: `policy`, a PolicyTrainer, and `worker`, a RolloutWorker.

    policy is None on a rank that only samples, worker on one that only trains.

    meshes: of the training ranks. problems, held_out: to train on, and to evaluate on. ends: the
        tokens that end a response.
    fill: see `build_model`. environments: makes what samples talk to, with grpo.environment.
    draft: what guesses the samplers' next tokens, if a model of its own does.
    record(groups, step): called by all ranks with the responses of a step, before it trains.
    """

    def __init__(
        self,
        config: Config,
        meshes: Meshes,
        ranks: Ranks,
        problems: ProblemSet,
        held_out: ProblemSet | None,
        tokenizer: TextTokenizer,
        ends: tuple[int, ...],
        reward: Reward,
        fill: Callable[[Config, Module], None],
        record: Callable[[list[Group], int], None],
        environments: EnvironmentFactory | None = None,
        draft: Decoder | None = None,
    ):
        self.config = config
        self.problems = problems
        self.held_out = held_out
        self.record = record
        self.everyone = ranks.everyone
        self.first_sampler = ranks.sampling[0]
        self.colocated = ranks.training == ranks.sampling
        # problems, by the steps that have been sampled
        self.taken = 0
        # steps that the policy has been trained for
        self.version = 0
        # by PHASES, of the current step
        self.seconds = Counter()
        # how many tokens were drafted and accepted in the current step
        self.drafts = Counter()
        # the sampler's memory is the trainer's in between
        self.frees = self.colocated and not config.grpo.keep_cache
        self.policy = self.worker = None
        if dist.get_rank() in ranks.training:
            self.policy = PolicyTrainer(config, meshes, self.phase, fill)
        # ranks that only sample must not time out while trainers load weights from disk
        wait_for_all()
        model, self.weight_sync = self.connect(ranks)
        if model is not None:
            self.worker = make_worker(
                config, ranks, model, tokenizer, ends, reward, environments, draft
            )
        kept = {}
        lost = {}
        # then every rank trains and samples
        if config.grpo.offload:
            kept = {"training": self.policy.states, "logprobs": self.policy.reference_weights}
            if self.weight_sync:
                lost = {"generation": model.parameters}
        self.memory = Memory(kept, lost)
        self.memory.hold("training")

    def connect(self, ranks: Ranks) -> tuple[Decoder | None, WeightSync | None]:
        """Return the model that this rank samples from, and what brings it the trainer's weights.

        Where a trainer's model is whole on its rank, that is the model, and there is nothing to
        bring.
        """
        if self.colocated and is_whole(self.policy.model) and ranks.tp.size() == 1:
            return self.policy.model, None
        samples = dist.get_rank() in ranks.sampling
        model = make_sampler_model(self.config, ranks.tp) if samples else None
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

    def begin(self, taken: int, first: int = 0, in_flight: dict | None = None) -> None:
        """Begin with the weights as they are, after `first` steps.

        taken: problems, by the steps that are done. in_flight: see RolloutWorker.
        """
        self.taken = taken
        self.version = first
        if in_flight and self.worker:
            self.worker.load(in_flight)
        self.update_sampler()

    def steps(self, first: int, coming: Iterable[list[Group]] = ()) -> Iterator[dict[str, Any]]:
        """Run the steps from `first` on, yielding the numbers of each, for the log.

        coming: the responses for the first of them that are sampled already.
        """
        # responses for the next steps, the oldest first
        queue = deque(coming)
        if queue:
            self.taken = queue[-1][0][0].problems
        for step in range(first, self.config.steps):
            yield self.step(step, queue)

    def step(self, step: int, queue: deque[list[Group]]) -> dict[str, Any]:
        """Sample, train, and bring the new weights to the sampler. Return the step's numbers.

        queue: the responses for this step and the next ones, as far as they are sampled. Those that
        may be sampled with the weights that the step begins with are added.
        """
        grpo = self.config.grpo
        began = time.perf_counter()
        # how many more steps' responses may be sampled with these weights
        ahead = min(grpo.lag, self.config.steps - 1 - step)
        groups = queue.popleft() if queue else self.share(self.collect(ahead), step)
        missing = 0 if grpo.in_flight else ahead - len(queue)
        sampled = [self.collect() for _ in range(missing)]
        learned = self.train(groups, step)
        for each in sampled:
            queue.append(self.share(each, step + 1 + len(queue)))
        self.version = step + 1
        self.update_sampler()
        # also to ranks that only sample: all judge alike how it went
        learned = self.from_rank(learned, 0)
        timing = self.timing(groups, began)
        ages = describe_ages(groups, step) if grpo.lag else {}
        return {"step": step + 1} | learned | describe_responses(groups) | ages | timing

    def collect(self, ahead: int = 0) -> list[Group] | None:
        """Return the next step's groups; nothing on a rank that only trains.

        ahead: of how many further steps the groups may be begun, in flight.
        """
        if not self.worker:
            return None
        with self.phase("generation"):
            further = ahead if self.config.grpo.in_flight else 0
            groups = self.worker.collect(self.problems, self.taken, further)
            self.taken = groups[0][0].problems
            if self.frees:
                self.worker.pause()
                self.worker.sampler.free()
        self.drafts += self.worker.draft_counts()
        return groups

    def share(self, groups: list[Group] | None, step: int) -> list[Group]:
        """Return on all ranks what was collected for `step`, and record it."""
        with self.phase("refit"):
            groups = self.from_rank(groups, self.first_sampler)
            self.record(groups, step)
        return groups

    def train(self, groups: list[Group], step: int) -> dict[str, float]:
        """Train the policy on a step's responses, and return its numbers; nothing where there is none.

        In flight, ranks that only sample go on meanwhile.
        """
        apart = self.config.grpo.in_flight and not self.colocated
        if self.policy:
            learned = self.policy.learn(groups, step)
            if apart:
                dist.barrier(self.everyone)
            return learned
        if apart:
            trained = dist.barrier(self.everyone, async_op=True)
            with self.phase("generation"):
                self.worker.decode_until(trained.is_completed)
            trained.wait()
        return {}

    def from_rank(self, value: Any, source: int) -> Any:
        """Return rank `source`'s value on all ranks; where they are colocated each has it."""
        return value if self.colocated else broadcast(value, source, self.everyone)

    def update_sampler(self) -> None:
        """Bring the policy's weights to the sampler."""
        with self.phase("refit"):
            if self.weight_sync:
                self.weight_sync()
            if self.worker:
                self.worker.refresh(self.version)

    def in_flight(self) -> dict[str, Any]:
        """Return what has been drawn of the next steps' responses, for a checkpoint."""
        return self.from_rank(self.worker and self.worker.in_flight(), self.first_sampler)

    def evaluate(self) -> dict[str, float]:
        """Return val_greedy and val_pass@k on held-out problems, or those that are trained on."""
        numbers = {}
        if self.worker:
            count = self.config.validation.batches * self.config.grpo.prompts
            found = self.worker.evaluate(self.held_out or self.problems, count)
            numbers = {f"val_{name}": value for name, value in found.items()}
            # as a run finds it that resumes here
            self.worker.draft_counts()
            sampler = self.worker.sampler
            if self.frees:
                sampler.free()
            else:
                sampler.forget()
        return self.from_rank(numbers, self.first_sampler)

    def timing(self, groups: list[Group], began: float) -> dict[str, float]:
        """Return seconds of the step and its phases, and tokens, those of prompts and responses.

        began: when the step did. With drafts, also the share of them that was right, and how many
        there were a second.
        """
        measured = self.seconds["generation"], self.drafts
        self.seconds["generation"], drafts = self.from_rank(measured, self.first_sampler)
        seconds = time.perf_counter() - began
        tokens = sum(len(response.prompt) + len(response.response) for response in chain(*groups))
        numbers = {f"{name}_s": self.seconds[name] for name in PHASES}
        if drafted := drafts["drafted"]:
            accepted = drafts["accepted"]
            numbers["draft_acceptance"] = accepted / drafted
            numbers["drafted_per_sec"] = drafted / self.seconds["generation"]
            numbers["accepted_per_sec"] = accepted / self.seconds["generation"]
        self.seconds.clear()
        self.drafts = Counter()
        whole = {
            "step_time_s": seconds,
            "step_tokens": tokens,
            "tokens_per_sec": tokens / seconds,
        }
        return numbers | whole


def is_whole(model: Decoder | Pipeline) -> bool:
    """Return True if all parameters are on this rank, and not sharded or in stages."""
    return not isinstance(model, Pipeline) and not any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def make_worker(
    config: Config,
    ranks: Ranks,
    model: Decoder,
    tokenizer: TextTokenizer,
    ends: tuple[int, ...],
    reward: Reward,
    environments: EnvironmentFactory | None,
    draft: Decoder | None,
) -> RolloutWorker:
    """Return what samples responses from `model` on this rank; the rest as for `PolicyLoop`."""
    replica = ranks.sampling.index(dist.get_rank()) // config.rollout.tp
    replicas = len(ranks.sampling) // config.rollout.tp
    samples = most_samples(config, replicas)
    longest = config.batch.seq_len + 1
    sampler = Sampler(model, tokenizer, config.rollout, samples, longest, draft)
    sampler.records = config.grpo.replay_routing
    groups = ranks.samplers, ranks.sampler
    worker = RolloutWorker(config, sampler, tokenizer, ends, reward, replica, replicas, *groups)
    if environments:
        worker.episodes = EpisodeRunner(
            config, environments, sampler, worker.longest, ranks.sampler
        )
    return worker


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
    return model.to_empty(device=tp.device_type).requires_grad_(False)
