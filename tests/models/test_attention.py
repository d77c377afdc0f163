"""The mask and the kernels behind it against a softmax over explicitly allowed pairs."""

import itertools
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from minitrain.models import attention as models_attention
from minitrain.models import flex as flex_module
from minitrain.models.attention import (
    Mask,
    attention,
    attention_with_sinks,
    dense_mask,
    make_mask,
)
from minitrain.models.decoder import Decoder
from minitrain.models.flex import block_mask, count_pairs
from minitrain.models.layers import apply_rotary, rotary_frequencies, rotary_tables
from minitrain.models.zoo import model_config
from minitrain.training.build import initialize

CPU = torch.device("cpu")


def brute_force(q, k, v, allowed):
    """One pair at a time; allowed(b, i, j) says whether query i of row b sees key j."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if allowed(b, i, j)]
                scores = (
                    torch.stack([q[b, h, i] @ k[b, h // group, j] for j in keys])
                    * q.shape[-1] ** -0.5
                )
                weights = scores.softmax(0)
                out[b, h, i] = sum(
                    w * v[b, h // group, j] for w, j in zip(weights, keys, strict=True)
                )
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", [None, [4, 0, 6]])
def test_attention_equals_brute_force(kv_heads, causal, packed, place):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 7 if place is None else 3, 8)
    k, v = torch.randn(2, 2, kv_heads, 7, 8)
    document_ids = (
        torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9]]) if packed else None
    )

    def allowed(b, query, j):
        i = query if place is None else place[query]
        return (j <= i or not causal) and (
            document_ids is None or document_ids[b, i] == document_ids[b, j]
        )

    mask = make_mask(7, CPU, document_ids, causal, None if place is None else torch.tensor(place))
    torch.testing.assert_close(
        attention(q, k, v, mask), brute_force(q, k, v, allowed), atol=1e-5, rtol=1e-5
    )


def test_only_what_needs_pairs_has_them():
    """Plain causal and full attention are left to the kernel that is fastest at them."""
    document_ids, q_positions = torch.zeros(1, 8, dtype=torch.long), torch.tensor([0, 1, 6, 7])
    for causal in (True, False):
        assert make_mask(8, CPU, causal=causal).attn_mask is None
        assert make_mask(8, CPU, document_ids, causal).attn_mask.shape == (1, 1, 8, 8)
    # all see all, wherever they are
    assert make_mask(8, CPU, q_positions=q_positions, causal=False).attn_mask is None
    assert make_mask(8, CPU, q_positions=q_positions).attn_mask.shape == (1, 1, 4, 8)


def packed_rows(length):
    """Two rows whose documents end at different places, never at a tile's border."""
    return torch.stack([torch.arange(length) // 100, torch.arange(length) // 77 + 5])


def split_places(rank, length=512):
    """The tokens of one of two context-parallel ranks."""
    return torch.cat([torch.arange(length).chunk(4)[i] for i in (rank, 3 - rank)])


CASES = [
    pytest.param(
        causal,
        packed,
        q_positions,
        id=f"{causal=} {packed=} {'all' if q_positions is None else 'own'}",
    )
    for causal in (True, False)
    for packed in (True, False)
    for q_positions in (None, split_places(0), split_places(1))
    if packed or (causal and q_positions is not None)
]


@pytest.mark.parametrize("causal, packed, q_positions", CASES)
def test_tiles_equal_dense_mask(causal, packed, q_positions):
    """The form for CUDA, which FlexAttention can run on CPU forwards."""
    torch.manual_seed(0)
    q = torch.randn(2, 2, 512 if q_positions is None else len(q_positions), 16)
    k, v = torch.randn(2, 2, 1, 512, 16)
    rule = dict(
        document_ids=packed_rows(512) if packed else None, causal=causal, q_positions=q_positions
    )
    expected = attention(q, k, v, make_mask(512, CPU, **rule))
    ours = flex_attention(q, k, v, block_mask=blocks(CPU, **rule), enable_gqa=True)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal, packed, q_positions", CASES)
@pytest.mark.parametrize("length", [512, 300])
def test_tiles_are_those_of_torch(monkeypatch, causal, packed, q_positions, length):
    """Made from three stretches of queries, or four; 300 leaves tiles that are not whole."""
    if q_positions is not None:
        q_positions = q_positions[q_positions < length]
    rule = dict(
        document_ids=packed_rows(length) if packed else None,
        causal=causal,
        q_positions=q_positions,
        window=200,
    )
    monkeypatch.setattr(
        models_attention,
        "dense_mask",
        lambda *given: create_block_mask(*given[:2], None, *given[2:]),
    )
    expected = make_mask(length, CPU, **rule).attn_mask
    monkeypatch.setattr(flex_module, "MAX_PAIRS", 128 * 512)
    ours = blocks(CPU, length, **rule)
    assert ours.seq_lengths == expected.seq_lengths and ours.BLOCK_SIZE == expected.BLOCK_SIZE
    for name in (
        "kv_num_blocks",
        "kv_indices",
        "full_kv_num_blocks",
        "full_kv_indices",
        "q_num_blocks",
        "q_indices",
        "full_q_num_blocks",
        "full_q_indices",
    ):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name


def test_pairs_are_counted_by_one_graph(monkeypatch):
    """Of long rows on CUDA; tiles at the end are not whole."""
    torch.compiler.reset()
    given = []
    monkeypatch.setattr(models_attention, "dense_mask", lambda *each: given.extend(each))
    make_mask(
        300, CPU, document_ids=packed_rows(300), q_positions=torch.arange(30, 230), window=200
    )
    mask_mod, batch, queries, keys, _ = given
    compiled = torch.compile(count_pairs, backend="aot_eager", fullgraph=True, dynamic=False)
    counts = compiled(mask_mod, batch, torch.arange(queries), keys)
    allowed = torch.nn.functional.pad(dense_mask(*given), (0, 384 - 300, 0, 256 - 200))
    tiles = [
        [tile.sum((2, 3)) for tile in rows.split(128, dim=3)]
        for rows in allowed.split(128, dim=2)
    ]
    assert torch.equal(counts, torch.stack([torch.stack(row, -1) for row in tiles], -2))
    torch.compiler.reset()


def test_masks_of_long_rows_do_not_hold_all_pairs(monkeypatch):
    """17 GB for 131,072 tokens."""
    largest = 0

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    monkeypatch.setattr(flex_module, "MAX_PAIRS", 2 * 256 * 2048)
    with Record():
        blocks(CPU, 2048, document_ids=packed_rows(2048))
    assert largest == 2 * 256 * 2048


def blocks(device, length=512, **rule):
    """`make_mask` with the form for CUDA, on any device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitrain.models.attention.dense_mask", block_mask)
        return make_mask(length, device, **rule).attn_mask


def test_flex_attention_is_compiled_for_many_shapes_and_never_runs_uncompiled(monkeypatch):
    """Uncompiled it would compute all scores, and see what the sampler's page lists leave out."""
    compiled, how = [], torch.compile

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda f, **options: how(f, backend=backend, **options))
    monkeypatch.setattr(flex_module, "flex_attention", lambda q: q + 1)
    monkeypatch.setitem(flex_module.COMPILING, "recompile_limit", 12)
    flex_module.compiled_flex_attention.cache_clear()
    flex = flex_module.compiled_flex_attention()
    flex_module.compiled_flex_attention.cache_clear()
    for length in [*range(2, 14), *range(2, 14)]:  # torch's own limit is 8
        flex(torch.zeros(length))
    assert len(compiled) == 12
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        flex(torch.zeros(14))


@pytest.mark.gpu
@pytest.mark.parametrize("causal, packed, q_positions", CASES)
def test_flex_attention_equals_dense_mask(causal, packed, q_positions):
    torch.manual_seed(0)
    q = torch.randn(
        2, 4, 512 if q_positions is None else len(q_positions), 64, requires_grad=True
    )
    k, v = (torch.randn(2, 2, 512, 64, requires_grad=True) for _ in range(2))
    rule = dict(document_ids=packed_rows(512) if packed else None, q_positions=q_positions)
    on_gpu = {key: value if value is None else value.cuda() for key, value in rule.items()}
    ours = attention(
        *(x.cuda() for x in (q, k, v)),
        make_mask(512, torch.device("cuda"), causal=causal, **on_gpu),
    )
    dense = attention(q, k, v, make_mask(512, CPU, causal=causal, **rule))
    torch.testing.assert_close(ours.cpu(), dense, atol=2e-3, rtol=2e-3)
    upstream = torch.randn_like(dense)
    expected = torch.autograd.grad(dense, (q, k, v), upstream)
    for mine, reference in zip(
        torch.autograd.grad(ours, (q, k, v), upstream.cuda()), expected, strict=True
    ):
        assert (mine.cpu() - reference.cpu()).norm() / reference.norm() < 2e-3


@pytest.mark.parametrize("window", [1, 3, 7, 20])
@pytest.mark.parametrize("packed", [False, True])
def test_a_window_is_so_many_keys_with_the_querys_own(window, packed):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 2, 7, 8)
    document_ids = (
        torch.tensor([[0, 0, 0, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9]]) if packed else None
    )

    def allowed(b, i, j):
        return i - window < j <= i and (
            document_ids is None or document_ids[b, i] == document_ids[b, j]
        )

    mask = make_mask(7, CPU, document_ids, window=window)
    torch.testing.assert_close(
        attention(q, k, v, mask), brute_force(q, k, v, allowed), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_are_one_more_term_below_the_line(window):
    torch.manual_seed(0)
    q, k = (
        torch.randn(2, 4, 7, 8, requires_grad=True),
        torch.randn(2, 2, 7, 8, requires_grad=True),
    )
    v, sinks = torch.randn(2, 2, 7, 8, requires_grad=True), torch.randn(4, requires_grad=True)
    rows = []
    for b, h, i in itertools.product(range(2), range(4), range(7)):
        seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
        terms = torch.exp(k[b, h // 2, seen] @ q[b, h, i] * 8**-0.5)
        rows.append(terms @ v[b, h // 2, seen] / (terms.sum() + sinks[h].exp()))
    expected = torch.stack(rows).view(2, 4, 7, 8)
    found = attention_with_sinks(q, k, v, make_mask(7, CPU, window=window, plain=False), sinks)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    upstream = torch.randn_like(found)
    mine, oracle = (torch.autograd.grad(x, (sinks, q, k, v), upstream) for x in (found, expected))
    torch.testing.assert_close(mine, oracle, atol=1e-5, rtol=1e-5)


def test_masks_for_sinks_are_built_once_for_all_layers():
    model = Decoder(model_config("gpt-oss-20b-tiny", num_layers=4))
    initialize(model, seed=0)
    with mock.patch("minitrain.models.attention.dense_mask", wraps=dense_mask) as build:
        model(torch.arange(32).view(2, 16))
    assert build.call_count == 2  # with and without a window


@pytest.mark.parametrize(
    ("queries", "kv_heads", "asked"),
    [(64, 2, False), (65, 2, True), (127, 2, True), (128, 2, False), (127, 4, False)],
)
def test_few_queries_get_a_kernel_whose_tile_holds_them(queries, kv_heads, asked):
    """Of all heads that share keys 128 at most, as torch's kernel for few queries takes no more."""
    q, k = torch.zeros(1, 4, queries, 8), torch.zeros(1, kv_heads, 128, 8)
    with mock.patch.object(flex_module, "compiled_flex_attention") as flex:
        attention(q, k, k, Mask(True, mock.Mock(spec=BlockMask)))
    assert ("kernel_options" in flex().call_args.kwargs) == asked


@pytest.mark.gpu
@pytest.mark.parametrize("length", [20, 72, 127])
@pytest.mark.parametrize("heads", [4, 8])
def test_short_rows_on_cuda(length, heads):
    """In groups of 2 and 4, on either side of what torch's kernel for few queries takes."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, h, length, 32, requires_grad=True) for h in (heads, 2, 2)]
    document_ids = (torch.arange(length) // 9).expand(2, -1)
    dense = attention(*inputs, make_mask(length, CPU, document_ids))
    ours = attention(
        *(x.cuda() for x in inputs), make_mask(length, torch.device("cuda"), document_ids.cuda())
    )
    torch.testing.assert_close(ours.cpu(), dense, atol=2e-3, rtol=2e-3)
    upstream = torch.randn_like(dense)
    expected = torch.autograd.grad(dense, inputs, upstream)
    for mine, reference in zip(
        torch.autograd.grad(ours, inputs, upstream.cuda()), expected, strict=True
    ):
        assert (mine - reference).norm() / reference.norm() < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 128])
def test_sinks_on_cuda_equal_those_on_the_cpu(window):
    torch.manual_seed(0)
    inputs = [
        torch.randn(4),
        torch.randn(2, 4, 512, 64),
        torch.randn(2, 2, 512, 64),
        torch.randn(2, 2, 512, 64),
    ]
    results = []
    for device in (CPU, torch.device("cuda")):
        there = [x.to(device).requires_grad_() for x in inputs]
        sinks, q, k, v = there
        mask = make_mask(512, device, window=window, plain=False)
        out = attention_with_sinks(q, k, v, mask, sinks)
        results.append([out, *torch.autograd.grad(out.square().sum(), there)])
    for oracle, mine in zip(*results, strict=True):
        assert (mine.cpu() - oracle).norm() / oracle.norm() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [8, 16])  # of which 8 turn
def test_compiled_rotation_has_the_gradient_of_the_formula(dtype, channels):
    """torch 2.11's compiler loses that of a Function which ends in a `to` that does nothing, or in place."""
    torch.manual_seed(0)
    x, grad = (torch.randn(2, 5, 3, channels, dtype=dtype) for _ in range(2))
    frequencies = rotary_frequencies(8, 100.0)
    positions = torch.arange(5)[None]
    angles = (positions[..., None] * frequencies)[..., None, :]
    theirs = x.clone().requires_grad_()
    halves = theirs[..., :4], theirs[..., 4:8]
    cos, sin = 1.5 * angles.cos(), 1.5 * angles.sin()
    turned = halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin
    expected = torch.cat([*(half.to(dtype) for half in turned), theirs[..., 8:]], dim=-1)
    expected.backward(grad)
    tables = rotary_tables(positions, frequencies, 1.5)
    for function in (
        apply_rotary,
        torch.compile(apply_rotary, backend="aot_eager", fullgraph=True),
    ):
        ours = x.clone().requires_grad_()
        y = function(ours, *tables)
        y.backward(grad)
        assert y.dtype == ours.grad.dtype == dtype
        rough = (
            dict(rtol=2**-6, atol=2**-6)
            if dtype == torch.bfloat16
            else dict(rtol=1e-5, atol=1e-5)
        )
        torch.testing.assert_close(y, expected, **rough)
        torch.testing.assert_close(ours.grad, theirs.grad, **rough)


def test_rotations_of_late_positions_are_exact():
    """bf16 knows no odd number above 256."""
    positions, frequencies = torch.arange(1000, 1100)[None], rotary_frequencies(8, 500.0)
    angles = positions[0, :, None].double() * frequencies.double()
    for table, sign, wave in zip(
        rotary_tables(positions, frequencies, 1.0), (1, -1), (torch.cos, torch.sin), strict=True
    ):
        expected = torch.cat([sign * wave(angles), wave(angles)], dim=1)
        torch.testing.assert_close(table[0, :, 0].double(), expected, atol=1e-4, rtol=0)
