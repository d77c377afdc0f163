"""Sampled responses packed into micro-batches.

Every rank has all responses of a step, packs them into the same rows, and takes its share of these.
"""

import base64
import itertools
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from minitrain.models.decoder_config import routing_width
from minitrain.parallel.pipeline_split import pipeline_needs
from minitrain.settings import Config, Parallel
from minitrain.training.loss import IGNORE
from minitrain.training.packing import PADDING, Batch, first_fit_decreasing, pack_row, stack

# the model's inputs for one sequence: each value is [tokens - 1], since the last token only labels
Example = dict[str, np.ndarray]


@dataclass
class Response:
    """One response to a prompt.

    group: number of its prompt in the step. prompt, response: tokens.
    log_probs: of each response token when it was sampled; 0 for those of an environment.
    truncated: it reached a limit before its end.
    score: of the reward function. reward: the score less the penalty for length.
    text: of the response. answer: the right one, of its problem.
    no_signal: share of the groups sampled for its step, replaced ones included, whose scores are
        all equal.
    problems: number sampled by all steps up to the end of its step.
    settings: digest of the settings it was sampled and rewarded with.
    sampled: `averages` of all that was sampled for its step, if some of it was replaced.
    given: (first, end) of the response's tokens that an environment said.
    turns: how often the policy replied to its environment; 0 without one. failure: of that.
    routes: with grpo.replay_routing, the experts of its tokens but the last, in base64, see `experts`.
    versions: [n, version] where the weights change before token n; a step's are those that it
        begins with. Step 0 has version 0.
    """

    group: int
    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    truncated: bool
    score: float
    reward: float
    text: str
    answer: str
    no_signal: float = 0.0
    problems: int = 0
    settings: str = ""
    sampled: dict[str, float] = field(default_factory=dict)
    given: list[list[int]] = field(default_factory=list)
    turns: int = 0
    failure: str = ""
    routes: str = ""
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


def pack_micro_batches(
    samples: list[Example], config: Config, rank: int, ranks: int
) -> list[Batch]:
    """Return the micro-batches of data-parallel rank `rank` of `ranks`, values [micro, seq].

    The samples are packed into rows; all ranks get equally many, padded with empty rows.
    """
    micro = config.batch.micro
    length = config.batch.seq_len
    # of each row, the numbers of its samples
    bins = first_fit_decreasing([len(sample["tokens"]) for sample in samples], length)
    count = enough_for_pipeline(config.parallel, -(-len(bins) // (micro * ranks)))
    # collectives need equally many micro-batches on all ranks: add empty rows
    bins += [[] for _ in range(count * micro * ranks - len(bins))]
    padding = dict.fromkeys(samples[0], 0.0) | PADDING
    if "routes" in padding:
        padding["routes"] = -1
    nothing = {key: column[:0] for key, column in samples[0].items()}
    rows = [
        pack_row([samples[i] for i in each] or [nothing], length, padding)
        for each in bins[rank::ranks]
    ]
    return [stack(rows[n : n + micro]) for n in range(0, len(rows), micro)]


def enough_for_pipeline(parallel: Parallel, count: int) -> int:
    """Return `count`, or the next larger number that the pipeline's schedule accepts."""
    return next(
        n for n in itertools.count(count) if not pipeline_needs(parallel.schedule, parallel.pp, n)
    )


def response_example(response: Response, advantage: float, config: Config) -> Example:
    """Return the model's input, and for each response token the inputs of PolicyGradient.

    All values are [tokens - 1]; positions whose label is a token of the prompt have zeros.
    """
    # how many these are
    before = len(response.prompt) - 1
    size = len(response.response)
    drawn = response.drawn()
    filtered = config.grpo.overlong_filter and response.truncated

    def column(values):
        values = np.broadcast_to(np.asarray(values, np.float32), size)
        return np.concatenate([np.zeros(before, np.float32), values])

    routes = {"routes": response.experts(config)} if config.grpo.replay_routing else {}
    weight = 1 / max(1, drawn.sum()) if config.grpo.aggregation == "sequence" else 1.0
    return (
        reply_example(response.prompt, response.response, drawn & (not filtered))
        | routes
        | {
            "advantages": column(advantage * drawn),
            "sampled": column(response.log_probs),
            "weights": column(weight * drawn),
            "starts": column((np.arange(size) == 0) & (not filtered)),
        }
    )


def reply_example(
    prompt: list[int], reply: list[int], learned: bool | np.ndarray = True
) -> Example:
    """Return a prompt with a reply, of which the `learned` tokens, bool [reply], are labels."""
    tokens = np.array(prompt + reply, np.int64)
    # [tokens - 1]: the next tokens, but for those of the prompt
    labels = np.full(len(tokens) - 1, IGNORE)
    labels[len(prompt) - 1 :] = np.where(learned, reply, IGNORE)
    return {"tokens": tokens[:-1], "labels": labels}


class Problem(NamedTuple):
    """One problem.

    prompt: tokens before the response. reply: tokens of a right response, with its end.
    answer: what responses are compared with. row: the line of data it was read from.
    """

    prompt: list[int]
    reply: list[int]
    answer: str
    row: dict


class ProblemSet(Protocol):
    """An endless sequence of problems (data/chat/problems.py)."""

    problems: list[Problem]

    def take(self, first: int, count: int) -> list[Problem]:
        """Return the problems number first, first + 1, ... of the sequence."""
