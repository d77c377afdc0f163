"""Wan under bf16, FSDP2 and the compiler: what stays fp32, and the gradients of one process. See test_diffusion too."""

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from minitrain.errors import InputError
from minitrain.models import wan
from minitrain.models.fp8 import to_fp8
from minitrain.models.wan import Wan, WanConfig
from minitrain.parallel import tensor
from minitrain.parallel.context import context_parallel
from minitrain.parallel.fsdp import shard
from minitrain.parallel.shards import full_tensor
from minitrain.parallel.tensor import RMSNormOverHeads
from minitrain.parallel.tensor_wan import tensor_parallel_wan
from tests.helpers.gradients import assert_same_gradients
from tests.helpers.oracle import relative_error

CONFIG = WanConfig(
    num_attention_heads=4,
    attention_head_dim=12,
    ffn_dim=48,
    num_layers=3,
    in_channels=4,
    out_channels=4,
    text_dim=24,
    freq_dim=32,
)


def make_model(config: WanConfig = CONFIG) -> Wan:
    """Every parameter random, so that none hides a mistake."""
    model = Wan(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15 if parameter.ndim > 1 else 0.3, generator=generator)
            if parameter.ndim == 1:
                parameter += 1
    return model


def inputs(
    batch: int = 2, grid: tuple[int, int, int] = (3, 4, 4)
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, CONFIG.in_channels, *grid, generator=generator)
    return (
        latents,
        torch.linspace(998.39, 20.5, batch),
        torch.randn(batch, 7, CONFIG.text_dim, generator=generator),
    )


def test_time_norms_and_rotations_stay_fp32_in_bf16():
    model = make_model().bfloat16()
    check_fp32_islands(model)


def test_time_norms_and_rotations_stay_fp32_under_fsdp(pool):
    pool.run(1, check_fsdp)


def check_fsdp() -> None:
    model = make_model()
    shard(model, list(model.blocks), parameter_mesh(1), torch.bfloat16)
    check_fp32_islands(model)


def parameter_mesh(ranks: int):
    return init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp_replicate", "dp_shard"))


