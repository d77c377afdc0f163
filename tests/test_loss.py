"""The fused head and loss against logits materialised and differentiated by autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minitrain.training import loss
from minitrain.training.loss import IGNORE, linear_cross_entropy


def problem(tokens=37, dim=16, vocab=29, dtype=torch.float64):
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (1, tokens))
    labels[0, ::5] = IGNORE
    return hidden, weight, labels


def materialised(hidden, weight, labels):
    logits = (hidden @ weight.T).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")


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
    for mine, reference in zip(torch.autograd.grad(ours, learned), torch.autograd.grad(expected, learned), strict=True):
        torch.testing.assert_close(mine, reference)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels) / 7, expected)


def test_huge_logits_do_not_overflow():
    hidden, weight, labels = problem(dtype=torch.float32)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    ours, expected = (f(hidden, weight, labels) for f in (linear_cross_entropy, materialised))
    assert torch.isfinite(ours)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, hidden), torch.autograd.grad(expected, hidden))


def test_nothing_to_predict_is_zero_with_zero_gradients():
    hidden, weight, labels = problem(dtype=torch.float32)
    value = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE))
    assert value == 0
    assert all((g == 0).all() for g in torch.autograd.grad(value, [hidden, weight]))


def test_bf16_weights_gradient_is_summed_in_fp32(monkeypatch):
    """Each chunk adds one part in 512 of what is there already: bf16 sums would lose every one of them."""
    monkeypatch.setattr(loss, "CHUNK", 1)
    tokens, vocab = 600, 4
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(vocab, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)
    (grad,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), weight)
    torch.testing.assert_close(grad[1].item(), tokens / vocab, rtol=1e-2, atol=0)


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("tokens", [64, 512])
def test_memory_does_not_grow_with_tokens_times_vocab(monkeypatch, tokens):
    monkeypatch.setattr(loss, "CHUNK", 32)
    hidden, weight, labels = problem(tokens=tokens, dim=4, vocab=1000, dtype=torch.float32)
    with LargestTensor() as seen:
        linear_cross_entropy(hidden, weight, labels).backward()
    assert seen.largest == 32 * 1000
