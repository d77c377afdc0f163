"""Texts of other encodings, and what is no JSON, are named with a remedy that works."""

import csv
import io
import json
import pprint
import random
import re

import pytest

from minitrain.data.faults.skips import Skips
from minitrain.data.faults.wrong_text import encoding_of, not_json
from minitrain.data.records import read_records
from minitrain.data.text_files import decode
from minitrain.errors import InputError
from minitrain.run.config.load import load

WESTERN = "caf\u00e9 d\u00e9j\u00e0 vu, na\u00efve Stra\u00dfe \u00a3"
CHINESE = "\u4f60\u597d\uff0c\u4e16\u754c"
TEXTS = [
    WESTERN,
    f"a {CHINESE}",
    "plain words",
    "\u041f\u0440\u0438\u0432\u0435\u0442",
    "\U0001f600 ok",
]


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("form", ['{{"text": "{}"}}\n', "a: {}\nb: 2\n"])
def test_the_encoding_that_is_named_reads_the_text(tmp_path, code, text, form):
    """As JSON lines, as a text and as a config; the oracle is Python's codecs."""
    raw = form.format(text).encode(code)
    named = encoding_of(raw)
    assert raw.decode(named).lstrip("\ufeff") == form.format(text)
    file = tmp_path / "a.jsonl"
    file.write_bytes(raw)
    way = rf"it is {named}: iconv -f {named} -t UTF-8 FILE > NEW"
    for read in (
        lambda: list(read_records([file], dict, Skips())),
        lambda: decode(raw, file),
        lambda: load(file),
    ):
        with pytest.raises(InputError, match=rf"a.jsonl is not UTF-8.* \({way}\)"):
            read()


@pytest.mark.parametrize(
    "text, code", [(WESTERN, "latin-1"), ("\u201cquoted\u201d \u2013 50 \u20ac", "cp1252")]
)
def test_western_text_of_one_byte_a_letter(tmp_path, text, code):
    raw = json.dumps({"text": text}, ensure_ascii=False).encode(code)
    named = encoding_of(raw)
    assert raw.decode(named) == raw.decode(code) and named in ("ISO-8859-1", "WINDOWS-1252")
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a"}\n' + raw)
    with pytest.raises(InputError, match=rf"a.jsonl:2: not valid JSON: .*\(it is {named}: iconv"):
        list(read_records([file], dict, Skips()))
    with pytest.raises(InputError, match=rf"is not UTF-8 at byte \d+ \(it is {named}: iconv"):
        decode(raw, file)
    file.write_bytes(f"out_dir: {text}".encode(code))
    with pytest.raises(InputError, match=rf"is not UTF-8 at byte \d+ \(it is {named}: iconv"):
        load(file)


@pytest.mark.parametrize("code", ["gbk", "big5", "shift-jis", "euc-kr", "cp437", "koi8-r"])
def test_unrecognized_encodings_are_not_called_western(code):
    text = "\u4f60\u597d" if code in ("gbk", "big5", "shift-jis") else "\uc548\ub155"
    text = {"cp437": "caf\u00e9", "koi8-r": "\u041f\u0440\u0438\u0432\u0435\u0442"}.get(
        code, text
    )
    assert encoding_of(json.dumps({"a": text}, ensure_ascii=False).encode(code, "replace")) == ""


def test_utf8_and_random_bytes_have_no_other_encoding():
    generator = random.Random(0)
    for text in TEXTS:
        for form in ('{{"text": "{}"}}\n', "{}", "a {} b"):
            assert encoding_of(form.format(text).encode()) == ""
            assert encoding_of(form.format(text).encode("utf-8-sig")) == ""
    assert not any(encoding_of(generator.randbytes(300)) for _ in range(2000))


RECORD = {"messages": [{"role": "user", "content": "it's"}], "n": None, "ok": True}


