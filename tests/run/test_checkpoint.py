"""Checkpoints of one process: what is stored, what a kill leaves, what is refused."""

import io
import json
import os
import pickle
import shutil
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    TensorProperties,
    TensorStorageMetadata,
)

from minitrain.errors import InputError
from minitrain.run.checkpoint import checkpoint_state
from minitrain.run.checkpoint import checkpointer as checkpoint
from minitrain.run.checkpoint.checkpoint_files import measure, read_description, write_description
from minitrain.run.checkpoint.checkpoint_index import IndexUnpickler, read_index
from minitrain.run.checkpoint.checkpointer import Checkpointer, save_step
from tests.helpers.checkpoints import content, equal, load_newest, make, names, save_many, step
from tests.helpers.processes import LIMIT, Ranks

# ------------------------------------------------------------------------------------------------------ saving, loading


def test_steps_are_counted_where_fused_kernels_want_them_and_nothing_older_stays():
    model = nn.Linear(3, 3, bias=False, device="meta", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["momentum"] = torch.zeros(3, 3, device="meta")
    stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(), [])
    tensors = checkpoint_state.prepare_optimizer(optimizer, model, {"weight/step": stored})
    assert optimizer.state == {model.weight: {"step": tensors["weight/step"]}}
    assert (tensors["weight/step"].device.type, tensors["weight/step"].dtype) == (
        "meta",
        torch.float32,
    )


def store_trained_only(folder):
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep=2)
    checkpointer.save(1, model, optimizer, {})
    stored = read_index(folder / "step-00000001" / ".metadata").state_dict_metadata
    assert "0.weight" in stored and "count" in stored and "0.bias" not in stored
    other, other_optimizer = make(seed=1)
    other[0].bias.data[3] += 1
    before = content(other, other_optimizer)
    with pytest.raises(
        InputError, match="another base model, or the same stored in another precision"
    ):
        checkpointer.load(other, other_optimizer)
    assert equal(content(other, other_optimizer), before)


def test_frozen_weights_are_not_stored_but_must_be_the_same(pool, tmp_path):
    pool.run(1, store_trained_only, tmp_path)


def round_trip(folder, asynchronous, **options):
    model, optimizer = make(seed=1)
    for _ in range(2):
        step(model, optimizer)
    checkpointer = Checkpointer(folder, keep=2, asynchronous=asynchronous)
    assert checkpointer.latest() is None and checkpointer.load(*make()) is None
    saved = content(model, optimizer)
    extra = {"step": 2, "loss": 0.1 + 0.2, "list": [None, "a"]}
    checkpointer.save(2, model, optimizer, extra)
    step(model, optimizer)  # must not leak into the checkpoint
    checkpointer.wait()
    assert checkpointer.latest() == 2
    assert not equal(content(model, optimizer), saved)
    other = make()
    assert checkpointer.load(*other) == extra
    assert equal(content(*other), saved)
    step(*other)
    assert equal(content(*other), content(model, optimizer))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_round_trip(pool, tmp_path, asynchronous):
    pool.run(1, round_trip, tmp_path, asynchronous)


def save_while_training(folder):
    model, optimizer = make()
    step(model, optimizer)
    saved = content(model, optimizer)
    checkpointer, numbers = (
        Checkpointer(folder, keep=2, asynchronous=True),
        {"step": 1, "loss": 0.5},
    )
    write, disk = dcp.FileSystemWriter.write_data, threading.Semaphore(0)
    with mock.patch.object(
        dcp.FileSystemWriter, "write_data", lambda *args: disk.acquire() and write(*args)
    ):
        save_step(checkpointer, numbers, SimpleNamespace(model=model, optimizer=optimizer))
        numbers["validation_loss"] = 0.4
        dist.all_reduce(torch.ones(1))
        step(model, optimizer)
        assert checkpointer.latest() is None
        disk.release()
        checkpointer.save(2, model, optimizer, {"step": 2})  # after the first is complete
        assert checkpointer.latest() == 1
        disk.release()
        assert checkpointer.load(model, optimizer) == {"step": 2}
    shutil.rmtree(folder / "step-00000002")
    other = make(seed=1)
    # and not what training and validation have made of it meanwhile
    assert checkpointer.load(*other) == {"step": 1, "numbers": {"step": 1, "loss": 0.5}}
    assert equal(content(*other), saved)


