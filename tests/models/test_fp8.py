"""FP8 products against a table of all FP8 numbers, plain Linears where nothing is rounded, and a bf16 training run."""

from unittest import mock

import pytest
import torch
from torch import nn

from minitrain.bench.versus import check_versus
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models import fp8
from minitrain.models.attention import GroupedQueryAttention
from minitrain.models.decoder import Decoder
from minitrain.models.fp8 import Fp8Experts, Fp8Linear, to_fp8
from minitrain.models.layers import project
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, E5M2, cast, quantize
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.run.tasks.train_model import notes_on_settings
from minitrain.settings import Lora
from minitrain.training.build import make_model
from minitrain.training.loop import Trainer

inf, nan = float("inf"), float("nan")


def fp8_linear(inputs: int, outputs: int, bias: bool = False, fast: str = "forward") -> Fp8Linear:
    linear = nn.Linear(inputs, outputs, bias)
    to_fp8([nn.ModuleList([linear])], fast)
    assert type(linear) is Fp8Linear
    return linear


def passes(linear: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output, and the gradients of x, weight and bias."""
    x = x.detach().requires_grad_()
    y = linear(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *linear.parameters()], grad)]


# -------------------------------------------------------------------------------------------------------- quantisation


def nearest(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """x rounded as FP8 with a scale rounds it, by trying all numbers and all powers of two; and the distance to it."""
    codes, x = torch.arange(128, dtype=torch.uint8), x.detach().double()
    numbers = codes.view(dtype).double()
    numbers = numbers[numbers.isfinite()]
    scale = max(2.0**n for n in range(-60, 60) if x.abs().max() * 2.0**n <= numbers.max())
    distances = (x.abs()[..., None] * scale - numbers).abs()
    odd = codes[: len(numbers)].double() % 2
    index = (distances * (1 + 1e-9 * odd)).argmin(-1)  # of two that are as near, the even one
    return numbers[index] * x.sign() / scale, distances.amin(-1) / scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("size", [1e-9, 0.02, 1, 448, 3e8])
def test_rounds_to_the_nearest_number(dtype, size):
    torch.manual_seed(0)
    x = size * torch.randn(40, 50) ** 3  # with a long tail
    x8, inverse = quantize(x, dtype)
    assert x8.dtype == dtype and inverse.log2() == inverse.log2().round()
    rounded, distance = nearest(x, dtype)
    assert torch.equal(x8.double() * inverse, rounded) and torch.equal(
        (rounded - x).abs(), distance
    )


def test_largest_elements_on_both_sides_of_a_power_of_two():
    for largest in (
        448.0,
        torch.tensor(448.0).nextafter(torch.tensor(inf)).item(),
        447.9,
        224.0,
        7.0,
        0.875,
    ):
        x8, inverse = quantize(torch.tensor([largest, -largest]), E4M3)
        assert 224 <= x8.float().max() <= 448 and x8[0].float() == -x8[1].float()
        assert (x8[0].float() * inverse / largest - 1).abs() <= 2**-4


def test_other_cuts_of_the_data_give_the_same_numbers():
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    x[0] *= 100
    whole, rest = quantize(x, E4M3), quantize(x[1:], E4M3)
    assert whole[1] > rest[1]
    normal = x[1:].abs() > whole[1] * 2**-6  # below it, FP8 has fewer digits
    assert normal.float().mean() > 0.9
    assert torch.equal(
        (whole[0][1:].float() * whole[1])[normal], (rest[0].float() * rest[1])[normal]
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_what_is_too_large_for_its_scale_becomes_the_largest_number(dtype):
    largest = torch.finfo(dtype).max
    found = cast(torch.tensor([3 * largest, -1e30, 1.0]), torch.tensor(1.0), dtype)
    assert found.float().tolist() == [largest, -largest, 1.0]


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_what_is_not_finite_makes_the_products_nan(bad):
    for where in range(3):
        linear, factors = fp8_linear(32, 16), [torch.randn(16, 32), torch.randn(16, 16)]
        with torch.no_grad():
            [linear.weight, *factors][where][3, 5] = bad
        y, dx, dw = passes(linear, *factors)
        for product, without in ((y, 2), (dx, 1), (dw, 0)):
            assert product.isnan().all() if where != without else product.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-30, 1e30])
def test_extreme_sizes(value):
    linear = fp8_linear(32, 16)
    nn.init.constant_(linear.weight, 0.5)
    y, dx, dw = passes(linear, torch.full((16, 32), value), torch.ones(16, 16))
    torch.testing.assert_close(y, torch.full((16, 16), 16 * value), rtol=2**-4, atol=1e-38)
    torch.testing.assert_close(dw, torch.full((16, 32), 16 * value), rtol=2**-4, atol=1e-38)
    torch.testing.assert_close(dx, torch.full((16, 32), 8.0), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------------ products


@pytest.mark.parametrize("tokens", [(16,), (3, 5), (2, 3, 7), (0, 4)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_plain_linear_where_nothing_is_rounded(tokens, bias):
    """Small whole numbers are FP8 numbers, and so are their sums in fp32: every bit must be right."""
    torch.manual_seed(0)
    plain, ours = nn.Linear(48, 32, bias), fp8_linear(48, 32, bias)
    nn.init.uniform_(plain.weight, -16, 17)
    plain.weight.data.trunc_()
    ours.load_state_dict(plain.state_dict())
    x, grad = (
        torch.randint(-16, 17, (*tokens, 48)).float(),
        torch.randint(-4, 5, (*tokens, 32)).float(),
    )
    for actual, expected in zip(passes(ours, x, grad), passes(plain, x, grad), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_equals_products_of_rounded_numbers(dtype, tolerance):
    torch.manual_seed(0)
    linear, x, grad = (
        fp8_linear(64, 48),
        torch.randn(5, 7, 64).to(dtype),
        1e-6 * torch.randn(5, 7, 48).to(dtype),
    )
    y, dx, dw = passes(linear, x, grad)
    assert y.dtype == dx.dtype == dtype and dw.dtype == torch.float32
    (x, _), (w, _), (g, _) = nearest(x, E4M3), nearest(linear.weight, E4M3), nearest(grad, E5M2)
    expected = [x @ w.T, g @ w, g.flatten(0, 1).T @ x.flatten(0, 1)]
    for actual, right in zip((y, dx, dw), expected, strict=True):
        assert (actual - right).norm() < tolerance * right.norm()


def test_a_frozen_weight_gets_no_gradient_and_keeps_no_input():
    linear, kept = fp8_linear(64, 32), []
    x = torch.randn(128, 64, requires_grad=True)
    for trainable in (True, False):
        linear.requires_grad_(trainable)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.nbytes), lambda t: t
        ):
            linear(x)
    assert kept == [128 * 64, 4, 32 * 64, 4, 32 * 64, 4]


@pytest.mark.parametrize(
    "setting, fast",
    [("none", [False] * 3), ("forward", [True, False, False]), ("all", [True] * 3)],
    ids=str,
)
def test_fast_accumulation(setting, fast):
    with mock.patch.object(fp8, "scaled_mm", wraps=fp8.scaled_mm) as product:
        passes(fp8_linear(32, 16, fast=setting), torch.randn(16, 32), torch.randn(16, 16))
    assert [call.args[5] for call in product.call_args_list] == fast
    with mock.patch.object(fp8, "scaled_mm", wraps=fp8.scaled_mm) as product:
        fp8_linear(32, 16, fast=setting)(torch.randn(16, 32)).sum().backward()
    assert product.call_count == 2  # nobody wants the gradient of x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)])
def test_products_on_the_cpu_are_those_of_torch(kinds, dtype):
    factors = [quantize(torch.randn(32, 48), kind) for kind in kinds]
    (a, a_inverse), (b, b_inverse) = factors
    expected = torch._scaled_mm(a, b.t(), a_inverse, b_inverse, out_dtype=dtype)
    torch.testing.assert_close(
        fp8.scaled_mm(a, b.t(), a_inverse, b_inverse, dtype, False), expected
    )


def test_products_get_the_layouts_that_hopper_has():
    with mock.patch.object(fp8, "scaled_mm", wraps=fp8.scaled_mm) as product:
        passes(
            fp8_linear(64, 48), torch.randn(3, 7, 64).bfloat16(), torch.randn(3, 7, 48).bfloat16()
        )
    types = [call.args[4] for call in product.call_args_list]
    # rounded once, a weight's gradient to its type
    assert types == [torch.bfloat16, torch.bfloat16, torch.float32]
    for (a, b, a_inverse, b_inverse, *_), _ in product.call_args_list:
        assert a.is_contiguous() and b.t().is_contiguous() and not b.is_contiguous()
        assert not any(size % 16 for size in (a.shape[1], *b.shape))
        assert (
            a_inverse.dtype == b_inverse.dtype == torch.float32
            and a_inverse.numel() == b_inverse.numel() == 1
        )


@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_compiled_as_one_graph(backend):
    torch.manual_seed(0)
    linear, x, grad = fp8_linear(64, 48, bias=True), torch.randn(5, 64), torch.randn(5, 48)
    compiled = torch.compile(linear, backend=backend, fullgraph=True)
    x.requires_grad_()
    y = compiled(x)
    for actual, expected in zip(
        [y, *torch.autograd.grad(y, [x, *linear.parameters()], grad)],
        passes(linear, x, grad),
        strict=True,
    ):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [None, "k_proj"])
def test_linears_with_the_same_input_round_and_transpose_it_once(bias, frozen):
    """And compute what each does for itself."""
    torch.manual_seed(0)
    config = model_config("llama3-8b-tiny", qkv_bias=bias)
    attention, x = (
        GroupedQueryAttention(config),
        torch.randn(5, 7, config.hidden_size, requires_grad=True),
    )
    to_fp8([attention], "forward")
    if frozen:
        attention.get_parameter(f"{frozen}.weight").requires_grad_(False)
    linears = [getattr(attention, name) for name in attention.same_input]
    grads = [torch.randn(5, 7, len(linear.weight)) for linear in linears]
    inputs = [x, *(p for linear in linears for p in linear.parameters() if p.requires_grad)]
    expected = [linear(x) for linear in linears]
    expected += torch.autograd.grad(expected, inputs, grads)
    with (
        mock.patch.object(fp8, "quantize", wraps=quantize) as rounded,
        mock.patch.object(fp8, "transposed", wraps=fp8.transposed) as transposed,
        mock.patch.object(fp8, "scaled_mm", wraps=fp8.scaled_mm) as product,
    ):
        actual = project(x, *linears)
        actual += torch.autograd.grad(actual, inputs, grads)
        assert rounded.call_count == 1 + 2 * len(linears)  # x, weights and gradients
        assert product.call_count == 3 * len(linears) - bool(frozen)
        attention.o_proj(torch.randn(16, attention.o_proj.in_features)).sum().backward()
    assert transposed.call_count == 1  # o_proj's input comes from no norm
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        if number == len(linears):  # the gradient of x is a sum, in another order
            torch.testing.assert_close(ours, theirs)
        else:
            assert torch.equal(ours, theirs)


def test_hooks_of_linears_with_the_same_input_run():
    attention, seen = GroupedQueryAttention(model_config("llama3-8b-tiny")), []
    to_fp8([attention], "forward")
    attention.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(output))
    outputs = project(
        torch.randn(1, 16, 64), attention.q_proj, attention.k_proj, attention.v_proj
    )
    assert len(seen) == 1 and torch.equal(seen[0], outputs[1])


@pytest.mark.parametrize("compiling", [False, True])
def test_adapters_of_linears_with_the_same_input_stay(compiling, monkeypatch):
    """Whether they are added before or after."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    torch.manual_seed(0)
    models, x = (
        [Decoder(model_config("llama3-8b-tiny", num_layers=1)) for _ in range(2)],
        torch.randn(1, 16, 64),
    )
    models[1].load_state_dict(models[0].state_dict())
    for model, steps in zip(models, ((add, convert), (convert, add)), strict=True):
        for step in steps:
            step(model)
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                nn.init.constant_(parameter, 0.1)
    attentions = [model.blocks[0].self_attn for model in models]
    plain = [linear.weight @ x[0].T for linear in (attentions[0].q_proj, attentions[0].k_proj)]
    with mock.patch.object(fp8, "scaled_mm", wraps=fp8.scaled_mm) as products:
        outputs = [
            project(x, *(getattr(each, name) for name in each.same_input)) for each in attentions
        ]
    assert products.call_count == 2 * 3
    for ours, theirs, without in zip(*outputs, [*plain, None], strict=True):
        assert torch.equal(ours, theirs)
        if without is not None:
            assert (ours[0].T - without).norm() > 0.5 * without.norm()


def add(model: nn.Module) -> None:
    add_adapters(model, Lora(rank=4))


def convert(model: nn.Module) -> None:
    to_fp8(model.blocks, "forward")


# ------------------------------------------------------------------------------------------------------------- experts


def fp8_experts(intermediate: int = 48) -> Experts:
    """A rank's only one."""
    experts = Experts(1, 64, intermediate, "relu2", bias=False)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    to_fp8([nn.ModuleList([experts])], "forward", experts=True)
    assert type(experts) is (Fp8Experts if intermediate % 16 == 0 else Experts)
    return experts


def product(
    experts: Experts, x: torch.Tensor, rows: list[int], grad: torch.Tensor
) -> list[torch.Tensor]:
    """That of up_proj for so many rows of each expert, and the gradients of x and the weights."""
    x = x.detach().requires_grad_()
    y = experts._product("up_proj", x, torch.tensor(rows).cumsum(0, dtype=torch.int32))
    return [y.detach(), *torch.autograd.grad(y, [x, experts.up_proj], grad)]


@pytest.mark.parametrize("rows", [[21], [1]], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_experts_products_are_of_rounded_numbers(rows, dtype, tolerance):
    torch.manual_seed(0)
    experts, tokens = fp8_experts(), sum(rows)
    x, grad = torch.randn(tokens, 64).to(dtype), 1e-6 * torch.randn(tokens, 48).to(dtype)
    y, dx, dw = product(experts, x, rows, grad)
    assert y.dtype == dx.dtype == dtype and dw.dtype == torch.float32
    (x, _), (g, _), weights = (
        nearest(x, E4M3),
        nearest(grad, E5M2),
        [nearest(w, E4M3)[0] for w in experts.up_proj],
    )
    parts = list(zip(x.split(rows), g.split(rows), weights, strict=True))
    expected = [
        torch.cat([x @ w.T for x, _, w in parts]),
        torch.cat([g @ w for _, g, w in parts]),
    ]
    for actual, right in zip(
        (y, dx, dw), [*expected, torch.stack([g.T @ x for x, g, _ in parts])], strict=True
    ):
        assert (actual - right).norm() < tolerance * right.norm()


@pytest.mark.parametrize(("size", "on_units"), [(48, 3), (40, 0)])
def test_one_expert_multiplies_on_fp8_units(size, on_units):
    """If its sizes are theirs."""
    with mock.patch.object(fp8, "scaled_mm", wraps=fp8.scaled_mm) as units:
        product(fp8_experts(size), torch.randn(8, 64), [8], torch.randn(8, size))
    assert units.call_count == on_units


def test_frozen_experts_get_no_gradient_and_keep_no_input():
    experts, kept = fp8_experts(), []
    x, offsets = torch.randn(32, 64, requires_grad=True), torch.tensor([32], dtype=torch.int32)
    for trainable in (True, False):
        experts.requires_grad_(trainable)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.nbytes), lambda t: t
        ):
            experts._product("up_proj", x, offsets)
    weights = [48 * 64, 4]  # in FP8, their scale
    assert kept == [32 * 64, 4, *weights, *weights]


