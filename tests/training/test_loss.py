"""The fused head and loss against logits materialised and differentiated by autograd."""

from unittest import mock

import pytest
import torch

from minitrain.training import log_probs, loss
from minitrain.training.log_probs import linear_log_probs
from minitrain.training.loss import IGNORE, linear_cross_entropy
from tests.helpers.oracle import Results
from tests.helpers.training import materialised, one_graph


def problem(tokens=37, dim=16, vocab=29, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (1, tokens))
    labels[0, ::5] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize("frozen", [None, "hidden", "weight"])
def test_equals_materialised_logits(monkeypatch, chunk, frozen):
    monkeypatch.setattr(loss, "CHUNK", chunk)
    hidden, weight, labels = problem(dtype=torch.float32)
    inputs = {"hidden": hidden, "weight": weight}
    if frozen:
        inputs[frozen].requires_grad_(False)
    learned = [x for name, x in inputs.items() if name != frozen]
    expected = materialised(hidden, weight, labels) / 7
    ours = linear_cross_entropy(hidden, weight, labels) / 7  # the upstream gradient is not 1
    torch.testing.assert_close(ours, expected)
    for mine, reference in zip(
        torch.autograd.grad(ours, learned), torch.autograd.grad(expected, learned), strict=True
    ):
        torch.testing.assert_close(mine, reference)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels) / 7, expected)


def test_bf16_gradients_are_scaled_in_fp32():
    """By 1 / 3, of which bf16 has 0.334: every gradient below the head would be 0.2 % larger than the head's own."""
    hidden, weight, labels = problem(tokens=200, dtype=torch.bfloat16)
    sums = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), [hidden, weight])
    means = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, labels) / 3, [hidden, weight]
    )
    for mean, total in zip(means, sums, strict=True):
        assert mean.dtype == torch.bfloat16
        ratio = (mean.double() * total.double()).sum() / total.double().square().sum()
        assert ratio.item() == pytest.approx(1 / 3, rel=5e-4)


def test_huge_logits_do_not_overflow():
    hidden, weight, labels = problem(dtype=torch.float32)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    ours, expected = (f(hidden, weight, labels) for f in (linear_cross_entropy, materialised))
    assert torch.isfinite(ours)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        torch.autograd.grad(ours, hidden), torch.autograd.grad(expected, hidden)
    )


def test_nothing_to_predict_is_zero_with_zero_gradients():
    hidden, weight, labels = problem(dtype=torch.float32)
    value = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE))
    assert value == 0
    assert all((g == 0).all() for g in torch.autograd.grad(value, [hidden, weight]))


@pytest.mark.parametrize(
    "function", [linear_cross_entropy, lambda *inputs: -linear_log_probs(*inputs)[0].sum()]
)
def test_bf16_weights_gradient_is_summed_in_fp32(monkeypatch, function):
    """Each chunk adds one part in 512 of what is there already: bf16 sums would lose every one of them."""
    monkeypatch.setattr(loss, "CHUNK", 1)
    tokens, vocab = 600, 4
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(vocab, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)
    (grad,) = torch.autograd.grad(function(hidden, weight, labels), weight)
    torch.testing.assert_close(grad[1].item(), tokens / vocab, rtol=1e-2, atol=0)


@pytest.mark.parametrize("tokens", [64, 512])
def test_memory_does_not_grow_with_tokens_times_vocab(monkeypatch, tokens):
    monkeypatch.setattr(loss, "CHUNK", 32)
    hidden, weight, labels = problem(tokens=tokens, dim=4, vocab=1000, dtype=torch.float32)
    sizes = []
    with Results(lambda tensor: sizes.append(tensor.numel())):
        linear_cross_entropy(hidden, weight, labels).backward()
    assert max(sizes) == 32 * 1000


FUNCTIONS = {
    "loss": linear_cross_entropy,
    "log_probs": lambda *inputs: linear_log_probs(*inputs, 0.7)[0],
    "entropy": lambda *inputs: linear_log_probs(*inputs, 0.7)[1],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bf16_logits_are_computed_with_in_fp32(name):
    """Values are those of these logits in fp32; in gradients, bf16's rounding of logits' and of the results' shows."""
    hidden, weight, labels = problem(dtype=torch.bfloat16)
    logits = (hidden @ weight.T).detach().float().requires_grad_()
    value, *gradients = values_and_gradients(FUNCTIONS[name], hidden, weight, labels)
    expected, *others = values_and_gradients(
        FUNCTIONS[name], logits, torch.eye(len(weight)).requires_grad_(), labels
    )
    torch.testing.assert_close(value, expected)
    if gradients:
        of_logits = others[0][0]
        for mine, right in zip(
            gradients, (of_logits @ weight.float(), of_logits.T @ hidden[0].float()), strict=True
        ):
            assert (mine - right).norm() < 2**-8 * right.norm()


def values_and_gradients(function, hidden, weight, labels):
    out = function(hidden, weight, labels)
    upstream = torch.linspace(0.5, 2, out.numel(), device=out.device).view(out.shape)
    return out, *(
        torch.autograd.grad((out * upstream).sum(), [hidden, weight]) if out.requires_grad else ()
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_compiled_on_cuda_is_one_graph(monkeypatch, name, dtype):
    monkeypatch.setattr(loss, "CHUNK", 32)  # and one of 5 tokens
    inputs = problem(dtype=dtype)
    expected = values_and_gradients(FUNCTIONS[name], *inputs)
    room = log_probs if name != "loss" else loss
    with mock.patch.object(room, "fused", side_effect=one_graph) as traced:
        torch.testing.assert_close(values_and_gradients(FUNCTIONS[name], *inputs), expected)
    assert traced.called


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_on_cuda_equals_cpu(monkeypatch, name, dtype):
    monkeypatch.setattr(loss, "CHUNK", 64)
    hidden, weight, labels = problem(tokens=150, dim=64, vocab=1000, dtype=torch.float32)
    hidden, weight = ((x / 4).detach().to(dtype).requires_grad_() for x in (hidden, weight))
    expected = values_and_gradients(FUNCTIONS[name], hidden.float(), weight.float(), labels)
    inputs = (
        hidden.detach().cuda().requires_grad_(),
        weight.detach().cuda().requires_grad_(),
        labels.cuda(),
    )
    for one, other in zip(values_and_gradients(FUNCTIONS[name], *inputs), expected, strict=True):
        assert (one.cpu() - other).norm() < (
            1e-5 if dtype == torch.float32 else 0.01
        ) * other.norm()


@pytest.mark.parametrize(
    "loss",
    [linear_cross_entropy, lambda *given: linear_log_probs(*given)[0].sum()],
    ids=["sum", "every token"],
)
def test_the_gradient_of_no_tokens_is_zero(loss):
    hidden, weight = torch.empty(0, 8, requires_grad=True), torch.ones(32, 8, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # which also fills new memory with NaN
    try:
        loss(hidden, weight, torch.empty(0, dtype=torch.long)).backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(weight.grad, torch.zeros(32, 8)) and hidden.grad.shape == (0, 8)
