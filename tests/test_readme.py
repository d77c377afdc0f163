"""What README.md and the READMEs beside the code claim: sizes, links, configs, commands, counts and figures."""

import ast
import json
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from minitrain.bench.report import merge_results, read_results
from minitrain.bench.report_accuracy import accuracy_cells, held_back, summary
from minitrain.bench.rows import published_rows
from minitrain.bench.tables import markdown
from minitrain.models.zoo import WAN, ZOO
from minitrain.run.config.load import load
from tests.helpers.commands import ROOT, command
from tests.helpers.house import ROOMS
from tests.helpers.recipes import SHORT_ANSWER, STAND_INS

README = (ROOT / "README.md").read_text(encoding="utf-8")
WRITTEN = [  # by hand; results/simulated/README.md is generated
    ROOT / name
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        "configs/train/README.md",
        "minitrain/bench/README.md",
        "minitrain/formats/README.md",
        "minitrain/models/README.md",
        "minitrain/parallel/README.md",
        "minitrain/training/README.md",
        "results/README.md",
        "tests/README.md",
        "tests/faults/README.md",
    )
]
TEXTS = {file: file.read_text(encoding="utf-8") for file in WRITTEN}
COMMANDS = re.compile(r"^(?:\S+=\S+ )*((?:python|torchrun) .*)$", re.MULTILINE)


def names(files: dict) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def simulated():
    files = sorted((ROOT / "results" / "simulated").glob("*.jsonl"))
    return merge_results([result for file in files for result in read_results(str(file))], "")


@pytest.mark.budget
def test_readme_is_short():
    assert len(README.encode()) <= 15_000


@pytest.mark.parametrize("file", WRITTEN, ids=names(TEXTS))
def test_paragraphs_and_cells_are_short(file):
    for paragraph in without_code(TEXTS[file]).split("\n\n"):
        lines = paragraph.strip().splitlines()
        assert all(
            len(line) <= 140
            for line in lines
            if not line.startswith("|") and "`python bench.py" not in line
        )
        if paragraph.lstrip().startswith("|"):
            cells = [cell.strip() for line in lines for cell in line.strip("|").split(" | ")]
            shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in cells]
            assert not [cell for cell in shown if len(cell) > 90]
        elif not lines or not re.match(r"[-\d]", lines[0]):
            assert len(lines) <= 5, paragraph
    assert "EPYC 9" not in TEXTS[file]  # no list of CPU models


