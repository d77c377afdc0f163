"""Forms of scaled FP8: every block against a table of all FP8 numbers, products against sums over blocks, and what a
GPU's units are given against the checks of torch 2.13's ScaledBlas.cpp, which an emulator makes."""

from unittest import mock

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models import fp8_forms
from minitrain.models.fp8 import Fp8Experts, Fp8Linear, to_fp8
from minitrain.models.fp8_forms import FORMS, dequantized_note, swizzle
from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, dequantize, quantize, to_exponents
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.training.loop import Trainer

inf = float("inf")
BLOCKS = {"row": (1, None), "block": (1, 128), "mx": (1, 32)}
WEIGHT_BLOCKS = BLOCKS | {"block": (128, 128)}
forms = pytest.mark.parametrize("form", list(BLOCKS))


def rounded(x: torch.Tensor, block) -> torch.Tensor:
    """x [rows, columns] rounded block by block: each has the largest scale, of all powers of two, that clamps nothing,
    and each number becomes the nearest of all FP8 numbers."""
    rows, columns = (size or whole for size, whole in zip(block, x.shape, strict=True))
    parts = x.detach().double().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    largest = parts.abs().amax((1, 3), keepdim=True)
    scale = torch.zeros_like(largest)
    for power in range(-60, 60):
        scale = torch.where(largest * 2.0**power <= 448, 2.0**power, scale)
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
    scaled = parts.abs() * scale
    # the midpoints between numbers go to the even one, of which the code's last bit is 0
    middle = (numbers[1:] + numbers[:-1]) / 2
    below, above = (torch.bucketize(scaled, middle, right=side) for side in (False, True))
    index = torch.where(below % 2 == 0, below, above)
    return (numbers[index] * parts.sign() / scale).view(x.shape)


def padded(x: torch.Tensor, form: str) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, -len(x) % FORMS[form].multiple))


