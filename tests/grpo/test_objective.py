"""Every formula against loops over single tokens, exact expectations, autograd through full logits, and TRL."""

import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from minitrain.grpo import objective
from minitrain.grpo.advantages import advantages, has_signal
from minitrain.grpo.objective import PolicyGradient, importance_weights, kl_estimate, surrogate
from minitrain.run.config.config_yaml import read_yaml
from minitrain.run.config.load import from_dict
from minitrain.settings import GRPO
from minitrain.training import loss
from minitrain.training.log_probs import linear_log_probs
from minitrain.training.loss import IGNORE
from tests.helpers.training import logged

LENGTHS = [[3, 5], [7]]  # response tokens of the sequences in each packed row
PROMPT, SEQ = 2, 14


def problem(seed=0, spread=0.5):
    """A packed micro-batch and log-probabilities that differ enough for every branch of every formula to be taken."""
    generator = torch.Generator().manual_seed(seed)
    batch = {name: torch.zeros(2, SEQ) for name in ("advantages", "weights", "starts")}
    batch |= {
        "labels": torch.full((2, SEQ), IGNORE),
        "document_ids": torch.full((2, SEQ), SEQ - 1),
    }
    for row, lengths in enumerate(LENGTHS):
        place = 0
        for number, length in enumerate(lengths):
            response = slice(place + PROMPT - 1, place + PROMPT - 1 + length)
            batch["document_ids"][row, place : place + PROMPT + length - 1] = number
            batch["labels"][row, response] = torch.randint(9, (length,), generator=generator)
            batch["advantages"][row, response] = torch.randn((), generator=generator)
            batch["starts"][row, response.start] = 1
            place += PROMPT + length - 1
    log_probs = -torch.rand(2, SEQ, generator=generator) * 3
    for name in ("old", "sampled", "reference"):
        batch[name] = log_probs + spread * torch.randn(2, SEQ, generator=generator)
    return batch, log_probs


def sequences(batch):
    """(row, places of the labels) of each sequence."""
    for row, lengths in enumerate(LENGTHS):
        for number, _ in enumerate(lengths):
            here = (batch["document_ids"][row] == number) & (batch["labels"][row] != IGNORE)
            yield row, here.nonzero().flatten().tolist()


def by_hand(s, batch, log_probs):
    """The sum of the losses and what to divide it by, one number after the other; only log_probs may have gradients."""
    total, count, longest = 0.0, 0, 9
    for row, places in sequences(batch):
        old, sampled, reference = (
            [batch[name][row, t].item() for t in places]
            for name in ("old", "sampled", "reference")
        )
        current = [log_probs[row, t] for t in places]
        n = len(places)
        log_ratios = [c - o for c, o in zip(current, old, strict=True)]
        if s.ratio == "sequence":
            log_ratios = [sum(log_ratios) / n] * n
        geometric = math.exp(sum(o - d for o, d in zip(old, sampled, strict=True)) / n)
        value = 0.0
        for i, t in enumerate(places):
            a, r = batch["advantages"][row, t].item(), log_ratios[i].exp()
            r_clipped = r.clamp(1 - s.clip_low, 1 + s.clip_high)
            if s.surrogate == "reinforce":
                term = -a * current[i]
            elif s.surrogate == "cispo":
                term = -r_clipped.item() * a * current[i]
            else:
                term = -min(r * a, r_clipped * a)
                if s.dual_clip and a < 0:
                    term = min(term, torch.tensor(-s.dual_clip * a))
            if s.kl:
                g, moved = reference[i] - current[i], (current[i] - old[i]).exp()
                k = {
                    "k1": -g * moved,
                    "k2": g * g / 2 * moved.item(),
                    "k3": (g.exp() - 1 - g) * moved,
                }[s.kl_estimator]
                term = term + s.kl * k
            w = math.exp(old[i] - sampled[i])
            if s.importance == "none":
                w = 1.0
            elif s.importance == "truncate":
                w = min(max(w, s.importance_low), s.importance_high)
            elif (
                not s.importance_low
                <= (w if s.importance == "mask" else geometric)
                <= s.importance_high
            ):
                w = 0.0
            value = value + w * term
        total = total + (value / n if s.aggregation == "sequence" else value)
        count += {"token": n, "sequence": 1, "constant": longest}[s.aggregation]
    return total, count


