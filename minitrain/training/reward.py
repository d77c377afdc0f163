"""Reward models: learn from pairs of replies to score one, by Bradley and Terry (1952).

    loss of a pair      -log sigmoid(score of the chosen reply - score of the rejected one)

A score is the output of a Linear at a chat's last token, as that of transformers'
ForSequenceClassification with one label. The loss is DPO's with scores in place of ratios, without
a reference, and with beta = 1; rows and numbers of the log are DPO's too, but a reply's only label
stands at its last token (data/chat/preferences.py). Left out: cp, as in dpo.py.
"""

import torch.nn.functional as F
from torch import Tensor

from minitrain.settings import DPO, Config
from minitrain.training.dpo import Preferences
from minitrain.training.loss import IGNORE, vocab_shard


class Scores(Preferences):
    """The loss above, summed over pairs: see `Preferences`. A batch's `reference` is 0."""

    def prepare(self, *_) -> None:
        """Change nothing: there is no reference."""

    def values(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the scores at the labels, [micro, seq], and 0 elsewhere."""
        return linear_scores(hidden, weight)[..., 0].where(labels != IGNORE, 0)


def linear_scores(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return hidden @ weight^T, fp32 [..., labels].

    hidden: [..., dim]. weight: [labels, dim], or a DTensor split along dim, whose ranks all have the
    same hidden. The gradient of `hidden` is then this rank's term of a sum over ranks.
    """
    # [labels, dim / tp]: of a shard's number, `first` is a multiple
    local, shard = vocab_shard(weight)
    own = hidden.unflatten(-1, (-1, local.shape[1]))[..., shard.first // len(local), :]
    part = F.linear(own.float(), local.float())
    # the sum's gradient is that of each of its terms
    return part + shard.gather(part.detach()).sum(0) - part.detach()


def scores(config: Config) -> Scores:
    """Return the objective of task=reward."""
    return Scores(DPO(beta=1.0))
