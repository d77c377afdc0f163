"""How sigmas are drawn for flow matching, and how losses are weighted by them: see `Diffusion`.

A sigma is a quantile: of a uniform u, by the distribution that `sampling` names, cut at the limits
sigma_min and sigma_max, then shifted.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from minitrain.errors import InputError
from minitrain.settings import Diffusion


def sigma_from_uniform(u: Tensor, settings: Diffusion) -> Tensor:
    """Map uniform u in [0, 1], fp64 [...], to sigmas [...] of the settings' distribution."""
    if settings.sampling == "mixed":
        # u below `share` draws from the uniform distribution: stretch both parts to [0, 1]
        uniform, normal = probabilities(settings).values()
        share = uniform / (uniform + normal)
        others = within_limits("logit_normal", (u - share) / (1 - share), settings)
        x = torch.where(u < share, within_limits("uniform", u / share, settings), others)
    else:
        x = within_limits(settings.sampling, u, settings)
    # the limits hold already but for rounding
    return shift_sigma(x, settings.shift).clamp(settings.sigma_min, settings.sigma_max)


def within_limits(sampling: str, u: Tensor, settings: Diffusion) -> Tensor:
    """Return one distribution's quantiles at u [...], before the shift, cut at the sigma limits."""
    low, high = quantile_limits(sampling, settings)
    return QUANTILES[sampling]((low + (high - low) * u).clamp(0, 1), settings)


@lru_cache
def quantile_limits(sampling: str, settings: Diffusion) -> tuple[float, float]:
    """Find by bisection which u give sigma_min and sigma_max; return the smaller u first."""

    def sigma(u: float) -> float:
        x = QUANTILES[sampling](torch.tensor(u, dtype=torch.float64), settings)
        return shift_sigma(x, settings.shift).item()

    # mode sampling falls
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
    """Raise InputError if a number is out of its range, or no sigma can be drawn."""
    for name in ("std", "shift"):
        if not getattr(settings, name) > 0:
            raise InputError(f"diffusion.{name}={getattr(settings, name)} must be above 0")
    for name in ("uniform_share", "text_dropout"):
        if not 0 <= getattr(settings, name) <= 1:
            raise InputError(
                f"diffusion.{name}={getattr(settings, name)} must be between 0 and 1"
            )
    # outside of these bounds, `mode` is not monotonic in u
    if not -1 <= settings.mode_scale <= 2 / (math.pi - 2):
        raise InputError(
            f"diffusion.mode_scale={settings.mode_scale} must be between -1 and 1.75"
        )
    limits = f"diffusion.sigma_min={settings.sigma_min} and sigma_max={settings.sigma_max}"
    if not 0 <= settings.sigma_min < settings.sigma_max <= 1:
        raise InputError(f"{limits} must be between 0 and 1, the first below the second")
    if settings.weighting == "sigma_sqrt" and not settings.sigma_min:
        raise InputError("diffusion.weighting=sigma_sqrt needs sigma_min above 0 (use 0.001)")
    if not sum(probabilities(settings).values()) > 1e-9:
        raise InputError(
            f"{limits}: diffusion.sampling={settings.sampling} draws no sigma between these"
        )


def probabilities(settings: Diffusion) -> dict[str, float]:
    """Return, by distribution, the probability that it is drawn from and meets the limits."""
    shares = {settings.sampling: 1.0}
    if settings.sampling == "mixed":
        shares = {"uniform": settings.uniform_share, "logit_normal": 1 - settings.uniform_share}
    result = {}
    for sampling, share in shares.items():
        low, high = quantile_limits(sampling, settings)
        result[sampling] = share * (high - low)
    return result


def logit_normal(u: Tensor, settings: Diffusion) -> Tensor:
    # [...]: the normal distribution's quantile, through a sigmoid (Esser et al. 2024)
    return torch.sigmoid(settings.mean + settings.std * torch.special.ndtri(u))


def mode_sampling(u: Tensor, settings: Diffusion) -> Tensor:
    # [...]: heavy tails at both ends if mode_scale > 0 (Esser et al. 2024)
    return 1 - u - settings.mode_scale * (torch.cos(math.pi / 2 * u) ** 2 - 1 + u)


QUANTILES = {
    "uniform": lambda u, settings: u,
    "logit_normal": logit_normal,
    "mode": mode_sampling,
}


def shift_sigma(u: Tensor, shift: float) -> Tensor:
    """Move u [...] in (0, 1) towards 1 if shift > 1 (Esser et al. 2024, section 5.3.2)."""
    return shift * u / (1 + (shift - 1) * u)


def loss_weight(sigma: Tensor, settings: Diffusion) -> Tensor:
    """Return the factor of the squared error at each sigma, [batch]."""
    if settings.weighting == "linear":
        return 1 + settings.shift * sigma
    if settings.weighting == "bell":
        return bell(sigma) / bell_mean(settings.shift)
    if settings.weighting == "sigma_sqrt":
        return sigma**-2
    if settings.weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    return torch.ones_like(sigma)


def bell(sigma: Tensor) -> Tensor:
    # [...]: highest at sigma 0.5, and 0 at 0 and 1
    return torch.exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)


@lru_cache
def bell_mean(shift: float) -> float:
    """Return the mean of `bell` over 1000 evenly spaced u, shifted, as in DiffSynth."""
    u = torch.arange(1, 1001, dtype=torch.float64) / 1000
    return bell(shift_sigma(u, shift)).mean().item()
