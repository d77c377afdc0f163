"""Pipeline parallelism: every schedule gives the losses, gradients and weights of one process."""

import re
import warnings
from functools import partial
from typing import get_args, get_type_hints
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from minitrain.errors import InputError
from minitrain.formats.hf import load_pretrained, save_pretrained
from minitrain.models.decoder import Decoder
from minitrain.parallel.parallelize import parallelize
from minitrain.parallel.pipeline_split import SCHEDULES, rank_of, split_layers
from minitrain.run.config import load as configs
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.launch.start import meshes_of, start
from minitrain.run.tasks.exports import export
from minitrain.settings import Parallel
from minitrain.simulator.dry_run import dry_run
from minitrain.simulator.fake_world import fake_world, trace_step
from minitrain.simulator.replay import schedule_order
from minitrain.training.build import build_model, make_model
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loop import Trainer, forward_backward
from tests.helpers import oracle
from tests.helpers.families import families, is_dense
from tests.helpers.oracle import (
    Batches,
    built,
    check_against_one_process,
    count_calls,
    initial_weights,
    micro_batches,
    packed_batch,
    plain_step,
    ragged_batch,
    snapshot,
    train_compiled,
)
from tests.helpers.pipelines import STAGES, tree
from tests.helpers.resharding import train


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(pool, schedule):
    check_against_one_process(pool, 2, tree(schedule=schedule), steps=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_with_fsdp(pool, schedule):
    check_against_one_process(pool, 4, tree(schedule=schedule, data_ranks=2), steps=2)


# four on each rank
MANY_STAGES = {"layers": 6, "schedule": "Interleaved1F1B", "micro_batches": 8, "data_ranks": 2}


def count_gathers(settings):
    with count_calls("all_gather") as gathers:
        oracle.train(settings, steps=2)
    return gathers.call_count


def test_weights_are_gathered_once_a_step_or_freed_while_they_wait(pool):
    """Of four stages three blocks, and the embedding or the head."""
    keeps, frees = (
        tree(**MANY_STAGES, parallel={"vp": 4, "reshard_after_forward": frees})
        for frees in (False, True)
    )
    assert pool.run(4, count_gathers, keeps) == [2 * 4] * 4
    assert min(pool.run(4, count_gathers, frees)) > 2 * 2 * 4
    for settings in (keeps, frees):
        check_against_one_process(pool, 4, settings, steps=2)


@pytest.mark.parametrize(
    "schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_four_ranks_with_one_layer_per_stage(pool, schedule):
    vp = STAGES[schedule]
    check_against_one_process(
        pool, 4, tree(4, schedule, layers=4 * vp - 2, micro_batches=8), steps=1
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"layers_per_stage": [1, 5]},
        {"layers_per_stage": [5, 1]},
        {"head_layers": 3},
        {"schedule": "ZBVZeroBubble", "vp": 2, "layers_per_stage": [1, 2, 2, 1]},
        {"schedule": "Interleaved1F1B", "vp": 3},
        {"schedule": "Interleaved1F1B"},
        {"schedule": "InterleavedZeroBubble"},
        {"schedule": "LoopedBFS"},
    ],
    ids=str,
)
def test_splits(pool, parallel):
    check_against_one_process(pool, 2, tree(parallel=parallel), steps=2)


@pytest.mark.parametrize(
    ("schedule", "count"),
    [
        ("GPipe", 1),
        ("LoopedBFS", 1),
        ("ZBVZeroBubble", 1),
        ("Interleaved1F1B", 1),
        ("InterleavedZeroBubble", 2),
        ("1F1B", 3),
        ("DualPipeV", 5),
    ],
)
def test_other_numbers_of_micro_batches(pool, schedule, count):
    check_against_one_process(pool, 2, tree(schedule=schedule, micro_batches=count), steps=1)


