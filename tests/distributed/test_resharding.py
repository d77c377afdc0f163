"""Exact resume: the same run, bit for bit, as one that was never stopped; and the same values on other layouts."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from minitrain.errors import InputError
from minitrain.parallel.shards import cut_slices
from minitrain.run.checkpoint import checkpoint_folders, checkpoint_state
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loop import forward_backward
from tests.helpers.oracle import micro_batches, ragged_batch
from tests.helpers.resharding import TREE, assert_equal, full_state, load, make, train

HSDP = TREE | {"parallel": {"dp_replicate": 2}}


@pytest.mark.parametrize(
    ("world_size", "tree", "asynchronous"),
    [
        (1, TREE, False),
        (2, TREE, True),
        (4, HSDP, True),
        (2, TREE | {"precision": "bf16-pure"}, False),
    ],
)
def test_resumed_runs_equal_an_unbroken_one(pool, tmp_path, world_size, tree, asynchronous):
    unbroken, state = pool.run(world_size, train, tree, tmp_path / "unbroken", 6)[0]
    broken = []
    for until in (3, 5, 6):
        losses, resumed = pool.run(
            world_size, train, tree, tmp_path / "broken", until, asynchronous
        )[0]
        broken += losses.items()
    assert broken == list(unbroken.items()) and len(unbroken) == 6
    assert_equal(resumed, state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, TREE), (4, TREE)),
        ((4, TREE), (1, TREE)),
        ((1, TREE), (4, HSDP)),
        ((4, HSDP), (2, TREE)),
    ],
)
def test_a_checkpoint_loads_into_another_layout(pool, tmp_path, before, after):
    _, saved = pool.run(before[0], train, before[1], tmp_path, 2)[0]
    for loaded in pool.run(after[0], load, after[1], tmp_path):
        assert_equal(loaded, saved)
    unbroken, _ = pool.run(before[0], train, before[1], tmp_path / "unbroken", 4)[0]
    losses, _ = pool.run(after[0], train, after[1], tmp_path, 4)[0]
    for step in (2, 3):
        assert losses[step] == pytest.approx(unbroken[step], rel=1e-6)


def check_folder(folder, own_disks):
    """The error of a checkpointer, if any, that has `folder`, or a folder of this name on each rank's own disk."""
    start(configs.from_dict(TREE))
    seen = folder / str(dist.get_rank()) if own_disks else folder
    with mock.patch.object(checkpoint_folders, "FILE_PATIENCE", 0.3):
        try:
            Checkpointer(seen, keep=2)
        except InputError as error:
            return str(error)


def test_ranks_that_do_not_share_the_folder_are_refused(pool, tmp_path):
    assert pool.run(2, check_folder, tmp_path, False) == [None, None]
    first, second = pool.run(2, check_folder, tmp_path, True)
    assert (
        first == second
        and first.startswith(f"{tmp_path / '1'} on ")
        and "(use an out_dir that all nodes" in first
    )
    assert not list(tmp_path.rglob("step-*"))


def same_base(tree, folder):
    """Does the newest checkpoint say that it was trained beside this layout's frozen weights? And saves one."""
    _, _, model, optimizer = make(tree | {"lora": {"rank": 2}})
    checkpointer = Checkpointer(folder, keep=2)
    try:
        found = checkpointer.load(model, optimizer)
    except InputError as error:
        assert "was trained over another base model" in str(error)
        return False
    checkpointer.save(1, model, optimizer, {"step": 1})
    return found


def test_a_base_is_the_same_in_every_layout(pool, tmp_path):
    first, *others = {"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"dp_replicate": 2}
    assert pool.run(2, same_base, TREE | {"parallel": first}, tmp_path) == [None, None]
    for parallel in others:
        assert (
            pool.run(2, same_base, TREE | {"parallel": parallel}, tmp_path) == [{"step": 1}] * 2
        )
    assert pool.run(1, same_base, TREE, tmp_path) == [{"step": 1}]
    assert pool.run(2, same_base, TREE | {"seed": 1}, tmp_path) == [False, False]


def same_base_in_pieces(tree, folder):
    """Is the digest of small pieces that of whole tensors? And how many bytes the largest piece has."""
    sizes, original = [], checkpoint_state.bit_sum

    def bit_sum(tensor):
        sizes.append(tensor.nbytes)
        return original(tensor)

    with mock.patch.multiple(
        checkpoint_state, cut_slices=partial(cut_slices, most=1024), bit_sum=bit_sum
    ):
        same_base(tree, folder)
    return same_base(tree, folder), max(sizes)


def test_no_rank_gathers_a_frozen_weight_whole(pool, tmp_path):
    for found, most in pool.run(2, same_base_in_pieces, TREE, tmp_path):
        assert found == {"step": 1} and most <= 1024


def save_after_evaluation(tree, folder):
    """FSDP leaves some weights gathered after a forward pass without backward: the optimizer does not know those."""
    config, meshes, model, optimizer = make(tree)
    rows = micro_batches(ragged_batch(config, 0), config, meshes.batch)
    forward_backward(model, LanguageModeling(), rows, meshes, torch.device("cpu"))
    optimizer.step()
    expected = full_state(model, optimizer)
    with torch.no_grad():
        model(rows[0]["tokens"])
    gathered = sum(not isinstance(p, DTensor) for p in model.parameters())
    Checkpointer(folder, keep=1).save(1, model, optimizer, {})
    return expected, gathered


def test_a_save_after_evaluation_is_complete(pool, tmp_path):
    expected, gathered = pool.run(2, save_after_evaluation, TREE, tmp_path)[0]
    assert gathered
    assert_equal(pool.run(2, load, TREE, tmp_path)[0], expected)


def fail_on_the_last_rank(tree, folder):
    _, _, model, optimizer = make(tree)
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, model, optimizer, {"step": 1})
    last = dist.get_rank() == dist.get_world_size() - 1
    full = OSError(28, "No space left on device")
    disk = (
        mock.patch.object(dcp.FileSystemWriter, "write_data", side_effect=full)
        if last
        else nullcontext()
    )
    with disk, pytest.raises(OSError, match="No space left on device"):
        checkpointer.save(2, model, optimizer, {"step": 2})
    return checkpointer.load(model, optimizer)


def test_one_rank_that_cannot_write_stops_all(pool, tmp_path):
    assert pool.run(2, fail_on_the_last_rank, TREE, tmp_path) == [{"step": 1}] * 2


def load_misfit_on_one_rank(tree, folder):
    _, _, model, optimizer = make(tree)
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, model, optimizer, {})
    if dist.get_rank() == 1:  # as on a stage of a pipeline that has other layers
        model.register_buffer("only_here", torch.zeros(3))
    with pytest.raises(InputError, match=r"no only_here, which is \[3\] in the model"):
        checkpointer.load(model, optimizer)
    return True


def test_one_rank_that_cannot_load_stops_all(pool, tmp_path):
    assert pool.run(2, load_misfit_on_one_rank, TREE, tmp_path) == [True, True]
