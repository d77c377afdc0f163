"""Keep the tokens of texts in a file of data.cache, from which rows are read.

Then neither texts nor tokens need to fit in memory, only 40 bytes per document. One process writes,
the others on its machines wait for it. The file is found again by the settings that make it, by size
and time of the data's and the tokenizer's files, and by the code that reads them.
"""

import fcntl
import hashlib
from functools import cache
from pathlib import Path

import numpy as np

from minitrain.data.faults.skips import Skips
from minitrain.data.files import stamp_of
from minitrain.data.text.corpus import Corpus, Documents, in_one_store, token_dtype, write_tokens
from minitrain.data.text.token_files import TokenFile
from minitrain.data.tokenizer import Tokenizer
from minitrain.errors import InputError, as_input_error


def keep_tokens(
    documents: Documents, tokenizer: Tokenizer, folder: str, made_of: tuple, skips: Skips
) -> Corpus:
    """Return what `tokenize` does, with the tokens in a file of `folder`.

    made_of: what tells the file from others. skips: gets those of the time when it was written.
    """
    file = Path(folder, f"{digest_of(made_of)}.tokens")
    index = file.with_suffix(".npz")
    with as_input_error(f"data.cache={folder} cannot be used"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (index.exists() and file.exists()):
                with file.open("wb") as out:
                    lengths, sizes = write_tokens(documents, tokenizer, out)
                skipped = [str(skips.count), skips.first]
                written = file.with_suffix(".part.npz")
                np.savez(written, lengths=lengths, sizes=sizes, skipped=skipped)
                written.rename(index)
        return _read_kept(file, index, token_dtype(tokenizer), skips)


def digest_of(made_of: tuple) -> str:
    """Return a digest of what decides the tokens of some files, with this version of minitrain/data."""
    return hashlib.sha256(repr((readers_digest(), made_of)).encode()).hexdigest()[:32]


@cache
def readers_digest() -> str:
    """Return a digest of minitrain/data: another version may make other tokens of the same files."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read_kept(file: Path, index: Path, dtype: np.dtype, skips: Skips) -> Corpus:
    """Return the corpus of a file that `keep_tokens` wrote. Raises InputError if it is damaged."""
    stamp = stamp_of(file)
    try:
        with np.load(index) as kept:
            lengths = kept["lengths"]
            sizes = kept["sizes"]
            skips.count = int(kept["skipped"][0])
            skips.first = str(kept["skipped"][1])
        whole = stamp[0] == lengths.sum() * dtype.itemsize
    # NumPy and zipfile raise nearly anything for a damaged file
    except Exception:
        whole = False
    if not whole:
        raise InputError(f"{index} and the tokens beside it are damaged (remove them)")
    store = TokenFile(file, dtype, 0, lengths, np.iinfo(dtype).max + 1, stamp)
    return in_one_store(store, lengths, sizes)
