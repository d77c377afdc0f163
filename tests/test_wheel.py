"""What `pip install .` puts in place: everything that the commands need, outside the clone."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from minitrain.run.config.recipes import config_path
from tests.helpers.commands import ROOT

BUILD = "from setuptools.build_meta import build_{0}; build_{0}('..')"


def build(kind: str, source: Path) -> None:
    """Make the sdist or the wheel of a folder, beside it."""
    words = [sys.executable, "-c", BUILD.format(kind)]
    subprocess.run(words, cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel of a clone, and the sdist."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(
        ".git", "build", "out", "tests", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder / "clone", symlinks=True, ignore=ignored)
    build("wheel", folder / "clone")
    build("sdist", folder / "clone")
    return folder


@pytest.fixture(scope="module")
def installed(built) -> Path:
    """A folder with the wheel's files, as an install without links to the clone has them."""
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(built / "site")
    return built / "site"


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
        Path("bench/report.html"),
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


def test_the_sdist_makes_the_same_wheel(built, tmp_path):
    """Without the links of the clone, and without half of its tests."""
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        assert not any(name.issym() for name in files.getmembers())
        files.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert not (source / "tests").exists() and (source / "LICENSE").exists()
    build("wheel", source)
    contents = []
    for folder in (built, tmp_path):
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            contents.append({name: files.read(name) for name in files.namelist()})
    assert contents[0] == contents[1] and len(contents[0]) > 300


SMOKE = """
import sys
from minitrain.__main__ import dispatch
from minitrain.errors import InputError
try:
    dispatch(["train", "train/arithmetic"])
except InputError as error:
    print(error)
small = "steps=2 optim.warmup=0 validation.every=0 validation.exact_match=0 device=cpu".split()
from minitrain.examples import arithmetic
arithmetic.main(["out/arithmetic.jsonl", "--count", "100"])
dispatch(["train", "train/arithmetic", *small])
dispatch("generate --model out/arithmetic --chat --prompt 1+1 --max-tokens 1 --device cpu".split())
import minitrain
print(minitrain.__file__, minitrain.load_pretrained("out/arithmetic").config.vocab_size)
"""


def test_an_install_trains_and_answers_outside_the_clone(built, tmp_path):
    """By pip, which checks the metadata too, in a folder that has nothing but that."""
    pytest.importorskip("pip")
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "place"
    words = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target"]
    subprocess.run([sys.executable, *words, str(place), str(wheel)], check=True)
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SMOKE],
        cwd=tmp_path / "work",
        env=os.environ | {"PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert any(
        "arithmetic.yaml says: python -m minitrain.examples.arithmetic" in x for x in lines
    )
    assert lines[-1] == f"{place}/minitrain/__init__.py 258"
    assert (place / "bin/minitrain").exists()


def test_a_clone_by_windows_git_finds_its_configs_and_results(tmp_path):
    """Where links are files with their targets, as a clone there has them that WSL then reads."""
    package = tmp_path / "minitrain"
    package.mkdir()
    for entry in (ROOT / "minitrain").iterdir():
        if entry.is_symlink():
            (package / entry.name).write_text(str(entry.readlink()))
            (tmp_path / entry.name).symlink_to(ROOT / entry.name)
        else:
            (package / entry.name).symlink_to(entry)
    listed = minitrain(tmp_path, "bench", "--list")
    assert listed.returncode == 0 and "\n69 rows" in listed.stdout, listed.stderr
    code = (
        "from minitrain.commands import bench; print(len(list(bench.RESULTS.rglob('*.jsonl'))))"
    )
    words = [sys.executable, "-c", code]
    assert int(subprocess.check_output(words, cwd=tmp_path, env={"PYTHONPATH": "."})) > 5


def test_an_installed_command_takes_configs_by_name(installed):
    names = [
        "quickstart",
        "automodel/llama3-8b-lora-1gpu",
        "configs/train/arithmetic.yaml",
        "none",
        "a=b.yaml",
    ]
    code = (
        f"from minitrain.run.config.recipes import config_path; print(*map(config_path, {names}))"
    )
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
