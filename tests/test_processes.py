"""Processes that tests start: what signals do to them, and when they end."""

import signal
import sys
import time

import pytest

from tests.helpers.processes import STARTED, end_started, fork, popen

NUMBERS = (signal.SIGINT, signal.SIGHUP)
TELL = "import signal, sys; print([signal.getsignal(int(n)) == signal.SIG_IGN for n in sys.argv[1:]])"


@pytest.fixture
def ignored():
    """Some signals, as nohup and a shell that starts a program in the background leave them to it."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in NUMBERS}
    yield NUMBERS
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_that_tests_ignore_are_heeded_by_what_they_start(ignored):
    words = [sys.executable, "-c", TELL, *(str(int(number)) for number in ignored)]
    assert popen(words, stdout=-1, text=True).communicate()[0] == "[False, False]\n"
    process = fork(heed, ignored)
    process.join(60)
    assert process.exitcode == 0


def heed(numbers):
    assert not [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]


def test_what_a_test_leaves_running_ends_with_it():
    forked, program = fork(time.sleep, 1000), popen([sys.executable, "-c", "input()"], stdin=-1)
    assert forked.exitcode is None and program.poll() is None
    end_started()
    assert forked.exitcode == -signal.SIGKILL and program.poll() == -signal.SIGTERM
    assert not STARTED
