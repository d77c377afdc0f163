"""Schedules at their corners, clipping against torch's own, and AdamW in bf16 against closed forms."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.wan import FP32Linear
from minitrain.models.zoo import empty_model, model_config
from minitrain.parallel.shards import local_shard
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.settings import Optim
from minitrain.training import adamw
from minitrain.training.loop import Trainer, forward_backward
from minitrain.training.optim import clip_gradients, learning_rate, make_optimizer, update_weights
from tests.helpers.oracle import check_close, snapshot
from tests.helpers.training import BYTES


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.775, 0.55, 0.325, 0.1]),
        (
            "cosine",
            [
                0.5,
                1,
                1,
                0.1 + 0.9 * 0.5 * (1 + 0.5**0.5),
                0.55,
                0.1 + 0.9 * 0.5 * (1 - 0.5**0.5),
                0.1,
            ],
        ),
        ("wsd", [0.5, 1, 1, 1, 0.7, 0.4, 0.1]),
    ],
)
def test_schedule(schedule, expected):
    optim = Optim(lr=1.0, warmup=2, schedule=schedule, final_lr=0.1, decay=0.45)
    assert [learning_rate(step, 7, optim) for step in range(7)] == pytest.approx(expected)


@pytest.mark.parametrize("steps, warmup", [(20, 2), (49, 4), (50, 50), (9, 0), (1, 0)])
def test_a_run_that_is_shorter_than_its_warm_up_warms_up_for_a_tenth(steps, warmup):
    for schedule in ("constant", "linear", "cosine", "wsd"):
        given, right = (
            Optim(lr=1.0, warmup=n, schedule=schedule, final_lr=0.1) for n in (50, warmup)
        )
        rates = [
            [learning_rate(n, steps, optim) for n in range(steps)] for optim in (given, right)
        ]
        assert rates[0] == rates[1]
    from_dict({"steps": steps, "optim": {"warmup": 50}})


def test_a_run_of_warm_up_only_and_one_step():
    assert learning_rate(0, 1, Optim(lr=1.0, schedule="cosine")) == 1.0
    assert [
        learning_rate(s, 2, Optim(lr=1.0, warmup=2, schedule="linear")) for s in range(2)
    ] == [0.5, 1.0]


@pytest.mark.parametrize("max_norm", [None, 1e-3, 1e9])
def test_clipping_equals_torch(max_norm):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.zeros(n, 3)) for n in (2, 5)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = clip_gradients(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(
        theirs, max_norm if max_norm is not None else float("inf")
    )
    torch.testing.assert_close(norm, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_norm_of_bf16_gradients_is_not_rounded_to_bf16():
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.zeros(n, 3, dtype=d))
        for n, d in ((9, torch.bfloat16), (2, torch.float32))
    ]
    for p in parameters:
        p.grad = torch.randn_like(p)
    whole = torch.cat([p.grad.flatten().double() for p in parameters])
    assert clip_gradients(parameters, 1.0).item() == pytest.approx(whole.norm().item(), rel=1e-6)
    # as all were scaled, and rounded
    assert clip_gradients(parameters, None).item() == pytest.approx(1.0, rel=4e-3)


def test_clipping_without_gradients():
    """As a pipeline's stage without adapters has it."""
    assert clip_gradients([torch.nn.Parameter(torch.zeros(2, 3))], 1.0) == 0


def test_only_matrices_decay():
    with torch.device("meta"):
        model = Decoder(model_config("qwen2.5-7b-tiny"))
    decayed, rest = make_optimizer(model, Optim(weight_decay=0.1)).param_groups
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(
        name.endswith("_proj.weight") or "embed" in name or "lm_head" in name
        for name in (names[id(p)] for p in decayed["params"])
    )
    assert {names[id(p)].split(".")[-1] for p in rest["params"]} == {"weight", "bias"}
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_shifts_scales_and_gates_of_wan_do_not_decay():
    """The learned parts of its modulation, which are biases: matrices are what Linears and the convolution hold."""
    model = empty_model(model_config("wan2.1-1.3b-tiny"))
    decayed, rest = make_optimizer(model, Optim()).param_groups
    matrices = [
        m
        for m in model.modules()
        if isinstance(m, (torch.nn.Linear, torch.nn.Conv3d, FP32Linear))
    ]
    assert {id(p) for p in decayed["params"]} == {id(m.weight) for m in matrices}
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_sgd_is_plain_gradient_descent():
    model = parameters_of((2, 2), (2,))
    optimizer = make_optimizer(model, Optim(name="sgd", lr=0.5, weight_decay=0.25))
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    matrix, vector = model.parameters()
    torch.testing.assert_close(matrix.detach(), before[0] - 0.5 * (0.5 + 0.25 * before[0]))
    torch.testing.assert_close(vector.detach(), before[1] - 0.25)


