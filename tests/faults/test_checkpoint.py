"""Damaged checkpoints are found, named and passed over; disks that take no more end the run and destroy nothing."""

import io
import os
import resource
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import pytest
import torch.distributed as dist

from minitrain.errors import InputError
from minitrain.training.checkpoint import Checkpointer
from tests.test_checkpoint import content, equal, make, names, step

PART, INDEX, DESCRIPTION = "__0_0.distcp", ".metadata", "extra.json"


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


DAMAGE = {  # of the newest checkpoint, and what is said of it
    "truncated": (truncate, PART, "__0_0.distcp has"),
    "bit-flipped": (flip_a_bit, PART, "__0_0.distcp has other content than when it was written"),
    "other rank's": (flip_a_bit, "__1_0.distcp", "__1_0.distcp has other content"),
    "missing": (Path.unlink, PART, "__0_0.distcp cannot be read: No such file"),
    "index missing": (Path.unlink, INDEX, ".metadata cannot be read: No such file"),
    "index bit-flipped": (flip_a_bit, INDEX, ".metadata has other content"),
    "half-written": (cut_in_half, DESCRIPTION, "extra.json is not the description"),
    "no description": (Path.unlink, DESCRIPTION, "extra.json is not the description"),
    "bit-flipped description": (flip_a_bit, DESCRIPTION, "extra.json is not the description"),
}


def save_steps(folder, keep, steps):
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep)
    for number in steps:
        step(model, optimizer)
        checkpointer.save(number, model, optimizer, {"step": number})
    return content(model, optimizer)


def load(folder):
    """What a fresh start loads, and prints."""
    told = io.StringIO()
    model, optimizer = make(seed=1)
    with redirect_stderr(told):
        extra = Checkpointer(folder, keep=2).load(model, optimizer)
    return extra, content(model, optimizer), told.getvalue()


def damage_and_load(folder, kind):
    harm, name, part = DAMAGE[kind]
    expected = save_steps(folder, 2, [1])
    save_steps(folder, 2, [2])
    if dist.get_rank() == 0:
        harm(folder / "step-00000002" / name)
    dist.barrier()
    extra, loaded, told = load(folder)
    assert extra == {"step": 1} and equal(loaded, expected)
    line = f"warning: checkpoint {folder}/step-00000002 is damaged: {part}"
    assert not told if dist.get_rank() else told.startswith(line) and told.count("\n") == 1, told


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(pool, tmp_path, kind):
    pool.run(2, damage_and_load, tmp_path, kind)


def go_on_after_damage(folder):
    save_steps(folder, 2, [1, 2])
    flip_a_bit(folder / "step-00000002" / PART)
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.load(model, optimizer) == {"step": 1}
    checkpointer.save(3, model, optimizer, {"step": 3})
    assert names(folder) == ["step-00000001", "step-00000002.damaged", "step-00000003"]
    checkpointer.save(2, model, optimizer, {"step": 2})
    flip_a_bit(folder / "step-00000003" / PART)
    assert load(folder)[0] == {"step": 2}  # and the first checkpoint had to stay, though two newer ones were there


def test_damaged_checkpoints_do_not_count_as_kept(pool, tmp_path):
    pool.run(1, go_on_after_damage, tmp_path)


def damage_all(folder):
    save_steps(folder, 2, [1, 2])
    truncate(folder / "step-00000001" / PART)
    (folder / "step-00000002" / INDEX).unlink()
    said = r"step-00000002: .metadata cannot be read.*step-00000001: __0_0.distcp has"
    for _ in range(2):  # a restart by itself must not begin anew either
        with pytest.raises(InputError, match=said):
            load(folder)


def test_without_a_whole_checkpoint_nothing_starts(pool, tmp_path):
    pool.run(1, damage_all, tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def misfit_is_no_damage(folder):
    save_steps(folder, 2, [1, 2])
    with pytest.raises(InputError, match="step-00000002 does not fit the model"):
        Checkpointer(folder, keep=2).load(*make(width=4))


def test_a_checkpoint_of_another_model_is_not_passed_over(pool, tmp_path):
    pool.run(1, misfit_is_no_damage, tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# ----------------------------------------------------------------------------------------------------------- full disks


@contextmanager
def files_up_to(size):
    """Writing more into one file fails, in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_disk(folder, asynchronous, size):
    """The last of two ranks may write `size` bytes into each file; a checkpoint takes some 9 kB."""
    expected = save_steps(folder, 1, [1])
    model, optimizer = make()
    checkpointer = Checkpointer(folder, 1, asynchronous)
    checkpointer.load(model, optimizer)
    step(model, optimizer)
    limit = size if dist.get_rank() == 1 else resource.RLIM_INFINITY
    with files_up_to(limit), pytest.raises(OSError, match="File too large") as caught:
        checkpointer.save(2, model, optimizer, {"step": 2})
        checkpointer.wait()
    assert "\n" not in str(caught.value) and "step-00000002" in str(caught.value)
    dist.barrier()
    assert names(folder) == ["step-00000001"]
    assert equal(load(folder)[1], expected)


@pytest.mark.parametrize(("asynchronous", "size"), [(False, 0), (False, 6000), (True, 3000)])
def test_a_full_disk_ends_the_save_and_destroys_nothing(pool, tmp_path, asynchronous, size):
    pool.run(2, fill_disk, tmp_path, asynchronous, size)
