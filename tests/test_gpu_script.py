"""Test the commands of `.ci/gpu` without a GPU: a stand-in for python3 records them, and the programs parse them."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import bench
from minitrain.commands.bench import load_row
from minitrain.commands.bench_cases import check_options, make_case
from tests.helpers.commands import ROOT

PARTS = re.findall(r"^run_(\w+)\(\)", (ROOT / ".ci/gpu").read_text(), re.MULTILINE)
RECORD = """#!{bash}
[ "$1" = .ci/gpu_machine.py ] && {{ echo h100 {gigabytes}; echo versions; exit; }}
(printf '%s\\x1f' "$@"; echo) >> {file}
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> list[list[str]]:
    """The arguments of each python3 that all parts start, on GPUs of 80 and of 141 GB."""
    if sys.platform != "linux":
        pytest.skip("needs bash 4 and GNU timeout")
    folder = tmp_path_factory.mktemp("gpu")
    file, python = folder / "commands", folder / "python3"
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    for gigabytes in (85, 150):
        text = RECORD.format(bash=shutil.which("bash"), gigabytes=gigabytes, file=file)
        python.write_text(text)
        python.chmod(0o755)
        script = [ROOT / ".ci/gpu", folder / "out", *PARTS]
        done = subprocess.run(script, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return [line.split("\x1f")[:-1] for line in dict.fromkeys(file.read_text().splitlines())]


def test_the_table_has_a_line_for_every_part():
    table = re.search(
        r'^PARTS="\n(.*?)^"', (ROOT / ".ci/gpu").read_text(), re.DOTALL | re.MULTILINE
    )
    listed = [line.split()[:2] for line in table[1].splitlines()]
    assert [name for name, _ in listed] == PARTS and all(int(limit) > 0 for _, limit in listed)


def test_without_parts_the_first_nine_run(tmp_path):
    """Each for as many seconds as its line says."""
    if sys.platform != "linux":
        pytest.skip("needs bash 4 and GNU timeout")
    for name, text in (
        (
            "python3",
            "#!{bash}\n[ $1 = .ci/gpu_machine.py ] && {{ echo h100 85; echo versions; }}\n:",
        ),
        ("timeout", "#!{bash}\necho limit $5\n:"),
    ):
        (tmp_path / name).write_text(text.format(bash=shutil.which("bash")))
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = [ROOT / ".ci/gpu", tmp_path / "out"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    limits = re.findall(r"^limit (\d+)$", done.stdout, re.MULTILINE)
    assert limits == ["340", "200", "60", "110", "185", "100", "70", "60", "110"]


def test_every_part_starts_programs_that_exist(commands):
    assert len(commands) > len(PARTS)
    for program, *_ in commands:
        assert program == "-m" or (ROOT / program).is_file()


def test_bench_takes_the_arguments(commands):
    rows = [arguments for _, *arguments in commands if "--config" in arguments]
    assert len(rows) > len(PARTS)
    for arguments in rows:
        options = bench.parser().parse_args(arguments)
        words = options.config + options.overrides
        overrides = [word for word in words if "=" in word]
        files = [word for word in words if "=" not in word]
        cases = [make_case(*load_row(file, overrides), options) for file in files]
        check_options(cases, options)


def test_pytest_gets_the_files_of_gpu_tests(commands):
    words = {word for program, *words in commands if program == "-m" for word in words}
    files = {word for word in words if word.startswith("tests/")}
    assert "tests/test_gpu.py" in files and "tests/rollout/test_engine.py" not in files
    assert all((ROOT / file).is_file() for file in files)
