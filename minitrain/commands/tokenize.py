"""Turn texts into tokens once, before training: minitrain tokenize --out FOLDER FILES...

FILES are JSON lines, arrays or tables, a document an object, or texts, a document each; folders and
globs stand for their files, a folder with objects for those that hold some. Each process takes a
group of files, whose tokens it holds in memory, and writes a .npy file of uint16 or uint32, for
data.kind=tokens: the same rows as from the texts. The tokenizer lies beside them, and is saved with
a model trained on them.
"""

import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from shlex import quote

import numpy as np

from minitrain.errors import InputError
from minitrain.run.launch import cli

# groups of files, at most
MOST = 1024
OPTIONS = {
    "--tokenizer": (cli.home_path, ..., "a folder, or bytes"),
    "--out": (cli.home_path, ..., "a new folder"),
    "--field": (str, "text", "of JSON and tables: the key that holds the text"),
    "--kind": (["auto", "text", "jsonl"], "auto", "of all files; auto: by their first bytes"),
    "--processes": (cli.positive(int), None, "by default one per core"),
}


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain tokenize", description=__doc__)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(arguments)
    from minitrain.data.text.text_rows import find_documents
    from minitrain.data.tokenizer import load_tokenizer
    from minitrain.run.checkpoint.checkpoint_files import make_empty

    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_id is None:
        raise InputError(f"--tokenizer {options.tokenizer} names no eos, which ends documents")
    out = Path(options.out)
    if out.exists():
        raise InputError(f"--out {out} exists already (name a new folder)")
    files, note = find_documents(options.files, options.field, options.kind)
    size = 1 + (len(files) - 1) // MOST
    groups = [files[start : start + size] for start in range(0, len(files), size)]
    work = out.with_name(f"{out.name}.tmp")
    make_empty(work)
    try:
        tokenizer.save(work)
        write = partial(write_tokens, options.tokenizer, options.field, work, kind=options.kind)
        counts = write_groups(write, groups, options.processes)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    documents, tokens = map(sum, zip(*counts, strict=True))
    print(
        f"{out} holds {tokens:,} tokens of {documents:,} documents in {len(groups):,} files{note}"
    )
    words = [quote(f"data.{key}={out}") for key in ("path", "tokenizer")]
    told = f"{' '.join(words)} data.document_end={tokenizer.eos_id}"
    print(f"next: minitrain train --config train/pretrain-tokens {told}")


def write_groups(
    write: Callable, groups: list[list[Path]], processes: int | None
) -> list[tuple[int, int]]:
    """Return write(number, group) of each group of files, written by several processes.

    An error, or a signal, ends them all.
    """
    others = active_children()
    context = get_context("spawn")
    # a terminal's Ctrl-C is told once, by this process
    ignored = signal.SIGINT, signal.SIG_IGN
    with ProcessPoolExecutor(processes, context, signal.signal, ignored) as pool:
        try:
            written = pool.map(write, range(len(groups)), groups)
            return list(cli.bar(written, len(groups), "file"))
        except BaseException:
            for process in active_children():
                if process not in others:
                    process.kill()
            raise


def write_tokens(
    tokenizer: str, field: str, folder: Path, number: int, files: list[Path], kind: str = "auto"
) -> tuple[int, int]:
    """Write the tokens of some files as number.npy. Returns how many documents and tokens."""
    from minitrain.data.text.text_rows import read_documents, tokenize
    from minitrain.data.tokenizer import load_tokenizer

    corpus = tokenize(read_documents(files, field, kind), load_tokenizer(tokenizer))
    np.save(folder / f"{number:05d}.npy", corpus.stores[0])
    return len(corpus.lengths), len(corpus)
