"""What a step of GRPO is about: problems, responses to them, and the numbers that both give."""

import base64
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch

from minitrain.models.decoder_config import routing_width
from minitrain.settings import Config


class Problem(NamedTuple):
    """A prompt and what is right."""

    # tokens before the response
    prompt: list[int]
    # tokens of a right response, with its end
    reply: list[int]
    # what responses are compared with
    answer: str
    # the line of data it was read from
    row: dict


class ProblemSet(Protocol):
    """An endless sequence of problems (data/chat/problems.py)."""

    problems: list[Problem]

    def take(self, first: int, count: int) -> list[Problem]:
        """Return the problems number first, first + 1, ... of the sequence."""


@dataclass
class Response:
    """One response to a prompt, with all that a step needs to know of it."""

    # number of its prompt in the step
    group: int
    # tokens
    prompt: list[int]
    response: list[int]
    # of each response token when it was sampled; 0 for those of an environment
    log_probs: list[float]
    # it reached a limit before its end
    truncated: bool
    # of the reward function, and the same less the penalty for length
    score: float
    reward: float
    # the response's, and the right answer, of its problem
    text: str
    answer: str
    # share of the groups sampled for its step, replaced ones included, whose scores are all equal
    no_signal: float = 0.0
    # number sampled by all steps up to the end of its step
    problems: int = 0
    # digest of the settings it was sampled and rewarded with
    settings: str = ""
    # `averages` of all that was sampled for its step, if some of it was replaced
    sampled: dict[str, float] = field(default_factory=dict)
    # [first, end] of the response's tokens that an environment said
    given: list[list[int]] = field(default_factory=list)
    # how often the policy replied to its environment; 0 without one
    turns: int = 0
    # what went wrong with its environment
    failure: str = ""
    # with grpo.replay_routing, the experts of its tokens but the last, in base64: see `experts`
    routes: str = ""
    # [n, version] where the weights change before token n; a step's are those that it begins with.
    # Step 0 has version 0
    versions: list[list[int]] = field(default_factory=list)

    def token_versions(self) -> np.ndarray:
        """Return which weights each token was drawn with, int64 [tokens]."""
        versions = np.array([version for _, version in self.versions], np.int64)
        return versions.repeat(np.diff([*(n for n, _ in self.versions), len(self.response)]))

    def drawn(self) -> np.ndarray:
        """Return which tokens of the response the policy has drawn, bool [tokens]."""
        drawn = np.ones(len(self.response), bool)
        for first, end in self.given:
            drawn[first:end] = False
        return drawn

    def experts(self, config: Config) -> np.ndarray:
        """Return the experts of all tokens but the last, int16 [tokens - 1, layers x top_k].

        -1 where the sampler has not computed a token: what an environment said at the end.
        """
        width = routing_width(config.model.config)
        known = np.frombuffer(base64.b64decode(self.routes), "<i2").reshape(-1, width)
        experts = np.full((len(self.prompt) + len(self.response) - 1, width), -1, np.int16)
        experts[: len(known)] = known
        return experts


def packed_routes(routes: np.ndarray | None) -> str:
    """Return recorded experts, int16 [tokens, layers x top_k], as text, which JSON can hold."""
    return "" if routes is None else base64.b64encode(routes.astype("<i2").tobytes()).decode()


# all responses to one prompt
Group = list[Response]


def rewards(groups: list[Group]) -> torch.Tensor:
    """Return the responses' rewards, fp64 [groups, samples]."""
    return torch.tensor(
        [[response.reward for response in group] for group in groups], dtype=torch.float64
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


def describe_responses(groups: list[Group]) -> dict[str, float]:
    """Return what can be said of a step's responses without a model.

    Where groups were replaced (grpo.generations), the averages are over all that was sampled, and
    those of the groups that are trained on, of which none is all right or all wrong, stand beside
    them as trained_*.
    """
    first = groups[0][0]
    numbers = {"no_signal": first.no_signal, "problems": first.problems}
    trained = averages(groups)
    if not first.sampled:
        return numbers | trained
    return numbers | first.sampled | {f"trained_{name}": x for name, x in trained.items()}


def describe_ages(groups: list[Group], step: int) -> dict[str, float]:
    """Return how many steps old the weights of the drawn tokens are, of a step's responses."""
    drawn = [each.token_versions()[each.drawn()] for each in chain(*groups) if each.versions]
    ages = step - np.concatenate(drawn) if drawn else np.zeros(1)
    return {"age": ages.mean().item(), "age_max": ages.max().item()}
