"""Seconds from a trace: hand-made traces whose timelines can be drawn on paper."""

import dataclasses
import json
import re
import statistics
from pathlib import Path

import pytest

from minitrain.bench.rows import constants, published_rows
from minitrain.errors import InputError
from minitrain.simulator import timeline
from minitrain.simulator.timeline import Rows, System, load_system, play
from minitrain.simulator.trace import Event, Trace
from tests.helpers.simulator import SECOND

RESULTS = Path(__file__).parents[2] / "results"
GROUPS = {
    "shards": (["dp_shard"], [0, 1]),
    "tensor": (["tp"], [0, 1, 2, 3]),
    "stages": (["pp"], [0, 1]),
}


def kernel(reads=(), writes=(), flops=0, kind="gemm", name="mm") -> Event:
    return Event(name, kind, flops, [(n, 0) for n in reads], [(n, 0) for n in writes])


def elementwise(reads: dict, writes: dict) -> Event:
    return Event("mul", "memory", 0, list(reads.items()), list(writes.items()))


def collective(name: str, group: str, payload: int, reads=(), writes=()) -> Event:
    tensors = ([(n, 0) for n in reads], [(n, 0) for n in writes])
    return Event(
        name,
        "collective",
        0,
        *tensors,
        payload=payload,
        group=group,
        dimension=GROUPS[group][0][0],
    )


def spans(trace: Trace, system: System = SECOND, fused: bool = False) -> list[tuple]:
    return [(s.stream, s.begin, s.end) for s in play(trace, system, fused).spans]


@pytest.mark.parametrize("fused", [False, True])
def test_compute_waits_for_what_it_reads(fused):
    """An all-gather of 8 bytes over 4 ranks moves 6, at 2 bytes/s."""
    trace = Trace(
        [
            collective("allgather_base", "tensor", 8, reads=[1], writes=[2]),
            kernel(writes=[3], flops=1),
            Event("wait_tensor", "wait", 0, [(2, 8)], [(5, 8)]),
            elementwise({5: 16}, {6: 0}),
            kernel(reads=[5, 3], writes=[4], flops=3),
        ],
        groups=GROUPS,
    )
    line = play(trace, SECOND, fused)
    assert [(s.stream, s.begin, s.end, s.waited) for s in line.spans] == [
        ("tp", 0, 3, 0),
        ("compute", 0, 1, 0),
        ("compute", 3, 19, 2),
        ("compute", 19, 22, 0),
    ]
    assert line.end == 22


def test_the_next_weights_are_gathered_while_a_block_runs():
    """But not before those of the block have been copied out: two blocks' all-gathers never lie ahead. What is to be
    gathered can be copied together meanwhile."""
    trace = Trace(
        [
            collective("allgather_base", "shards", 4, writes=[1]),
            kernel(flops=3),
            Event("split_with_sizes_copy", "memory", 0, [(1, 1)], [(2, 1)]),
            kernel(reads=[2, 1], flops=10),
            Event("all_gather_copy_in", "memory", 0, [(5, 1)], [(6, 1)]),
            collective("allgather_base", "shards", 8, reads=[6], writes=[3]),
            Event("split_with_sizes_copy", "memory", 0, [(3, 0)], [(4, 0)]),
            kernel(reads=[4], flops=10),
        ],
        groups=GROUPS,
    )
    line = play(trace, SECOND, fused=False)
    gathers = [(s.begin, s.end) for s in line.spans if s.stream == "dp_shard"]
    assert gathers == [(0, 1), (1, 3), (5, 7)]
    assert [(s.begin, s.end) for s in line.spans if s.name == "mm"] == [(0, 3), (5, 15), (15, 25)]


def test_whoever_reads_gathered_weights_where_they_lie_is_no_stream_of_fsdp():
    """As from one rank, where nothing is copied out: what reads them first, and an embedding, which does so again; as
    products do. Nor is what copies them out when the next ones have been asked for already."""
    trace = Trace(
        [
            collective("allgather_base", "shards", 0, writes=[1]),
            elementwise({1: 16}, {2: 16}),
            Event("embedding", "memory", 0, [(1, 16)], [(3, 16)]),
            Event("mm", "gemm", 0, [(1, 16)], [(4, 16)]),
            collective("allgather_base", "shards", 0, writes=[5]),
            Event("split_with_sizes_copy", "memory", 0, [(1, 16)], [(6, 16)]),
        ],
        groups=GROUPS,
    )
    streams = [s.stream for s in play(trace, SECOND, fused=False).spans]
    assert streams == ["dp_shard", "compute", "compute", "compute", "dp_shard", "compute"]


