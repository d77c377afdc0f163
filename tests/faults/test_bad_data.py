"""Bad data: an error that names file and line before training, or with data.on_error=skip left out and counted.

Left out means that the rows are those of the same files without what is bad.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minitrain.data.chat.problems import open_problems
from minitrain.data.datasets import open_dataset
from minitrain.data.text.token_files import OPEN, TokenFile, kept_open, open_tokens
from minitrain.data.video.latents import read_video, save_video
from minitrain.errors import InputError
from minitrain.run.config.load import from_dict
from minitrain.training.packing import rows

GOOD = {
    "pretrain": [
        {"text": "a document"},
        {"text": "another document"},
        {"text": "a third one, which is longer"},
    ],
    "sft": [{"prompt": f"question {n}", "response": f"answer {n}"} for n in range(3)],
    "grpo": [{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(3)],
}


def config_of(task: str, folder, on_error: str = "error", **data):
    model = {"name": "wan2.1-14b-tiny" if task == "diffusion" else "llama3-8b-tiny"}
    kind = {
        "kind": "latents" if task == "diffusion" else "jsonl",
        "path": str(folder),
        "on_error": on_error,
    }
    if task != "diffusion":
        model["vocab_size"] = 258
    return from_dict(
        {
            "model": model,
            "task": task,
            "data": kind | data,
            "batch": {"global": 4, "micro": 2, "seq_len": 16},
        }
    )


def contents(config) -> list:
    """All that the config's data holds, whatever the order."""
    if config.task == "grpo":
        return sorted(open_problems(config)[0].problems)
    data, _ = open_dataset(config)
    return sorted(
        str({key: value.tolist() for key, value in data.row(n).items()}) for n in range(len(data))
    )


def about(config) -> str:
    return (open_problems(config) if config.task == "grpo" else open_dataset(config))[0].about


def check(config, clean, message: str, count: int = 1):
    """config: with bad data, which is to be refused with `message`; clean: the same data without it."""
    with pytest.raises(InputError, match=message) as caught:
        contents(config)
    assert str(caught.value).isprintable()
    config.data.on_error = "skip"
    assert contents(config) == contents(clean)
    assert f"{count} skipped, the first: " in about(config) and "skipped" not in about(clean)


BAD_LINES = [
    ("pretrain", b'{"text": ', "not valid JSON"),
    ("pretrain", b'{"text": "\xff"}', "not valid JSON: 'utf-8' codec"),
    ("pretrain", b'{"text": "x", "score": NaN}', "not valid JSON: NaN is not JSON"),
    (
        "pretrain",
        b'{"text": "x", "a": {"b": 1, "b": 2}}',
        "not valid JSON: key 'b' is given twice",
    ),
    ("pretrain", b"7" * 5000, "not valid JSON: Exceeds the limit"),
    ("pretrain", b'["text"]', "must be a JSON object"),
    ("pretrain", b'{"body": "x"}', "no key 'text'"),
    ("pretrain", b'{"text": null}', "'text' must be text, not NoneType"),
    (
        "sft",
        b'{"messages": [{"role": "critic", "content": "x"}]}',
        r"'messages'\[0\]: the role 'critic' is not",
    ),
    (
        "sft",
        b'{"messages": [{"role": "tool", "content": "x"}]}',
        "'messages' has no message of the assistant",
    ),
    (
        "sft",
        b'{"messages": [{"role": "user", "content": "x"}]}',
        "'messages' has no message of the assistant",
    ),
    (
        "sft",
        b'{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]}',
        "is empty",
    ),
    ("sft", b'{"messages": []}', "'messages' has no message of the assistant"),
    ("sft", b'{"messages": {"role": "user"}}', "'messages' must be a list of objects"),
    ("sft", b'{"prompt": "x", "response": " "}', "'response' is empty"),
    ("sft", b'{"prompt": "x", "response": ["y"]}', "'response' must be text, not list"),
    (
        "sft",
        b'{"context": "x", "question": "y", "answers": {"text": []}}',
        "'answers' must hold a text",
    ),
    ("grpo", b'{"question": "1 + 1"}', r"no answer \(one of expected_answer, "),
    ("grpo", b'{"question": "1 + 1", "answer": ""}', "'answer' is empty"),
    ("grpo", b'{"question": "", "answer": "2"}', "'question' is empty"),
    ("grpo", b'{"prompt": [], "answer": "2"}', "'prompt' is empty"),
    (
        "grpo",
        b'{"messages": [], "answer": "2"}',
        "'messages' must end with the assistant's answer",
    ),
    (
        "grpo",
        b'{"question": "a prompt that is longer than a row", "answer": "2"}',
        "no room for a response",
    ),
]


