"""Direct preference optimization (Rafailov et al. 2023): learn from pairs of replies, one preferred.

A pair's margin tells how far training has moved its two replies apart. Log-probabilities are sums
over a reply's tokens:

    ratio    log p(reply) now - log p(reply) of the reference
    margin   ratio of the chosen reply - ratio of the rejected one

    loss      of a pair                         from
    sigmoid   -log sigmoid(beta * margin)       Rafailov et al. 2023
    ipo       (margin - 1 / (2 beta))^2         Azar et al. 2023

With length_normalized, each ratio is divided by its number of tokens. TRL's ipo always is.

The reference is the weights that training starts from. They give each reply one number, which never
changes: it is computed once, before the first step, and kept with the data. So there is no second
model in memory. A run that resumes computes the numbers anew.

This file is the pattern for your own objective: `count` and `loss`, `sums` and `metrics` for the
log, `prepare` for the reference, and `layouts` (see objectives.py). Its rows are made in
data/chat/preferences.py. Left out: cp, where no rank sees whole replies.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from minitrain.settings import DPO, Config
from minitrain.training.log_probs import label_log_probs, linear_log_probs, run_with_head
from minitrain.training.loss import IGNORE
from minitrain.training.packing import Batch, Dataset

if TYPE_CHECKING:
    from minitrain.training.loop import Trainer


class Preferences:
    """The loss above, summed over the pairs of rows in which documents 2 i and 2 i + 1 are a pair.

    A batch has tokens, labels, positions and document_ids [micro, seq], and reference [micro, replies]:
    the log-probabilities of a row's replies, by document id.
    """

    layouts = ("pp",)

    def __init__(self, settings: DPO):
        self.settings = settings
        # over the batches with gradients, which are trained on, and over those without
        self.totals = {True: torch.zeros(4), False: torch.zeros(4)}

    def prepare(self, trainer: "Trainer", dataset: Dataset, batches: int) -> None:
        """Set the rows' reference, before training changes the model: see `add_reference`."""
        add_reference(trainer, dataset, batches)

    def count(self, batch: Batch) -> int:
        """Return the number of pairs; both replies of each have labels."""
        # [micro, seq]
        predicted = batch["labels"] != IGNORE
        # [micro]: the last reply's number in each row, -1 in an empty one
        last = batch["document_ids"].where(predicted, -1).amax(1)
        return int((last + 1).sum()) // 2

    def loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the sum of the pairs' losses, a scalar. Values of the batch: [micro, seq]."""
        return run_with_head(model, batch, partial(self.head, batch))

    def head(self, batch: Batch, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of losses from hidden [micro, seq, hidden] and the head's weight."""
        # all [micro, replies]
        ratios = reply_sums(self.values(hidden, weight, labels), batch) - batch["reference"]
        tokens = reply_sums((labels != IGNORE).float(), batch)
        if self.settings.length_normalized:
            ratios = ratios / tokens.clamp(min=1)
        # [micro, pairs]; rows have different numbers of them
        chosen = ratios[:, ::2]
        rejected = ratios[:, 1::2]
        valid = tokens[:, ::2] > 0
        losses = pair_losses(self.settings, chosen - rejected)
        terms = torch.stack([valid, chosen > rejected, chosen, rejected])
        sums = (terms.detach() * valid).sum((1, 2))
        training = torch.is_grad_enabled()
        self.totals[training] = self.totals[training].to(sums.device) + sums
        return (losses * valid).sum()

    def values(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the numbers whose sums over replies are compared, [micro, seq]: log-probabilities."""
        return linear_log_probs(hidden, weight, labels)[0]

    def sums(self, training: bool = True) -> Tensor:
        """Return the numbers of pairs and of right ones, and the sums of their ratios, [4]."""
        sums = self.totals[training]
        self.totals[training] = torch.zeros(4)
        return sums

    def held_out(self, sum_over: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the same numbers of the batches without gradients since the last call."""
        found = self.metrics(sum_over(self.sums(training=False)).tolist())
        return {f"val_{name}": value for name, value in found.items()}

    def metrics(self, sums: list[float]) -> dict[str, float]:
        """Return the share of pairs whose margin is above 0, and the mean rewards beta * ratio."""
        pairs, *sums = sums
        right, chosen, rejected = (each / max(pairs, 1) for each in sums)
        beta = self.settings.beta
        return {
            "reward_accuracy": right,
            "reward_chosen": beta * chosen,
            "reward_rejected": beta * rejected,
            "reward_margin": beta * (chosen - rejected),
        }


def pair_losses(settings: DPO, margin: Tensor) -> Tensor:
    """Return each pair's loss, [micro, pairs], from its margin, [micro, pairs]."""
    if settings.loss == "ipo":
        return (margin - 1 / (2 * settings.beta)).square()
    return -F.logsigmoid(settings.beta * margin)


def reply_sums(x: Tensor, batch: Batch) -> Tensor:
    """Return the sums [micro, replies] of x [micro, seq], which is 0 where nothing is predicted."""
    # padding has document id -1
    ids = batch["document_ids"].clamp(min=0)
    sums = x.new_zeros(batch["reference"].shape)
    return sums.scatter_add(1, ids, x)


def add_reference(trainer: "Trainer", dataset: Dataset, batches: int) -> None:
    """Set `dataset.reference`, [rows, replies], from the model as it is. All ranks call it together.

    batches: how many of the dataset's global batches are used; rows beyond them become NaN. A row
    has its index as `row`.
    """
    epoch = math.ceil(len(dataset) / trainer.config.batch.global_)
    sums = torch.zeros_like(dataset.reference)
    visits = torch.zeros(len(sums), 1)
    for step in range(min(epoch, batches)):
        micro_batches = trainer.micro_batches(dataset, step)
        # in a pipeline, empty on all ranks but the last stage's
        outputs = trainer.outputs(label_log_probs, micro_batches)
        for batch, log_probs in zip(micro_batches, outputs, strict=False):
            row = batch["row"]
            sums[row] += reply_sums(log_probs.cpu(), batch)
            visits[row] += 1
    # the last step reads some rows of the next epoch
    dataset.reference = (trainer.total(sums) / trainer.total(visits)).cpu()


def preferences(config: Config) -> Preferences:
    """Return the objective of task=dpo."""
    return Preferences(config.dpo)
