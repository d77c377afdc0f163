"""What is minimized. An objective is an object with three methods, and the loop knows nothing else
of the task:

    count(batch)         how many terms of `batch` the loss sums over, an int; the loop divides by the step's count. A
                         row whose labels are all IGNORE has none: with such, validation fills its
                         last batch
    loss(model, batch)   the sum of the terms, a scalar that can be differentiated
    metrics(sum_over)    what else the log should say of the micro-batches with gradients since the last call, a dict of
                         floats; sum_over(tensor) adds up what ranks with other rows have: all ranks
                         must call it

That is right wherever ranks have other rows, or share the weights (dp_replicate, dp_shard, tp, ep).
Two layouts ask for more, and are refused to an objective that does not name them in `layouts`:

    cp   ranks have other tokens of the same rows, and their losses are added up. So each term must depend on the hidden
         state of one token. A term of a whole sequence, such as DPO's log-sigmoid of summed
         log-probabilities, does not
    pp   every stage calls `loss` with itself as the model, and only the last one gives a scalar. So `loss` must return
         what the model does, unchanged, and leave what follows the hidden states to the model's
         `head`
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.settings import Config, Parallel
from minitrain.training.flow import FlowMatching
from minitrain.training.loss import IGNORE, linear_cross_entropy


def make_objective(config: Config) -> "LanguageModeling | FlowMatching":
    """The objective of the config's task, where rows come from a dataset (grpo/learner.py has its
    own).
    """
    if config.task != "diffusion":
        return LanguageModeling()
    model = config.model.config
    return FlowMatching(config.diffusion, model.out_channels * math.prod(model.patch_size))


def check_objective(objective, parallel: Parallel) -> None:
    """Raise InputError for an objective that does not say that it is right in this layout."""
    for name in ("cp", "pp"):
        size = getattr(parallel, name)
        if size > 1 and name not in getattr(objective, "layouts", ()):
            raise InputError(
                f"parallel.{name}={size}: {type(objective).__name__} does not name {name} in its `layouts`, for which "
                f"its loss must be a sum over tokens (see training/objectives.py; use {name}=1)"
            )


class LanguageModeling:
    """Predict the next token: -log p(label | tokens before it), summed over the labels that are not
    IGNORE.
    """

    layouts = ("cp", "pp")

    def count(self, batch: dict[str, Tensor]) -> int:
        return int((batch["labels"] != IGNORE).sum())

    def loss(self, model: Module, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        return model(batch.pop("tokens"), **batch, head=linear_cross_entropy)

    def metrics(self, sum_over: Callable[[Tensor], Tensor]) -> dict[str, float]:
        return {}
