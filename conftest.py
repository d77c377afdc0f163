"""What must be said before other files are read: `--of FILE`, all that was found, no search for garbage.

What the imports of all tests leave is no garbage, and looking for it there takes a third of their time, and a sixth of
that of the tests.
"""

import gc
from pathlib import Path

import pytest

from tests.helpers.imports import COLLECTED, files_wanted, reached_by

gc.disable()
WANTED = pytest.StashKey[set[Path]]()


def pytest_addoption(parser):
    parser.addoption(
        "--of",
        action="append",
        default=[],
        metavar="FILE",
        help="run the tests whose files import FILE, directly or through tests/helpers; repeatable",
    )


def pytest_configure(config):
    config.stash[WANTED] = files_wanted(config.getoption("of"))


def pytest_ignore_collect(collection_path, config):
    wanted = config.stash[WANTED]
    if wanted and collection_path.match("test_*.py") and not wanted & reached_by(collection_path):
        return True


def pytest_collection_modifyitems(config, items):
    config.stash[COLLECTED] = [item.nodeid for item in items]


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