def shrinking_batch(config, step):
    """Each step's rows have fewer tokens, as a policy's may."""
    return {key: value[:, : 16 - 8 * step] for key, value in ragged_batch(config, step).items()}


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_rows_of_another_length(pool, schedule):
    check_against_one_process(pool, 2, tree(schedule=schedule), batch=shrinking_batch)


@pytest.mark.parametrize(
    ("schedule", "world_size"),
    [("1F1B", 2), ("Interleaved1F1B", 4), ("DualPipeV", 2), ("DualPipeV", 4)],
)
def test_tied_embeddings(pool, schedule, world_size):
    tied = {"tie_word_embeddings": True, "vocab_size": 125}
    check_against_one_process(
        pool, world_size, tree(schedule=schedule, data_ranks=world_size // 2, model=tied)
    )


@pytest.mark.parametrize("model", families(is_dense)[1:])
def test_other_families(pool, model):
    check_against_one_process(
        pool, 2, tree(schedule="InterleavedZeroBubble", model={"name": model}), steps=1
    )


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_packed_documents(pool, schedule):
    check_against_one_process(pool, 2, tree(schedule=schedule), steps=1, batch=packed_batch)


def test_a_first_stage_without_layers_returns_no_view(pool):
    """FSDP hooks the gradients of what a stage returns, and warns of views."""
    settings = tree(parallel={"tp": 2, "layers_per_stage": [1, 5]})
    check_against_one_process(pool, 4, settings, steps=1, double=True, run=train_strictly)


def train_strictly(*args):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view tensor")
        return oracle.train(*args)


@pytest.mark.parametrize(
    ("parallel", "data_ranks"),
    [
        ({"dp_replicate": 2}, 2),
        ({"tp": 2}, 1),
        ({"tp": 2, "schedule": "ZBVZeroBubble", "vp": 2}, 1),
        ({"cp": 2, "schedule": "Interleaved1F1B", "vp": 2}, 1),
        ({"cp": 2, "schedule": "DualPipeV", "vp": 2}, 1),
    ],
    ids=str,
)
def test_with_other_techniques(pool, parallel, data_ranks):
    check_against_one_process(
        pool, 4, tree(parallel=parallel, data_ranks=data_ranks), steps=2, double=True
    )


@pytest.mark.parametrize(
    ("schedule", "settings"),
    [
        ("1F1B", {"recompute": "full"}),
        ("Interleaved1F1B", {"recompute": "full", "compile": True}),
    ],
    ids=str,
)
def test_recompute_and_compile(pool, schedule, settings):
    check_against_one_process(
        pool, 4, tree(schedule=schedule, data_ranks=2, **settings), steps=1, run=train_compiled
    )


def train_with_frozen_embedding(settings):
    config = configs.from_dict(settings)
    meshes = start(config)
    model = build_model(config, meshes)
    for stage in model.stages.values():
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_("embed_tokens" not in name)
    rows = micro_batches(ragged_batch(config, 0), config, meshes.batch)
    forward_backward(model, LanguageModeling(), rows, meshes, torch.device("cpu"))
    return snapshot((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("schedule", "layers_per_stage"), [("1F1B", None), ("1F1B", [1, 5]), ("DualPipeV", None)]
)
def test_frozen_tied_embeddings(pool, schedule, layers_per_stage):
    tied = {"tie_word_embeddings": True}
    settings = tree(
        schedule=schedule, model=tied, parallel={"layers_per_stage": layers_per_stage}
    )
    config = configs.from_dict(settings)
    _, expected = plain_step(config, initial_weights(config), ragged_batch(config, 0))
    del expected["model.embed_tokens.weight"]
    oracle.check_close(
        pool.run(2, train_with_frozen_embedding, settings), expected, 1e-6, "gradients"
    )


@pytest.mark.parametrize(
    ("precision", "schedule", "count"),
    [("bf16", "1F1B", 4), ("bf16-pure", "1F1B", 4), ("bf16", "ZBVZeroBubble", 1)],
)
def test_bf16(pool, precision, schedule, count):
    settings = tree(schedule=schedule, micro_batches=count)
    config = configs.from_dict(settings)
    loss, _ = plain_step(config, initial_weights(config), ragged_batch(config, 0))
    for trace in pool.run(2, oracle.train, settings | {"precision": precision}, 1):
        assert trace.losses[0] == pytest.approx(loss, rel=1e-2) and trace.losses[0] != loss


# ---------------------------------------------------------------------------------------------------------- evaluation


def evaluate_and_train(settings):
    """Losses of evaluations before and after a training step, and that step's."""
    config = configs.from_dict(settings)
    trainer = Trainer(config, start(config))
    data = Batches(config, 3)
    before = trainer.evaluate(data)
    step = trainer.step(data, 0)["loss"].item()
    # nor what they sent: all has arrived
    assert not any(stage.sends for stage in trainer.model.scheduled)
    return before, step, trainer.evaluate(data)


@pytest.mark.parametrize(
    ("schedule", "tied"), [("1F1B", True), ("LoopedBFS", False), ("ZBVZeroBubble", True)]
)
def test_evaluation(pool, schedule, tied):
    settings = tree(
        schedule=schedule,
        data_ranks=2,
        model={"tie_word_embeddings": tied},
        validation={"batches": 3},
    )
    config = configs.from_dict(settings)
    batches = Batches(config, 3).batches
    everything = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    weights = initial_weights(config)
    before, _ = plain_step(config, weights, everything)
    step, gradients = plain_step(config, weights, batches[0])
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    rate = config.optim.lr * min(1, config.optim.clip / norm)
    after, _ = plain_step(
        config, {name: weights[name] - rate * gradients[name] for name in weights}, everything
    )
    for losses in pool.run(
        4, evaluate_and_train, settings | {"optim": settings["optim"] | {"weight_decay": 0}}
    ):
        assert losses == pytest.approx((before, step, after), rel=1e-6)


# ----------------------------------------------------------------------------------------------- checkpoints in and out


def export_initial(settings, folder):
    config = configs.from_dict(settings)
    trainer = Trainer(config, start(config))
    export(trainer, config, folder)
    order = [name for name, _ in trainer.model.full_tensors(lambda name: True)]
    return {name for name, _ in trainer.model.named_parameters()}, order


@pytest.mark.parametrize(
    ("schedule", "tied", "world_size"),
    [("1F1B", False, 2), ("Interleaved1F1B", True, 4), ("DualPipeV", True, 2)],
)
def test_export(pool, tmp_path, schedule, tied, world_size):
    settings = tree(
        schedule=schedule, data_ranks=world_size // 2, model={"tie_word_embeddings": tied}
    )
    held, orders = zip(*pool.run(world_size, export_initial, settings, tmp_path), strict=True)
    expected = initial_weights(configs.from_dict(settings))
    exported = dict(load_pretrained(tmp_path).named_parameters())
    assert all(order == list(expected) == list(exported) for order in orders)
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert set.union(*held) == set(expected) and all(names < set(expected) for names in held)


def test_stages_load_their_part_of_a_checkpoint(pool, tmp_path):
    settings = tree(model={"tie_word_embeddings": True})
    config = configs.from_dict(settings).model.config
    torch.manual_seed(1)
    model = Decoder(config)
    save_pretrained(model, tmp_path)
    parts = pool.run(2, built, settings | {"model": {"path": str(tmp_path)}})
    loaded = parts[0] | parts[1]
    assert not parts[0].keys() & parts[1].keys()
    assert loaded.keys() == dict(model.named_parameters()).keys()
    assert all(
        torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters()
    )


def test_a_checkpoint_continues_under_other_layouts(pool, tmp_path):
    settings = tree(optim={"name": "adamw", "lr": 0.01}, model={"tie_word_embeddings": True})
    layouts = [
        (2, {"pp": 2}),
        (2, {}),
        (4, {"pp": 2, "schedule": "DualPipeV", "vp": 2, "dp_shard": 2}),
        (2, {"pp": 2}),
    ]
    settings["batch"] = {"global": 8, "micro": 1, "seq_len": 16}
    unbroken, _ = pool.run(
        1, train, settings | {"parallel": {}}, tmp_path / "unbroken", len(layouts)
    )[0]
    for step, (world_size, parallel) in enumerate(layouts):
        losses, _ = pool.run(
            world_size, train, settings | {"parallel": parallel}, tmp_path / "moving", step + 1
        )[0]
        assert losses == {step: pytest.approx(unbroken[step], rel=1e-5)}


# ------------------------------------------------------------------------------------------------------- without ranks


@pytest.mark.parametrize(
    ("layers", "stages", "head"),
    [
        (126, 64, 1),
        (4, 6, 1),
        (4, 4, 1),
        (7, 2, 1),
        (96, 16, 1),
        (1, 3, 1),
        (6, 5, 1),
        (80, 40, 2),
        (96, 96, 2),
        (61, 32, 2),
        (10, 4, 3),
    ],
)
def test_every_layer_is_on_one_stage(layers, stages, head):
    parts = split_layers(layers, stages, head=head)
    assert [layer for part in parts for layer in part["layers"]] == list(range(layers))
    assert [part["first"] for part in parts] == [True] + [False] * (stages - 1)
    assert [part["last"] for part in parts] == [False] * (stages - 1) + [True]
    slots = [len(part["layers"]) + part["first"] + head * part["last"] for part in parts]
    assert max(slots) - min(slots) <= 1
    assert slots[0] == max(slots) and slots[1:] == sorted(slots[1:])
    if layers % stages == 0 and stages > 2 and head == 1:
        assert {len(part["layers"]) for part in parts} == {layers // stages}


def test_layers_per_stage_counts_embedding_and_head():
    parts = split_layers(126, 64, [2] * 64)
    assert [len(part["layers"]) for part in parts] == [1] + [2] * 62 + [1]
    parts = split_layers(4, 3, [1, 4, 1])
    assert [list(part["layers"]) for part in parts] == [[], [0, 1, 2, 3], []]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("style", "vp"), [("loop", 1), ("loop", 3), ("v", 2)])
def test_stages_are_where_torch_expects_them(ranks, style, vp):
    ours = {stage: rank_of(stage, ranks, style == "v") for stage in range(ranks * vp)}
    assert ours == generate_stage_to_rank_mapping(ranks, ranks * vp, style)


def replay(schedule, ranks, batches, vp, forward, inputs, weights):
    """Play torch's orders with these durations of a rank's layers: its idle time, and the most batches held on any."""
    split = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    orders = [
        [str(a) for action in order if action for a in action.sub_actions or [action]]
        for order in get_schedule_ops(schedule, ranks, batches, vp)
    ]
    orders = [
        [a for a in (re.fullmatch(r"(\d+)([FIWB])(\d+)", text) for text in order) if a]
        for order in orders
    ]
    finished, clocks, held, most = {}, [0.0] * ranks, [0] * ranks, 0
    while any(orders):
        for rank, order in enumerate(orders):
            while order and (ready := when(order[0].groups(), finished, ranks * vp)) is not None:
                stage, kind, batch = order.pop(0).groups()
                clocks[rank] = max(clocks[rank], ready) + split[kind] / vp
                finished[stage, "B" if kind == "I" else kind, batch] = clocks[rank]
                held[rank] += {"F": 1, "I": 0}.get(kind, -1)
                most = max(most, held[rank])
    return max(clocks) - batches * (forward + inputs + weights), most / vp


def when(action, finished, stages):
    """When what an action needs is there, or None if it is not yet."""
    stage, kind, batch = action
    if kind == "W" or (kind == "F" and stage == "0"):
        return 0.0
    if kind == "F":
        return finished.get((str(int(stage) - 1), "F", batch))
    last = int(stage) == stages - 1
    return finished.get((stage, "F", batch) if last else (str(int(stage) + 1), "B", batch))


@pytest.mark.parametrize(
    ("schedule", "vp", "idle", "held"),
    [  # not 1F1B, whose batches torch numbers wrongly here
        ("GPipe", 1, lambda n, v, f, i, w: (n - 1) * (f + i + w), lambda n, v, m: m),
        ("LoopedBFS", 4, lambda n, v, f, i, w: (n - 1) * (f + i + w) / v, lambda n, v, m: m),
        (
            "Interleaved1F1B",
            4,
            lambda n, v, f, i, w: (n - 1) * (f + i + w) / v,
            lambda n, v, m: n + (n - 1) / v,
        ),
        (
            "InterleavedZeroBubble",
            2,
            lambda n, v, f, i, w: (n - 1) * (f + i - w) / v,
            lambda n, v, m: n,
        ),
        ("ZBVZeroBubble", 2, lambda n, v, f, i, w: (n - 1) * f / 2, lambda n, v, m: n),
        ("DualPipeV", 2, lambda n, v, f, i, w: (n - 1) * f / 2, lambda n, v, m: n + 1 / 2),
    ],
)
@pytest.mark.parametrize(("ranks", "batches"), [(2, 8), (4, 16), (8, 32)])
def test_the_table_of_idle_time_and_memory(schedule, vp, idle, held, ranks, batches):
    for durations in [(1, 1, 1)] if SCHEDULES[schedule].v_shaped else [(1, 1, 1), (1, 1.2, 0.8)]:
        expected = idle(ranks, vp, *durations), held(ranks, vp, batches)
        assert replay(schedule, ranks, batches, vp, *durations) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 31])
