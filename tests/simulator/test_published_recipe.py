"""What published runs did otherwise, on hand-made traces whose seconds are known."""

from argparse import Namespace
from dataclasses import replace

import pytest

from minitrain.bench.rows import CONFIGS, RECIPE, constants, load_row, published_rows
from minitrain.commands.bench_cases import layouts
from minitrain.run.config.load import from_dict
from minitrain.simulator import predict
from minitrain.simulator.predict import as_published
from minitrain.simulator.simulate import Simulation, launch_seconds, time_traces
from minitrain.simulator.simulate_policy import Stack, policy_figures
from minitrain.simulator.timeline import load_system, play
from minitrain.simulator.trace import MEMORY_KINDS, Event, Trace
from tests.helpers.simulator import policy

SYSTEM = replace(
    load_system("dgx-h100"), launch=0.0, latency=0.0, step=0.0, memory=2.9e12, spread=0.0
)
CAUSAL = replace(SYSTEM.attention["causal"], start=0)
SYSTEM = replace(
    SYSTEM, attention={"causal": CAUSAL, "flex": replace(CAUSAL, forward=CAUSAL.forward / 2)}
)
ATTENTION = Event("attention", "attention", 740 * 10**12, [], [], (128, 10**9), form="causal")
BACKWARD = ATTENTION._replace(name="attention_backward", flops=506 * 10**12)
EXPERTS = Event("_grouped_mm", "grouped", 10**15, [], [], (2, 128 * 132, 256, 4096))
MUL = Event("mul", "memory", 0, [(1, 29 * 10**11)], [(2, 29 * 10**11)])


def config_with(**changes):
    reference = {"gpus": 1, "tokens_per_sec_per_gpu": 1.0, "recipe": changes}
    batch = {"global": 1, "micro": 1, "seq_len": 64}
    return from_dict(
        {"model": "mixtral-8x7b-tiny", "batch": batch, "compile": True, "reference": reference}
    )


def trace_of(*events: Event, died=()) -> Trace:
    return Trace(list(events), died=dict(died), peak=dict.fromkeys(MEMORY_KINDS, 2**30))


def seconds(trace: Trace, **changes) -> float:
    simulation = Simulation({0: trace}, {0: play(trace, SYSTEM, True)}, 1, 1, 0.0)
    predicted = as_published(config_with(**changes), "row", SYSTEM, simulation)
    assert (
        predicted["ratio"] == predicted["tokens_per_sec_per_gpu"] == 64 / predicted["step_time_s"]
    )
    assert predicted["peak_memory_gib"] == len(MEMORY_KINDS)
    return predicted["step_time_s"]


def test_other_kernels():
    trace = trace_of(ATTENTION, BACKWARD, EXPERTS)
    experts, theirs = SYSTEM.kernel_seconds(EXPERTS), constants("kernels")["flash2"]
    slower = ATTENTION.flops / theirs["forward"] + BACKWARD.flops / theirs["backward"]
    assert seconds(trace, attention="flash2") == pytest.approx(slower + experts)


@pytest.mark.parametrize(("stack", "masked"), [("megatron", 1), ("automodel", 2)])
def test_other_stacks(stack, masked):
    """Where Transformer Engine has cuDNN's kernels for masks, these cost what plain attention does; and NeMo's host
    takes its time between steps."""
    found = seconds(trace_of(ATTENTION._replace(form="flex")), stack=stack)
    host = constants("stacks")[stack].get("rates", {}).get("step", 0)
    assert found == pytest.approx(masked * ATTENTION.flops / CAUSAL.forward + host)


def test_a_host_that_launches_each_layer_of_experts():
    """Mixtral's twin, 4 layers of 8 experts, 4 of them a GPU: 3 micro-batches fill and drain two stages, whose forward
    passes run twice. A step takes that at least; dense models, and ours, launch ahead."""
    tree = {
        "model": "mixtral-8x7b-tiny",
        "batch": {"global": 24, "micro": 1, "seq_len": 64},
        "recompute": "full",
        "parallel": {"dp_shard": 8, "ep": 2, "pp": 2, "schedule": "1F1B"},
    }
    slow = replace(SYSTEM, expert_layer=5.0, local_expert=0.5)
    assert launch_seconds(from_dict(tree), slow) == pytest.approx(
        (3 + 1) * 2 * 4 / 3 * (5 + 0.5 * 4)
    )
    assert launch_seconds(from_dict(tree), SYSTEM) == 0
    assert (
        launch_seconds(from_dict(tree | {"model": "llama3-8b-tiny", "parallel": {}}), slow) == 0
    )
    # of Nemotron's 4 layers, one Mamba, one attention and two of experts
    hybrid = from_dict({"model": "nemotron3-nano-30b-a3b-tiny", "batch": tree["batch"]})
    experts = hybrid.model.config.num_experts
    assert hybrid.model.config.layer_pattern.count("E") < hybrid.model.config.num_layers
    assert launch_seconds(hybrid, slow) == 24 * hybrid.model.config.layer_pattern.count("E") * (
        5 + 0.5 * experts
    )
    host = 4 * (5 + 0.5 * 8)
    for busy in (1, 2 * host):  # seconds
        trace = trace_of(ATTENTION._replace(flops=int(busy * CAUSAL.forward)))
        found = time_traces(config_with(), {0: trace}, replace(slow, step=3.0)).step
        assert found == pytest.approx(max(host, busy + 3))


