"""What pytest finds: the same tests in every process, and by `--of` those of a file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import ROOT
from tests.helpers.imports import COLLECTED, files_wanted, reached_by, why_not

IN_2033 = "import time; time.time = lambda: 2e9; import pytest, sys; sys.exit(pytest.main())"


def collect(*words: str, **environment: str) -> str:
    """Return what pytest says where it only collects."""
    command = [sys.executable, "-c", IN_2033, "--collect-only", "-q", "-o", "addopts=", *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout


def test_every_process_finds_the_same_tests(request, tmp_path):
    """As pytest-xdist needs it: at another time, with sets in another order, in another temporary folder."""
    found = request.config.stash[COLLECTED]
    files = dict.fromkeys(name.partition("::")[0] for name in found)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    said = collect(*files, PYTHONHASHSEED=seed, TMPDIR=str(tmp_path))
    assert said.split("\n\n")[0].split("\n") == found


@pytest.mark.parametrize(
    ("test", "file"),
    [
        ("models/test_mamba.py", "models/mamba.py"),
        ("distributed/test_tensor.py", "training/loop.py"),  # by way of a helper
        ("rollout/test_engine.py", "rollout/engine.py"),  # as minitrain.Sampler
    ],
)
def test_a_test_reaches_what_it_imports(test, file):
    assert ROOT / "minitrain" / file in reached_by(ROOT / "tests" / test)


def test_of_runs_the_tests_that_import_a_file():
    said = collect("--of", "tests/helpers/imports.py", "--of", "tests/test_pool.py")
    found = {name.partition("::")[0] for name in said.split("\n\n")[0].split("\n")}
    assert {"tests/test_collection.py", "tests/test_house.py", "tests/test_pool.py"} <= found
    assert "tests/models/test_mamba.py" not in found


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("minitrain/tensor.py", f"no such file in {Path.cwd()}"),
        ("README.md", "no test imports it"),
    ],
    ids=["typo", "text"],
)
def test_of_a_wrong_file_is_one_line(file, message):
    with pytest.raises(pytest.UsageError, match=f"^--of {re.escape(file)}: {message}$"):
        files_wanted([file])


def test_the_users_of_what_no_test_imports_are_named():
    users = why_not(ROOT / "minitrain/training/muon.py")
    assert re.fullmatch("no test imports it, but .*minitrain/training/optim.py.*", users)
