"""Flow matching (Lipman et al. 2022): learn the velocity that leads from noise to data along
straight lines.

Data x and noise e are mixed to (1 - sigma) x + sigma e; the model sees that, the timestep 1000
sigma and the text, and is to predict the velocity e - x. The loss is the squared error, in fp32: as
in diffusers' and most other training code, its mean over each video, and then over the videos of a
step, whatever their sizes (see Diffusion.reduction).

What is random about a step (noise, sigma, whether the text is hidden) is drawn with the data, as a
pure function of the seed and the row's number: resuming is exact, and all ranks that share a video
see the same.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.hashing import seed_of
from minitrain.settings import Diffusion

# its multiples modulo 1 lie evenly, however many there are
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class FlowMatching:
    """The objective: squared error of the velocity, its mean over each video (or its sum, by
    settings.reduction), in training weighted by sigma.

    Batches have latents, noise [batch, channels, frames, height, width], sigma [batch], text
    [batch, tokens, text_dim]; for image-to-video also condition [batch, more channels, frames,
    height, width] and image [batch, tokens, image_dim].
    patch_elements: how many elements of the latents make a token, for the log.
    """

    # the model gathers its velocities, so that every rank has all of them
    layouts = ("cp",)

    def __init__(self, settings: Diffusion, patch_elements: int = 1):
        self.settings = settings
        self.patch_elements = patch_elements
        self.totals = None

    def count(self, batch: dict) -> int:
        return sum(map(self._terms, batch["latents"]))

    def loss(self, model: Module, batch: dict) -> Tensor:
        latents = batch["latents"]
        noise = batch["noise"]
        sigma = batch["sigma"].float()
        noisy = [torch.lerp(x, e, s) for x, e, s in zip(latents, noise, sigma, strict=True)]
        if "condition" in batch:
            noisy = [torch.cat(pair) for pair in zip(noisy, batch["condition"], strict=True)]
        image = [batch["image"]] if "image" in batch else []
        velocities = model(torch.stack(noisy), 1000 * sigma, batch["text"], *image)
        pairs = zip(velocities, noise, latents, strict=True)
        errors = torch.stack([(v - (e - x)).square().mean() * self._terms(x) for v, e, x in pairs])
        # validation: runs that weigh otherwise are to compare
        if not torch.is_grad_enabled():
            return errors.sum()
        self._record(sigma, errors.detach(), latents)
        return (errors * weight(sigma, self.settings)).sum()

    def metrics(self, sum_over: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The unweighted mean squared error in each quartile of sigma that had samples, and how
        many tokens all had.
        """
        errors, terms, elements = sum_over(self.totals).tolist()
        self.totals = None
        losses = {f"loss_sigma_q{i + 1}": errors[i] / terms[i] for i in range(4) if terms[i]}
        return losses | {"video_tokens": sum(elements) / self.patch_elements}

    def _terms(self, video: Tensor) -> int:
        """Return how often a video's mean error counts."""
        return video.numel() if self.settings.reduction == "element" else 1

    def _record(self, sigma: Tensor, errors: Tensor, videos: Iterable[Tensor]) -> None:
        # errors, how many terms they are of, numbers of elements
        if self.totals is None:
            self.totals = torch.zeros(3, 4, dtype=torch.float64, device=sigma.device)
        quartile = (4 * sigma).long().clamp(max=3)
        sizes = [(self._terms(video), video.numel()) for video in videos]
        counts = [
            torch.stack([self.totals.new_full((), n) for n in each])
            for each in zip(*sizes, strict=True)
        ]
        self.totals.index_add_(1, quartile, torch.stack([errors.double(), *counts]))


# -------------------------------------------------------------------------------------------------------------- sigmas


def sigma_from_uniform(u: Tensor, settings: Diffusion) -> Tensor:
    """Turn uniform numbers between 0 and 1, in fp64, into sigmas of the settings' distribution
    between its limits.
    """
    if settings.sampling == "mixed":
        uniform, normal = chances(settings).values()
        share = uniform / (uniform + normal)
        others = within_limits("logit_normal", (u - share) / (1 - share), settings)
        x = torch.where(u < share, within_limits("uniform", u / share, settings), others)
    else:
        x = within_limits(settings.sampling, u, settings)
    # against rounding alone
    return shift_sigma(x, settings.shift).clamp(settings.sigma_min, settings.sigma_max)


def within_limits(sampling: str, u: Tensor, settings: Diffusion) -> Tensor:
    """Return the quantiles, before the shift, of one kind of sampling whose sigmas lie between the
    limits.
    """
    low, high = quantile_limits(sampling, settings)
    return QUANTILES[sampling]((low + (high - low) * u).clamp(0, 1), settings)


@lru_cache
def quantile_limits(sampling: str, settings: Diffusion) -> tuple[float, float]:
    """Return the numbers u between which the sigmas lie between the limits, by bisection."""

    def sigma(u: float) -> float:
        x = QUANTILES[sampling](torch.tensor(u, dtype=torch.float64), settings)
        return shift_sigma(x, settings.shift).item()

    rising = sigma(1.0) > sigma(0.0)
    found = []
    for limit in (settings.sigma_min, settings.sigma_max):
        low = 0.0
        high = 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if (sigma(middle) < limit) == rising else (low, middle)
        found.append(high)
    return min(found), max(found)


