"""oneDNN's products against torch's, forced also where they are not faster: values, gradients, compiled, sharded."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from minitrain.models import cpu
from minitrain.models.grouped_mm import grouped_mm
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.training.build import build_model
from minitrain.training.log_probs import linear_log_probs
from minitrain.training.loss import linear_cross_entropy
from tests.helpers.oracle import check_against_one_process, train, train_compiled

TREE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 128,
        "num_layers": 2,
        "initializer_range": 0.05,
    },
    "batch": {"global": 4, "micro": 2, "seq_len": 32},
    "optim": {"name": "sgd", "lr": 0.1},
}


@pytest.fixture
def forced(monkeypatch):
    """All products of fp32, however small, whatever CPU this is."""
    monkeypatch.setattr(cpu, "FASTER", True)
    monkeypatch.setattr(cpu, "MIN_FLOPS", 1)
    monkeypatch.setattr(cpu, "TRANSPOSED", 1)
    monkeypatch.setattr(cpu, "COPIED", 1)


def count_products():
    return mock.patch.object(
        torch.ops.minitrain, "cpu_linear", wraps=torch.ops.minitrain.cpu_linear
    )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m, k, n", [(5, 3, 7), (64, 48, 80), (1, 16, 1)])
def test_products_of_matrices_in_any_strides(forced, m, k, n, transposed):
    a, b = (
        (torch.randn(k, m).T, torch.randn(n, k).T)
        if transposed
        else (torch.randn(m, k), torch.randn(k, n))
    )
    expected, out = a.double() @ b.double(), torch.empty(m, n)
    with count_products() as products:
        torch.testing.assert_close(cpu.matmul(a, b).double(), expected, atol=1e-5, rtol=1e-5)
        assert cpu.matmul(a, b, out=out) is out
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert products.call_count == 2


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linears(forced, bias, frozen):
    linear = nn.Linear(24, 40, bias=bias).requires_grad_(not frozen)
    x = torch.randn(2, 9, 24, requires_grad=True)
    results = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            y = linear(x)
        assert counter.get_total_flops() == 2 * 18 * 24 * 40
        leaves = [x] if frozen else [x, *linear.parameters()]
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)])
        cpu.use_cpu_linears(linear)
        assert type(linear) is cpu.CpuLinear
    kept, _ = y.grad_fn.next_functions[0][0].saved_tensors
    # as torch's own, an input that no gradient needs takes no memory
    assert (kept is None) == frozen
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 9, 4], [0, 0, 16, 0]])
def test_grouped_products(forced, counts, frozen):
    """A frozen stack costs no product for a gradient of its own."""
    ends = torch.tensor(counts).cumsum(0).int()
    x = torch.randn(16, 8, requires_grad=True)
    stack = torch.randn(4, 12, 8, requires_grad=not frozen)
    leaves = [x] if frozen else [x, stack]
    each = 2 if frozen else 3
    results = []
    for faster in (False, True):
        with mock.patch.object(cpu, "FASTER", faster), count_products() as products:
            y = grouped_mm(x, stack.transpose(1, 2), ends)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        assert products.call_count == (each * sum(count > 0 for count in counts) if faster else 0)
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "function", [linear_cross_entropy, lambda *inputs: linear_log_probs(*inputs)[0].sum()]
)
def test_the_head(forced, monkeypatch, function):
    monkeypatch.setattr("minitrain.training.loss.CHUNK", 8)
    hidden, weight = (
        torch.randn(20, 16, requires_grad=True),
        torch.randn(32, 16, requires_grad=True),
    )
    labels = torch.randint(32, (20,))
    results = []
    for faster in (False, True):
        with mock.patch.object(cpu, "FASTER", faster):
            loss = function(hidden, weight, labels)
            results.append([loss, *torch.autograd.grad(loss, [hidden, weight])])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def forced_train(tree, *rest):
    with mock.patch.multiple(cpu, FASTER=True, MIN_FLOPS=1, TRANSPOSED=1, COPIED=1):
        return (train_compiled if tree.get("compile") else train)(tree, *rest)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"lora": {"rank": 4, "dropout": 0.0}},
        {"recompute": "full"},
        {"parallel": {"tp": 2}},
        {"compile": True},
        {"model": "qwen3-30b-a3b-tiny"},
        {"model": "qwen3-30b-a3b-tiny", "compile": True},
    ],
    ids=str,
)
def test_training_is_that_of_one_process_with_torchs_products(pool, change):
    check_against_one_process(pool, 2, TREE | change, run=forced_train)


@pytest.mark.parametrize(
    "vendor, family, expected", [("AuthenticAMD", 26, 26), ("AuthenticAMD", 25, 25), ("X", 6, 0)]
)
def test_amds_families(vendor, family, expected):
    cpuinfo = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n"
    assert cpu.amd_family(cpuinfo) == expected
    assert cpu.amd_family("") == 0


def test_only_where_it_is_faster():
    """And never of fake tensors, other types or devices, or small ones."""
    big = torch.empty(1024, 1024)
    for faster in (False, True):
        with mock.patch.object(cpu, "FASTER", faster):
            assert cpu.multiplies(big, big) == faster
            model = build_model(from_dict(TREE), start(from_dict(TREE)))
            kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
            assert kinds == {cpu.CpuLinear if faster else nn.Linear}
    with mock.patch.object(cpu, "FASTER", True):
        assert not cpu.multiplies(big[:16, :16], big[:16])
        # of a class that multiplies otherwise, as in FP8
        other = type("Other", (nn.Linear,), {})(4, 4)
        cpu.use_cpu_linears(other)
        assert type(other).__name__ == "Other"
        assert not cpu.multiplies(big.bfloat16(), big.bfloat16()) and not cpu.multiplies(
            big.to("meta"), big
        )
        assert not cpu.multiplies(big.T, big[:, :128])  # would copy more than it saves
