"""Opening safetensors files that anybody may have written, and writing some that others may read.

The package checks a header's claims: every tensor's bytes lie in the file, in turn, without gaps
or overlaps, and are as many as its shape and type need. So nothing is ever allocated that is not
there. The length of the header itself is checked here. Of a name that is given twice the last entry
counts.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitrain.errors import InputError
from minitrain.formats.magic import kind_of_binary, read_head

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