CHOICES = [
    {"baseline": "group", "aggregation": "sequence", "kl": 0.04},
    {"aggregation": "constant"},
    {"surrogate": "reinforce"},
    {"clip_high": 0.28},
    {"dual_clip": 1.5},
    {"ratio": "sequence", "aggregation": "sequence", "clip_low": 3e-2, "clip_high": 4e-2},
    {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
    {"surrogate": "cispo", "ratio": "sequence", "clip_high": 0.1},
    *({"kl": 0.3, "kl_estimator": kind} for kind in ("k1", "k2", "k3")),
    {"importance": "truncate", "importance_high": 1.2},
    {"importance": "truncate", "importance_low": 0.9, "importance_high": 1.2, "kl": 0.1},
    {"importance": "mask", "importance_low": 0.5, "importance_high": 1.5},
    {"importance": "sequence-mask", "importance_low": 0.8, "importance_high": 1.2},
]


def ours(settings, batch, log_probs):
    """The objective's loss sum and count, with `log_probs` in place of a model's."""
    objective = PolicyGradient(settings, temperature=1.0, longest=9)
    per_sequence = settings.aggregation == "sequence"
    batch = batch | {"weights": torch.zeros(2, SEQ)}
    for row, places in sequences(batch):
        batch["weights"][row, places] = 1 / len(places) if per_sequence else 1.0
    with mock.patch(
        "minitrain.grpo.objective.linear_log_probs", return_value=(log_probs, torch.ones(2, SEQ))
    ):
        return (
            objective.head(batch, None, None, batch["labels"]),
            objective.count(batch),
            objective,
        )


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_equals_a_loop_over_tokens(choice, seed):
    settings = GRPO(**choice)
    batch, log_probs = problem(seed)
    log_probs.requires_grad_()
    expected, count = by_hand(settings, batch, log_probs)
    actual, terms, _ = ours(settings, batch, log_probs)
    assert terms == count
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(actual, log_probs),
        torch.autograd.grad(expected, log_probs),
        rtol=1e-5,
        atol=1e-6,
    )


def test_without_old_the_ratio_is_one_but_has_a_gradient():
    batch, log_probs = problem()
    log_probs.requires_grad_()
    settings = GRPO(dual_clip=3.0, kl=0.1, importance="truncate")
    explicit = ours(settings, batch | {"old": log_probs.detach()}, log_probs)[0]
    implicit = ours(settings, {k: v for k, v in batch.items() if k != "old"}, log_probs)[0]
    assert torch.equal(explicit, implicit)
    gradients = [torch.autograd.grad(x, log_probs)[0] for x in (explicit, implicit)]
    assert torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize("importance", ["mask", "sequence-mask"])
def test_bounds_of_masks_belong_to_what_is_kept(importance):
    """A sampler that is the trainer gives exactly 1."""
    settings = GRPO(importance=importance, importance_low=1.0, importance_high=1.0)
    log_probs = torch.randn(2, 5)
    assert torch.equal(
        importance_weights(settings, log_probs, log_probs, lambda x: x), torch.ones(2, 5)
    )


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("far", [-200.0, 200.0])
def test_ratios_beyond_fp32_stay_numbers(choice, far):
    """exp(200) is infinite in fp32, and 0 times its derivative no number: loss, gradients and what is logged are."""
    batch, log_probs = problem()
    batch |= {
        "old": log_probs - far,
        "sampled": log_probs - 2 * far,
        "reference": log_probs + far,
    }
    log_probs.requires_grad_()
    actual, _, objective = ours(GRPO(**choice), batch, log_probs)
    assert actual.isfinite() and torch.autograd.grad(actual, log_probs)[0].isfinite().all()
    assert all(map(math.isfinite, logged(objective).values()))


