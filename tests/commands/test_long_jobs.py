"""Jobs of hours show and keep their work: the same command again ends as one that nobody stopped."""

import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

import minitrain
from minitrain import InputError, generate
from minitrain.__main__ import dispatch
from minitrain.commands import tokenize as tokenize_files
from minitrain.data.text import documents
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.rollout.engine import Sampler
from tests.helpers.processes import fork

PROMPTS = [{"id": n, "prompt": "ab" * (n % 3 + 1), "score": 0.5} for n in range(7)]
WORDS = ["--max-tokens", "12", "--temperature", "1", "--device", "cpu", "--n", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    # samples end where positions do: those of longer prompts before the others
    shape = {"num_layers": 1, "vocab_size": 258, "max_position_embeddings": 14}
    model = Decoder(model_config("llama3-8b-tiny", **shape))
    folder = tmp_path_factory.mktemp("model")
    minitrain.save_pretrained(model, folder, ByteTokenizer())
    return folder


@pytest.fixture
def words(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    return ["--model", str(folder), "--prompts", str(tmp_path / "in.jsonl"), *WORDS]


def answered(words, out: Path) -> list[str]:
    generate.main([*words, "--out", str(out)])
    return out.read_text().splitlines()


def stop_after(monkeypatch, steps: int, error: type) -> None:
    """Let the sampler fail after so many steps."""
    step = Sampler.step
    left = iter(range(steps))

    def failing(sampler):
        if next(left, None) is None:
            raise error
        return step(sampler)

    monkeypatch.setattr(Sampler, "step", failing)


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError])
def test_answers_that_were_made_are_kept_and_not_made_again(
    words, tmp_path, monkeypatch, capsys, error
):
    whole = answered(words, tmp_path / "whole.jsonl")
    assert len({len(line) for line in whole}) > 3
    assert [json.loads(line)["id"] for line in whole] == [n for n in range(7) for _ in range(2)]
    assert all(json.loads(line)["score"] == 0.5 for line in whole)
    told = capsys.readouterr()
    assert "14 answers" in told.out and "7/7" in told.err and "prompt" in told.err
    out = tmp_path / "out.jsonl"
    seen = set()
    counts = []
    for steps in (3, 10, 12, 3):
        with monkeypatch.context() as patch:
            stop_after(patch, steps, error)
            try:
                answered(words, out)
            except error:
                lines = out.read_text().splitlines()
                # whole lines of whole prompts, and those of an uninterrupted run
                assert not Counter(lines) - Counter(whole) and len(lines) % 2 == 0
                assert seen <= set(lines)
                seen = set(lines)
                count = len(lines) // 2
                counts.append(count)
                assert f"{out} has answers to {count} of 7 prompts" in capsys.readouterr().err
    assert counts == [0, 2, 4, 4]
    assert answered(words, out) == whole
    # nothing is left to do: the model is not even read
    with monkeypatch.context() as patch:
        patch.setattr("minitrain.commands.generate_text.load_merged", None)
        assert answered(words, out) == whole
    # more prompts, as a file grows
    file = tmp_path / "in.jsonl"
    file.write_text(file.read_text() + json.dumps({"id": 8, "prompt": "new"}))
    assert answered(words, out)[:14] == whole and len(out.read_text().splitlines()) == 16


def test_a_line_that_is_cut_off_is_written_anew(words, tmp_path):
    out = tmp_path / "out.jsonl"
    whole = answered(words, out)
    text = out.read_text()
    for size in (len(text) - 1, len(text) - len(whole[-1]) - 1, len(whole[0]) + 1, 1, 0):
        out.write_text(text[:size])
        assert answered(words, out) == whole


