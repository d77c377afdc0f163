"""The mask and the kernels behind it against a softmax over explicitly allowed pairs."""

import pytest
import torch

from minitrain.models.attention import Mask, attention


def brute_force(q, k, v, allowed):
    """One pair at a time; allowed(b, i, j) says whether query i of row b sees key j."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if allowed(b, i, j)]
                scores = torch.stack([q[b, h, i] @ k[b, h // group, j] for j in keys]) * q.shape[-1] ** -0.5
                weights = scores.softmax(0)
                out[b, h, i] = sum(w * v[b, h // group, j] for w, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_brute_force(kv_heads, causal, packed):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 7, 8)
    k, v = torch.randn(2, 2, kv_heads, 7, 8)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9]]) if packed else None

    def allowed(b, i, j):
        return (j <= i or not causal) and (documents is None or documents[b, i] == documents[b, j])

    ours = attention(q, k, v, Mask(causal=causal, documents=documents))
    torch.testing.assert_close(ours, brute_force(q, k, v, allowed), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_flex_attention_equals_dense_mask(causal):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 256, 64, requires_grad=True)
    k, v = (torch.randn(2, 2, 256, 64, requires_grad=True) for _ in range(2))
    documents = torch.arange(256).div(100, rounding_mode="floor").expand(2, -1).contiguous()
    ours = attention(*(x.cuda() for x in (q, k, v)), Mask(causal=causal, documents=documents.cuda()))
    dense = attention(q, k, v, Mask(causal=causal, documents=documents))
    torch.testing.assert_close(ours.cpu(), dense, atol=2e-3, rtol=2e-3)
    upstream = torch.randn_like(dense)
    for mine, reference in zip(
        torch.autograd.grad(ours, (q, k, v), upstream.cuda()), torch.autograd.grad(dense, (q, k, v), upstream), strict=True
    ):
        assert (mine - reference).norm() / reference.norm() < 2e-3
