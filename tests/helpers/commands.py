"""Run the project's command lines in forked processes, which need not import torch first."""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from minitrain.run.monitor import hardware
from tests.helpers.processes import fork, popen

ROOT = Path(__file__).parents[2]


def command(*words, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """Run `python words...` in the checkout, in a process forked from the pool's server.

    words: `-m module ...` or `script.py ...`. Raises subprocess.TimeoutExpired.
    """
    words = [str(word) for word in words]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = fork(become, words, outputs, dict(os.environ) | environment)
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(words, timeout)
        texts = [output.read_text() for output in outputs]
    return subprocess.CompletedProcess(words, process.exitcode, *texts)


def become(words: list[str], outputs: list[Path], environment: dict[str, str]) -> None:
    """Run what `python words...` would run, in this process."""
    # rates of the machine are measured quickly, and only roughly
    hardware.RUN = 0.01
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    if words[0] == "-m":
        sys.argv = words[1:]
        # runpy would warn that the server has imported the module already
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def torchrun(ranks: int, *words) -> subprocess.CompletedProcess:
    """Run `words` on this many ranks, started by torchrun."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(ranks),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [*launcher, *map(str, words)]
    process = popen(
        words,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, *output)
