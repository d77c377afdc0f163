"""Flow matching against closed forms: distributions of sigma, the loss of known velocities, and what seeds fix."""

import math
from statistics import NormalDist

import pytest
import torch
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)

from minitrain.errors import InputError
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from minitrain.settings import Diffusion
from minitrain.training.flow import FlowMatching, Noised
from minitrain.training.sigmas import check_diffusion, loss_weight, sigma_from_uniform
from tests.helpers.training import logged

# a stand-in for uniform random numbers
EVEN = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000


class Clips:
    """Row n: latents filled with n + 1, a text of ones."""

    def __len__(self) -> int:
        return 50

    def row(self, n: int) -> dict[str, torch.Tensor]:
        return {"latents": torch.full((2, 1, 2, 4), n + 1.0), "text": torch.ones(3, 5)}


def batch_of(dataset, numbers) -> dict[str, torch.Tensor]:
    rows = [dataset.row(n) for n in numbers]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


# -------------------------------------------------------------------------------------------------------------- sigmas


def share_below(sigmas: torch.Tensor, limit: float) -> float:
    return (sigmas < limit).double().mean().item()


@pytest.mark.parametrize("limit", [0.1, 0.37, 0.5, 0.9])
def test_logit_normal_and_mixed_have_the_closed_form(limit):
    mean, std, share = 0.3, 0.8, 0.25
    normal = NormalDist(mean, std).cdf(math.log(limit / (1 - limit)))
    for sampling, expected in (
        ("logit_normal", normal),
        ("mixed", share * limit + (1 - share) * normal),
    ):
        settings = Diffusion(sampling, mean=mean, std=std, uniform_share=share, shift=1)
        assert share_below(sigma_from_uniform(EVEN, settings), limit) == pytest.approx(
            expected, abs=1e-3
        )


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1.29, 1.75])
def test_mode_is_that_of_diffusers(scale):
    theirs = compute_density_for_timestep_sampling(
        "mode", 64, mode_scale=scale, generator=torch.manual_seed(0)
    )
    u = torch.rand(64, generator=torch.manual_seed(0)).double()
    ours = sigma_from_uniform(u, Diffusion("mode", mode_scale=scale, shift=1))
    torch.testing.assert_close(ours.float(), theirs, atol=1e-6, rtol=1e-6)


def test_mixed_at_its_ends_is_one_of_its_parts():
    for share, part in ((0.0, "logit_normal"), (1.0, "uniform")):
        mixed = sigma_from_uniform(EVEN, Diffusion("mixed", uniform_share=share))
        torch.testing.assert_close(mixed, sigma_from_uniform(EVEN, Diffusion(part)))


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 5.0])
def test_shift_is_the_published_one(shift):
    """s = shift / (shift + 1 / u - 1), which moves the median of a uniform u to shift / (shift + 1)."""
    sigmas = sigma_from_uniform(EVEN, Diffusion("uniform", shift=shift))
    torch.testing.assert_close(sigmas, shift / (shift + 1 / EVEN - 1))
    assert sigmas.median().item() == pytest.approx(shift / (shift + 1), abs=1e-3)


# the third is that of Wan 2.2's high-noise network
SLICES = [(0.0, 0.4), (0.2, 0.9), (0.875, 1.0), (0.5, 0.5001)]


@pytest.mark.parametrize("low, high", SLICES)
@pytest.mark.parametrize("shift", [1.0, 5.0, 12.0])
@pytest.mark.parametrize(
    "sampling",
    [
        dict(sampling="uniform"),
        dict(sampling="logit_normal"),
        dict(sampling="logit_normal", mean=-0.7, std=0.6),
        dict(sampling="mode"),
        dict(sampling="mode", mode_scale=-0.9),
        dict(sampling="mixed"),
        dict(sampling="mixed", uniform_share=0.6, mean=1.0),
    ],
    ids=str,
)
def test_limits_take_a_slice_of_the_distribution(sampling, shift, low, high):
    """The sigmas without limits, of which those between the limits are kept, by brute force."""
    u = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000
    everything = sigma_from_uniform(u, Diffusion(**sampling, shift=shift))
    kept = everything[(everything >= low) & (everything <= high)]
    sigmas = sigma_from_uniform(
        EVEN, Diffusion(**sampling, shift=shift, sigma_min=low, sigma_max=high)
    )
    assert low <= sigmas.min() and sigmas.max() <= high and sigmas.unique().numel() == len(EVEN)
    off = 1e-3 + 3 / len(kept)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        limit = low + share * (high - low)
        assert share_below(sigmas, limit) == pytest.approx(share_below(kept, limit), abs=off)


