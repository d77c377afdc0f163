"""Next-token prediction, the objective of pretraining and supervised fine-tuning."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.training.loss import IGNORE, linear_cross_entropy
from minitrain.training.packing import Batch


class LanguageModeling:
    """The sum of -log p(label | tokens before it) over the labels that are not IGNORE.

    A batch has tokens and labels [batch, seq], and further inputs of the model by name. With data
    that is mixed it also has `sources` [batch, seq], the place of each token's source in `names`.
    """

    layouts = ("cp", "pp")

    def __init__(self, names: Sequence[str] = ()):
        self.names = names
        # [2, sources]: the sum of losses, and the number of labels
        self.sums_by_source = torch.zeros(2, len(names), dtype=torch.float64)

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
        return model(batch.pop("tokens"), **batch, head=head)

    def head(self, sources: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss, a scalar, and add each token's part of it to the sum of its source.

        sources, labels: [batch, seq]; hidden: [batch, seq, hidden]; weight: [vocab, hidden].
        """
        labels = labels.flatten()
        # `linear_cross_entropy` fills it
        losses = torch.zeros(labels.shape, device=labels.device)
        loss = linear_cross_entropy(hidden, weight, labels, losses)
        # [2, tokens]
        numbers = torch.stack([losses, labels != IGNORE]).double()
        sums = self.sums_by_source.to(labels.device)
        self.sums_by_source = sums.index_add(1, sources.flatten(), numbers)
        return loss

    def sums(self) -> Tensor | None:
        """Return the losses' sums and the numbers of labels by source, [2, sources]."""
        if not self.names:
            return None
        sums = self.sums_by_source
        self.sums_by_source = torch.zeros_like(sums)
        return sums

    def metrics(self, sums: list[list[float]]) -> dict[str, float]:
        """Return the mean loss of each source that had a label, as loss/NAME."""
        sources = zip(self.names, *sums, strict=True)
        return {f"loss/{name}": loss / count for name, loss, count in sources if count}
