"""Attention out of parts: outputs and gradients of a softmax that is written out, in fp64."""

from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain.models.attention import KeptMasks, Mask, attention, make_mask
from minitrain.models.decoder import Decoder
from minitrain.models.merged_attention import has_cudnn_attention, merged_attention
from minitrain.models.zoo import model_config
from minitrain.parallel.recompute import recompute

CPU = torch.device("cpu")


def written_out(q, k, v, places, sinks):
    """Causal attention of queries at `places` among the keys; a sink is one more column, without a value."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    terms = scores.exp() * (torch.arange(k.shape[2]) <= places[:, None])
    below = terms.sum(-1, keepdim=True) + (0 if sinks is None else sinks[:, None, None].exp())
    return torch.einsum("bhij,bhjd->bhid", terms / below, v)


def check(chunks, count, kv_heads, with_sinks, run, length=48):
    """`run(q, k, v, sinks)` computes the queries of some `chunks` of `count`."""
    random = torch.Generator().manual_seed(0)
    size = length // count
    places = torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks])

    def drawn(*shape):
        return torch.randn(*shape, dtype=torch.double, generator=random).requires_grad_()

    # [batch, seq, heads, head_dim] in memory, as a model has them
    q = drawn(2, len(places), 4, 8)
    k, v = drawn(2, length, kv_heads, 8), drawn(2, length, kv_heads, 8)
    inputs = [q, k, v] + ([drawn(4)] if with_sinks else [])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sinks = inputs[3] if with_sinks else None
    expected = written_out(q, k, v, places, sinks)
    upstream = torch.randn(expected.shape, dtype=torch.double, generator=random)
    found = run(q, k, v, sinks)
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        atol=1e-13,
        rtol=1e-13,
    )


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "chunks, count",
    [((0,), 1), ((1,), 2), ((0, 3), 4), ((1, 2), 4), ((0, 7), 8), ((3, 4), 8), ((0, 2, 5), 6)],
)
def test_parts_equal_a_softmax_written_out(chunks, count, kv_heads, with_sinks):
    check(
        chunks,
        count,
        kv_heads,
        with_sinks,
        lambda q, k, v, sinks: merged_attention(q, k, v, chunks, sinks),
    )


class Kernels(TorchDispatchMode):
    """Note the operators whose names have `attention` in them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "attention" in op.name():
            self.names.append(op.name().removeprefix("minitrain::"))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_takes_the_parts_where_its_mask_has_chunks(with_sinks):
    """Also of one chunk with sinks; a window needs the mask."""
    places = torch.tensor([0, 1, 6, 7])
    masks = {
        "zigzag": (Mask(True, make_mask(8, CPU, q_positions=places).attn_mask, (0, 3)), 3),
        "whole": (make_mask(8, CPU, plain=False), 1),
        "window": (make_mask(8, CPU, window=3, plain=False), 0),
    }
    for name, (mask, parts) in masks.items():
        queries = 4 if name == "zigzag" else 8
        q, k, v = (torch.randn(1, 4, n, 8) for n in (queries, 8, 8))
        with Kernels() as kernels:
            attention(q, k, v, mask, torch.zeros(4) if with_sinks else None)
        assert kernels.names.count("attention_part") == parts, name


@pytest.mark.parametrize(
    "setting, times", [("none", 1), ("attention", 1), ("selective", 1), ("full", 2)]
)
def test_recomputation_saves_the_parts_as_any_attention(setting, times):
    """In GPT-OSS's layers of full attention; those of windows have a mask."""
    model = Decoder(model_config("gpt-oss-20b-tiny", num_layers=2)).train()
    recompute(model.blocks, setting)
    with Kernels() as kernels:
        model(torch.arange(16)[None]).sum().backward()
    assert kernels.names.count("attention_part") == times
    assert kernels.names.count("attention_part_backward") == 1


@pytest.mark.parametrize("with_sinks", [False, True])
def test_values_of_another_width_keep_the_mask(with_sinks):
    """As latent attention has them, for which the library has no kernel."""
    q, k = torch.randn(2, 1, 4, 8, 8, dtype=torch.double)
    v, sinks = torch.randn(1, 4, 8, 6, dtype=torch.double), None
    if with_sinks:
        sinks = torch.randn(4, dtype=torch.double)
    found = attention(q, k, v, make_mask(8, CPU, plain=False), sinks)
    expected = written_out(q, k, v, torch.arange(8), sinks)
    torch.testing.assert_close(found, expected, atol=1e-13, rtol=1e-13)


def test_compiled_parts_are_one_graph_with_the_same_gradients():
    compiled = torch.compile(merged_attention, fullgraph=True, backend="aot_eager")
    check((0, 3), 4, 2, True, lambda q, k, v, sinks: compiled(q, k, v, (0, 3), sinks))


def test_masks_without_documents_are_built_once():
    make = KeptMasks()
    documents = torch.zeros(1, 8, dtype=torch.long)
    with torch.inference_mode():
        first = make(8, CPU, plain=False)
    assert first is make(8, CPU, plain=False)
    assert first is not make(8, CPU, window=3)
    assert make(8, CPU, documents) is not make(8, CPU, documents)
    assert not first.attn_mask.is_inference()
    for length in range(9, 9 + 2 * make.MOST):
        make(length, CPU, plain=False)
    assert len(make.kept) == make.MOST


def test_whoever_switches_cudnn_off_gets_another_kernel(monkeypatch):
    """And whoever wants the same bits each time, which its backward pass has not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for wanted in (False, True):
            torch.backends.cuda.enable_cudnn_sdp(wanted)
            assert has_cudnn_attention() == wanted
        with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: True):
            assert not has_cudnn_attention()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("chunks, count", [(None, 1), ((0,), 1), ((1, 2), 4)])
def test_library_on_cuda(kv_heads, with_sinks, chunks, count):
    """cuDNN, beside fp64, for few key/value heads whose keys have a large mean: some versions were wrong on B200."""
    random = torch.Generator().manual_seed(0)
    length, size = 1024, 1024 // count
    places = torch.cat([torch.arange(c * size, (c + 1) * size) for c in chunks or (0,)])
    q = torch.randn(2, 8, len(places), 128, generator=random)
    k, v = torch.randn(2, 2, kv_heads, length, 128, generator=random)
    k = k + 8 * torch.randn(kv_heads, 1, 128, generator=random)
    sinks = torch.randn(8, generator=random) if with_sinks else None
    there = [
        x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v, sinks) if x is not None
    ]
    exact = [x.detach().cpu().double().requires_grad_() for x in there]
    expected = written_out(*exact[:3], places, exact[3] if with_sinks else None)
    if with_sinks and chunks is None:
        pytest.skip("needs a mask")
    # plain, by scaled_dot_product_attention; or in parts, where nobody reads the mask
    mask = Mask(True) if chunks is None else Mask(True, places, chunks)
    found = attention(*there[:3], mask, there[3] if with_sinks else None)
    upstream = torch.randn(found.shape, generator=random).bfloat16()
    gradients = torch.autograd.grad(found, there, upstream.cuda())
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    for mine, theirs in zip((found, *gradients), (expected, *wanted), strict=True):
        error = (mine.cpu().double() - theirs).norm() / theirs.norm()
        assert error < 2e-2
