"""Run the environment of one sample: each of its calls in a thread, which may take its time."""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np

from minitrain.errors import InputError
from minitrain.grpo.environments import Environment, EnvironmentFactory
from minitrain.grpo.episodes import Answer, Episode
from minitrain.rollout.scheduler import Sample
from minitrain.settings import GRPO
from minitrain.user_code import call, finite_number


class EnvironmentThread:
    """Runs the environment of episode number `index`, on the rank that has it.

    answered: gets (self, number of the call, result, seconds) of each call of the environment.
    longest(prompt tokens): the most tokens of a response.
    """

    def __init__(
        self,
        index: int,
        episode: Episode,
        factory: EnvironmentFactory,
        settings: GRPO,
        longest: Callable[[int], int],
        answered: SimpleQueue,
    ):
        self.index = index
        self.episode = episode
        self.factory = factory
        self.settings = settings
        self.longest = longest
        self.answered = answered
        self.dialog = factory.dialog()
        # made in the thread, because that too is the user's code
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

    def reset(self) -> None:
        """Ask for what the first reply follows."""

        def first() -> Any:
            self.environment = self.factory.environment()
            return self.environment.reset(deepcopy(self.episode.problem.row))

        self.start(first)

    def step(self, sample: Sample) -> None:
        """Send what a sample has said."""
        tokens = sample.produced
        ended = sample.finish_reason == "stop"
        self.start(lambda: self.environment.step(self.dialog.hear(tokens, ended)))

    def start(self, function: Callable) -> None:
        """Call a function in a thread.

        The thread does not keep the process alive: an environment that hangs cannot be stopped.
        """
        self.calls += 1
        self.began = time.monotonic()
        number = self.calls

        def run() -> None:
            try:
                result = call(self.name, self.about, finished, function)
            except InputError as error:
                result = error
            self.answered.put((self, number, result, time.monotonic() - self.began))

        threading.Thread(target=run, daemon=True).start()

    def time_left(self) -> float:
        """Return the seconds until this environment has used up its own."""
        spent = self.seconds + time.monotonic() - self.began
        return self.settings.environment_seconds - spent

    def give_up(self) -> Answer:
        """Return the failure of an environment that has taken too long."""
        # what may come from this call counts no more
        self.calls += 1
        limit = f"grpo.environment_seconds={self.settings.environment_seconds:g}"
        return Answer(
            self.index, [], failure=f"{self.name} took longer than {limit} {self.about}"
        )

    def answer(self, result: Any, seconds: float) -> Answer:
        """Return the answer that the result of a call is, or the failure."""
        self.seconds += seconds
        if self.seconds > self.settings.environment_seconds:
            return self.give_up()
        try:
            if isinstance(result, InputError):
                raise result
            if self.calls == 1:
                return self.first_answer(result)
            return self.next_answer(result)
        except InputError as error:
            told = " ".join(str(error).splitlines())
        # what a user's object does when it is looked at
        except Exception as error:
            told = f"its answer cannot be read, {' '.join(repr(error).splitlines())}"
        if not told.startswith(self.name):
            told = f"{self.name}: {told}, {self.about}"
        return Answer(self.index, [], failure=told)

    def first_answer(self, messages: Any) -> Answer:
        """Return the prompt that reset() has returned, in tokens."""
        tools = getattr(self.environment, "tools", None)
        tokens = self.dialog.ask(messages, self.episode.problem.row, tools)
        if not tokens or self.longest(len(tokens)) < 1:
            raise InputError(f"a prompt of {len(tokens)} tokens leaves no room for a response")
        return Answer(self.index, tokens)

    def next_answer(self, result: Any) -> Answer:
        """Return what step() has returned, in tokens."""
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise InputError(f"step() returned {result!r:.80}, and not (messages, reward, done)")
        messages, reward, done = result
        number = finite_number(reward)
        if number is None:
            raise InputError(f"step() returned the reward {reward!r:.80}, not a finite number")
        if not isinstance(done, bool | np.bool_):
            raise InputError(f"step() returned {done!r:.80} as done, not True or False")
        return Answer(self.index, [] if done else self.dialog.tell(messages), number, bool(done))


def finished(function: Callable) -> Any:
    """Return what a function returns, or what it promises: coroutines share one loop in a thread."""
    result = function()
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
