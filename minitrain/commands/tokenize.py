"""Turn texts into tokens once, before training: minitrain tokenize --out FOLDER FILES...

FILES are JSON lines, arrays or tables, a document an object, or texts, a document each; folders and
globs stand for their files, a folder with objects for those that hold some. Each process takes a
group of files, whose tokens it holds in memory, and writes a .npy file of uint16 or uint32, for
data.kind=tokens: the same rows as from the texts. The tokenizer lies beside them, and is saved with
a model trained on them. What is finished when it is stopped stays in OUT.unfinished: the same command
continues, and makes only those files anew whose texts, tokenizer or options have changed.
"""

import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from shlex import quote

import numpy as np

from minitrain.data.faults import wording
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


WORDING = wording.OPTIONS._replace(chats="chats are read by minitrain train task=sft")


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain tokenize", description=__doc__)
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(arguments)
    from minitrain.data.text.documents import find_documents
    from minitrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.tokenizer)
    if tokenizer.eos_id is None:
        raise InputError(f"--tokenizer {options.tokenizer} names no eos, which ends documents")
    out = Path(options.out)
    cli.check_new(out)
    files, note = find_documents(options.files, options.field, options.kind, WORDING)
    size = 1 + (len(files) - 1) // MOST
    groups = [files[start : start + size] for start in range(0, len(files), size)]
    work = out.with_name(f"{out.name}.unfinished")
    work.mkdir(parents=True, exist_ok=True)
    try:
        write = partial(write_tokens, options.tokenizer, options.field, work, kind=options.kind)
        counts = write_groups(write, groups, options.processes)
        with cli.new_folder(out) as whole:
            tokenizer.save(whole)
            for number in range(len(groups)):
                name = f"{number:05d}.npy"
                (work / name).replace(whole / name)
    except BaseException:
        if done := len([*work.glob("*.done")]):
            kept = f"{done:,} of {len(groups):,} files: the same command continues"
            print(f"note: {work} keeps {kept}", file=sys.stderr)
        raise
    finally:
        if out.exists() or not [*work.glob("*.done")]:
            shutil.rmtree(work, ignore_errors=True)
    documents, tokens = map(sum, zip(*counts, strict=True))
    print(
        f"{out} holds {tokens:,} tokens of {documents:,} documents in {len(groups):,} files{note}"
    )
    words = [quote(f"data.{key}={out}") for key in ("path", "tokenizer")]
    settings = f"{' '.join(words)} data.document_end={tokenizer.eos_id}"
    print(f"next: minitrain train --config train/pretrain-tokens {settings}")


def write_groups(
    write: Callable, groups: list[list[Path]], processes: int | None
) -> list[tuple[int, int]]:
    """Return write(number, group) of each group of files, written by several processes.

    An error, or a signal, ends them all.
    """
    others = active_children()
    context = get_context("spawn")
    # Ctrl-C reaches all processes of the terminal; only this one handles it
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
    """Write the tokens of some files as number.npy, unless an earlier call has.

    Returns how many documents and tokens. number.done has them too, and what the tokens were made of.
    """
    from minitrain.data.text.corpus import tokenize
    from minitrain.data.text.documents import read_documents, stamps_of
    from minitrain.data.text.token_cache import digest_of
    from minitrain.data.tokenizer import load_tokenizer

    made_of = digest_of((field, kind, stamps_of(files, tokenizer)))
    file = folder / f"{number:05d}.npy"
    done = file.with_suffix(".done")
    with suppress(OSError, ValueError):
        documents, tokens, earlier = done.read_text().split()
        if earlier == made_of and file.exists():
            return int(documents), int(tokens)
    # beside other tokens it would be wrong
    done.unlink(missing_ok=True)
    corpus = tokenize(read_documents(files, field, kind, WORDING), load_tokenizer(tokenizer))
    np.save(file, corpus.stores[0])
    counts = len(corpus.lengths), len(corpus)
    done.write_text(f"{counts[0]} {counts[1]} {made_of}")
    return counts
