"""Flow-matching samplers: Euler, UniPC of order 2, and classifier-free guidance.

A velocity is a function of x, of any shape, and sigma, a float: dx / dsigma. Sigmas fall from 1,
pure noise, to 0.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import Module

from minitrain.errors import InputError
from minitrain.training.sigmas import shift_sigma

# the sigma that stands for 1, since pure noise has no signal
MOST_NOISE = 1 - 1e-6

Velocity = Callable[[Tensor, float], Tensor]


def sigma_schedule(steps: int, shift: float) -> list[float]:
    """Return steps + 1 sigmas from 1 to 0, evenly spaced before the shift."""
    return shift_sigma(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).tolist()


@torch.no_grad()
def euler(velocity: Velocity, x: Tensor, sigmas: list[float]) -> Tensor:
    """Integrate x, [batch, ...], along `velocity` by Euler's method."""
    for now, after in pairwise(sigmas):
        x = x + (after - now) * velocity(x, now)
    return x


@torch.no_grad()
def unipc(velocity: Velocity, x: Tensor, sigmas: list[float]) -> Tensor:
    """Integrate x, [batch, ...], by UniPC-2 on predicted data, B(h) = e^h - 1 (Zhao et al. 2023).

    Lambda is half the logarithm of the signal-to-noise ratio. A step from one sigma to the next is
    an integral over lambda of the data that x is predicted to become. The predictor takes this data
    as a line through the last two predictions. The corrector, once the velocity at the result is
    known, takes the same step again with a parabola through three. Each sigma's velocity is
    evaluated once, at the uncorrected x. Raises InputError for a second sigma that is nearly 1.
    """
    if sigmas[1] >= MOST_NOISE:
        raise InputError(
            f"UniPC cannot tell sigma={sigmas[1]} from pure noise (use euler, or a smaller shift)"
        )
    # the predictions at the sigmas so far, each [batch, ...]
    data: list[Tensor] = []
    lambdas = [half_log_snr(sigma) for sigma in sigmas]
    last = x
    for i, sigma in enumerate(sigmas[:-1]):
        data.append(x - sigma * velocity(x, sigma))
        if i > 0:
            # correct the step that led here
            x = _step(last, data[i - 1], sigmas, lambdas, i - 1, _corrections(data, lambdas, i))
        last = x
        # of the first step and the last one: 1
        order = min(2, i + 1, len(sigmas) - 1 - i)
        predictions = [(0.5, _slope(data, lambdas, i))] if order == 2 else []
        x = _step(x, data[i], sigmas, lambdas, i, predictions)
    return x


def half_log_snr(sigma: float) -> float:
    sigma = min(sigma, MOST_NOISE)
    return math.log((1 - sigma) / sigma) if sigma > 0 else math.inf


def _step(
    x: Tensor, data: Tensor, sigmas, lambdas, i: int, corrections: list[tuple[float, Tensor]]
) -> Tensor:
    """Step from sigmas[i] to the next. x, data and differences: [batch, ...], as the result.

    The predicted data is constant plus factor * difference for each correction.
    """
    sigma = min(sigmas[i], MOST_NOISE)
    after = sigmas[i + 1]
    change = -math.expm1(lambdas[i] - lambdas[i + 1])
    for factor, difference in corrections:
        data = data + factor * difference
    return after / sigma * x + (1 - after) * change * data


def _slope(data: list[Tensor], lambdas, i: int) -> Tensor:
    """Extrapolate the change of the predicted data over step i from that over the step before.

    data: each [batch, ...], as the result.
    """
    change = data[i] - data[i - 1]
    step = lambdas[i + 1] - lambdas[i]
    step_before = lambdas[i] - lambdas[i - 1]
    return change * step / step_before


def _corrections(data: list[Tensor], lambdas, i: int) -> list[tuple[float, Tensor]]:
    """Return corrections that make step i - 1 exact for predicted data quadratic in lambda.

    data: each [batch, ...]. Returns (factor, difference [batch, ...]) pairs.
    """
    new = data[i] - data[i - 1]
    if i == 1:
        return [(0.5, new)]
    # The paper's symbols: h, r, B(-h) and h phi_k(-h); the two factors solve a system of two
    # equations (diffusers' UniPCMultistepScheduler, solver_type bh2).
    h = lambdas[i] - lambdas[i - 1]
    ratio = (lambdas[i - 2] - lambdas[i - 1]) / h
    change = math.expm1(-h)
    phi2 = -change / h - 1
    phi3 = -phi2 / h - 0.5
    first = phi2 / change
    second = 2 * phi3 / change
    old = (first - second) / (1 - ratio)
    return [(old, (data[i - 2] - data[i - 1]) / ratio), (first - old, new)]


SAMPLERS = {"euler": euler, "unipc": unipc}


def guided(
    model: Module,
    text: Tensor,
    scale: float,
    negative: Tensor | None = None,
    image: Tensor | None = None,
    condition: Tensor | None = None,
) -> Velocity:
    """Return the velocity with guidance: v(negative) + scale * (v(text) - v(negative)).

    See Ho & Salimans 2022. A scale of 1 is the plain velocity v(text), at half the work.
    text, negative: [batch, tokens, text_dim]. negative: by default zeros, as in training (see
    Noised); published models expect an empty prompt's embedding.
    image, condition: for image-to-video models, which see them with both texts; see FlowMatching.
    """
    negative = torch.zeros_like(text) if negative is None else negative
    copies = 1 if scale == 1 else 2
    texts = text if scale == 1 else torch.cat([text, negative])
    image, condition = (
        None if x is None else torch.cat([x] * copies) for x in (image, condition)
    )

    def velocity(x: Tensor, sigma: float) -> Tensor:
        # x, as the result: [batch, channels, frames, height, width]; both texts in one batch
        noisy = torch.cat([x] * copies)
        noisy = noisy if condition is None else torch.cat([noisy, condition], dim=1)
        times = torch.full((len(noisy),), 1000 * sigma, device=x.device)
        out = model(noisy, times, texts, image)
        if scale == 1:
            return out
        towards, away = out.chunk(2)
        return away + scale * (towards - away)

    return velocity