def check_fp32_islands(model: Wan) -> None:
    """Shifts, scales, gates, rotations and norms of a model in bf16 are those of one in fp32, to fp32 precision.

    bf16 would round timestep 998.39 to 1000, an angle of 149 radians' sine to two digits, and a norm's weight to three.
    """
    rounded = make_model()
    for name, parameter in rounded.named_parameters():
        if not any(part in name for part in ("adaln", "norm2", "time_")):
            parameter.data = parameter.data.bfloat16().float()
    seen = []
    for each in (model, rounded):
        each.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    given, tables = inputs(grid=(2, 2, 302)), []

    def record(function, table):
        tables.append(table)
        return function(table)

    with mock.patch.object(wan, "unbind_rows", partial(record, wan.unbind_rows)):
        out, exact = model(*given), rounded(*given)
    (x, _, rotary, *_), (_, _, exact_rotary, *_) = seen
    assert x.dtype == torch.bfloat16
    assert rotary[0].dtype == rotary[1].dtype == out.dtype == torch.float32
    torch.testing.assert_close(rotary, exact_rotary, atol=0, rtol=0)
    assert len(tables) == 2 * (CONFIG.num_layers + 1)
    torch.testing.assert_close(
        tables[: len(tables) // 2], tables[len(tables) // 2 :], atol=1e-5, rtol=1e-5
    )
    assert relative_error(out, exact) < 0.03


def test_norms_are_rounded_once():
    model, x = make_model().bfloat16(), torch.randn(2, 50, CONFIG.dim).bfloat16()
    norm, exact = model.blocks[0].norm2, make_model().blocks[0].norm2
    expected = F.layer_norm(x.float(), [CONFIG.dim], exact.weight, exact.bias, CONFIG.eps)
    assert torch.equal(wan.layer_norm(norm, x, CONFIG.eps), expected.bfloat16())


def check_rounded_once(found: Tensor, exact: Tensor) -> None:
    """But for few elements, which lie between two numbers of bf16 to fp32's last digits."""
    assert found.dtype == torch.bfloat16 and (found == exact.bfloat16()).float().mean() > 0.999


def test_modulations_rotations_and_norms_over_heads_are_rounded_once():
    x, (shift, scale) = (
        torch.randn(2, 50, CONFIG.dim).bfloat16(),
        torch.randn(2, 2, 1, CONFIG.dim),
    )
    exact = F.layer_norm(x.double(), [CONFIG.dim], eps=CONFIG.eps) * (1 + scale.double()) + shift
    check_rounded_once(wan.modulate(x, shift, scale, CONFIG.eps), exact)
    cos, sin = wan.rotary_tables_3d((2, 5, 5), 12, "cpu")
    heads = x.view(2, 50, -1, 12)
    check_rounded_once(
        wan.rotate_pairs(heads, cos, sin),
        wan.rotate_pairs(heads.double(), cos.double(), sin.double()),
    )
    norm, of_one_rank = (
        RMSNormOverHeads(CONFIG.dim, CONFIG.eps).bfloat16(),
        mock.Mock(apply=lambda x, name: x),
    )
    norm.group_name, norm.ranks = "", 1
    with mock.patch("minitrain.parallel.tensor.AllReduce", of_one_rank):
        check_rounded_once(norm(x), F.rms_norm(x.double(), [CONFIG.dim], eps=CONFIG.eps))


@pytest.mark.parametrize("part, gate", [("SelfAttention", 2), ("FeedForward", 5)])
def test_gated_sums_are_rounded_once(part, gate):
    block, (x, out) = (
        make_model().bfloat16().blocks[0],
        torch.randn(2, 2, 50, CONFIG.dim).bfloat16(),
    )
    modulation, patch = (
        torch.randn(2, 6, CONFIG.dim),
        partial(mock.patch.object, attribute="forward"),
    )
    with ExitStack() as stack:
        for name in ("SelfAttention", "CrossAttention", "FeedForward"):
            value = out if name == part else torch.zeros_like(x)
            stack.enter_context(patch(getattr(wan, name), new=lambda *_, value=value: value))
        found = block(x, modulation, *[None] * 4)
    rows = (block.adaln.scale_shift_table + modulation).double()
    check_rounded_once(found, x.double() + rows[:, gate, None] * out.double())


def test_fsdp_gives_the_gradients_of_one_process(pool):
    """Two ranks, one video each; the loss is a sum, and so are gradients over ranks."""
    expected = gradients(make_model(), *inputs())
    for found in pool.run(2, sharded_gradients):
        assert_same_gradients(found, expected)


def test_blocks_compile_as_one_graph():
    videos = inputs()
    expected, model = gradients(make_model(), *videos), make_model()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert_same_gradients(gradients(model, *videos), expected)


def gradients(model: Wan, latents: Tensor, timestep: Tensor, text: Tensor) -> dict[str, Tensor]:
    out = model(latents, timestep, text)
    sum(video.square().sum() for video in out).backward()
    return {name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()}


def sharded_gradients() -> dict[str, Tensor]:
    model = make_model()
    shard(model, model.blocks, parameter_mesh(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # FSDP warns of outputs whose hooks could be lost
        return gradients(
            model, *(value[torch.distributed.get_rank()][None] for value in inputs())
        )


def test_tokens_that_ranks_do_not_divide(pool):
    """Refused on both ranks alike, before any message."""
    pool.run(2, check_indivisible)


def check_indivisible() -> None:
    for split in (tensor_parallel_wan, partial(context_parallel, form="ulysses")):
        model, mesh = make_model(), init_device_mesh("cpu", (2,))
        split(model, mesh)
        model(*inputs(grid=(3, 4, 4)))
        with pytest.raises(
            InputError, match="a sequence of 15 tokens does not divide by 2 ranks"
        ):
            model(*inputs(grid=(3, 2, 10)))


def test_fp8_under_tensor_parallelism(pool):
    """What products in FP8 read is gathered in FP8, and the output and gradients stay those of one process."""
    pool.run(2, check_fp8_tensor_parallel)


def check_fp8_tensor_parallel() -> None:
    config = replace(CONFIG, attention_head_dim=16, ffn_dim=64)
    alone, split = (make_model(config) for _ in range(2))
    for model in (alone, split):
        to_fp8(list(model.blocks), "none", tp=2)
    tensor_parallel_wan(split, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    with mock.patch.object(tensor, "all_gather_fp8", wraps=tensor.all_gather_fp8) as gathers:
        outputs = [model(*inputs()) for model in (alone, split)]
    assert gathers.call_count == 3 * config.num_layers
    for output in outputs:
        output.square().sum().backward()
    assert relative_error(outputs[1], outputs[0]) < 0.05
    for (name, found), expected in zip(split.named_parameters(), alone.parameters(), strict=True):
        assert relative_error(full_tensor(found.grad), expected.grad) < 0.05, name
