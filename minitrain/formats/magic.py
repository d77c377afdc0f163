"""Recognize a file of the wrong kind by its first bytes or its name, and tell what to do with it."""

import re
import struct
from functools import cache
from pathlib import Path

ADAPTER_CONFIG = "adapter_config.json"
LFS = b"version https://git-lfs.github.com/spec"
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".aria2")
# first bytes of a file (with Python's escapes) = its kind (what to do)
SIGNATURES = r"""
version https://git-lfs.github.com/spec = a pointer of git-lfs, not the file itself (git lfs pull)
<!DOCTYPE html = a web page (of a download that failed?)
<!doctype html = a web page (of a download that failed?)
<html = a web page (of a download that failed?)
PK\x03\x04 = a zip archive, as numpy.savez and torch.save write (unpack it, or save its arrays as .npy)
\x93NUMPY = a .npy file by another name (rename it)
\x1f\x8b\x08 = packed by gzip (gzip -d)
(\xb5/\xfd = packed by zstd (zstd -d)
BZh = packed by bzip2 (bzip2 -d)
\xfd7zXZ = packed by xz (xz -d)
\x04"M\x18 = packed by lz4 (lz4 -d)
]\0\0\x80\0 = packed by lzma (xz -d --format=lzma)
\xff\x06\0\0sNaPpY = packed by snappy (unpack it)
7z\xbc\xaf = a 7z archive (unpack it)
Rar! = a rar archive (unpack it)
PAR1 = a parquet file ({kind}jsonl reads it)
ARROW1 = an arrow file ({kind}jsonl reads it)
GGUF = a GGUF file, as of llama.cpp (use the model's safetensors)
\x80\x02\x8a\n = pickled by torch (save its arrays as .npy, its weights as safetensors)
\x80\x04\x95 = pickled by Python (save its arrays as .npy)
\x80\x05\x95 = pickled by Python (save its arrays as .npy)
MMIDIDX = Megatron's index of a .bin file (give the .bin, beside which it is read)
"""
# a JSON object over several lines
SPREAD = re.compile(rb"(\xef\xbb\xbf)?\s*\{[ \t]*\r?\n")


@cache
def signatures() -> dict[bytes, str]:
    """Return the kinds of files by their first bytes."""
    return {
        first.encode().decode("unicode_escape").encode("latin1"): kind
        for first, kind in (line.split(" = ") for line in SIGNATURES.strip().splitlines())
    }


def read_head(file: Path) -> bytes:
    with open(file, "rb") as raw:
        return raw.read(4096)


def stand_in_kind(file: Path, head: bytes) -> str:
    """Return the kind of an unfinished download or of a pointer to a file; "" for other files."""
    if file.suffix in UNFINISHED:
        return "an unfinished download (finish it, or remove it)"
    return signatures()[LFS] if head.startswith(LFS) else ""


def kind_of_binary(file: Path, head: bytes, kind: str = "data.kind=") -> str:
    """Return the kind of a binary file that begins with `head`; "" if it is not recognized.

    kind: what stands before another kind of data, where the file is one.
    """
    length = int.from_bytes(head[:8], "little")
    if head[8:10] == b'{"' and length < 1 << 27:
        return "a safetensors file (of tensors, not of tokens or text)"
    if head[:4] == b"\xff" * 4 and 0 < int.from_bytes(head[4:8], "little") < 1 << 20:
        return f"an arrow stream, as datasets saves them ({kind}jsonl reads it)"
    if length < 1 << 40 and head[8:12] == masked_crc(head[:8]).to_bytes(4, "little"):
        return "a TFRecord file (save its tokens as .npy, its texts as JSONL)"
    known = (what for magic, what in signatures().items() if head.startswith(magic))
    return stand_in_kind(file, head) or next(known, "").format(kind=kind)