@pytest.mark.parametrize("settings", [{"name": "sgd"}, {}, {"states": "bf16"}], ids=str)
def test_an_update_that_is_left_out_does_not_concern_the_next(settings):
    model = parameters_of((3, 2))
    optimizer = make_optimizer(model, Optim(lr=0.5, **settings))
    (parameter,) = model.parameters()
    parameter.grad, before = torch.ones(3, 2), parameter.detach().clone()
    update_weights(optimizer, torch.tensor(False))
    assert torch.equal(parameter, before)
    optimizer.step()
    assert (parameter < before - 0.1).all()


# ------------------------------------------------------------------------------------------------- states and rounding


def parameters_of(*shapes, dtype=torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Module()
    for i, shape in enumerate(shapes):
        model.register_parameter(f"p{i}", torch.nn.Parameter(torch.randn(shape).to(dtype)))
    return model


def expected_adamw(weight, gradients, optim, decay):
    """Loshchilov & Hutter 2019, algorithm 2, as it stands there, in fp64 throughout."""
    (beta1, beta2), weight, m, v = optim.betas, weight.double(), 0.0, 0.0
    for t, gradient in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * gradient.double()
        v = beta2 * v + (1 - beta2) * gradient.double() ** 2
        step = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + optim.eps)
        weight = weight - optim.lr * (step + decay * weight)
    return weight, m, v


@pytest.mark.parametrize("at_once", [7, 1 << 24])  # rows in pieces, or all parameters at once
@pytest.mark.parametrize("states, stochastic", [("fp32", False), ("bf16", False), ("bf16", True)])
def test_adamw_is_the_papers(monkeypatch, states, stochastic, at_once):
    """In fp32 to rounding; with states in bf16 as near as their 8 bits allow."""
    monkeypatch.setattr(adamw, "AT_ONCE", at_once)
    optim = Optim(
        lr=0.1, weight_decay=0.3, eps=1e-3, states=states, stochastic_rounding=stochastic
    )
    model = parameters_of((6, 4), (5,), (2, 3, 2))
    optimizer = make_optimizer(model, optim)
    if states == "fp32":  # what bf16 weights use; torch's own would be tested else
        groups = optimizer.param_groups
        optimizer = adamw.AdamW(
            groups,
            torch.float32,
            optim.lr,
            tuple(optim.betas),
            optim.eps,
            stochastic=True,
            names={p: n for n, p in model.named_parameters()},
        )
    assert type(optimizer) is adamw.AdamW
    before = [p.detach().clone() for p in model.parameters()]
    gradients = [[torch.randn_like(p) for p in before] for _ in range(3)]
    for each in gradients:
        for p, gradient in zip(model.parameters(), each, strict=True):
            p.grad = gradient.clone()
        optimizer.step()
    for i, p in enumerate(model.parameters()):
        weight, m, v = expected_adamw(
            before[i], [each[i] for each in gradients], optim, 0.3 if p.ndim > 1 else 0
        )
        exact = states == "fp32"
        state = optimizer.state[p]
        torch.testing.assert_close(p.double(), weight, rtol=1e-6, atol=1e-6 if exact else 5e-3)
        torch.testing.assert_close(
            state["exp_avg"].double(),
            m,
            rtol=1e-6 if exact else 0.03,
            atol=1e-6 if exact else 5e-3,
        )
        torch.testing.assert_close(
            state["exp_avg_sq"].double(), v, rtol=1e-6 if exact else 0.03, atol=1e-7
        )
        assert state["step"] == 3 and state["exp_avg"].dtype == getattr(
            torch, {"fp32": "float32", "bf16": "bfloat16"}[states]
        )


def test_small_parameters_share_a_batch(monkeypatch):
    """Also after the first batch."""
    monkeypatch.setattr(adamw, "AT_ONCE", 10)
    blocks = [adamw.RowBlock("", (), *(torch.empty(4),) * 5) for _ in range(7)]
    assert [len(batch) for batch in adamw.group_by_size(iter(blocks))] == [3, 3, 1]