@pytest.mark.parametrize(
    "task, line, message", BAD_LINES, ids=[f"{task}-{text}"[:40] for task, _, text in BAD_LINES]
)
def test_bad_lines(tmp_path, task, line, message):
    first, *rest = [json.dumps(record).encode() for record in GOOD[task]]
    for name, lines in (("clean", [first, *rest]), ("bad", [first, b"", line, *rest, line])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    check(
        config_of(task, tmp_path / "bad"),
        config_of(task, tmp_path / "clean"),
        f"a.jsonl:3.*{message}",
        count=2,
    )


@pytest.mark.parametrize("task", GOOD)
def test_empty_files(tmp_path, task):
    """Of JSONL: a download that failed. Nothing to train on is an error however lenient the settings are."""
    (tmp_path / "b.jsonl").write_text(" \n\n")
    for on_error in ("error", "skip"):
        with pytest.raises(InputError, match=r"b\.jsonl is empty"):
            contents(config_of(task, tmp_path, on_error))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, GOOD[task])))
    check(config_of(task, tmp_path), config_of(task, tmp_path / "a.jsonl"), r"b\.jsonl is empty")
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "gone")
    for on_error in ("error", "skip"):
        with pytest.raises(InputError, match=r"c\.jsonl cannot be read: No such file"):
            contents(config_of(task, tmp_path, on_error, exclude=["*b.jsonl"]))


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, mark in (("clean", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(mark + b"a document that is long enough")
        (tmp_path / name / "a.jsonl").write_bytes(mark + json.dumps(GOOD["pretrain"][2]).encode())
    for kind, name in (("text", "a.txt"), ("jsonl", "a.jsonl")):
        clean, marked = (
            config_of("pretrain", tmp_path / side / name, kind=kind)
            for side in ("clean", "marked")
        )
        assert contents(marked) == contents(clean)


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_text("a document that is long enough")
    (tmp_path / "b.txt").write_bytes(b"abc\xff")
    (tmp_path / "empty.txt").write_text("")  # which is no fault
    clean = config_of("pretrain", tmp_path, kind="text", exclude=["*b.txt"])
    check(config_of("pretrain", tmp_path, kind="text"), clean, r"b\.txt is not UTF-8 at byte 3")


# --------------------------------------------------------------------------------------------------------- token files


@pytest.mark.parametrize(
    "name, array, message",
    [
        ("b.bin", np.zeros(33, np.uint8), "does not hold tokens"),
        ("b.bin", np.zeros(0, np.uint8), "does not hold tokens"),
        ("b.npy", np.zeros(32, np.float32), "must hold integers"),
        ("b.npy", np.array([None] * 32), "does not hold tokens"),
        ("b.npy", np.full(16, 258), "holds 258 at token 0, outside the vocabulary"),
    ],
    ids=str,
)
def test_token_files_that_are_none(tmp_path, name, array, message):
    np.save(tmp_path / "a.npy", np.arange(64))
    array.tofile(tmp_path / name) if name.endswith("bin") else np.save(tmp_path / name, array)
    clean = config_of("pretrain", tmp_path / "a.npy", kind="tokens")
    check(config_of("pretrain", tmp_path, kind="tokens"), clean, rf"{name} .*{message}")


def test_damaged_headers(tmp_path):
    """Wherever a bit of one has flipped, the file gives tokens, or is refused like other bad data."""
    np.save(tmp_path / "good.npy", np.arange(4000, dtype=np.uint16) % 250)
    whole, bad = (tmp_path / "good.npy").read_bytes(), tmp_path / "bad.npy"
    refused = 0
    for place in range(128):
        for mask in (1, 4, 32, 64):
            bad.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
            try:
                assert len(open_tokens(bad, "uint16", 258)) <= 4000
            except InputError as error:
                assert str(error).startswith(f"{bad} ") and str(error).isprintable()
                refused += 1
    assert refused > 400
    bad.write_bytes(whole.replace(b"(4000,)", b"(True,)"))
    clean = config_of("pretrain", tmp_path / "good.npy", kind="tokens")
    check(
        config_of("pretrain", tmp_path, kind="tokens"),
        clean,
        r"bad\.npy does not hold tokens as \.npy",
    )


def test_rows_with_tokens_outside_the_vocabulary(tmp_path):
    tokens = np.arange(5 * 16 + 1) % 258
    tokens[37] = 70_000
    np.save(tmp_path / "a.npy", tokens)
    with pytest.raises(
        InputError, match=r"a\.npy holds 70000 at token 37, outside the vocabulary"
    ):
        open_dataset(config_of("pretrain", tmp_path, kind="tokens"))
    data, _ = open_dataset(config_of("pretrain", tmp_path, "skip", kind="tokens"))
    assert data.about.startswith("1 skipped, the first: ")
    for epoch in range(2):
        found = sorted(
            row[0] for row in rows(data, range(4 * epoch, 4 * epoch + 4))["tokens"].tolist()
        )
        assert found == [0, 16, 48, 64]  # the third row is not there


@pytest.mark.parametrize(
    "change",
    [
        lambda file: os.truncate(file, 64),  # a memory map would now be a bus error
        lambda file: os.truncate(file, 0),
        lambda file: file.write_bytes(bytes(2000)),
        lambda file: os.utime(file, ns=(0, 0)),
    ],
)
def test_token_files_that_change(tmp_path, change):
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(1000))
    data, _ = open_dataset(config_of("pretrain", file, kind="tokens"))
    assert data.row(3)["tokens"].sum() == 0
    change(file)
    with pytest.raises(InputError, match=r"a\.bin has changed since the run began"):
        data.row(3)


def test_token_files_that_are_replaced(tmp_path):
    """A run goes on with the bytes that it began with, and the next one takes the new ones."""
    file, config = tmp_path / "a.bin", config_of("pretrain", tmp_path / "a.bin", kind="tokens")
    for value in (1, 2):
        np.full(500, value, "<u2").tofile(tmp_path / "new")
        os.replace(tmp_path / "new", file)
        data, _ = open_dataset(config)
        data.row(3)
        file.unlink()
        assert data.row(4)["tokens"].tolist() == [value] * 16
    kept_open.cache_clear()
    with pytest.raises(InputError, match=r"a\.bin cannot be read: No such file"):
        data.row(3)


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="counts open files in Linux's /proc"
)
def test_many_token_files_are_not_all_open(tmp_path):
    for n in range(OPEN + 20):
        np.full(16, n % 258, "<u2").tofile(tmp_path / f"{n:03d}.bin")
    kept_open.cache_clear()
    before = len(os.listdir("/proc/self/fd"))
    data, _ = open_dataset(config_of("pretrain", tmp_path, kind="tokens"))
    assert sorted(data.row(n)["tokens"][0] for n in range(len(data))) == sorted(
        n % 258 for n in range(len(data))
    )
    assert before < len(os.listdir("/proc/self/fd")) <= before + OPEN


