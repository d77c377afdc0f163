"""Add the option `--of FILE`, and exclude imported modules from garbage collection.

Searching them for garbage would take a third of the time of collecting tests, and a sixth of that of running them.
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
