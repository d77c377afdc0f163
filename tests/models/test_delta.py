"""Gated DeltaNet against its recurrence, one token at a time, and against transformers' mixers."""

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from minitrain.errors import InputError
from minitrain.models.delta import CHUNK, GatedDeltaNet, Inverse, initialize_parameter, scan
from minitrain.models.mamba import by_group
from minitrain.models.shapes.mixers import DeltaShape
from minitrain.models.zoo import model_config

# heads of a group; widths of keys and of values
BATCH, SEQ, GROUPS, HEADS, KEY, VALUE = 2, 75, 2, 3, 8, 4
PACKED = torch.zeros(BATCH, SEQ, dtype=torch.long)
# at a chunk's start, inside; 1 again
PACKED[0, 16:], PACKED[0, 17:], PACKED[0, 20:], PACKED[0, 48:] = (1, 2, 3, 1)
# the other row stays in one document for many chunks
PACKED[1, 9:] = 4
SHAPE = DeltaShape(GROUPS, KEY, GROUPS * HEADS, VALUE, conv=4)


def random_inputs(seed=0):
    """q, k, v, log_decay, beta of a scan, in fp64: heads that forget soon, and heads that hardly forget."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, BATCH, SEQ, GROUPS, KEY, generator=generator, dtype=torch.double)
    v = torch.randn(BATCH, SEQ, GROUPS, HEADS, VALUE, generator=generator, dtype=torch.double)
    size = torch.rand(BATCH, SEQ, GROUPS, HEADS, generator=generator, dtype=torch.double)
    log_decay = -size * torch.tensor([[1e-3, 1.0, 16.0], [0.03, 0.3, 40.0]])
    beta = torch.rand(BATCH, SEQ, GROUPS, HEADS, generator=generator, dtype=torch.double)
    inputs = q, F.normalize(k, dim=-1), v, log_decay, beta
    return [tensor.requires_grad_() for tensor in inputs]


def recurrence(q, k, v, log_decay, beta, document_ids=None):
    """The definition, one token at a time."""
    batch, length, groups, heads, width = v.shape
    state, out = v.new_zeros(batch, groups, heads, k.shape[-1], width), []
    for t in range(length):
        if document_ids is not None and t:
            same = document_ids[:, t] == document_ids[:, t - 1]
            state = state * same[:, None, None, None, None]
        state = state * log_decay[:, t].exp()[..., None, None]
        held = torch.einsum("zgrkp,zgk->zgrp", state, k[:, t])
        change = beta[:, t, ..., None] * (v[:, t] - held)
        state = state + torch.einsum("zgk,zgrp->zgrkp", k[:, t], change)
        out.append(torch.einsum("zgrkp,zgk->zgrp", state, q[:, t]))
    return torch.stack(out, 1)


@pytest.mark.parametrize("document_ids", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 128])
def test_scan_is_the_recurrence(chunk, document_ids):
    inputs = random_inputs()
    found, expected = scan(*inputs, chunk, document_ids), recurrence(*inputs, document_ids)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(result, inputs, cotangent) for result in (found, expected)]
    for name, ours, theirs in zip(["q", "k", "v", "g", "b"], *gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm(), name


@pytest.mark.parametrize("pieces", [[40, 35], [1, 50, 24], [3] * 25], ids=str)
@torch.no_grad()
def test_pieces_of_a_row_go_on_from_what_earlier_ones_left(pieces):
    """Whether a piece has several chunks of the scan or less than one."""
    inputs = random_inputs()
    state = torch.zeros(BATCH, GROUPS, HEADS, KEY, VALUE, dtype=torch.double)
    rows = zip(*(tensor.split(pieces, dim=1) for tensor in inputs), strict=True)
    found = [scan(*piece, chunk=16, initial=state) for piece in rows]
    torch.testing.assert_close(torch.cat(found, 1), recurrence(*inputs), atol=1e-12, rtol=0)


def test_a_deterministic_scan_adds_up_no_floats_by_cumsum(monkeypatch):
    """CUDA's kernel refuses to."""
    inputs, cumsum = random_inputs(), torch.Tensor.cumsum
    expected = scan(*inputs, 8, PACKED)
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda x, dim: None if x.is_floating_point() else cumsum(x, dim)
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    torch.testing.assert_close(scan(*inputs, 8, PACKED), expected)


def test_low_precision_activations_keep_the_decay_in_full():
    """bf16 in, bf16 out, and no further from the truth than a few roundings of bf16."""
    q, k, v, log_decay, beta = (tensor.detach() for tensor in random_inputs())
    q, k, v = (tensor.bfloat16() for tensor in (q, k, v))
    found = scan(q, k, v, log_decay.float(), beta.float(), 8)
    expected = recurrence(q.double(), k.double(), v.double(), log_decay, beta)
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 2**-7 * expected.norm()