def test_whoever_waits_for_a_message_of_shards_is_no_stream_of_fsdp():
    """As the gradient's norm."""
    trace = Trace(
        [
            collective("all_reduce", "shards", 0, writes=[1]),
            Event("wait_tensor", "wait", 0, [(1, 16)], [(2, 16)]),
            elementwise({2: 16}, {3: 16}),
        ],
        groups=GROUPS,
    )
    assert [s.stream for s in play(trace, SECOND, fused=False).spans] == ["dp_shard", "compute"]


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_reduced_beside_compute(fused):
    """One after the other; the update, which also reads what is not FSDP's, is compute's, and so is what reads that."""
    trace = Trace(
        [
            kernel(writes=[1, 4], flops=2),
            collective("reduce_scatter_base", "shards", 8, reads=[1], writes=[2]),
            # adding to the shard's gradient: on FSDP's stream, for it made 3 too, and a number of 8 bytes is anybody's
            elementwise({2: 16, 3: 16, 4: 8}, {3: 16}),
            # from the type in which they were added up
            Event("_to_copy", "memory", 0, [(3, 16)], [(5, 8)]),
            kernel(reads=[1], flops=5),
            elementwise({5: 16, 6: 16}, {5: 16}),
            kernel(flops=1),
            elementwise({5: 16}, {7: 16}),
        ],
        groups=GROUPS,
    )
    trace.events.insert(0, collective("reduce_scatter_base", "shards", 16, writes=[3]))
    spans = play(trace, SECOND, fused).spans
    reduced = 4 + 2 + 56 + 24
    assert [s.end for s in spans if s.stream == "dp_shard"] == [4, 6, 62, reduced]
    assert [s.end for s in spans if s.stream == "compute"] == [
        2,
        7,
        reduced + 48,
        reduced + 49,
        reduced + 81,
    ]


def test_messages_between_stages_take_no_time_here():
    trace = Trace([collective("send", "stages", 8)], groups=GROUPS)
    assert play(trace, SECOND, fused=False).end == 0


def test_fused_kernels_move_only_what_comes_from_outside_or_stays():
    """x -> a -> b -> c, where b is read again just behind them and a is not; then two that read of x all and a part,
    and write so."""
    events = [
        elementwise({1: 4}, {2: 4}),
        elementwise({2: 4}, {3: 4}),
        elementwise({3: 4}, {4: 4}),
        kernel([3, 4]),
    ]
    trace = Trace(events, died={2: 1, 3: 3}, groups=GROUPS)
    assert play(trace, SECOND, fused=False).end == 24
    line = play(trace, dataclasses.replace(SECOND, launch=3), fused=True)
    assert line.end == 4 + 4 + 4 + 3 + 3
    assert [(span.event, span.end) for span in line.spans] == [(0, 15), (3, 18)]
    trace = Trace(
        [elementwise({1: 8}, {2: 4, 3: 8}), elementwise({1: 4, 2: 4}, {3: 4})],
        died={2: 1},
        groups=GROUPS,
    )
    assert play(trace, SECOND, fused=True).end == 8 + 8


def test_what_a_pass_takes_has_its_last_kernel():
    """Not its first, which becomes one with it, nor the message behind it, nor the next pass. What the first
    one makes dies with its last."""
    events = [elementwise({1: 4}, {2: 4}), elementwise({2: 4}, {3: 4})]
    events += [collective("send", "stages", 8, [3]), elementwise({3: 4}, {4: 4})]
    trace = Trace(
        events,
        died={2: 1},
        groups=GROUPS,
        marks=[(0, (0, "F", 0)), (2, None), (3, (0, "F", 1)), (4, None)],
    )
    assert play(trace, SECOND, fused=True).at == [0, 8, 8, 16]


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((1, 128, 256, 128), 2.0),  # k / (k + 128) is a half
        ((1, 129, 256, 128), 2.0),  # two tiles on one multiprocessor are two whole waves
        ((1, 128, 257, 128), 2.0),
    ],
)
def test_matrix_products(sizes, seconds):
    event = Event("mm", "gemm", 1, [], [], sizes)
    assert SECOND.kernel_seconds(event) == pytest.approx(seconds)
    assert SECOND.kernel_seconds(event._replace(element=1)) == pytest.approx(seconds / 2)
    # no tensor cores
    assert SECOND.kernel_seconds(event._replace(element=4)) == pytest.approx(seconds * 16)


