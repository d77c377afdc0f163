"""What stands for other micro-batches, the ranking of layouts, and what a trace file shows."""

import dataclasses
import itertools
import json
import statistics
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minitrain.bench.rows import CONFIGS, constants, published_rows
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.formats.peft import save_adapter
from minitrain.models.attention import attention
from minitrain.models.decoder import Decoder
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.zoo import model_config
from minitrain.run.config import load as configs
from minitrain.run.config.ranks import micro_batches
from minitrain.run.monitor.flops import count_work, visible_share
from minitrain.settings import Lora
from minitrain.simulator import simulate, sweep
from minitrain.simulator.chrome import write_trace
from minitrain.simulator.fake_world import (
    ATTENDING,
    counting_mask,
    fake_attend,
    fake_world,
    make_counted,
    patched_for_fake_tensors,
    trace_step,
)
from minitrain.simulator.predict import simulated_figures
from minitrain.simulator.replay import Replay
from minitrain.simulator.simulate import (
    Simulation,
    action_spans,
    few_micro_batches,
    record,
    representatives,
    sent_rows,
    time_traces,
    with_balanced_experts,
)
from minitrain.simulator.timeline import Rows, Span, Timeline, load_system
from minitrain.simulator.trace import MEMORY_KINDS, Event, Trace, Tracer
from minitrain.training.build import initialize
from tests.helpers.oracle import count_flops
from tests.helpers.simulator import SECOND

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 1},
    "batch": {"global": 10, "micro": 1, "seq_len": 64},
    "parallel": {"dp_shard": 2},
    "device": "cpu",
}


def test_products_of_a_delta_rule_are_those_that_run():
    """A step of one layer over two chunks: FLOPs as torch counts them of the model on the CPU."""
    tree = TREE | {
        "model": {"name": "qwen3.5-9b-tiny", "num_layers": 1, "layer_pattern": "d"},
        "batch": {"global": 2, "micro": 1, "seq_len": 100},
    }
    config = configs.from_dict(tree)
    events = trace_step(config, 2).events
    # those of several matrices are the rule's
    found = sum(event.flops for event in events if event.kind == "gemm" and event.sizes[0] > 1)
    model = Decoder(config.model.config)
    initialize(model, 0)
    counted = count_flops(lambda: model(torch.arange(100)[None]).sum().backward())
    assert found == counted["aten.bmm"] > 0


def test_few_micro_batches_stand_for_all_exactly():
    config = configs.from_dict(TREE)
    small = few_micro_batches(config)
    whole, part = trace_step(config, 2), trace_step(small, 2)
    assert (micro_batches(config), small.batch.global_) == (5, 6) and len(part.events) < len(
        whole.events
    )
    simulation = Simulation({0: part}, {}, 5, 3, 0.0)
    times = simulation.times()
    assert part.flops(times) == whole.flops() > part.flops()
    assert part.collectives(times) == whole.collectives() != part.collectives()
    tokens = (5 - 3) * 64 * 8  # of the batches that are not there, each with its targets
    assert part.peak | {"activations": part.peak["activations"] + 2 * tokens} == whole.peak


@pytest.mark.parametrize("fp8", [False, True])
def test_weights_that_stay_gathered_are_no_activations(fp8):
    """bf16: two bytes of each weight. FP8: one of the blocks', one more transposed, and one of each shard's, with a
    scale of 16 bytes for each of a block's seven."""
    parallel = {"dp_shard": 2, "reshard_after_forward": False}
    kind = (
        {"precision": "fp8", "fp8": {"keep_transposed": True}} if fp8 else {"precision": "bf16"}
    )
    config = configs.from_dict(TREE | kind | {"parallel": parallel})
    weights = dict(Decoder(config.model.config).named_parameters())
    whole, in_blocks = (
        sum(p.numel() for n, p in weights.items() if p.dim() > least) for least in (0, 1)
    )
    in_blocks -= weights["model.embed_tokens.weight"].numel() + weights["lm_head.weight"].numel()
    peak = trace_step(config, 2).peak
    assert peak["gathered"] == 2 * whole + 4  # and the gradient's norm
    assert peak["parameters"] == 4 * whole // 2 + (in_blocks // 2 + 7 * 16) * fp8


