"""Store digests of a run's data, code and settings: a run that continues tells what has changed.

Row n is a pure function of the seed, n and the files. If a file changes between a run and its
continuation, rows come twice or never, and nothing else would show it: hence an error. Other code
and settings are often what one wants, and only told. Files are sampled and not read through, so a
change that keeps the size and misses all samples goes unseen.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from minitrain.data.files import apart, find_files, held_out_apart
from minitrain.data.tokenizer import COMPANIONS, tokenizer_file, with_companions
from minitrain.errors import InputError, readable
from minitrain.formats.peft import adapter_files
from minitrain.formats.tensor_files import weight_files
from minitrain.run.checkpoint.durable import write_durably
from minitrain.run.config.load import to_dict
from minitrain.run.launch.same_run import check_same, code_digests, flatten_settings
from minitrain.settings import Config, Data

# of a file; a smaller one is read whole
SAMPLES = 16
SAMPLE = 4096
# settings that say which files
NAMES_DATA = {"data.kind", "data.path", "data.sources", "data.exclude", "data.tokenizer"}
# parts of a fingerprint, with the settings that say which files they are
PARTS = {"files": NAMES_DATA, "held_out": NAMES_DATA | {"data.validation_path"}}
# and all of data: which rows, and when
CHOOSE_ROWS = {"seed", "task", "batch.global", "batch.seq_len", "grpo.prompts"}


def agreed_fingerprint(config: Config) -> dict[str, dict[str, str]]:
    """Return a digest of each file that the data is made from, by path, by PARTS.

    Tokenizers are included; made-up data has none. held_out: of data.validation_path.
    All ranks call it together. Raises InputError if they do not see the same files, those of the
    model to start from among them: each node may have its own copy.
    """
    sources = config.data, held_out_apart(config)[1].data
    data = {
        part: {str(file): file_digest(file) for file in data_files(source)}
        for part, source in zip(PARTS, sources, strict=True)
    }
    if dist.get_world_size() > 1:
        model = {str(file): file_digest(file) for file in model_files(config)}
        check_same({"data": data["files"], "held-out data": data["held_out"], "model": model})
    return data


def data_files(data: Data) -> list[Path]:
    if data.sources:
        return [file for source in apart(data).values() for file in data_files(source)]
    if not data.path or data.kind in ("mock", "shapes"):
        return []
    files = find_files(data)
    indices = [file.with_suffix(".idx") for file in files if file.suffix == ".bin"]
    files += filter(Path.exists, indices)
    if data.kind in ("text", "jsonl") and (tokenizer := tokenizer_file(data.tokenizer)):
        files += with_companions(tokenizer)
    return files


def model_files(config: Config) -> list[Path]:
    """Return the files of the weights to start from, adapters included.

    What their own config says is among the settings.
    """
    path = config.model.path
    lora = config.lora
    files = [Path(path, "config.json"), *weight_files(path)] if path else []
    if lora and lora.path:
        files.append(adapter_files(lora.path)[1])
    return files


def file_digest(file: Path) -> str:
    """Return a digest of a file's size and SAMPLES blocks spread evenly over it.

    Its first and last bytes are among them.
    """
    with readable(file), file.open("rb") as stream:
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
    """Compare with what the run began with, and store what it uses now; return what to tell.

    file: where that is stored. files: the fingerprint of its data. To call on rank 0.
    Raises InputError if the run is resumed, its settings name the same data, and there is other
    data.
    """
    now = {"settings": comparable_settings(config), **files, "code": code_digests()}
    notes = []
    if resumed:
        before = read(file, now)
        if change := data_change(before, now):
            raise InputError(change)
        notes = changes(before, now)
    write_durably(file, json.dumps(now, indent=1))
    return notes


def changes(before: dict, now: dict) -> list[str]:
    """Return what to tell of other settings and other code than a run began with."""
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
    """Return all settings that have a part in what is trained, by dotted name, as JSON has them."""
    tree = to_dict(config) | {"out_dir": {}, "reference": {}}
    return json.loads(json.dumps(flatten_settings(tree)))


def data_change(before: dict, now: dict) -> str | None:
    """Return what is wrong with the data, in one line.

    None if nothing is, or if the settings name other data on purpose.
    """
    for part, names in PARTS.items():
        old = before.get(part, {})
        new = now.get(part, {})
        # earlier versions left some out
        tokenizer = ("tokenizer.json", *COMPANIONS)
        changed = [
            name
            for name in differing(old, new)
            if name in old or Path(name).name not in tokenizer
        ]
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
    """Return all settings that were changed, in one line.

    Warn if a change selects other rows: nothing else would show it.
    """
    old = before["settings"]
    new = now["settings"]
    changed = differing(old, new)
    if not changed:
        return []
    told = [
        f"{key}={json.dumps(new.get(key))} (was {json.dumps(old.get(key))})" for key in changed
    ]
    notes = [f"note: the run continues with other settings than before: {', '.join(told)}"]
    # videos of a micro-batch share a shape
    choosing = ("data.", "batch.micro") if new["data.kind"] == "latents" else "data."
    chosen = [key for key in changed if key in CHOOSE_ROWS or key.startswith(choosing)]
    # files of their own, unless a share of the data was held out before or is now
    if chosen == ["data.validation_path"] and not new.get("data.validation"):
        chosen = []
    if chosen:
        notes.append(
            "warning: rows that were seen may come again and others never, as those settings choose them"
        )
    return notes


def differing(before: dict, now: dict) -> list[str]:
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def read(file: Path, now: dict[str, dict]) -> dict[str, dict]:
    """Return what `check_continuation` stored; `now` if that is not there."""
    try:
        stored = json.loads(file.read_text("utf-8"))
        # earlier versions stored none of what is held out
        stored.setdefault("held_out", now["held_out"])
        return {key: dict(stored[key]) for key in now}
    except (OSError, ValueError, TypeError, KeyError):
        return now
