"""Objectives: the interface between the training loop and a task.

The first two methods of `Objective` suffice if ranks have different rows or share weights
(dp_replicate, dp_shard, tp, ep). Two layouts need more, and are refused unless the objective names
them in `layouts`:

    cp   ranks have different tokens of the same rows, and their losses are summed. So each term may
         depend on the hidden state of one token only. DPO's log-sigmoid of a sequence's
         log-probabilities does not fit
    pp   every stage calls `loss` with itself as the model, and only the last returns a scalar. So
         `loss` must return the model's result unchanged, and compute the rest in the model's `head`

Where ranks with other tokens of the same rows each have all of the rows' numbers, as with videos,
`summed_over = "batch"` says that metrics are summed over ranks with other rows alone.

An objective that needs more than rows and the trained model, such as a second model, has a method
prepare(trainer, dataset, batches). It is called before the first step: for the dataset that is
trained on, of which `batches` global batches are used, and for a held-out one. All ranks call it
together. A second model is `build_model(config, trainer.meshes, trainer.fill, trained=False)`;
dpo.py needs only its outputs.

One whose loss needs what follows a token has a method extend(batch): it returns the batch with
further values [rows, seq, ...], before context parallelism splits the rows. held_out(sum_over)
returns numbers of a validation, as `metrics` does of training.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.settings import Config, Parallel
from minitrain.tasks import TASKS
from minitrain.training.distillation import Distillation
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.mtp_loss import make_mtp_loss
from minitrain.training.packing import Batch
from minitrain.user_code import load_from


class Objective(Protocol):
    """A loss to learn by; the docstring of this file has methods that it may have beside these."""

    def count(self, batch: Batch) -> int:
        """Return the number of loss terms; the loop divides by that of the step.

        A row whose labels are all IGNORE has none: validation fills its last batch with such rows.
        """

    def loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the sum of the terms, a differentiable scalar []."""

    def sums(self) -> Tensor | None:
        """Return sums [...] over the micro-batches with gradients since the last call, for the log.

        They may be on the device: the loop adds them up over ranks with other tokens, and does not
        wait for them. None: there is nothing to tell.
        """

    def metrics(self, sums: list) -> dict[str, float]:
        """Return numbers for the log from the values of `sums`, nested as its dimensions."""


def make_objective(config: Config) -> Objective:
    """Return the objective of the config's task (grpo/ has its own)."""
    return load_from(TASKS[config.task].objective)(config)


def next_token(config: Config) -> Objective:
    """Return the objective of tokens that follow: of the data, or as a teacher would choose them."""
    labels = [source.label for source in config.data.sources]
    if config.teachers:
        return Distillation(config.distill, config.teachers, labels)
    return LanguageModeling(labels, make_mtp_loss(config))


def check_objective(objective: Objective, parallel: Parallel) -> None:
    """Raise InputError if the objective does not declare that it supports this layout.

    Also if it has numbers for the log, but no sums of which they are made.
    """
    if hasattr(objective, "metrics") != hasattr(objective, "sums"):
        raise InputError(
            f"{type(objective).__name__} has one of the methods sums() and metrics(sums), and needs the other "
            f"(see training/objectives.py; without both, loss and norm are logged)"
        )
    for name in ("cp", "pp"):
        size = getattr(parallel, name)
        if size > 1 and name not in getattr(objective, "layouts", ()):
            raise InputError(
                f"parallel.{name}={size}: {type(objective).__name__} does not name {name} in its `layouts`, for which "
                f"its loss must be a sum over tokens (see training/objectives.py; use {name}=1)"
            )
