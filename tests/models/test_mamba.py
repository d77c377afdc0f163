"""The Mamba-2 mixer against the recurrence, one token at a time, and against transformers' mixer."""

import pytest
import torch
import torch.nn.functional as F
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from minitrain.errors import InputError
from minitrain.models.decoder import Block, Decoder
from minitrain.models.mamba import (
    GroupedRMSNorm,
    Mamba2,
    by_group,
    by_part,
    causal_conv,
    initialize_parameter,
    scan,
)
from minitrain.models.shapes.mixers import MambaShape
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.settings import Optim
from minitrain.training.optim import make_optimizer

BATCH, SEQ, GROUPS, HEADS, WIDTH, STATE = 2, 75, 2, 3, 4, 8  # heads of a group; their width
SHAPE = MambaShape(heads=6, head_dim=4, groups=2, state=8, conv=4, chunk=16)
PACKED = torch.zeros(BATCH, SEQ, dtype=torch.long)
# at a chunk's start, inside; 1 again
PACKED[0, 16:], PACKED[0, 17:], PACKED[0, 20:], PACKED[0, 48:] = (1, 2, 3, 1)
PACKED[1, 9:] = 4  # the other row stays in one document for many chunks


def random_inputs(seed=0):
    """x, dt, a, d, b, c of a scan: heads that forget within a few tokens and heads that hardly forget."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BATCH, SEQ, GROUPS, HEADS, WIDTH, generator=generator)
    b, c = torch.randn(2, BATCH, SEQ, GROUPS, STATE, generator=generator)
    dt = torch.rand(BATCH, SEQ, GROUPS, HEADS, generator=generator) * 0.2 + 0.001
    a = -torch.tensor([[0.02, 1.0, 16.0], [0.3, 4.0, 40.0]])
    d = torch.randn(GROUPS, HEADS, generator=generator)
    return [tensor.requires_grad_() for tensor in (x, dt, a, d, b, c)]


def recurrence(x, dt, a, d, b, c, document_ids=None):
    """The definition, one token at a time."""
    state, out = x.new_zeros(BATCH, GROUPS, HEADS, WIDTH, STATE), []
    for t in range(SEQ):
        if document_ids is not None and t:
            state = (
                state * (document_ids[:, t] == document_ids[:, t - 1])[:, None, None, None, None]
            )
        state = state * torch.exp(dt[:, t] * a)[..., None, None]
        state = state + torch.einsum("zgr,zgrp,zgn->zgrpn", dt[:, t], x[:, t], b[:, t])
        out.append(torch.einsum("zgrpn,zgn->zgrp", state, c[:, t]) + x[:, t] * d[..., None])
    return torch.stack(out, 1)


@pytest.mark.parametrize("document_ids", [None, PACKED], ids=["one", "packed"])
@pytest.mark.parametrize("chunk", [1, 5, 16, 128])
def test_scan_is_the_recurrence(chunk, document_ids):
    inputs = random_inputs()
    found, expected = scan(*inputs, chunk, document_ids), recurrence(*inputs, document_ids)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad(result, inputs, cotangent) for result in (found, expected)]
    for name, ours, theirs in zip(["x", "dt", "a", "d", "b", "c"], *gradients, strict=True):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm(), name


def test_a_deterministic_scan_adds_up_no_floats_by_cumsum(monkeypatch):
    """CUDA's kernel refuses to."""
    inputs, cumsum = random_inputs(), torch.Tensor.cumsum
    initial = torch.randn(
        BATCH, GROUPS, HEADS, WIDTH, STATE, generator=torch.Generator().manual_seed(1)
    )
    states = [initial.clone(), initial.clone()]
    expected = [scan(*inputs, 8, PACKED), scan(*inputs, 8, initial=states[0])]
    monkeypatch.setattr(
        torch.Tensor, "cumsum", lambda x, dim: None if x.is_floating_point() else cumsum(x, dim)
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    found = [scan(*inputs, 8, PACKED), scan(*inputs, 8, initial=states[1])]
    torch.testing.assert_close([*found, states[1]], [*expected, states[0]])


def test_decay_stays_exact_after_much_of_it():
    """A head that forgot 50,000 e-folds ago still remembers exactly since: sums from the row's start would not do."""
    x, dt, a, d, b, c = (tensor.detach() for tensor in random_inputs())
    dt[:, :40] = 1000.0
    a = torch.full_like(a, -1.25)
    found = scan(x, dt, a, d, b, c, 8)
    expected = recurrence(*(tensor.double() for tensor in (x, dt, a, d, b, c)))
    torch.testing.assert_close(found[:, 48:].double(), expected[:, 48:], atol=1e-4, rtol=1e-4)


def test_low_precision_activations_keep_the_decay_in_full():
    """bf16 in, bf16 out, and no further from the truth than a few roundings of bf16."""
    x, dt, a, d, b, c = (tensor.detach() for tensor in random_inputs())
    x, b, c = (tensor.bfloat16() for tensor in (x, b, c))
    found, expected = (
        scan(x, dt, a, d, b, c, 16),
        recurrence(x.float(), dt, a, d, b.float(), c.float()),
    )
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 2**-7 * expected.norm()


def test_a_state_adds_up_in_fp32():
    """From bf16, which has no odd numbers above 256: 40 chunks of 7 ones, none of which is forgotten."""
    ones, state = torch.ones(1, 280, 1, 1, dtype=torch.bfloat16), torch.zeros(1, 1, 1, 1, 1)
    scan(
        ones[..., None],
        ones.float(),
        torch.full((1, 1), -1e-12),
        torch.zeros(1, 1),
        ones,
        ones,
        7,
        initial=state,
    )
    assert state.item() == 280


def test_a_gated_norm_is_rounded_once():
    """bf16 has 8 digits, so rounding to the nearest is off by 2^-8 at most."""
    norm, (x, z) = GroupedRMSNorm(32, eps=1e-5), torch.randn(2, 3, 40, 2, 16).bfloat16()
    torch.nn.init.normal_(norm.weight, 1, 0.1)
    gated = x.double() * F.silu(z.double())
    exact = (
        gated
        / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        * norm.weight.double().view(2, 16)
    )
    assert ((norm(x, z) - exact) / exact).abs().max() < 1.001 * 2**-8


@pytest.mark.parametrize("taps", [1, 4])
def test_convolution_is_torchs(taps):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 11, 2, 3, generator=generator)
    weight, bias = (
        torch.randn(6, 1, taps, generator=generator),
        torch.randn(6, generator=generator),
    )
    rows = x.flatten(2).transpose(1, 2)  # [batch, channels, seq]
    expected = (
        F.conv1d(F.pad(rows, (taps - 1, 0)), weight, bias, groups=6)
        .transpose(1, 2)
        .unflatten(2, (2, 3))
    )
    by_groups = causal_conv(x, weight.unflatten(0, (2, 3)), bias.view(2, 3))
    torch.testing.assert_close(by_groups, expected)


