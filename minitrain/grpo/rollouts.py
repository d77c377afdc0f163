"""The rollout side of GRPO: samples and rewards groups of responses; evaluates the policy.

Replicas of the sampler share the prompts. The responses do not depend on their number: a response's
randomness depends on (seed, number of its problem, number in its group) alone.

With grpo.in_flight further groups are sampled along with those of a step, so that nobody waits for
its longest response. What is unfinished when new weights come goes on with these (Kimi k1.5's
partial rollouts, in-flight updates of PipelineRL), and each token keeps the version of its weights.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from minitrain.errors import InputError
from minitrain.grpo.episode_runner import EpisodeRunner
from minitrain.grpo.episodes import Episode
from minitrain.grpo.responses import Group, Problem, ProblemSet, Response, averages, packed_routes
from minitrain.grpo.rewards import Reward, keeps_state, overlong, reward_state
from minitrain.parallel.agreement import broadcast, gather
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
from minitrain.rollout.texts import TextTokenizer
from minitrain.settings import Config
from minitrain.user_code import call, finite_number

# problems that are being sampled: of those of this replica the place, the problem, and its samples
Flight = list[tuple[int, Problem, list[Sample | Episode]]]
# what a checkpoint keeps of a sample
DRAWN = ("produced", "logprobs", "versions", "finish_reason")


class RolloutWorker:
    """Samples groups of responses with `sampler`, and rewards them, with the other replicas.

    ends: the tokens that end a response. reward: see grpo/rewards.py.
    replica: which of how many `replicas` this rank is. group: the ranks of all replicas, on gloo.
    own: those of this replica, if there are several.
    """

    def __init__(
        self,
        config: Config,
        sampler: Sampler,
        tokenizer: TextTokenizer,
        ends: tuple[int, ...],
        reward: Reward,
        replica: int,
        replicas: int,
        group: ProcessGroup,
        own: ProcessGroup | None = None,
    ):
        self.config = config
        self.sampler = sampler
        self.tokenizer = tokenizer
        self.ends = ends
        self.reward = reward
        self.replica = replica
        self.replicas = replicas
        self.group = group
        self.own = own
        # what samples talk to, which then rewards them
        self.episodes: EpisodeRunner | None = None
        # by the number of the first problem
        self.flights: dict[int, Flight] = {}
        # samples that the sampler does not have at the moment
        self.paused: list[Sample] = []
        # what a checkpoint has of samples in flight, by (problem, number in its group)
        self.kept: dict[tuple[int, int], list] = {}

    def collect(self, problems: ProblemSet, first: int, ahead: int = 0) -> list[Group]:
        """Sample and reward the groups of a step. Returns them on all replicas.

        first: the number of the first problem that no step has had. ahead: how many further steps'
        groups may be begun meanwhile.
        A group has a signal if its scores differ. With grpo.generations above 1, groups without a
        signal are replaced by groups of further problems (DAPO's dynamic sampling), and used after
        all if these do not suffice. The signal is in scores, not rewards: where all are wrong, the
        penalty for length would only teach to be wrong in fewer words.
        """
        count = self.config.grpo.prompts
        rounds = self.config.grpo.generations
        oldest = self.sampler.version - self.config.grpo.lag
        self.go_on()
        # groups whose scores differ, and groups whose scores are all equal
        with_signal = []
        without = []
        for _ in range(rounds):
            for later in range(1 + ahead):
                self.launch(problems, first + later * count, oldest + later)
            groups = self.end(self.flights.pop(first))
            for group in groups:
                differ = len({response.score for response in group}) > 1
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
            [replace(response, group=number, **of_step) for response in group]
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
        return self.end(self.begin(problems, first, n, greedy))

    def begin(self, problems: list[Problem], first: int, n: int, greedy: bool = False) -> Flight:
        """Begin to sample n responses to each problem; the first is number `first` of all."""
        flight = []
        # replicas take the problems in turn
        for i in range(self.replica, len(problems), self.replicas):
            problem = problems[i]
            request = self.request(problem, first + i, n, greedy)
            if self.episodes:
                samples = [Episode(problem, request, first + i, number) for number in range(n)]
                self.episodes.begin(samples)
            else:
                samples = self.sampler.submit(problem.prompt, request)
            flight.append((i, problem, samples))
        return flight

    def end(self, flight: Flight) -> list[Group]:
        """Sample until all of a flight has ended; return its groups, on all replicas."""
        with self.sampler.weights.in_use():
            while not all(sample.ended for *_, samples in flight for sample in samples):
                self.advance()
        finish = self.scored if self.episodes else self.rewarded
        tp = self.config.rollout.tp
        # the ranks of one sampler all have its responses: each rewards some of them
        groups = {
            i: [finish(i, problem, sample) for sample in samples]
            for i, problem, samples in flight[dist.get_rank() % tp :: tp]
        }
        every = {i: group for share in gather(groups, self.group) for i, group in share.items()}
        return [every[i] for i in sorted(every)]

    # --- in flight

    @property
    def busy(self) -> bool:
        return (self.episodes or self.sampler).busy

    def advance(self) -> None:
        """Take a step with all that is being sampled."""
        if self.episodes:
            self.episodes.advance()
        else:
            self.sampler.step()

    def launch(self, problems: ProblemSet, first: int, oldest: int) -> None:
        """Begin the groups of a step whose first problem has this number, if they have not begun.

        oldest: the first version of the weights that may have drawn what a checkpoint has of them.
        """
        if first in self.flights:
            return
        grpo = self.config.grpo
        flight = self.begin(problems.take(first, grpo.prompts), first, grpo.group)
        self.flights[first] = flight
        if not self.kept:
            return
        # nothing has been sampled yet
        paused = self.sampler.pause()
        for place, sample in samples_of({first: flight}):
            drawn = self.kept.pop(place, {"versions": []})
            if all(version >= oldest for _, version in drawn["versions"]):
                vars(sample).update(drawn)
        self.sampler.go_on([sample for sample in paused if not sample.ended])

    def decode_until(self, done: Callable[[], bool]) -> None:
        """Sample what has begun until done(), or until all has ended."""
        with self.sampler.weights.in_use():
            while self.busy:
                stops = done()
                if self.own:
                    stops = broadcast(stops, dist.get_global_rank(self.own, 0), self.own)
                if stops:
                    return
                self.advance()

    def pause(self) -> None:
        """Take all samples off the sampler, while others need it, its memory, or its model."""
        self.paused += self.sampler.pause()

    def go_on(self) -> None:
        self.sampler.go_on(self.paused)
        self.paused = []

    def refresh(self, version: int) -> None:
        """Sample with new weights from now on."""
        keep = self.config.grpo.in_flight and self.config.grpo.in_flight_cache == "keep"
        if not keep:
            self.pause()
        self.sampler.refresh(keep)
        self.sampler.version = version

    def in_flight(self) -> dict[str, Any]:
        """Return what all replicas have drawn of what is in flight, as JSON, for `load`.

        Of environments there is nothing: what they remember is theirs, so their samples begin anew.
        """
        # the ranks of one sampler all have the same
        mine = dist.get_rank() % self.config.rollout.tp == 0 and not self.episodes
        drawn = [
            (place, {name: getattr(sample, name) for name in DRAWN})
            for place, sample in samples_of(self.flights if mine else {})
        ]
        samples = list(chain(*gather(drawn, self.group)))
        return {"settings": sampling_settings(self.config), "samples": samples}

    def load(self, kept: dict[str, Any]) -> None:
        """Continue samples that were in flight, unless settings that decide them are others now."""
        if kept["settings"] == sampling_settings(self.config) and not self.episodes:
            self.kept = {tuple(place): drawn for place, drawn in kept["samples"]}

    def request(self, problem: Problem, number: int, n: int, greedy: bool) -> SamplingParams:
        temperature = 0.0 if greedy else self.config.rollout.temperature
        limit = max(1, self.longest(len(problem.prompt)))
        seed = self.seed(number)
        return SamplingParams(
            temperature, max_tokens=limit, n=n, stop_tokens=self.ends, seed=seed, ignore_eos=True
        )

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

    def rewarded(self, group: int, problem: Problem, sample: Sample) -> Response:
        """Return a sample with its text, its score, and its reward: score less penalty."""
        ended = sample.finish_reason == "stop"
        tokens = sample.produced
        # without the token that ends it
        text = self.tokenizer.decode(tokens[:-1] if ended else tokens)
        score = self.score(text, problem)
        return Response(
            group,
            problem.prompt,
            tokens,
            sample.logprobs,
            not ended,
            score,
            score + self.penalty(problem.prompt, tokens),
            text,
            problem.answer,
            routes=packed_routes(sample.routes),
            versions=sample.versions,
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
            versions=episode.versions,
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
        # of what is in flight an evaluation leaves no trace
        self.pause()
        greedy = self.sample(chosen, 0, n=1, greedy=True)
        sampled = self.sample(chosen, 0, n)
        # environments have answered meanwhile
        self.pause()
        if keeps_state(self.reward):
            self.reward.load_state_dict(kept)
        # of each problem's n responses, how many pass
        right = [sum(response.score >= 1 for response in group) for group in sampled]
        numbers = {"greedy": sum(group[0].score >= 1 for group in greedy) / len(greedy)}
        for k in (2**i for i in range(n.bit_length())):
            numbers[f"pass@{k}"] = sum(pass_at(k, n, c) for c in right) / len(right)
        return numbers


def samples_of(flights: dict[int, Flight]) -> Iterator[tuple[tuple[int, int], Any]]:
    """Yield the samples in flight, each behind the numbers of its problem and of its own."""
    for first, flight in flights.items():
        for i, _, samples in flight:
            for number, sample in enumerate(samples):
                yield (first + i, number), sample


def most_samples(config: Config, replicas: int) -> int:
    """Return the most samples a replica is asked for at once, in a step or an evaluation."""
    grpo = config.grpo
    validation = config.validation
    # problems of an evaluation
    held_out = validation.batches * grpo.prompts if validation.every else 0
    steps = 1 + grpo.lag * grpo.in_flight
    return max(
        -(-grpo.prompts // replicas) * grpo.group * steps,
        -(-held_out // replicas) * grpo.eval_samples,
    )


def pass_at(k: int, n: int, c: int) -> float:
    """Return the chance that k of n responses, drawn without replacement, hold one of c right ones.

    An unbiased estimate of pass@k (Chen et al. 2021): 1 - C(n - c, k) / C(n, k).
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k)


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
    )
    if grpo.replay_routing:
        # responses without a record of their experts do not do
        deciding += (True,)
    return hashlib.blake2b(repr(deciding).encode(), digest_size=8).hexdigest()
