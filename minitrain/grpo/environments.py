"""Environments: what a sample talks to before it ends, such as a tool, a game or a user.

    environment = Class()                                    one for each sample
    messages = environment.reset(row)                        what the first reply follows
    messages, reward, done = environment.step(response)      after each reply

Messages are a list of {"role": ..., "content": ...}. Those of `step` are from the user, the system
or a tool, and do not matter if it is done. The sample's score is the sum of its rewards. Both
methods may be coroutines, and may take their time: other samples go on meanwhile. An environment
may have `tools`, a list of their schemas, which the chat template shows; `response.tool_calls` are
the calls that a reply makes.

What an environment says is appended to the sample as the chat template would write it, up to where
the next reply begins. The sample's caches stay, so no token is computed twice. Only tokens that the
policy has drawn are learned, each with its log-probability when it was drawn.

A sample ends when its environment is done, after grpo.turns replies, or at rollout.max_tokens, all
that follows the prompt included; a reply that is cut off there is still sent. Environments run in
threads beside the sampler. A run gives the same bits again as long as all answers come within
grpo.environment_wait, for which decoding waits: else when they come decides which samples are in a
batch, and the products of batches of other sizes are rounded otherwise.
"""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, count, groupby
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch.distributed import ProcessGroup

from minitrain.errors import InputError
from minitrain.grpo.batches import Problem
from minitrain.parallel.agreement import gather
from minitrain.rollout.engine import Sampler
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample
from minitrain.settings import Config
from minitrain.user_code import call, finite_number, load_function

# seconds between two looks at what other ranks' environments have answered
POLL = 0.01


class ToolCall(NamedTuple):
    """A call that a reply makes. arguments: None if `text`, what was written, has none to be read."""

    name: str
    arguments: dict | None
    text: str


class Reply(str):
    """A reply's text, without special tokens."""

    tool_calls: list[ToolCall]


class Environment(Protocol):
    """One sample's environment, see above."""

    def reset(self, row: dict) -> list[dict]: ...
    def step(self, response: Reply) -> tuple[list[dict], float, bool]: ...


class Dialog(Protocol):
    """The chat of one sample as tokens (data/chat/dialogs.py). Raises InputError for what is none."""

    def ask(self, messages: list[dict], row: dict, tools: list | None) -> list[int]:
        """Return the tokens that the first reply follows."""

    def hear(self, tokens: list[int], ended: bool) -> Reply:
        """Return a reply. ended: its last token is one that ends it."""

    def tell(self, messages: list[dict]) -> list[int]:
        """Return the tokens between the last reply, with its end, and the next one."""


class Talk(NamedTuple):
    """What samples talk to: `make()` makes an environment, `dialog()` the chat with it."""

    make: Callable[[], Environment]
    dialog: Callable[[], Dialog]