# ------------------------------------------------------------------------------------------- against expectations


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("moved", [0.0, 0.3])
def test_expected_gradient_is_that_of_the_divergence(kind, moved):
    """Summed over all tokens of a small vocabulary, each as often as the policy that drew it says."""
    torch.manual_seed(0)
    logits, reference = (
        torch.randn(7, dtype=torch.float64, requires_grad=True),
        torch.randn(7).double().log_softmax(-1),
    )
    log_probs = logits.log_softmax(-1)
    old = (logits.detach() + moved * torch.randn(7)).log_softmax(-1)
    expectation = (old.exp() * kl_estimate(kind, log_probs, reference, old)).sum()
    divergence = (log_probs.exp() * (log_probs - reference)).sum()
    gradients = [
        torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (expectation, divergence)
    ]
    torch.testing.assert_close(*gradients)
    if kind != "k2":
        torch.testing.assert_close(expectation, divergence)


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_expected_update_is_the_policy_gradient(baseline):
    """All groups of 3 samples of a 4-token policy: leaving the sample out is unbiased, the group's mean gives 2/3."""
    torch.manual_seed(0)
    logits, rewards = (
        torch.randn(4, dtype=torch.float64, requires_grad=True),
        torch.randn(4, dtype=torch.float64),
    )
    probabilities = logits.softmax(-1)
    exact = torch.autograd.grad((probabilities * rewards).sum(), logits, retain_graph=True)[0]
    total = torch.zeros(4, dtype=torch.float64)
    for group in itertools.product(range(4), repeat=3):
        index = torch.tensor(group)
        a = advantages(rewards[index][None], baseline, std_scaling=False)[0]
        objective = (a * logits.log_softmax(-1)[index]).mean()
        total += (
            probabilities[index].prod().item()
            * torch.autograd.grad(objective, logits, retain_graph=True)[0]
        )
    torch.testing.assert_close(total, exact * (1 if baseline == "leave_one_out" else 2 / 3))


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
@pytest.mark.parametrize("std_scaling", [True, False])
def test_advantages_by_hand(baseline, std_scaling):
    rewards = [[1.0, 0.0, 0.0, 0.5], [0.1, 0.1, 0.1, 0.1], [0.0, 0.0, 0.0, 1.0]]
    result = advantages(torch.tensor(rewards), baseline, std_scaling)
    for row, group in enumerate(rewards):
        mean = sum(group) / 4
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / 3)
        for i, reward in enumerate(group):
            others = [r for j, r in enumerate(group) if j != i]
            expected = reward - (mean if baseline == "group" else sum(others) / 3)
            assert result[row, i].item() == pytest.approx(
                expected / (std + 1e-6) if std_scaling and std else expected, abs=1e-7
            )
    assert has_signal(torch.tensor(rewards)).tolist() == [True, False, True]
    assert result.dtype == torch.float64 and result[1].tolist() == [0.0] * 4


@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_rewards_that_are_all_alike_teach_nothing(baseline):
    """Not even what the rounding of their mean would: 0.1 + 0.1 + 0.1 is not 0.3."""
    alike = torch.full((1, 3), 0.1, dtype=torch.float64)
    assert alike.mean() != 0.1 and advantages(alike, baseline, std_scaling=True).tolist() == [
        [0.0] * 3
    ]


# ------------------------------------------------------------------------------------------------------- what is logged


def test_clipping_is_on_the_side_to_which_the_advantage_pushes():
    """Without an advantage, as in a group without a signal, nothing pushes."""
    # ratios 0.74 and 1.35, within 0.8 and 1.2 lies 1
    moved = torch.tensor([-0.3, 0.3]).expand(3, 2)
    _, clipped = surrogate(GRPO(), moved, moved, torch.tensor([[-1.0], [0.0], [1.0]]))
    assert clipped.tolist() == [[True, False], [False, False], [False, True]]