def test_bf16_weights_are_the_fp32_step_rounded():
    """With states in fp32, each step from bf16 weights is torch's own in fp32 from the same, rounded to the nearest."""
    ours, theirs = (
        parameters_of((8, 5), dtype=torch.bfloat16),
        parameters_of((8, 5), dtype=torch.bfloat16).float(),
    )
    optim = Optim(lr=0.05)
    first, second = make_optimizer(ours, optim), make_optimizer(theirs, optim)
    for _ in range(4):
        gradient = torch.randn(8, 5).bfloat16()
        ours.p0.grad, theirs.p0.grad = gradient, gradient.float()
        first.step()
        second.step()
        assert torch.equal(ours.p0, theirs.p0.bfloat16())
        theirs.p0.data.copy_(ours.p0)


def test_stochastic_rounding_is_unbiased():
    """Over 20,000 draws the mean is the number itself, to 5 standard errors, whichever way it is signed or sized."""
    x = torch.tensor([1.0, 1 + 1 / 512, 1 + 1e-3, -3.14159, 1e-30, -2.5e20, 1.9999, 0.0, 1e-40])
    places = (slice(0, 1000), slice(3, 3 + len(x)))
    bits = torch.cat(
        [adamw.random_bits("w", torch.tensor(float(step)), places) for step in range(20)]
    )
    draws = adamw.round_stochastically(x.expand(bits.shape).contiguous(), bits).double()
    # the bf16 neighbour next to zero
    below = (x.view(torch.int32) & -0x10000).view(torch.float32).double()
    gap = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double() - below
    share = (x.double() - below) / gap
    # nothing but the two neighbours
    assert ((draws - below).abs().isclose(gap.abs()) | (draws == below)).all()
    error = ((draws - below) / gap).mean(0) - share
    assert (error.abs() <= 5 * (share * (1 - share) / len(bits)).sqrt() + 1e-12).all()


def test_what_rounding_must_not_touch():
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.5])
    # CUDA's NaNs
    special = torch.cat(
        [special, torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)]
    )
    rounded = adamw.round_stochastically(special, torch.full((6,), 0xFFFF, dtype=torch.int32))
    torch.testing.assert_close(rounded.float(), special, equal_nan=True, rtol=0, atol=0)


def test_random_bits_are_uniform_and_of_their_own_place():
    bits = adamw.random_bits("w", torch.tensor(4.0), (slice(0, 300), slice(0, 400)))
    assert bits.min() >= 0 and bits.max() < 1 << 16
    counts = torch.bincount((bits >> 8).flatten(), minlength=256).double()
    expected = bits.numel() / 256
    # chi-square, 255 degrees of freedom
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * (2 * 255) ** 0.5
    centred = (bits.double() - 32767.5) / (2**32 / 12) ** 0.5
    neighbours = (centred[1:] * centred[:-1]).mean(), (centred[:, 1:] * centred[:, :-1]).mean()
    assert all(abs(correlation) < 5 / bits.numel() ** 0.5 for correlation in neighbours)
    part = adamw.random_bits("w", torch.tensor(4.0), (slice(100, 200), slice(7, 9)))
    assert torch.equal(part, bits[100:200, 7:9])
    for other in (
        adamw.random_bits("v", torch.tensor(4.0), (slice(0, 300), slice(0, 400))),
        adamw.random_bits("w", torch.tensor(5.0), (slice(0, 300), slice(0, 400))),
    ):
        assert (other == bits).double().mean() < 1e-3


