"""What a trace says of a kernel: its products and their FLOPs, the bytes that it moves, and who holds memory when."""

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from minitrain.simulator.fake_world import fake_world
from minitrain.simulator.operators import operator_work
from minitrain.simulator.trace import Trace, Tracer

aten = torch.ops.aten


def traced(function, **held) -> Trace:
    """held: by kind of memory, tensors that are there before."""
    with Tracer({}) as tracer:
        for kind, tensors in held.items():
            tracer.classify(tensors, kind)
        function()
    return tracer.trace


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("op", "operands", "out", "expected"),
    [
        (aten.mm, [(3, 4), (4, 5)], (3, 5), (2 * 3 * 5 * 4, "gemm", (1, 3, 5, 4))),
        (aten.addmm, [(5,), (3, 4), (4, 5)], (3, 5), (2 * 3 * 5 * 4, "gemm", (1, 3, 5, 4))),
        (aten.bmm, [(2, 3, 4), (2, 4, 5)], (2, 3, 5), (2 * 2 * 3 * 5 * 4, "gemm", (2, 3, 5, 4))),
        # rows by expert
        (aten._grouped_mm, [(9, 4), (2, 4, 5)], (9, 5), (2 * 9 * 5 * 4, "grouped", (2, 5, 5, 4))),
        # weights' gradient
        (aten._grouped_mm, [(4, 9), (9, 5)], (2, 4, 5), (2 * 4 * 5 * 9, "grouped", (2, 4, 5, 5))),
    ],
)
def test_products(op, operands, out, expected):
    found = operator_work(
        op.default, op.__name__, [meta(*shape) for shape in operands], {}, meta(*out)
    )
    assert (found["flops"], found["kind"], found["sizes"]) == expected


def test_a_product_is_as_fast_as_its_factors_are_narrow():
    """Whatever it is added to: a weight's gradient adds up in fp32."""
    with FakeTensorMode():
        a, b, total = (
            torch.ones(3, 4, dtype=torch.bfloat16),
            torch.ones(4, 5, dtype=torch.bfloat16),
            torch.zeros(3, 5),
        )
        (event,) = traced(lambda: torch.ops.minitrain.add_product(total, a, b)).events
    assert (event.name, event.kind, event.sizes, event.element) == (
        "add_product",
        "gemm",
        (1, 3, 5, 4),
        2,
    )
    assert event.flops == 2 * 3 * 4 * 5 and [size for _, size in event.writes] == [3 * 5 * 4]


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal):
    """Two products forward; backward scores again, and the gradients of weights, values, queries and keys."""
    q, k, v = meta(2, 3, 8, 16), meta(2, 3, 10, 16), meta(2, 3, 10, 5)
    pairs = 2 * 3 * 8 * 10 / (2 if causal else 1)
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    found = operator_work(forward.default, "x", (q, k, v, 0.0, causal), {}, None)
    form = {
        "kind": "attention",
        "sizes": (16, 5 if causal else 10),
        "form": "causal" if causal else "full",
    }
    assert found == form | {"flops": 2 * pairs * (16 + 5)}
    given = (meta(2, 3, 8, 5), q, k, v, meta(2, 3, 8, 5), meta(2, 3, 8), 0.0, causal)
    found = operator_work(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default, "x", given, {}, None
    )
    assert found == form | {"flops": 2 * pairs * (16 + 5 + 5 + 16 + 16)}


def test_bytes_that_a_kernel_moves():
    """Of a table only the rows that are asked for, of what is expanded only what there is; views move nothing."""
    table, row = torch.zeros(100, 4), torch.zeros(4)
    trace = traced(
        lambda: torch.embedding(table, torch.tensor([1, 2, 3])).add_(row.expand(3, 4)).view(-1)
    )
    embedding, add = [event for event in trace.events if event.name in ("embedding", "add_")]
    assert (
        sorted(size for _, size in embedding.reads) == [3 * 8, 3 * 4 * 4]
        and embedding.element == 4
    )
    assert (
        sorted(size for _, size in add.reads) == [4 * 4, 3 * 4 * 4]
        and add.writes == embedding.writes
    )
    assert trace.events[-1] is add


# from torch 2.13 on; 2.11 does not know the later names
@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_messages_are_as_large_as_what_is_gathered_or_not_yet_reduced():
    """Four ranks have a quarter each of 16 numbers; what is sent as it is, stays of the kind that it was."""
    whole, part = torch.zeros(16), torch.zeros(4)

    def function():
        dist.all_gather_into_tensor(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_reduce(part)

    with fake_world(4):
        trace = traced(function, gradients=[part])
    found = [
        ([size for _, size in e.reads], [size for _, size in e.writes], e.payload)
        for e in trace.events
    ]
    assert found == [([16], [64], 64), ([64], [16], 64), ([16], [16], 16)]
    assert (trace.peak["gradients"], trace.peak["gathered"]) == (16, 64)
    assert list(trace.collectives([2, 1, 0]).values()) == [[2, 128], [1, 64], [0, 0]]


@pytest.mark.parametrize("names", [["tp", "dp_shard"], ["dp_shard", "tp"]])
def test_of_dimensions_with_the_same_ranks_shards_are_fsdps(names):
    """Whose messages are not functional ones; of these all is gathered, a fake one's copy too."""
    with fake_world(4), FakeTensorMode():
        group, x = dist.group.WORLD.group_name, torch.zeros(4)
        with Tracer({group: (names, list(range(4)))}) as tracer:
            dist.all_reduce(x)
            functional = torch.ops._c10d_functional
            functional.wait_tensor(functional.all_reduce(x, "sum", group))
    assert [e.dimension for e in tracer.trace.events if e.kind == "collective"] == [
        "dp_shard",
        "tp",
    ]
    assert (tracer.trace.peak["activations"], tracer.trace.peak["gathered"]) == (0, 3 * 16)


def test_who_holds_memory_at_its_peak():
    """A weight of 400 bytes, and two tensors at once of three."""
    weight = torch.zeros(100)

    def function():
        first = weight + 1
        second = first[:50] * 2
        del first
        return second * 2

    trace = traced(function, parameters=[weight])
    assert trace.peak == dict(
        parameters=400, gradients=0, optimizer=0, gathered=0, activations=600
    )
    assert [event.name for event in trace.events] == ["add", "mul", "mul"] and trace.peak_at == 1
    first, second = (event.writes[0][0] for event in trace.events[:2])
    assert trace.died[first] == 1 and trace.died[second] == 2


def test_memory_that_is_found_to_be_of_another_kind():
    """Also of the peak so far, but not of what came after it."""
    with Tracer({}) as tracer:
        first = torch.zeros(100) + 1  # at its peak: both
        for _ in range(2):
            later = first[:10] + 1
            tracer.classify([later], "gradients")
        tracer.classify([first], "optimizer")
    assert tracer.trace.peak == dict(
        parameters=0, gradients=0, optimizer=400, gathered=0, activations=400
    )


def test_weights_that_are_gathered_again():
    """As FSDP does: a storage is emptied, and filled anew."""
    weight = torch.zeros(100)

    def function():
        weight.sum()
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(400)
        torch.cat([weight, weight])
        weight.untyped_storage().resize_(0)

    trace = traced(function, parameters=[weight])
    assert trace.peak == dict(
        parameters=0, gradients=0, optimizer=0, gathered=400, activations=800
    )
    assert [event.name for event in trace.events] == ["sum", "cat"] and trace.died[
        trace.events[0].reads[0][0]
    ] == 1