def factors(x, g, w, form: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rounded factors of y, dx and dw, each of a sum over the columns of both."""
    across, of_weights = BLOCKS[form], WEIGHT_BLOCKS[form]
    turned = [rounded(padded(each, form).T.contiguous(), across) for each in (g, x)]
    return [
        (rounded(x, across), rounded(w, of_weights)),
        (rounded(g, across), rounded(w.T.contiguous(), of_weights)),
        tuple(turned),
    ]


def in_form(linear: nn.Linear, form: str) -> Fp8Linear:
    to_fp8([nn.ModuleList([linear])], "none", form=form)
    assert type(linear) is Fp8Linear
    return linear


def passes(linear: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = linear(x)
    return [y.detach(), *torch.autograd.grad(y, [x, linear.weight], grad)]


def uneven(*shape: int) -> torch.Tensor:
    """Numbers whose rows and columns differ in size by powers of ten."""
    scales = [10.0 ** torch.randint(-2, 3, (size,)) for size in shape]
    return torch.randn(shape) * scales[0][:, None] * scales[1]


# ------------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("block", [(1, None), (1, 128), (128, 128), (1, 32), (None, 32)], ids=str)
def test_blocks_are_rounded_to_the_nearest_numbers(block):
    torch.manual_seed(0)
    x = uneven(128, 128)
    x8, inverse = quantize(x, E4M3, block)
    assert torch.equal(inverse.log2(), inverse.log2().round())
    assert torch.equal(dequantize(x8, inverse, torch.float32, block).double(), rounded(x, block))
    # strides do not matter, and stacks are matrices
    turned = quantize(x.t().contiguous().t().expand(2, -1, -1), E4M3, block)
    assert torch.equal(turned[0][1].float(), x8.float()) and torch.equal(turned[1][0], inverse)


def test_e8m0_is_the_smallest_power_of_two_that_clamps_nothing():
    """2^ceil(log2(max / 448)), with a bias of 127; 255 for what is not finite."""
    largest = torch.tensor(
        [448.0, 448.5, 447.0, 224.0, 225.0, 1.0, 3e-5, 3e30, inf, -inf, torch.nan]
    )
    _, inverse = quantize(largest[:, None].expand(-1, 32), E4M3, (1, 32))
    finite = largest[:8].double()
    expected = (finite / 448).log2().ceil() + 127
    assert to_exponents(inverse)[:8, 0].tolist() == expected.tolist()
    assert to_exponents(inverse)[8:, 0].tolist() == [255] * 3
    as_torch = inverse[:8].to(torch.float8_e8m0fnu)
    assert torch.equal(as_torch.view(torch.uint8), to_exponents(inverse[:8]))


def test_tiles_of_scales():
    """Row r, column c of a tile of 128 x 4 lies at 16 (r % 32) + 4 (r / 32) + c (cuBLAS, 1D block scaling)."""
    inverse = 2.0 ** torch.randint(-100, 100, (150, 6))
    flat = swizzle(inverse).view(torch.uint8)
    assert flat.shape == (2 * 2 * 512,)
    for r in range(256):
        for c in range(8):
            at = 512 * (2 * (r // 128) + c // 4) + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
            right = to_exponents(inverse[r, c]).item() if r < 150 and c < 6 else 0
            assert flat[at] == right


# ------------------------------------------------------------------------------------------------------------ products


@forms
def test_products_are_those_of_rounded_factors(form):
    torch.manual_seed(0)
    linear = in_form(nn.Linear(384, 256, bias=False), form)
    linear.weight.data = uneven(256, 384)
    x, g = uneven(50, 384), uneven(50, 256) * 1e-6
    expected = [a @ b.T for a, b in factors(x, g, linear.weight.detach(), form)]
    for ours, right in zip(passes(linear, x, g), expected, strict=True):
        assert (ours - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize("inputs", [128, 384, 640])
def test_a_product_is_the_sum_over_blocks_to_the_bit(inputs):
    """Of 1, 3 and 5 blocks, of whole numbers, whose sums fp32 holds exactly."""
    torch.manual_seed(0)
    linear = in_form(nn.Linear(inputs, 256, bias=False), "block")
    shape = 256 // 128, 128, inputs // 128, 128
    sizes = 2.0 ** torch.randint(-2, 3, (shape[0], 1, shape[2], 1))
    linear.weight.data = (torch.randint(-8, 9, shape) * sizes).view(256, inputs)
    x = torch.randint(-8, 9, (128, inputs)) * 2.0 ** torch.randint(-2, 3, (128, 1))
    (x8, x_scales), (w8, w_scales) = (
        quantize(each, E4M3, block)
        for each, block in ((x, (1, 128)), (linear.weight, (128, 128)))
    )
    expected = torch.zeros(128, 256)
    for k in range(inputs // 128):
        part = slice(128 * k, 128 * (k + 1))
        scales = x_scales[:, k, None] * w_scales[:, k].repeat_interleave(128)
        expected += (x8[:, part].float() @ w8[:, part].float().T) * scales
    assert torch.equal(linear(x), expected) and torch.equal(expected, x @ linear.weight.T)


@forms
def test_other_cuts_of_the_tokens_give_the_same_bytes(form):
    torch.manual_seed(0)
    linear = in_form(nn.Linear(256, 128, bias=False), form)
    x, g = uneven(256, 256), uneven(256, 128)
    y, dx, dw = passes(linear, x, g)
    parts = [passes(linear, *part) for part in zip(x.split(128), g.split(128), strict=True)]
    for whole, *cut in zip((y, dx), *(part[:2] for part in parts), strict=True):
        # the products' own order of sums may depend on their sizes
        torch.testing.assert_close(
            torch.cat(cut), whole, rtol=1e-5, atol=1e-5 * whole.abs().max()
        )
    rows = [quantize(each, E4M3, BLOCKS[form]) for each in (x, *x.split(100))]
    for whole, *cut in zip(*rows, strict=True):
        assert torch.equal(torch.cat(cut).view(torch.uint8), whole.view(torch.uint8))
    if form != "row":
        assert (parts[0][2] + parts[1][2] - dw).norm() < 1e-6 * dw.norm()


@forms
def test_gradients_are_within_the_bound_of_rounding(form):
    """A factor is off by 2^-4 of itself, or by half a step of subnormal numbers, 2^-10 / scale."""
    torch.manual_seed(0)
    linear = in_form(nn.Linear(128, 256, bias=False), form)
    x, g, w = uneven(128, 128), uneven(128, 256), linear.weight.detach()

    def error(a: torch.Tensor, block) -> torch.Tensor:
        a, rows, columns = a.double(), *(n or a.shape[i] for i, n in enumerate(block))
        parts = a.abs().unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        step = 2.0 ** ((parts.amax((1, 3), keepdim=True) / 448).log2().ceil() - 10)
        return torch.maximum(parts * 2**-4, step).flatten(0, 1).flatten(1)

    block, of_weights = BLOCKS[form], WEIGHT_BLOCKS[form]
    pairs = [
        ((x, block), (w, of_weights)),
        ((g, block), (w.T, of_weights)),
        ((g.T, block), (x.T, block)),
    ]
    for ours, ((a, a_block), (b, b_block)) in zip(passes(linear, x, g), pairs, strict=True):
        da, db = error(a, a_block), error(b, b_block)
        bound = da @ b.T.double().abs() + a.double().abs() @ db.T + da @ db.T
        off = (ours - a.double() @ b.T.double()).abs()
        assert (off <= bound * 1.001).all() and off.max() > 0


@forms
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_compiled_as_one_graph(form, backend):
    torch.manual_seed(0)
    linear, x, grad = in_form(nn.Linear(128, 128), form), torch.randn(5, 128), torch.randn(5, 128)
    compiled = torch.compile(linear, backend=backend, fullgraph=True)
    x.requires_grad_()
    y = compiled(x)
    gradients = torch.autograd.grad(y, [x, linear.weight], grad)
    for actual, expected in zip([y, *gradients], passes(linear, x, grad), strict=True):
        assert torch.equal(actual, expected)


@forms
def test_what_is_not_finite_makes_its_products_nan(form):
    for where in range(3):
        linear = in_form(nn.Linear(128, 128, bias=False), form)
        given = [linear.weight.data, torch.randn(16, 128), torch.randn(16, 128)]
        given[where][3, 5] = inf
        for product, without in zip(passes(linear, *given[1:]), (2, 1, 0), strict=True):
            assert product.isnan().any() == (where != without)


@forms
@pytest.mark.parametrize("tokens", [(), (0, 4), (1,), (3, 43)], ids=str)
def test_any_number_of_tokens(form, tokens):
    linear = in_form(nn.Linear(128, 256), form)
    x = torch.randn(*tokens, 128) if tokens else torch.randn(1, 128)
    y, dx, dw = passes(linear, x, torch.ones(*x.shape[:-1], 256))
    assert y.shape == (*x.shape[:-1], 256) and dx.shape == x.shape
    expected = x.flatten(0, -2).sum(0).expand(256, -1)
    assert (dw - expected).norm() <= 2**-4 * max(expected.norm(), x.norm() * 16)


# ------------------------------------------------------------------------------------------------------------- experts


def experts_of(form: str, count: int = 4) -> Experts:
    experts = Experts(count, 128, 256, "relu2", bias=False)
    for parameter in experts.parameters():
        parameter.data = torch.stack([uneven(*parameter.shape[1:]) for _ in range(count)])
    to_fp8([nn.ModuleList([experts])], "none", experts=True, form=form)
    assert type(experts) is Fp8Experts
    return experts


def product(experts: Experts, x, rows: list[int], grad):
    """up_proj's product, with so many rows of each expert, and gradients of x and the stack."""
    x = x.detach().requires_grad_()
    y = experts._product("up_proj", x, torch.tensor(rows).cumsum(0, dtype=torch.int32))
    return [y.detach(), *torch.autograd.grad(y, [x, experts.up_proj], grad)]


@forms
@pytest.mark.parametrize("rows", [[21, 0, 130, 1], [0, 0, 7, 0], [16, 32, 128, 0]], ids=str)
def test_experts_are_rounded_and_multiplied_each_for_itself(form, rows):
    torch.manual_seed(0)
    experts = experts_of(form)
    x, g = uneven(sum(rows), 128), uneven(sum(rows), 256) * 1e-6
    found = [[], [], []]
    for part, grad, w in zip(x.split(rows), g.split(rows), experts.up_proj.detach(), strict=True):
        if len(part):
            parts = [a @ b.T for a, b in factors(part, grad, w, form)]
        else:
            parts = [torch.empty(0, 256), torch.empty(0, 128), torch.zeros(256, 128)]
        for one, all_of_them in zip(parts, found, strict=True):
            all_of_them.append(one.double())
    expected = torch.cat(found[0]), torch.cat(found[1]), torch.stack(found[2])
    for ours, right in zip(product(experts, x, rows, g), expected, strict=True):
        assert (ours - right).norm() < 1e-6 * right.norm()
    empty = torch.tensor(rows) == 0
    assert not product(experts, x, rows, g)[2][empty].any()


def test_experts_without_any_rows():
    for form in BLOCKS:
        for count in (1, 4):
            experts, none = experts_of(form, count), torch.empty(0, 128)
            y, dx, dw = product(experts, none, [0] * count, torch.empty(0, 256))
            assert y.shape == (0, 256) and dx.shape == (0, 128) and not dw.any()


@forms
def test_experts_compile_once_whatever_their_rows(form):
    """The compiler knows no more of them than it does of what an all-to-all brings."""
    torch.manual_seed(0)
    experts = experts_of(form)

    def run(x, offsets):
        rows = offsets[-1].item()
        torch._check(rows >= 0)
        torch._check(rows <= len(x))
        return experts._product("up_proj", x.narrow(0, 0, rows), offsets)

    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager_decomp_partition")
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for rows in ([5, 0, 30, 2], [1, 1, 1, 40]):
        x, g = torch.randn(50, 128, requires_grad=True), torch.randn(sum(rows), 256)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            y = compiled(x, torch.tensor(rows).cumsum(0, dtype=torch.int32))
        dx, dw = torch.autograd.grad(y, [x, experts.up_proj], g)
        expected = product(experts, x[: sum(rows)], rows, g)
        for ours, right in zip((y, dx[: sum(rows)], dw), expected, strict=True):
            assert torch.equal(ours, right)
    assert backend.frame_count == 1


@forms
def test_frozen_weights_keep_no_input(form):
    linear, kept = in_form(nn.Linear(128, 128, bias=False), form), []
    linear.requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: None):
        linear(torch.randn(300, 128, requires_grad=True))
    assert kept and not any(300 in shape or 384 in shape for shape in kept)


