"""Let samples go on with what their environments answer, while others are decoded."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count, groupby
from queue import Empty, SimpleQueue

from torch.distributed import ProcessGroup

from minitrain.errors import InputError
from minitrain.grpo.environment_threads import EnvironmentThread
from minitrain.grpo.environments import EnvironmentFactory
from minitrain.grpo.episodes import Answer, Episode
from minitrain.parallel.agreement import gather
from minitrain.rollout.engine import Sampler
from minitrain.rollout.scheduler import Sample
from minitrain.settings import Config

# seconds between two looks at what other ranks' environments have answered
POLL = 0.01


class EpisodeRunner:
    """Lets the samples of `sampler` talk to environments, each made by `factory`.

    longest(prompt tokens): the most tokens of a response, at least 1 if there is room for one.
    group: the ranks that share the sampler, on gloo; None: this one alone. Each of them runs some
        of the environments, and tells the others what these have answered.
    """

    def __init__(
        self,
        config: Config,
        factory: EnvironmentFactory,
        sampler: Sampler,
        longest: Callable[[int], int],
        group: ProcessGroup | None = None,
    ):
        self.settings = config.grpo
        self.factory = factory
        self.sampler = sampler
        self.longest = longest
        self.group = group
        # whether decoding waits for answers: until one has taken longer than that
        self.patient = self.settings.environment_wait > 0
        self.rank, self.ranks = (group.rank(), group.size()) if group else (0, 1)
        self.answered = SimpleQueue()
        self.forget()

    def forget(self) -> None:
        """Forget all episodes. They are numbered as they come; all but `threads` is known to all ranks."""
        self.numbers = count()
        self.episodes: dict[int, Episode] = {}
        self.threads: dict[int, EnvironmentThread] = {}
        # who waits for an answer, on whatever rank, and who is decoded
        self.waiting: set[int] = set()
        self.decoding: dict[Sample, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.decoding)

    def begin(self, episodes: list[Episode]) -> None:
        """Begin episodes, the same ones on all ranks of the sampler."""
        for episode in episodes:
            index = next(self.numbers)
            self.episodes[index] = episode
            self.waiting.add(index)
            if index % self.ranks == self.rank:
                thread = EnvironmentThread(
                    index, episode, self.factory, self.settings, self.longest, self.answered
                )
                self.threads[index] = thread
                thread.reset()

    def advance(self) -> None:
        """Take a step with all episodes that have not ended; all ranks of the sampler call it.

        Raises InputError for an environment that fails, unless grpo.environment_failure is zero.
        """
        try:
            answers = self.answers()
            self.waiting -= {answer.index for answer in answers}
            self.take(answers)
            if self.sampler.busy:
                self.sampler.step()
            for sample in [sample for sample in self.decoding if sample.ended]:
                index = self.decoding.pop(sample)
                self.waiting.add(index)
                self.hear(self.episodes[index], sample)
                if index in self.threads:
                    self.threads[index].step(sample)
        except BaseException:
            self.sampler.cancel(*(each.sample for each in self.episodes.values() if each.sample))
            self.forget()
            raise

    def hear(self, episode: Episode, sample: Sample) -> None:
        """Add what a sample has said. One that was cut off cannot go on."""
        before = len(episode.response)
        episode.versions += [[before + first, version] for first, version in sample.versions]
        episode.add(sample.produced, sample.logprobs)
        episode.turns += 1
        episode.truncated = sample.finish_reason != "stop"

    # --- answers

    def answers(self) -> list[Answer]:
        """Return what environments have answered by now, in order of the episodes.

        With nothing to decode it waits for an answer. Ranks get the same.
        """
        if not self.waiting:
            return []
        pending = [self.threads[i] for i in sorted(self.waiting & self.threads.keys())]
        found = self.own_answers(pending)
        every = gather(found, self.group) if self.group else [found]
        return sorted(chain(*every))

    def own_answers(self, pending: list[EnvironmentThread]) -> list[Answer]:
        """Return what this rank's environments have answered, and the failures of those out of time."""
        left = {thread.index: thread for thread in pending}
        found = []
        wait = self.settings.environment_wait if self.patient else 0.0
        until = time.monotonic() + wait
        while left:
            waits = time.monotonic() < until
            # then there is nothing to do but to wait
            idle = not (self.sampler.busy or found)
            try:
                thread, number, *result = self.answered.get(timeout=POLL if waits or idle else 0)
            except Empty:
                late = [thread for thread in left.values() if thread.time_left() <= 0]
                found += [left.pop(thread.index).give_up() for thread in late]
                if waits or (idle and not found and not self.group):
                    continue
                break
            # not of those that were given up, or forgotten
            if left.get(thread.index) is thread and number == thread.calls:
                found.append(left.pop(thread.index).answer(*result))
        self.patient &= not (left and wait)
        return found

    def take(self, answers: list[Answer]) -> None:
        """Let samples begin, go on, or end, as their environments have answered."""
        begun = []
        for answer in answers:
            episode = self.episodes[answer.index]
            if answer.failure:
                self.fail(episode, answer.failure)
                self.end(answer.index)
            elif not episode.prompt:
                episode.prompt = answer.tokens
                begun.append(answer.index)
            elif self.go_on(episode, answer):
                self.decoding[episode.sample] = answer.index
            else:
                self.end(answer.index)
        self.submit(begun)

    def submit(self, begun: list[int]) -> None:
        """Begin to decode episodes: samples of one prompt are one request, whose tokens are computed once."""

        def alike(place: tuple[int, int]) -> tuple:
            episode = self.episodes[place[1]]
            return episode.group, episode.prompt, episode.number - place[0]

        for _, places in groupby(enumerate(begun), alike):
            together = [index for _, index in places]
            first = self.episodes[together[0]]
            limit = self.longest(len(first.prompt))
            params = replace(first.request, n=len(together), max_tokens=limit)
            samples = self.sampler.submit(first.prompt, params, first=first.number, keep=True)
            for index, sample in zip(together, samples, strict=True):
                self.episodes[index].sample = sample
                self.decoding[sample] = index

    def go_on(self, episode: Episode, answer: Answer) -> bool:
        """Give an episode what its environment has answered; return whether it goes on."""
        episode.score += answer.reward
        sample = episode.sample
        ends = answer.done or episode.truncated
        room = len(sample.tokens) + len(answer.tokens) < sample.limit
        if ends or episode.turns == self.settings.turns or not room:
            episode.truncated |= not ends
            return False
        first = len(episode.response)
        episode.add(answer.tokens, [0.0] * len(answer.tokens))
        episode.given.append([first, len(episode.response)])
        episode.sample = self.sampler.resume(sample, answer.tokens)
        return True

    def fail(self, episode: Episode, failure: str) -> None:
        if self.settings.environment_failure == "stop":
            raise InputError(failure)
        episode.failure = failure
        episode.score = 0.0

    def end(self, index: int) -> None:
        episode = self.episodes.pop(index)
        self.threads.pop(index, None)
        episode.ended = True
        if episode.sample:
            self.sampler.cancel(episode.sample)
