"""Test that files of another kind are recognized, and refused with what to do."""

import bz2
import gzip
import json
import lzma
import pickle

import numpy as np
import pyarrow
import pyarrow.orc
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset
from safetensors.torch import save_file

from minitrain.formats.magic import kind_of_tokens, masked_crc
from tests.helpers.datasets import brute_force_rows, data_refused, epoch_of, multiset, open_tokens

ARRAY = np.arange(3000) % 600


def write_npz(file):
    with open(file, "wb") as raw:
        np.savez(raw, ARRAY)


def write_stream(file):
    with (
        pyarrow.OSFile(str(file), "wb") as sink,
        pyarrow.ipc.new_stream(sink, TABLE.schema) as writer,
    ):
        writer.write_table(TABLE)


def write_arrow(file):
    with (
        pyarrow.OSFile(str(file), "wb") as sink,
        pyarrow.ipc.new_file(sink, TABLE.schema) as writer,
    ):
        writer.write_table(TABLE)


def write_npy(file):
    with open(file, "wb") as raw:
        np.save(raw, ARRAY.astype(np.uint16))


TABLE = pyarrow.table({"text": ["some text"] * 100})
LINES = b'{"text": "some text"}\n' * 100
WRONG = {  # how the program that makes such files writes one, and what it is said to be
    "npz": (write_npz, "a zip archive, as numpy.savez"),
    "torch": (
        lambda file: torch.save(torch.arange(3000), file),
        "a zip archive, as numpy.savez and torch.save",
    ),
    "old torch": (
        lambda file: torch.save(torch.arange(3000), file, _use_new_zipfile_serialization=False),
        "pickled by torch",
    ),
    "npy": (write_npy, "a .npy file by another name"),
    "gzip": (lambda file: file.write_bytes(gzip.compress(LINES)), r"packed by gzip .gzip -d."),
    "bzip2": (lambda file: file.write_bytes(bz2.compress(LINES)), "packed by bzip2"),
    "xz": (lambda file: file.write_bytes(lzma.compress(LINES)), "packed by xz"),
    "lzma": (
        lambda file: file.write_bytes(lzma.compress(LINES, lzma.FORMAT_ALONE)),
        "packed by lzma",
    ),
    "snappy": (
        lambda file: file.write_bytes(b"\xff\x06\0\0sNaPpY" + bytes(99)),
        "packed by snappy",
    ),
    "rar": (lambda file: file.write_bytes(b"Rar!\x1a\7\1\0" + bytes(98)), "a rar archive"),
    "zstd": (
        lambda file: file.write_bytes(pyarrow.compress(LINES, "zstd", asbytes=True)),
        "packed by zstd",
    ),
    "pickle": (lambda file: file.write_bytes(pickle.dumps(ARRAY)), "pickled by Python"),
    "parquet": (lambda file: pyarrow.parquet.write_table(TABLE, file), "a parquet file"),
    "arrow": (write_arrow, "an arrow file"),
    "arrow stream": (write_stream, "an arrow stream"),
    "safetensors": (
        lambda file: save_file({"a": torch.arange(3000)}, file),
        "a safetensors file",
    ),
    "lfs": (
        lambda file: file.write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        "a pointer of git-lfs",
    ),
    "Megatron's index": (
        lambda file: file.write_bytes(b"MMIDIDX\0\0" + bytes(99)),
        "Megatron's index",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_of_another_kind_are_named_by_their_kind(tmp_path, name):
    """With a vocabulary that any two bytes are an id of."""
    write, what = WRONG[name]
    for kind, suffix in (("tokens", "bin"), ("text", "txt"), ("jsonl", "jsonl")):
        if kind == "jsonl" and name in ("gzip", "parquet", "arrow", "arrow stream"):
            continue  # which it reads: see test_records.py
        file = tmp_path / kind / f"a.{suffix}"
        file.parent.mkdir()
        write(file)
        data_refused(rf"a.{suffix} is {what}", tmp_path, kind, path=str(file), vocab_size=1 << 17)


@pytest.mark.parametrize(
    "magic, version, dtype, vocab",
    [(20240520, 1, np.uint16, 50257), (20240801, 7, np.uint32, 128256)],
)
def test_the_files_of_llm_c_are_read_as_their_headers_say(tmp_path, magic, version, dtype, vocab):
    """As write_datafile of llm.c/dev/data/data_common.py writes them, whatever data.token_dtype is."""
    tokens = np.random.default_rng(0).integers(vocab, size=1000)
    header = np.zeros(256, dtype=np.int32)
    header[0], header[1], header[2] = magic, version, len(tokens)
    whole = header.tobytes() + tokens.astype(dtype).tobytes()
    (tmp_path / "a.bin").write_bytes(whole)
    for stated in ("uint16", "uint32"):
        data, _ = open_tokens(tmp_path, 8, vocab, token_dtype=stated)
        assert multiset(epoch_of(data)) == multiset(brute_force_rows([tokens.tolist()], 8))
    header[1] += 1  # a version whose tokens may be of another width
    others = (
        whole[:-1],
        whole[:1500],
        whole + b"ab",
        header.tobytes() + tokens.astype("i8").tobytes(),
    )
    for cut in others:
        (tmp_path / "a.bin").write_bytes(cut)
        data_refused(
            r"a.bin has llm.c's header for 1,000 <u. tokens, but .* bytes",
            tmp_path,
            "tokens",
            vocab_size=vocab,
        )


@pytest.mark.parametrize("count", [1, 3, 7, 3000])
def test_shards_of_streaming_are_no_tokens(tmp_path, count):
    """As encode_joint_shard of MosaicML's MDSWriter writes them; any number of samples."""
    items = [np.arange(n % 97 + 1, dtype=np.uint16).tobytes() for n in range(count)]
    about = json.dumps({"column_encodings": ["ndarray:uint16"], "column_names": ["tokens"]})
    offsets = np.array([0, *map(len, items)]).cumsum().astype(np.uint32)
    offsets += 4 + offsets.nbytes + len(about)
    raw = np.uint32(count).tobytes() + offsets.tobytes() + about.encode() + b"".join(items)
    (tmp_path / "shard.00000.mds.bin").write_bytes(raw)
    data_refused(
        "mds.bin is a shard of MosaicML's streaming", tmp_path, "tokens", vocab_size=1 << 17
    )


def test_records_of_tensorflow_are_no_tokens(tmp_path):
    """Each begins with its length and that number's checksum, CRC-32C, of which the standard has one."""
    crc = 0xE3069283
    wanted = ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(b"123456789") == wanted
    random = np.random.default_rng(0)
    for size in (60, 1000, 1 << 17):
        length = np.uint64(size).tobytes()
        head = length + np.uint32(masked_crc(length)).tobytes()
        (tmp_path / "a.bin").write_bytes(head + random.bytes(size) + bytes(4))
        for kind in ("tokens", "text", "jsonl"):
            data_refused("a.bin is a TFRecord file", tmp_path, kind, path=f"{tmp_path}/a.bin")


def test_text_and_unfinished_downloads_are_no_tokens(tmp_path):
    (tmp_path / "a.bin").write_bytes(LINES)
    data_refused(
        "a.bin is text .data.kind=text, or jsonl.", tmp_path, "tokens", vocab_size=1 << 17
    )
    for text, code in (
        ("größer €", "utf-8"),
        ("größer €\n", "utf-16"),
        ("a b ", "utf-16"),
        ("漢字かな", "utf-16"),
    ):
        (tmp_path / "a.bin").write_bytes((text * 999).encode(code))
        data_refused("a.bin is text", tmp_path, "tokens", vocab_size=1 << 17)
    ids = np.random.default_rng(0).integers(1 << 16, size=3000).astype("<u2")
    for first in (0xFEFF, 0xFFFE):  # ids that would be the mark of UTF-16's byte order
        ids[0] = first
        (tmp_path / "a.bin").write_bytes(ids.tobytes())
        assert len(open_tokens(tmp_path, 8, 1 << 16)[0])
    for kind in ("text", "jsonl", "tokens"):
        file = tmp_path / f"{kind}.jsonl.incomplete"
        file.write_bytes(LINES[:50])
        data_refused(
            "incomplete is an unfinished download",
            tmp_path,
            kind,
            path=str(file),
            vocab_size=1 << 17,
        )
    (tmp_path / "b.npy").write_bytes(ARRAY.astype(np.uint16).tobytes())  # as Dolma writes them
    data_refused(
        "b.npy .* it is without a header .raw tokens",
        tmp_path,
        "tokens",
        path=str(tmp_path / "b.npy"),
    )


def test_tables_web_pages_and_addresses_are_no_json_lines(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,response\nq,a\n")
    # as is said
    Dataset.from_csv(str(tmp_path / "a.csv"), cache_dir=str(tmp_path / "c")).to_json(
        tmp_path / "b.jsonl"
    )
    assert json.loads((tmp_path / "b.jsonl").read_text()) == {"prompt": "q", "response": "a"}
    data_refused("a.csv is a table in text", tmp_path, "jsonl", path=str(tmp_path / "a.csv"))
    for head in ("<!DOCTYPE html>", "<!doctype html>", "<html lang='en'>"):
        (tmp_path / "a.jsonl").write_text(head + "Not found" * 20)
        data_refused("a.jsonl is a web page", tmp_path, "jsonl", path=str(tmp_path / "a.jsonl"))
    for address in ("https://a.b/c.jsonl", "s3://a/b.jsonl", "hf://datasets/a/b"):
        data_refused(
            "only files on this machine are read: download it", tmp_path, "jsonl", path=address
        )


def test_json_that_is_no_lines_and_chats_that_are_no_documents(tmp_path):
    rows = [{"instruction": "q", "output": "a"}, {"instruction": "p", "output": "b"}]
    for indent in (None, 2):
        (tmp_path / "a.jsonl").write_text(json.dumps(rows, indent=indent))
        data_refused(
            r"a.jsonl\[0\]: no key 'text' \(it has instruction, output:", tmp_path, "jsonl"
        )
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0], indent=2))
    data_refused("a.jsonl is JSON over several lines", tmp_path, "jsonl")
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [], "id": 3}))
    data_refused(
        r"a.jsonl:1: no key 'text' \(it has messages, id: .*chats need task=sft or lora",
        tmp_path,
        "jsonl",
    )


def test_random_tokens_are_not_taken_for_something_else(tmp_path):
    """What begins a file by chance: 2,000 files of random tokens, common ones among them."""
    random = np.random.default_rng(0)
    for n in range(2000):
        tokens = random.integers(1 << 16, size=300) if n % 2 else random.zipf(1.2, 300) % 50257
        head = tokens.astype("<u2" if n % 4 < 2 else "<u4").tobytes()
        assert kind_of_tokens(tmp_path / "a.bin", head) == ""