@pytest.mark.parametrize(
    "layout, share", [({"reshard_after_forward": False}, 1), ({"dp_replicate": 2}, 2)]
)
def test_gradients_that_wait_for_other_ranks_are_no_activations(layout, share):
    """In fp32, between micro-batches: whole ones, or a half that replicas have not summed yet."""
    config = configs.from_dict(TREE | {"precision": "bf16", "parallel": {"dp_shard": 2} | layout})
    whole = sum(p.numel() for p in Decoder(config.model.config).parameters())
    assert trace_step(config, 2 * share).peak["gradients"] == 4 * whole // share


def test_breakdown_adds_up_to_the_step():
    """Of four micro-batches two were traced: what belongs to the typical one happens three times."""
    config = configs.from_dict(TREE)
    trace = trace_step(few_micro_batches(config), 2)
    typical = min(
        index
        for index, count in enumerate(Simulation({0: trace}, {}, 4, 2, 0.0).times())
        if count == 3
    )
    once = next(
        index
        for index, count in enumerate(Simulation({0: trace}, {}, 4, 2, 0.0).times())
        if count == 1
    )
    spans = [
        Span("compute", "mm", "gemm", 0.0, 1.0, 0.0, once),
        Span("dp_shard", "all_gather", "collective", 0.5, 1.5, 0.0, once),
        Span("compute", "mul", "memory", 1.5, 2.0, 0.5, typical),
    ]
    parts = {"gemm": 1.0, "memory": 3 * 0.5}
    alone = Simulation({0: trace}, {0: Timeline(spans)}, 4, 2, 5.0)
    assert alone.breakdown() == parts | {
        "exposed communication": 3 * 0.5,
        "tail": 1.0,
        "slowest rank": 0.0,
        "gaps": 0.0,
    }
    late = dataclasses.replace(alone, slowest=0.25).breakdown()
    assert (late["tail"], late["slowest rank"]) == (0.75, 0.25)
    host = dataclasses.replace(alone, host=0.25).breakdown()
    assert (host["tail"], host["gaps"]) == (0.75, 0.25)
    assert dataclasses.replace(alone, step=3.5).breakdown()["tail"] == 0.0
    staged = dataclasses.replace(alone, idle=[2.0])
    assert staged.breakdown() == parts | {
        "exposed communication": 0.5,
        "bubble": 2.0,
        "slowest rank": 0.0,
        "gaps": 0.0,
    }


def test_few_micro_batches_of_a_pipeline_stand_for_all():
    """Of four stages the first rank has 0 and 2: forwards, it sends two and receives one; backwards, the reverse."""
    pipeline = {"dp_shard": 1, "pp": 2, "vp": 2, "schedule": "Interleaved1F1B"}
    config = configs.from_dict(
        TREE | {"model": {"name": "llama3-8b-tiny", "num_layers": 4}, "parallel": pipeline}
    )
    small = few_micro_batches(config)
    assert (micro_batches(config), small.batch.global_) == (10, 4)
    part, whole = trace_step(small, 2), trace_step(config, 2)
    times = Simulation({0: part}, {}, 10, 4, 0.0).times()
    found = part.collectives(times)
    assert found["pp/send"] == found["pp/recv"] == [3 * 10, 3 * 10 * 64 * 64 * 4]
    assert found == whole.collectives() and part.flops(times) == whole.flops()


def test_a_pipeline_that_holds_all_micro_batches_at_once_runs_all():
    pipeline = {"dp_shard": 1, "pp": 2, "schedule": "GPipe"}
    config = configs.from_dict(
        TREE | {"model": {"name": "llama3-8b-tiny", "num_layers": 4}, "parallel": pipeline}
    )
    assert few_micro_batches(config).batch == config.batch


