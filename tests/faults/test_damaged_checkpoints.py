"""Damaged checkpoints are found, named and passed over; disks that take no more end the run and destroy nothing."""

import errno
import io
import os
import re
import resource
import shutil
import signal
import stat
import time
import zlib
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minitrain import load_pretrained, save_pretrained
from minitrain.errors import InputError
from minitrain.formats.peft import read_adapter_config, save_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.zoo import model_config
from minitrain.run.checkpoint import checkpoint_files
from minitrain.run.checkpoint.checkpoint_files import find_damage, measure, write_description
from minitrain.run.checkpoint.checkpoint_folders import make_empty, remove
from minitrain.run.checkpoint.checkpoint_index import Writer
from minitrain.run.checkpoint.checkpointer import Checkpointer, resume_point, saved_despite_errors
from minitrain.run.checkpoint.durable import write_durably
from minitrain.run.launch.lock import locked
from minitrain.settings import Lora
from tests.helpers.checkpoints import (
    content,
    equal,
    files_up_to,
    load_newest,
    make,
    names,
    save_many,
    step,
)

PART, INDEX, DESCRIPTION = "__0_0.distcp", ".metadata", "extra.json"


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut_in_half(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def become_a_file(folder):
    shutil.rmtree(folder)
    folder.write_bytes(b"")


DAMAGE = {  # of the newest checkpoint, and what is said of it
    "truncated": (truncate, PART, "__0_0.distcp has"),
    "bit-flipped": (flip_a_bit, PART, "__0_0.distcp has other content than when it was written"),
    "other rank's": (flip_a_bit, "__1_0.distcp", "__1_0.distcp has other content"),
    "missing": (Path.unlink, PART, "__0_0.distcp cannot be read: No such file"),
    "index missing": (Path.unlink, INDEX, ".metadata cannot be read: No such file"),
    "index bit-flipped": (flip_a_bit, INDEX, ".metadata has other content"),
    "half-written": (cut_in_half, DESCRIPTION, "extra.json is not the description"),
    "no folder": (become_a_file, "", "extra.json cannot be read: Not a directory"),
    "no description": (Path.unlink, DESCRIPTION, "extra.json cannot be read: No such file"),
    "bit-flipped description": (flip_a_bit, DESCRIPTION, "extra.json is not the description"),
}


def load(folder):
    """What a fresh start loads, and prints."""
    told = io.StringIO()
    model, optimizer = make(seed=1)
    with redirect_stderr(told):
        extra = Checkpointer(folder, keep=2).load(model, optimizer)
    return extra, content(model, optimizer), told.getvalue()


def damage_and_load(folder, kind):
    harm, name, part = DAMAGE[kind]
    expected = save_many(folder, [1], 2)
    save_many(folder, [2], 2)
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
    save_many(folder, [1, 2], 2)
    flip_a_bit(folder / "step-00000002" / PART)
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.load(model, optimizer) == {"step": 1}
    checkpointer.save(3, model, optimizer, {"step": 3})
    assert names(folder) == ["step-00000001", "step-00000002.damaged", "step-00000003"]
    checkpointer.save(2, model, optimizer, {"step": 2})
    # though two newer ones are there: one may be of what went wrong
    assert names(folder)[0] == "step-00000001"
    flip_a_bit(folder / "step-00000003" / PART)
    assert load(folder)[0] == {"step": 2}
    flip_a_bit(folder / "step-00000002" / PART)  # again, and one is aside already
    assert load(folder)[0] == {"step": 1}


def test_damaged_checkpoints_do_not_count_as_kept(pool, tmp_path):
    pool.run(1, go_on_after_damage, tmp_path)


def damage_all(folder):
    save_many(folder, [1, 2], 2)
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
    save_many(folder, [1, 2], 2)
    with pytest.raises(InputError, match="step-00000002 does not fit the model"):
        Checkpointer(folder, keep=2).load(*make(width=4))


def test_a_checkpoint_of_another_model_is_not_passed_over(pool, tmp_path):
    pool.run(1, misfit_is_no_damage, tmp_path)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def fail_to_read(folder, number, passes):
    """Reading a part of the newest checkpoint fails, either for now or for good."""
    save_many(folder, [1, 2], 2)

    def read(file):
        if file == folder / "step-00000002" / PART:
            raise OSError(number, os.strerror(number), str(file))
        return measure(file)

    with mock.patch.object(checkpoint_files, "measure", read):
        if passes:
            with pytest.raises(OSError, match=os.strerror(number)):
                load(folder)
        else:
            assert load(folder)[0] == {"step": 1}
    assert names(folder) == [
        "step-00000001",
        "step-00000002" if passes else "step-00000002.damaged",
    ]


@pytest.mark.parametrize(
    "number, passes",
    [
        (errno.EIO, False),
        (errno.ESTALE, True),
        (errno.ETIMEDOUT, True),
        (errno.EMFILE, True),
        (errno.EACCES, True),
    ],
)
def test_failures_to_read_that_pass_are_no_damage(pool, tmp_path, number, passes):
    pool.run(1, fail_to_read, tmp_path, number, passes)


# -------------------------------------------------------------------------------------------------------------- forgers


@contextmanager
def seconds(limit):
    """What takes longer fails the test."""

    def stop(*_):
        raise AssertionError(f"takes longer than {limit} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def describe(folder, files=None, **changes):
    """A folder with a description that agrees with itself, whatever it says."""
    (folder / INDEX).write_bytes(b"index")
    about = {
        "optimizer": "AdamW",
        "base": "",
        "extra": {},
        "files": {INDEX: measure(folder / INDEX)} | (files or {}),
    }
    write_description(folder, about | changes)


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"files": {"/dev/zero": [0, 1]}}, "'/dev/zero' is not the name of a file"),
        ({"files": {"../secret": [0, 0]}}, "'../secret' is not the name of a file"),
        ({"files": {"a\0": [0, 0]}}, "is not the name of a file"),
        ({"files": {"\ud800": [0, 0]}}, "is not the name of a file"),
        ({"files": {"..": [0, 0]}}, " is not a regular file"),
        ({"files": {"pipe": [0, 0]}}, "pipe is not a regular file"),
        ({"files": {"zeros": [0, 1]}}, "zeros is not a regular file"),
        ({"files": {"a": 5}}, "'a' has 5, which is not a size and a checksum"),
        ({"files": {"a": None}}, "'a' has None"),
        ({"files": {"a": [0, "0"]}}, "'a' has [0, '0']"),
        ({"files": {"a": [0]}}, "'a' has [0]"),
        ({"extra": [1]}, "extra and files must be objects"),
    ],
    ids=str,
)
def test_forged_descriptions_are_damage(tmp_path, changes, problem):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    describe(tmp_path)
    assert find_damage(tmp_path, 0, 1) is None
    describe(tmp_path, **changes)
    with seconds(60):
        assert problem in find_damage(tmp_path, 0, 1)