def test_rows_are_looked_at_evenly_over_all_files(tmp_path, monkeypatch):
    """Before training, of 20 files with 3 rows each: no more tokens than the limit."""
    for n in range(20):
        np.zeros(48, "<u2").tofile(tmp_path / f"{n:02d}.bin")
    looked, read = [], TokenFile.__getitem__
    monkeypatch.setattr("minitrain.data.text.text_rows.CHECKED", 160)

    def look(shard, part):
        looked.append((int(shard.file.stem), part.start))
        return read(shard, part)

    monkeypatch.setattr(TokenFile, "__getitem__", look)
    open_dataset(config_of("pretrain", tmp_path, kind="tokens"))
    assert (
        looked == [(row // 3, row % 3 * 16) for row in range(0, 60, 7)]
        and len(looked) * 16 <= 160
    )


# -------------------------------------------------------------------------------------------------------------- videos


def video(number: int = 0, **changes) -> dict:
    torch.manual_seed(number)
    return {"latents": torch.randn(16, 1, 4, 4), "text": torch.randn(2, 64)} | changes


@pytest.mark.parametrize(
    "changes, message, header",
    [
        (
            {"latents": torch.full((16, 1, 4, 4), torch.nan)},
            "tensor latents holds values that are not finite",
            False,
        ),
        (
            {"text": torch.full((2, 64), torch.inf)},
            "tensor text holds values that are not finite",
            False,
        ),
        (
            {"latents": torch.zeros(16, 1, 4, 4, dtype=torch.int64)},
            "tensor latents is stored as I64",
            True,
        ),
        ({"latents": torch.zeros(16, 4, 4)}, r"tensor latents has shape \[16, 4, 4\]", True),
        ({"text": torch.zeros(999, 64)}, "text has 999 tokens, more than", True),
        ({"text": None}, "tensor text is missing", True),
        (
            {"latents": torch.zeros(16, 1, 8, 12)},
            r"24 patches are more than batch\.seq_len=16",
            True,
        ),
        (
            {"latents": torch.zeros(16, 1, 3, 3)},
            r"latents \[1, 3, 3\] do not divide into patches",
            True,
        ),
        (
            {"latents": torch.zeros(17, 1, 4, 4)},
            r"latents is \[17, 1, 4, 4\], the model takes \[16, 1, 4, 4\]",
            True,
        ),
        ({"latents": torch.zeros(16, 0, 4, 4)}, "expected 4 dimensions, none of them 0", True),
        (
            {"text": torch.zeros(2, 63)},
            r"text is \[2, 63\], the model takes \[tokens, 64\]",
            True,
        ),
        ({"image": torch.zeros(2, 3)}, r"image is \[2, 3\], the model takes none", True),
        (None, "cannot be read as safetensors", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_videos(tmp_path, changes, message, header):
    for folder in ("clean", "bad"):
        (tmp_path / folder).mkdir()
        for n in range(3):
            save_video(tmp_path / folder / f"{n}.safetensors", **video(n))
    bad = tmp_path / "bad" / "9.safetensors"
    save_file({name: x for name, x in video(**changes or {}).items() if x is not None}, bad)
    if changes is None:
        os.truncate(bad, bad.stat().st_size - 1)
    clean = config_of("diffusion", tmp_path / "clean")
    if header:
        return check(
            config_of("diffusion", tmp_path / "bad"), clean, rf"9\.safetensors.* {message}"
        )
    data, _ = open_dataset(config_of("diffusion", tmp_path / "bad"))
    with pytest.raises(InputError, match=rf"9\.safetensors: {message}"):
        rows(data, range(len(data)))
    data, _ = open_dataset(config_of("diffusion", tmp_path / "bad", "skip"))
    assert len(data) == len(open_dataset(clean)[0]) and data.about.startswith("1 skipped")
    assert rows(data, range(len(data)))["latents"].isfinite().all()


def test_videos_are_read_once_to_know_which_to_skip(tmp_path, monkeypatch):
    """And not for each side of the data: a cache may hold terabytes."""
    for n in range(3):
        save_video(tmp_path / f"{n}.safetensors", **video(n))
    seen = []
    monkeypatch.setattr(
        "minitrain.data.video.latents.read_video",
        lambda path: seen.append(path) or read_video(path),
    )
    open_dataset(config_of("diffusion", tmp_path, "skip"))
    assert sorted(path.stem for path in seen) == ["0", "1", "2"]


def test_videos_that_change(tmp_path):
    file = tmp_path / "a.safetensors"
    save_video(file, **video())
    data, _ = open_dataset(config_of("diffusion", tmp_path))
    data.row(0)
    save_video(file, **video(latents=torch.zeros(16, 2, 4, 4)))
    with pytest.raises(InputError, match=r"a\.safetensors has changed since the run began"):
        data.row(0)
