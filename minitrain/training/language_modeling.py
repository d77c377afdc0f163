"""Next-token prediction, the objective of pretraining and supervised fine-tuning."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.training.loss import IGNORE, linear_cross_entropy
from minitrain.training.mtp_loss import MTPLoss, with_next_tokens
from minitrain.training.packing import Batch


class LanguageModeling:
    """The sum of -log p(label | tokens before it) over the labels that are not IGNORE.

    A batch has tokens and labels [batch, seq], and further inputs of the model by name. With data
    that is mixed it also has `sources` [batch, seq], the place of each token's source in `names`.
    mtp: the loss of multi-token prediction, if that is trained.
    """

    layouts = ("cp", "pp")

    def __init__(self, names: Sequence[str] = (), mtp: MTPLoss | None = None):
        self.names = names
        self.mtp = mtp
        # [2, sources]: the sum of losses, and the number of labels
        self.sums_by_source = torch.zeros(2, len(names), dtype=torch.float64)

    def extend(self, batch: Batch) -> Batch:
        return with_next_tokens(batch, self.mtp.depths) if self.mtp else batch

    def count(self, batch: Batch) -> int:
        # labels: [batch, seq]
        return int((batch["labels"] != IGNORE).sum())

    def loss(self, model: Module, batch: Batch) -> Tensor:
        # a scalar, from the model's output [batch, seq, hidden], its head's weight and the labels
        batch = dict(batch)
        sources = batch.pop("sources", None)
        head = linear_cross_entropy
        if sources is not None and torch.is_grad_enabled():
            head = partial(self.head, sources)
        if self.mtp:
            batch |= self.mtp.inputs(batch)
            del batch["next_labels"]
        return model(batch.pop("tokens"), **batch, head=head)

    def head(self, sources: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar, and add each token's part of it to the sum of its source.

        sources, labels: [batch, seq]; hidden: [batch, seq, hidden]; weight: [vocab, hidden].
        """
        labels = labels.flatten()
        # `linear_cross_entropy` fills it
        losses = torch.zeros(labels.shape, device=labels.device)
        loss = linear_cross_entropy(hidden, weight, labels, losses)
        self.add(sources, losses, labels != IGNORE)
        return loss

    def add(self, sources: Tensor, losses: Tensor, valid: Tensor) -> None:
        """Add losses [tokens] to the sums of their sources [batch, seq]. valid: bool [tokens]."""
        # [2, tokens]
        numbers = torch.stack([losses, valid]).double()
        sums = self.sums_by_source.to(losses.device)
        self.sums_by_source = sums.index_add(1, sources.flatten(), numbers)

    def sums(self) -> Tensor | None:
        """Return the sums by source [2, sources] and those of multi-token prediction, in one row."""
        parts = []
        if self.names:
            parts.append(self.sums_by_source.flatten())
            self.sums_by_source = torch.zeros_like(self.sums_by_source)
        if self.mtp:
            parts.append(self.mtp.take_sums(training=True))
        return torch.cat(parts) if parts else None

    def metrics(self, sums: list[float]) -> dict[str, float]:
        """Return the mean loss of each source that had a label, as loss/NAME, and mtp_loss."""
        count = len(self.names)
        mtp = self.mtp.metrics(sums[2 * count :], training=True) if self.mtp else {}
        sources = zip(self.names, sums[:count], sums[count : 2 * count], strict=True)
        return mtp | {f"loss/{name}": loss / number for name, loss, number in sources if number}

    def held_out(self, sum_over: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return numbers of the batches without gradients since the last call."""
        if not self.mtp:
            return {}
        sums = sum_over(self.mtp.take_sums(training=False)).tolist()
        return self.mtp.metrics(sums, training=False)