@pytest.mark.parametrize(
    ("kind", "flops", "moved", "seconds"),
    [("gemm", 8, 5, 8 + 0.27 * 5), ("gemm", 4, 9, 9), ("memory", 0, 5, 5)],
)
def test_a_kernel_takes_its_work_or_its_traffic_and_a_launch(kind, flops, moved, seconds):
    """Of a product's traffic a part is not hidden; a thin one takes what memory does for it."""
    event = Event("x", kind, flops, [(1, moved - 1)], [(2, 1)])
    assert dataclasses.replace(SECOND, launch=3).kernel_seconds(event) == pytest.approx(
        seconds + 3
    )


@pytest.mark.parametrize("fused", [False, True])
def test_kernels_of_a_stack_that_fuses_less_move_more(fused):
    trace = Trace([elementwise({1: 4}, {2: 4})], groups=GROUPS)
    assert play(trace, dataclasses.replace(SECOND, unfused=3), fused).end == 3 * 8


def test_products_of_experts():
    event = Event("_grouped_mm", "grouped", 8, [(1, 4)], [(2, 2)])
    assert (
        dataclasses.replace(SECOND, launch=3, grouped_launch=7).kernel_seconds(event)
        == 8 + 0.5 * 6 + 7
    )


@pytest.mark.parametrize(
    ("form", "channels", "keys", "seconds"),
    [
        ("causal", 128, 50, 8),
        ("full", 65, 50, 8),
        ("causal", 64, 50, 32),
        ("flex", 128, 50, 8 * 3),
        ("flex", 128, 400, 10),
    ],
)
def test_attention_has_a_rate_for_each_form_width_and_direction(form, channels, keys, seconds):
    """Half as fast backward, a quarter as fast where heads are narrow; of a mask, a query costs 100 keys more."""
    event = Event("attention", "attention", 8, [], [], (channels, keys), form=form)
    assert SECOND.kernel_seconds(event) == seconds
    assert SECOND.kernel_seconds(event._replace(name="attention_backward")) == 2 * seconds


@pytest.mark.parametrize(
    ("group", "kernel", "limit"),
    [("grouped", "", 0.09), ("attention", "sdpa", 0.06), ("attention", "flex", 0.16)],
)
def test_single_kernels_take_what_was_measured(group, kernel, limit):
    """On one H200 (results/h200): within `limit` in the median, at most three times that."""
    system, off = load_system("h200"), []
    for result in json.loads((RESULTS / "h200" / "kernels.json").read_text()):
        if (
            result["group"] != group
            or not result["kernel"].startswith(kernel)
            or "{" in result["kernel"]
        ):
            continue
        seconds = result["runs"][0]["ms"] / 1e3
        flops = result["runs"][0]["tflops"] * 1e12 * seconds
        sizes = tuple(map(int, re.findall(r"\d+", result["shape"].split("(")[1])))
        event = measured_experts if group == "grouped" else measured_attention
        predicted = system.kernel_seconds(event(result, flops, sizes))
        off.append(abs(predicted / seconds - 1))
    assert len(off) >= 6 and statistics.median(off) < limit and max(off) < 3 * limit


def measured_experts(result: dict, flops: float, sizes: tuple) -> Event:
    width, ffn, experts, rows = sizes
    products = round(flops / (2 * experts * rows * width * ffn))  # gate and up are one
    wide, narrow = (width, products * ffn) if "gate_up" in result["kernel"] else (ffn, width)
    shapes = {
        "forward": (experts, rows, narrow, wide),
        "dgrad": (experts, rows, wide, narrow),
        "wgrad": (experts, narrow, wide, rows),
    }
    moved = round(result["runs"][0]["gb_per_s"] * result["runs"][0]["ms"] * 1e6)
    return Event(
        "_grouped_mm",
        "grouped",
        round(flops),
        [(1, moved)],
        [],
        shapes[result["kernel"].split()[-1]],
    )


