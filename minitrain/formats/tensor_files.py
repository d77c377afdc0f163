"""Open safetensors files from untrusted sources, find those of a model, and write new ones.

The safetensors package checks a file's header: the bytes of all tensors follow each other without
gaps or overlaps, are as many as their shapes and types need, and are in the file. So a damaged header
never causes a large allocation. Only the length of the header is checked here. If a name is given
twice, the last entry counts.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitrain.errors import InputError
from minitrain.formats import wan_names
from minitrain.formats.json_files import read_json
from minitrain.formats.magic import kind_of_binary, kind_of_unfinished, read_head

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# dtypes of stored weights that are not quantized, in safetensors' spelling
FLOATS = tuple(DTYPES)
# bytes, enough for 100,000 tensors; the package would need half a minute to parse 100 MB
LONGEST_HEADER = 16 << 20
# beginnings of the names of weight files: transformers', diffusers'
STEMS = ("model", wan_names.STEM)
# suffixes of weights that are not read: pickled ones could run any code
OTHER_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf")


def open_tensors(file: str | Path) -> safe_open:
    """Open a file, for use in a `with` statement.

    Raises InputError for a file that is missing, damaged or too large to map.
    """
    try:
        head = read_head(file)
        what = "" if head[8:9] == b"{" else kind_of_binary(Path(file), head)
        if what:
            raise InputError(f"{file} is {what}, not safetensors")
        header = int.from_bytes(head[:8], "little")
        if header > LONGEST_HEADER:
            claim = f"its header claims {header:,} bytes, more than {LONGEST_HEADER:,}"
            raise InputError(f"{file} cannot be read as safetensors: {claim}")
        return safe_open(file, framework="pt")
    except (OSError, ValueError, SafetensorError, MemoryError, RuntimeError) as error:
        # ValueError: a zero byte in the file's name; RuntimeError: torch is out of memory
        whole = " (is the download whole?)" if isinstance(error, SafetensorError) else ""
        raise InputError(f"{file} cannot be read as safetensors: {error}{whole}") from None


def read_headers(file: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and safetensors' name of the dtype of every tensor in a file, by name.

    Raises InputError as `open_tensors` does.
    """
    with open_tensors(file) as contents:
        slices = {name: contents.get_slice(name) for name in contents.keys()}  # noqa: SIM118
        return {
            name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()
        }


def write_tensors(
    tensors: dict[str, Tensor], file: str | Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a new file with the usual permissions. Raises InputError, also if the disk is full.

    From version 0.8 on, the safetensors package would give permissions to the owner only.
    """
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        raise InputError(f"{file} cannot be written: {error}") from None
    # the only way to read the mask is to set it
    mask = os.umask(0)
    os.umask(mask)
    # some file systems have no permissions
    with suppress(OSError):
        os.chmod(file, 0o666 & ~mask)


# --- the files of a folder


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    # safetensors' name, such as BF16
    dtype: str


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of the files by name, in their order; read only headers."""
    stored = {}
    for file in files:
        for name, (shape, dtype) in read_headers(file).items():
            if name in stored:
                raise InputError(f"{file}: tensor {name} is also in {stored[name].file}")
            stored[name] = StoredTensor(name, file, shape, dtype)
    return stored


def single_and_index(stem: str) -> tuple[str, str]:
    """Return the name of a file with all weights, and that of the index of several files."""
    return f"{stem}.safetensors", f"{stem}.safetensors.index.json"


def weight_files(path: str | Path) -> list[Path]:
    """Return the safetensors files of folder `path` that hold its model."""
    path = Path(path)
    for stem in STEMS:
        single, index = (path / name for name in single_and_index(stem))
        if single.exists():
            return [single]
        if index.exists():
            return _listed(index)
    known = " or ".join(single_and_index(stem)[0] for stem in STEMS)
    others = sorted(file.name for file in path.glob("*.*") if file.suffix in OTHER_WEIGHTS)
    hint = "(save it again with save_pretrained of transformers or diffusers)"
    hint = f": {others[0]} is not read {hint}" if others else kind_of_unfinished(path)
    raise InputError(f"{path} holds no {known}, nor an index of shards{hint}")


def _listed(index: Path) -> list[Path]:
    """Return the files that an index names. Raises InputError for files of other folders."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise InputError(f"{index}: weight_map must map tensor names to file names")
    for name in names.values():
        if Path(name).name != name or "\0" in name or not name.endswith(".safetensors"):
            raise InputError(
                f"{index}: weight_map names {name!r}, which must be a safetensors file of the same folder"
            )
    return [index.with_name(name) for name in sorted(set(names.values()))]


def check_stored(stored: dict, key: str, shape: tuple, dtypes: tuple, path: Path) -> None:
    """Raise InputError unless tensor `key` is in `path` with this shape and one of these dtypes."""
    if key not in stored:
        raise InputError(f"{path}: tensor {key} of shape {list(shape)} is missing")
    tensor = stored[key]
    where = f"{tensor.file}: tensor {key}"
    if tensor.shape != shape:
        raise InputError(f"{where} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        expected = ", ".join(dtypes)
        raise InputError(f"{where} is stored as {tensor.dtype}, expected one of {expected}")
