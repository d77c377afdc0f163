"""The safetensors files of a folder: which of them hold its model, and which tensors are in them."""

from pathlib import Path
from typing import NamedTuple

from minitrain.errors import InputError
from minitrain.formats import wan_names
from minitrain.formats.json_files import read_json
from minitrain.formats.tensor_files import read_headers

# of weight files: transformers', diffusers'
STEMS = ("model", wan_names.STEM)
# pickled ones could run any code
OTHER_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf")


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
    hint = f": {others[0]} is not read {hint}" if others else ""
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