def test_training_goes_on_while_a_thread_writes(pool, tmp_path):
    pool.run(1, save_while_training, tmp_path)


def test_the_newest_are_kept(pool, tmp_path):
    pool.run(1, save_many, tmp_path, [2, 4, 10, 100_000_000], 3)
    assert names(tmp_path) == ["step-00000004", "step-00000010", "step-100000000"]
    assert pool.run(1, load_newest, tmp_path)[0][0] == {"step": 100_000_000}


def note_what_reaches_the_disk(folder):
    """What is synced, by path, and `published`, in order."""
    events, fsync, replace = [], os.fsync, Path.replace

    def note_sync(number):
        events.append(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def note_replace(source, target):
        events.append("published")
        return replace(source, target)

    with (
        mock.patch.object(os, "fsync", note_sync),
        mock.patch.object(Path, "replace", note_replace),
    ):
        Checkpointer(folder, keep=2).save(1, *make(), {})
    return events


def test_a_checkpoint_gets_its_name_once_the_disk_has_all_of_it(pool, tmp_path):
    """Files, and then their names; and the checkpoint's own is on disk when `save` returns."""
    folder = tmp_path.resolve()
    (events,) = pool.run(1, note_what_reaches_the_disk, folder)
    published = events.index("published")
    temporary, files = folder / "step-00000001.tmp", os.listdir(folder / "step-00000001")
    assert {path.removesuffix(".tmp") for path in events[: published - 1]} == {
        str(temporary / name) for name in files
    }
    assert events[published - 1 :] == [str(temporary), "published", str(folder)]


def test_a_step_can_be_saved_again(pool, tmp_path):
    pool.run(1, save_many, tmp_path, [1], 2)
    first = pool.run(1, load_newest, tmp_path)[0][1]
    pool.run(1, save_many, tmp_path, [3, 1], 2)
    # nothing later than the saved step is removed
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    (tmp_path / "step-00000003").rename(tmp_path / "aside")
    assert not equal(pool.run(1, load_newest, tmp_path)[0][1], first)


def move_and_link(folder, place, number):
    """As someone does whose disk gets full."""
    shutil.move(folder / f"step-{number:08d}", place)
    (folder / f"step-{number:08d}").symlink_to(place)


def save_beside_links(folder, elsewhere):
    save_many(folder, [1, 2, 3], 3)
    for number in (1, 2, 3):
        move_and_link(folder, elsewhere / str(number), number)
    # as a run leaves it that is killed meanwhile
    (folder / "step-00000002").rename(folder / "step-00000002.tmp")
    assert load_newest(folder)[0] == {"step": 3}
    save_many(folder, [3, 4], 1)


def test_a_checkpoint_may_be_a_link_whose_target_stays(pool, tmp_path):
    for name in ("run", "elsewhere"):
        (tmp_path / name).mkdir()
    pool.run(1, save_beside_links, tmp_path / "run", tmp_path / "elsewhere")
    assert names(tmp_path / "run") == ["step-00000004"]
    assert [names(tmp_path / "elsewhere" / number) for number in "123"] == [
        [".metadata", "__0_0.distcp", "extra.json"]
    ] * 3


def test_other_names_and_files_are_no_checkpoints(pool, tmp_path):
    strays = ["step-0", "step-5", "step-\u0663", "step-0000000\u00b2", "step-000000005"]
    pool.run(1, save_many, tmp_path, [1, 2], 2)
    for name in strays:
        (tmp_path / name).mkdir()
    for name in (
        "step-00000002.old",
        "step-00000003.old",
        "step-00000003.tmp",
        "step-00000004.tmp",
    ):
        (tmp_path / name).write_text("a file")
    assert pool.run(1, load_newest, tmp_path)[0][0] == {"step": 2}
    pool.run(1, save_many, tmp_path, [3, 4], 1)
    assert names(tmp_path) == sorted([*strays, "step-00000004"])


# ------------------------------------------------------------------------------------------------------------- failures


def fail_to_write(folder, asynchronous):
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep=1, asynchronous=asynchronous)
    checkpointer.save(1, model, optimizer, {"step": 1})
    checkpointer.wait()
    full = OSError(28, "No space left on device")
    with (
        mock.patch("os.fsync", side_effect=full),
        pytest.raises(OSError, match="No space left on device"),
    ):
        checkpointer.save(2, model, optimizer, {})
        checkpointer.wait()
    assert checkpointer.load(model, optimizer) == {"step": 1}
    checkpointer.save(3, model, optimizer, {"step": 3})
    checkpointer.wait()
    assert checkpointer.load(model, optimizer) == {"step": 3}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_write_is_an_error_and_keeps_the_previous(pool, tmp_path, asynchronous):
    pool.run(1, fail_to_write, tmp_path, asynchronous)


