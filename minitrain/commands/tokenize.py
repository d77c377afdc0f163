"""Turn texts into tokens once, before training: minitrain tokenize --out FOLDER FILES...

FILES are JSON lines, arrays or tables, a document an object, or texts, a document each; folders and
globs stand for their files, a folder with objects for those that hold some. Each process takes a
group of files, whose tokens it holds in memory, and writes a .npy file of uint16 or uint32, for
data.kind=tokens: the same rows as from the texts. The tokenizer lies beside them, and is saved with
a model trained on them.
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
    tokenizer.save(work)
    write = partial(write_tokens, options.tokenizer, options.field, work, kind=options.kind)
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        written = pool.map(write, range(len(groups)), groups)
        counts = list(tqdm(written, total=len(groups), unit="file"))
    work.rename(out)
    documents, tokens = map(sum, zip(*counts, strict=True))
    print(
        f"{out} holds {tokens:,} tokens of {documents:,} documents in {len(groups):,} files{note}"
    )
    words = [quote(f"data.{key}={out}") for key in ("path", "tokenizer")]
    told = f"{' '.join(words)} data.document_end={tokenizer.eos_id}"
    print(f"next: minitrain train --config train/pretrain-tokens {told}")


def write_tokens(
    tokenizer: str, field: str, folder: Path, number: int, files: list[Path], kind: str = "auto"
) -> tuple[int, int]:
    """Write the tokens of some files as number.npy. Returns how many documents and tokens."""
    from minitrain.data.text.text_rows import read_documents, tokenize
    from minitrain.data.tokenizer import load_tokenizer

    corpus = tokenize(read_documents(files, field, kind), load_tokenizer(tokenizer))
    np.save(folder / f"{number:05d}.npy", corpus.stores[0])
    return len(corpus.lengths), len(corpus)
