"""What a run leaves behind for humans: its numbers, its failures, what it waited for, what it was asked to record."""

import json
import math
import os
import re
import shutil
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor, Shard

from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.examples.shapes import write_png
from minitrain.grpo import policy_loop
from minitrain.parallel.agreement import broadcast, broadcast_flag, gather
from minitrain.parallel.pipeline_moves import Places
from minitrain.run.checkpoint import fingerprint
from minitrain.run.checkpoint.fingerprint import agreed_fingerprint, file_digest
from minitrain.run.config import load as configs
from minitrain.run.launch import start as launch
from minitrain.run.launch.failures import (
    pending_operation,
    record_flights,
    recorded,
    where_in_collective,
)
from minitrain.run.launch.same_run import code_digests, difference, flatten_settings
from minitrain.run.launch.start import set_timeout, start
from minitrain.run.monitor import profiling
from minitrain.run.monitor.metrics_file import to_line
from minitrain.run.monitor.profiling import recorded_steps
from minitrain.run.monitor.tensorboard import Board
from minitrain.run.tasks import exports, grpo_task, train_model
from minitrain.settings import Lora, Profile
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loop import Trainer, global_count
from minitrain.training.optim import clip_gradients
from tests.helpers.grpo import TREE as GRPO
from tests.helpers.poison import TINY, lines
from tests.helpers.processes import LIMIT, Ranks

# ---------------------------------------------------------------------------------------------------- ranks that differ


def what_differs(subject: str, folder) -> str:
    """The error of two ranks that have something different, on this rank."""
    rank, tree = dist.get_rank(), TINY
    if subject == "config":
        tree = TINY | {"optim": {"lr": 0.1 * (1 + rank)}}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError) as caught:
        if subject == "code":
            patch.setattr(
                launch,
                "code_digests",
                lambda: {"train.py": "same", "training/loop.py": f"digest {rank}"},
            )
        start(configs.from_dict(tree))
        file = folder / "here" / "a.txt"
        patch.setattr(fingerprint, "find_files", lambda data: [file])
        patch.setattr(
            fingerprint,
            "file_digest",
            lambda file: f"digest {rank}" if subject in str(file) else "same",
        )
        config = configs.from_dict(tree | {"data": {"kind": "text", "path": "here"}})
        config.model.path, config.lora = str(folder), Lora(path=str(folder / "lora"))
        agreed_fingerprint(config)
    return str(caught.value)


@pytest.mark.parametrize(
    "subject, expected",
    [
        ("config", "rank 1 differs from rank 0 in config: optim.lr: 0.2, not 0.1 "),
        ("code", "rank 1 differs from rank 0 in code: training/loop.py: digest 1, not digest 0 "),
        (
            "a.txt",
            "rank 1 differs from rank 0 in data: FOLDER/here/a.txt: digest 1, not digest 0 ",
        ),
        (
            "/model.safetensors",
            "rank 1 differs from rank 0 in model: FOLDER/model.safetensors: digest 1, not digest 0 ",
        ),
        (
            "adapter",
            "rank 1 differs from rank 0 in model: FOLDER/lora/adapter_model.safetensors: digest 1, not digest 0 ",
        ),
    ],
)
def test_ranks_that_differ_all_say_in_what(pool, tmp_path, subject, expected):
    (tmp_path / "model.safetensors").touch()
    assert (
        pool.run(2, what_differs, subject, tmp_path)
        == [expected.replace("FOLDER", str(tmp_path)) + "(all ranks must have the same)"] * 2
    )


def what_is_said():
    rank = dist.get_rank()
    return (
        broadcast_flag(rank == 0),
        broadcast_flag(rank == 1),
        broadcast(rank, source=1),
        gather(rank),
    )


def test_broadcasts_reach_all_ranks(pool):
    assert pool.run(2, what_is_said) == [(True, False, 1, [0, 1])] * 2


def test_names_of_compared_code_and_settings():
    assert {"torch", "train.py", "parallel/agreement.py"} <= code_digests().keys()
    assert flatten_settings({"a": {"b": {"c": 1}}, "d": 2}) == {"a.b.c": 1, "d": 2}


