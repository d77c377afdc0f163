"""Write files that survive a power cut: a final name has its whole content, the old or the new."""

import errno
import os
from pathlib import Path

from minitrain.errors import naming


def write_durably(file: Path, text: str) -> None:
    """Give a file this content, all at once.

    Raises OSError if that fails, with the file as it was.
    """
    temporary = file.with_suffix(".tmp")
    write_synced(temporary, text)
    temporary.replace(file)
    sync_folder(file.parent)


def write_synced(file: Path, text: str) -> None:
    """Write a file, and return when the disk has it."""
    with naming(file), file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, where the disk can do so.

    fsync does the same for a file's content.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # there is no such thing: some disks sync files alone
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
