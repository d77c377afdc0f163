"""The training loop, one for all objectives, layouts and kinds of data.

A step takes this rank's rows, runs forward and backward on each micro-batch, clips and updates. The
loss is the sum over valid tokens divided by their number in the whole step, over all ranks and
micro-batches. So the gradients do not depend on how the rows are split.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module

from minitrain.hashing import seed_of
from minitrain.models.router import Router, update_selection_bias
from minitrain.parallel.collectives import sum_over_
from minitrain.parallel.context import local_tokens
from minitrain.parallel.fsdp import reshard, set_gradient_sync
from minitrain.parallel.mesh import Meshes
from minitrain.parallel.pipeline import Pipeline
from minitrain.settings import Config
from minitrain.training.build import build_model
from minitrain.training.ema import update_averages
from minitrain.training.loss import IGNORE
from minitrain.training.objectives import Objective, check_objective, make_objective
from minitrain.training.optim import clip_gradients, learning_rate, make_optimizer, update_weights
from minitrain.training.packing import Batch, Dataset, rows
from minitrain.training.stopwatch import Moment


class Trainer:
    """This rank's model, optimizer and objective.

    objective: by default that of the config's task.
    fill: see `build_model`. build(config, meshes, fill): called in its place, as the simulator does.
    """

    def __init__(
        self,
        config: Config,
        meshes: Meshes,
        objective: Objective | None = None,
        fill: Callable[[Config, Module], None] | None = None,
        build: Callable[..., Module] = build_model,
    ):
        self.config = config
        self.meshes = meshes
        self.fill = fill
        self.objective = objective or make_objective(config)
        check_objective(self.objective, config.parallel)
        self.device = meshes.device
        self.model = build(config, meshes, fill)
        self.optimizer = make_optimizer(self.model, config.optim)

    @property
    def runs_ahead(self) -> bool:
        """Tell whether the host goes on while the device computes."""
        return self.device.type == "cuda"

    def prepare(self, dataset: Dataset, batches: int) -> None:
        """Let the objective prepare for the first `batches` global batches of a dataset."""
        if hasattr(self.objective, "prepare"):
            self.objective.prepare(self, dataset, batches)

    def micro_batches(self, dataset: Dataset, step: int, read: Callable = rows) -> list[Batch]:
        """Read this rank's rows of step 0, 1, ...; all ranks together read consecutive rows.

        read(dataset, numbers): returns a batch of rows.
        Values are [batch.micro, seq, ...], with context parallelism seq / cp.
        """
        batch = self.config.batch
        ranks = self.meshes.batch
        share = batch.global_ // ranks.size()
        first = step * batch.global_ + ranks.get_local_rank() * share
        micro_batches = []
        for n in range(first, first + share, batch.micro):
            own = read(dataset, range(n, n + batch.micro))
            if hasattr(self.objective, "extend"):
                own = self.objective.extend(own)
            if self.meshes.cp.size() > 1:
                own = local_tokens(own, self.meshes.cp, self.config.parallel.context)
            micro_batches.append(own)
        return micro_batches

    def step(self, dataset: Dataset, step: int) -> dict[str, Tensor]:
        """Run one optimizer step on the rows of `step`. Return loss and grad_norm, scalars []."""
        return self.update(self.micro_batches(dataset, step), step)

    def update(self, micro_batches: list[Batch], step: int) -> dict[str, Tensor]:
        """Run one optimizer step on this rank's micro-batches, at the learning rate of `step`.

        Values of micro-batches are [batch.micro, seq / cp, ...]. Returns what `apply_update` does.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config.steps, self.config.optim)
        return apply_update(
            self.model,
            self.optimizer,
            self.objective,
            micro_batches,
            self.meshes,
            self.config,
            step,
        )

    @torch.no_grad()
    def outputs(
        self,
        compute: Callable[[Module, Batch], Tensor],
        batches: list[Batch],
        model: Module | None = None,
    ) -> list[Tensor]:
        """Return compute(model, batch) of each batch, by default of the model that is trained.

        compute: an objective's `loss`, or what returns the model's result unchanged as that does.
        Values of batches: [micro, seq / cp, ...]. In a pipeline only the last stage has outputs;
        others get an empty list.
        """
        model = model or self.model
        inputs = [to_device(batch, self.device) for batch in batches]
        if isinstance(model, Pipeline):
            results = model.outputs(compute, inputs)
        else:
            results = [compute(model, batch) for batch in inputs]
        reshard(model)
        return results

    def total(self, tensor: Tensor) -> Tensor:
        """Sum a tensor [...] over the objective's ranks; in a pipeline the last stage has it."""
        ranks = getattr(self.meshes, getattr(self.objective, "summed_over", "loss"))
        return sum_over_(self.meshes.pp, sum_over_(ranks, tensor.to(self.device)))

    @torch.no_grad()
    def evaluate(
        self, dataset: Dataset, stopping: Callable[[], bool] = lambda: False
    ) -> float | None:
        """Return the mean loss over the first `validation.batches` full global batches of a dataset.

        A dataset smaller than one batch is repeated to fill it. Repeated tokens do not count;
        repeated videos do, since each time they have other noise.
        stopping(): called on all ranks before each batch; if it returns True, return None.
        """
        full = len(dataset) // self.config.batch.global_
        batches = max(1, min(self.config.validation.batches, full))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        for step in range(batches):
            # all ranks agree, or collectives would hang
            if stopping():
                return None
            micro_batches = self.micro_batches(dataset, step, rows_once)
            count += sum(map(self.objective.count, micro_batches))
            total += sum(self.outputs(self.objective.loss, micro_batches))
        # of a pipeline, the last stage has it
        sum_over_(self.meshes.pp, total)
        # one all-reduce for both, [2]
        sums = torch.stack([total, torch.full_like(total, count)])
        total, count = sum_over_(self.meshes.loss, sums).tolist()
        return total / max(count, 1)


