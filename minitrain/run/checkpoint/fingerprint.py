"""Store digests of a run's data, code and settings, to notice changes when the run continues.

Row n is a pure function of the seed, n and the files. If a file changes before a run continues, rows
come twice or never, and nothing else would show it, so this is an error. Other code and settings are
often intended, so they give a note. Large files are sampled: a change that keeps the size and misses
all samples is not noticed.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minitrain.data.files import find_files
from minitrain.data.sources import data_by_source, train_and_held_out
from minitrain.data.tokenizer import tokenizer_file, with_companions
from minitrain.errors import InputError, reading
from minitrain.formats.peft import adapter_files
from minitrain.formats.tensor_files import weight_files
from minitrain.run.checkpoint.durable import write_durably
from minitrain.run.config.load import to_dict
from minitrain.run.config.task_checks import MADE_UP
from minitrain.run.launch.same_run import check_same, code_digests, flatten_settings
from minitrain.settings import Config, Data
from minitrain.training.distillation import BASE

# blocks per file, and bytes per block; a file of fewer bytes is read as a whole
SAMPLES = 16
SAMPLE = 4096
# settings that choose the files of the data
NAMES_DATA = {"data.kind", "data.path", "data.sources", "data.exclude", "data.tokenizer"}
# parts of a fingerprint -> the settings that choose their files
PARTS = {"files": NAMES_DATA, "held_out": NAMES_DATA | {"data.validation_path"}}
# settings that choose rows and their order, besides all of `data`
CHOOSE_ROWS = {"seed", "task", "batch.global", "batch.seq_len", "grpo.prompts"}


def agreed_fingerprint(config: Config) -> dict[str, dict[str, str]]:
    """Return for each of PARTS a digest of every file of the data, by path, including tokenizers.

    All ranks call it. Raises InputError if they do not see the same files of data and of the model to
    start from, of which each node may have its own copy.
    """
    sources = config.data, train_and_held_out(config)[1].data
    data = {
        part: {str(file): file_digest(file) for file in data_files(source)}
        for part, source in zip(PARTS, sources, strict=True)
    }
    if dist.get_world_size() > 1:
        model = {str(file): file_digest(file) for file in model_files(config)}
        check_same({"data": data["files"], "held-out data": data["held_out"], "model": model})
    return data


def data_files(data: Data) -> list[Path]:
    """Return the files of the data, including indices and tokenizers; none for generated data."""
    if data.sources:
        return [file for source in data_by_source(data).values() for file in data_files(source)]
    if not data.path or data.kind in MADE_UP:
        return []
    files = find_files(data)
    indices = [file.with_suffix(".idx") for file in files if file.suffix == ".bin"]
    files += filter(Path.exists, indices)
    if data.kind in ("text", "jsonl") and (tokenizer := tokenizer_file(data.tokenizer)):
        files += with_companions(tokenizer)
    return files


def model_files(config: Config) -> list[Path]:
    """Return the files of the model to start from, of adapters, and of teachers."""
    lora = config.lora
    folders = {config.model.path, *config.teachers} - {"", BASE}
    files = []
    for folder in sorted(folders):
        files += [Path(folder, "config.json"), *weight_files(folder)]
    if lora and lora.path:
        files.append(adapter_files(lora.path)[1])
    return files


def file_digest(file: Path) -> str:
    """Return a digest of a file's size and of SAMPLES evenly spaced blocks, including both ends."""
    with reading(file), file.open("rb") as stream:
        size = stream.seek(0, 2)
        digest = hashlib.sha256(str(size).encode())
        spacing = max(SAMPLE, (size - SAMPLE) // (SAMPLES - 1))
        for start in [*range(0, SAMPLES * spacing, spacing), max(0, size - SAMPLE)]:
            stream.seek(start)
            digest.update(stream.read(SAMPLE))
    return digest.hexdigest()[:16]


def check_continuation(
    file: Path, config: Config, files: dict[str, dict[str, str]], resumed: bool
) -> list[str]:
    """Compare settings, data and code with those stored in `file`, then store the present ones.

    files: see `agreed_fingerprint`. Returns notes for the user. Rank 0 calls it. Raises InputError if
    a resumed run has the same settings of data, but the data has changed.
    """
    now = {"settings": comparable_settings(config), **files, "code": code_digests()}
    notes = []
    if resumed:
        before, notes = read_stored(file, now)
        if change := data_change(before, now):
            raise InputError(change)
        notes += changes(before, now)
    write_durably(file, json.dumps(now, indent=1))
    return notes


def changes(before: dict, now: dict) -> list[str]:
    """Return notes on settings, held-out data and code that differ from those before."""
    notes = other_settings(before, now)
    if differing(before["held_out"], now["held_out"]):
        notes.append(
            "warning: the run continues with other held-out data: what is measured on it, the best of it too, does "
            "not compare with the steps before"
        )
    if code := differing(before["code"], now["code"]):
        more = f" and {len(code) - 1} more files" if len(code) > 1 else ""
        notes.append(f"warning: the run continues with other code than before: {code[0]}{more}")
    return notes


def comparable_settings(config: Config) -> dict[str, Any]:
    """Return all settings that affect training, by dotted name, in the form that JSON gives them."""
    tree = to_dict(config) | {"out_dir": {}, "reference": {}}
    return json.loads(json.dumps(flatten_settings(tree)))


def data_change(before: dict, now: dict) -> str | None:
    """Return a line if the data has changed although its settings have not, otherwise None."""
    for part, names in PARTS.items():
        old = before.get(part, {})
        new = now.get(part, {})
        changed = differing(old, new)
        if changed and not names.intersection(differing(before["settings"], now["settings"])):
            first = changed[0]
            gone = "has changed" if first in new else "is gone"
            how = gone if first in old else "is new"
            more = f" ({len(changed)} files differ)" if len(changed) > 1 else ""
            return (
                f"{first} {how} since the run began{more}: it cannot continue (restore it, or use another "
                f"out_dir)"
            )
    return None


def other_settings(before: dict, now: dict) -> list[str]:
    """Return notes on changed settings, and a warning if they choose other rows of the data."""
    old = before["settings"]
    new = now["settings"]
    changed = differing(old, new)
    if not changed:
        return []
    values = [
        f"{key}={json.dumps(new.get(key))} (was {json.dumps(old.get(key))})" for key in changed
    ]
    notes = [f"note: the run continues with other settings than before: {', '.join(values)}"]
    # videos are grouped into micro-batches of one shape
    choosing = ("data.", "batch.micro") if new["data.kind"] == "latents" else "data."
    chosen = [key for key in changed if key in CHOOSE_ROWS or key.startswith(choosing)]
    # held-out files do not affect the training rows, unless a share of the data is held out now or was
    # before
    if chosen == ["data.validation_path"] and not new.get("data.validation"):
        chosen = []
    if chosen:
        notes.append(
            "warning: rows that were seen may come again and others never, as those settings choose them"
        )
    return notes


def differing(before: dict, now: dict) -> list[str]:
    """Return the keys whose values differ, sorted."""
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def read_stored(file: Path, now: dict[str, dict]) -> tuple[dict[str, dict], list[str]]:
    """Return what `check_continuation` stored, and notes: none.

    If it cannot be read, return `now`, which nothing differs from, and a warning that says so.
    """
    try:
        stored = json.loads(file.read_text("utf-8"))
        return {key: dict(stored[key]) for key in now}, []
    except FileNotFoundError:
        problem = "is missing"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        problem = "is damaged"
    unknown = "nobody knows whether data, settings and code are those of the steps before"
    return now, [f"warning: {file} {problem}: {unknown}"]
