"""Flow matching (Lipman et al. 2022): learn the velocity from data to noise along straight lines.

Data x and noise e are mixed to (1 - sigma) x + sigma e. The model gets that, the timestep
1000 sigma and the text, and predicts the velocity e - x. The loss is the squared error in fp32: its
mean over each video, and then over the videos of a step, whatever their sizes. diffusers and most
other training code do the same; Diffusion.reduction changes it.

Noise, sigma and text dropout are drawn with the data, as a pure function of the seed and the row's
number. So resuming is exact, and all ranks that share a video draw the same.
"""

import math

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.hashing import seed_of
from minitrain.settings import Config, Diffusion
from minitrain.training.packing import Batch, Dataset
from minitrain.training.sigmas import check_diffusion, loss_weight, sigma_from_uniform

# the fraction of the golden ratio: n * GOLDEN_STEP % 1 covers [0, 1) evenly for any range of n
GOLDEN_STEP = (math.sqrt(5) - 1) / 2


class FlowMatching:
    """The objective: squared error of the velocity, in training weighted by sigma.

    settings.reduction: sum the mean errors of videos, or the errors of all elements.
    patch_elements: elements of the latents per token, for the log.

    A batch has latents and noise [batch, channels, frames, height, width], sigma [batch] and text
    [batch, tokens, text_dim]. For image-to-video it also has condition [batch, more channels,
    frames, height, width] and image [batch, tokens, image_dim].
    """

    # the model gathers its velocities, so every context-parallel rank has all of a video's errors
    layouts = ("cp",)
    summed_over = "batch"

    def __init__(self, settings: Diffusion, patch_elements: int = 1):
        self.settings = settings
        self.patch_elements = patch_elements
        self.totals = None

    def count(self, batch: Batch) -> int:
        """Return the number of loss terms: videos, or with reduction=element numbers of latents."""
        # [batch, channels, frames, height, width]
        latents = batch["latents"]
        return latents.numel() if self.settings.reduction == "element" else len(latents)

    def loss(self, model: Module, batch: Batch) -> Tensor:
        """Return the sum of a batch's loss terms, an fp32 scalar."""
        # [batch, channels, frames, height, width], as noise and velocity
        latents = batch["latents"]
        noise = batch["noise"]
        sigma = batch["sigma"].float()
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1).type_as(latents))
        if "condition" in batch:
            noisy = torch.cat([noisy, batch["condition"]], dim=1)
        image = [batch["image"]] if "image" in batch else []
        velocity = model(noisy, 1000 * sigma, batch["text"], *image)
        # of each video: 1, or its number of elements
        terms = self.count(batch) / len(latents)
        # [batch]
        errors = (velocity - (noise - latents)).square().flatten(1).mean(1) * terms
        if not torch.is_grad_enabled():
            # validation losses must compare between runs with other weightings
            return errors.sum()
        self._record(sigma, errors.detach(), terms, latents[0].numel())
        return (errors * loss_weight(sigma, self.settings)).sum()

    def sums(self) -> Tensor:
        """Return errors, loss terms and elements of latents by quartile of sigma, [3, 4]."""
        sums = self.totals
        self.totals = None
        return sums

    def metrics(self, sums: list[list[float]]) -> dict[str, float]:
        """Return the unweighted mean squared error by quartile of sigma, and the number of tokens."""
        # each a list of 4, one number for each quartile
        errors, terms, elements = sums
        losses = {f"loss_sigma_q{i + 1}": errors[i] / terms[i] for i in range(4) if terms[i]}
        return losses | {"video_tokens": sum(elements) / self.patch_elements}

    def _record(self, sigma: Tensor, errors: Tensor, terms: float, elements: int) -> None:
        """Add to the totals by quartile of sigma: errors, loss terms, elements of latents.

        sigma, errors: [batch]. terms, elements: of each video.
        """
        if self.totals is None:
            self.totals = torch.zeros(3, 4, dtype=torch.float64, device=sigma.device)
        # [batch]; the quartiles are those of sigma's range, 0 to 1
        quartile = (4 * sigma).long().clamp(max=3)
        errors = errors.double()
        numbers = [errors, torch.full_like(errors, terms), torch.full_like(errors, elements)]
        self.totals.index_add_(1, quartile, torch.stack(numbers))


class Noised:
    """A dataset of latents and texts, with noise, sigma and text dropout added to row n.

    dataset: has `row(n)`, a dict with fp32 latents [channels, frames, height, width] and text
        [tokens, text_dim], where a row of zeros is no token. A dropped text is replaced by the
        row's `negative`, or by zeros if it has none.
    held_out: for validation. Texts are never dropped, and sigmas cover 0 to 1 evenly in any range
        of rows, whatever the settings, so losses of different runs compare.
    """

    def __init__(self, dataset: Dataset, settings: Diffusion, seed: int, held_out: bool = False):
        # also finds the limits of sigma, which no step should wait for
        check_diffusion(settings)
        self.dataset = dataset
        self.settings = settings
        self.seed = seed
        self.held_out = held_out
        # origin(n) names the file of row n; None if rows are made up
        self.origin = getattr(dataset, "origin", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, n: int) -> Batch:
        """Return the dataset's row n with noise [channels, frames, height, width] and sigma []."""
        row = dict(self.dataset.row(n))
        negative = row.pop("negative", torch.zeros_like(row["text"]))
        random = generator(self.seed, self.held_out, n)
        # u decides sigma, v whether the text is dropped
        u, v = torch.rand(2, dtype=torch.float64, generator=random)
        row["noise"] = torch.randn(
            row["latents"].shape, generator=random, dtype=row["latents"].dtype
        )
        if self.held_out:
            sigma = torch.tensor((0.5 + n * GOLDEN_STEP) % 1)
        else:
            sigma = sigma_from_uniform(u, self.settings)
            row["text"] = torch.where(v < self.settings.text_dropout, negative, row["text"])
        row["sigma"] = sigma.float()
        return row


def generator(*key: int | bool) -> torch.Generator:
    """Return a generator seeded by `key`; on the CPU, so all devices draw the same numbers."""
    return torch.Generator().manual_seed(seed_of(repr(tuple(map(int, key)))))


def flow_matching(config: Config) -> FlowMatching:
    """Return the objective of task=diffusion."""
    model = config.model.config
    return FlowMatching(config.diffusion, model.out_channels * math.prod(model.patch_size))
