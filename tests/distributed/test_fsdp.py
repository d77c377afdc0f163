"""FSDP2 and HSDP: the losses, gradients and weights of one process, whatever the layout."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from minitrain import save_pretrained
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models.mamba import scan
from minitrain.models.zoo import model_config
from minitrain.parallel.shards import assemble, cut_slices, full_slice, full_tensor
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.training.build import build_model
from minitrain.training.loop import Trainer
from tests.helpers.families import families, is_dense
from tests.helpers.oracle import (
    check_against_one_process,
    count_calls,
    snapshot,
    train,
    train_compiled,
)

MODEL = {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 3, "initializer_range": 0.05}
TREE = {
    "model": MODEL,
    "batch": {"global": 8, "micro": 2, "seq_len": 16},
    "optim": {"name": "sgd", "lr": 0.1},
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fsdp(pool, world_size):
    check_against_one_process(pool, world_size, TREE, steps=3)


@pytest.mark.parametrize("model", families(is_dense)[1:])
def test_other_families(pool, model):
    check_against_one_process(pool, 4, TREE | {"model": MODEL | {"name": model}})


@pytest.mark.parametrize("model", families(lambda config: not is_dense(config)))
def test_experts_and_hybrids(pool, model):
    config = model_config(model)
    # softmax does not see what all keys share, so what tokens add to the gradient of their bias nearly
    # cancels: of GLM's it leaves a hundredth, and in fp32 another order of the sum changes 1e-6 of that;
    # so does what they add to those of a delta rule's decays
    double = config.qkv_bias or "d" in config.layer_pattern
    check_against_one_process(pool, 2, TREE | {"model": {"name": model}}, steps=2, double=double)


def save_sharded(folder):
    config = configs.from_dict(TREE)
    with pytest.raises(InputError, match="^a sharded model cannot be saved as it is"):
        save_pretrained(build_model(config, start(config)), folder)


def test_shards_are_not_saved_as_a_model(pool, tmp_path):
    pool.run(2, save_sharded, tmp_path)
    assert not list(tmp_path.iterdir())


def test_uneven_shards(pool):
    check_against_one_process(
        pool, 4, TREE | {"model": MODEL | {"vocab_size": 126, "intermediate_size": 50}}
    )


def test_tied_embeddings(pool):
    check_against_one_process(pool, 2, TREE | {"model": MODEL | {"tie_word_embeddings": True}})


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_replicate": 4},
        {"reshard_after_forward": False},
        {"prefetch": 0},
        {"prefetch": 2},
        {"dp_replicate": 2, "reshard_after_forward": False, "prefetch": 2},
    ],
    ids=str,
)
def test_layouts(pool, parallel):
    check_against_one_process(pool, 4, TREE | {"parallel": parallel})


def prefetched(prefetch):
    """The blocks that each block asks for ahead, in the forward and in the backward pass, by their numbers."""
    told = {"forward": [], "backward": []}
    with (
        mock.patch.object(
            FSDPModule,
            "set_modules_to_forward_prefetch",
            lambda _, units: told["forward"].append(units),
        ),
        mock.patch.object(
            FSDPModule,
            "set_modules_to_backward_prefetch",
            lambda _, x: told["backward"].append(x),
        ),
    ):
        config = configs.from_dict(
            TREE | {"model": MODEL | {"num_layers": 4}, "parallel": {"prefetch": prefetch}}
        )
        blocks = list(build_model(config, start(config)).blocks)
    return {
        key: [[blocks.index(unit) for unit in units] for units in value]
        for key, value in told.items()
    }


def test_the_next_blocks_come_first(pool):
    one, two = pool.run(2, prefetched, 1)[0], pool.run(2, prefetched, 2)[0]
    assert one == {"forward": [[1], [2], [3], []], "backward": [[], [0], [1], [2]]}
    assert two == {"forward": [[1, 2], [2, 3], [3], []], "backward": [[], [0], [1, 0], [2, 1]]}


@pytest.mark.parametrize("world_size", [1, 2])
def test_recompute(pool, world_size):
    check_against_one_process(pool, world_size, TREE | {"recompute": "full"})


@pytest.mark.parametrize(("micro", "frees"), [(1, True), (1, False), (2, True), (4, False)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_accumulation(pool, micro, frees, replicas):
    parallel = {"reshard_after_forward": frees, "dp_replicate": replicas}
    batch = TREE["batch"] | {"global": 8 * replicas, "micro": micro}
    check_against_one_process(pool, 2 * replicas, TREE | {"batch": batch, "parallel": parallel})


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks(pool, recompute):
    check_against_one_process(
        pool, 2, TREE | {"compile": True, "recompute": recompute}, run=train_compiled
    )


def count_messages(tree):
    """How many all-gathers, reduce-scatters and all-reduces of gradients a training step takes."""
    all_reduce = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    with (
        count_calls("all_gather") as gathers,
        count_calls("reduce_scatter") as reductions,
        all_reduce as exchanges,
    ):
        train(tree, steps=1)
    # neither single numbers nor, in fp64, what the ranks of a host need of its memory
    summed = [call.args[0] for call in exchanges.call_args_list]
    of_gradients = [x for x in summed if x.numel() > 1 and x.dtype == torch.float32]
    return gathers.call_count, reductions.call_count, len(of_gradients)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("frees", "gathers", "reductions"),
    [
        (False, 3 + 1, 3 + 1),  # of blocks and the remainder, once a step
        # in each micro-batch, of blocks again in the backward pass
        (True, 4 * (2 * 3 + 1), 4 * (3 + 1)),
    ],
)
def test_weights_stay_gathered_and_gradients_add_up_whole_or_neither(
    pool, frees, gathers, reductions, replicas
):
    """And between replicas, gradients are exchanged once a step."""
    ranks, parallel = 2 * replicas, {"reshard_after_forward": frees, "dp_replicate": replicas}
    batch = TREE["batch"] | {"global": 4 * ranks, "micro": 1}  # four micro-batches on each rank
    found = pool.run(ranks, count_messages, TREE | {"batch": batch, "parallel": parallel})
    assert found == [(gathers, reductions, 0 if replicas == 1 else 3 + 1)] * ranks


def count_reductions(tree):
    """How often a training step reduces the gradients of a block or the remainder, over however many ranks."""
    with mock.patch.object(
        _fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce
    ) as reductions:
        train(tree, steps=1)
    return reductions.call_count


@pytest.mark.parametrize(
    ("ranks", "frees", "times"), [(1, None, 1), (1, True, 4), (1, False, 1), (2, None, 4)]
)
def test_one_rank_frees_no_weights_unless_it_is_asked_to(pool, ranks, frees, times):
    """They would only be copied again, for each of the four micro-batches, and gradients with them."""
    batch = TREE["batch"] | {"global": 4 * ranks, "micro": 1}
    tree = TREE | {
        "batch": batch,
        "precision": "bf16",
        "parallel": {"reshard_after_forward": frees},
    }
    assert pool.run(ranks, count_reductions, tree) == [times * (3 + 1)] * ranks


def types_of_sums(tree):
    with count_calls("reduce_scatter") as reductions:
        train(tree, steps=1)
    given = [x for call in reductions.call_args_list for x in (*call.args, *call.kwargs.values())]
    return {x.dtype for x in given if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize(("reduce", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_gradients_are_added_up_in_the_type_of_the_settings(pool, reduce, dtype):
    tree = TREE | {"precision": "bf16", "parallel": {"reduce": reduce}}
    assert pool.run(2, types_of_sums, tree) == [{dtype}] * 2


def joined(tree, most):
    """Tensors made whole in pieces of so many bytes, and how many of them were cut, on rank 0; and by torch."""
    config = configs.from_dict(tree)
    state = build_model(config, start(config)).state_dict()
    cuts = {name: cut_slices(shard, most) for name, shard in state.items()}
    found = {
        name: assemble(
            ((where, full_slice(shard, where)) for where in cuts[name]), shard.shape, shard.dtype
        )
        for name, shard in state.items()
    }
    return (
        found,
        sum(len(places) > 1 for places in cuts.values()),
        {name: full_tensor(x) for name, x in state.items()},
    )


# each layer is cut as the first: there are hundreds of pieces
SMALL = {"vocab_size": 64, "num_layers": 1}


@pytest.mark.parametrize("most", [1 << 30, 5000, 1])
@pytest.mark.parametrize(
    "tree",
    [
        {"model": MODEL | SMALL | {"vocab_size": 62, "intermediate_size": 50}},
        {"model": MODEL | SMALL, "parallel": {"tp": 2}},
        {"model": SMALL | {"name": "qwen3-30b-a3b-tiny"}, "parallel": {"ep": 2, "tp": 2}},
        {
            "model": {"name": "deepseek-v3-tiny", "vocab_size": 64, "num_layers": 2},
            "parallel": {"ep": 2},
        },
    ],
    ids=["uneven", "tp", "ep x tp", "ep"],
)
def test_tensors_become_whole_in_pieces(pool, tree, most):
    (first, cut, expected), *others = pool.run(4, joined, TREE | tree, most)
    assert first.keys() == expected.keys() and all(
        torch.equal(first[name], expected[name]) for name in expected
    )
    assert (cut > len(first) / 4) == (most < 1 << 30)
    assert all(tensor is None for other in others for tensor in other[0].values())


# ------------------------------------------------------------------------------------------- what must not be rounded


def dynamics_seen(tree):
    """A_log and D before a step, and A and D as the scans of its micro-batches saw them."""
    config = configs.from_dict(tree | {"device": "cpu"})
    trainer = Trainer(config, start(config))
    data, _ = open_dataset(config)
    weights = snapshot(trainer.model.model.layers["0"].mamba.dynamics.named_parameters())
    seen = []

    def watched(x, dt, a, d, *rest):
        assert x.dtype == torch.bfloat16
        seen.append((a.detach().flatten().clone(), d.detach().flatten().clone()))
        return scan(x, dt, a, d, *rest)

    with mock.patch("minitrain.models.mamba.scan", watched):
        trainer.step(data, 0)
    return weights, seen


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_dynamics_of_mamba_are_never_rounded(pool, world_size, precision):
    """Logarithms of 1, 2, 3, ... are nothing that bf16 can hold."""
    tree = TREE | {"model": "nemotron3-nano-30b-a3b-tiny", "precision": precision}
    for weights, seen in pool.run(world_size, dynamics_seen, tree):
        assert len(seen) == 8 // 2 // world_size
        assert not torch.equal(weights["A_log"], weights["A_log"].bfloat16().float())
        for a, d in seen:
            assert torch.equal(a, -weights["A_log"].exp()) and torch.equal(d, weights["D"])