@pytest.mark.parametrize("size", [0, 10, 4096 * 16, 4096 * 16 + 1, 3_000_000])
def test_digests_see_size_ends_and_all_of_small_files(tmp_path, size):
    file = tmp_path / "file"
    content = bytearray(os.urandom(size))
    digests = set()
    places = (
        range(0, size, max(1, size // 50))
        if size <= 4096 * 16
        else [0, 4095, size - 4096, size - 1]
    )
    for i in [None, *places]:
        if i is not None:
            content[i] ^= 1
        file.write_bytes(content)
        digests.add(file_digest(file))
        if i is not None:
            content[i] ^= 1
    assert len(digests) == len(places) + 1
    file.write_bytes(content + b"\0")
    assert file_digest(file) not in digests
    file.write_bytes(bytes(size))
    zeros = file_digest(file)
    file.write_bytes(bytes(size + 1))
    assert file_digest(file) != zeros


def test_a_run_does_not_continue_on_data_that_has_changed(run, tmp_path, capsys, monkeypatch):
    run([], steps=2)
    text = tmp_path / "text.txt"
    before = text.read_text()
    text.write_text(before.replace("line 9 ", "line 8 "))
    what_ran = (tmp_path / "out/config.yaml").read_text()
    with pytest.raises(
        InputError, match=r"^\S+/text.txt has changed since the run began: it cannot continue"
    ):
        run([], steps=4)
    assert (tmp_path / "out/config.yaml").read_text() == what_ran
    text.write_text(before)
    monkeypatch.setattr(fingerprint, "code_digests", lambda: {"train.py": "another"})
    capsys.readouterr()
    assert len(lines(run([], steps=4))) == 4
    assert (
        "warning: the run continues with other code than before: __init__.py and"
        in capsys.readouterr().out
    )
    other = tmp_path / "other.txt"
    other.write_text(before)
    run([], steps=6, data={"kind": "text", "path": str(other)})  # on purpose
    told = capsys.readouterr().out
    assert (
        f'data.path="{other}" (was "{text}"), steps=6 (was 4)\n' in told
        and "other code" not in told
    )


def test_a_run_does_not_continue_on_held_out_data_that_has_changed(run, tmp_path, capsys):
    held, other = tmp_path / "held.txt", tmp_path / "other.txt"
    for file in (held, other):
        file.write_text("lines to validate on\n" * 100)
    data = {"kind": "text", "path": str(tmp_path / "text.txt"), "validation_path": str(held)}
    validation = {"every": 1, "batches": 1}
    run([], steps=1, data=data, validation=validation)
    held.write_text("other text for validation\n" * 100)
    with pytest.raises(InputError, match=r"^\S+/held.txt has changed since the run began"):
        run([], steps=2, data=data, validation=validation)
    # on purpose: no row that is trained on is another, but losses do not compare
    capsys.readouterr()
    run([], steps=2, data=data | {"validation_path": str(other)}, validation=validation)
    told = capsys.readouterr().out
    assert "warning: the run continues with other held-out data" in told
    assert "rows that were seen may come again" not in told


@pytest.mark.parametrize("share, warned", [(0.0, False), (0.1, True)])
def test_held_out_files_in_place_of_a_share_leave_other_rows_to_train_on(share, warned):
    before, now = (
        {
            "settings": {
                "data.kind": "text",
                "data.validation": share,
                "data.validation_path": path,
            }
        }
        for path in ("", "held.txt")
    )
    assert any("may come again" in note for note in fingerprint.other_settings(before, now)) == (
        warned
    )


def test_a_run_that_begins_anew_takes_whatever_data_there_is(run, tmp_path, capsys):
    """As after an end before the first checkpoint."""
    shutil.rmtree(run([], steps=2) / "checkpoints")
    (tmp_path / "text.txt").write_text("other lines of text\n" * 100)
    assert (
        len(lines(run([], steps=3, seed=1))) == 3 and "continues" not in capsys.readouterr().out
    )


def test_a_run_whose_folder_was_renamed_continues(run, tmp_path, capsys):
    run([], steps=2).rename(tmp_path / "renamed")
    run([], steps=2, out_dir=str(tmp_path / "renamed"))
    assert "continues" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "files, told",
    [
        ({"a": 1, "b": 2}, None),
        ({"a": 1}, "b is gone since the run began"),
        ({"a": 1, "b": 2, "c": 3}, "c is new since the run began"),
        ({"a": 1, "b": 0}, "b has changed since the run began"),
        ({"a": 1, "c": 2}, "b is gone since the run began (2 files differ)"),  # a new name
        ({"a": 0, "b": 0, "c": 0}, "a has changed since the run began (3 files differ)"),
    ],
)
def test_changed_data_is_named(files, told):
    before, now = ({"settings": {}, "files": each} for each in ({"a": 1, "b": 2}, files))
    message = fingerprint.data_change(before, now)
    assert message == told or message.startswith(f"{told}: it cannot continue")


@pytest.mark.parametrize("setting", ["data.kind", "data.path", "data.exclude", "data.tokenizer"])
def test_other_data_on_purpose(setting):
    before, now = ({"settings": {setting: name}, "files": {name: 1}} for name in ("a", "b"))
    assert fingerprint.data_change(before, now) is None


def test_nor_with_a_tokenizer_that_has(run, tmp_path):
    ByteTokenizer().save(tmp_path / "bytes")
    data = {
        "kind": "text",
        "path": str(tmp_path / "text.txt"),
        "tokenizer": str(tmp_path / "bytes"),
    }
    run([], steps=2, data=data)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = tmp_path / "bytes" / name
        text = file.read_text()
        file.write_text(text + "\n")
        with pytest.raises(
            InputError, match=rf"bytes/{name} has changed since the run began: it cannot continue"
        ):
            run([], steps=4, data=data)
        file.write_text(text)
    run([], steps=4, data=data | {"tokenizer": "bytes"})  # on purpose


def test_a_run_that_continues_says_with_which_other_settings(run, capsys):
    run([], steps=2)
    note, warning = (
        "note: the run continues with other settings than before: ",
        "warning: rows that were seen may come",
    )
    for change, other, rows_too in [
        ({}, "", False),
        ({"optim": {"lr": 0.1}}, "optim.lr=0.1 (was 0.0003)", False),
        ({"optim": {"lr": 0.1}}, "", False),
        ({"seed": 7}, "optim.lr=0.0003 (was 0.1), seed=7 (was 0)", True),
    ]:
        capsys.readouterr()
        run([], steps=2, **change)
        told = capsys.readouterr().out.splitlines()
        assert [line for line in told if line.startswith(note)] == (
            [note + other] if other else []
        )
        assert any(line.startswith(warning) for line in told) == rows_too


@pytest.mark.parametrize(
    "kind, change, chosen",
    [
        ("text", {"batch": {"micro": 2}}, False),
        # buckets are visited in groups of so many videos
        ("latents", {"batch": {"micro": 2}}, True),
        ("text", {"task": "grpo"}, True),
        ("text", {"data": {"validation": 0.5}}, True),
        ("mock", {"grpo": {"prompts": 4}}, True),
    ],
)
def test_settings_that_choose_rows(kind, change, chosen):
    tree = {
        "data.kind": kind,
        "batch.micro": 1,
        "task": "pretrain",
        "grpo.prompts": 2,
        "optim.lr": 1.0,
    }
    before, now = {"settings": tree}, {"settings": tree | flatten_settings(change)}
    note, *warning = fingerprint.other_settings(before, now)
    assert note.startswith("note") and bool(warning) == chosen


@pytest.mark.parametrize(
    "content",
    [None, "", '{"settings": 1, "files": [2], "code": 3}', "[1]", "{}", b"\xff", "[" * 9999],
)
def test_a_fingerprint_that_cannot_be_read_is_told(tmp_path, content):
    """Missing, cut off, edited by hand: the run goes on, with a warning that nothing was compared."""
    file = tmp_path / "fingerprint.json"
    config = configs.from_dict(TINY | {"out_dir": str(tmp_path)})
    files = {"files": {"a.txt": "1"}, "held_out": {}}
    assert fingerprint.check_continuation(file, config, files, resumed=False) == []
    assert fingerprint.check_continuation(file, config, files, resumed=True) == []
    whole = file.read_bytes()
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    [note] = fingerprint.check_continuation(file, config, files, resumed=True)
    how = "missing" if content is None else "damaged"
    assert note.startswith(
        f"warning: {file} is {how}: nobody knows whether data, settings and code"
    )
    # and what is there now is what the next one compares with
    assert file.read_bytes() == whole


def test_a_run_without_its_fingerprint_goes_on_with_a_warning(run, capsys):
    (run([], steps=2) / "fingerprint.json").unlink()
    capsys.readouterr()
    assert len(lines(run([], steps=3))) == 3
    assert "fingerprint.json is missing: nobody knows" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- failures


def wait_in_vain(folder):
    """Rank 1 never comes, and however slow it is, nothing before that waits for it for a second only."""
    config = configs.from_dict(TINY | {"timeout_s": 1.0})
    with recorded(folder):
        meshes = start(config)
        if dist.get_rank() == 1:
            time.sleep(1000)
        parameter = torch.nn.Parameter(
            DTensor.from_local(torch.ones(2), meshes.parameters["dp_shard"], [Shard(0)])
        )
        parameter.grad = parameter.detach()
        clip_gradients([parameter], 1.0)


def test_a_collective_that_waits_in_vain_is_one_line(tmp_path):
    """On gloo: NCCL's watchdog ends the process by itself, and leaves torch's flight record."""
    ranks = Ranks(2, tmp_path / "log", wait_in_vain, tmp_path)
    assert ranks.wait(LIMIT) and ranks.codes() == [2, 2]
    (line,) = filter(None, (tmp_path / "log").read_text().splitlines())
    begin, end = "error: rank 0 waited in vain for others in ", " (training/optim.py:"
    assert line.startswith(begin) and end in line
    assert line.removeprefix(begin).split(end)[0] == "all_reduce in total_norm"
    log = (tmp_path / "logs/rank-0.log").read_text()
    assert (
        "Traceback" in log
        and "clip_gradients" in log
        and not (tmp_path / "logs/rank-1.log").exists()
    )


def test_of_a_sum_over_ranks_the_caller_is_named():
    """A step's first collective, in which the others wait for a rank that hangs in its data."""
    meshes = SimpleNamespace(loss=SimpleNamespace(size=lambda: 2, get_group=lambda: None))
    with (
        patch("torch.distributed.all_reduce", side_effect=RuntimeError),
        pytest.raises(RuntimeError) as caught,
    ):
        global_count(LanguageModeling(), [], meshes, torch.device("cpu"))
    assert " in global_count (training/loop.py:" in where_in_collective(caught.value)


@pytest.mark.parametrize(
    "entries, operation",
    [
        # the oldest
        (
            [(True, "gloo:broadcast"), (False, "gloo:all_reduce"), (False, "gloo:barrier")],
            "all_reduce",
        ),
        ([(True, "gloo:broadcast"), (True, "gloo:all_gather")], "all_gather"),
        ([], "a collective"),
    ],
)
def test_the_operation_that_has_not_ended_is_named_or_the_last(entries, operation):
    record = json.dumps(
        {"entries": [{"retired": ended, "profiling_name": name} for ended, name in entries]}
    )
    with patch("torch._C._distributed_c10d._dump_fr_trace_json", lambda: record):
        assert pending_operation() == operation


def test_flight_records_keep_the_users_settings(tmp_path, monkeypatch):
    names = "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"
    for given, expected in (
        ([], ["1", f"{tmp_path}/logs/nccl-rank-"]),
        (["0", "here"], ["0", "here"]),
    ):
        monkeypatch.setattr(os, "environ", dict(zip(names, given, strict=False)))
        record_flights(tmp_path)
        assert [os.environ[name] for name in names] == expected and (tmp_path / "logs").is_dir()


begin_to_lose_patience = []  # what sets the groups' time-outs


def hang_on_rank_1(*_):
    while begin_to_lose_patience:
        begin_to_lose_patience.pop()()
    time.sleep(1000 if dist.get_rank() == 1 else 0)
    return 0.0


def train_with_a_reward_that_hangs(folder):
    """Time-outs count only from the first reward on: until then, ranks may have to wait for slow ones."""

    def later(seconds, groups=None):
        groups = list(c10d._world.pg_map) if groups is None else groups
        begin_to_lose_patience.append(lambda: set_timeout(seconds, groups))

    new_group = dist.new_group
    dist.new_group = lambda *args, timeout, **options: patient(
        new_group(*args, **options), timeout
    )

    def patient(group, timeout):
        if isinstance(group, dist.ProcessGroup):
            later(timeout.total_seconds(), [group])
        return group

    launch.set_timeout = grpo_task.set_timeout = later
    reward = GRPO["grpo"] | {"reward": "tests.faults.test_observability:hang_on_rank_1"}
    train_model.train(
        configs.from_dict(GRPO | {"grpo": reward, "timeout_s": 2.0, "out_dir": str(folder)})
    )


def test_ranks_wait_for_a_reward_that_hangs_until_timeout(tmp_path):
    ranks = Ranks(2, tmp_path / "log", train_with_a_reward_that_hangs, tmp_path / "out")
    assert ranks.wait(LIMIT) and ranks.codes() == [2, 2], ranks.log.read_text()
    expected = r"error: rank 0 waited in vain for others in all_gather in RolloutWorker.end \(grpo/rollouts.py:"
    assert len(re.findall(expected, ranks.log.read_text())) == 1


def begin_with_a_slow_trainer(seconds):
    """Loading weights takes longer than the sampler, on a rank of its own, has patience, and so does warming up."""
    trainer, warm_up = policy_loop.PolicyTrainer.__init__, policy_loop.PolicyTrainer.warm_up
    policy_loop.PolicyTrainer.__init__ = lambda *args: (
        time.sleep(1.5 * seconds),
        trainer(*args),
    )[1]
    policy_loop.PolicyTrainer.warm_up = lambda *args: (time.sleep(1.5 * seconds), warm_up(*args))[
        1
    ]
    apart = GRPO["grpo"] | {"lag": 1, "generation_ranks": 1}
    grpo_task.GrpoTask(
        configs.from_dict(GRPO | {"grpo": apart, "timeout_s": seconds}), folder=None
    ).begin()


def test_ranks_that_only_sample_are_patient_while_the_others_begin(tmp_path):
    ranks = Ranks(2, tmp_path / "log", begin_with_a_slow_trainer, 4.0)
    assert ranks.wait(LIMIT) and ranks.codes() == [0, 0], ranks.log.read_text()


def export_to_a_slow_disk(folder, pp):
    """The last rank's patience is a second, and the first takes two before it asks for a tensor, and after the first.
    Before a stage's first send the two ranks meet in the store, as NCCL's do."""
    config = configs.from_dict(TINY | {"parallel": {"pp": pp}})
    trainer = Trainer(config, start(config))
    save, move, store = exports.save_tensors, Places.move, c10d._get_default_store()

    def meet_and_move(places, tensor, like, source, target, *device):
        if source != target:
            store.set("met", "") if dist.get_rank() == 0 else store.get("met")
        return move(places, tensor, like, source, target, *device)

    def slowly(tensors):
        time.sleep(2)
        yield next(tensors)
        time.sleep(2)
        yield from tensors

    exports.save_tensors = lambda tensors, *args, **more: save(slowly(tensors), *args, **more)
    Places.move = meet_and_move
    set_timeout(1.0)
    store.set_timeout(timedelta(seconds=1))
    exports.export(trainer, config, folder)


@pytest.mark.parametrize("pp", [1, 2])
def test_ranks_wait_for_the_rank_that_writes_the_model(tmp_path, pp):
    ranks = Ranks(2, tmp_path / "log", export_to_a_slow_disk, tmp_path, pp)
    assert ranks.wait(LIMIT) and ranks.codes() == [0, 0], ranks.log.read_text()


def die_in_step_4(folder):
    update = Trainer.update
    Trainer.update = lambda trainer, batches, step: (
        os._exit(7) if step == 3 else update(trainer, batches, step)
    )
    train_model.train(configs.from_dict(TINY | {"out_dir": str(folder)}))


def test_numbers_survive_a_crash(tmp_path):
    ranks = Ranks(1, tmp_path / "log", die_in_step_4, tmp_path / "out")
    assert ranks.wait(LIMIT) and ranks.codes() == [7]
    assert [line["step"] for line in lines(tmp_path / "out")] == [1, 2, 3]


def fail_in_step_4(folder):
    """On the last rank."""
    update = Trainer.update

    def fail(trainer, batches, step):
        if step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            raise InputError("this was wrong")
        return update(trainer, batches, step)

    Trainer.update = fail
    sys.stderr.isatty = lambda: True  # there is no bar elsewhere
    train_model.train(configs.from_dict(TINY | {"out_dir": str(folder)}))


@pytest.mark.parametrize("world", [1, 2])
def test_an_error_has_a_line_of_its_own_below_the_progress_bar(tmp_path, world):
    """Whichever rank tells it; in one process the bar is not drawn again below."""
    ranks = Ranks(world, tmp_path / "log", fail_in_step_4, tmp_path / "out")
    assert ranks.wait(LIMIT) and ranks.codes() == [2] * world
    found = ranks.log.read_bytes().decode().split("\n")  # at no \r
    assert any("/6 |" in line for line in found) and found.count("error: this was wrong") == 1, (
        found
    )
    assert world == 2 or found[-2:] == ["error: this was wrong", ""]


@pytest.mark.parametrize(
    "tree", [TINY | {"steps": 4}, GRPO | {"steps": 2}], ids=["rows", "policy"]
)
def test_a_checkpoint_is_there_only_with_the_numbers_of_the_steps_before_it(
    tmp_path, monkeypatch, tree
):
    """After a power cut: what the disk has of metrics.jsonl when each checkpoint gets its name."""
    fsync, replace, synced, found = os.fsync, Path.replace, [0], []

    def note_sync(number):
        fsync(number)
        if os.readlink(f"/proc/self/fd/{number}").endswith("/metrics.jsonl"):
            synced.append(len(lines(tmp_path)))

    def note_replace(source, target):
        if target.parent.name == "checkpoints" and not target.suffix:
            found.append((int(target.name[5:]), synced[-1]))
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    train_model.train(
        configs.from_dict(tree | {"out_dir": str(tmp_path), "checkpoint": {"every": 2}})
    )
    assert found == [(step, step - 1) for step in range(2, tree["steps"] + 1, 2)]


@pytest.mark.parametrize(
    "change, kept, told",
    [
        (lambda text: text.replace(b"\n", b"\r\n\n", 1), [1, 2], ""),
        (
            lambda text: b"\xef\xbb\xbf" + text.replace(b'"lr"', b'"x": [NaN], "lr"', 1),
            [1, 2],
            "",
        ),
        (lambda text: text.replace(b'"skipped": 0, ', b"", 1), [1, 2], ""),
        (lambda text: b"a remark\n3\n{}\n" + text, [1, 2], "are gone: 3"),
        (lambda text: b'{"step": true}\n' + b"[" * 100_000 + b"\n" + text, [1, 2], "are gone: 2"),
        (lambda text: text.replace(b'"step": 1', b'"step": "one"'), [2], "are gone: 1"),
        (lambda text: b"caf\xe9\n" + text, [1, 2], "are gone: 1"),
        (lambda text: text[:-9], [1, 2], "are gone: 1"),  # the checkpoint knows the last one too
        (lambda text: b"", [2], ""),
    ],
    ids=["blank", "mark", "less", "others", "hostile", "step", "encoding", "cut", "empty"],
)
def test_numbers_edited_by_hand(run, capsys, change, kept, told):
    file = run([], steps=2) / "metrics.jsonl"
    before = lines(file.parent)
    file.write_bytes(change(file.read_bytes()))
    capsys.readouterr()
    with patch.object(sys.stderr, "isatty", lambda: True):  # else there is no bar
        after = lines(run([], steps=3))
    assert [line["step"] for line in after] == [*kept, 3] and after[len(kept) - 1] == before[1]
    shown = capsys.readouterr()
    assert told in shown.out and ("note: lines of" in shown.out) == bool(told)
    assert "3/3" in shown.err  # and no bar goes beyond its end


# ----------------------------------------------------------------------------------------------------------- on request


@pytest.mark.parametrize("steps", [[2, 3], [6, 6]])
def test_the_trace_has_the_steps_asked_for(run, steps):
    out = run([], profile={"steps": steps})
    events = json.loads((out / "profile/rank-0.json").read_text())["traceEvents"]
    assert (
        sum(event["name"].startswith("Optimizer.step") for event in events)
        == steps[1] - steps[0] + 1
    )
    assert [path.name for path in (out / "profile").iterdir()] == ["rank-0.json"]


def test_traces_of_ranks_that_are_no_more_go_with_the_next_recording(run):
    out = run([], profile={"steps": [2, 2]})
    for rank in (1, 2, 3):
        (out / f"profile/rank-{rank}.json").write_text("of a run on four ranks")
    run([], steps=9)
    assert len(list((out / "profile").iterdir())) == 4  # nothing is recorded
    run([], steps=10, profile={"steps": [10, 10]})
    assert [path.name for path in (out / "profile").iterdir()] == ["rank-0.json"]


def test_a_policy_is_recorded_and_watched_too(tmp_path):
    grpo = {"prompts": 2, "group": 4, "mock_digits": 1}
    tree = GRPO | {
        "grpo": grpo,
        "steps": 2,
        "out_dir": str(tmp_path),
        "profile": {"steps": [2, 2]},
    }
    train_model.train(configs.from_dict(tree))
    assert [line["skipped"] for line in lines(tmp_path)] == [0, 0]
    names = [
        event["name"]
        for event in json.loads((tmp_path / "profile/rank-0.json").read_text())["traceEvents"]
    ]
    assert any("attention" in name for name in names)


def test_memory_is_recorded_on_gpus_only(run):
    with pytest.raises(
        InputError, match="^profile.memory=true records the memory of a GPU, and this"
    ):
        run([], profile={"memory": True})


@pytest.mark.parametrize("steps", [[], [1, 1], [2, 3], [4, 4]], ids=str)
@pytest.mark.parametrize("done", range(5))
def test_profiled_steps_are_those_asked_for(tmp_path, monkeypatch, done, steps):
    """Operations of those asked for, memory until the last of them; also where the run continues after `done`."""
    recorded, found = [], []

    @contextmanager
    def recording(name, folder):
        recorded.append(name)
        yield
        recorded.remove(name)

    def numbers():
        for step in range(done + 1, 5):
            found.append((step, *recorded))
            yield {"step": step}

    for name in ("memory", "operations"):
        monkeypatch.setattr(profiling, f"recorded_{name}", partial(recording, name))
    list(recorded_steps(numbers(), Profile(steps=steps, memory=True), tmp_path, done))
    first, last = steps or (5, 5)
    assert recorded == [] and found == [
        (step, *["memory"] * (step <= last), *["operations"] * (first <= step <= last))
        for step in range(done + 1, 5)
    ]


def test_a_failure_leaves_what_was_recorded(tmp_path, monkeypatch):
    start(configs.from_dict(TINY))

    def steps():
        yield {"step": 1}
        raise torch.OutOfMemoryError("too little")

    calls = []
    monkeypatch.setattr(
        torch.cuda.memory,
        "_record_memory_history",
        lambda **settings: calls.append(list(settings)),
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    with pytest.raises(torch.OutOfMemoryError):
        list(recorded_steps(steps(), Profile(memory=True, steps=[1, 2]), tmp_path, done=0))
    assert (tmp_path / "profile/rank-0.json").exists()
    assert calls == [["max_entries"], str(tmp_path / "profile/memory-rank-0.pickle"), ["enabled"]]


@pytest.mark.gpu
def test_a_memory_snapshot(run, tmp_path, monkeypatch):
    """Also where addr2line is missing, as in slim images."""
    (tmp_path / "addr2line").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "addr2line").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    out = run([], device="cuda", profile={"memory": True, "steps": [2, 2]})
    assert (out / "profile/memory-rank-0.pickle").stat().st_size > 10_000


def test_tensorboard_gets_all_numbers_in_groups_and_config_and_pictures(run, monkeypatch):
    shown, told, texts, images = [], [], [], []

    class Writer:
        def __init__(self, folder, purge_step):
            told.append((folder, purge_step))
            self.add_scalar, self.close = (
                lambda *scalar: shown.append(scalar),
                lambda: told.append("closed"),
            )
            self.add_text = lambda *text: texts.append(text)
            self.add_image = lambda *image, dataformats: images.append((*image, dataformats))

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer)
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    out = run([2], metrics={"tensorboard": True})
    assert told == [(str(out / "tensorboard"), 1), "closed"] and not images
    groups = {
        "val": {"val_loss", "val_bits_per_byte"},
        "perf": {
            "step_time_s",
            "tokens_per_sec",
            "tokens_per_sec_per_gpu",
            "tflops_per_gpu",
            "mfu",
            "peak_memory_gib",
            "wall_time_s",
        },
        "train": {"loss", "grad_norm", "lr", "tokens", "step_tokens", "skipped"},
    }
    for line in lines(out):
        assert line.keys() - {"step", "batch"} <= set().union(*groups.values())
        for group, names in groups.items():
            for name in names & line.keys():  # those of step 2 are not finite
                place = f"{group}/{name.removeprefix('val_')}"
                assert (place, line[name], line["step"]) in shown or line[name] is None
    assert all(name.split("/")[0] in groups for name, *_ in shown)
    [(title, text, step)] = texts
    assert (title, step) == ("config", 0) and text.replace("    ", "") == (
        out / "config.yaml"
    ).read_text().replace("    ", "")
    with monkeypatch.context() as without_pillow:
        without_pillow.setitem(sys.modules, "PIL", None)
        Board(out, 5).close()  # a run without pictures needs none
    write_png(out / "after.png", np.full((2, 3, 3), 7, np.uint8))
    Board(out, 5).close()
    [(name, pixels, step, layout)] = images
    assert (name, step, layout, pixels.shape) == ("after", 5, "HWC", (2, 3, 3)) and (
        pixels == 7
    ).all()