def test_orders_of_rows():
    """Two groups of z (4 rows), x (4) and dt (2): written out."""
    rows = torch.tensor([10, 11, 20, 21, 12, 13, 22, 23, 15, 25])  # tens: the group
    expected = torch.tensor([10, 11, 12, 13, 15, 20, 21, 22, 23, 25])
    assert torch.equal(by_group(rows, [4, 4, 2], 2), expected)
    assert torch.equal(by_part(expected, [4, 4, 2], 2), rows)


def mixers(dt_min=0.0):
    """The same random mixer here and in transformers."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        hidden_size=20,
        mamba_num_heads=6,
        mamba_head_dim=4,
        n_groups=2,
        ssm_state_size=8,
        conv_kernel=4,
        chunk_size=32,
        time_step_min=dt_min,
        layers_block_type=["linear_attention"],
    )
    theirs = NemotronHMamba2Mixer(config, layer_idx=0).train()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    shape = MambaShape(6, 4, 2, 8, 4, 16, dt_min)
    ours = Mamba2(20, shape, norm_eps=config.layer_norm_epsilon)
    ours.load_state_dict(reordered(dict(theirs.named_parameters())))
    return ours, theirs


def reordered(tensors):
    """Tensors of transformers' mixer with the names and the rows of ours."""
    parts = {
        "in_proj.weight": SHAPE.projected,
        "conv1d.weight": SHAPE.convolved,
        "conv1d.bias": SHAPE.convolved,
    }
    tensors = {
        name: by_group(t, parts[name], 2) if name in parts else t for name, t in tensors.items()
    }
    return {
        f"dynamics.{name}" if name in ("A_log", "D", "dt_bias") else name: t
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("pieces", [[40, 35], [1, 50, 24], [3] * 25], ids=str)
@torch.no_grad()
def test_pieces_of_a_row_go_on_from_what_earlier_ones_left(pieces):
    """Whether a piece has several chunks of the scan or less than one; heads hardly forget."""
    mixer, _ = mixers()
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(BATCH, SEQ, GROUPS, HEADS * WIDTH + 2 * STATE, generator=generator)
    dt = torch.randn(BATCH, SEQ, GROUPS, HEADS, generator=generator) - 5
    state = (
        mixed.new_zeros(BATCH, 3, *mixed.shape[2:]),
        mixed.new_zeros(BATCH, GROUPS, HEADS, WIDTH, STATE),
    )
    rows = zip(mixed.split(pieces, dim=1), dt.split(pieces, dim=1), strict=True)
    found = torch.cat([mixer.mix(*piece, state=state) for piece in rows], dim=1)
    torch.testing.assert_close(found, mixer.mix(mixed, dt), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dt_min", [0.0, 0.6])
def test_mixer_is_that_of_transformers(dt_min):
    ours, theirs = mixers(dt_min)
    x = torch.randn(2, 50, 20, generator=torch.Generator().manual_seed(1))
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    found.backward(cotangent)
    expected.backward(cotangent)
    gradients = reordered({name: parameter.grad for name, parameter in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[name]).norm() <= 1e-4 * gradients[name].norm(), name


def test_least_dt_matters():
    x = torch.randn(1, 30, 20, generator=torch.Generator().manual_seed(1))
    assert (mixers(0.6)[0](x) - mixers()[0](x)).norm() > 0.01 * mixers()[0](x).norm()


def test_packed_documents_equal_each_alone():
    """Neither state nor convolution crosses from one document to the next."""
    ours, _ = mixers()
    x = torch.randn(BATCH, SEQ, 20, generator=torch.Generator().manual_seed(1))
    for row, cuts in zip(range(BATCH), ([16, 1, 3, 28, 27], [9, 66]), strict=True):
        alone = [ours(piece[None])[0] for piece in x[row].split(cuts)]
        torch.testing.assert_close(ours(x, PACKED)[row], torch.cat(alone), atol=2e-5, rtol=0)


def test_initial_values():
    generator = torch.Generator().manual_seed(0)
    heads = torch.empty(1000)
    assert initialize_parameter("A_log", heads, generator)
    torch.testing.assert_close(heads.exp(), torch.arange(1.0, 1001.0))
    assert initialize_parameter("D", heads, generator)
    assert (heads == 1).all()
    assert initialize_parameter("dt_bias", heads, generator)
    log_dt = F.softplus(heads).log10()  # uniform between -3 and -1
    assert -3.001 < log_dt.min() < -2.98 and -1.02 < log_dt.max() < -0.999
    assert abs(log_dt.mean() + 2) < 0.06
    taps = torch.empty(1000, 1, 4)
    assert initialize_parameter("conv1d.weight", taps, generator)
    assert 0.49 < taps.abs().max() <= 0.5
    # whatever the other norms of the model store
    norm = torch.zeros(5)
    assert initialize_parameter("norm.weight", norm, generator) and norm.eq(1).all()
    assert not initialize_parameter("out_proj.weight", torch.empty(3, 3), generator)


# -------------------------------------------------------------------------------------------------------- in a decoder


def test_layers_follow_the_pattern():
    with torch.device("meta"):
        model = Decoder(model_config("nemotron3-nano-30b-a3b"))
    parts = {"M": "mamba", "*": "self_attn", "E": "mlp"}
    for block, letter in zip(model.blocks, model.config.layer_pattern, strict=True):
        children = dict(block.named_children())
        names = [name for name in children if not isinstance(children[name], torch.nn.Identity)]
        assert [name for name in names if not name.endswith("norm")] == [parts[letter]]
        assert len(names) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(layer_pattern="ME*X"), r"'ME\*X': letter 'X' is not one of M \* E -"),
        (dict(layer_pattern="ME*"), "'ME\\*' has 3 letters, expected num_layers=4"),
        (dict(num_layers=5), "has 4 letters, expected num_layers=5"),
        (dict(num_experts=0, moe_latent_size=0), "has layers of experts, but num_experts=0"),
        (dict(mamba_n_groups=3), "mamba_n_groups=3 does not divide mamba_num_heads=8"),
        (dict(ssm_state_size=0), "ssm_state_size=0 must be at least 1"),
        (dict(time_step_min=-0.1), "time_step_min=-0.1 must be at least 0"),
        (
            dict(position_embedding="alibi"),
            "position_embedding='alibi' is not one of rotary, learned, none",
        ),
    ],
)
def test_wrong_shapes_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        model_config("nemotron3-nano-30b-a3b-tiny", **changes)


