"""What tests/gpu_emulator runs and replaces, on the CPU: it fails here when the package or torch moves a piece."""

import inspect

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from minitrain.run.config.load import from_dict
from tests.gpu_emulator.operators import ARGUMENTS
from tests.gpu_emulator.roofline import MEMORY, generated_bytes, operator_cost, summarize
from tests.gpu_emulator.steps import fake_world, make_step

TREE = {
    "model": {"name": "qwen3-30b-a3b-tiny"},
    "batch": {"global": 4, "micro": 2, "seq_len": 32},
    "rollout": {"max_tokens": 8, "page_size": 16, "steps": 2},
    "device": "cpu",
}
KERNEL = """
def triton_poi_fused_gather_0(in_ptr0, in_ptr1, in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 64
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = tl.load(in_ptr1 + (tmp0 + 1000*x0), xmask)
    tmp2 = tl.load(in_out_ptr0 + (x0), xmask)
    tl.store(in_out_ptr0 + (x0), tmp1, xmask)

def get_args():
    arg_0 = rand_strided((64,), (1,), device='cuda:0', dtype=torch.int64)
    arg_1 = rand_strided((64, 1000), (1000, 1), device='cuda:0', dtype=torch.bfloat16)
    arg_2 = rand_strided((64, 1), (1, 1), device='cuda:0', dtype=torch.float32)
"""


@pytest.mark.parametrize("ranks, generate", [(1, False), (2, False), (1, True)])
def test_steps_are_the_packages_own(ranks, generate):
    tree = TREE | {"parallel": {"dp_shard": ranks, "ep": ranks}}
    with fake_world(ranks):
        step = make_step(from_dict(tree), "cpu", generate)
        step(0)
        step(1)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operators_have_their_arguments_where_they_are_logged(name):
    factors = {"self", "mat1", "mat2", "batch1", "batch2", "other"}
    known = {"query", "key", "value"} if "attention" in name else factors | {"offs"}
    packet = getattr(torch.ops.aten, name)
    operator = getattr(packet, packet.overloads()[0])
    names = [argument.name for argument in operator._schema.arguments]
    assert {names[i] for i in ARGUMENTS[name]} <= known
    if "attention" in name:
        assert "is_causal" in names


def test_compiled_kernels_know_the_file_that_they_come_from():
    assert "filename" in inspect.signature(CachingAutotuner.__init__).parameters
    assert "self.filename = filename" in inspect.getsource(CachingAutotuner.__init__)
    assert list(inspect.signature(CachingAutotuner.run).parameters)[:2] == ["self", "args"]


def test_a_gather_moves_the_rows_that_it_takes(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    assert generated_bytes(str(file)) == 64 * 8 + 64 * 2 + 2 * 64 * 4


def test_summary_counts_launches_and_bytes_by_kind(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    product = "mm [8,4]torch.bfloat16 [4,2]torch.bfloat16"
    lines = [
        f"SOURCE\t{file}\t0\t0\t0\t0",
        "T\ttriton_poi_fused_gather_0\t1\t1\t1\t128",
        f"G\t{product}\t0\t0\t0\t0",
        f"D2D\tmemcpy\t0\t{2 * int(MEMORY)}\t0\t0",
    ]
    table = [line.split() for line in summarize(lines).splitlines()]
    assert ["D2D", "1", f"{MEMORY / 5e8:.2f}", "2000.00"] in table
    assert ["generated", "1", "0.00", "0.00"] in table
    assert ["all", "3"] in [row[:2] for row in table]
    assert operator_cost(product)[2] == 2 * (8 * 4 + 4 * 2 + 8 * 2)
