"""Turn responses into examples of a model, and pack these into micro-batches.

Every rank has all responses of a step, packs them into the same rows, and takes its share of these.
"""

import itertools
from typing import Any

import numpy as np

from minitrain.grpo.responses import Response
from minitrain.parallel.pipeline_split import pipeline_needs
from minitrain.settings import Config, Parallel
from minitrain.training.loss import IGNORE
from minitrain.training.packing import PADDING, Batch, first_fit_decreasing, pack_row, stack

# the model's inputs for one sequence, by name: [tokens - 1] each, since the last token is only a label
Example = dict[str, np.ndarray]


def pack_micro_batches(
    samples: list[Example], config: Config, rank: int, ranks: int
) -> list[Batch]:
    """Pack examples into the micro-batches of data-parallel rank `rank` of `ranks`.

    Returns tensors [micro, seq, ...] by name. All ranks get equally many, padded with empty rows.
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
    """Return the number of micro-batches, at least `count`, that the pipeline's schedule accepts."""
    return next(
        n for n in itertools.count(count) if not pipeline_needs(parallel.schedule, parallel.pp, n)
    )


def response_example(response: Response, advantage: float, config: Config) -> Example:
    """Make an example of a response, with the inputs of PolicyGradient for each of its tokens.

    Returns `tokens` and `labels`, int64 [tokens - 1], and `advantages`, `sampled` (log-probabilities),
    `weights` and `starts`, fp32 [tokens - 1], which are 0 where the label is a token of the prompt;
    with grpo.replay_routing also `routes`, int16 [tokens - 1, layers x top_k].
    """
    # positions whose label is a token of the prompt
    before = len(response.prompt) - 1
    size = len(response.response)
    drawn = response.drawn()
    filtered = config.grpo.overlong_filter and response.truncated

    def column(values: Any) -> np.ndarray:
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
    """Make an example of a prompt with a reply, of which the `learned` tokens are labels.

    learned: of all tokens of the reply, or bool [reply]. Returns int64 [tokens - 1] each.
    """
    tokens = np.array(prompt + reply, np.int64)
    # [tokens - 1]: the next tokens, but for those of the prompt
    labels = np.full(len(tokens) - 1, IGNORE)
    labels[len(prompt) - 1 :] = np.where(learned, reply, IGNORE)
    return {"tokens": tokens[:-1], "labels": labels}