def test_an_action_takes_what_its_rank_does_since_the_one_before():
    trace = Trace(marks=[(1, (0, "F", 0)), (2, None), (3, (0, "F", 1)), (4, None)])
    found = action_spans(trace, Timeline(at=[1.0, 3.0, 4.0, 6.0]))
    assert found == {(0, "F", 0): (0.0, 3.0), (0, "F", 1): (3.0, 6.0)}
    found = action_spans(trace, Timeline(at=[3.0, 5.0, 6.0, 8.0]))
    # 2 seconds of gathering come before all
    assert found == {(0, "F", 0): (2.0, 5.0), (0, "F", 1): (5.0, 8.0)}


@pytest.mark.parametrize("depths", [0, 2])
def test_model_flops_of_packed_documents_are_those_that_run(depths):
    """All that is executed but 2 of attention's 14 d L per key: its backward kernel computes the scores again."""
    batch = {"global": 2, "micro": 1, "seq_len": 512}
    tree = TREE | {"task": "sft", "data": {"kind": "mock", "packed": True}, "batch": batch}
    tree["model"] = TREE["model"] | {"num_nextn_predict_layers": depths}
    config = configs.from_dict(tree)
    visible = visible_share(open_dataset(config)[0])
    assert visible < 0.7  # several documents
    trace = trace_step(config, 2, visible=visible)
    simulation = time_traces(config, {0: trace}, load_system("dgx-h100"))
    found = simulated_figures(config, "row", load_system("dgx-h100"), simulation)
    model = found["clean_tflops_per_gpu"] * 1e12 * found["step_time_s"]
    again = 2 * count_work(config.model.config).attention * 512 * visible / 2 * 512
    assert model == pytest.approx(trace.flops() - again, rel=1e-6)


@pytest.mark.parametrize("window", [None, 16, 64, 200])
def test_windows_end_where_documents_do(window):
    """Rows of four documents of 64 tokens each: of 256 tokens a window would see more than there is of one."""
    document_ids = torch.arange(4).repeat_interleave(64).expand(2, -1)
    unseen = max(64 - (window or 64), 0)
    assert (
        counting_mask(1 / 4, 256, "cpu", document_ids, window=window).attn_mask
        == 4 * (64**2 - unseen**2) / 2
    )


@pytest.mark.parametrize(
    ("given", "form", "sizes", "flops"),
    [
        ({}, "causal", (16, 32), 32),
        ({"causal": False}, "full", (16, 64), 64),
        ({"plain": False}, "causal", (16, 32), 32),
        ({"plain": False, "window": 8}, "flex", (16, 8), 64 * 8 / 64 - 8 * 8 / 2 / 64),
        ({"window": 8}, "flex", (16, 8), 64 * 8 / 64 - 8 * 8 / 2 / 64),
        ({"q_positions": torch.arange(16)}, "flex", (16, 32), 32),
        ({"q_positions": torch.arange(16), "causal": False}, "full", (16, 64), 64),
    ],
)
def test_attention_runs_on_the_kernel_that_a_gpu_would_take(given, form, sizes, flops):
    """Causal (with sinks too) and full attention on cuDNN's, other masks on FlexAttention; of two rows, as for each."""
    queries = len(given.get("q_positions", range(64)))
    with fake_world(1), patched_for_fake_tensors(1.0), FakeTensorMode(), Tracer({}) as tracer:
        q, kv = torch.empty(2, 4, queries, 16), torch.empty(2, 2, 64, 16)
        fake_attend(q, kv, kv, counting_mask(1.0, 64, "cpu", **given))
    (event,) = (event for event in tracer.trace.events if event.kind == "attention")
    assert (event.form, event.sizes) == (form, sizes)
    assert event.flops == 2 * 2 * 4 * queries * flops * 32