def masked_crc(data: bytes) -> int:
    """Return TFRecord's checksum: CRC-32C, rotated and shifted (tensorflow/tsl/lib/hash/crc32c.h).

    A record begins with its length and the checksum of the length.
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def kind_of_folder(folder: Path) -> str:
    """Return what a folder holds instead of a model, as the end of a sentence; "" if unknown."""
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    known = {
        ADAPTER_CONFIG: "an adapter (give it as --adapter, or as lora.path, and its base model as the model)",
        "config.json": "a model (give it as the model, and the adapter's folder as the adapter)",
        "snapshots": "a folder of the hub's cache (give the folder below its snapshots/)",
        "metrics.jsonl": "a run that has not ended (its own command continues it, and writes the model at the end; "
        f"minitrain export --run {folder} --out FOLDER writes its newest checkpoint)",
        ".metadata": "a distributed checkpoint of torch (save it as safetensors)",
    }
    if checkpoint := kind_of_checkpoint(folder):
        return checkpoint
    found = next((what for name, what in known.items() if name in names), "")
    suffixes = {Path(name).suffix: name for name in names}
    if not found and (unfinished := kind_of_unfinished(folder)):
        return unfinished
    if not found and (
        others := suffixes.keys() & {".gguf", ".pt", ".pth", ".bin", ".ckpt", ".nemo"}
    ):
        found = f"{suffixes[min(others)]}, which is not read (save it as safetensors with a config, as on the hub)"
    return f"; it is {found}" if found else ""


def kind_of_unfinished(folder: Path) -> str:
    """Return an unfinished download in a folder, as the end of a sentence; "" if there is none."""
    names = [file.name for file in folder.glob("*") if file.suffix in UNFINISHED]
    if not names:
        return ""
    return f"; it is {min(names)}, an unfinished download (the same download again finishes it)"


def kind_of_checkpoint(folder: Path) -> str:
    """Return how to export the model of a folder that is a run's checkpoint, or holds checkpoints.

    It is the end of a sentence, "" for other folders.
    """
    step = re.compile(r"step-(\d+)")
    names = [file.name for file in folder.glob("*")]
    run = folder.parent
    option = ""
    if ".metadata" in names and (found := step.fullmatch(folder.name)):
        run = run.parent
        option = f" --step {int(found[1])}"
    elif not any(map(step.fullmatch, names)):
        return ""
    command = f"minitrain export --run {run}{option} --out FOLDER"
    return f"; it is a checkpoint of a run ({command} writes it as a model)"


def library_of(settings: dict) -> str:
    """Return the library that wrote an adapter_config.json; for PEFT, the type of the adapters."""
    if {"fine_tune_type", "lora_parameters"} & settings.keys():
        return "adapters of mlx-lm (merge them with mlx_lm.fuse)"
    if isinstance(settings.get("config"), dict):
        return "adapters of the library adapters (merge them with its merge_adapter)"
    return str(settings.get("peft_type"))


def kind_of_json(file: Path, head: bytes, kind: str) -> str:
    """Return the kind of a file that is neither JSON lines nor a JSON array; "" if it may be."""
    if file.suffix in (".csv", ".tsv"):
        return "a table in text (datasets' Dataset.from_csv(FILE).to_json(OUT) converts it)"
    if SPREAD.match(head):
        return "JSON over several lines, not an object a line (jq -c . FILE > FILE.jsonl)"
    return kind_of_binary(file, head, kind)


def kind_of_tokens(file: Path, head: bytes) -> str:
    """Return the kind of a file that does not hold raw tokens; "" if it may hold them."""
    found = kind_of_binary(file, head)
    if found or len(head) < 64:
        return found
    # a shard of MosaicML's streaming (.mds) begins with the number of its samples and their offsets; the
    # first sample follows these and a description in JSON
    count, *begins = struct.unpack("<9I", head[:36])
    begins = begins[: count + 1]
    gap = begins[0] - 4 * (count + 2)
    described = head[4 * (count + 2) :][:2] in (b'{"', b"") and 0 < gap < 1 << 16
    if count and described and begins == sorted({*begins}):
        return "a shard of MosaicML's streaming (save its tokens as .npy)"
    code = "utf-16" if re.match(rb"\xff\xfe|\xfe\xff", head) else "utf-8"
    text = head.decode(code, "ignore")
    # the head may end within a character
    whole = len(text.encode(code)) >= len(head) - 3
    if whole and all(c.isprintable() or c in "\t\n\r" for c in text):
        return "text (data.kind=text, or jsonl)"
    return ""
