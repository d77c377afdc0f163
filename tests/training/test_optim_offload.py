"""AdamW on the host: the weights and states of AdamW on the device, to the bit, and what is reckoned of it."""

from functools import partial
from unittest import mock

import pytest
import torch

from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models.zoo import empty_model
from minitrain.parallel.shards import to_local
from minitrain.run.checkpoint.checkpoint_state import prepare_optimizer
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.settings import Optim
from minitrain.simulator.dry_run import dry_run
from minitrain.training import adamw, footprint
from minitrain.training.loop import Trainer
from minitrain.training.optim import make_optimizer
from tests.helpers.layouts import TREE, combine


def times(scale, loss):
    return lambda *args: scale * loss(*args)


def trained(tree, folder, ways, then=()):
    """Two steps with each of `ways` of optim.offload, from the other's checkpoint; the second step is skipped.

    then: settings of the second way that differ. Returns losses, norms, weights, and states, and how many tensors
    went to the host.
    """
    torch.compiler.reset()
    checkpointer = Checkpointer(folder, keep=1)
    numbers = []
    moved = []
    copy = adamw.copy_to_host
    for number, offload in enumerate(ways):
        tree = tree | dict(then if number else ())
        optim = {"name": "adamw", "lr": 0.01, "clip": 0.5, "offload": offload}
        config = from_dict(tree | {"optim": optim | tree["optim"], "device": "cpu", "steps": 4})
        data, _ = open_dataset(config)
        trainer = Trainer(config, start(config))
        done = (checkpointer.load(trainer.model, trainer.optimizer) or {"step": 0})["step"]
        loss = trainer.objective.loss
        to_host = mock.patch.object(
            adamw, "copy_to_host", lambda x: moved.append(x.shape) or copy(x)
        )
        for step in (done, done + 1):
            scale = float("nan") if step == 1 else 1.0
            trainer.objective.loss = times(scale, loss)
            with to_host:
                numbers.append(trainer.step(data, step))
        checkpointer.save(done + 2, trainer.model, trainer.optimizer, {"step": done + 2})
    tensors = {}
    for name, parameter in trainer.model.named_parameters():
        tensors[name] = to_local(parameter.detach())
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = to_local(value)
    return numbers, tensors, len(moved)


@pytest.mark.parametrize(
    "tree",
    [
        combine("fsdp") | {"optim": {}},
        combine("tp") | {"precision": "bf16", "optim": {"states": "bf16"}},
        combine("hsdp") | {"precision": "bf16-pure", "optim": {"states": "bf16"}},
        combine("fsdp")
        | {"precision": "bf16-pure", "optim": {"stochastic_rounding": True, "ema": 0.9}},
        combine("pp") | {"lora": {"rank": 4}, "optim": {}},
        TREE | {"model": "qwen3-30b-a3b-tiny", "parallel": {"ep": 2}, "optim": {}},
        combine("fsdp") | {"optim": {"name": "muon", "ema": 0.9}},
    ],
    ids=str,
)
def test_weights_and_states_are_the_same_to_the_bit(pool, tmp_path, tree):
    """Clipped, with a step that is skipped, and through checkpoints from with to without and back."""
    compare(pool, tmp_path, tree, ((True, True), (True, False), (False, True)))


def test_a_run_goes_on_in_another_layout(pool, tmp_path):
    tree = combine("fsdp") | {"optim": {}}
    then = {"parallel": combine("tp")["parallel"]}
    compare(pool, tmp_path, tree, ((True, False), (False, True)), then)


