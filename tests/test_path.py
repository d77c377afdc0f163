"""How much of the package a step runs, and so how much a reader must open to follow one.

These are the project's own sizes, and no fork's. What needs more says why in its commit.
"""

import pytest

from tests.helpers.path import PACKAGE, decoding_step, lines_on_path, train_command, training_step

pytestmark = pytest.mark.budget

DECODING_FUNCTIONS = 66
TRAINING_FILES = 10
# share on the path
TRAINING_LINES = 0.34
# of `minitrain train`, which a plain run should not need more of for features that are off
COMMAND_FILES = 82
COMMAND_LINES = 5_200
# what it leaves alone, below the package
OFF = (
    "data/chat",
    "data/video",
    "formats/wan_names.py",
    "models/moe.py",
    "models/router.py",
    "parallel/context.py",
    "parallel/recompute.py",
)


def test_a_decoding_step_is_few_functions():
    """From the scheduler and back: prepare, model, sample."""
    called = decoding_step()
    assert 20 < sum(map(len, called.values())) <= DECODING_FUNCTIONS


def test_a_training_step_is_few_files_and_much_of_them():
    called = training_step()
    on_path, total = lines_on_path(called)
    assert 5 < len(called) <= TRAINING_FILES
    assert on_path / total >= TRAINING_LINES


def test_a_plain_run_is_not_asked_for_what_is_off():
    called = train_command()
    on_path, _ = lines_on_path(called)
    assert 40 < len(called) <= COMMAND_FILES
    assert 2_000 < on_path <= COMMAND_LINES
    names = [str(file.relative_to(PACKAGE)) for file in called]
    assert not [name for name in names if name.startswith(OFF)]
