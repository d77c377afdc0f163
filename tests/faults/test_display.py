"""A run goes on where nobody takes what it prints."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.kill import CASES, TINY, Run
from tests.helpers.processes import fork


def train_unseen(file: Path, end: str, environment: dict[str, str]) -> None:
    """Train with standard output and error that lead nowhere: a pipe that nobody reads, or closed."""
    os.environ.clear()  # the server has that of the test which it was started in
    os.environ.update(environment)
    import torch

    from minitrain import train
    from minitrain.run.launch import cli

    if end == "closed":
        sys.stdout = sys.stderr = None
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
        for number, name in enumerate(("stdout", "stderr"), 1):
            os.dup2(descriptor, number)
            # as in a process of its own
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
    torch.set_num_threads(1)
    cli.run(lambda _: train.main(["--config", str(file)]))


@pytest.mark.parametrize("end", ["no reader", "closed"])
def test_a_run_whose_output_is_closed_goes_on_to_its_end(tmp_path, end):
    """Its numbers and checkpoints are in files."""
    run = Run(CASES["one process"], tmp_path / "run")
    process = fork(train_unseen, run.file, end, dict(os.environ))
    process.join(120)
    assert process.exitcode == 0 and len(run.numbers()) == TINY["steps"]
    assert (run.out / "model.safetensors").exists()
