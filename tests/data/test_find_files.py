"""Test which files data.path and data.exclude name."""

import os
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
from datasets.data_files import resolve_pattern

from minitrain.data.files import find_files
from minitrain.data.text.text_rows import open_data
from minitrain.settings import Data
from tests.helpers.datasets import EOS, data_refused, tokens_of


def texts_found(data: Data) -> Counter:
    """How often each letter stands in the training rows: one letter a file, in the tests below."""
    train, _ = open_data(data, 1, 258, 0)
    return Counter(chr(token) for token in tokens_of(train).elements() if token != EOS)


@pytest.fixture
def tree(tmp_path):
    """a.txt, sub/b.py, sub/test/c.py, sub/test/deep/d.txt: each holds its own letter."""
    for name in ("a.txt", "sub/b.py", "sub/test/c.py", "sub/test/deep/d.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(file.stem)
    return tmp_path


@pytest.mark.parametrize(
    "paths, exclude, letters",
    [
        ("", [], "abcd"),
        ("a.txt", [], "a"),
        ("**/*.py", [], "bc"),
        ("sub/*", [], "b"),
        (["sub/test", "**/*.txt", "a.txt"], [], "acd"),
        ("", ["*/test/*"], "ab"),
        ("", ["*.py", "*/a.*"], "d"),
        ("", ["a.txt", "test/c.py"], "bd"),
    ],
)
def test_path_may_be_file_folder_glob_or_list(tree, paths, exclude, letters):
    paths = str(tree / paths) if isinstance(paths, str) else [str(tree / path) for path in paths]
    assert texts_found(Data(kind="text", path=paths, exclude=exclude)) == Counter(letters)


def test_exclude_sees_the_full_path_of_relative_files(tree, monkeypatch):
    monkeypatch.chdir(tree / "sub" / "test")
    assert texts_found(
        Data(kind="text", path=["c.py", "../b.py"], exclude=["*/sub/test/*"])
    ) == Counter("b")
    assert texts_found(
        Data(kind="text", path=["c.py", "../b.py"], exclude=["../b.py"])
    ) == Counter("c")


def test_a_file_of_many_names_is_one_document(tree, monkeypatch):
    monkeypatch.chdir(tree / "sub")
    paths = ["b.py", "./b.py", "test/../*.py", str(tree / "sub/b.py")]
    assert texts_found(Data(kind="text", path=paths)) == Counter("b")


def test_folders_are_read_through_links_each_once(tree, tmp_path_factory):
    """By their own names, whatever leads back to them."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "e.txt").write_text("e")
    (elsewhere / "back").symlink_to(tree)
    for name, target in (
        ("0", "sub"),
        ("sub/loop", "."),
        ("sub/test/up", "../.."),
        ("out", elsewhere),
        ("out2", "out"),
    ):
        (tree / name).symlink_to(target)
    data = Data(kind="text", path=str(tree))
    found = [str(file.relative_to(tree)) for file in find_files(data)]
    assert found == ["a.txt", "out/e.txt", "sub/b.py", "sub/test/c.py", "sub/test/deep/d.txt"]
    assert texts_found(data) == Counter("abcde")
    # itself a link
    assert texts_found(Data(kind="text", path=str(tree / "0"))) == Counter("bcdae")


def test_a_glob_finds_each_file_once_though_links_go_round_in_circles(tree):
    (tree / "sub/loop").symlink_to(".")
    data = Data(
        kind="text", path=[f"{tree}/**/*.py", f"{tree}/sub/loop/*"], exclude=["*/sub/b.py"]
    )
    found = [str(file.relative_to(tree)) for file in find_files(data)]
    # the first by the shortest name that is not left out
    assert found == ["sub/loop/b.py", "sub/test/c.py"]


@pytest.mark.parametrize("kind", ["text", "jsonl", "tokens", "latents"])
def test_hidden_files_are_no_data(tmp_path, kind):
    """The oracle is the package datasets."""
    suffix = {"text": ".txt", "jsonl": ".jsonl", "tokens": ".bin", "latents": ".safetensors"}[
        kind
    ]
    base = tmp_path / ".data"  # which is asked for by name
    for name in (
        "a",
        ".b",
        ".git/c",
        "d/.e/f",
        "d/g",
        "__pycache__/h",
        ".ipynb_checkpoints/i",
        "__j",
        "d/k.l",
        ".m/n",
    ):
        (base / f"{name}{suffix}").parent.mkdir(parents=True, exist_ok=True)
        (base / f"{name}{suffix}").write_text("x")
    theirs = sorted(Path(file) for file in resolve_pattern("**", str(base)))
    assert find_files(Data(kind=kind, path=str(base))) == theirs and len(theirs) == 4
    (base / "out").symlink_to(base / ".git")  # by a name that is not hidden
    assert base / f"out/c{suffix}" in find_files(Data(kind=kind, path=str(base)))


def test_a_folder_without_files_of_the_kind_says_what_it_has(tmp_path):
    for name in ("a.json", "b.json", "c.json.gz"):
        (tmp_path / name).write_text("{}")
    counted = ".jsonl or .jsonl.gz or .parquet or .arrow"
    data_refused(
        rf"no file matches .*a folder's {counted} files count, it has 2 .json, 1 .gz; a glob",
        tmp_path,
        "jsonl",
    )
    data_refused(
        r"no file matches .*a folder's .npy or .bin files count, it has 2 .json",
        tmp_path,
        "tokens",
    )
    (tmp_path / "d" / ".git").mkdir(parents=True)
    (tmp_path / "d" / ".git" / "config").write_text("x")
    data_refused(
        "no file matches .*is empty, or all in it is hidden",
        tmp_path,
        "text",
        path=str(tmp_path / "d"),
    )
    data_refused(
        r"no file matches 'a,b' \(a list is written data.path='\[a,b\]'\)",
        tmp_path,
        "text",
        path="a,b",
    )


@pytest.mark.parametrize("kind", ["text", "jsonl", "tokens", "latents"])
def test_pipes_in_folders_are_no_data(tmp_path, kind):
    """Nor are links to them: reading one may never end."""
    suffix = {"text": ".txt", "jsonl": ".jsonl", "tokens": ".npy", "latents": ".safetensors"}[
        kind
    ]
    (tmp_path / f"a{suffix}").write_text("a")
    os.mkfifo(tmp_path / f"b{suffix}")
    (tmp_path / f"c{suffix}").symlink_to(tmp_path / f"b{suffix}")
    assert find_files(Data(kind=kind, path=str(tmp_path))) == [tmp_path / f"a{suffix}"]


def test_home_and_standard_library_in_paths(tree, monkeypatch):
    monkeypatch.setenv("HOME", str(tree))
    assert texts_found(Data(kind="text", path="~/sub/b.py")) == Counter("b")
    letters = (Path(sysconfig.get_paths()["stdlib"]) / "this.py").read_text()
    assert texts_found(Data(kind="text", path="{stdlib}/this.py")) == Counter(letters)


def test_documents_come_in_sorted_order(tree):
    data, _ = open_data(
        Data(kind="text", path=[str(tree / "sub"), str(tree / "a.txt")]), 8, 258, 0
    )
    assert bytes(token for token in data.row(0)["tokens"].tolist() if token < 256) == b"abcd"


def test_file_errors(tree):
    data_refused(
        r"data.path: no file matches '.*none\*'",
        tree,
        "text",
        path=[str(tree), str(tree / "none*")],
    )
    data_refused(r"data.path: no file matches", tree, "jsonl")  # a folder without any .jsonl
    data_refused(r"data.exclude=\['\*'\] leaves no file", tree, "text", exclude=["*"])
    (tree / "bad.txt").write_bytes(b"abc\xff")
    data_refused(r"bad.txt is not UTF-8 at byte 3", tree, "text")
    (tree / "empty").mkdir()
    data_refused("data.path: no file matches", tree / "empty", "text")


@pytest.mark.parametrize(
    "name, kind",
    [("a.txt", "text"), ("a.jsonl", "jsonl"), ("a.npy", "tokens"), ("a.bin", "tokens")],
)
def test_an_unreadable_file_is_named(tmp_path, name, kind):
    (tmp_path / name).symlink_to(tmp_path / "gone")
    data_refused(f"{name} cannot be read: No such file", tmp_path, kind)