def compare(pool, folder, tree, every, then=()):
    """Every two ways of optim.offload against a run without it."""
    plain = pool.run(2, trained, tree, folder / "plain", (False, False), then)
    for ways in every:
        found = pool.run(2, trained, tree, folder / str(ways), ways, then)
        for (numbers, tensors, moved), right in zip(found, plain, strict=True):
            assert moved and not right[2]
            for one, other in zip(numbers, right[0], strict=True):
                assert torch.equal(
                    one["grad_norm"].nan_to_num(-1), other["grad_norm"].nan_to_num(-1)
                )
            assert not numbers[1]["loss"].isfinite() and numbers[2]["loss"].isfinite()
            assert tensors.keys() == right[1].keys()
            assert all(torch.equal(tensors[name], right[1][name]) for name in tensors)


def test_states_are_on_the_host_wherever_the_weights_are():
    """On a device without memory, new ones and those of a checkpoint; averages are beside the weights."""
    model = torch.nn.Linear(3, 2, device="meta")
    optimizer = make_optimizer(model, Optim(offload=True))
    state = optimizer.new_state(model.weight, optimizer.param_groups[0])
    assert {x.device.type for x in state.values()} == {"cpu"}
    stored = partial(mock.Mock, properties=mock.Mock(dtype=torch.float32))
    saved = {"weight/exp_avg": stored(size=model.weight.shape), "weight/step": stored(size=())}
    saved["weight/ema"] = saved["weight/exp_avg"]
    places = {key: x.device.type for key, x in prepare_optimizer(optimizer, model, saved).items()}
    assert places == {"weight/exp_avg": "cpu", "weight/step": "cpu", "weight/ema": "meta"}


def test_the_next_numbers_travel_while_the_host_updates(monkeypatch):
    """One step with four lists of blocks: each is copied before the one before it is updated."""
    monkeypatch.setattr(adamw, "AT_ONCE", 8)
    model = torch.nn.ParameterDict({str(n): torch.randn(8) for n in range(4)})
    for parameter in model.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer = make_optimizer(model, Optim(offload=True))
    done = []
    copy, update = adamw.copy_blocks, optimizer.update
    monkeypatch.setattr(adamw, "copy_blocks", lambda blocks: done.append("copy") or copy(blocks))
    optimizer.update = lambda *args: done.append("update") or update(*args)
    optimizer.step()
    assert done == ["copy", "copy", "update", "copy", "update", "copy", "update", "update"]


def test_without_states_it_is_refused():
    with pytest.raises(
        InputError, match="optim.offload=true is for optim.name=adamw or muon, not sgd"
    ):
        from_dict({"optim": {"name": "sgd", "offload": True}})


def test_muon_keeps_the_momentum_of_matrices_on_the_device():
    """Of Llama 3 8B: 8 bytes for 1.05e9 numbers of embedding and head, and for norms; 4 for 6.98e9 in blocks."""
    said = dry_run(from_dict({"model": "llama3-8b", "optim": {"name": "muon", "offload": True}}))
    assert (
        "optimizer states 26.0) and activations; 7.8 GiB of optimizer states are on the host"
        in said
    )


def reckoned(room, device="cuda", ranks=1, **tree):
    """What `check_fits` says of a Llama 3 8B, if a device and its host have so many GiB free.

    ranks: of one host, each with all of the model.
    """
    small = {"global": 1, "micro": 1, "seq_len": 8}
    config = from_dict({"model": "llama3-8b", "batch": small} | tree)
    model = empty_model(config.model.config)
    if config.precision == "bf16-pure":
        model.to(torch.bfloat16)
    rooms = {kind: size << 30 for kind, size in room.items()}
    with (
        mock.patch.object(footprint, "free_memory", lambda place: rooms[place.type]),
        mock.patch.object(
            footprint,
            "host_memory",
            lambda size, _: footprint.HostMemory(ranks, ranks * size, rooms["cpu"]),
        ),
        mock.patch.object(footprint.dist, "get_world_size", lambda: ranks),
    ):
        footprint.check_fits(model, config, mock.Mock(device=torch.device(device)))


