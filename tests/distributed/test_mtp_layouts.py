"""Multi-token prediction in layouts that test_matrix.py has not: the gradients of one process."""

import pytest
import torch

from minitrain.parallel.pipeline_split import SCHEDULES, local_stages
from minitrain.settings import Parallel
from tests.helpers.adapters import train_adapters
from tests.helpers.layouts import combine, ranks
from tests.helpers.oracle import check_against_one_process, packed_batch, train, train_compiled
from tests.helpers.pipelines import tree

MTP = {"num_nextn_predict_layers": 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(pool, schedule):
    """The last stage, on the first rank in V-shaped ones, has a copy of the embedding."""
    settings = tree(schedule=schedule, model=MTP, mtp_weight=0.5)
    check_against_one_process(pool, 2, settings, batch=packed_batch)


@pytest.mark.parametrize(
    ("model", "names", "parallel"),
    [
        ({"name": "deepseek-v3-tiny"}, ("cp", "pp"), {}),
        ({"name": "deepseek-v3-tiny"}, ("fsdp", "tp"), {"ep": 4}),
        ({"name": "nemotron3-nano-30b-a3b-tiny", "layer_pattern": "ME"}, ("ulysses", "fsdp"), {}),
        ({"name": "gpt-oss-20b-tiny"}, ("tp", "pp"), {}),
    ],
    ids=str,
)
def test_experts_and_hybrids(pool, model, names, parallel):
    """In fp32, since grouped products know no fp64: rounding alone is above 1e-6 where sums are split otherwise."""
    settings = combine(*names, "mtp")
    settings["parallel"] |= parallel
    settings["model"] = model | {"num_layers": 2, "num_nextn_predict_layers": 1}
    check_against_one_process(pool, ranks(settings), settings, batch=packed_batch, tolerance=1e-5)


def test_compiled(pool):
    settings = combine("fsdp", "mtp") | {"compile": True, "recompute": "full"}
    settings["model"] |= {"num_layers": 1, "num_nextn_predict_layers": 1}
    check_against_one_process(
        pool, 2, settings, batch=packed_batch, run=train_compiled, tolerance=1e-5
    )


@pytest.mark.parametrize(
    "targets", [["q_proj", "eh_proj"], ["0.self_attn.q_proj", "1.mlp.down_proj"]], ids=str
)
def test_adapters_in_these_layers_or_not(pool, random_adapters, targets):
    settings = combine("tp", "pp", "mtp") | {"lora": {"rank": 8, "targets": targets}}
    check_against_one_process(
        pool, 4, settings, batch=packed_batch, run=train_adapters, double=True
    )


def test_without_weight_these_layers_stay_and_cost_nothing(pool):
    """In a pipeline, whose last stage has a copy of the embedding that nothing uses."""
    with_them = combine("fsdp", "pp", "mtp") | {"mtp_weight": 0.0}
    traces = pool.run(4, train, with_them, 2, packed_batch)
    plain = pool.run(4, train, combine("fsdp", "pp"), 2, packed_batch)
    weights, found, expected = (
        {name: tensor for trace in ranks for name, tensor in part(trace).items()}
        for ranks, part in (
            (traces, lambda trace: trace.weights[-1]),
            (traces, lambda trace: trace.gradients[-1]),
            (plain, lambda trace: trace.gradients[-1]),
        )
    )
    assert found.keys() == expected.keys() < weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("layers", "stages", "depths", "last"),
    [(61, 32, 1, 0), (61, 16, 1, 2), (4, 4, 2, 0), (30, 4, 2, 6), (8, 2, 1, 3)],
)
def test_a_stage_with_depths_has_fewer_layers(layers, stages, depths, last):
    parallel = Parallel(pp=stages)
    parts = [local_stages(parallel, layers, rank, depths)[rank] for rank in range(stages)]
    assert [layer for part in parts for layer in part["layers"]] == list(range(layers))
    assert len(parts[-1]["layers"]) == last and parts[-1]["last"]
