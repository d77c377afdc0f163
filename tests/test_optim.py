"""Schedules at their corners, and clipping against torch's own."""

import pytest
import torch

from minitrain.config import Optim
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.training.optim import clip_gradients, learning_rate, make_optimizer


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.5, 1, 1, 0.1 + 0.9 * 0.5 * (1 + 0.5**0.5), 0.55, 0.1 + 0.9 * 0.5 * (1 - 0.5**0.5), 0.1]),
    ],
)
def test_schedule(schedule, expected):
    optim = Optim(lr=1.0, warmup=2, schedule=schedule, final_lr=0.1)
    assert [learning_rate(step, 7, optim) for step in range(7)] == pytest.approx(expected)


def test_a_run_of_warm_up_only_and_one_step():
    assert learning_rate(0, 1, Optim(lr=1.0, schedule="cosine")) == 1.0
    assert [learning_rate(s, 2, Optim(lr=1.0, warmup=2, schedule="linear")) for s in range(2)] == [0.5, 1.0]


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e9])
def test_clipping_equals_torch(max_norm):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (2, 5)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = clip_gradients(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm if max_norm is not None else float("inf"))
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_only_matrices_decay():
    with torch.device("meta"):
        model = Decoder(model_config("qwen2.5-7b-tiny"))
    decayed, rest = make_optimizer(model, Optim(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(name.endswith("_proj.weight") or "embed" in name or "lm_head" in name
               for name in (names[id(p)] for p in decayed["params"]))  # fmt: skip
    assert {names[id(p)].split(".")[-1] for p in rest["params"]} == {"weight", "bias"}
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_sgd_is_plain_gradient_descent():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    model = torch.nn.Module()
    model.weight = parameter
    optimizer = make_optimizer(model, Optim(name="sgd", lr=0.5, weight_decay=0.0))
    parameter.grad = torch.full((2, 2), 0.5)
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((2, 2), 0.75))