def test_a_state_that_fades_slowly_keeps_its_decay_over_many_chunks():
    """In bf16 a chunk's decay of 0.9995 would be 1, and after 200 chunks a tenth more would be left."""
    length = 200 * 8
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, n, generator=draws) for n in (16, 16, 4))
    q, k, v = (x.bfloat16() for x in (q, F.normalize(k, dim=-1), v[:, :, :, None]))
    # written by the first chunk, and then only kept
    beta = torch.zeros(1, length, 1, 1)
    beta[:, :8] = 0.5
    log_decay = torch.full((1, length, 1, 1), math.log(0.9995) / 8)
    found = scan(q, k, v, log_decay, beta, 8)
    expected = recurrence(*(x.double() for x in (q, k, v, log_decay, beta)))
    late = slice(length // 2, None)
    assert (found - expected)[:, late].norm() <= 2**-7 * expected[:, late].norm()


def test_a_state_that_goes_on_adds_up_in_fp32():
    """300 steps of bf16, each of one token, to an empty place: 40 of them keep less than fp32 does of one."""
    ones = torch.ones(1, 300, 1, 1, dtype=torch.bfloat16)
    state = torch.zeros(1, 1, 1, 1, 1)
    half = torch.full((1, 300, 1, 1), 2.0**-8)
    for t in range(300):
        one = slice(t, t + 1)
        token = (ones[:, one], ones[:, one], ones[:, one, :, :, None])
        scan(*token, torch.zeros(1, 1, 1, 1), half[:, one], 1, initial=state)
    assert state.item() == pytest.approx(1 - (1 - 2.0**-8) ** 300, rel=1e-5)


def test_inverse_where_powers_would_overflow():
    """All keys alike, nothing forgotten: the 32nd power of the matrix has entries of 10^17, its inverse of 1."""
    lower = torch.ones(3, CHUNK, CHUNK).tril(-1).requires_grad_()
    found = Inverse.apply(lower)
    expected = torch.eye(CHUNK) - torch.eye(CHUNK).roll(1, 0).tril(-1)
    assert torch.equal(found, expected.expand(3, -1, -1))
    odd = (torch.rand(2, 37, 37, generator=torch.Generator().manual_seed(0)).double() / 4).tril(
        -1
    )
    assert torch.autograd.gradcheck(Inverse.apply, odd[:, :9, :9].clone().requires_grad_())
    torch.testing.assert_close(Inverse.apply(odd), (odd + torch.eye(37)).inverse())


SIZES = dict(
    hidden_size=20,
    linear_num_key_heads=GROUPS,
    linear_num_value_heads=GROUPS * HEADS,
    linear_key_head_dim=KEY,
    linear_value_head_dim=VALUE,
    num_hidden_layers=1,
    layer_types=["linear_attention"],
)


def mixers(fused):
    """The same random mixer here and in transformers: Qwen3-Next's, which is fused, or Qwen3.5's."""
    torch.manual_seed(0)
    if fused:
        theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**SIZES), 0)
    else:
        theirs = Qwen3_5GatedDeltaNet(Qwen3_5TextConfig(**SIZES), 0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    shape = DeltaShape(GROUPS, KEY, GROUPS * HEADS, VALUE, conv=4, fused=fused)
    ours = GatedDeltaNet(20, shape, norm_eps=1e-6)
    ours.load_state_dict(reordered(dict(theirs.named_parameters())))
    return ours, theirs


def reordered(tensors):
    """Tensors of transformers' mixer with the names and the rows of ours."""
    names = {"A_log": "dynamics.A_log", "dt_bias": "dynamics.dt_bias"}
    parts = {"in_proj_qkv.weight", "conv1d.weight"}
    return {
        names.get(name, name): by_group(t, SHAPE.convolved, GROUPS) if name in parts else t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("fused", [True, False])
def test_mixer_is_that_of_transformers(fused):
    ours, theirs = mixers(fused)
    x = torch.randn(2, 2 * CHUNK + 22, 20, generator=torch.Generator().manual_seed(1))
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    found.backward(cotangent)
    expected.backward(cotangent)
    gradients = reordered({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm(), name


def test_packed_documents_equal_each_alone():
    """Neither state nor convolution crosses from one document to the next."""
    ours, _ = mixers(True)
    x = torch.randn(BATCH, SEQ, 20, generator=torch.Generator().manual_seed(1))
    for row, cuts in zip(range(BATCH), ([16, 1, 3, 28, 27], [9, 66]), strict=True):
        alone = [ours(piece[None])[0] for piece in x[row].split(cuts)]
        torch.testing.assert_close(ours(x, PACKED)[row], torch.cat(alone), atol=2e-5, rtol=0)


def test_initial_values():
    generator = torch.Generator().manual_seed(0)
    heads = torch.empty(1000)
    assert initialize_parameter("dynamics.A_log", heads, generator)
    # uniform between 0.01 and 16
    assert 0.01 <= heads.exp().min() < 0.1 and 15.9 < heads.exp().max() <= 16
    assert abs(heads.exp().mean() - 8) < 0.5
    assert initialize_parameter("dynamics.dt_bias", heads, generator)
    # uniform between -3 and -1, as Mamba-2's
    log_dt = F.softplus(heads).log10()
    assert -3.001 < log_dt.min() < -2.98 and -1.02 < log_dt.max() < -0.999
    taps = torch.empty(1000, 1, 4)
    assert initialize_parameter("conv1d.weight", taps, generator)
    assert 0.49 < taps.abs().max() <= 0.5
    assert initialize_parameter("norm.weight", heads, generator)
    assert (heads == 1).all()
    assert not initialize_parameter("out_proj.weight", torch.empty(3, 3), generator)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(linear_num_key_heads=3), "linear_num_key_heads=3 does not divide linear_num_value"),
        (
            dict(shared_expert_intermediate_size=0),
            "shared_expert_gate=True needs shared_expert_i",
        ),
        (dict(qk_norm_over_heads=True), "is not for norm=rmsnorm1p or attn_output_gate=true"),
        (
            dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8),
            "attn_output_gate=True is not for latent attention",
        ),
    ],
)
def test_wrong_shapes(changes, message):
    with pytest.raises(InputError, match=message):
        model_config("qwen3-next-80b-a3b-tiny", **changes)