def apply_update(
    model: Module,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    micro_batches: list[Batch],
    meshes: Meshes,
    config: Config,
    step: int,
) -> dict[str, Tensor]:
    """Run one optimizer step on this rank's micro-batches, at the optimizer's learning rate.

    Values of micro-batches are [batch.micro, seq / cp, ...]. Returns loss and grad_norm, both
    scalars on the device. If one is not finite, every rank skips the update, since all see the same
    values. It seeds torch's generators, from which dropout draws.
    """
    optim = config.optim
    torch.manual_seed(dropout_seed(config.seed, step, meshes))
    loss = forward_backward(model, objective, micro_batches, meshes, meshes.device)
    norm = clip_gradients(list(model.parameters()), optim.clip, meshes.pp)
    finite = loss.isfinite() & norm.isfinite()
    update_weights(optimizer, finite)
    if optim.ema:
        update_averages(optimizer, optim, step, finite)
    optimizer.zero_grad(set_to_none=True)
    if routers := [module for module in model.modules() if isinstance(module, Router)]:
        # scaled by `finite`: a skipped step leaves the bias unchanged
        update_selection_bias(routers, finite, partial(sum_over_, meshes.tokens))
    return {"loss": loss, "grad_norm": norm}


def rows_once(dataset: Dataset, numbers: range) -> Batch:
    """Read `rows`, each value [rows, ...], and set labels after the first epoch to IGNORE."""
    batch = rows(dataset, numbers)
    if "labels" in batch:
        batch["labels"][torch.tensor(numbers) >= len(dataset)] = IGNORE
    return batch


def dropout_seed(seed: int, step: int, meshes: Meshes) -> int:
    """Return a seed that differs between steps, and between ranks with other tokens or layers.

    Ranks of a tensor-parallel group get the same seed: they must draw the same masks.
    """
    place = meshes.loss.get_local_rank(), meshes.pp.get_local_rank()
    return seed_of(f"{seed}/dropout/{step}/{place}")


def forward_backward(
    model: Module,
    objective: Objective,
    micro_batches: list[Batch],
    meshes: Meshes,
    device: torch.device,
) -> Tensor:
    """Add the gradients of the mean loss over all ranks' micro-batches. Return that loss, a scalar.

    micro_batches: this rank's; each value is [micro, seq / cp, ...].
    """
    count = global_count(objective, micro_batches, meshes, device)
    set_token_counts(model, micro_batches, meshes, device)
    batches = [to_device(batch, device) for batch in micro_batches]
    if isinstance(model, Pipeline):
        total = model.forward_backward(objective.loss, batches, count)
    else:
        total = accumulate_gradients(model, objective, batches, count)
    sum_over_(meshes.loss, total)
    return total


def accumulate_gradients(
    model: Module, objective: Objective, batches: list[Batch], count: Tensor
) -> Tensor:
    """Run forward and backward of each micro-batch. Return this rank's loss sum / count, a scalar.

    batches: each value is [micro, seq / cp, ...]. count: loss terms of all ranks, a scalar.
    """
    total = torch.zeros((), device=count.device)
    for i, batch in enumerate(batches):
        # ZeRO-2 reduces gradients over ranks in the last micro-batch only (see fsdp.py)
        if isinstance(model, FSDPModule):
            set_gradient_sync(model, last=i == len(batches) - 1)
        loss = objective.loss(model, batch) / count
        loss.backward()
        total += loss.detach()
    return total


