"""The rooms of the package, and which files import which, from their source text."""

import ast
from pathlib import Path

from tests.helpers.imports import ROOT, names_in

# a file may import files of its own room and of those above; the core, up to grpo, knows nothing of the tools below it
ROOMS = (
    "errors",
    "hashing",
    "user_code",
    "tasks",
    "settings",
    "models",
    "parallel",
    "training",
    "rollout",
    "grpo",
    "formats",
    "data/faults",
    "data",
    "data/text",
    "data/chat",
    "data/video",
    "data/datasets",
    "run",
    "run/config",
    "run/launch",
    "run/checkpoint",
    "run/monitor",
    "run/tasks",
    "bench",
    "simulator",
    "examples",
    "commands",
    "generate",
    "merge",
    "train",
    "__init__",
    "__main__",
)
TREES = {
    file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8"))
    for file in sorted((ROOT / "minitrain").rglob("*.py"))
}


def room(file: Path) -> str:
    """Return the nearest room: a file, or a folder that it is in."""
    path = file.with_suffix("").relative_to("minitrain")
    return next(str(each) for each in (path, *path.parents) if str(each) in ROOMS)


def imported(tree: ast.AST, everywhere: bool = True) -> set[Path]:
    """Return the package's files that a file imports, at its top or inside functions too; not those for types alone."""
    places = [Path(*name.split(".")) for name in names_in(tree, everywhere, types=False)]
    return {
        file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")
    } & TREES.keys()


def reachable(start: Path, arrows: dict[Path, set[Path]]) -> set[Path]:
    """Return the files that `start` imports, directly or not: itself among them only if it lies on a circle."""
    seen, waiting = set(), [start]
    while waiting:
        new = arrows[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen
