"""Write and check the files of a checkpoint: its description, and the checksums of the others.

`extra.json` is written last. It holds the size and CRC-32 of every other file, and its own CRC-32.
Checksums find accidents (truncated files, flipped bits, parts that were not copied), not attacks.
Against these, names in `extra.json` must be those of regular files in the folder, and DCP's index is
read as checkpoint_index.py says. A file that is missing or unreadable on its disk counts as damaged.
Other failures to read, such as those of a network or of too many open files, may be temporary, and
are raised.

Cost: CRC-32 takes half a second per gigabyte and core. After saving, each rank reads its own part back
from the page cache; before loading, the ranks share the reading of all files.
"""

import errno
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from minitrain.errors import InputError
from minitrain.run.checkpoint.durable import write_synced

DESCRIPTION = "extra.json"
INDEX = ".metadata"
# bytes per read
BLOCK = 1 << 22
# errors that mean that a file's content is lost
LOST = (errno.ENOENT, errno.ENOTDIR, errno.EIO)


class FileSum(NamedTuple):
    """What a file must be when it is read again."""

    # in bytes
    size: int
    # CRC-32
    crc: int


class Damaged(InputError):
    """A checkpoint's files differ from what was written; an earlier checkpoint may be undamaged."""


def measure(file: Path) -> FileSum:
    """Return the size and the checksum of a file. Raises OSError if it cannot be read."""
    size = crc = 0
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return FileSum(size, crc)


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise Damaged instead of an OSError that means that the file's content is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in LOST:
            raise
        raise Damaged(f"{file.name} cannot be read: {error.strerror}") from error


def size_of(file: Path) -> int:
    """Return a file's size in bytes. Raises Damaged for a pipe or a device, which may never end."""
    size = file.stat().st_size
    if not file.is_file():
        raise Damaged(f"{file.name} is not a regular file")
    return size


def check_file(file: Path, expected: FileSum) -> None:
    """Raise Damaged if a file is missing, or has another size or content than expected.

    Raises OSError if reading fails otherwise.
    """
    with reading(file):
        size = size_of(file)
        if size != expected.size:
            raise Damaged(
                f"{file.name} has {size:,} bytes, and had {expected.size:,} when it was written"
            )
        if measure(file) != expected:
            raise Damaged(f"{file.name} has other content than when it was written (CRC-32)")


def find_damage(folder: Path, share: int, shares: int) -> str | None:
    """Return what is wrong with a checkpoint's description or files; None if nothing is.

    Only files number share, share + shares, ... are checked.
    """
    try:
        files = read_description(folder)["files"]
        for name in sorted(files)[share::shares]:
            check_file(folder / name, files[name])
    except Damaged as error:
        return str(error)
    return None


def write_description(folder: Path, description: dict) -> None:
    """Write a checkpoint's description as JSON. Its `files` are the FileSum of each file by name."""
    write_synced(folder / DESCRIPTION, json.dumps(description | {"crc32": own_sum(description)}))


def read_description(folder: Path) -> dict:
    """Return what `write_description` wrote.

    Raises Damaged if it was changed, and OSError if reading fails.
    """
    file = folder / DESCRIPTION
    try:
        with reading(file):
            size_of(file)
            description = json.loads(file.read_text("utf-8"))
        if description.pop("crc32") != own_sum(description):
            raise ValueError("it has other content than when it was written (CRC-32)")
        check_description(**description)
        description["files"] = {
            name: FileSum(*pair) for name, pair in description["files"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(
            f"{DESCRIPTION} is not the description of a checkpoint: {error!r}"
        ) from error
    return description


def check_description(optimizer: str, base: str, extra: dict, files: dict[str, list]) -> None:
    """Raise ValueError unless `extra` is an object, and `files` has a size and a sum for each name."""
    if not (isinstance(extra, dict) and isinstance(files, dict) and INDEX in files):
        raise ValueError(f"extra and files must be objects, and files must have {INDEX}")
    for name, value in files.items():
        if Path(name).name != name or not name.isprintable():
            raise ValueError(f"{name!r} is not the name of a file in its folder")
        if not isinstance(value, list) or [type(number) for number in value] != [int, int]:
            raise ValueError(f"{name!r} has {value!r}, which is not a size and a checksum")


def own_sum(description: dict) -> int:
    """Return the CRC-32 of a description."""
    return zlib.crc32(json.dumps(description, sort_keys=True).encode())
