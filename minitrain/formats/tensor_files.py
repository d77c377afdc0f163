"""Open safetensors files that anybody may have written, find those of a model, and write new ones.

The package checks a header's claims: every tensor's bytes lie in the file, in turn, without gaps
or overlaps, and are as many as its shape and type need. So nothing is ever allocated that is not
there. The length of the header itself is checked here. Of a name that is given twice the last entry
counts.
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
# bytes, enough for 100,000 tensors; the package would parse 100 MB for half a minute
LONGEST_HEADER = 16 << 20
# of weight files: transformers', diffusers'
STEMS = ("model", wan_names.STEM)
# pickled ones could run any code
OTHER_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf")


def open_tensors(file: str | Path) -> safe_open:
    """Open a file, to be used in a `with`.

    Raises InputError for one that is missing, damaged or too large to map.
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
        # ValueError: a zero byte in the name; RuntimeError: torch's own, for want of memory
        whole = " (is the download whole?)" if isinstance(error, SafetensorError) else ""
        raise InputError(f"{file} cannot be read as safetensors: {error}{whole}") from None


def read_headers(file: str | Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype, as safetensors spells it, of every tensor in the file, by name.

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
    """Write a whole new file. Raises InputError where it cannot be written, on a full disk too.

    It gets the rights of any other: from 0.8 on, the package gives them to the owner alone.
    """
    try:
        save_file(tensors, file, metadata)
    except SafetensorError as error:
        raise InputError(f"{file} cannot be written: {error}") from None
    # the mask cannot be read without being set
    mask = os.umask(0)
    os.umask(mask)
    # some file systems know no rights
    with suppress(OSError):
        os.chmod(file, 0o666 & ~mask)


# --- the files of a folder


class StoredTensor(NamedTuple):
    """A tensor of a file. dtype: as safetensors spells it."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Return every tensor of the files by name, in their order, from headers alone."""
    stored = {}
    for file in files:
        for name, (shape, dtype) in read_headers(file).items():
            if name in stored:
                raise InputError(f"{file}: tensor {name} is also in {stored[name].file}")
            stored[name] = StoredTensor(name, file, shape, dtype)
    return stored


def single_and_index(stem: str) -> tuple[str, str]:
    """Return the names of a file with all weights, and of the index of several."""
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