def test_a_step_runs_on_fake_tensors_in_a_fake_world(schedule, rank):
    config = configs.from_dict(tree(4, schedule, layers=6, micro_batches=8, data_ranks=8))
    with fake_world(32, rank):
        meshes = meshes_of(config, "cpu")
        model = parallelize(partial(make_model, config), config, meshes)
        rows = micro_batches(ragged_batch(config, 0), config, meshes.batch)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            loss = model.forward_backward(LanguageModeling().loss, rows, torch.tensor(5.0))
        assert loss.shape == () and all(p.grad is not None for p in model.parameters())


def test_dry_run_counts_all_stages():
    config = configs.from_dict(
        tree(schedule="DualPipeV", layers=8, data_ranks=2, parallel={"dp_shard": 2})
    )
    total = sum(p.numel() for p in Decoder(config.model.config).parameters())
    line = dry_run(config)
    assert (
        line.startswith(f"{total:,} parameters over 4 ranks")
        and "; 4 micro-batch(es) a step" in line
    )


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            tree(1, parallel={"vp": 2}),
            "parallel.vp=2, layers_per_stage=None, head_layers=1 need parallel.pp above 1",
        ),
        (
            tree(1, parallel={"layers_per_stage": [6]}),
            r"layers_per_stage=\[6\], head_layers=1 need parallel.pp above 1",
        ),
        (tree(1, parallel={"head_layers": 2}), "head_layers=2 need parallel.pp above 1"),
        (tree(parallel={"vp": 2}), "parallel.schedule=1F1B has one stage per rank, not vp=2"),
        (
            tree(schedule="GPipe", parallel={"vp": 3}),
            "parallel.schedule=GPipe has one stage per rank, not vp=3",
        ),
        (
            tree(schedule="DualPipeV", parallel={"vp": 1}),
            r"DualPipeV has two stages per rank, not vp=1 \(use vp=2\)",
        ),
        (
            tree(schedule="ZBVZeroBubble", parallel={"vp": 1}),
            "ZBVZeroBubble has two stages per rank, not vp=1",
        ),
        (
            tree(schedule="DualPipeV", compile=True),
            "schedule=DualPipeV runs each backward pass in two parts",
        ),
        (
            tree(schedule="ZBVZeroBubble", compile=True),
            "schedule=ZBVZeroBubble runs each backward pass in two parts",
        ),
        (
            tree(schedule="InterleavedZeroBubble", recompute="full"),
            "with recompute=full a block's forward once per weight",
        ),
        (
            tree(parallel={"layers_per_stage": [3, 2, 1]}),
            r"layers_per_stage=\[3, 2, 1\] must be 2 numbers",
        ),
        (
            tree(parallel={"layers_per_stage": [4, 4]}),
            r"layers_per_stage=\[4, 4\] must be 2 numbers .* with sum 6",
        ),
        (
            tree(parallel={"layers_per_stage": [3, 3], "head_layers": 2}),
            r"head_layers=2 .* not for layers_per_stage=",
        ),
        (
            tree(parallel={"head_layers": 6}),
            "head_layers=6 is more than a stage's even share .* over pp=2 x vp=1 stages",
        ),
        (
            tree(parallel={"layers_per_stage": [6, 0]}),
            r"layers_per_stage=\[6, 0\] must be 2 numbers .* of at least 1",
        ),
        (
            tree(4, "Interleaved1F1B"),
            r"parallel.pp=4 x vp=2 stages are more than the 6 .*\(use at most 6 stages\)",
        ),
    ],
)
def test_refused_settings(settings, line):
    with pytest.raises(InputError, match=line) as error:
        configs.from_dict(settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            tree(micro_batches=1),
            "schedule=1F1B with pp=2 needs at least 2 micro-batches per rank and step, not 1",
        ),
        (
            tree(schedule="DualPipeV", micro_batches=3),
            "schedule=DualPipeV with pp=2 needs at least 4 micro-batches",
        ),
        (
            tree(schedule="Interleaved1F1B", micro_batches=5),
            "needs a multiple of 2, or fewer than 4, micro-batches",
        ),
        (
            tree(schedule="InterleavedZeroBubble", micro_batches=5),
            "a multiple of 2, or fewer than 4, micro-batches",
        ),
    ],
)
def test_refused_numbers_of_micro_batches(settings, line):
    with pytest.raises(InputError, match=line) as error:
        check_layout(configs.from_dict(settings), 2)
    assert "\n" not in str(error.value)


