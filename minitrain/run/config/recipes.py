"""Find configs by name, and the commands that make the files which a recipe needs."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minitrain.errors import InputError


def own_folder(name: str) -> Path:
    """Return a folder of the package.

    In a clone it is a symbolic link. Git on Windows writes a file with the link's target instead.
    """
    place = Path(__file__).parents[2] / name
    return place.parent / place.read_text("utf-8").strip() if place.is_file() else place


CONFIGS = own_folder("configs")
# in the comments at the head of a config: the command that makes a file or folder, or an example of a
# line of the file; and its name
MADE = re.compile(
    r"#   (?P<command>.*(?:--local-dir|--out|minitrain\.examples\.\w+) (?P<name>\S+).*?)(?:  +#.*)?"
    r"|# (?P<example>A line of (?P<name_of_example>\S+): .*)"
)


def config_path(text: str) -> str:
    """Return the path of a config: a file, or one of the package's own, as configs/a/b.yaml or a/b.

    Serves as an argparse type.
    """
    own = CONFIGS / f"{text.removeprefix('configs/').removesuffix('.yaml')}.yaml"
    path = os.path.expanduser(text)
    return str(own) if os.path.isfile(own) and not os.path.isfile(path) else path


def own_configs() -> list[str]:
    """Return the names of the package's configs, such as train/shapes."""
    files = CONFIGS.rglob("*.yaml")
    return [str(file.relative_to(CONFIGS).with_suffix("")) for file in files]


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Split a command line's words into configs (FILE or config=FILE) and settings (key=value)."""
    settings = [word for word in words if "=" in word.removeprefix("config=")]
    configs = [word.removeprefix("config=") for word in words if word not in settings]
    return [config_path(word) for word in configs], settings


def only_config(named: str | None, words: list[str]) -> tuple[str, list[str]]:
    """Return the one config, given by the option (`named`) or among the words, and the settings."""
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
    """Add to an InputError about a missing file how to make it, from the comments of the config."""
    try:
        yield
    except InputError as error:
        # drop the hint about the hub: a name such as models/a is a folder's
        problem = str(error).partition(" (of the hub?")[0]
        for remedy, name in remedies(config):
            named = re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", problem)
            if named and not os.path.exists(name):
                raise InputError(f"{problem} ({Path(config).name} says: {remedy})") from error
        raise


def remedies(config: str) -> Iterator[tuple[str, str]]:
    """Yield (how a file is made, its name) for the files that a config's comments tell how to make."""
    if os.path.isfile(config):
        for line in Path(config).read_text("utf-8", "replace").splitlines():
            if found := MADE.fullmatch(line):
                remedy, name = filter(None, found.groups())
                yield remedy, name