noted = []


def note_numbers(numbers: dict) -> None:
    """A metrics.logger that fails at its third step."""
    noted.append(numbers)
    if len(noted) == 3:
        raise OSError("no network")


def test_a_logger_of_ones_own_gets_each_steps_numbers_and_ends_no_run(run, capsys):
    out = run([], metrics={"logger": "tests.faults.test_observability:note_numbers"})
    steps = [json.loads(json.dumps(numbers)) for numbers in noted]
    assert steps == lines(out)[:3] and len(lines(out)) == 6
    warned = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("warning: a logger failed")
    ]
    assert warned == [
        "warning: a logger failed at step 3, and is called no more: OSError('no network')"
    ]


@pytest.mark.parametrize(
    "name, problem",
    [
        ("print", "metrics.logger='print' is not package.module:function"),
        ("no.such:log", "metrics.logger='no.such:log' cannot be imported: "),
        ("tests.helpers.grpo:oddness", r"metrics.logger=.* must take \(numbers\): "),
        ("tests.faults.test_observability:noted", "metrics.logger=.* is a list, not a function"),
    ],
)
def test_a_wrong_logger_is_refused_before_the_data_is_opened(run, name, problem):
    with pytest.raises(InputError, match=f"^{problem}"):
        run([], metrics={"logger": name}, data={"kind": "text", "path": "/no/such/file"})