def test_a_slice_of_uniform_numbers_has_the_closed_form():
    """u = sigma / (shift - (shift - 1) sigma) is even between those of the limits."""
    shift, low, high = 5.0, 0.875, 1.0
    sigmas = sigma_from_uniform(
        EVEN, Diffusion("uniform", shift=shift, sigma_min=low, sigma_max=high)
    )
    first, last = (limit / (shift - (shift - 1) * limit) for limit in (low, high))
    torch.testing.assert_close(
        sigmas / (shift - (shift - 1) * sigmas), first + (last - first) * EVEN
    )


def test_weights():
    assert (loss_weight(EVEN, Diffusion()) == 1).all()
    torch.testing.assert_close(
        loss_weight(EVEN, Diffusion(weighting="linear", shift=3)), 1 + 3 * EVEN
    )


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (-0.5, 0.7)])
def test_logit_normal_is_that_of_diffusers(mean, std):
    """Which draws normal numbers; ours are quantiles of uniform ones."""
    theirs = compute_density_for_timestep_sampling(
        "logit_normal", 64, mean, std, generator=torch.manual_seed(0)
    )
    u = torch.special.ndtr(torch.randn(64, generator=torch.manual_seed(0)).double())
    ours = sigma_from_uniform(u, Diffusion("logit_normal", mean=mean, std=std, shift=1))
    torch.testing.assert_close(ours.float(), theirs, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scheme", ["sigma_sqrt", "cosmap", "none"])
def test_weights_are_those_of_diffusers(scheme):
    theirs = compute_loss_weighting_for_sd3(scheme, EVEN).float()
    torch.testing.assert_close(loss_weight(EVEN, Diffusion(weighting=scheme)).float(), theirs)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 0.5])
def test_the_bell_is_that_of_diffsynth(shift):
    """Its FlowMatchScheduler.set_timesteps(1000, training=True), as it is written for Wan."""
    sigmas = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    timesteps = sigmas * 1000
    theirs = torch.exp(-2 * ((timesteps - 500) / 1000) ** 2)
    theirs = theirs - theirs.min()
    theirs = theirs * (1000 / theirs.sum())
    ours = loss_weight(sigmas, Diffusion(weighting="bell", shift=shift))
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    mean = loss_weight(
        sigma_from_uniform(EVEN, Diffusion("uniform", shift=shift)),
        Diffusion(weighting="bell", shift=shift),
    )
    assert mean.mean().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(shift=0), "diffusion.shift=0 must be above 0"),
        (dict(std=-1), "diffusion.std=-1 must be above 0"),
        (dict(shift=math.nan), "diffusion.shift=nan must be above 0"),
        (dict(text_dropout=1.1), "diffusion.text_dropout=1.1 must be between 0 and 1"),
        (dict(uniform_share=-0.1), "diffusion.uniform_share=-0.1 must be between 0 and 1"),
        (dict(mode_scale=2), "diffusion.mode_scale=2 must be between -1 and 1.75"),
        (dict(mode_scale=-1.1), "diffusion.mode_scale=-1.1 must be between -1 and 1.75"),
        (dict(sigma_min=-0.1), "must be between 0 and 1, the first below the second"),
        (
            dict(sigma_min=0.5, sigma_max=0.5),
            "must be between 0 and 1, the first below the second",
        ),
        (dict(sigma_max=1000), "must be between 0 and 1, the first below the second"),
        (dict(weighting="sigma_sqrt"), "diffusion.weighting=sigma_sqrt needs sigma_min above 0"),
        (
            dict(sampling="logit_normal", mean=-9, sigma_min=0.9),
            "sampling=logit_normal draws no sigma between these",
        ),
    ],
    ids=str,
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(InputError) as error:
        check_diffusion(Diffusion(**settings))
    assert message in str(error.value)
    with pytest.raises(TypeError):
        Diffusion(timestep_sampling="uniform")


