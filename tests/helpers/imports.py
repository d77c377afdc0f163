"""Find the files that a test imports, from their source text, for `pytest --of FILE`."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
# the ids of all collected tests
COLLECTED = pytest.StashKey[list[str]]()


def files_wanted(names: list[str]) -> set[Path]:
    """Return the files that `--of` names. Raises UsageError for one that no test imports."""
    files = {name: Path(name).resolve() for name in names}
    tests = [*(ROOT / "tests").rglob("test_*.py")]
    for name, file in files.items():
        if not any(file in reached_by(test) for test in tests):
            raise pytest.UsageError(f"--of {name}: {why_not(file)}")
    return set(files.values())


def why_not(file: Path) -> str:
    """Return why no test imports a file."""
    if not file.is_file():
        return f"no such file in {Path.cwd()}"
    package = (ROOT / "minitrain").rglob("*.py")
    users = sorted(str(user.relative_to(ROOT)) for user in package if file in imported(user))
    return f"no test imports it{', but ' if users else ''}{', '.join(users)}"


def reached_by(test: Path) -> set[Path]:
    """Return a test's file, the files that it imports, and those that imported helpers import."""
    reached = set()
    waiting = [test]
    while waiting:
        file = waiting.pop()
        if file not in reached and (file == test or HELPERS in file.parents):
            waiting += imported(file)
        reached.add(file)
    return reached


@cache
def imported(file: Path) -> set[Path]:
    """Return the project's files that `file` imports, at its top or inside functions.

    For a public name, as in `from minitrain import Sampler`, this is the file that defines it.
    """
    paths = {Path(*public_names().get(name, name).split(".")) for name in names_in(parsed(file))}
    files = {
        ROOT / file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")
    }
    return {file for file in files if file.is_file()}


def names_in(tree: ast.AST, everywhere: bool = True, types: bool = True) -> set[str]:
    """Return the dotted names that a file imports: modules, and names in them.

    everywhere: inside functions too, not only at its top. types: those for type checkers alone, too.
    """
    nodes = list(ast.walk(tree)) if everywhere else tree.body
    checked = [n for n in nodes if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    skipped = set() if types else {id(inner) for branch in checked for inner in ast.walk(branch)}
    names = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and id(node) not in skipped:
            assert not node.level, "relative imports are not followed here"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import) and id(node) not in skipped:
            names |= {alias.name for alias in node.names}
    return names


def parsed(file: Path) -> ast.AST:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def public_names() -> dict[str, str]:
    """Return the module behind each name that the package's `__init__` imports."""
    names = names_in(parsed(ROOT / "minitrain" / "__init__.py"))
    return {f"minitrain.{name.rpartition('.')[2]}": name.rpartition(".")[0] for name in names}