def test_numbers_that_json_has_not_are_null():
    numbers = {
        "step": 1,
        "loss": math.inf,
        "grad_norm": -math.inf,
        "val_loss": math.nan,
        "lr": 0.1,
    }
    assert json.loads(to_line(numbers)) == dict.fromkeys(numbers) | {"step": 1, "lr": 0.1}


@pytest.mark.parametrize(
    "tree, message",
    [
        (
            {"metrics": {"tensorboard": True}},
            "metrics.tensorboard=true needs the package tensorboard",
        ),
        ({"optim": {"max_skipped": 0}}, "optim.max_skipped=0 must be at least 1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be between 1 and 1,000,000"),
        ({"timeout_s": 1e30}, "timeout_s=1e.30 must be between 1 and 1,000,000"),
        ({"metrics": {"spike": -1.0}}, "metrics.spike=-1.0 must be at least 0"),
        (
            {"profile": {"steps": [2]}},
            r"profile.steps=\[2\] must be the first and last step to record, of 1 to steps=6",
        ),
        ({"profile": {"steps": [3, 2]}}, r"profile.steps=\[3, 2\] must be"),
        ({"profile": {"steps": [0, 2]}}, r"profile.steps=\[0, 2\] must be"),
        ({"profile": {"steps": [1, 7]}}, r"profile.steps=\[1, 7\] must be"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(tree, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"^{message}"):
        configs.from_dict(TINY | tree)


def test_ranks_that_differ_in_a_null():
    assert difference(1, {"a": 1}, {"a": 1, "b": None}).startswith(
        "rank 1 differs from rank 0 in b: None, not nothing"
    )
