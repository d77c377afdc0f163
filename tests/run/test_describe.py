"""The settings as text: what --help and --print-config say is what settings.py says, and reads back as the config."""

import dataclasses
import subprocess
import sys

import pytest

from minitrain import settings, train
from minitrain.__main__ import COMMANDS
from minitrain.errors import InputError
from minitrain.run.config.config_yaml import read_yaml
from minitrain.run.config.describe import SECTIONS, annotate, comments, describe_section
from minitrain.run.config.load import from_dict, load
from minitrain.settings import Config, Optim, Parallel
from tests.helpers.commands import ROOT

CONFIGS = [
    "quickstart",
    "train/shapes",
    "train/grpo-reverse",
    "automodel/deepseek-v3-pretrain-1024gpu",
    "automodel/qwen2.5-7b-lora-1gpu",
    "rl/llama3.1-8b-grpo-16gpu-1off",
    "dfm/wan2.1-14b-pretrain-h100-8gpu",
]


@pytest.mark.parametrize("file", CONFIGS)
def test_the_printed_config_reads_as_the_same(file):
    config = load(ROOT / "configs" / f"{file}.yaml")
    assert from_dict(read_yaml("\n".join(annotate(config)), "it") | {}) == config


def test_each_key_stands_below_its_comment_with_type_and_default():
    lines = list(annotate(from_dict({"optim": {"lr": 0.5}, "parallel": {"context": "ulysses"}})))
    place = lines.index("  lr: 0.5")
    assert (
        lines[place - 1]
        == "  # the highest learning rate of the schedule (number; default: 0.0003)"
    )
    place = lines.index('  context: "ulysses"')
    assert " ".join(line.strip(" #") for line in lines[place - 2 : place]) == (
        'how context-parallel ranks exchange keys and values (allgather, ulysses; default: "allgather")'
    )


def test_comments_are_those_above_and_behind():
    """The oracle: lines of settings.py, as they stand there."""
    text = (ROOT / "minitrain/settings.py").read_text(encoding="utf-8")
    for kind in (Optim, Parallel):
        for field in dataclasses.fields(kind):
            note = comments(kind)[field.name]
            if note:
                assert note.split()[0] in text and " ".join(note.split()[:3]) in " ".join(
                    text.replace("#", "").split()
                )
    assert comments(Optim)["states"] == "type of AdamW's moments"
    assert comments(Optim)["max_skipped"].startswith("number of steps in a row")


def test_a_setting_without_a_comment_is_refused():
    @dataclasses.dataclass
    class Section:
        # a heading of no field

        bare: int = 2

    with pytest.raises(ValueError, match="Section.bare has no comment"):
        list(annotate(Section()))


def test_help_lists_sections_and_their_keys(capsys):
    with pytest.raises(SystemExit) as end:
        train.main(["--config", "x", "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "--print-config" in shown
    for field in dataclasses.fields(Config):
        assert f"\n  {field.name}:" in shown
    for section in SECTIONS:
        train.main(["--help", section])
        shown = capsys.readouterr().out
        kind = type(getattr(from_dict({"lora": {}}), section))
        if section == "model":
            assert "\n  vocab_size: 32000\n" in shown and "\n  patch_size: [1, 2, 2]\n" in shown
        else:
            assert all(
                f"\n  {field.name.rstrip('_')}: " in shown for field in dataclasses.fields(kind)
            )
    with pytest.raises(InputError, match=r"optm \(nearest: optim\)"):
        describe_section("optm")


def test_print_config_ends_before_a_run(capsys, tmp_path):
    words = [
        "--config",
        str(ROOT / "configs/quickstart.yaml"),
        "--print-config",
        f"out_dir={tmp_path / 'out'}",
    ]
    train.main(words)
    assert load(words[1], [words[-1]]) == from_dict(read_yaml(capsys.readouterr().out, "it"))
    assert not (tmp_path / "out").exists()


WITHOUT_TORCH = """
import sys
from minitrain.__main__ import dispatch
from minitrain.errors import InputError
try:
    dispatch(sys.argv[1:])
except (SystemExit, InputError) as end:
    print(end)
sys.exit("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    "words",
    [
        "train --help model",
        "train --config quickstart optim.lrr=1",
        "train --config quickstart lr=1",
        "train --config quickstart model.hidden=1",
        "train --config quickstart model=llama3-9b",
        "train --confg x",
        "generate --task diffusion --help",
        "nothing",
        *(f"{name} --help" for name in COMMANDS),
        *(f"{name} --typo" for name in COMMANDS),
    ],
)
def test_help_and_mistyped_words_do_not_wait_for_torch(words):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *words.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_has_a_comment():
    kinds = [kind for kind in vars(settings).values() if dataclasses.is_dataclass(kind)]
    assert Config in kinds and len(kinds) > 12
    for kind in kinds:
        told = comments(kind)
        for field in dataclasses.fields(kind):
            is_section = kind is Config and field.name in SECTIONS
            assert is_section or told.get(field.name), f"{kind.__name__}.{field.name}"