@pytest.mark.parametrize("file", WRITTEN, ids=names(TEXTS))
def test_links_and_pictures_exist(file):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[file]):
        assert (file.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("file", WRITTEN, ids=names(TEXTS))
def test_names_stand_in_the_files_that_it_says(file):
    """`NAME` in [file](link), or several of them."""
    said = re.findall(
        r"((?:`\w+`(?:, | and )?)+) (?:in|of)\s\[[^]]*\]\(([\w./-]+)\)", TEXTS[file]
    )
    for named, target in said:
        text = (file.parent / target).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", named):
            assert re.search(rf"\b{name}\b", text), f"{name} is not in {target}"


def test_the_place_of_families_is_said():
    said = TEXTS[ROOT / "minitrain/models/README.md"]
    assert "`FAMILIES` in [families.py]" in said and "`ZOO` and `tiny` in [zoo.py]" in said


def test_every_folder_of_the_package_is_named():
    folders = {path.parent.name for path in (ROOT / "minitrain").glob("*/__init__.py")}
    assert folders <= set(re.findall(r"\(minitrain/(\w+)\)", README))
    bare = re.findall(r"(?<!\[)\b(\w+\.py)\b(?!\]|\))", without_code(README))
    assert set(bare) <= {"bench.py"}  # every other file that it names is a link


@pytest.mark.parametrize("file", WRITTEN, ids=names(TEXTS))
def test_a_link_says_the_name_of_the_file_that_it_leads_to(file):
    links = re.findall(r"\[([\w/]+\.(?:py|yaml|md))\]\(([^)\s#]+)\)", TEXTS[file])
    assert not [link for link in links if Path(link[0]).name != Path(link[1]).name]


def test_lines_of_the_loop_are_those_of_its_file():
    (shown,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    assert shown in (ROOT / "minitrain/examples/train_loop.py").read_text(encoding="utf-8")
    assert 15 <= len(shown.splitlines()) <= 25


def test_folders_of_the_house_stand_in_its_order():
    section = README[README.index("## The house") : README.index("## What is proved")]
    found = re.findall(r"\(minitrain/(\w+)\)", section)
    assert found == [
        name
        for name in ROOMS
        if (ROOT / "minitrain" / name / "__init__.py").exists() and "/" not in name
    ]


@pytest.mark.parametrize("file", WRITTEN, ids=names(TEXTS))
def test_configs_that_it_names_are_valid(file):
    for name in set(re.findall(r"configs/[\w./-]+\.yaml", TEXTS[file])):
        load(ROOT / name, STAND_INS.get(Path(name).stem, []))


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda file: file.stem
)
def test_every_config_is_valid(file: Path, tmp_path, monkeypatch):
    """Where a recipe names a folder to download, the zoo's model of that shape stands for it."""
    (tmp_path / "short_answer.py").write_text(SHORT_ANSWER)
    monkeypatch.syspath_prepend(str(tmp_path))
    load(file, STAND_INS.get(file.stem, []))


@pytest.mark.parametrize("file", WRITTEN, ids=names(TEXTS))
def test_commands_name_files_options_and_settings_that_exist(file):
    text = TEXTS[file].replace("\\\n", " ")
    for words in COMMANDS.findall(text) + re.findall(r"`(python [^`]*)`", text):
        check_command(words.split("  #")[0])


def check_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    start = words.index("-m") if "-m" in words else 1
    name = words[start + 1] if "-m" in words else words[start]
    source = ROOT / (name.replace(".", "/") + ".py") if "-m" in words else ROOT / name
    assert source.exists(), line
    arguments = words[start + 2 if "-m" in words else start + 1 :]
    known = source.read_text(encoding="utf-8")
    # the options of a command stand in commands/
    for file in (ROOT / "minitrain" / "commands").glob(f"{source.stem}*.py"):
        known += file.read_text(encoding="utf-8")
    options = [word.split("=")[0] for word in arguments if word.startswith("--")]
    assert not [option for option in options if f'"{option}"' not in known], line
    settings = [word for word in arguments if re.match(r"[a-z][\w.]*=", word) and "," not in word]
    if source.name == "train.py" and "FILE" not in line.replace("--config FILE", ""):
        config = arguments[arguments.index("--config") + 1]
        config = ROOT / ("configs/quickstart.yaml" if config == "FILE" else config)
        load(config, STAND_INS.get(config.stem, []) + settings)


def test_first_commands_are_those_that_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for words in ("pip install -e . && python bench.py", "pip install -e '.[test]' && pytest"):
        assert re.search(rf"^{re.escape(words)} ", README, re.MULTILINE)
        assert words.replace(" && ", "\n") in ci.replace("install -q", "install")


def test_ci_stops_at_the_first_command_that_fails(tmp_path):
    """Stand-ins print their words, and each command of the script in turn fails."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    # without the part that makes an environment and moves to the clone
    script = "set -euo pipefail\n" + script.partition("\n\n")[2]
    names = ("pip", "pytest", "ruff", "python")
    stand_in = tmp_path / "stand_in"
    stand_in.write_text(
        '#!/bin/sh\nwords="${0##*/}${*:+ $*}"\necho "$words"\n[ "$words" != "$FAILS" ]\n'
    )
    stand_in.chmod(0o755)
    for name in names:
        (tmp_path / name).symlink_to(stand_in)
    commands = [
        " ".join(shlex.split(line)) for line in script.splitlines() if line.startswith(names)
    ]
    assert len(commands) == 7
    for number, fails in enumerate(commands, 1):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails}
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
        assert done.returncode
        assert done.stdout.splitlines() == commands[:number]


def test_python_snippets_use_what_there_is(tmp_path, monkeypatch):
    """It runs as it stands, on a model of the same kind as that of the commands above it."""
    import minitrain
    from minitrain.data.tokenizer import ByteTokenizer
    from minitrain.models.decoder import Decoder
    from minitrain.models.zoo import model_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    minitrain.save_pretrained(Decoder(model_config("llama3-8b-tiny")), "out/arithmetic")
    ByteTokenizer().save(Path("out/arithmetic"))
    for snippet in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(ast.parse(snippet), "README.md", "exec"), {})
    assert (tmp_path / "copy" / "model.safetensors").exists()


@pytest.mark.budget
def test_hours_of_reading_follow_from_the_files():
    table = README[README.index("## Reading order") : README.index("## The house")]
    files = re.findall(r"\]\((minitrain/[\w/]+\.py)\)", table)
    count = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    said = f"These {len(files)} files take {count / 400:.0f} to {count / 300:.0f} hours at 300 to 400 lines an hour."
    assert len(files) == 18
    assert said in README


def test_simulated_figures_are_those_of_the_results():
    report = simulated()
    rows = [row for rows in report.tables.values() for row in rows]
    assert f"the {len(rows)} published rows, a config each" in README
    assert f"throughput of all {len(rows)} rows" in README
    middle, worst = re.search(
        r"off by ([\d.]+)% in the median, (\d+)% at worst", summary(report)
    ).groups()
    found = re.search(
        r"(?s)On the (\d+) rows .* off by\s([\d.]+) % in the median and (\d+) % at worst", README
    )
    assert found.groups() == (str(len(held_back(rows))), middle, worst)
    assert markdown(accuracy_cells(report)) in TEXTS[ROOT / "results/README.md"]


def test_first_simulation_says_what_is_written(tmp_path):
    name = "automodel/llama3-70b-pretrain-64gpu"
    assert f"python bench.py --simulate --config configs/{name}.yaml\n" in README
    run = command(
        "bench.py",
        "--simulate",
        "--config",
        f"configs/{name}.yaml",
        "--json",
        tmp_path / "row.jsonl",
    )
    assert run.returncode == 0, run.stderr
    results = [json.loads(line) for line in (tmp_path / "row.jsonl").read_text().splitlines()]
    figures = [result["tokens_per_sec_per_gpu"] for result in results]
    figures.append(published_rows()[name]["tokens_per_sec_per_gpu"])
    text = "The first one says {:,.0f} tokens/s per GPU; {:,.0f} were published"
    assert len(figures) == 2
    assert text.format(*figures) in README


def test_measured_figures_are_those_of_the_h200():
    lines = (ROOT / "results/h200/rows.jsonl").read_text(encoding="utf-8").splitlines()
    found = {f"{json.loads(line).get('tokens_per_sec_per_gpu', 0):,.0f}" for line in lines}
    table = README[
        README.index("| tokens/s | published") : README.index("Decoding Llama")
    ].splitlines()[2:]
    measured = [line.strip("| ").split(" | ")[-1] for line in table if line]
    assert measured and set(measured) <= found
    report = (ROOT / "results/h200/README.md").read_text(encoding="utf-8")
    assert not [
        cell for line in table for cell in re.findall(r"\d+,\d+", line) if cell not in report
    ]


def test_models_are_those_of_the_zoo():
    said = Counter(
        re.findall(
            r"`([a-z][\w.-]+)`", TEXTS[ROOT / "minitrain/models/README.md"].split("## To add")[0]
        )
    )
    assert said == Counter(list(ZOO | WAN))


def test_seconds_and_shares_agree_between_documents():
    """The same run is described in README.md and configs/train/README.md."""
    details = TEXTS[ROOT / "configs/train/README.md"]
    for figure in ("94.6 %", "61.8 %", "93.7 %", "49 s", "80 s", "1.87"):
        assert figure in README and figure in details


def test_tests_that_the_fault_table_names_exist():
    rows = [
        line
        for line in TEXTS[ROOT / "tests/faults/README.md"].splitlines()
        if line.startswith("|")
    ]
    tests = {
        Path(target).name for line in rows for target in re.findall(r"\(([\w./]+\.py)\)", line)
    }
    there = {file.name for file in (ROOT / "tests" / "faults").glob("test_*.py")}
    assert there <= tests