@pytest.mark.parametrize(
    "layers, alike", [(10, {0: 0, 1: 1, 2: 2, 3: 3}), (14, {0: 0, 1: 1, 2: 1, 3: 3})]
)
def test_stages_with_other_windows_do_not_stand_for_each_other(layers, alike):
    """GPT-OSS: of layers 2, 3, 4 two see a window, of 5, 6, 7 one; of 3 to 6 and of 7 to 10 two each."""
    tree = {
        "model": {"name": "gpt-oss-20b-tiny", "num_layers": layers},
        "parallel": {"dp_shard": 1, "pp": 4},
    }
    assert representatives(configs.from_dict(TREE | tree)) == alike


@pytest.mark.parametrize("model", ["llama3-8b-tiny", "deepseek-v3-tiny", "wan2.1-1.3b-tiny"])
def test_attention_counts_in_whatever_file_a_model_is(model):
    """Every module that attends, in each of its layers; with None they stay as they are."""
    shape = model_config(model)
    tree = {"model": model}
    if "wan" in model:
        batch = {"global": 1, "micro": 1, "seq_len": 16}
        tree |= {"task": "diffusion", "data": {"size": [2, 4, 8]}, "batch": batch}
    config = configs.from_dict(tree)
    layers, kinds = shape.num_layers, 2 if "wan" in model else 1
    for visible, stand_in in ((1.0, fake_attend), (None, attention)):
        modules = list(make_counted(visible, config).modules())
        found = [vars(m)[name] for m in modules for name in ATTENDING if name in vars(m)]
        assert found == [stand_in] * layers * kinds


