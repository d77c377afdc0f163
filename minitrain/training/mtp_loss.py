"""The loss of multi-token prediction (models/mtp.py), beside an objective's own.

Depth k predicts at token i what the head predicts at token i + k, if that is in the same document.
A label that is masked there is masked here. The loss is that of DeepSeek-V3's report, (24) and
(25): each depth's sum of -log p is divided by the number of the head's labels, and

    weight / depths x the sum over depths

is added in the gradient. The loss that is reported stays the head's alone. (Megatron-LM divides a
depth's sum by the depth's own number of labels, fewer by about k in each document.)
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minitrain.settings import Config
from minitrain.tasks import TASKS
from minitrain.training.loss import IGNORE, linear_argmax, linear_cross_entropy
from minitrain.training.packing import Batch


def trains_mtp(config: Config) -> bool:
    """Return whether the config's model has multi-token prediction that this run trains."""
    depths = getattr(config.model.config, "num_nextn_predict_layers", 0)
    return depths > 0 and config.mtp_weight > 0 and knows_mtp(config)


def knows_mtp(config: Config) -> bool:
    """Return whether the run's objective can have multi-token prediction beside it."""
    # a teacher's distribution is of the next token alone; with task=grpo it gives advantages
    return TASKS[config.task].mtp and (config.task == "grpo" or not config.teachers)


def make_mtp_loss(config: Config) -> "MTPLoss | None":
    depths = config.model.config.num_nextn_predict_layers
    return MTPLoss(depths, config.mtp_weight) if trains_mtp(config) else None


def with_next_tokens(batch: Batch, depths: int) -> Batch:
    """Add next_tokens and next_labels, int [rows, seq, depths]: tokens and labels 1, 2, ... later.

    batch: whole rows, [rows, seq] each, before context parallelism splits them. Tokens beyond a
    row are 0, and labels beyond a document IGNORE.
    """

    def later(x: Tensor, k: int, fill: int) -> Tensor:
        """Shift x [rows, seq] left by k."""
        return F.pad(x, (0, k), value=fill)[:, k:]

    tokens = []
    labels = []
    for k in range(1, depths + 1):
        tokens.append(later(batch["tokens"], k, 0))
        label = later(batch["labels"], k, IGNORE)
        if "document_ids" in batch:
            ids = batch["document_ids"]
            label = label.where(later(ids, k, -1) == ids, IGNORE)
        labels.append(label)
    return batch | {
        "next_tokens": torch.stack(tokens, -1),
        "next_labels": torch.stack(labels, -1),
    }


class MTPLoss:
    """The loss above, of `depths` depths, and the numbers of it since they were asked for last.

    weight: the setting mtp_weight.
    """

    def __init__(self, depths: int, weight: float):
        self.depths = depths
        self.weight = weight
        # of batches with gradients, and without: loss, labels and right tokens, [depths, 3]
        self.sums = {True: torch.zeros(depths, 3), False: torch.zeros(depths, 3)}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return what a model takes besides to add this loss. batch: from `with_next_tokens`."""
        mtp = partial(self, batch["next_labels"])
        return {"next_tokens": batch["next_tokens"], "mtp": mtp}

    def __call__(self, labels: Tensor, depth: int, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return 0, a scalar, with the gradient of a depth's weighted loss.

        labels: next_labels [batch, seq, depths]; hidden: [batch, seq, hidden]; weight: the head's.
        """
        labels = labels[..., depth]
        valid = labels != IGNORE
        loss = linear_cross_entropy(hidden, weight, labels)
        right = torch.zeros_like(loss)
        training = torch.is_grad_enabled()
        if not training:
            right += ((linear_argmax(hidden, weight) == labels) & valid).sum()
        self.sums[training] = sums = self.sums[training].to(loss.device)
        sums[depth] += torch.stack([loss.detach(), valid.sum(), right])
        weighted = loss * (self.weight / self.depths)
        return weighted - weighted.detach()

    def take_sums(self, training: bool) -> Tensor:
        """Return the sums of batches with gradients, or without, fp64 [3 depths]; begin anew."""
        sums = self.sums[training]
        self.sums[training] = torch.zeros_like(sums)
        return sums.double().flatten()

    def metrics(self, sums: list[float], training: bool) -> dict[str, float]:
        """Return the depths' mean loss and, if not training, the share of tokens that they get right.

        Both are means over depths. A draft is accepted if it is the token that the model draws:
        held-out text stands for that, as in Megatron-LM.
        sums: of `take_sums`, added up over ranks with other tokens.
        """
        losses, counts, right = torch.tensor(sums, dtype=torch.float64).view(self.depths, 3).T
        counts = counts.clamp(min=1)
        means = {"mtp_loss": losses / counts}
        if not training:
            means = {"val_mtp_loss": losses / counts, "val_mtp_acceptance": right / counts}
        return {name: mean.mean().item() for name, mean in means.items()}
