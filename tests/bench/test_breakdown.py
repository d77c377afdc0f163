"""A step's time by kind: names, overlapping kernels, operators within operators, and a real step."""

import gzip
import json
import time
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from unittest import mock

import pytest
import torch

from minitrain.bench.breakdown import (
    kernel_times,
    kind_of,
    operator_times,
    profiled,
    step_breakdown,
)
from minitrain.bench.measure import measure
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from tests.helpers.commands import command

NAMES = {
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)",
        "triton_tem_fused_flex_attention_transpose_view_3",
        "void cudnn::fusion::compute_dot_do_o_specialized<true>",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "gemm": (
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>",
        "void gemv2T_kernel_val<int, int>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "triton_tem_fused_mm_4",
        "aten::mm",
        "aten::addmm",
    ),
    "grouped": (
        "void cutlass::device_kernel<GemmUniversal<GroupedProblemShape>>",
        "aten::_grouped_mm",
    ),
    "exposed communication": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "c10d::_allgather_base_",
        "_c10d_functional::wait_tensor",
    ),
    "memory": (
        "triton_poi_fused__scaled_mm__to_copy_add_silu_t_2",
        "Memcpy DtoD (Device -> Device)",
        "aten::mul",
        "triton_red_fused__scaled_dot_product_cudnn_attention_backward_add_7",
        "void at::native::elementwise_kernel",
    ),
}


def test_kernels_are_told_apart_by_their_names():
    for kind, names in NAMES.items():
        assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


def event(name: str, begin: float, end: float, cat: str = "kernel", tid: int = 0) -> dict:
    return {"name": name, "ts": begin, "dur": end - begin, "cat": cat, "tid": tid}


def test_what_runs_at_once_counts_once_and_messages_where_they_are_alone():
    events = [
        event("ncclKernel", 0, 12),
        event("gemm", 2, 5),
        event("triton_poi_x", 4, 8),
        event("gemm", 5, 7),
        event("Memset", 20, 21, "gpu_memset"),
        event("ncclKernel", 20, 26),
        event("aten::mm", 0, 99, "cpu_op"),
        event("Memcpy HtoD", 30, 32, "gpu_memcpy"),
        {"name": "process_name", "ph": "M"},
    ]
    assert kernel_times(events) == {"gemm": 3, "memory": 6, "exposed communication": 6 + 5}


def test_thin_products_are_told_apart_by_their_shapes():
    wide, thin = [[8192, 4096], [4096, 4096]], [[8192, 16], [16, 4096]]
    operators = [
        ("aten::mm", wide),
        ("aten::mm", thin),
        ("aten::addmm", [[4096], *wide]),
        ("aten::addmm", [[8192, 4096], *thin]),
        ("aten::mul", thin),
    ]
    events = []
    for number, (name, shapes) in enumerate(operators):
        operator = event(name, number, number + 1, "cpu_op") | {
            "args": {"External id": number, "Input Dims": shapes}
        }
        kernel = event("nvjet_hsh", 10 * number, 10 * number + 1 + number) | {
            "args": {"External id": number}
        }
        events += [operator, kernel]
    assert kernel_times(events) == {
        "gemm": 1 + 3 + 5,
        "thin gemm": 2 + 4,
        "exposed communication": 0,
    }


def test_operators_count_without_those_that_they_call():
    events = [
        event("aten::linear", 0, 10, "cpu_op"),
        event("aten::addmm", 1, 9, "cpu_op"),
        event("aten::copy_", 2, 4, "cpu_op"),
        event("aten::mul", 10, 13, "cpu_op"),
        event("aten::mm", 0, 5, "cpu_op", tid=1),
        event("kernel", 0, 99),
    ]
    assert operator_times(events) == {"memory": 2 + 2 + 3, "gemm": 6 + 5}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_real_step(device):
    a = torch.randn(1024, 1024, device=device)
    q = torch.randn(1, 8, 512, 64, device=device)

    def step():
        for _ in range(3):
            a @ a
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        a.exp()
        time.sleep(0.05)

    parts = step_breakdown(step, 1000.0, torch.device(device))
    assert list(parts)[-1] == "gaps" and sum(parts.values()) == pytest.approx(1000)
    assert all(parts[kind] > 0 for kind in ("gemm", "attention", "memory"))
    # it is far from what it is said to take, and slept
    assert sum(parts.values()) - parts["gaps"] < 500


def test_microseconds_of_the_profiler_are_seconds_of_the_step():
    events = [
        event("aten::mm", 0, 250_000, "cpu_op"),
        event("aten::mul", 250_000, 375_000, "cpu_op"),
    ]
    with mock.patch("minitrain.bench.breakdown.record_events", return_value=events):
        parts = step_breakdown(lambda: None, 1.0, torch.device("cpu"))
    assert parts == {"gemm": 0.25, "memory": 0.125, "gaps": 0.625}


def test_gaps_are_never_negative():
    """The profiler slows down what it records."""
    assert step_breakdown(lambda: torch.ones(1000).exp(), 0.0, torch.device("cpu"))["gaps"] == 0


def test_nothing_recorded_is_an_error():
    with pytest.raises(RuntimeError, match="recorded nothing"):
        step_breakdown(lambda: None, 1.0, torch.device("cpu"))


def test_a_trace_is_kept_for_each_run_of_a_row(tmp_path):
    for _ in range(2):
        found = profiled(
            "a/row=1",
            lambda: torch.ones(9).exp(),
            1.0,
            torch.device("cpu"),
            str(tmp_path / "new"),
        )
        assert found["breakdown_s"]["memory"] > 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "a-row-1-2.json.gz",
        "a-row-1.json.gz",
    ]
    with gzip.open(tmp_path / "new" / "a-row-1-2.json.gz", "rt") as trace:
        assert "aten::exp" in {event["name"] for event in json.load(trace)["traceEvents"]}


def measured(failure: Exception | None) -> tuple[dict, str]:
    """On a rank of the pool."""
    config = from_dict(
        {
            "model": "llama3-8b-tiny",
            "batch": {"global": 1, "micro": 1, "seq_len": 16},
            "device": "cpu",
        }
    )
    broken = (
        mock.patch("minitrain.bench.breakdown.step_breakdown", side_effect=failure)
        if failure
        else nullcontext()
    )
    with broken, redirect_stderr(StringIO()) as told:
        return measure(config, "tiny", start(config), 1, 0, profile=True), told.getvalue()


def test_what_was_measured_outlives_a_profiler_that_fails(pool):
    ((row, told),) = pool.run(1, measured, None)
    assert row["step_time_s"] > 0 and row["breakdown_s"]["gemm"] > 0 and "warning" not in told
    ((row, told),) = pool.run(1, measured, RuntimeError("not permitted\nand more"))
    assert row["step_time_s"] > 0 and "breakdown_s" not in row
    assert "warning: tiny: no profile: not permitted\n" in told and "more" not in told


@pytest.mark.parametrize("others", [["--simulate"], ["--config", "configs/bench/grpo-8b.yaml"]])
def test_a_profile_belongs_to_measured_steps(others):
    done = command("bench.py", "--profile", *others)
    assert (
        done.returncode == 2
        and "error: --profile is for measured steps of training or sampling" in done.stderr
    )
