"""checkpoint.best keeps the checkpoint of the best validation, and export makes a model of it."""

import json
from pathlib import Path

import pytest

from minitrain.__main__ import dispatch
from minitrain.errors import InputError
from minitrain.run.config.load import from_dict
from minitrain.run.tasks import rows_task, train_model

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 258},
    "batch": {"global": 4, "micro": 4, "seq_len": 32},
    "optim": {"name": "sgd", "lr": 0.5, "warmup": 0, "schedule": "constant", "clip": None},
    "validation": {"every": 1, "batches": 1},
    "checkpoint": {"every": 1, "keep": 1, "best": True},
    "device": "cpu",
}
# validation losses of steps 1, 2, ...
LOSSES = [3.0, 2.0, 1.0, 1.0, 1.5, 0.5, 4.0]


@pytest.fixture
def tree(tmp_path, monkeypatch) -> dict:
    """A config whose validations find LOSSES."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {n % 7} of a text\n" for n in range(400)))
    finish = rows_task.RowsTask.finish

    def found(task, numbers, stopping):
        done = finish(task, numbers, stopping)
        numbers["val_loss"] = LOSSES[numbers["step"] - 1]
        return done

    monkeypatch.setattr(rows_task.RowsTask, "finish", found)
    data = {"kind": "text", "path": "text.txt", "validation": 0.3}
    return TREE | {"data": data, "out_dir": "run"}


def kept(run: str = "run") -> list[int]:
    return sorted(int(path.name[5:]) for path in Path(run, "checkpoints").glob("step-*"))


def weights(folder: str) -> bytes:
    return Path(folder, "model.safetensors").read_bytes()


def test_the_best_checkpoint_stays_beside_the_newest(tree, capsys):
    """Of a run that resumes again and again, as of one without a break."""
    for steps in range(1, len(LOSSES) + 1):
        train_model.train(from_dict(tree | {"steps": steps}))
        best = 1 + min(range(steps), key=LOSSES.__getitem__)
        assert kept() == sorted({best, steps})
    for steps in (6, 7):
        train_model.train(from_dict(tree | {"steps": steps, "out_dir": f"whole-{steps}"}))
    assert kept("whole-7") == kept() == [6, 7]
    told = capsys.readouterr().out.rpartition("\nnext ")[2]
    assert told.split() == [
        "minitrain",
        "export",
        "--run",
        "whole-7",
        "--step",
        "best",
        "--out",
        "FOLDER",
    ]
    dispatch(["export", "--run", "run", "--step", "best", "--out", "best"])
    assert weights("best") == weights("whole-6") != weights("run")


def test_a_validation_without_a_checkpoint_gets_one(tree):
    """Validations at 2, 4, 6; the only other checkpoint is the last one's."""
    tree |= {"validation": {"every": 2, "batches": 1}, "checkpoint": {"best": True, "keep": 1}}
    train_model.train(from_dict(tree | {"steps": 7}))
    assert kept() == [6, 7]
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))


def test_without_it_the_newest_stay(tree):
    tree |= {"checkpoint": {"every": 1, "keep": 2}}
    train_model.train(from_dict(tree | {"steps": 5}))
    assert kept() == [4, 5]
    line = r"holds steps \[4, 5\], not 3 \(checkpoint.best=true keeps the best\)"
    with pytest.raises(InputError, match=line):
        dispatch(["export", "--run", "run", "--step", "best", "--out", "best"])
    with pytest.raises(InputError, match="must be above 0"):
        dispatch(["export", "--run", "run", "--step", "0", "--out", "best"])
    with pytest.raises(InputError, match="argument --step: invalid"):
        dispatch(["export", "--run", "run", "--step", "worst", "--out", "best"])


def test_what_is_best_needs_validations(tree):
    with pytest.raises(InputError, match="^checkpoint.best=true needs validation.every"):
        from_dict(tree | {"validation": {}})