@pytest.mark.parametrize(
    "settings, counted",
    [
        ({}, 2),
        ({"clip_low": 0.5, "clip_high": 0.7}, 1),
        ({"dual_clip": 3.0}, 3),
        ({"surrogate": "cispo"}, 5),
        ({"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}, 1),
        ({"surrogate": "reinforce"}, 0),
    ],
)
def test_a_token_counts_as_clipped_where_the_limits_change_its_gradient(settings, counted):
    """Which without limits is -r A, and -A for reinforce; by autograd."""
    settings = GRPO(**settings)
    ratios = torch.tensor([1.65, 0.4, 1.65, 0.4, 7.39, 1.1, 0.9, 7.39], dtype=torch.float64)
    pushes = torch.tensor([1.0, 1, -1, -1, -1, 1, -1, 0], dtype=torch.float64)
    log_probs = ratios.log().requires_grad_()
    losses, clipped = surrogate(settings, log_probs, log_probs, pushes)
    losses.sum().backward()
    free = -pushes * (1 if settings.surrogate == "reinforce" else ratios)
    changed = ~torch.isclose(log_probs.grad, free, rtol=1e-9, atol=0.0)
    assert clipped.tolist() == changed.tolist() and changed.sum() == counted


def test_numbers_are_means_over_response_tokens():
    batch, log_probs = problem()
    settings = GRPO(kl=0.1, importance="mask", importance_low=0.7, importance_high=1.5)
    *_, objective = ours(settings, batch, log_probs)
    first = objective.totals
    with torch.no_grad():  # a second micro-batch adds up with the first
        objective.add(
            {key: torch.zeros(2, SEQ) for key in first if key != "tokens"},
            batch["labels"] != IGNORE,
        )
    places = [(row, t) for row, each in sequences(batch) for t in each]
    numbers = logged(objective)

    def mean(function):
        return (
            sum(function(*(x[row, t].item() for x in columns)) for row, t in places)
            / len(places)
            / 2
        )

    columns = [log_probs, batch["old"], batch["sampled"], batch["reference"], batch["advantages"]]
    expected = {
        "entropy": mean(lambda *_: 1.0),
        "clip_fraction": mean(
            lambda c, o, g, f, a: math.exp(c - o) < 0.8 if a < 0 else math.exp(c - o) > 1.2
        ),
        "kl": mean(lambda c, o, g, f, a: math.exp(f - c) - 1 - f + c),
        "importance": mean(
            lambda c, o, g, f, a: math.exp(o - g) if 0.7 <= math.exp(o - g) <= 1.5 else 0
        ),
        "masked": mean(lambda c, o, g, f, a: not 0.7 <= math.exp(o - g) <= 1.5),
        "token_mult_prob_error": mean(lambda c, o, g, f, a: math.exp(abs(o - g))),
        "generation_kl_error": mean(lambda c, o, g, f, a: math.exp(o - g) - 1 - o + g),
    }
    assert numbers == pytest.approx(expected, rel=1e-5)
    # each step starts anew, with no tokens
    assert all(map(math.isnan, logged(objective).values()))
    del batch["reference"]  # without one, how far the step has moved
    *_, objective = ours(GRPO(), batch, log_probs)
    moved = 2 * mean(lambda c, o, *_: math.exp(o - c) - 1 - o + c)
    assert logged(objective)["kl"] == pytest.approx(moved, rel=1e-5)


# -------------------------------------------------------------------------------------------------------- against TRL

TRL = {
    "grpo": ({"aggregation": "sequence"}, {"loss_type": "grpo"}),
    "dapo": ({"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": ({"aggregation": "constant"}, {"loss_type": "dr_grpo"}),
    "gspo": (
        {"ratio": "sequence", "aggregation": "sequence", "clip_low": 3e-2, "clip_high": 4e-2},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-2,
            "epsilon_high": 4e-2,
        },
    ),
    "cispo": (
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.3},
        {"loss_type": "cispo", "epsilon_high": 1.3},
    ),
    "dual_clip": ({"dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "kl": ({"kl": 0.3, "aggregation": "sequence"}, {"loss_type": "grpo", "beta": 0.3}),
    "importance": (
        {"importance": "truncate", "importance_high": 1.2},
        {"loss_type": "dapo", "vllm_importance_sampling_mode": "token_truncate"},
    ),
}


def trl_loss(options, batch, log_probs):
    """TRL's own GRPOTrainer._compute_loss on the same sequences, unpacked and padded on the right."""
    from trl import GRPOTrainer  # takes seconds to import

    rows = list(sequences(batch))
    width = max(len(places) for _, places in rows)

    def padded(x):
        return torch.stack(
            [F.pad(x[row, places], (0, width - len(places))) for row, places in rows]
        )

    current, valid = padded(log_probs), padded(torch.ones(2, SEQ))
    inputs = {
        "prompt_ids": torch.zeros(len(rows), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(rows), 1),
        "completion_ids": padded(batch["labels"]),
        "completion_mask": valid,
        "advantages": padded(batch["advantages"])[:, 0],
        "old_per_token_logps": padded(batch["old"]),
        "ref_per_token_logps": padded(batch["reference"]),
        "num_items_in_batch": valid.sum(),
        "importance_sampling_ratio": (padded(batch["old"]) - padded(batch["sampled"]))
        .exp()
        .clamp(max=1.2),
    }
    trainer = mock.MagicMock()
    defaults = {
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "importance_sampling_level": "token",
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "max_completion_length": 9,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "use_vllm": "vllm_importance_sampling_mode" in options,
        "vllm_importance_sampling_correction": True,
    }
    for name, value in (defaults | options).items():
        setattr(trainer, name, value)
    # TRL drops the score-function part of the divergence's gradient unless asked
    trainer.args = SimpleNamespace(
        delta=options.get("delta"), use_bias_correction_kl=True, steps_per_generation=1
    )
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda x: x
    trainer.accelerator.reduce = lambda x, reduction: x
    trainer._get_per_token_logps_and_entropies.return_value = (
        current,
        torch.ones_like(current),
        None,
    )
    return GRPOTrainer._compute_loss(trainer, mock.MagicMock(), inputs)


@pytest.mark.parametrize("method", TRL)
def test_equals_trl(method):
    choice, options = TRL[method]
    settings = replace(GRPO(), **choice)
    batch, log_probs = problem()
    log_probs.requires_grad_()
    total, count, _ = ours(settings, batch, log_probs)
    theirs = trl_loss(options, batch, log_probs)
    torch.testing.assert_close(total / count, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(total / count, log_probs), torch.autograd.grad(theirs, log_probs)
    )


# ---------------------------------------------------------------------------------------- log-probabilities, entropy


def materialised(hidden, weight, labels, temperature):
    distribution = (hidden @ weight.T / temperature).log_softmax(-1)
    valid = labels != IGNORE
    chosen = distribution.gather(-1, (labels * valid)[..., None])[..., 0] * valid
    return chosen, -(distribution.exp() * distribution).sum(-1) * valid


@pytest.mark.parametrize("chunk", [1, 8, 1000])
@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
def test_log_probs_equal_materialised_logits(monkeypatch, chunk, frozen):
    monkeypatch.setattr(loss, "CHUNK", chunk)
    torch.manual_seed(0)
    inputs = {
        "hidden": torch.randn(2, 10, 16, requires_grad=True),
        "weight": torch.randn(29, 16, requires_grad=True),
    }
    labels = torch.randint(29, (2, 10))
    labels[:, ::5] = IGNORE
    if frozen:
        inputs[frozen].requires_grad_(False)
    learned = [x for name, x in inputs.items() if name != frozen]
    upstream = torch.randn(2, 10)
    results = [
        function(*inputs.values(), labels, 0.7) for function in (linear_log_probs, materialised)
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert not results[0][1].requires_grad
    gradients = [
        torch.autograd.grad((upstream * log_probs).sum(), learned) for log_probs, _ in results
    ]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_the_defaults_are_a_method_of_the_table():
    """And every row of it is made of settings that there are."""
    table = objective.__doc__.partition("settings\n")[2].partition("\n\n")[0]
    rows = [row.split() for row in re.split(r"\n(?=    \S)", table)]
    methods = {}
    for row in rows:
        named = dict(word.split("=") for word in row if "=" in word and ")" not in word)
        methods[row[0]] = read_yaml(
            "\n".join(f"{key}: {value}" for key, value in named.items()), "the table"
        )
    tree = {"task": "grpo", "rollout": {"max_tokens": 8192}}
    made = {
        method: from_dict(tree | {"grpo": settings}).grpo for method, settings in methods.items()
    }
    assert made["NeMo"] == GRPO() and len(rows) == len(made) == 10
    assert {"baseline", "std_scaling", "aggregation", "clip_low", "clip_high"} == set(
        methods["NeMo"]
    )
    assert not any(other == GRPO() for method, other in made.items() if method != "NeMo")
