"""How much of the package a step runs, and so how much a reader must open to follow one."""

from tests.helpers.path import decoding_step, lines_on_path, training_step

DECODING_FUNCTIONS = 50
TRAINING_FILES = 10
TRAINING_LINES = 0.35  # share on the path


def test_a_decoding_step_is_few_functions():
    """From the scheduler and back: prepare, model, sample."""
    called = decoding_step()
    assert 20 < sum(map(len, called.values())) <= DECODING_FUNCTIONS


def test_a_training_step_is_few_files_and_much_of_them():
    called = training_step()
    on_path, total = lines_on_path(called)
    assert 5 < len(called) <= TRAINING_FILES
    assert on_path / total >= TRAINING_LINES