# --------------------------------------------------------------------------------------------------------------- units


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def check_block_scales(scales, rows: int, k: int, kind) -> torch.Tensor:
    """As _scaled_block1x128_block128x128 checks them; returns one for each row and 128 columns."""
    blocks = -(-k // 128)
    if kind == F.ScalingType.BlockWise1x128:
        assert scales.shape == (rows, blocks) and scales.stride(0) == 1
        assert scales.stride(1) == rows or (blocks == 1 and scales.stride(1) == 1)
        return scales
    assert kind == F.ScalingType.BlockWise128x128
    lead = round_up(blocks, 4)
    assert scales.shape == (lead, -(-rows // 128)) and scales.stride(0) == 1
    assert scales.stride(1) == lead or (scales.shape[1] == 1 and scales.stride(1) == 1)
    assert not scales[blocks:].any()
    return scales[:blocks].t().repeat_interleave(128, 0)


def unswizzled(flat: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    assert flat.dtype == torch.float8_e8m0fnu and flat.is_contiguous()
    assert flat.numel() == round_up(rows, 128) * round_up(columns, 4)
    r, c = torch.arange(rows)[:, None], torch.arange(columns)
    tile = round_up(columns, 4) // 4 * (r // 128) + c // 4
    codes = flat.view(torch.uint8)[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4]
    return 2.0 ** (codes.double() - 127)


def units(a, b, scale_a, kind_a, scale_b, kind_b, tile_a=None, tile_b=None, **options):
    """F.scaled_mm, as the checks of torch's ScaledBlas.cpp let it be called."""
    assert options["output_dtype"] == torch.bfloat16 and options.keys() == {
        "output_dtype",
        "use_fast_accum",
    }
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == E4M3 and b.shape == (k, n)
    assert a.stride() == (k, 1) and b.stride() == (1, k) and not k % 16 and not n % 16
    if kind_a == F.ScalingType.RowWise:
        assert scale_a.shape == (m, 1) and scale_b.shape == (1, n) and scale_b.stride(1) == 1
        assert kind_b == kind_a and tile_a is tile_b is None
        spread = scale_a.expand(m, k), scale_b.t().expand(n, k)
    elif kind_a == F.ScalingType.BlockWise1x32:
        assert kind_b == kind_a and tile_a == tile_b == F.SwizzleType.SWIZZLE_32_4_4
        spread = [
            unswizzled(scales, rows, k // 32).repeat_interleave(32, 1)
            for scales, rows in ((scale_a, m), (scale_b, n))
        ]
    else:
        # cuBLAS: TMA copies of scales begin at multiples of 16 bytes
        assert kind_a == F.ScalingType.BlockWise1x128 and k % 128 == 0 and m % 4 == 0
        spread = [
            check_block_scales(scales, rows, k, kind).repeat_interleave(128, 1)
            for scales, rows, kind in ((scale_a, m, kind_a), (scale_b, n, kind_b))
        ]
    return (a.double() * spread[0] @ (b.t().double() * spread[1]).t()).float()


def grouped_units(
    a, b, scale_a, kind_a, scale_b, kind_b, tile_a=None, tile_b=None, *, offs, **options
):
    """F.scaled_grouped_mm, as the checks of torch's GroupedBlas.cpp let it be called."""
    assert options["output_dtype"] == torch.bfloat16
    assert a.stride(-1) == 1 and b.stride(-2) == 1 and offs.dtype == torch.int32
    ends, starts = offs.tolist(), [0, *offs.tolist()[:-1]]
    groups = list(zip(starts, ends, strict=True))
    if kind_a == F.ScalingType.RowWise:
        assert kind_b == kind_a and tile_a is tile_b is None
        scales_of = row_scales_of_groups
    else:
        assert kind_a == kind_b == F.ScalingType.BlockWise1x32
        assert tile_a == tile_b == F.SwizzleType.SWIZZLE_32_4_4
        scales_of = tiles_of_groups
    products = []
    spread = scales_of(a, b, scale_a, scale_b, groups)
    for e, ((i, j), (of_a, of_b)) in enumerate(zip(groups, spread, strict=True)):
        left, right = (a[i:j], b[e]) if b.ndim == 3 else (a[:, i:j], b[i:j])
        products.append((left.double() * of_a @ (right.double() * of_b.t())).float())
        if i == j:
            # kernels leave what they like for experts without rows
            products[-1] += torch.nan
    return torch.cat(products) if b.ndim == 3 else torch.stack(products)


def row_scales_of_groups(a, b, scale_a, scale_b, groups):
    """As _check_scales_fp8_rowwise has them; [m, 1] and [n, 1] of each group."""
    assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_a.is_contiguous()
    m, n = len(a), b.shape[-1]
    if b.ndim == 3:
        assert scale_a.shape == (m,) and scale_b.shape == (len(b), n) and scale_b.stride(1) == 1
        return [(scale_a[i:j, None], scale_b[e, :, None]) for e, (i, j) in enumerate(groups)]
    assert scale_a.shape == (m * len(groups),) and scale_b.shape == (n * len(groups),)
    assert scale_b.is_contiguous() and not any(j % 16 for _, j in groups)
    return list(zip(scale_a.view(-1, m, 1), scale_b.view(-1, n, 1), strict=True))


def tiles_of_groups(a, b, scale_a, scale_b, groups):
    """As _check_scales_blocked has them: a group's tiles lie behind those of the groups before it."""
    assert (
        scale_a.ndim == scale_b.ndim == 2 and scale_a.is_contiguous() and scale_b.is_contiguous()
    )
    spread, start = [], 0
    if b.ndim == 3:
        (_, k), (count, _, n) = a.shape, b.shape
        width = round_up(k // 32, 4)
        assert len(scale_a) >= len(a) and scale_b.shape == (count, width * round_up(n, 128))
        for e, (i, j) in enumerate(groups):
            rows = round_up(j - i, 128)
            own = scale_a.flatten()[start * width : (start + rows) * width]
            pair = unswizzled(own, j - i, k // 32), unswizzled(scale_b[e], n, k // 32)
            spread.append([each.repeat_interleave(32, 1) for each in pair])
            start += rows
        return spread
    assert (
        len(scale_a) >= len(a)
        and len(scale_b) >= b.shape[1]
        and not any(j % 32 for _, j in groups)
    )
    for i, j in groups:
        blocks = (j - i) // 32
        pair = []
        for scale, rows in ((scale_a, len(a)), (scale_b, b.shape[1])):
            high = round_up(rows, 128)
            own = scale.flatten()[high * start : high * (start + round_up(blocks, 4))]
            pair.append(unswizzled(own, rows, blocks).repeat_interleave(32, 1))
        spread.append(pair)
        start += round_up(blocks, 4)
    return spread


@forms
def test_units_get_scales_as_they_take_them(form):
    torch.manual_seed(0)
    linear = in_form(nn.Linear(640, 384, bias=False), form)
    given = uneven(201, 640), uneven(201, 384)
    expected = passes(linear, *given)
    with (
        mock.patch.object(fp8_forms, "has_kernel", lambda form, x: True),
        mock.patch.object(F, "scaled_mm", side_effect=units) as calls,
    ):
        found = passes(linear, *given)
    assert calls.call_count == 3
    for ours, right in zip(found, expected, strict=True):
        assert (ours - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize("rows", [[21, 0, 130, 1], [0, 300, 0, 0], [128, 256, 0, 128]], ids=str)
@pytest.mark.parametrize("form", ["row", "mx"])
def test_grouped_units_get_scales_as_they_take_them(form, rows):
    torch.manual_seed(0)
    experts = experts_of(form)
    x, g = uneven(sum(rows), 128), uneven(sum(rows), 256)
    expected = product(experts, x, rows, g)
    with (
        mock.patch.object(fp8_forms, "has_grouped_kernel", lambda form, x: True),
        mock.patch.object(F, "scaled_grouped_mm", side_effect=grouped_units) as calls,
    ):
        found = product(experts, x, rows, g)
    assert calls.call_count == 3
    for ours, right in zip(found, expected, strict=True):
        assert (ours - right).norm() < 1e-6 * right.norm()


@pytest.mark.parametrize(
    "form, capability, experts, missing",
    [
        ("tensor", (8, 9), True, None),
        ("row", (9, 0), True, None),
        ("row", (10, 3), True, "products of experts"),
        ("row", (8, 9), False, "products"),
        ("row", (12, 0), False, "products"),
        ("block", (9, 0), False, None),
        ("block", (9, 0), True, "products of experts"),
        ("block", (10, 0), True, "products and products of experts"),
        ("mx", (9, 0), False, "products"),
        ("mx", (10, 0), True, None),
        ("mx", (10, 3), True, "products of experts"),
        ("mx", (12, 0), False, None),
    ],
)
def test_a_run_says_what_its_gpu_lacks(form, capability, experts, missing):
    with (
        mock.patch.object(torch.cuda, "get_device_capability", lambda device: capability),
        mock.patch.object(torch.cuda, "get_device_name", lambda device: "ANY"),
    ):
        told = dequantized_note(form, experts, torch.device("cuda"))
    assert (told is None) == (missing is None)
    if missing:
        assert f"ANY has no units for its {missing}: they are computed" in told
    assert dequantized_note(form, experts, torch.device("cpu")) is None


# ------------------------------------------------------------------------------------------------------------ settings

TREE = {
    "model": {"name": "mixtral-8x7b-tiny", "hidden_size": 256, "intermediate_size": 256},
    "batch": {"global": 4, "micro": 4, "seq_len": 32},
    "device": "cpu",
    "precision": "fp8",
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"fp8": {"form": "blocks"}}, "fp8.form"),
        (
            {"fp8": {"form": "block", "fast_accumulation": "all"}},
            "fp8.form=tensor or row, not block",
        ),
        (
            {"fp8": {"form": "mx", "fast_accumulation": "forward"}},
            "fp8.form=tensor or row, not mx",
        ),
        (
            {
                "fp8": {"form": "row", "keep_transposed": True},
                "parallel": {"reshard_after_forward": False},
            },
            "fp8.form=row rounds them for each product",
        ),
        (
            {"fp8": {"form": "block"}, "parallel": {"tp": 4}},
            "fp8.form=block needs a model width that is a multiple of 128 x parallel.tp=4, not 256",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go(changes, message):
    with pytest.raises(InputError, match=message):
        from_dict(TREE | changes)


def test_tensor_parallelism_may_not_cut_blocks():
    block = nn.ModuleDict({"up_proj": nn.Linear(256, 384)})
    with pytest.raises(InputError, match="tp=2 cuts up_proj of 384 x 256 .* multiples of 128"):
        to_fp8([block], "none", 2, form="block")
    to_fp8([block], "none", 2, form="mx")
    assert type(block.up_proj) is Fp8Linear
    # 200 is no multiple of 128 on one rank either: it stays as it is
    to_fp8([whole := nn.ModuleDict({"up_proj": nn.Linear(256, 200)})], "none", form="block")
    assert type(whole.up_proj) is nn.Linear


# ------------------------------------------------------------------------------------------------------------ training

CURVE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 320,
        "num_layers": 1,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "batch": {"global": 4, "micro": 4, "seq_len": 32},
    "steps": 40,
    "data": {"kind": "text", "path": "{stdlib}/json/*.py"},
    "optim": {"lr": 3e-3, "warmup": 5},
    "device": "cpu",
}


def losses(**changes) -> torch.Tensor:
    """The mean loss of every 10 steps."""
    config = from_dict(CURVE | changes)
    trainer, (dataset, _) = Trainer(config, start(config)), open_dataset(config)
    return torch.stack([trainer.step(dataset, i)["loss"] for i in range(40)]).view(4, 10).mean(1)


def test_curves_in_each_form_are_nearer_to_bf16_than_other_seeds_are():
    bf16, *seeds = (losses(precision="bf16", seed=seed) for seed in (0, 1, 2))
    spread = max((other - bf16).abs().max() for other in seeds)
    assert bf16[-1] < 0.8 * bf16[0]
    for form in BLOCKS:
        ours = losses(precision="fp8", fp8={"form": form}, seed=0)
        assert 0 < (ours - bf16).abs().max() < spread