def check_diffusion(settings: Diffusion) -> None:
    """Raise InputError for numbers without a meaning."""
    for name in ("std", "shift"):
        if not getattr(settings, name) > 0:
            raise InputError(f"diffusion.{name}={getattr(settings, name)} must be above 0")
    for name in ("uniform_share", "text_dropout"):
        if not 0 <= getattr(settings, name) <= 1:
            raise InputError(f"diffusion.{name}={getattr(settings, name)} must be between 0 and 1")
    # beyond, more noise would not mean a larger sigma
    if not -1 <= settings.mode_scale <= 2 / (math.pi - 2):
        raise InputError(f"diffusion.mode_scale={settings.mode_scale} must be between -1 and 1.75")
    limits = f"diffusion.sigma_min={settings.sigma_min} and sigma_max={settings.sigma_max}"
    if not 0 <= settings.sigma_min < settings.sigma_max <= 1:
        raise InputError(f"{limits} must be between 0 and 1, the first below the second")
    if not sum(chances(settings).values()) > 1e-9:
        raise InputError(
            f"{limits}: diffusion.sampling={settings.sampling} draws no sigma between these"
        )


def chances(settings: Diffusion) -> dict[str, float]:
    """Return, by kind of sampling, how often it is taken and lies between the limits."""
    share = settings.uniform_share
    kinds = (
        {"uniform": share, "logit_normal": 1 - share}
        if settings.sampling == "mixed"
        else {settings.sampling: 1.0}
    )
    limits = {kind: quantile_limits(kind, settings) for kind in kinds}
    return {kind: chance * (limits[kind][1] - limits[kind][0]) for kind, chance in kinds.items()}


def logit_normal(u: Tensor, settings: Diffusion) -> Tensor:
    return torch.sigmoid(settings.mean + settings.std * torch.special.ndtri(u))


def mode(u: Tensor, settings: Diffusion) -> Tensor:
    return 1 - u - settings.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


QUANTILES = {"uniform": lambda u, settings: u, "logit_normal": logit_normal, "mode": mode}


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """Keep 0 and 1, and move what is between towards 1 if shift > 1 (Esser et al. 2024, section
    5.3.2).
    """
    return shift * u / (1 + (shift - 1) * u)


def weight(sigma: Tensor, settings: Diffusion) -> Tensor:
    """What the squared error at each sigma is multiplied by."""
    if settings.weighting == "linear":
        return 1 + settings.shift * sigma
    if settings.weighting == "bell":
        return bell(sigma) / bell_mean(settings.shift)
    return torch.ones_like(sigma)


def bell(sigma: Tensor) -> Tensor:
    return torch.exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)


@lru_cache
def bell_mean(shift: float) -> float:
    """Return its mean over the sigmas that 1000 evenly spaced u are shifted to, as DiffSynth takes
    it.
    """
    return bell(shift_sigma(torch.arange(1, 1001, dtype=torch.float64) / 1000, shift)).mean().item()


class Noised:
    """A dataset of latents and texts with what flow matching adds to row n: noise, sigma, and at
    times a hidden text.

    dataset: has `row(n)`, a dict with fp32 latents [channels, frames, height, width] and text
    [tokens, text_dim], where a row of zeros stands for no token. In place of a hidden text comes
    the row's `negative`, or zeros if it has none. With held_out, texts are never hidden, and sigmas
    cover 0 to 1 evenly in any run of rows, whatever the settings, so that losses of different runs
    compare.
    """

    def __init__(self, dataset, settings: Diffusion, seed: int, held_out: bool = False):
        # also finds the limits, before a step that may be traced
        check_diffusion(settings)
        self.dataset = dataset
        self.settings = settings
        self.seed = seed
        self.held_out = held_out
        # of row n; None if it is made up
        self.origin = getattr(dataset, "origin", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, n: int) -> dict[str, Tensor]:
        """The dataset's row n, and noise like its latents and a scalar sigma."""
        return add_noise(self.dataset.row(n), n, self.settings, self.seed, self.held_out)


def add_noise(
    row: dict[str, Tensor], n: int, settings: Diffusion, seed: int, held_out: bool
) -> dict[str, Tensor]:
    """What `Noised` does to row n."""
    row = dict(row)
    without = row.pop("negative", torch.zeros_like(row["text"]))
    random = generator(seed, held_out, n)
    u, hide = torch.rand(2, dtype=torch.float64, generator=random)
    noise = torch.randn(row["latents"].shape, generator=random, dtype=row["latents"].dtype)
    if held_out:
        sigma = torch.tensor((0.5 + n * GOLDEN_RATIO) % 1)
        text = row["text"]
    else:
        sigma = sigma_from_uniform(u, settings)
        text = torch.where(hide < settings.text_dropout, without, row["text"])
    return row | {"text": text, "noise": noise, "sigma": sigma.float()}


def generator(*key: int | bool) -> torch.Generator:
    """Random numbers that depend on `key` alone; on the CPU, so that all devices draw the same."""
    return torch.Generator().manual_seed(seed_of(repr(tuple(map(int, key)))))