@pytest.mark.parametrize("files", [[], ["a"], {}, None])
def test_a_description_without_an_index_is_damage(tmp_path, files):
    describe(tmp_path)
    write_description(tmp_path, {"optimizer": "", "base": "", "extra": {}, "files": files})
    assert "files must have .metadata" in find_damage(tmp_path, 0, 1)


@pytest.mark.parametrize("lost", ["optimizer", "base", "extra", "files"])
def test_a_description_that_lacks_a_part_is_damage(tmp_path, lost):
    about = {"optimizer": "", "base": "", "extra": {}, "files": {}}
    del about[lost]
    write_description(tmp_path, about)
    assert lost in find_damage(tmp_path, 0, 1)


def test_all_of_a_file_is_summed_up(tmp_path, monkeypatch):
    """Which is read block by block."""
    monkeypatch.setattr(checkpoint_files, "BLOCK", 4)
    (tmp_path / "a").write_bytes(b"nine bytes")
    assert measure(tmp_path / "a") == (10, zlib.crc32(b"nine bytes"))


def test_folders_are_emptied_and_removed_whole(tmp_path):
    """One whose removal is interrupted has its final name no more."""
    folder = tmp_path / "step-00000001"
    (folder / "inside").mkdir(parents=True)
    with (
        mock.patch.object(shutil, "rmtree", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        remove(folder)
    assert names(tmp_path) == ["step-00000001.tmp"]
    make_empty(folder.with_suffix(".tmp"))
    assert not names(folder.with_suffix(".tmp"))


def save_and_start_while_files_are_read(folder):
    """On NFS: the kernel gives what somebody reads another name, and then its folder is not empty."""

    def fail(path, *args, **kwargs):
        if Path(path, DESCRIPTION).exists():
            os.replace(Path(path, DESCRIPTION), Path(path, ".nfs01"))
        raise OSError(errno.ENOTEMPTY, "Directory not empty", ".nfs01")

    with mock.patch.object(shutil, "rmtree", fail), redirect_stderr(io.StringIO()) as told:
        save_many(folder, [1, 2], 1)
        found = load_newest(folder)[0]  # a fresh start, which cleans first
    assert names(folder) == ["step-00000001.tmp", "step-00000002"]
    return found, told.getvalue()


def test_files_that_cannot_be_removed_end_no_run(pool, tmp_path):
    found, told = pool.run(1, save_and_start_while_files_are_read, tmp_path)[0]
    assert found == {"step": 2}
    why = "cannot be removed: [Errno 39] Directory not empty: '.nfs01'"
    paths = [tmp_path / "step-00000001", tmp_path / "step-00000001.tmp"]
    assert told.splitlines() == [f"warning: {path} {why}" for path in paths]
    assert pool.run(1, load_newest, tmp_path)[0][0] == {"step": 2} and names(tmp_path) == [
        "step-00000002"
    ]


@pytest.mark.parametrize(
    "put", [os.mkfifo, lambda file: file.write_text("[" * 200_000)], ids=["pipe", "nested"]
)
def test_a_description_that_never_ends_is_damage(tmp_path, put):
    put(tmp_path / DESCRIPTION)
    with seconds(60):
        assert DESCRIPTION in find_damage(tmp_path, 0, 1)


@pytest.mark.parametrize(
    "extra, problem",
    [
        ({"x": 1}, "holds the numbers of step None as step None"),
        ({"step": 2}, "holds the numbers of step None as step 2"),
        ({"step": 2, "numbers": [2]}, "holds the numbers of step None as step 2"),
        ({"step": 2, "numbers": {"step": 1}}, "holds the numbers of step 1 as step 2"),
        ({"step": -1, "numbers": {"step": -1}}, "as step -1"),
        (
            {"step": 2, "numbers": {"step": 2, "loss": "low"}},
            "holds loss='low', which is not a number",
        ),
        (
            {"step": 2, "numbers": {"step": 2, "loss": 1.0, "reward": 0.5}},
            r"^a checkpoint in \S+ is of task=grpo \(use",
        ),
        (
            {"step": 3, "numbers": {"step": 3, "loss": 1.0}},
            r"^steps=2, but the run in \S+ has done 3 \(use more, or",
        ),
    ],
)
def test_a_run_is_not_resumed_from_who_knows_where(tmp_path, extra, problem):
    assert resume_point(tmp_path, None, 2, "loss") == (0, {})
    numbers = {"step": 2, "loss": float("nan")}
    assert resume_point(tmp_path, {"step": 2, "numbers": numbers}, 2, "loss") == (2, numbers)
    with pytest.raises(InputError, match="is not of task=grpo"):
        resume_point(tmp_path, {"step": 2, "numbers": numbers}, 2, "loss", "reward")
    with pytest.raises(InputError, match=problem):
        resume_point(tmp_path, extra, 2, "loss")


# --------------------------------------------------------------------------------------------------------------- errors


def fail_while_saving(folder, disk_is_full):
    write = Writer.write_data

    def write_slowly(*args):
        time.sleep(0.2)
        if disk_is_full:
            raise OSError(errno.ENOSPC, "full")
        return write(*args)

    checkpointer = Checkpointer(folder, keep=1, asynchronous=True)
    slow, wrong = (
        mock.patch.object(Writer, "write_data", write_slowly),
        pytest.raises(InputError, match="was wrong"),
    )
    with slow, wrong, saved_despite_errors(checkpointer.wait):
        checkpointer.save(1, *make(), {})
        raise InputError("this was wrong")
    assert names(folder) == ([] if disk_is_full else ["step-00000001"])


@pytest.mark.parametrize("disk_is_full", [False, True])
def test_an_error_waits_for_the_checkpoint_that_is_being_written(pool, tmp_path, disk_is_full):
    pool.run(1, fail_while_saving, tmp_path, disk_is_full)


# ----------------------------------------------------------------------------------------------------------- full disks


def fill_disk(folder, asynchronous, size, width):
    """The last of two ranks may write `size` bytes into each file; a checkpoint takes some 9 kB, or of width 64 85."""
    expected = save_many(folder, [1], 1)
    model, optimizer = make(width)
    checkpointer = Checkpointer(folder, 1, asynchronous)
    if width == 8:
        checkpointer.load(model, optimizer)
        step(model, optimizer)
    limit = size if dist.get_rank() == 1 else resource.RLIM_INFINITY
    with (
        files_up_to(limit),
        pytest.raises(OSError, match=r"OSError\(27, 'File too large'\)") as caught,
    ):
        checkpointer.save(2, model, optimizer, {"step": 2})
        checkpointer.wait()
    assert "\n" not in str(caught.value) and "step-00000002" in str(caught.value)
    dist.barrier()
    assert names(folder) == ["step-00000001"]
    assert equal(load(folder)[1], expected)


@pytest.mark.parametrize(
    ("asynchronous", "size", "width"),
    [(False, 0, 8), (False, 6000, 8), (True, 3000, 8), (False, 10000, 64)],
)
def test_a_full_disk_ends_the_save_and_destroys_nothing(
    pool, tmp_path, asynchronous, size, width
):
    pool.run(2, fill_disk, tmp_path, asynchronous, size, width)


def test_models_and_adapters_need_a_disk_with_room(tmp_path):
    model = Decoder(model_config("llama3-8b-tiny", num_layers=1))
    save_pretrained(model, tmp_path / "model")
    lora = Lora(rank=4)
    add_adapters(model, lora)
    adapters = [(name, p.detach()) for name, p in model.named_parameters() if is_adapter(name)]
    for save in (
        lambda: save_pretrained(Decoder(model.config), tmp_path / "model"),
        lambda: save_adapter(adapters, model.config, lora, tmp_path / "adapter"),
    ):
        with (
            files_up_to(1000),
            pytest.raises(InputError, match="cannot be written: .*File too large"),
        ):
            save()
    assert torch.equal(load_pretrained(tmp_path / "model").lm_head.weight, model.lm_head.weight)


def test_an_adapter_folder_never_mixes_two_runs(tmp_path):
    """A run that ends between the renames of two files leaves no settings beside weights of other ones."""
    model = Decoder(model_config("llama3-8b-tiny"))
    add_adapters(model, Lora())
    adapters = [(name, p) for name, p in model.named_parameters() if is_adapter(name)]
    replace, killed = Path.replace, []

    def replace_or_die(old, new):
        if killed and new.suffix == ".json":
            raise KeyboardInterrupt
        replace(old, new)

    with mock.patch.object(Path, "replace", replace_or_die):
        save_adapter(adapters, model.config, Lora(alpha=32.0), tmp_path)
        killed.append(True)
        with pytest.raises(KeyboardInterrupt):
            save_adapter(adapters, model.config, Lora(alpha=64.0), tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    save_adapter(adapters, model.config, Lora(alpha=64.0), tmp_path)
    assert read_adapter_config(tmp_path).alpha == 64.0


def test_a_file_is_replaced_once_the_disk_has_the_new_one(tmp_path):
    """And its name is on disk too, before anything relies on it."""
    calls, fsync, replace = [], os.fsync, Path.replace
    file, open_files = tmp_path / "a.json", len(os.listdir("/proc/self/fd"))
    with (
        mock.patch.object(
            os, "fsync", lambda number: calls.append(os.fstat(number).st_size) or fsync(number)
        ),
        mock.patch.object(
            Path, "replace", lambda *names: calls.append("replace") or replace(*names)
        ),
    ):
        write_durably(file, "öld")
    assert calls == [len("öld".encode()), "replace", tmp_path.stat().st_size]
    with (
        files_up_to(1000),
        pytest.raises(OSError, match=rf"File too large: '{tmp_path}/a\.tmp'$"),
    ):
        write_durably(file, "new" * 1000)
    assert file.read_text(encoding="utf-8") == "öld"
    write_durably(file, "new")  # over what the failure has left
    assert file.read_text() == "new" and len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.ENOTSUP])
def test_folders_are_synced_where_the_disk_can_do_that(tmp_path, monkeypatch, answer):
    """The kernel's answer is EINVAL where a file system has no fsync for folders, as those of virtual machines; a file
    system in a process of its own (FUSE) may say ENOTSUP, as gocryptfs did."""
    fsync = os.fsync

    def sync_files_alone(number):
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(answer, os.strerror(answer))
        fsync(number)

    monkeypatch.setattr(os, "fsync", sync_files_alone)
    write_durably(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "new"
    answer = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        write_durably(tmp_path / "a", "newer")


def test_a_lock_needs_a_disk_with_room(tmp_path):
    name = re.escape(f"{tmp_path}/.lock")
    with files_up_to(0), pytest.raises(OSError, match=rf"File too large: '{name}'$"):
        locked(tmp_path, leads=True).__enter__()
    # what fails later has a name of its own, or none
    with pytest.raises(OSError, match="full$"), locked(tmp_path, leads=True):
        raise OSError(errno.ENOSPC, "full")
