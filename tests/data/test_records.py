"""Files of objects in every form that other programs write: they hold what `datasets` wrote into them.

The oracle is the package itself: to_json, to_parquet and save_to_disk of one dataset give the same rows.
"""

import gzip
import json
import subprocess
import sys
from datetime import date
from pathlib import Path

import datasets
import pyarrow
import pytest

from minitrain.commands.tokenize import write_tokens
from minitrain.data.faults.skips import Skips
from minitrain.data.files import find_files
from minitrain.data.records import read_records
from minitrain.data.text.text_rows import open_data
from minitrain.errors import InputError
from minitrain.settings import Data

ROWS = [
    {
        "text": f"Zeile {n} ä\n🙂",
        "number": n / 8,
        "day": date(2026, 1, n),
        "empty": None,
        "messages": [
            {"role": "user", "content": f"q{n}"},
            {"role": "assistant", "content": "a" * n},
        ],
    }
    for n in range(1, 8)
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Write ROWS as other programs do."""
    folder = tmp_path_factory.mktemp("written")
    table = datasets.Dataset.from_list(ROWS)
    table.to_json(folder / "a.jsonl")
    lines = (folder / "a.jsonl").read_bytes()
    (folder / "two-members.jsonl.gz").write_bytes(
        gzip.compress(lines[:100]) + gzip.compress(lines[100:])
    )
    objects = [json.loads(line) for line in lines.splitlines()]
    (folder / "array.json").write_text("\ufeff" + json.dumps(objects, indent=1), encoding="utf-8")
    (folder / "array.json.gz").write_bytes(gzip.compress(json.dumps(objects).encode()))
    table.to_parquet(folder / "a.parquet", batch_size=3)
    stored = table.data.table
    with (
        pyarrow.OSFile(str(folder / "file.arrow"), "wb") as raw,
        pyarrow.ipc.new_file(raw, stored.schema) as writer,
    ):
        writer.write_table(stored, max_chunksize=2)
    table.save_to_disk(folder / "saved", num_shards=2)
    loaded = datasets.load_from_disk(folder / "saved")
    loaded.map(
        lambda row: {"text": "a cache"},
        cache_file_name=str(folder / "saved" / "cache-0123.arrow"),
    )
    datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(folder / "splits")
    return folder


def objects_in(path: Path) -> list[dict]:
    return list(read_records(find_files(Data("jsonl", str(path))), lambda row: row, Skips()))


FORMS = [
    "two-members.jsonl.gz",
    "array.json",
    "array.json.gz",
    "a.parquet",
    "file.arrow",
    "saved",
    "splits/train",
]


@pytest.mark.parametrize("name", FORMS)
def test_all_forms_hold_the_same_objects(written, name):
    found = objects_in(written / name)
    expected = objects_in(written / "a.jsonl")
    assert len(expected) == 7
    for ours, theirs in zip(found, expected, strict=True):
        days = ours.pop("day"), theirs["day"]
        assert ours == {key: value for key, value in theirs.items() if key != "day"}
        # pandas wrote the other with a time
        assert days[0] == days[1] or days[0] == str(date.fromisoformat(days[0]))


@pytest.mark.parametrize("name", FORMS)
def test_documents_are_the_same_from_all_forms(written, tmp_path, name):
    ours, theirs = (
        open_data(Data("jsonl", str(path)), 8, 258, 0)[0].corpus.stores[0]
        for path in (written / name, written / "a.jsonl")
    )
    assert ours.tolist() == theirs.tolist()
    if not name.endswith(".json") and not name.endswith(".json.gz"):  # which stand for a text
        files = find_files(Data("text", str(written / name)))
        assert write_tokens("bytes", "text", tmp_path, 0, files) == (7, len(theirs))


def test_numbers_of_tables_are_exact(written):
    for name in ("a.parquet", "saved"):
        assert [row["number"].digits() for row in objects_in(written / name)] == [
            str(n / 8) for n in range(1, 8)
        ]


@pytest.mark.parametrize(
    "kind", [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view()]
)
def test_texts_that_a_table_holds_as_bytes_are_text(tmp_path, kind):
    """As Spark and Hive write them; other bytes are only an error where a text is wanted."""
    texts = ["naïve é", "", "🙂 b'x'"]
    rows = {"text": pyarrow.array([text.encode() for text in texts], kind)}
    nested = [{"say": text.encode()} for text in texts]
    table = pyarrow.table(
        rows | {"more": pyarrow.array(nested), "hash": pyarrow.array([b"\xff\x00"] * 3)}
    )
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    found = objects_in(tmp_path / "a.arrow")
    assert [row["text"] for row in found] == texts
    assert [row["more"] for row in found] == [{"say": text} for text in texts]
    wrong = pyarrow.table({"text": pyarrow.array([b"good", b"caf\xe9", b"good"], kind)})
    with pyarrow.ipc.new_file(tmp_path / "b.arrow", wrong.schema) as out:
        out.write_table(wrong)
    assert "b.arrow:2: 'text' holds " in told(tmp_path / "b.arrow")
    data = Data("jsonl", str(tmp_path / "b.arrow"), on_error="skip")
    assert "1 skipped" in open_data(data, 8, 258, 0)[0].about


def test_tables_may_hold_numbers_that_are_not_finite(tmp_path):
    """As scores of a classifier do, beside the text that is read."""
    table = datasets.Dataset.from_dict(
        {"text": ["a", "b", "c"], "score": [float("nan"), float("-inf"), 0.1]}
    )
    table.to_parquet(tmp_path / "a.parquet")
    assert [row["text"] for row in objects_in(tmp_path / "a.parquet")] == table["text"]
    assert repr([row["score"] for row in objects_in(tmp_path / "a.parquet")]) == repr(
        table["score"][:]
    )


def told(path: Path, on_error: str = "error") -> str:
    with pytest.raises(InputError) as caught:
        open_data(Data("jsonl", str(path), on_error=on_error), 8, 258, 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_several_splits_are_not_mixed(written):
    assert (
        told(written / "splits")
        == f"data.path: {written}/splits holds several splits (name one, a folder in it)"
    )


@pytest.mark.parametrize(
    "name",
    [
        "two-members.jsonl.gz",
        "array.json",
        "array.json.gz",
        "a.parquet",
        "file.arrow",
        "saved/data-00000-of-00002.arrow",
    ],
)
@pytest.mark.parametrize("damage", ["cut", "flipped", "head"])
def test_damage_is_told_in_a_line(written, tmp_path, name, damage):
    """With the file's name; flipped bits may go unseen, but never end the program otherwise."""
    whole, file = (written / name).read_bytes(), tmp_path / Path(name).name
    count = 2000 if damage == "flipped" and name.endswith(".arrow") else 40  # offsets are few
    places = range(0, len(whole), max(1, len(whole) // count))
    for place in places if damage != "head" else [10]:
        changed = whole[:place] + bytes([whole[place] ^ 20]) + whole[place + 1 :]
        file.write_bytes({"cut": whole[:place], "flipped": changed, "head": whole[:10]}[damage])
        try:
            objects_in(file)
            assert damage == "flipped"
        except InputError as error:
            assert str(error).startswith(str(file)) and str(error).isprintable()


def test_lines_before_damage_are_kept_with_on_error_skip(written, tmp_path):
    whole = gzip.compress(b"".join(b'{"text": "%050d"}\n' % n**9 for n in range(9000)))
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    number = int(
        told(file)
        .removeprefix(f"{file}:")
        .partition(": damaged or cut off: Compressed file ended")[0]
    )
    data, _ = open_data(Data("jsonl", str(file), on_error="skip"), 8, 258, 0)
    assert data.about.startswith(f"1 skipped, the first: {file}:{number}: ")
    assert len(data.corpus) == 51 * (number - 1) > 51 * 1000


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", " is empty"),
        (b"[]", " is empty"),
        (b" [ ]\n", " is empty"),
        (gzip.compress(b""), " is empty"),
        (b'[{"text": "a"}, 5]', "[1]: must be a JSON object, not int"),
        (b'[{"text": "a"},\n {"body": "b"}]', "[1]: no key 'text'"),
        (
            b'[{"text": "a"},\n {"text": b"}]',
            ": not valid JSON: Expecting value: line 2 column 11",
        ),
        (b'[{"text": "a"}] [', ": not valid JSON: Extra data"),
        (b"[1, 2]", ":1: must be a JSON object, not list"),
        (
            b'[{"role": "user"}]\n[{"role": "user"}]',
            ':1: must be a JSON object, not list (messages stand in one: {"messages": [...]})',
        ),
        (b'[{"text": "a"}]\n\n{"text": "b"}', ":1: must be a JSON object, not list"),
        (gzip.compress(b'{"text": "a"}\n{"text": 5}'), ":2: 'text' must be text, not int"),
        (gzip.compress(b"GGUF" * 99), " is a GGUF file"),
    ],
)
def test_wrong_objects_are_named(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    assert told(tmp_path / "a.json").startswith(f"{tmp_path}/a.json{message}")


def test_rows_of_tables_are_named(tmp_path):
    for name, wrong in (("a.parquet", None), ("b.parquet", 5)):
        column = [wrong] * 2000 if wrong else ["a"] * 1999 + [None]
        datasets.Dataset.from_dict({"text": column}).to_parquet(tmp_path / name)
    assert (
        told(tmp_path / "a.parquet")
        == f"{tmp_path}/a.parquet:2000: 'text' must be text, not NoneType"
    )
    assert told(tmp_path / "b.parquet") == f"{tmp_path}/b.parquet:1: 'text' must be text, not int"


def test_without_pyarrow_a_line_says_how_to_get_it(written):
    program = f"""
import sys
sys.modules["pyarrow"] = None
from minitrain.data.text.text_rows import open_data
from minitrain.settings import Data
open_data(Data("jsonl", {str(written / "a.jsonl")!r}), 8, 258, 0)
open_data(Data("jsonl", {str(written / "a.parquet")!r}), 8, 258, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.endswith(
        f"InputError: {written}/a.parquet needs the package pyarrow: pip install pyarrow\n"
    )