def measured_attention(result: dict, flops: float, sizes: tuple) -> Event:
    rows, heads, _, length, channels = sizes
    words = result["kernel"].replace(",", "").split()
    form = "flex" if words[0] == "flex" else words[1]
    keys = flops / (4 if words[-1] == "forward" else 10) / rows / heads / length / channels
    return Event(
        f"attention_{words[-1]}",
        "attention",
        round(flops),
        [],
        [],
        (channels, round(keys)),
        form=form,
    )


def test_the_last_wave():
    """Three tiles on two multiprocessors: 3/4 filled, of the rest 60 % recovered."""
    system = dataclasses.replace(SECOND, gemm_tiles=2)
    event = Event("mm", "gemm", 1, [], [], (1, 3 * 128, 256, 128))
    assert system.kernel_seconds(event) == pytest.approx(1 / (0.5 * (1 - 0.25 * 0.4)))
    for kind in ("gemm", "grouped"):  # two of them, of whole waves
        two = event._replace(kind=kind, sizes=(2, *event.sizes[1:]))
        assert system.kernel_seconds(two) == pytest.approx(1 / 0.5)
    sizes = (4, 1, 256, 128)  # experts with a row each: a tile of their own
    few = event._replace(kind="grouped", sizes=sizes)
    assert system.gemm_rate(few) == system.gemm_rate(few._replace(sizes=(1, 4 * 128, 256, 128)))


@pytest.mark.parametrize(
    ("name", "ranks", "seconds"),
    [
        ("allgather_base", range(8), 64 * 7 / 8 / 2),  # within a domain
        ("allreduce", range(8), 2 * 64 * 7 / 8 / 2),
        ("all_reduce", range(8), 2 * 64 * 7 / 8 / 2),
        # 8 adapters together are faster than NVLink
        ("reduce_scatter_base", range(16), 64 * 15 / 16 / 2),
        ("allgather_base", range(0, 16, 4), 64 * 3 / 4 / 1),  # two adapters per domain
        ("allgather_base", range(0, 64, 8), 64 * 7 / 8 / 0.5),  # one
        ("allgather_base", range(8, 16), 64 * 7 / 8 / 2),  # within another domain
        ("allgather_base", range(6, 10), 64 * 3 / 4 / 1),  # as many ranks, of two
        ("all_to_all_single", range(16), 64 / 2 / 0.5),  # half of it leaves the domain
        ("alltoall_base", range(9), 64 * 8 / 9 / 2),  # little of it, and what stays takes longer
        ("send", [0, 8], 64 / 0.5),
        ("send", [0, 1], 64 / 2),
        ("recv", [0, 1, 8], 64 / 2),  # to the next stage, whatever lies behind
    ],
)
def test_collectives(name, ranks, seconds):
    event = Event(name, "collective", 0, [], [], payload=64)
    assert SECOND.collective_seconds(event, list(ranks)) == pytest.approx(seconds)
    late = dataclasses.replace(SECOND, latency=3)
    assert late.collective_seconds(event, list(ranks)) == pytest.approx(seconds + 3)
    costly, of_heads = dataclasses.replace(SECOND, dispatch=5), event._replace(dimension="cp")
    besides = 5 if "all_to_all" in name or "alltoall" in name else 0
    assert costly.collective_seconds(event, list(ranks)) == pytest.approx(seconds + besides)
    assert costly.collective_seconds(of_heads, list(ranks)) == pytest.approx(seconds)