def test_without_the_compiler_it_is_another_trace(monkeypatch):
    """Two kernels in turn, of which the compiler makes one: the tensor between them dies. A third one, without it."""
    again = MUL._replace(reads=MUL.writes, writes=[(3, 29 * 10**11)])
    trace = trace_of(MUL, again, died={2: 1})
    monkeypatch.setattr(
        predict,
        "record",
        lambda config: {0: trace_of(MUL, again, MUL)} if not config.compile else {},
    )
    assert seconds(trace, compile=True) == seconds(trace) == pytest.approx(2.0)
    assert seconds(trace, compile=False) == pytest.approx(6.0)


def test_a_pipeline_that_fills_and_drains_several_times():
    """Of 8 micro-batches, each a second forward and two backward, on 2 stages: (8 + 1) x 3 s, or twice (4 + 1) x 3."""

    def rank(stage: int) -> Trace:
        trace = trace_of(Event("send", "collective", 0, [], [], group="pp", dimension="pp"))
        trace.groups["pp"] = ["pp"], [0, 1]
        for batch in range(4):
            for kind, work in (("F", 1), ("B", 2)):
                trace.marks.append((len(trace.events), (stage, kind, batch)))
                trace.events.append(ATTENTION._replace(flops=int(work * CAUSAL.forward)))
                trace.marks.append((len(trace.events), None))
        return trace

    traces = {0: rank(0), 1: rank(1)}
    simulation = Simulation(traces, {}, 8, 4, 0.0)
    config = config_with(micro_batches=4)
    config = replace(
        config, parallel=replace(config.parallel, pp=2), batch=replace(config.batch, global_=8)
    )
    config.reference["gpus"] = 2
    assert as_published(config, "row", SYSTEM, simulation)["step_time_s"] == pytest.approx(
        2 * (4 + 1) * 3
    )
    for changes in ({}, {"micro_batches": 16}):  # more at once than a step has: all of them
        config.reference["recipe"] = changes
        assert as_published(config, "row", SYSTEM, simulation)["step_time_s"] == pytest.approx(
            (8 + 1) * 3
        )
    config.reference["recipe"] = {"micro_batches": 6}  # once, and a third of the same
    assert as_published(config, "row", SYSTEM, simulation)["step_time_s"] == pytest.approx(
        4 / 3 * (6 + 1) * 3
    )
    # where the time goes is all of it, what is no work is bubble
    for at_once, steps in ((8, 8 + 1), (4, 2 * (4 + 1))):
        parts = time_traces(config, traces, SYSTEM, at_once).breakdown(place=1)
        idle = pytest.approx((steps - 8) * 3)
        nothing = {"exposed communication": pytest.approx(0), "slowest rank": 0, "gaps": 0}
        assert parts == {"attention": pytest.approx(8 * 3), "bubble": idle} | nothing
    waits = replace(SYSTEM, step=1.0)  # for the host, which is no bubble
    assert time_traces(config, traces, waits, 8).breakdown(place=1) == parts | {
        "bubble": pytest.approx(3),
        "gaps": 1,
    }
    for trace in traces.values():  # 2 s to gather weights, which then stay
        trace.events.insert(0, ATTENTION._replace(flops=int(2 * CAUSAL.forward)))
        trace.marks = [(index + 1, label) for index, label in trace.marks]
    gathers = time_traces(config, traces, SYSTEM, 4)
    assert gathers.step == pytest.approx(2 + 2 * (4 + 1) * 3) and gathers.idle == pytest.approx(
        [2 * 3] * 2
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"simulate": True}, [2, 1]),
        ({}, [2]),
        ({"ours": True}, [1]),
        ({"simulate": True, "ours": True}, [1]),
        ({"simulate": True, "as_published": True}, [2]),
        ({"simulate": True, "trace": "file"}, [2]),
    ],
)
def test_a_row_has_the_published_layout_and_ours(options, expected):
    """Simulated, both; ours does the row's work on its GPUs, so its ratio counts, and has no published run."""
    file = str(CONFIGS / "nemo/h100/llama3-8b-pretrain-8gpu.yaml")
    given = Namespace(**dict.fromkeys(("simulate", "ours", "as_published", "trace")) | options)
    configs = [load_row(file, words)[1] for words in layouts(file, ["recompute=full"], given)]
    assert [config.parallel.cp for config in configs] == expected
    assert all(
        config.recompute == "full" and "changed" not in config.reference for config in configs
    )
    assert [config.reference.get("layout") for config in configs] == [
        {2: None, 1: "ours"}[n] for n in expected
    ]


def test_a_row_without_another_layout_has_one():
    file, options = (
        str(CONFIGS / "nemo/h100/llama3-8b-sft-8gpu.yaml"),
        Namespace(as_published=None),
    )
    assert layouts(file, ["seed=1"], options) == [["seed=1"]]


def test_what_a_policy_was_trained_with(monkeypatch):
    """The seconds and the FLOPs of the same step on another stack."""
    config, simulation = (
        policy(reference={"gpus": 8, "recipe": {"stack": "nemo-rl"}}),
        Simulation({}, {}, 1, 1, 99.0),
    )
    monkeypatch.setattr(predict, "time_traces", lambda config, traces, system: simulation)
    stack, found = constants("stacks")["nemo-rl"], as_published(config, "row", SYSTEM, simulation)
    theirs = replace(SYSTEM, **stack["rates"])
    assert found == policy_figures(config, theirs, simulation, Stack(**stack["policy"]))
    assert (
        found["generation_s"] > policy_figures(config, SYSTEM, simulation, None)["generation_s"]
    )


def test_rows_say_what_the_simulator_knows():
    """Each says what its published run ran on."""
    recipes = [row["recipe"] for row in published_rows().values()]
    assert set().union(*recipes) == set(RECIPE) and all("stack" in told for told in recipes)
    assert {told["attention"] for told in recipes if "attention" in told} <= set(
        constants("kernels")
    )
