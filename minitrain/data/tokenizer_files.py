"""The files that belong to a tokenizer.json, and how those of an earlier tokenizer are removed."""

import shutil
from collections.abc import Iterable
from pathlib import Path

# files beside a tokenizer.json that name special tokens
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
CHAT_TEMPLATE = "chat_template.jinja"
# all files beside a tokenizer.json. tokenizer.model is the same vocabulary in another format, the only
# one that llama.cpp reads for Nemotron-4
COMPANIONS = (*NAMING_FILES, CHAT_TEMPLATE, "tokenizer.model", "added_tokens.json")
# a folder of more chat templates
MORE_TEMPLATES = "additional_chat_templates"


def remove_others(
    folder: str | Path, names: Iterable[str], templates: Path | None = None
) -> None:
    """Remove an earlier tokenizer's files that are not among `names`, and copy `templates`.

    They would still be read, an old chat template even in preference to the new one.
    """
    for name in set(COMPANIONS) - set(names):
        Path(folder, name).unlink(missing_ok=True)
    target = Path(folder, MORE_TEMPLATES).resolve()
    if templates is None or templates.resolve() != target:
        shutil.rmtree(target, ignore_errors=True)
        if templates and templates.exists():
            shutil.copytree(templates, target)