def test_weights_and_states_of_all_parameters_are_rounded_by_bits_of_their_own(monkeypatch):
    keys, random_bits = [], adamw.random_bits
    monkeypatch.setattr(
        adamw, "random_bits", lambda key, *rest: keys.append(key) or random_bits(key, *rest)
    )
    model = parameters_of((3, 2), (3, 2), dtype=torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    make_optimizer(model, Optim(states="bf16", stochastic_rounding=True)).step()
    assert len(keys) == len(set(keys)) == 6


def test_small_updates_survive_in_the_mean():
    """A thousand updates of 1/1000 of the last bit: rounded to the nearest all are lost, else none on average."""
    moved = {}
    for stochastic in (False, True):
        model = parameters_of((64, 64), dtype=torch.bfloat16)
        model.p0.data.fill_(1.0)
        optim = Optim(
            lr=2**-8 / 1000, weight_decay=0.0, states="bf16", stochastic_rounding=stochastic
        )
        optimizer = make_optimizer(model, optim)
        for _ in range(1000):
            model.p0.grad = torch.ones(64, 64, dtype=torch.bfloat16)
            optimizer.step()
        moved[stochastic] = (1 - model.p0.double()).mean().item() / 2**-8
    assert moved[False] == 0 and moved[True] == pytest.approx(1, abs=0.06)


def test_small_updates_of_muon_survive_in_the_mean():
    """At a rate of a tenth of the last bit, beside torch's Muon of weights in fp32."""
    torch.manual_seed(0)
    start, gradient = torch.randn(128, 128).bfloat16(), torch.randn(128, 128)
    model = torch.nn.ModuleDict({"layers": parameters_of((128, 128), dtype=torch.bfloat16)})
    (ours,) = model.parameters()
    theirs = torch.nn.Parameter(start.float())
    ours.data.copy_(start)
    settings = dict(lr=2e-4, weight_decay=0.0)
    optimizer = make_optimizer(
        model, Optim(name="muon", stochastic_rounding=True, newton_schulz="fp32", **settings)
    )
    expected = torch.optim.Muon([theirs], **settings, adjust_lr_fn="match_rms_adamw")
    for _ in range(100):
        ours.grad, theirs.grad = gradient.bfloat16(), gradient.clone()
        optimizer.step()
        expected.step()
    moved, right = (p.detach().double() - start.double() for p in (ours, theirs))
    # as a share of the way, along it: each number by itself is off by its last bit
    assert (moved * right).sum() / right.square().sum() == pytest.approx(1, abs=0.03)


def shard(model, world_size):
    """Some parameters by rows, unevenly too, and one by columns, as FSDP and tensor parallelism leave them."""
    mesh = init_device_mesh("cpu", (world_size,))
    placements = {"p0": Shard(0), "p1": Shard(1), "p2": Replicate(), "p3": Shard(0)}
    for name, parameter in list(model.named_parameters()):
        tensor = distribute_tensor(parameter.data, mesh, [placements[name]])
        model.register_parameter(name, torch.nn.Parameter(tensor))


def train_sharded(optim, folder, world_size, resumed):
    """Three steps with given gradients; `resumed`: in two runs, through a checkpoint. Returns weights and states."""
    checkpointer = Checkpointer(folder, keep=1)
    for until in (2, 3) if resumed else (3,):
        block = parameters_of((5, 4), (3, 4), (6,), (2, 3), dtype=torch.bfloat16)
        shard(block, world_size)
        model = torch.nn.ModuleDict({"layers": block})
        optimizer = make_optimizer(model, optim)
        first = (checkpointer.load(model, optimizer) or {"step": 0})["step"]
        for step in range(first, until):
            torch.manual_seed(step)
            for p in model.parameters():
                gradient = torch.randn(p.shape).bfloat16()
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements)
            optimizer.step()
        if resumed:
            checkpointer.save(until, model, optimizer, {"step": until})
    tensors = snapshot(model.named_parameters())
    for name, p in model.named_parameters():
        tensors |= snapshot((f"{name}/{key}", value) for key, value in optimizer.state[p].items())
    return tensors


@pytest.mark.parametrize(
    "settings", [{"states": "bf16"}, {"name": "muon", "newton_schulz": "fp32"}], ids=str
)
def test_stochastic_rounding_does_not_depend_on_layout_or_interruptions(pool, tmp_path, settings):
    nearest = Optim(lr=0.05, **settings)
    optim = replace(nearest, stochastic_rounding=True)
    expected = pool.run(1, train_sharded, optim, tmp_path / "1", 1, False)[0]
    nearest = pool.run(1, train_sharded, nearest, tmp_path / "n", 1, False)[0]
    assert not torch.equal(expected["layers.p0"], nearest["layers.p0"])  # it does round otherwise
    for world_size, resumed in ((1, True), (2, True), (4, False)):
        folder = tmp_path / f"{world_size}-{resumed}"
        for tensors in pool.run(world_size, train_sharded, optim, folder, world_size, resumed):
            check_close([tensors], expected, 0, f"{world_size} ranks, resumed: {resumed}")


