"""A sample with its environment, and what the environment answers: what all ranks know of them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from minitrain.grpo.responses import Problem
from minitrain.rollout.sampling import SamplingParams
from minitrain.rollout.scheduler import Sample


@dataclass
class Episode:
    """One sample with its environment, from the prompt on; a Response has most of this."""

    problem: Problem
    request: SamplingParams
    # the number of its problem, and its own in the group
    group: int
    number: int
    prompt: list[int] = field(default_factory=list)
    # all tokens after the prompt, and their log-probabilities, 0 for what was given
    response: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    # [first, end] of the tokens that the environment said
    given: list[list[int]] = field(default_factory=list)
    # [n, version] where the weights change before token n
    versions: list[list[int]] = field(default_factory=list)
    # the sum of its rewards
    score: float = 0.0
    # replies so far
    turns: int = 0
    # a limit ended it
    truncated: bool = False
    # what went wrong
    failure: str = ""
    # None before the environment has said what the first reply follows
    sample: Sample | None = None
    ended: bool = False

    def add(self, tokens: list[int], log_probs: list[float]) -> None:
        self.response += tokens
        self.log_probs += log_probs


class Answer(NamedTuple):
    """What the environment of episode `index` has answered: all that ranks need to know of it."""

    index: int
    tokens: list[int]
    reward: float = 0.0
    done: bool = False
    failure: str = ""