def test_experts_without_tokens():
    y, dx, dw = product(fp8_experts(), torch.empty(0, 64), [0], torch.empty(0, 48))
    assert y.shape == (0, 48) and dx.shape == (0, 64) and torch.equal(dw, torch.zeros(1, 48, 64))


@pytest.mark.parametrize(("ep", "kind"), [(8, Fp8Experts), (4, Experts), (1, Experts)])
def test_several_experts_of_a_rank_stay_in_bf16(ep, kind):
    parallel = {"ep": ep, "dp_shard": 8}
    tree = {
        "model": "mixtral-8x7b-tiny",
        "precision": "fp8",
        "fp8": {"experts": True},
        "parallel": parallel,
    }
    config = from_dict(tree)
    model = make_model(config)
    assert {type(block.mlp.experts) for block in model.blocks} == {kind}
    told = "note: experts stay in bf16: fp8.experts=true needs parallel.ep=8, one on each rank"
    assert (told in notes_on_settings(config, 0)) == (kind is Experts)


# -------------------------------------------------------------------------------------------------------- whole models


def converted(model: nn.Module, tp: int = 1) -> set[str]:
    to_fp8(model.blocks, "none", tp)
    return {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def ends(names: set[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def test_which_linears_are_converted():
    with torch.device("meta"):
        dense, small, narrow, deepseek, wan = (
            (Wan if "wan" in name else Decoder)(model_config(name, **changes))
            for name, changes in (
                ("llama3-8b-tiny", {}),
                ("llama3-8b-tiny", {"intermediate_size": 200, "head_dim": 8}),
                ("llama3-8b-tiny", {"num_key_value_heads": 1, "head_dim": 8}),
                ("deepseek-v3-tiny", {}),
                ("wan2.1-1.3b-tiny", {}),
            )
        )
    attention, mlp = (
        {"q_proj", "k_proj", "v_proj", "o_proj"},
        {"gate_proj", "up_proj", "down_proj"},
    )
    assert ends(converted(dense)) == attention | mlp
    assert ends(converted(small)) == attention  # 200 is no multiple of 16
    # all three, which then round their input once
    for model, fits in ((dense, True), (small, True), (narrow, False)):
        names = converted(model)
        assert ("k_proj" in ends(names)) == fits
    names = converted(deepseek)
    assert not any(isinstance(module, Fp8Experts) for module in deepseek.modules())
    assert (
        not any("experts." in name and "shared" not in name for name in names)
        and "lm_head" not in names
    )
    assert {"q_b_proj", "kv_b_proj", "o_proj"} <= ends(names)
    assert {name.partition(".")[0] for name in converted(wan)} == {"blocks"}


def test_sizes_must_fit_on_every_tensor_parallel_rank():
    for tp, fits in ((1, True), (2, False)):
        with torch.device("meta"):
            names = ends(
                converted(Decoder(model_config("llama3-8b-tiny", intermediate_size=80)), tp)
            )
        assert "q_proj" in names and ("up_proj" in names) == fits


TREE = {
    "model": {"name": "llama3-8b-tiny", "vocab_size": 320, "num_layers": 1},
    "batch": {"global": 4, "micro": 4, "seq_len": 32},
    "device": "cpu",
}


def losses(precision: str) -> torch.Tensor:
    data = {"kind": "text", "path": "{stdlib}/json/*.py"}
    optim = {"lr": 3e-3, "warmup": 20, "schedule": "cosine"}
    config = from_dict(
        TREE | {"steps": 200, "data": data, "optim": optim, "precision": precision}
    )
    trainer, (dataset, _) = Trainer(config, start(config)), open_dataset(config)
    return torch.stack([trainer.step(dataset, step)["loss"] for step in range(200)])


def test_training_curve_stays_within_2_percent_of_bf16():
    ours, expected = (losses(precision).view(10, 20).mean(1) for precision in ("fp8", "bf16"))
    assert expected[-1] < 0.6 * expected[0]
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0)
    assert not torch.equal(ours, expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model": {"name": "llama3-8b-tiny", "hidden_size": 72}},
            "precision=fp8 needs a model width",
        ),
        (
            {
                "parallel": {"tp": 8},
                "model": {
                    "name": "llama3-8b-tiny",
                    "num_attention_heads": 8,
                    "num_key_value_heads": 8,
                },
            },
            "multiple of 16 x parallel.tp=8, not 64",
        ),
        (
            {"parallel": {"pp": 2, "vp": 2, "schedule": "ZBVZeroBubble"}},
            "precision=fp8 all of it would run twice",
        ),
        ({"fp8": {"fast_accumulation": "backward"}}, "fp8.fast_accumulation"),
        (
            {"fp8": {"experts": True}},
            "fp8.experts=true needs precision=fp8 and a model with experts",
        ),
        ({"fp8": {"keep_transposed": True}}, "parallel.reshard_after_forward=false"),
        (
            {"fp8": {"experts": True}, "model": "mixtral-8x7b-tiny", "precision": "bf16"},
            "fp8.experts=true needs precision",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_do_not_go(changes, message):
    with pytest.raises(InputError, match=message):
        from_dict({"precision": "fp8"} | TREE | changes)


def test_other_libraries_have_no_fp8():
    config = from_dict(TREE | {"precision": "fp8"})
    with pytest.raises(InputError, match="does not train in FP8"):
        check_versus(config, "transformers")