@dataclass
class Episode:
    """One sample with its environment, from the prompt on.

    group, number: of its problem, and its own in the group.
    response: all tokens after the prompt; given: (first, end) of those that the environment said.
    log_probs: as many, 0 for what was given. versions: see Sample. truncated: a limit ended it.
    failure: what went wrong.
    """

    problem: Problem
    request: SamplingParams
    group: int
    number: int
    prompt: list[int] = field(default_factory=list)
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    given: list[list[int]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    score: float = 0.0
    turns: int = 0
    truncated: bool = False
    failure: str = ""
    sample: Sample | None = None
    ended: bool = False

    def add(self, tokens: list[int], log_probs: list[float]) -> None:
        self.response += tokens
        self.log_probs += log_probs


class Answer(NamedTuple):
    """What an environment answers to episode `index`: all that ranks need to know of it."""

    index: int
    tokens: list[int]
    reward: float = 0.0
    done: bool = False
    failure: str = ""


class Environments:
    """Lets the samples of `sampler` talk to environments, each made by `talk`.

    longest(prompt tokens): the most tokens of a response, at least 1 if there is room for one.
    group: the ranks that share the sampler, on gloo; None: this one alone. Each of them runs some
        of the environments, and tells the others what these have answered.
    """

    def __init__(
        self,
        config: Config,
        talk: Talk,
        sampler: Sampler,
        longest: Callable[[int], int],
        group: ProcessGroup | None = None,
    ):
        self.settings = config.grpo
        self.make, self.dialog = talk
        self.sampler = sampler
        self.longest = longest
        self.group = group
        # whether decoding waits for answers: until one has taken longer than that
        self.patient = self.settings.environment_wait > 0
        self.rank, self.ranks = (group.rank(), group.size()) if group else (0, 1)
        self.answered = SimpleQueue()
        self.forget()

    def forget(self) -> None:
        """Forget all episodes. They are numbered as they come; all but `hosts` is known to all ranks."""
        self.numbers = count()
        self.episodes: dict[int, Episode] = {}
        self.hosts: dict[int, Host] = {}
        # who waits for an answer, on whatever rank, and who is decoded
        self.waiting: set[int] = set()
        self.talking: dict[Sample, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.talking)

    def begin(self, episodes: list[Episode]) -> None:
        """Begin episodes, the same ones on all ranks of the sampler."""
        for episode in episodes:
            index = next(self.numbers)
            self.episodes[index] = episode
            self.waiting.add(index)
            if index % self.ranks == self.rank:
                host = self.hosts[index] = Host(index, episode, self)
                host.start(self.answered, host.reset)

    def advance(self) -> None:
        """Take a step with all episodes that have not ended; all ranks of the sampler call it.

        Raises InputError for an environment that fails, unless grpo.environment_failure is zero.
        """
        try:
            answers = self.answers(self.hosts, self.answered, self.waiting)
            self.waiting -= {answer.index for answer in answers}
            self.talking |= self.take(answers, self.episodes)
            if self.sampler.busy:
                self.sampler.step()
            for sample in [sample for sample in self.talking if sample.ended]:
                index = self.talking.pop(sample)
                self.waiting.add(index)
                self.hear(self.episodes[index], sample)
                if index in self.hosts:
                    self.hosts[index].send(self.answered, sample)
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

    def answers(
        self, hosts: dict[int, "Host"], answered: SimpleQueue, waiting: set[int]
    ) -> list[Answer]:
        """Return what environments have answered by now, in order of the episodes.

        With nothing to decode it waits for an answer. Ranks get the same.
        """
        if not waiting:
            return []
        pending = [hosts[i] for i in sorted(waiting & hosts.keys())]
        found = self.own_answers(pending, answered)
        every = gather(found, self.group) if self.group else [found]
        return sorted(chain(*every))

    def own_answers(self, pending: list["Host"], answered: SimpleQueue) -> list[Answer]:
        """Return what this rank's environments have answered, and the failures of those out of time."""
        left = {host.index: host for host in pending}
        found = []
        wait = self.settings.environment_wait if self.patient else 0.0
        until = time.monotonic() + wait
        while left:
            waits = time.monotonic() < until
            # then there is nothing to do but to wait
            idle = not (self.sampler.busy or found)
            try:
                host, number, *result = answered.get(timeout=POLL if waits or idle else 0)
            except Empty:
                late = [host for host in left.values() if host.time_left() <= 0]
                found += [left.pop(host.index).give_up() for host in late]
                if waits or (idle and not found and not self.group):
                    continue
                break
            # not of those that were given up, or forgotten
            if left.get(host.index) is host and number == host.calls:
                found.append(left.pop(host.index).answer(*result))
        self.patient &= not (left and wait)
        return found

    def take(self, answers: list[Answer], episodes: dict[int, Episode]) -> dict[Sample, int]:
        """Let samples begin, go on, or end. Return those that are decoded now, with their numbers."""
        talking = {}
        begun = []
        for answer in answers:
            episode = episodes[answer.index]
            if answer.failure:
                self.fail(episode, answer.failure)
                self.end(answer.index)
            elif not episode.prompt:
                episode.prompt = answer.tokens
                begun.append(answer.index)
            elif self.go_on(episode, answer):
                talking[episode.sample] = answer.index
            else:
                self.end(answer.index)

        # samples of one prompt are one request: its tokens are computed once
        def alike(place: tuple[int, int]) -> tuple:
            episode = episodes[place[1]]
            return episode.group, episode.prompt, episode.number - place[0]

        for _, places in groupby(enumerate(begun), alike):
            together = [index for _, index in places]
            first = episodes[together[0]]
            limit = self.longest(len(first.prompt))
            params = replace(first.request, n=len(together), max_tokens=limit)
            samples = self.sampler.submit(first.prompt, params, first=first.number, keep=True)
            for index, sample in zip(together, samples, strict=True):
                episodes[index].sample = sample
                talking[sample] = index
        return talking

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
        self.hosts.pop(index, None)
        episode.ended = True
        if episode.sample:
            self.sampler.cancel(episode.sample)


class Host:
    """Runs the environment of one episode, number `index`, on the rank that has it."""

    def __init__(self, index: int, episode: Episode, environments: Environments):
        self.index = index
        self.episode = episode
        self.settings = environments.settings
        self.make = environments.make
        self.longest = environments.longest
        self.dialog = environments.dialog()
        self.environment: Environment | None = None
        # of all calls, and when the last began
        self.calls = 0
        self.seconds = 0.0
        self.began = 0.0

    @property
    def name(self) -> str:
        return f"grpo.environment={self.settings.environment}"

    @property
    def about(self) -> str:
        row = json.dumps(self.episode.problem.row, ensure_ascii=False, default=str)
        return f"for the row {row if len(row) <= 80 else row[:77] + '...'}"

    def start(self, answered: SimpleQueue, function: Callable, *arguments: Any) -> None:
        """Call a function in a thread; put (self, number of the call, result, seconds) into `answered`.

        The thread does not keep the process alive: an environment that hangs cannot be stopped.
        """
        self.calls += 1
        self.began = time.monotonic()
        number = self.calls

        def run() -> None:
            try:
                result = call(self.name, self.about, finished, function, *arguments)
            except InputError as error:
                result = error
            answered.put((self, number, result, time.monotonic() - self.began))

        threading.Thread(target=run, daemon=True).start()

    def reset(self) -> Any:
        self.environment = self.make()
        return self.environment.reset(deepcopy(self.episode.problem.row))

    def send(self, answered: SimpleQueue, sample: Sample) -> None:
        """Send what a sample has said."""
        self.start(answered, self.step, sample.produced, sample.finish_reason == "stop")

    def step(self, tokens: list[int], ended: bool) -> Any:
        return self.environment.step(self.dialog.hear(tokens, ended))

    def time_left(self) -> float:
        """Return the seconds until this environment has used up its own."""
        spent = self.seconds + time.monotonic() - self.began
        return self.settings.environment_seconds - spent

    def give_up(self) -> Answer:
        # what may come from this call counts no more
        self.calls += 1
        limit = f"grpo.environment_seconds={self.settings.environment_seconds:g}"
        return Answer(
            self.index, [], failure=f"{self.name} took longer than {limit} {self.about}"
        )

    def answer(self, result: Any, seconds: float) -> Answer:
        """Return the answer that a result is, or the failure."""
        self.seconds += seconds
        if self.seconds > self.settings.environment_seconds:
            return self.give_up()
        try:
            if isinstance(result, InputError):
                raise result
            if self.calls == 1:
                return self.begin(result)
            return self.go_on(result)
        except InputError as error:
            told = " ".join(str(error).splitlines())
        # what a user's object does when it is looked at
        except Exception as error:
            told = f"its answer cannot be read, {' '.join(repr(error).splitlines())}"
        if not told.startswith(self.name):
            told = f"{self.name}: {told}, {self.about}"
        return Answer(self.index, [], failure=told)

    def begin(self, messages: Any) -> Answer:
        tools = getattr(self.environment, "tools", None)
        tokens = self.dialog.ask(messages, self.episode.problem.row, tools)
        if not tokens or self.longest(len(tokens)) < 1:
            raise InputError(f"a prompt of {len(tokens)} tokens leaves no room for a response")
        return Answer(self.index, tokens)

    def go_on(self, result: Any) -> Answer:
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise InputError(f"step() returned {result!r:.80}, and not (messages, reward, done)")
        messages, reward, done = result
        number = finite_number(reward)
        if number is None:
            raise InputError(f"step() returned the reward {reward!r:.80}, not a finite number")
        if not isinstance(done, bool | np.bool_):
            raise InputError(f"step() returned {done!r:.80} as done, not True or False")
        return Answer(self.index, [] if done else self.dialog.tell(messages), number, bool(done))


def finished(function: Callable, *arguments: Any) -> Any:
    """Return what a function returns, or what it promises: coroutines share one loop in a thread."""
    result = function(*arguments)
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return asyncio.run_coroutine_threadsafe(wait(), event_loop()).result()


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def load_environment(name: str) -> Callable[[], Environment]:
    """Return what makes an environment, `package.module:Class`, else raise InputError."""
    setting = f"grpo.environment={name!r}"
    found = load_function(setting, name, {}, "empty or ")
    missing = [key for key in ("reset", "step") if not callable(getattr(found, key, None))]
    if isinstance(found, type) and missing:
        raise InputError(f"{setting} has no {missing[0]}()")
    return found
