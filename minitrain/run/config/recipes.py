"""Find configs by name, and say what makes the files that a recipe still lacks."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minitrain.errors import InputError


def own_folder(name: str) -> Path:
    """Return a folder of the package that is a link in a clone, or what Windows' git makes of one.

    That is a file with the link's target.
    """
    place = Path(__file__).parents[2] / name
    return place.parent / place.read_text("utf-8").strip() if place.is_file() else place


CONFIGS = own_folder("configs")
# in the head of a config: the command that makes a file or a folder, or a line of one, and its name
MADE = re.compile(
    r"#   (?P<told>.*(?:--local-dir|--out|minitrain\.examples\.\w+) (?P<name>\S+).*?)(?:  +#.*)?"
    r"|# (?P<told_line>A line of (?P<name_of_line>\S+): .*)"
)


def config_path(text: str) -> str:
    """Parse a config's path, as an argparse type.

    It is a file, or else one of the package's own configs, as configs/a/b.yaml or a/b.
    """
    own = CONFIGS / f"{text.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    path = os.path.expanduser(text)
    return str(own) if os.path.isfile(own) and not os.path.isfile(path) else path


def own_configs() -> list[str]:
    """Return the names of the package's configs, such as train/shapes."""
    files = CONFIGS.rglob("*.yaml")
    return [str(file.relative_to(CONFIGS).with_suffix("")) for file in files]


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the configs among the words of a command line, FILE or config=FILE, and its settings."""
    settings = [word for word in words if "=" in word.removeprefix("config=")]
    configs = [word.removeprefix("config=") for word in words if word not in settings]
    return [config_path(word) for word in configs], settings


def only_config(named: str | None, words: list[str]) -> tuple[str, list[str]]:
    """Return the one config, `named` by an option or among the words, and the settings."""
    configs, settings = split_words(words)
    configs = [named, *configs] if named else configs
    if not configs:
        raise InputError(
            "the following arguments are required: --config FILE (a recipe: train/arithmetic)"
        )
    for path in configs[1:]:
        if not os.path.isfile(path):
            raise InputError(f"argument {path!r} is not of the form key=value")
        raise InputError(f"{path} is a second config, beside {configs[0]} (give one)")
    return configs[0], settings


@contextmanager
def with_remedy(config: str) -> Iterator[None]:
    """Add, to an InputError about a missing file, what the config's head says of making it."""
    try:
        yield
    except InputError as error:
        # a name such as models/a is not of the hub
        problem = str(error).partition(" (of the hub?")[0]
        for told, name in heads(config):
            named = re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", problem)
            if named and not os.path.exists(name):
                raise InputError(f"{problem} ({Path(config).name} says: {told})") from error
        raise


def heads(config: str) -> Iterator[tuple[str, str]]:
    """Yield what a config's comments say of making files, each with the file's name."""
    if os.path.isfile(config):
        for line in Path(config).read_text("utf-8", "replace").splitlines():
            if found := MADE.fullmatch(line):
                told, name = filter(None, found.groups())
                yield told, name
