"""From sampled responses to micro-batches: packed rows, each the same on whichever rank it is trained."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from minitrain.config import Config, Parallel
from minitrain.training.data import stack
from minitrain.training.loss import IGNORE
from minitrain.training.packing import first_fit_decreasing, pack_row

PADDING = {"tokens": 0, "labels": IGNORE, "advantages": 0.0, "sampled": 0.0, "weights": 0.0, "starts": 0.0}


FILLER = {  # the sample of a row without any
    key: np.full(1, value, np.float32 if isinstance(value, float) else np.int64) for key, value in PADDING.items()
}


@dataclass
class Rollout:
    """One response to a prompt. group: which of the step's prompts.

    log_probs: of each response token when it was sampled. truncated: it did not come to its end.
    reward: what the reward function said, and the penalty for length.
    """

    group: int
    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    truncated: bool
    reward: float
    text: str
    answer: str


def micro_batches(
    rollouts: list[Rollout], advantages: list[float], config: Config, rank: int, ranks: int
) -> list[dict[str, Tensor]]:
    """The micro-batches of data-parallel rank `rank` of `ranks` for one optimizer step; fields as in PolicyGradient.

    All ranks get equally many, filled up with empty rows where the packed ones do not suffice. Every rank knows all
    rollouts, so all of them agree on the rows.
    """
    micro, length = config.batch.micro, config.batch.seq_len
    samples = [make_sample(r, a, config) for r, a in zip(rollouts, advantages, strict=True)]
    bins = first_fit_decreasing([len(sample["tokens"]) for sample in samples], length)
    count = enough_for_pipeline(-(-len(bins) // (micro * ranks)), config.parallel)
    bins += [[]] * (count * micro * ranks - len(bins))
    rows = [pack_row([samples[i] for i in each] or [FILLER], length, PADDING) for each in bins[rank::ranks]]
    return [stack(rows[n : n + micro]) for n in range(0, len(rows), micro)]


def enough_for_pipeline(count: int, parallel: Parallel) -> int:
    """So many micro-batches or a few more, as the pipeline's schedule needs (see config_checks)."""
    if parallel.pp == 1:
        return count
    unit = parallel.pp if parallel.schedule.startswith("Interleaved") else 1
    least = parallel.pp * (2 if parallel.schedule == "DualPipeV" else 1)
    return max(least, -(-count // unit) * unit)


def make_sample(rollout: Rollout, advantage: float, config: Config) -> dict[str, np.ndarray]:
    """A rollout as arrays [n], n = tokens - 1: what the model reads, and at each response token's place its numbers."""
    before, size = len(rollout.prompt) - 1, len(rollout.response)
    tokens = np.array(rollout.prompt + rollout.response, np.int64)
    filtered = config.grpo.overlong_filter and rollout.truncated

    def column(values, padding=0.0):
        return np.concatenate([np.full(before, padding, np.float32), np.broadcast_to(values, size).astype(np.float32)])

    return {
        "tokens": tokens[:-1],
        "labels": np.where((np.arange(before + size) < before) | filtered, IGNORE, tokens[1:]),
        "advantages": column(advantage),
        "sampled": column(rollout.log_probs),
        "weights": column(1 / size if config.grpo.aggregation == "sequence" else 1.0),
        "starts": column(np.arange(size) == 0) * (not filtered),
    }