def resume_with(first, second, folder):
    """A step with one optimizer, a checkpoint, a step with the other: their states' types and the weights."""
    checkpointer = Checkpointer(folder, keep=1)
    results = []
    for optim in (first, second):
        model = parameters_of((5, 4), dtype=torch.bfloat16)
        optimizer = make_optimizer(model, optim)
        checkpointer.load(model, optimizer)
        model.p0.grad = torch.ones_like(model.p0)
        optimizer.step()
        checkpointer.save(1, model, optimizer, {})
        results.append(
            (optimizer.state[model.p0]["exp_avg"].dtype, optimizer.state[model.p0]["step"].item())
        )
    return results


@pytest.mark.parametrize("first, second", [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_run_may_go_on_with_states_of_another_type(pool, tmp_path, first, second):
    """From our AdamW to torch's, which has them in the weights' type, and back."""
    (results,) = pool.run(1, resume_with, Optim(states=first), Optim(states=second), tmp_path)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    assert results == [(dtypes[first], 1), (dtypes[second], 2)]


def bytes_of_a_step(precision, states):
    """What lasts, after a real training step up to the release of the gradients."""
    config = configs.from_dict(
        {
            "model": {"name": "llama3-8b-tiny", "num_layers": 2},
            "batch": {"global": 2, "micro": 1, "seq_len": 8},
            "precision": precision,
            "optim": {"states": states},
            "device": "cpu",
        }
    )
    trainer = Trainer(config, start(config))
    batches = trainer.micro_batches(open_dataset(config)[0], 0)
    forward_backward(trainer.model, trainer.objective, batches, trainer.meshes, trainer.device)
    trainer.optimizer.step()
    # FSDP's shards again, not what it has gathered
    parameters = list(trainer.model.state_dict().values())
    held = [list(trainer.model.parameters()), [p.grad for p in trainer.model.parameters()]]
    held.append(
        [
            x
            for state in trainer.optimizer.state.values()
            for key, x in state.items()
            if key != "step"
        ]
    )
    count = sum(p.numel() for p in parameters)
    return tuple(sum(local_shard(x)[0].nbytes for x in tensors) / count for tensors in held)


@pytest.mark.parametrize("precision, states, expected", BYTES)
def test_bytes_per_parameter(pool, precision, states, expected):
    assert pool.run(1, bytes_of_a_step, precision, states) == [expected]


def gradients(precision):
    """Of a step of 64 micro-batches."""
    config = configs.from_dict(
        {
            "model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 128},
            "precision": precision,
            "batch": {"global": 64, "micro": 1, "seq_len": 16},
            "device": "cpu",
            "parallel": {"reshard_after_forward": False},  # so that whole gradients add up
        }
    )
    trainer = Trainer(config, start(config))
    batches = trainer.micro_batches(open_dataset(config)[0], 0)
    forward_backward(trainer.model, trainer.objective, batches, trainer.meshes, trainer.device)
    return torch.cat([p.grad.flatten().double() for p in trainer.model.parameters()])


def test_gradients_that_add_up_in_bf16_are_off_by_a_percent(pool):
    """What config.py says of bf16-pure; of the error, half comes from computing in bf16."""
    (pure,), (mixed,), (exact,) = (
        pool.run(1, gradients, precision) for precision in ("bf16-pure", "bf16", "fp32")
    )
    assert 0.005 < (pure - exact).norm() / exact.norm() < 0.02
    assert 0.3 < (mixed - exact).norm() / (pure - exact).norm() < 0.7


@pytest.mark.parametrize(
    "tree, message",
    [
        (
            {"optim": {"stochastic_rounding": True}},
            "optim.stochastic_rounding=true needs bf16 to round to",
        ),
        (
            {"optim": {"stochastic_rounding": True}, "precision": "bf16-pure", "lora": {}},
            "round to: lora.dtype=bf16 or",
        ),
        (
            {"optim": {"name": "sgd", "states": "bf16"}},
            "optim.states=bf16 is for optim.name=adamw",
        ),
    ],
)
def test_states_that_cannot_be(tree, message):
    with pytest.raises(InputError, match=message):
        configs.from_dict(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {"precision": "bf16-pure"},
        {"optim": {"states": "bf16"}},
        {"lora": {}, "optim": {"states": "bf16"}},
        {"lora": {"dtype": "bf16"}},
        {"precision": "bf16-pure", "optim": {"name": "muon"}},
    ],
    ids=str,
)
def test_whatever_is_in_bf16_can_be_rounded_stochastically(tree):
    assert configs.from_dict(
        tree | {"optim": tree.get("optim", {}) | {"stochastic_rounding": True}}
    )