def global_count(
    objective: Objective, micro_batches: list[Batch], meshes: Meshes, device: torch.device
) -> Tensor:
    """Return the number of loss terms on all ranks, a float scalar [], at least 1."""
    # torch.tensor would synchronize with the device
    count = torch.full((), sum(map(objective.count, micro_batches)), device=device)
    sum_over_(meshes.loss, count)
    return count.clamp(min=1).float()


def set_token_counts(
    model: Module, micro_batches: list[Batch], meshes: Meshes, device: torch.device
) -> None:
    """Set the routers' number of tokens in the step, on all ranks and without padding.

    Auxiliary losses are means over these tokens. micro_batches: each value is [micro, seq / cp].
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if any(router.config.router_aux_loss_coef for router in routers):
        # padding has the document id -1; without them count token ids, which are never negative
        count = sum(
            (batch.get("document_ids", batch["tokens"]) >= 0).sum() for batch in micro_batches
        )
        count = count.to(device, non_blocking=True)
        sum_over_(meshes.loss, count)
        for router in routers:
            router.tokens_per_step = count


def to_device(batch: Batch, device: torch.device) -> Batch:
    # each [...]; the host does not wait for copies from pinned memory
    return {key: value.to(device, non_blocking=True) for key, value in batch.items()}


class RunningStep:
    """A training step that the device may still compute, and its numbers on their way to the host.

    began: the moment before it.
    """

    def __init__(self, trainer: Trainer, dataset: Dataset, step: int):
        self.trainer = trainer
        self.step = step
        self.began = Moment(trainer.device)
        tensors = trainer.step(dataset, step)
        sums = trainer.objective.sums() if hasattr(trainer.objective, "sums") else None
        if sums is not None:
            tensors["sums"] = trainer.total(sums)
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}
        # one copy, in a type that has every digit of all; into pinned memory, so no one waits
        values = torch.cat([tensor.double().flatten() for tensor in tensors.values()])
        self.values = values.to("cpu", non_blocking=True)
        self.ended = Moment(trainer.device)
        # the next step has another
        self.rate = trainer.optimizer.param_groups[0]["lr"]

    def read(self, seen: int) -> dict[str, float]:
        """Wait until it is done, and return its metrics. seen: tokens of the steps before."""
        seconds = self.ended.since(self.began)
        parts = self.values.split([shape.numel() for shape in self.shapes.values()])
        pairs = zip(self.shapes.items(), parts, strict=True)
        metrics = {name: part.view(shape).tolist() for (name, shape), part in pairs}
        sums = metrics.pop("sums", None)
        metrics["skipped"] = int(not is_finite(metrics))
        if sums is not None:
            metrics |= self.trainer.objective.metrics(sums)
        batch = self.trainer.config.batch
        # tokens of this step; videos vary in size, so their objective counts them
        filled = round(metrics.get("video_tokens", batch.global_ * batch.seq_len))
        return {
            "step": self.step + 1,
            **metrics,
            "lr": self.rate,
            "tokens": seen + filled,
            "step_time_s": seconds,
            "step_tokens": filled,
            "tokens_per_sec": filled / seconds,
        }


def training_steps(
    trainer: Trainer,
    dataset: Dataset,
    start: int,
    seen: int,
    stays: Callable[[int], bool] = lambda step: True,
) -> Iterator[dict[str, float]]:
    """Run the config's steps from `start` on, and yield the metrics of each.

    A GPU gets its next step before the host reads the numbers of this one, so it need not wait for
    the host. But after steps 1, 2, ... for which stays(step) is True, by default all, they come
    before the next step is begun: the weights are then as after this one. It is asked once the step
    is launched, and the numbers of those before have come.
    seen: tokens (for videos, patches) of earlier steps, which may have had other batch sizes.
    """
    running = None
    for step in range(start, trainer.config.steps):
        try:
            launched = RunningStep(trainer, dataset, step)
        except Exception:
            # what the step before has done is known all the same
            if running:
                yield running.read(seen)
            raise
        if running:
            metrics = running.read(seen)
            seen = metrics["tokens"]
            yield metrics
        running = launched
        if not trainer.runs_ahead or stays(step + 1):
            metrics = running.read(seen)
            seen = metrics["tokens"]
            running = None
            yield metrics
    if running:
        yield running.read(seen)


def is_finite(numbers: dict[str, float]) -> bool:
    """Return whether the step with this loss and grad_norm changed the weights."""
    return math.isfinite(numbers["loss"]) and math.isfinite(numbers["grad_norm"])
