"""The README's files exist and are as long as it says, and the configs that it names can be read."""

import re
from pathlib import Path

import pytest

from minitrain.run.config import load
from tests.commands import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
COUNTED = re.findall(r"\| ([\w/]+\.py) \| (\d+) \|", README)


def test_tables_are_there():
    assert len(COUNTED) > 20


@pytest.mark.parametrize(("name", "count"), COUNTED)
def test_files_are_as_long_as_it_says(name, count):
    file = next(path for path in (ROOT / name, ROOT / "minitrain" / name) if path.exists())
    assert len(file.read_text(encoding="utf-8").splitlines()) == pytest.approx(int(count), rel=0.1)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"configs/[\w./-]+\.yaml", README))))
def test_configs_that_it_names_are_valid(name):
    load(ROOT / name)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_is_valid(file: Path):
    load(file)