def test_equal_prompts_keep_their_own_random_numbers(words, tmp_path):
    """An answer to the second is not taken for one to the first."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab"}\n' * 2)
    out = tmp_path / "out.jsonl"
    whole = answered(words, out)
    assert len(whole) == 4 == len({*whole})
    for kept in (whole[2:], whole[:2], whole[:3]):
        out.write_text("".join(line + "\n" for line in kept))
        assert answered(words, out) == whole


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"prompt": "x", "text": "y"}\n', "1 lines that are no answers to"),
        ("my notes\n", "out.jsonl:1: no answer of this command"),
        ('{"prompt": "ab"}\n', "out.jsonl:1: no answer of this command"),
        ("[1]\n", "out.jsonl:1: no answer of this command"),
    ],
)
def test_files_without_answers_are_not_overwritten(words, tmp_path, content, line):
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(InputError, match=line):
        answered(words, out)
    assert out.read_text() == content


def replaced(words: list[str], *more: str) -> list[str]:
    """Return options, with others in place of those of the same names."""
    places = [i for i, word in enumerate(words) if word in more and word.startswith("--")]
    return [*(w for i, w in enumerate(words) if not {i, i - 1} & set(places)), *more]


def test_more_answers_than_are_asked_for_are_kept(words, tmp_path):
    out = tmp_path / "out.jsonl"
    whole = answered(words, out)
    with pytest.raises(InputError, match="7 lines that are no answers to .* with --n 1"):
        answered(replaced(words, "--n", "1"), out)
    assert out.read_text().splitlines() == whole


def test_answers_of_other_settings_are_not_taken_for_these(words, folder, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, 10, KeyboardInterrupt)
        answered(words, out)
    begun = out.read_text()
    changes = {
        "temperature": ["--temperature", "0"],
        "max_tokens": ["--max-tokens", "5"],
        "seed": ["--seed", "1"],
        "stop": ["--stop", "x"],
        "chat": ["--chat"],
        "top_k, top_p": ["--top-k", "3", "--top-p", "0.5"],
    }
    for name, more in changes.items():
        with pytest.raises(InputError, match=f"answers that were made with another {name} .name"):
            answered(replaced(words, *more), out)
    other = tmp_path / "other"
    minitrain.save_pretrained(minitrain.load_pretrained(folder), other, ByteTokenizer())
    with pytest.raises(InputError, match="answers that were made with another weights"):
        answered(["--model", str(other), *words[2:]], out)
    assert out.read_text() == begun
    # a file that was taken away: all begins anew
    out.unlink()
    assert len(answered(replaced(words, "--temperature", "0"), out)) == 14


def test_answers_without_the_record_of_their_settings_are_told(words, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    whole = answered(words, out)
    record = tmp_path / ".out.jsonl.made_of"
    record.write_text("{")
    with pytest.raises(InputError, match="out.jsonl.made_of:1:2: not valid JSON"):
        answered(words, out)
    record.unlink()
    capsys.readouterr()
    assert answered(words, out) == whole
    assert "out.jsonl.made_of is missing: nobody knows" in capsys.readouterr().err


def test_a_key_that_the_answer_would_replace_is_refused(words, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "text": "b"}\n')
    with pytest.raises(InputError, match="in.jsonl:1: 'text' is where the answer goes"):
        generate.main(words)


def test_a_prompt_that_does_not_fit_is_named(words, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "b" * 5000}))
    with pytest.raises(InputError, match="in.jsonl, prompt 2: a prompt of 5000 tokens"):
        answered(words, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_answers_go_to_a_pipe_in_the_order_of_the_prompts(words, tmp_path, capsys):
    generate.main(words)
    expected = capsys.readouterr().out
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        generate.main([*words, "--out", str(pipe)])
        assert reader.communicate()[0] == expected
    assert [json.loads(line)["id"] for line in expected.splitlines()[::2]] == [*range(7)]


# --- other jobs


def slow(number: int, files: list[Path]) -> tuple[int, int]:
    Path(files[0]).with_suffix(".begun").touch()
    time.sleep(60)
    return 1, 1


def interrupted_tokenize(folder: Path) -> None:
    from minitrain.run.launch import cli

    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
    tokenize_files.partial = lambda *args, **kwargs: slow
    words = ["tokenize", "--tokenizer", "bytes", "--processes", "2", "--out", f"{folder}/out"]
    cli.run(lambda _: dispatch([*words, str(folder / "in")]))


def check_stopped(process, number: int, folder: Path, begun: Callable[[], bool]) -> None:
    """Send a signal once begun() is true, and check the exit code, within 10 seconds."""
    deadline = time.monotonic() + 100
    while not begun():
        assert time.monotonic() < deadline and process.is_alive(), (folder / "log").read_text()
        time.sleep(0.05)
    sent = time.monotonic()
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == 128 + number and time.monotonic() < sent + 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_tokenize_leaves_nothing(tmp_path, number):
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.txt").write_text("text")
    process = fork(interrupted_tokenize, tmp_path)
    check_stopped(process, number, tmp_path, lambda: len([*tmp_path.glob("in/*.begun")]) == 2)
    line = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (tmp_path / "log").read_text().splitlines()[-1] == line
    assert sorted(os.listdir(tmp_path)) == ["in", "log"]


def tokenize_or_stop(folder: Path, monkeypatch, stop_at: int | None, *words: str) -> list[int]:
    """Tokenize folder/in in this process, interrupted at group `stop_at`; return the groups that were read."""
    read = []
    reader = documents.read_documents

    def reading(files, *rest):
        read.append(int(files[0].stem))
        return reader(files, *rest)

    def one_by_one(write, groups, processes):
        counts = []
        for number, group in enumerate(groups):
            if number == stop_at:
                raise KeyboardInterrupt
            counts.append(write(number, group))
        return counts

    with monkeypatch.context() as patch:
        patch.setattr(documents, "read_documents", reading)
        patch.setattr(tokenize_files, "write_groups", one_by_one)
        given = ["--tokenizer", "bytes", "--out", f"{folder}/out", *words]
        with pytest.raises(KeyboardInterrupt) if stop_at is not None else nullcontext():
            dispatch(["tokenize", *given, f"{folder}/in"])
    return read


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_tokenizing_continues_with_what_is_finished(tmp_path, monkeypatch, capsys):
    (tmp_path / "in").mkdir()
    texts = [tmp_path / "in" / f"{n}.txt" for n in range(5)]
    for n, file in enumerate(texts):
        file.write_text("text " * n + "end")
    run = partial(tokenize_or_stop, tmp_path, monkeypatch)
    assert run(None) == [0, 1, 2, 3, 4]
    whole = files_in(tmp_path / "out")
    assert sorted(name for name in whole if name.endswith(".npy")) == [
        f"{n:05d}.npy" for n in range(5)
    ]
    line = capsys.readouterr().out.splitlines()[0]
    (tmp_path / "out").rename(tmp_path / "expected")

    assert run(2) == [0, 1]
    work = tmp_path / "out.unfinished"
    assert f"{work} keeps 2 of 5 files: the same command continues" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    # a file that was being written, and a note of it that was cut off
    (work / "00002.npy").write_bytes(b"half")
    (work / "00001.done").write_text((work / "00001.done").read_text()[:-1])
    texts[0].write_text("another text")
    assert run(3) == [0, 1, 2]
    texts[0].write_text("end")
    # what differs is made anew: a text that was touched, an option that decides tokens
    assert run(4) == [0, 3]
    assert run(4, "--kind", "text") == [0, 1, 2, 3]
    assert run(None) == [0, 1, 2, 3, 4]
    assert files_in(tmp_path / "out") == whole and capsys.readouterr().out.splitlines()[0] == line
    assert sorted(os.listdir(tmp_path)) == ["expected", "in", "out"]


def test_files_that_are_gone_since_leave_no_tokens(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for n in range(3):
        (tmp_path / "in" / f"{n}.txt").write_text(f"text {n}")
    assert tokenize_or_stop(tmp_path, monkeypatch, 2) == [0, 1]
    for n in (1, 2):
        (tmp_path / "in" / f"{n}.txt").unlink()
    assert tokenize_or_stop(tmp_path, monkeypatch, None) == []
    assert [file.name for file in (tmp_path / "out").glob("*.npy")] == ["00000.npy"]


def test_an_interrupted_evaluation_tells_what_it_has_measured(
    folder, tmp_path, capsys, monkeypatch
):
    from minitrain.training.language_modeling import LanguageModeling

    (tmp_path / "a.txt").write_text("some texts.   " * 36)
    words = ["evaluate", "--model", str(folder), "--device", "cpu"]
    dispatch([*words, str(tmp_path / "a.txt")])
    assert "36/36" in capsys.readouterr().err
    count = LanguageModeling.count
    left = iter(range(3))

    def counted(objective, batch):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return count(objective, batch)

    monkeypatch.setattr(LanguageModeling, "count", counted)
    with pytest.raises(KeyboardInterrupt):
        dispatch([*words, str(tmp_path / "a.txt")])
    assert "note: so far 42 tokens of 3 of 36 rows: " in capsys.readouterr().err


# --- the compiler


def compile_slowly(folder: Path) -> None:
    """Be a run whose first step is compiled for minutes, by this thread and by one that nobody can end."""
    from minitrain.run.config import load as configs
    from minitrain.run.launch import cli
    from minitrain.run.launch.start import start
    from minitrain.run.launch.watch import until_signal

    def compile_step() -> None:
        threading.Thread(target=time.sleep, args=(100,)).start()
        (folder / "begun").touch()
        time.sleep(100)

    space = {"__name__": "torch._inductor.compile_fx", "compile_step": compile_step}
    exec("def compile_fx(): compile_step()", space)

    def main(_) -> None:
        start(configs.from_dict({"device": "cpu", "batch": {"global": 1, "micro": 1}}))
        with until_signal():
            space["compile_fx"]()

    os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT), 2)
    cli.run(main)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_compiles_ends_the_run_with_a_line(tmp_path, number):
    process = fork(compile_slowly, tmp_path)
    check_stopped(process, number, tmp_path, (tmp_path / "begun").exists)
    line = f"{number.name}: ended while torch.compile was at work on the first step"
    assert (tmp_path / "log").read_text().splitlines() == [line]
