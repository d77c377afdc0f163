"""The rollout side of GRPO: samples and rewards groups of responses; evaluates the policy.

Replicas of the sampler share the prompts. The responses do not depend on their number: a response's
randomness depends on (seed, number of its problem, number in its group) alone.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from minitrain.errors import InputError
from minitrain.grpo.batches import Problem, ProblemSet, Response, packed_routes
from minitrain.grpo.environments import Environments, Episode
from minitrain.grpo.rewards import (
    Reward,
    call,
    finite_number,
    keeps_state,
    overlong,
    reward_state,
)
from minitrain.parallel.agreement import gather
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import Completion, SamplingParams
from minitrain.settings import Config

# all responses to one prompt
Group = list[Response]


class RolloutWorker:
    """Samples groups of responses with `sampler`, and rewards them, with the other replicas.

    ends: the tokens that end a response. reward: see grpo/rewards.py.
    play: makes what lets samples talk to environments, which reward them then, from the sampler and
        `longest`.
    replica: which of how many `replicas` this rank is. group: the ranks of all replicas, on gloo.
    """

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        tokenizer,
        ends: tuple[int, ...],
        reward: Reward,
        replica: int,
        replicas: int,
        group: ProcessGroup,
        play: Callable[[Sampler, Callable[[int], int]], Environments] | None = None,
    ):
        self.config = config
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.ends = ends
        self.reward = reward
        self.replica = replica
        self.replicas = replicas
        self.group = group
        self.environments = play and play(sampler, self.longest)

    def collect(self, problems: ProblemSet, first: int) -> list[Group]:
        """Return the groups of a step, on all replicas.

        first: the number of the first problem that no step has had. A group has a signal if its
        scores differ. With grpo.generations above 1, groups without a signal are replaced by groups
        of further problems (DAPO's dynamic sampling), and used after all if these do not suffice.
        The signal is in scores, not rewards: where all are wrong, the penalty for length would only
        teach to be wrong in fewer words.
        """
        count = self.config.grpo.prompts
        rounds = self.config.grpo.generations
        # groups whose scores differ, and groups whose scores are all equal
        with_signal = []
        without = []
        for _ in range(rounds):
            groups = self.sample(problems.take(first, count), first, self.config.grpo.group)
            for group in groups:
                differ = len({rollout.score for rollout in group}) > 1
                (with_signal if differ else without).append(group)
            first += count
            if len(with_signal) >= count:
                break
        sampled = {}
        if rounds > 1:
            every = with_signal + without
            sampled = averages(every)
            groups = every[:count]
        share = len(without) / len(with_signal + without)
        settings = sampling_settings(self.config)
        of_step = dict(no_signal=share, problems=first, settings=settings, sampled=sampled)
        return [
            [replace(rollout, group=number, **of_step) for rollout in group]
            for number, group in enumerate(groups)
        ]

    def draft_counts(self) -> Counter[str]:
        """Return how many tokens all samplers have drafted, and accepted, since the last call."""
        drafter = self.sampler.drafter
        if drafter is None:
            return Counter()
        counts = drafter.counts
        drafter.counts = Counter()
        total = sum(gather(counts, self.group), Counter())
        # the ranks of one sampler have the same
        return Counter({name: total[name] // self.config.rollout.tp for name in total})

    def sample(
        self, problems: list[Problem], first: int, n: int, greedy: bool = False
    ) -> list[Group]:
        """Return n responses to each problem; the first is problem number `first` of all."""
        # replicas take the problems in turn
        mine = range(self.replica, len(problems), self.replicas)
        requests = [self.request(problems[i], first + i, n, greedy) for i in mine]
        own = [problems[i] for i in mine]
        # n for each prompt, in order
        sampled = []
        if self.environments:
            sampled = self.played(own, requests)
        elif requests:
            sampled = self.sampler.generate([problem.prompt for problem in own], requests)
        finish = self.scored if self.environments else self.rewarded
        groups = {}
        tp = self.config.rollout.tp
        # the ranks of one sampler all have its responses: each rewards some of them
        for k in range(dist.get_rank() % tp, len(mine), tp):
            each = sampled[k * n : (k + 1) * n]
            groups[mine[k]] = [finish(mine[k], own[k], sample) for sample in each]
        every = {i: group for share in gather(groups, self.group) for i, group in share.items()}
        return [every[i] for i in sorted(every)]

    def request(self, problem: Problem, number: int, n: int, greedy: bool) -> SamplingParams:
        temperature = 0.0 if greedy else self.config.rollout.temperature
        limit = max(1, self.longest(len(problem.prompt)))
        seed = self.seed(number)
        return SamplingParams(
            temperature, max_tokens=limit, n=n, stop_tokens=self.ends, seed=seed, ignore_eos=True
        )

    def played(self, problems: list[Problem], requests: list[SamplingParams]) -> list[Episode]:
        """Return the n samples of each problem, which have talked to their environments."""
        episodes = [
            Episode(problem, request, group, number)
            for group, (problem, request) in enumerate(zip(problems, requests, strict=True))
            for number in range(request.n)
        ]
        self.environments.play(episodes)
        return episodes

    def longest(self, prompt: int) -> int:
        """Return the most tokens of a response to a prompt of so many.

        Prompt and response fit into the model's positions, and, but for the last token, into a row
        of batch.seq_len.
        """
        positions = min(
            self.config.batch.seq_len + 1, self.config.model.config.max_position_embeddings
        )
        return min(self.config.rollout.max_tokens, positions - prompt)

    def seed(self, number: int) -> int:
        # 31 bits, of the run's seed and the problem's number
        digest = hashlib.blake2b(f"{self.config.seed}/{number}".encode(), digest_size=4).digest()
        return int.from_bytes(digest) >> 1

    def rewarded(self, group: int, problem: Problem, completion: Completion) -> Response:
        """Return a completion with its text, its score, and its reward: score less penalty."""
        ended = completion.finish_reason == "stop"
        tokens = completion.tokens
        # without the token that ends it
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
        score = self.score(text, problem)
        return Response(
            group,
            problem.prompt,
            tokens,
            completion.logprobs,
            not ended,
            score,
            score + self.penalty(problem.prompt, tokens),
            text,
            problem.answer,
            routes=packed_routes(completion.routes),
        )

    def scored(self, group: int, problem: Problem, episode: Episode) -> Response:
        """Return an episode as a response, whose text shows all turns and their marks."""
        tokens = episode.response
        # of an environment that has failed before there was one
        prompt = episode.prompt or [self.ends[0]]
        return Response(
            group,
            prompt,
            tokens,
            episode.log_probs,
            episode.truncated,
            episode.score,
            episode.score + self.penalty(prompt, tokens),
            self.tokenizer.decode(tokens, special=True),
            problem.answer,
            given=episode.given,
            turns=episode.turns,
            failure=episode.failure,
            routes=packed_routes(episode.sample and episode.sample.routes),
        )

    def penalty(self, prompt: list[int], tokens: list[int]) -> float:
        """Return what the length of a response takes from its score: 0, or less."""
        grpo = self.config.grpo
        longest = self.longest(len(prompt))
        buffer = min(grpo.overlong_buffer, longest)
        return overlong(len(tokens), longest, buffer, grpo.overlong_penalty)

    def score(self, text: str, problem: Problem) -> float:
        """Return the reward function's value. Raises InputError if it fails or is not finite."""
        name = self.config.grpo.reward
        response = f"for the response {text[:80]!r}"
        setting = f"grpo.reward={name}"
        given = call(setting, response, self.reward, text, problem.answer, problem.row)
        score = finite_number(given)
        if score is None:
            raise InputError(f"{setting} returned {given!r} {response}, and not a finite number")
        return score

    def evaluate(self, problems: ProblemSet, count: int) -> dict[str, float]:
        """Evaluate the first `count` problems: pass@1 of greedy responses, pass@k of sampled ones.

        A response passes if its score, without the penalty for length, is at least 1. pass@k is the
        share of problems where one of k responses passes, see `pass_at`; k = 1, 2, 4, ...
        """
        kept = keeps_state(self.reward) and reward_state(self.reward, self.config.grpo.reward)
        chosen = problems.problems[:count]
        n = self.config.grpo.eval_samples
        greedy = self.sample(chosen, 0, n=1, greedy=True)
        sampled = self.sample(chosen, 0, n)
        if keeps_state(self.reward):
            self.reward.load_state_dict(kept)
        # of each problem's n responses, how many pass
        right = [sum(rollout.score >= 1 for rollout in group) for group in sampled]
        numbers = {"greedy": sum(group[0].score >= 1 for group in greedy) / len(greedy)}
        for k in (2**i for i in range(n.bit_length())):
            numbers[f"pass@{k}"] = sum(pass_at(k, n, c) for c in right) / len(right)
        return numbers


def most_samples(config: Config, replicas: int) -> int:
    """Return the most samples a replica is asked for at once, in a step or an evaluation."""
    grpo = config.grpo
    validation = config.validation
    # problems of an evaluation
    held_out = validation.batches * grpo.prompts if validation.every else 0
    return max(
        -(-grpo.prompts // replicas) * grpo.group, -(-held_out // replicas) * grpo.eval_samples
    )


def pass_at(k: int, n: int, c: int) -> float:
    """Return the chance that k of n responses, drawn without replacement, hold one of c right ones.

    An unbiased estimate of pass@k (Chen et al. 2021): 1 - C(n - c, k) / C(n, k).
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def rewards(groups: list[Group]) -> torch.Tensor:
    """Return the responses' rewards, fp64 [groups, samples]."""
    return torch.tensor(
        [[rollout.reward for rollout in group] for group in groups], dtype=torch.float64
    )


def averages(groups: list[Group]) -> dict[str, float]:
    """Return what can be said of groups of responses, whatever they are for."""
    values = rewards(groups)
    responses = list(chain(*groups))
    lengths = [len(response.response) for response in responses]
    numbers = {
        "reward": values.mean().item(),
        "reward_std": values.std().item(),
        "length": sum(lengths) / len(lengths),
        "longest": max(lengths),
        "truncated": sum(response.truncated for response in responses) / len(responses),
    }
    if any(response.turns or response.failure for response in responses):
        given = sum(end - first for response in responses for first, end in response.given)
        # replies of a sample, tokens that its environment said, and environments that failed
        numbers["turns"] = sum(response.turns for response in responses) / len(responses)
        numbers["given"] = given / len(responses)
        numbers["failed"] = sum(bool(response.failure) for response in responses) / len(responses)
    return numbers


def sampling_settings(config: Config) -> str:
    """Return a digest of the settings that decide a step's responses and their rewards."""
    grpo = config.grpo
    rollout = config.rollout
    deciding = (
        config.seed,
        config.data,
        config.batch.seq_len,
        rollout.temperature,
        rollout.max_tokens,
        grpo.prompts,
        grpo.group,
        grpo.generations,
        grpo.prompt_key,
        grpo.answer_key,
        grpo.mock_digits,
        grpo.reward,
        grpo.environment,
        grpo.turns,
        grpo.environment_failure,
        grpo.overlong_buffer,
        grpo.overlong_penalty,
        # responses without a record of their experts do not do then
        *[grpo.replay_routing] * grpo.replay_routing,
    )
    return hashlib.blake2b(repr(deciding).encode(), digest_size=8).hexdigest()