@pytest.mark.parametrize("form", ["row", "mx"])
def test_forms_of_fp8_run_the_same_products_on_fp8_units(form):
    """Experts' as grouped products of as many FLOPs, but for the places that round up an expert's tokens; and none on a
    system whose units have not the form."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_layers": 1}
    tree = TREE | {"model": {"name": "mixtral-8x7b-tiny"} | sizes, "precision": "fp8"}
    kinds = ({}, {"fp8": {"form": form, "experts": True}})
    configs_of = [with_balanced_experts(configs.from_dict(tree | kind)) for kind in kinds]
    plain, ours = (trace_step(few_micro_batches(config), 2) for config in configs_of)

    def flops(trace, kind, element):
        events = (e for e in trace.events if e.kind == kind and e.element == element)
        return sum(event.flops for event in events)

    assert flops(plain, "gemm", 1) == flops(ours, "gemm", 1) > 0
    assert flops(ours, "grouped", 2) == flops(plain, "grouped", 1) == 0
    # the third of three products, the weights' gradient, sums over places: each of 8 experts may begin
    # a group of its own behind the 128 rows
    group = {"row": 16, "mx": 128}[form]
    places = (128 // group + 8) * group
    more = (2 * 128 + places) / (3 * 128)
    assert flops(ours, "grouped", 1) == pytest.approx(
        more * flops(plain, "grouped", 2), rel=1e-12
    )
    system = "dgx-h100" if form == "mx" else "dgx-b300"
    with pytest.raises(InputError, match=f"fp8.form={form} is not simulated on {system}"):
        time_traces(configs_of[1], {0: ours}, load_system(system))
    # and multiplies at the rate of its form
    system = load_system("dgx-b200" if form == "mx" else "dgx-h100")
    with mock.patch.object(simulate, "play", wraps=simulate.play) as play:
        time_traces(configs_of[1], {0: ours}, system)
    assert play.call_args.args[1].fp8 == system.fp8 * {"row": 0.925, "mx": 1.0}[form]


@pytest.mark.parametrize("sent_to", ["ranks", "random_ranks", "experts"])
def test_rows_that_are_sent_to_experts(sent_to):
    """Of all ways to choose 3 of 8 experts on 4 ranks in 2 domains, beside the fake gate's: tokens that each take the
    next 3."""
    shape = {"name": "qwen3-30b-a3b-tiny", "num_experts": 8, "num_experts_per_tok": 3}
    tree = {"batch": {"global": 4, "micro": 1, "seq_len": 64}, "parallel": {"ep": 4}}
    drawn = [set(chosen) for chosen in itertools.combinations(range(8), 3)]
    fake = [{n % 8 for n in range(3 * token, 3 * token + 3)} for token in range(8)]

    def parts(choices, size: int) -> float:
        return statistics.mean(len({expert // size for expert in chosen}) for chosen in choices)

    system = dataclasses.replace(SECOND, sent_to=sent_to, domain=2)
    traced = parts(fake, 2)
    expected = {
        "ranks": Rows(parts(drawn, 2) / traced, parts(drawn, 2) / traced, 3 / traced),
        "random_ranks": Rows(parts(drawn, 2) / traced, parts(drawn, 4) / traced, 3 / traced),
        "experts": Rows(*[3 / traced] * 3),
    }[sent_to]
    config = configs.from_dict(tree | {"model": shape})
    assert sent_rows(config, system) == pytest.approx(expected)
    balanced = configs.from_dict(tree | {"model": shape | {"fake_balanced_gate": True}})
    if sent_to == "ranks":
        expected = Rows(1.0, 1.0, 3 / traced)
    assert sent_rows(balanced, system) == pytest.approx(expected)
    alone = configs.from_dict(tree | {"model": shape, "parallel": {}})
    assert sent_rows(alone, system) == Rows()


def test_a_step_waits_for_its_slowest_rank():
    """What a rank does in 3 seconds takes 3 (1 + 0.01 x 1.43) with 8 ranks; the host waits for none of them."""
    event = Event("mm", "gemm", 3, [], [])
    trace = Trace([event], peak=dict.fromkeys(MEMORY_KINDS, 0))
    system = dataclasses.replace(SECOND, spread=0.01, step=2.0)
    for ranks in (1, 8):
        tree = TREE | {"parallel": {"dp_shard": ranks}}
        found = time_traces(configs.from_dict(tree), {0: trace}, system)
        waits = 3 * system.slowest(ranks)
        assert (found.slowest, found.step) == pytest.approx((waits, 3 + waits + 2))


def test_experts_in_fp32_are_refused():
    config = configs.from_dict(TREE | {"model": "mixtral-8x7b-tiny", "precision": "fp32"})
    with pytest.raises(InputError, match="precision=fp32 is not simulated for experts"):
        record(config)


def test_layouts_are_ranked_and_those_that_cannot_run_are_told(tmp_path, monkeypatch):
    """Faster with more tensor parallelism, but tp=4 does not fit; 3 does not divide the heads."""

    def predicted(config, row, system):
        tp = config.parallel.tp
        assert config.parallel.dp_shard * tp == 8
        return None, {
            "tokens_per_sec_per_gpu": tp,
            "step_time_s": 1 / tp,
            "mfu": 0.5,
            "peak_memory_gib": 1.0,
            "fits": tp < 4,
        }

    monkeypatch.setattr(sweep, "predicted_row", predicted)
    file = tmp_path / "row.yaml"
    file.write_text(
        "model: llama3-8b-tiny\nbatch: {global: 8, micro: 1, seq_len: 64}\nparallel: {dp_shard: 8}\n"
    )
    results = list(sweep.sweep(str(file), [], ["tp=1,2,3,4"], load_system("dgx-h100")))
    lines = sweep.ranking(results).splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines[:3]] == ["tp=2", "tp=1", "tp=4"]
    assert lines[2].split("|")[-2].strip() == "no"
    assert lines[3].startswith("tp=3: ") and len(lines) == 4
    errors = [
        each["error"]
        for each in sweep.sweep(str(file), [], ["recompute=1,most"], load_system("dgx-h100"))
    ]
    # of the same key
    assert ["at least 2" in errors[0], "is not one of none" in errors[1]] == [True, True]
    lists = sweep.parse("optim.betas=[0.9,0.95],[0.9,0.99]")
    assert lists == ("optim.betas", ["[0.9,0.95]", "[0.9,0.99]"])
    mappings = sweep.parse("data={kind: mock, size: [1,2]},{size: [3,4], kind: mock}")
    assert mappings == ("data", ["{kind: mock, size: [1,2]}", "{size: [3,4], kind: mock}"])
    for words, line in (
        ("tp", "'tp' is not of the form"),
        ("tp=1 tp=2", "a key twice"),
        ("dp_shard=2", "sweep those"),
    ):
        with pytest.raises(InputError, match=f"--sweep.*{line}"):
            list(sweep.sweep(str(file), [], words.split(), load_system("dgx-h100")))


def test_a_sweep_leaves_out_ranks_that_only_sample():
    """16 GPUs, of which 8 sample: of the others, a pipeline of two leaves 4 shards, of four 2."""
    row = CONFIGS / "rl/llama3.1-8b-grpo-16gpu-1off.yaml"
    for pp, shards in ((2, 4), (4, 2)):
        config = sweep.with_all_gpus(row, [f"parallel.pp={pp}"], 16)
        assert (config.parallel.dp_shard, config.grpo.generation_ranks) == (shards, 8)
        assert micro_batches(config) == 512 // shards
        assert "changed" not in config.reference
    changed = sweep.with_all_gpus(row, ["model.num_layers=16"], 16).reference["changed"]
    assert changed == ["model"]  # or its tokens/s would be compared with the published ones
    with pytest.raises(InputError, match="16 ranks per shard do not divide 8"):
        sweep.with_all_gpus(row, ["parallel.pp=8", "parallel.tp=2"], 16)


def written(simulation: Simulation, path) -> list[dict]:
    write_trace(simulation, str(path))
    return json.loads(path.read_text())["traceEvents"]


def test_a_trace_has_a_lane_per_stream_and_per_stage(tmp_path):
    line = Timeline(
        [
            Span("compute", "mm", "gemm", 0.0, 1.0, 0.0, 0),
            Span("tp", "allgather", "collective", 1.0, 3.0, 0.0, 1),
        ],
        [1.0, 1.0],
        3.0,
    )
    events = [
        Event("mm", "gemm", 12, [], [], (1, 2, 3, 1)),
        Event("allgather", "collective", 0, [], [], payload=2**21),
    ]
    trace = Trace(
        events, marks=[(0, (0, "F", 5))], memory=[(0, 0, 0, 0, 2**30), (0, 0, 0, 2**29, 2**30)]
    )
    pipeline = Replay(
        {(0, "F", 0): (0.0, 1.0), (1, "F", 0): (1.0, 2.0)}, [1.0, 2.0], {0: 0, 1: 1}
    )
    events = written(
        Simulation({0: trace}, {0: line}, 4, 1, 2.0, pipeline), tmp_path / "trace.json"
    )
    lanes = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == [
        "rank at place 0 of the pipeline: 1 of its 4 micro-batches, and the optimizer",
        "all stages",
    ]
    boxes = {
        (lanes[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"])
        for e in events
        if e["ph"] == "X"
    }
    assert boxes == {
        ("compute", "step", 0, 3e6),
        ("compute", "micro-batch 5", 0, 1e6),
        ("compute", "forward of stage 0", 0, 1e6),
        ("compute", "mm 1 x 2 x 3 x 1", 0, 1e6),
        ("tp", "allgather 2 MiB", 1e6, 2e6),
        ("stage 0", "F0", 0, 1e6),
        ("stage 1", "F0", 1e6, 1e6),
    }
    held = [e["args"] for e in events if e["ph"] == "C"]
    assert [(each["gathered"], each["activations"]) for each in held] == [
        (0, 2**30),
        (2**29, 2**30),
    ]


@pytest.mark.parametrize("pp, compiles", [(1, False), (2, True)])
def test_slices_are_nested_from_the_step_to_a_kernel(tmp_path, compiles, pp):
    parallel = {"dp_shard": 1, "pp": pp, "layers_per_stage": [3, 1] if pp > 1 else None}
    model = {"name": "llama3-8b-tiny", "num_layers": 2}
    tree = TREE | {"model": model, "batch": {"global": 3, "micro": 1, "seq_len": 64}}
    config = configs.from_dict(
        tree | {"compile": compiles, "parallel": parallel, "precision": "bf16"}
    )
    simulation = time_traces(config, record(config), load_system("dgx-h100"))
    events = written(simulation, tmp_path / "trace.json")
    slices = sorted(
        (e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (0, 0)),
        key=lambda e: e["ts"],
    )
    paths, open_now = [], []
    for each in slices:  # the outer of two that begin together comes first
        while open_now and open_now[-1][1] <= each["ts"] + 1e-9:
            open_now.pop()
        end = each["ts"] + each["dur"]
        assert not open_now or end <= open_now[-1][1] + 1e-6
        open_now.append((each["name"], end))
        paths.append((tuple(name for name, _ in open_now), each["args"].get("FLOPs", 0)))
    passes = [("forward", "backward"), ("forward of stage 0", "backward of stage 0")][pp - 1]
    wide = Decoder(config.model.config).model.layers["0"]
    products = 2 * 64 * sum(p.numel() for p in wide.parameters() if p.dim() > 1)
    for batch in range(min(3, simulation.traced)):
        for which, names in zip(passes, (["0", "1"], ["1", "0"]), strict=True):
            around = ("step", f"micro-batch {batch}", which)
            inside = [
                (path[3], flops) for path, flops in paths if path[:3] == around and len(path) > 3
            ]
            order = list(
                dict.fromkeys(name.split(".")[-1] for name, _ in inside if "layers." in name)
            )
            assert order == names
            per_block = dict.fromkeys(names, 0)
            for path, flops in paths:
                if (
                    path[:3] == around
                    and len(path) == 5
                    and path[4].startswith(("mm", "addmm", "add_product"))
                ):
                    per_block[path[3].split(".")[-1]] += flops
            assert per_block == dict.fromkeys(names, products * (2 if which == passes[1] else 1))
    held = [sum(e["args"].values()) for e in events if e["ph"] == "C" and e["pid"] == 0]
    assert max(held) == sum(simulation.traces[0].peak.values())


def test_adapters_of_a_folder_are_simulated_without_their_values(tmp_path):
    model, lora = Decoder(model_config("llama3-8b-tiny", num_layers=1)), Lora(rank=2)
    add_adapters(model, lora)
    adapters = [(name, p.detach()) for name, p in model.named_parameters() if is_adapter(name)]
    save_adapter(adapters, model.config, lora, tmp_path)
    tree = {
        "model": {"name": "llama3-8b-tiny", "num_layers": 1},
        "batch": {"global": 1, "micro": 1, "seq_len": 16},
    }
    trace = trace_step(
        configs.from_dict(tree | {"task": "lora", "lora": {"path": str(tmp_path)}}), 1
    )
    assert trace.peak["parameters"] == sum(p.nbytes for p in model.parameters())


def test_compiled_adapters_leave_sums_to_products():
    """Each is a new tensor in the compiler's graph, of outputs and of gradients; the simulated kernel changes one."""
    model, batch = (
        {"name": "llama3-8b-tiny", "num_layers": 2},
        {"global": 3, "micro": 1, "seq_len": 16},
    )
    tree = {
        "model": model,
        "batch": batch,
        "task": "lora",
        "lora": {"rank": 2},
        "data": {"packed": False},
    }
    compiled, eager = (
        trace_step(configs.from_dict(tree | {"compile": c}), 1) for c in (True, False)
    )
    sums = [event for event in compiled.events if event.name == "add_product"]
    assert len(sums) == 3 * 2 * (7 + 7) and all(
        event.kind == "gemm" and len(event.writes) == 1 for event in sums
    )
    selective = trace_step(
        configs.from_dict(tree | {"compile": True, "recompute": "selective"}), 1
    )
    assert compiled.flops() == eager.flops() == selective.flops()


def test_constants_were_fitted_to_at_most_a_third_of_the_rows_and_the_others_count():
    fitted, held_back, rows = constants("fitted_on"), constants("held_back"), published_rows()
    assert sorted(fitted + held_back) == sorted(rows) and len(fitted) <= len(rows) // 3