@pytest.mark.parametrize(
    "model, parallel, message",
    [
        (
            "nemotron3-nano-30b-a3b-tiny",
            dict(cp=8),
            r"cp=8 x tp=1 .* mamba_n_groups=4 \(use cp=1, 2 or 4\)",
        ),
        (
            "nemotron3-nano-30b-a3b-tiny",
            dict(cp=4, tp=2),
            r"cp=4 x tp=2 .* mamba_n_groups=4 \(use cp=1 or 2\)",
        ),
        (
            "nemotron3-nano-30b-a3b-tiny",
            dict(tp=8),
            "parallel.tp=8 does not divide mamba_n_groups=4",
        ),
    ],
)
def test_layouts_that_these_models_cannot_have(model, parallel, message):
    tree = dict(model=model, parallel=parallel, batch=dict(seq_len=64))
    with pytest.raises(InputError, match=message):
        from_dict(tree)
    from_dict(tree | dict(parallel={}))


@pytest.mark.parametrize("name", ["nemotron3-nano-30b-a3b-tiny", "qwen3.5-9b-tiny"])
def test_block_compiles_to_one_graph(name):
    """A recurrent layer with its norms and MLP, forward and backward, on packed rows of several chunks."""
    block = Block(model_config(name), layer=0)
    for i, parameter in enumerate(block.parameters()):
        parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
    x = torch.randn(BATCH, SEQ, 64, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results = [run(x, None, None, PACKED) for run in (compiled, block)]
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)
    gradients = [
        torch.autograd.grad(result.square().sum(), list(block.parameters())) for result in results
    ]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize(
    "model, scaled, writers",
    [
        ("nemotron3-nano-30b-a3b-tiny", "layers.0.mamba.out_proj.weight", 4),
        ("nemotron3-nano-30b-a3b-tiny", "layers.1.mlp.shared_experts.down_proj.weight", 4),
        ("nemotron3-nano-30b-a3b-tiny", "layers.1.mlp.experts.down_proj", 4),
        ("nemotron3-nano-30b-a3b-tiny", "layers.1.mlp.experts.up_proj", 1),
        ("nemotron3-super-120b-a12b-tiny", "layers.1.mlp.experts.down_proj", 1),
        ("nemotron3-super-120b-a12b-tiny", "layers.1.mlp.fc2_latent_proj.weight", 4),
        ("nemotron3-nano-30b-a3b-tiny", "layers.2.self_attn.o_proj.weight", 4),
        ("gpt3-175b-tiny", "layers.0.self_attn.o_proj.weight", 8),
        ("gpt3-175b-tiny", "layers.0.mlp.down_proj.weight", 8),
        ("gpt3-175b-tiny", "layers.0.mlp.up_proj.weight", 1),
        ("nemotron3-nano-30b-a3b-tiny", "layers.0.mamba.in_proj.weight", 1),
        ("llama3-8b-tiny", "layers.0.mlp.down_proj.weight", 1),
    ],
)
def test_what_writes_into_the_residual_stream_starts_smaller(model, scaled, writers):
    """std = 0.02 / sqrt(number of writers): a layer of GPT-3 has two, one of Nemotron-H one (GPT-2 paper, 2.3)."""
    with torch.device("meta"):
        decoder = Decoder(model_config(model))
    tensor = torch.empty(300, 300)
    decoder.initialize_parameter(f"model.{scaled}", tensor, torch.Generator().manual_seed(0))
    assert decoder.get_parameter(f"model.{scaled}").ndim >= 2
    assert tensor.std().item() == pytest.approx(0.02 * writers**-0.5, rel=0.02)


def test_dynamics_and_norms_do_not_decay():
    """Weight decay is for matrices; the numbers that say how a state evolves are 1-D, as norms and biases are."""
    with torch.device("meta"):
        block = Block(model_config("nemotron3-nano-30b-a3b-tiny"), layer=0)
    decayed, others = make_optimizer(block, Optim(name="sgd")).param_groups
    names = {id(parameter): name for name, parameter in block.named_parameters()}
    assert others["weight_decay"] == 0
    assert {names[id(p)] for p in decayed["params"]} == {
        "mamba.in_proj.weight",
        "mamba.conv1d.weight",
        "mamba.out_proj.weight",
    }
    assert {f"mamba.dynamics.{name}" for name in ("A_log", "D", "dt_bias")} <= {
        names[id(p)] for p in others["params"]
    }