# ------------------------------------------------------------------------------------------------------ what seeds fix


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_rows_depend_on_seed_and_number_alone():
    dataset, again = (Noised(Clips(), Diffusion(), seed=3) for _ in range(2))
    rows = [dataset.row(n) for n in range(6)]
    for n in reversed(range(6)):
        assert_same(again.row(n), rows[n])
    noise = [row["noise"] for row in rows] + [
        Noised(Clips(), Diffusion(), seed=4).row(0)["noise"]
    ]
    noise += [Noised(Clips(), Diffusion(), seed=3, held_out=True).row(0)["noise"]]
    assert all(not torch.equal(noise[i], noise[j]) for i in range(8) for j in range(i))


def test_noise_and_sigma_have_their_distributions():
    rows = [Noised(Clips(), Diffusion(shift=3), seed=0).row(n) for n in range(2000)]
    noise = torch.stack([row["noise"] for row in rows])
    assert noise.mean().abs() < 0.02 and noise.std().item() == pytest.approx(1, abs=0.02)
    sigmas = torch.stack([row["sigma"] for row in rows])
    assert sigmas.dtype == torch.float32  # bf16 would know only 8 bits of a timestep
    assert share_below(sigmas, 0.75) == pytest.approx(0.5, abs=0.05)


def test_text_is_hidden_in_the_right_share():
    """At all sigmas alike."""
    rows = [
        Noised(Clips(), Diffusion(text_dropout=0.3, shift=1), seed=0).row(n) for n in range(1000)
    ]
    assert all((row["text"] == 0).all() or (row["text"] == 1).all() for row in rows)
    hidden = [row["sigma"].item() for row in rows if (row["text"] == 0).all()]
    assert len(hidden) / 1000 == pytest.approx(0.3, abs=0.05)
    assert sum(hidden) / len(hidden) == pytest.approx(0.5, abs=0.06)


def test_what_is_seen_in_place_of_a_hidden_text():
    class WithNegative(Clips):
        def row(self, n: int) -> dict[str, torch.Tensor]:
            return super().row(n) | {"negative": torch.full((3, 5), 7.0)}

    datasets = [
        Noised(clips, Diffusion(text_dropout=0.5), seed=0) for clips in (Clips(), WithNegative())
    ]
    for n in range(20):
        plain, other = (dataset.row(n) for dataset in datasets)
        assert_same(other, plain | {"text": plain["text"].masked_fill(plain["text"] == 0, 7)})
    held_out = Noised(WithNegative(), Diffusion(text_dropout=1), seed=0, held_out=True)
    assert all((held_out.row(n)["text"] == 1).all() for n in range(4))


def test_held_out_rows_show_their_text_and_cover_all_sigmas():
    """Any 40 consecutive rows put 10 in each quartile, give or take two, whatever the settings."""
    dataset = Noised(
        Clips(), Diffusion(shift=5, sigma_max=0.4, text_dropout=1.0), seed=0, held_out=True
    )
    rows = [dataset.row(n) for n in range(60)]
    assert all((row["text"] == 1).all() for row in rows)
    for first in range(20):
        quartiles = [int(4 * row["sigma"]) for row in rows[first : first + 40]]
        assert all(8 <= quartiles.count(q) <= 12 for q in range(4))


# ------------------------------------------------------------------------------------------------------------ the loss


def test_loss_of_known_velocities():
    """The right velocity costs nothing; a constant 0 costs the mean square of noise - data, and more with weights."""
    batch = batch_of(Noised(Clips(), Diffusion(), seed=0), range(5))
    target = batch["noise"] - batch["latents"]
    sigma = batch["sigma"].view(-1, 1, 1, 1, 1)

    def perfect(noisy, timestep, text):
        torch.testing.assert_close(noisy, (1 - sigma) * batch["latents"] + sigma * batch["noise"])
        torch.testing.assert_close(timestep, 1000 * batch["sigma"])
        assert torch.equal(text, batch["text"])
        return target

    def still(noisy, timestep, text):
        return torch.zeros_like(noisy).bfloat16()

    for reduction, size in (("sample", 1), ("element", 16)):
        objective = FlowMatching(Diffusion(reduction=reduction))
        assert objective.count(batch) == 5 * size
        assert objective.loss(perfect, batch) == 0
        torch.testing.assert_close(
            objective.loss(still, batch) / size, target.square().sum() / 16
        )
        linear = FlowMatching(Diffusion(weighting="linear", shift=2, reduction=reduction)).loss(
            still, batch
        )
        torch.testing.assert_close(linear / size, ((1 + 2 * sigma) * target.square()).sum() / 16)