def test_what_fits_is_reckoned_on_the_device_and_on_the_host():
    """8.03e9 parameters: 16 bytes, of which 8 are states."""
    pure = {"precision": "bf16-pure", "optim": {"offload": True}}
    with pytest.raises(InputError, match=r"119.7 GiB .* \(use optim.offload=true \(59.8\), prec"):
        reckoned({"cuda": 80, "cpu": 500})
    reckoned({"cuda": 60, "cpu": 60}, optim={"offload": True})
    reckoned({"cuda": 30, "cpu": 60}, **pure)
    with pytest.raises(InputError, match="59.8 GiB .*optimizer states 0.0") as caught:
        reckoned({"cuda": 50, "cpu": 60}, optim={"offload": True})
    assert "offload" not in str(caught.value)
    with pytest.raises(InputError, match="1 x 59.8 GiB of optimizer states .* 59.0 are free"):
        reckoned({"cuda": 80, "cpu": 59}, **pure)
    with pytest.raises(InputError, match="8 x 59.8 GiB of optimizer states"):
        reckoned({"cuda": 80, "cpu": 400}, ranks=8, **pure)
    # a CPU is its own host
    with pytest.raises(InputError, match="119.7 GiB .*optimizer states 59.8"):
        reckoned({"cpu": 100}, "cpu", optim={"offload": True})
    with pytest.raises(
        InputError, match="119.7 GiB .* 60.0 are free on its CPU, which 2 ranks share"
    ):
        reckoned({"cpu": 120}, "cpu", ranks=2)


def test_activations_are_reckoned_from_below():
    """A block of Llama 3 8B puts out 6,144 + 4,096 + 28,672 + 4,096 numbers for a token; 32 blocks, 8,192 tokens."""
    pure = {"precision": "bf16-pure", "batch": {"global": 1, "micro": 1, "seq_len": 8192}}
    pure |= {"optim": {"offload": True}}
    of_outputs = 43_008 * 32 * 8192 * 2 / 2**30
    assert of_outputs == 21.0
    reckoned({"cuda": 51, "cpu": 60}, **pure)
    # 29.9 and 2.0 of inputs, or 1.3 of two blocks
    with pytest.raises(
        InputError,
        match=r"50.9 GiB \(weights 15.0, gradients 15.0, optimizer states 0.0, activations at least 21.0\) .* 40.0 "
        r".*\(use recompute=full \(31.9\), recompute=offload \(31.2\), recompute=full-offload \(30.0\), a smaller",
    ):
        reckoned({"cuda": 40, "cpu": 60}, **pure)
    reckoned({"cuda": 40, "cpu": 60}, recompute="full", **pure)
    reckoned({"cuda": 42, "cpu": 60}, recompute=2, **pure)
    with pytest.raises(InputError, match=r"activations at least 11.5\)"):
        reckoned({"cuda": 41, "cpu": 60}, recompute=2, **pure)
    # which go to the host
    reckoned({"cuda": 40, "cpu": 81}, recompute="offload", **pure)
    with pytest.raises(
        InputError,
        match="1 x 59.8 GiB of optimizer states and 1 x 21.0 GiB of activations at least",
    ):
        reckoned({"cuda": 40, "cpu": 80}, recompute="offload", **pure)


def test_a_dry_run_tells_what_is_on_the_host():
    """Of three blocks, their inputs: 8,192 x 4,096 numbers in bf16."""
    tree = {"model": {"name": "llama3-8b", "num_layers": 3}, "precision": "bf16"}
    tree |= {"recompute": "full-offload", "optim": {"offload": True}}
    tree["batch"] = {"global": 1, "micro": 1, "seq_len": 8192}
    said = dry_run(from_dict(tree))
    assert "12.7 GiB (weights 6.4, gradients 6.4, optimizer states 0.0) and " in said
    assert "of two blocks at a time; 0.2 GiB of those of all others are on the host; 12.7" in said
    # experts in fp32, which no trace has
    said = dry_run(from_dict({"model": "qwen3-30b-a3b-tiny", "recompute": "offload"}))
    assert "activations of two blocks; those of all others are on the host" in said