KILLS = {  # where the second save stops: before a call, or after it
    "no tensor written": ("before", dcp.FileSystemWriter, "write_data"),
    "no index written": ("before", dcp.FileSystemWriter, "finish"),
    "no extra.json written": ("before", checkpoint, "write_description"),
    "all written": ("before", Path, "replace"),
    "first of several renamed": ("after", Path, "replace"),
    "older one still there": ("before", shutil, "rmtree"),
}


def save_and_die(folder, second, kill):
    """Save twice, on a rank of its own, and be killed at the second time."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = make()
    checkpointer = Checkpointer(folder, keep=1)
    step(model, optimizer)
    checkpointer.save(1, model, optimizer, {"save": "first"})
    step(model, optimizer)
    when, owner, name = KILLS[kill]
    function = getattr(owner, name)

    def killed(*args, **kwargs):
        when == "after" and function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(owner, name, killed):
        checkpointer.save(second, model, optimizer, {"save": "second"})


@pytest.mark.parametrize(
    ("second", "survivors"),
    [
        (2, ["first", "first", "first", "first", "second", "second"]),
        # the first one gives way to one of the same step
        (1, ["first", "first", "first", "first", "first", "second"]),
    ],
)
def test_a_kill_at_any_moment_of_a_save_leaves_a_checkpoint(pool, tmp_path, second, survivors):
    victims = [
        Ranks(1, tmp_path / "log", save_and_die, tmp_path / kill, second, kill) for kill in KILLS
    ]
    for victim in victims:
        assert victim.wait(LIMIT) and victim.codes() == [-signal.SIGKILL], victim.log.read_text()
    folders = [tmp_path / kill for kill in KILLS]
    assert [pool.run(1, load_newest, folder)[0][0]["save"] for folder in folders] == survivors
    assert all(
        name.removeprefix("step-").isdecimal() for folder in folders for name in names(folder)
    )


# ------------------------------------------------------------------------------------------------------------- refusals


@contextmanager
def refused(*parts):
    """InputError of one line with all of `parts` in it."""
    with pytest.raises(InputError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message


def load_misfits(folder):
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, *make(), {})
    cases = [
        (make(width=4), ("0.weight is [8, 8], and [4, 4] in the model",)),
        (make(layers=3), ("has no 2.weight", "[8, 8]")),
        (make(layers=1), ("has 1.weight [8, 8], which the model does not have",)),
        (
            make(optimizer=torch.optim.SGD),
            ("AdamW, not of SGD (use its run's optim.name, or another out_dir)",),
        ),
    ]
    for (model, optimizer), parts in cases:
        before = content(model, optimizer)
        with refused("step-00000001", *parts):
            checkpointer.load(model, optimizer)
        assert equal(content(model, optimizer), before)


def test_a_checkpoint_of_another_model_is_refused(pool, tmp_path):
    pool.run(1, load_misfits, tmp_path)


class Hostile:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def forge(path, file, value):
    """Write a file of a checkpoint, and a description that agrees with it."""
    (path / file).write_bytes(value)
    about = read_description(path)
    write_description(
        path, about | {"files": {name: measure(path / name) for name in about["files"]}}
    )


def hostile_indices(index, proof):
    """Bytes for `.metadata`, and a part of what is said about them."""
    yield pickle.dumps(Hostile(proof)), "pathlib"
    yield pickle.dumps({"state": [Hostile(proof)]}), "pathlib"
    yield pickle.dumps({}), "dict"
    yield b"", ".metadata"
    saved, stored = index.state_dict_metadata, index.storage_data
    # DCP would unpickle the tensor's bytes
    saved["0.weight"], right = (dcp.BytesStorageMetadata(), saved["0.weight"])
    yield pickle.dumps(index), "BytesStorageMetadata"
    saved["0.weight"] = right
    saved["0.weight/step"].size = torch.Size([1 << 60])
    yield pickle.dumps(index), f"0.weight/step is [{1 << 60}]"
    next(iter(stored.values())).relative_path = "../../secret"
    yield pickle.dumps(index), "'../../secret', which is no file of this checkpoint"


def load_hostile(folder, proof):
    model, optimizer = make()
    step(model, optimizer)
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(1, model, optimizer, {})
    path = folder / "step-00000001"
    original, data = (path / ".metadata").read_bytes(), next(path.glob("*.distcp"))
    for value, part in hostile_indices(dcp.FileSystemReader(path).read_metadata(), proof):
        forge(path, ".metadata", value)
        with refused("step-00000001", part):
            checkpointer.load(*make())
    forge(path, ".metadata", original)
    assert checkpointer.load(*make()) == {}
    forge(path, data.name, pickle.dumps(Hostile(proof)) + data.read_bytes()[100:])
    with refused("step-00000001 cannot be read"):
        checkpointer.load(*make())


def test_hostile_checkpoints_are_refused(pool, tmp_path):
    proof = tmp_path / "executed"
    pool.run(1, load_hostile, tmp_path / "run", proof)
    assert not proof.exists()
    pickle.loads(pickle.dumps(Hostile(proof)))
    assert proof.exists()  # so the pickle is one that could


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "system"),
        (b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93.", "system"),
        (b"cbuiltins\ngetattr\n(ctorch\nSize\nVmro\ntR.", "Size"),
        (b"cpathlib\nPurePath\n.", "PurePath"),
    ],
)
def test_the_index_names_no_functions(tmp_path, code, part):
    file = tmp_path / ".metadata"
    file.write_bytes(code)
    with refused(str(file), part):
        read_index(file)


def test_an_index_changes_no_paths(monkeypatch):
    monkeypatch.setattr(type(Path()), "parent", Path.parent)  # to be put back
    code = b"cpathlib\nPosixPath\n(N}Vparent\ncpathlib\nPosixPath\n(Vhome\ntRstb."
    IndexUnpickler(io.BytesIO(code)).load()
    assert Path("out/steps").parent == Path("out")


MEMORY_FORMAT = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (b"cpathlib\nPosixPath\n(Vsteps\ntR.", Path("steps")),
        (b"cpathlib._local\nPosixPath\n(Vsteps\ntR.", Path("steps")),
        (pickle.dumps(MEMORY_FORMAT), MEMORY_FORMAT),
        (
            b"cbuiltins\ngetattr\n(c%s\n_MEM_FORMAT_ENCODING\nV%s\ntR."
            % (_MEM_FORMAT_ENCODING.__module__.encode(), MEMORY_FORMAT.name.encode()),
            MEMORY_FORMAT,
        ),
    ],
)
def test_an_index_is_read_as_any_python_writes_it(code, value):
    assert IndexUnpickler(io.BytesIO(code)).load() == value


def test_nothing_but_the_index_is_a_pickle(pool, tmp_path):
    pool.run(1, save_many, tmp_path, [1], 1)
    path = tmp_path / "step-00000001"
    assert all(
        entry.size is not None
        for entry in read_index(path / ".metadata").state_dict_metadata.values()
    )
    about = json.loads((path / "extra.json").read_text())
    assert about["optimizer"] == "AdamW" and about["extra"] == {"step": 1}
