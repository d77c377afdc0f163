"""Turn texts into tokens once, before training: minitrain tokenize --out FOLDER FILES...

FILES are .jsonl files or tables, a document a line, or texts, a document each; folders and globs
stand for their files. Each process takes a group of files, whose tokens it holds in memory, and
writes a .npy file of uint16 or uint32, for data.kind=tokens: the same rows as from the texts. The
tokenizer lies beside them, and is saved with a model trained on them.
"""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from shlex import quote

import numpy as np
from tqdm import tqdm

from minitrain.errors import InputError
from minitrain.run.launch import cli

# groups of files, at most
MOST = 1024
OPTIONS = {
    "--tokenizer": (cli.home_path, ..., "a folder, or bytes"),
    "--out": (cli.home_path, ..., "a new folder"),
    "--field": (str, "text", "of .jsonl and tables: the key that holds the text"),
    "--processes": (cli.positive(int), None, "by default one per core"),
}


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain tokenize", description=__doc__)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(arguments)
    from minitrain.data.files import find_files
    from minitrain.data.tokenizer import load_tokenizer
    from minitrain.run.checkpoint.checkpoint_files import make_empty
    from minitrain.settings import Data

    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_id is None:
        raise InputError(f"--tokenizer {options.tokenizer} names no eos, which ends documents")
    out = Path(options.out)
    if out.exists():
        raise InputError(f"--out {out} exists already (name a new folder)")
    files = find_files(Data("text", options.files))
    size = 1 + (len(files) - 1) // MOST
    groups = [files[start : start + size] for start in range(0, len(files), size)]
    work = out.with_name(f"{out.name}.tmp")
    make_empty(work)
    tokenizer.save(work)
    write = partial(write_tokens, options.tokenizer, options.field, work)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        written = pool.map(write, range(len(groups)), groups)
        counts = list(tqdm(written, total=len(groups), unit="file"))
    work.rename(out)
    documents, tokens = map(sum, zip(*counts, strict=True))
    print(f"{out} holds {tokens:,} tokens of {documents:,} documents in {len(groups):,} files")
    words = [quote(f"data.{key}={out}") for key in ("path", "tokenizer")]
    told = f"{' '.join(words)} data.document_end={tokenizer.eos_id}"
    print(f"next: minitrain train --config train/pretrain-tokens {told}")


def write_tokens(
    tokenizer: str, field: str, folder: Path, number: int, files: list[Path]
) -> tuple[int, int]:
    """Write the tokens of some files as number.npy. Returns how many documents and tokens."""
    from minitrain.data.text.text_rows import read_documents, tokenize
    from minitrain.data.tokenizer import load_tokenizer

    corpus = tokenize(read_documents(files, field), load_tokenizer(tokenizer))
    np.save(folder / f"{number:05d}.npy", corpus.stores[0])
    return len(corpus.lengths), len(corpus)
