"""Write files that survive a power cut: under its name, a file has all its old or new content."""

import errno
import os
from pathlib import Path

from minitrain.errors import writing


def write_durably(file: Path, text: str) -> None:
    """Replace a file's content atomically. Raises OSError, with the file unchanged, on failure."""
    temporary = file.with_suffix(".tmp")
    write_synced(temporary, text)
    temporary.replace(file)
    sync_folder(file.parent)


def write_synced(file: Path, text: str) -> None:
    """Write a file, and return when it is on disk."""
    with writing(file), file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut, as fsync does for a file's content.

    File systems that cannot do this are ignored.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems sync files only
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