def test_messages_of_other_stacks():
    """Half of 64 bytes leaves the domain at 0.5 bytes/s; of 3 times as many, twice as many leave it. Each of 4 times as
    many is moved twice more at 1 byte/s. Those of tensor parallelism run beside products for half of their time."""
    experts = Event("all_to_all_single", "collective", 0, [], [], payload=64, dimension="ep")
    theirs = dataclasses.replace(SECOND, rows=Rows(3, 2, 4), passes=2)
    assert theirs.collective_seconds(experts, list(range(16))) == 2 * 64 + 2 * 4 * 64
    assert theirs.collective_seconds(experts, list(range(8))) == 3 * 64 * 7 / 8 / 2 + 2 * 4 * 64
    heads = experts._replace(dimension="cp")
    assert theirs.collective_seconds(heads, list(range(16))) == 64
    tensor = Event("allgather_base", "collective", 0, [], [], payload=64, dimension="tp")
    halved = dataclasses.replace(SECOND, tensor=0.5)
    assert halved.collective_seconds(tensor, list(range(8))) == 64 * 7 / 8 / 2 / 2


@pytest.mark.parametrize(("work", "end"), [(2, 2.5), (8, 9.0)])
def test_kernels_are_slower_beside_a_collective(work, end):
    """An all-gather of 4 seconds takes a quarter of the multiprocessors: a kernel of 2 ends before it, one of 8 does
    not, and loses 4 x 1 / 4."""
    trace = Trace(
        [collective("allgather_base", "shards", 16, writes=[2]), kernel(writes=[3], flops=work)],
        groups=GROUPS,
    )
    system = dataclasses.replace(SECOND, channels=1, gemm_tiles=4)
    assert spans(trace, system) == [("dp_shard", 0, 4), ("compute", 0, end)]


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_the_slowest_of_many_ranks(ranks):
    """The expected largest of as many normal numbers, by integration of its density."""
    normal = statistics.NormalDist()
    points = [-8 + i / 500 for i in range(8001)]
    mean = sum(x * ranks * normal.cdf(x) ** (ranks - 1) * normal.pdf(x) / 500 for x in points)
    system = dataclasses.replace(SECOND, spread=0.01)
    assert system.slowest(ranks) == pytest.approx(0.01 * mean, rel=0.01)
    assert system.slowest(1) == 0


def test_a_fused_kernel_is_known_by_its_first_event():
    """Waits between its events are no part of it."""
    trace = Trace(
        [
            collective("all_gather_into_tensor", "tensor", 4, reads=[9], writes=[1]),
            Event("wait_tensor", "wait", 0, [(1, 4)], [(2, 4)]),
            elementwise({2: 4}, {3: 4}),
            Event("wait_tensor", "wait", 0, [(1, 4)], [(4, 4)]),
            elementwise({3: 4, 4: 4}, {5: 4}),
        ],
        groups=GROUPS,
    )
    assert [s.event for s in play(trace, SECOND, True).spans if s.stream == "compute"] == [2]


def test_a_machine_cannot_inherit_attention_that_is_faster_than_its_products(monkeypatch):
    """H20, described as an H100 with slower products; with a kernel of its own it is taken."""
    known = {name: constants(name) for name in ("systems", "kernels")}
    kernels = known["kernels"] | {
        "mine": known["kernels"]["flex"] | {"forward": 1e14, "backward": 1e14}
    }
    slow = known["systems"]["dgx-h100"] | {"bf16": 148e12}
    mine = slow | {"attention": dict.fromkeys(("full", "causal", "flex"), "mine")}
    sections = {"systems": {"h20": slow, "mine": mine}, "kernels": kernels}
    monkeypatch.setattr(timeline, "constants", sections.get)
    with pytest.raises(
        InputError, match="--system=h20: .* full attention at 560 TFLOP/s, above bf16's 148 "
    ):
        load_system("h20")
    assert load_system("mine").attention["full"].forward == 1e14


def test_systems_are_complete():
    names = set(constants("systems"))
    nvidia = {
        "dgx-h100",
        "h200",
        "dgx-b200",
        "dgx-b300",
        "dgx-gb200",
        "dgx-gb300",
        "a100",
        "l40s",
        "rtx-4090",
        "rtx-5090",
    }
    assert nvidia | {"mi300x"} <= names
    for name in names:
        assert set(load_system(name).attention) == {"full", "causal", "flex"}
    assert all(load_system(name).bf16 > 1e14 for name in nvidia | {"mi300x"})
    for row in published_rows().values():  # as --list prints them
        assert load_system(row["system"]) == load_system(row["system"].lower())
    with pytest.raises(InputError, match="--system=dgx is not one of dgx-h100, "):
        load_system("dgx")