def test_the_most_stages_and_the_fewest_micro_batches():
    check_layout(configs.from_dict(tree(3, "Interleaved1F1B", micro_batches=1)), 3)


# ---------------------------------------------------------------------------------------------------- one of one's own


class OwnSchedule(ScheduleInterleaved1F1B):
    """torch's, by another name: it counts how often it is made."""

    made = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        type(self).made += 1


OWN = {
    "Interleaved1F1B": SCHEDULES["Interleaved1F1B"]._replace(
        path=f"{__name__}.{OwnSchedule.__name__}"
    )
}


def train_with_own_schedule(*args):
    with mock.patch.dict(SCHEDULES, OWN):
        before = OwnSchedule.made
        result = oracle.train(*args)
    assert OwnSchedule.made == before + 1
    return result


def test_a_schedule_of_ones_own_takes_its_line_in_the_table(pool):
    own = tree(schedule="Interleaved1F1B")
    check_against_one_process(pool, 2, own, run=train_with_own_schedule)


def test_a_schedule_of_ones_own_is_simulated(monkeypatch):
    expected = schedule_order("Interleaved1F1B", 2, 4, 2)
    config = configs.from_dict(tree(schedule="Interleaved1F1B"))
    for name, schedule in OWN.items():
        monkeypatch.setitem(SCHEDULES, name, schedule)
    before = OwnSchedule.made
    assert schedule_order("Interleaved1F1B", 2, 4, 2) == expected
    assert trace_step(config, 2).events and OwnSchedule.made == before + 2


def test_the_table_names_all_schedules_of_the_settings():
    assert tuple(SCHEDULES) == get_args(get_type_hints(Parallel)["schedule"])
