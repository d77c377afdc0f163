"""What is minimised. An objective is an object with two methods, and the loop knows nothing else of the task:

    count(batch)         how many terms of `batch` the loss sums over, an int; the loop divides by the step's count
    loss(model, batch)   the sum of the terms, a scalar that can be differentiated

In a pipeline every stage calls `loss` with itself as the model, and only the last one gives a scalar: so `loss` returns
what the model does, unchanged, and leaves what follows the hidden states to the model's `head`.
"""

from torch import Tensor
from torch.nn import Module

from minitrain.training.loss import IGNORE, linear_cross_entropy


class LanguageModeling:
    """Predict the next token: -log p(label | tokens before it), summed over the labels that are not IGNORE."""

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORE).sum())

    def loss(self, model: Module, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        return model(batch.pop("tokens"), **batch, head=linear_cross_entropy)
