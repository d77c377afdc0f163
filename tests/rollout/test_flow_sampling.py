"""Samplers on a Gaussian, whose velocity and trajectories are known in closed form, and against diffusers' UniPC."""

import itertools

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from minitrain.rollout.flow_sampling import SAMPLERS, euler, guided, sigma_schedule, unipc

MEAN, SPREAD = 2.0, 0.5


def gaussian_velocity(x: torch.Tensor, sigma: float) -> torch.Tensor:
    """E[noise - data | x] for data of N(MEAN, SPREAD^2): x is jointly Gaussian with both."""
    variance = (1 - sigma) ** 2 * SPREAD**2 + sigma**2
    centred = (x - (1 - sigma) * MEAN) / variance
    return sigma * centred - (MEAN + (1 - sigma) * SPREAD**2 * centred)


def error(sampler, steps: int, shift: float = 1.0) -> float:
    """Along its trajectory noise z becomes MEAN + SPREAD z."""
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    return (
        (sampler(gaussian_velocity, z, sigma_schedule(steps, shift)) - (MEAN + SPREAD * z))
        .abs()
        .max()
        .item()
    )


@pytest.mark.parametrize("sampler, order", [(euler, 1), (unipc, 2)])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_error_falls_with_its_order(sampler, order, shift):
    errors = [error(sampler, steps, shift) for steps in (160, 320, 640)]
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine > 0.85 * 2**order
    assert errors[-1] < 0.01


def test_unipc_needs_fewer_steps():
    assert error(unipc, 20) < error(euler, 160)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_one_step_goes_to_the_mean(sampler):
    """From pure noise the velocity is z - MEAN, so a single step ends there; no graph is kept."""
    z = torch.linspace(-2, 2, 9, requires_grad=True)
    found = sampler(gaussian_velocity, z, [1.0, 0.0])
    torch.testing.assert_close(found, torch.full((9,), MEAN))
    assert not found.requires_grad


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("shift", [1.0, 5.0])
def test_unipc_is_that_of_diffusers(steps, shift):
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift, solver_order=2
    )
    scheduler.set_timesteps(steps)
    noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = noise
    for sigma, timestep in zip(scheduler.sigmas.tolist(), scheduler.timesteps, strict=False):
        x = scheduler.step(gaussian_velocity(x, sigma), timestep, x).prev_sample
    found = unipc(gaussian_velocity, noise, scheduler.sigmas.tolist())
    # diffusers keeps its coefficients in fp32
    torch.testing.assert_close(found, x, atol=1e-4, rtol=0)


def test_schedule():
    assert sigma_schedule(4, 1.0) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert sigma_schedule(2, 3.0) == pytest.approx([1, 0.75, 0])


@pytest.mark.parametrize("negative", [None, torch.ones(2, 3, 64)], ids=["zeros", "negative"])
def test_guidance_goes_beyond_the_text(negative):
    torch.manual_seed(0)
    model = Wan(model_config("wan2.1-1.3b-tiny"))
    x, text = torch.randn(2, 16, 1, 4, 4), torch.randn(2, 3, 64)
    timestep = torch.full((2,), 734.5)
    with torch.no_grad():
        with_text = model(x, timestep, text)
        without = model(x, timestep, torch.zeros_like(text) if negative is None else negative)
        for scale, expected in (
            (0.0, without),
            (1.0, with_text),
            (5.0, 5 * with_text - 4 * without),
        ):
            found = guided(model, text, scale, negative)(x, 0.7345)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (with_text - without).norm() > 1e-3 * with_text.norm()
