"""From sampled responses to micro-batches.

Every rank knows all responses of a step and packs them into the same rows, of which it then takes
its share.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from minitrain.parallel.pipeline import pipeline_needs
from minitrain.settings import Config, Parallel
from minitrain.training.loss import IGNORE
from minitrain.training.packing import PADDING, first_fit_decreasing, pack_row, stack

# of a sequence: values are [n], n = tokens - 1
Example = dict[str, np.ndarray]


@dataclass
class Response:
    """One response to a prompt. group: which of the step's prompts.

    log_probs: of each response token when it was sampled. truncated: it did not come to its end.
    score: what the reward function said. reward: that, less the penalty for length.
    no_signal: of all groups that were sampled for its step, replaced ones too, the share whose
    scores are all alike.
    problems: how many had been sampled when its step was complete, by all steps together.
    settings: a digest of those that it was sampled and rewarded with.
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


def micro_batches(
    samples: list[Example], config: Config, rank: int, ranks: int
) -> list[dict[str, Tensor]]:
    """The samples packed into rows: the micro-batches of data-parallel rank `rank` of `ranks`,
    values [micro, seq].

    All ranks get equally many, filled up with empty rows where the packed ones do not suffice.
    """
    micro = config.batch.micro
    length = config.batch.seq_len
    bins = first_fit_decreasing([len(sample["tokens"]) for sample in samples], length)
    count = enough_for_pipeline(config.parallel, -(-len(bins) // (micro * ranks)))
    bins += [[]] * (count * micro * ranks - len(bins))
    padding = dict.fromkeys(samples[0], 0.0) | PADDING
    nothing = {key: np.empty(0, column.dtype) for key, column in samples[0].items()}
    rows = [
        pack_row([samples[i] for i in each] or [nothing], length, padding)
        for each in bins[rank::ranks]
    ]
    return [stack(rows[n : n + micro]) for n in range(0, len(rows), micro)]


def enough_for_pipeline(parallel: Parallel, count: int) -> int:
    """So many micro-batches or a few more, as the pipeline's schedule needs."""
    return next(n for n in itertools.count(count) if not pipeline_needs(parallel, n))


def response_sample(rollout: Response, advantage: float, config: Config) -> Example:
    """What the model reads, and at the place of each response token what PolicyGradient wants to
    know of it.
    """
    before = len(rollout.prompt) - 1
    size = len(rollout.response)
    filtered = config.grpo.overlong_filter and rollout.truncated

    def column(values):
        values = np.broadcast_to(np.asarray(values, np.float32), size)
        return np.concatenate([np.zeros(before, np.float32), values])

    return reply_sample(rollout.prompt, rollout.response, not filtered) | {
        "advantages": column(advantage),
        "sampled": column(rollout.log_probs),
        "weights": column(1 / size if config.grpo.aggregation == "sequence" else 1.0),
        "starts": column((np.arange(size) == 0) & (not filtered)),
    }


def reply_sample(prompt: list[int], reply: list[int], learned: bool = True) -> Example:
    """A prompt with a reply of which every token is to be predicted, or none."""
    tokens = np.array(prompt + reply, np.int64)
    labels = np.where(
        (np.arange(len(tokens) - 1) < len(prompt) - 1) | (not learned), IGNORE, tokens[1:]
    )
    return {"tokens": tokens[:-1], "labels": labels}


class Problem(NamedTuple):
    """prompt: its tokens, all that stands before the response; reply: a right response's tokens,
    with their end.

    answer: what the response is compared with; row: the line that it was read from.
    """

    prompt: list[int]
    reply: list[int]
    answer: str
    row: dict
