"""What `pip install .` puts in place: everything that the commands need, outside the clone."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from minitrain.run.launch.cli import config_path
from tests.helpers.commands import ROOT

BUILD = "from setuptools.build_meta import build_wheel; build_wheel('..')"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the wheel's files, as an install without links to the clone has them."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(
        ".git", "build", "out", "tests", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder / "clone", symlinks=True, ignore=ignored)
    subprocess.run(
        [sys.executable, "-c", BUILD], cwd=folder / "clone", check=True, capture_output=True
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder / "site")
    return folder / "site"


def minitrain(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """`minitrain words...` of the wheel in `folder`, somewhere else, without the clone on the path."""
    command = [sys.executable, "-m", "minitrain", *words]
    return subprocess.run(
        command,
        cwd=folder.parent,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_the_configs_and_results_of_the_clone(installed):
    wanted = [file for name in ("configs", "results") for file in (ROOT / name).rglob("*")]
    wanted = {file.relative_to(ROOT) for file in wanted if file.suffix in (".yaml", ".jsonl")}
    found = {
        file.relative_to(installed / "minitrain") for file in (installed / "minitrain").rglob("*")
    }
    assert len(wanted) > 80 and wanted <= found
    assert {
        Path("py.typed"),
        Path("bench/systems.yaml"),
        Path("results/pictures/accuracy.svg"),
    } <= found
    (entry,) = installed.glob("*.dist-info/entry_points.txt")
    assert "minitrain = minitrain.__main__:main" in entry.read_text()


def test_an_installed_command_knows_the_published_rows_and_results(installed):
    listed = minitrain(installed, "bench", "--list")
    assert listed.returncode == 0 and "\n69 rows" in listed.stdout, listed.stderr
    done = minitrain(installed, "bench", "--report", "--out", str(installed.parent / "report"))
    assert "69 published rows; 69 simulated" in done.stdout, done.stderr
    assert "<svg" in (installed.parent / "report/report.html").read_text().partition("<main>")[0]


def test_an_installed_command_takes_configs_by_name(installed):
    names = [
        "quickstart",
        "automodel/llama3-8b-lora-1gpu",
        "configs/train/arithmetic.yaml",
        "none",
        "a=b.yaml",
    ]
    code = f"from minitrain.run.launch.cli import config_path; print(*map(config_path, {names}))"
    command = [sys.executable, "-c", code]
    done = subprocess.check_output(command, cwd=installed, env={}, text=True).split()
    own = installed / "minitrain" / "configs"
    files = ["quickstart.yaml", "automodel/llama3-8b-lora-1gpu.yaml", "train/arithmetic.yaml"]
    assert done == [*(str(own / file) for file in files), *names[3:]]


def test_a_file_of_ones_own_is_taken_before_the_packages(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert config_path("configs/quickstart.yaml") == "configs/quickstart.yaml"


def test_first_words_are_commands(installed):
    line = "first comes one of tokenize, encode-video, train, curves, export, evaluate, generate, merge, bench"
    for words in ([], ["trian"]):
        done = minitrain(installed, *words)
        assert done.returncode == 2 and line in done.stderr


def test_links_reach_what_package_data_names():
    """In a clone, and where it is packed: setuptools takes files below the package alone."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]["minitrain"]
    assert {"configs/**/*.yaml", "results/**/*.jsonl", "bench/*.yaml"} <= set(data)
    for name in ("configs", "results"):
        assert (ROOT / "minitrain" / name).readlink() == Path("..", name)