def test_an_image_counts_as_much_as_a_video_or_by_its_size():
    """As in diffusers' training scripts the mean over each sample's elements, then over samples; or over all elements.
    The gradient of a velocity that is one number everywhere: of 8 and of 60 elements."""
    image, video = (
        {"latents": torch.randn(s), "noise": torch.randn(s)} for s in ((2, 1, 2, 2), (2, 5, 2, 3))
    )
    more = {"sigma": torch.rand(1), "text": torch.zeros(1, 1, 1)}
    batches = [
        {key: value[None] for key, value in sample.items()} | more for sample in (image, video)
    ]
    targets = [sample["noise"] - sample["latents"] for sample in (image, video)]
    means = torch.stack([target.mean() for target in targets])
    for reduction, shares in (
        ("sample", torch.tensor([0.5, 0.5])),
        ("element", torch.tensor([8 / 68, 60 / 68])),
    ):
        velocity, objective = (
            torch.zeros((), requires_grad=True),
            FlowMatching(Diffusion(reduction=reduction)),
        )

        def same(noisy, timestep, text, velocity=velocity):
            return velocity.expand_as(noisy)

        loss = sum(objective.loss(same, batch) for batch in batches) / sum(
            map(objective.count, batches)
        )
        torch.testing.assert_close(
            loss, shares @ torch.stack([target.square().mean() for target in targets])
        )
        loss.backward()
        torch.testing.assert_close(velocity.grad, -2 * (shares * means).sum())
        assert logged(objective)["video_tokens"] == 68


@pytest.mark.parametrize("reduction, size", [("sample", 1), ("element", 16)])
def test_loss_by_quartile_of_sigma(reduction, size):
    """Two quartiles seen in two calls; the unweighted error of each, once."""
    objective = FlowMatching(Diffusion(weighting="linear", reduction=reduction), patch_elements=4)
    batch = batch_of(Noised(Clips(), Diffusion(), seed=0), range(4)) | {
        "sigma": torch.tensor([0.3, 0.49, 1.0, 0.26])
    }
    errors = (batch["noise"] - batch["latents"]).square().flatten(1).mean(1)

    def still(noisy, timestep, text):
        return torch.zeros_like(noisy)

    for part in (slice(0, 1), slice(1, 4)):
        objective.loss(still, {key: value[part] for key, value in batch.items()})
    numbers = logged(objective)
    assert numbers.keys() == {"loss_sigma_q2", "loss_sigma_q4", "video_tokens"}
    assert numbers["video_tokens"] == 4 * 16 / 4
    assert numbers["loss_sigma_q2"] == pytest.approx(errors[[0, 1, 3]].mean().item(), rel=1e-5)
    assert numbers["loss_sigma_q4"] == pytest.approx(errors[2].item(), rel=1e-5)
    with torch.no_grad():  # validation has neither weights nor numbers for the log
        torch.testing.assert_close(objective.loss(still, batch), size * errors.sum())
    assert objective.totals is None


def make_model(**overrides) -> Wan:
    torch.manual_seed(0)
    return Wan(model_config("wan2.1-1.3b-tiny", **overrides))


def test_image_to_video_sees_its_condition():
    model = make_model(in_channels=5, out_channels=2, image_dim=6, text_dim=5)
    batch = batch_of(Noised(Clips(), Diffusion(), seed=0), range(2))
    batch |= {"condition": torch.randn(2, 3, 1, 2, 4), "image": torch.randn(2, 4, 6)}
    loss = FlowMatching(Diffusion()).loss(model, batch)
    s = batch["sigma"].view(-1, 1, 1, 1, 1)
    noisy = torch.cat(
        [(1 - s) * batch["latents"] + s * batch["noise"], batch["condition"]], dim=1
    )
    velocity = model(noisy, 1000 * batch["sigma"], batch["text"], batch["image"])
    torch.testing.assert_close(
        loss, (velocity - batch["noise"] + batch["latents"]).square().flatten(1).mean(1).sum()
    )