def written(kind: str) -> str:
    if kind == "csv":
        text = io.StringIO()
        csv.writer(text).writerows([["prompt", "answer"], ["a, b", "c"]])
        return text.getvalue().splitlines()[0]
    line = json.dumps(RECORD)
    return {
        "repr": repr(RECORD),
        "pprint": pprint.pformat(RECORD, width=1000),
        "list of repr": repr([RECORD]),
        "true of Python": line.replace("true", "True"),
        "comma": f"{line},",
        "inner comma": line[:-1] + ",}",
        "inner comma of a list": line.replace("}]", "},]"),
        "quotes": line.replace('"', "\u201d"),
        "german quotes": re.sub('"([^"]*)"', "\u201e\\1\u201c", line),
        "keys": re.sub(r'"(\w+)":', r"\1:", line),
        "backslash": '{"text": "\\alpha + \\beta"}',
        "tab": '{"text": "a\tb"}',
        "nan": '{"a": nan}',
        "comment": f"{line} // later",
        "two": f"{line}{line}",
        "two apart": f"{line} {line}",
        "semicolon": f"{line};",
        "cut": line[:30],
        "cut in a text": '{"text": "hel',
        "comment alone": "# chats",
        "xml": "<doc>a</doc>",
        "events": f"data: {line}",
        "tsv": "prompt\tanswer",
        "semicolons": "prompt;answer",
        "text": "Once upon a time, there was a line.",
        "yaml": "- role: user",
    }[kind]


@pytest.mark.parametrize(
    "kind, told",
    [
        ("repr", "written by Python's print: json.dumps writes JSON"),
        ("pprint", "written by Python's print"),
        ("list of repr", "written by Python's print"),
        ("comma", "a comma ends it: remove it"),
        ("inner comma", "a comma stands before a closing bracket: remove it"),
        ("inner comma of a list", "a comma stands before a closing bracket"),
        ("two", "another object follows the first one"),
        ("two apart", "another object follows the first one"),
        ("semicolon", "something follows the first one"),
        ("cut", "it has no end: cut off"),
        ("cut in a text", "it has no end: cut off"),
        ("comment alone", "a comment: JSON has none"),
        ("xml", "XML or HTML"),
        ("events", "a stream of a server"),
        ("csv", r"a table in text \(datasets' Dataset.from_csv"),
        ("tsv", "a table in text"),
        ("semicolons", "a table in text"),
        ("text", "text: data.kind=text reads texts"),
        ("yaml", "text: data.kind=text"),
    ],
)
def test_lines_that_are_no_json_are_named(tmp_path, kind, told):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "a"}}\n{written(kind)}\n')
    with pytest.raises(
        InputError, match=rf"^{file}:2: not valid JSON: .* \([^()]*{told}"
    ) as error:
        list(read_records([file], dict, Skips()))
    assert "\n" not in str(error.value) and len(str(error.value)) < len(str(file)) + 250


@pytest.mark.parametrize(
    "kind",
    ["true of Python", "quotes", "german quotes", "keys", "backslash", "tab", "nan", "comment"],
)
def test_other_mistakes_are_told_as_json_tells_them(tmp_path, kind):
    file = tmp_path / "a.jsonl"
    file.write_text(written(kind))
    with pytest.raises(json.JSONDecodeError) as theirs:
        json.loads(written(kind))
    with pytest.raises(InputError, match=re.escape(f"{file}:1: not valid JSON: {theirs.value}")):
        list(read_records([file], dict, Skips()))


def test_the_remedies_work():
    """What is said to make JSON of a line makes JSON of it."""
    line = json.dumps(RECORD)
    for kind in ("comma", "inner comma"):
        text = written(kind)
        mended = {"comma": text.rstrip(","), "inner comma": text.replace(",}", "}")}[kind]
        assert json.loads(mended) == json.loads(line)
    assert json.loads(json.dumps(eval(written("repr")))) == RECORD


def test_json_that_is_broken_elsewhere_gets_no_hint():
    for text in (
        '{"a" 1}',
        '{"a": 1 "b": 2}',
        '{"a": undefined_name}',
        '{"a": 1}}',
        "{" + "}" * 9,
    ):
        assert "print" not in not_json(text, "") and "comma" not in not_json(text, "")
    for text in ("[" * 100_000, "{" * 100_000, '{"a": "' + "\\" * 100_001):
        assert len(not_json(text, "")) < 100


@pytest.mark.parametrize("content", ["a\uff1a 1", "a:\u00a01", "a:\u30001", "\u200ba\uff1a 1"])
def test_letters_that_look_like_others_in_a_config(tmp_path, content):
    """With the line that has them, not the one after it."""
    (tmp_path / "a.yaml").write_text(f"steps: 3\n{content}\nseed: 1\n")
    with pytest.raises(
        InputError, match=r"a.yaml:2: U\+(FF1A|00A0|3000) is .* \(write (:|a space)\)"
    ):
        load(tmp_path / "a.yaml")
