"""Kill runs at seeded moments, start them again, and compare what comes out with a run that nobody disturbed.

    python -m tests.helpers.kill --times 50 --seed 0

A moment is uniform over the time that a whole run takes, start-up and the writing of checkpoints included; one rank, by
lot, gets SIGKILL, and the others must end by themselves; before all are in one group they get SIGTERM, as from
torchrun. A run is killed again and again until it gets through; then another one begins.
"""

import argparse
import json
import os
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.helpers.processes import Ranks, start_server

TINY = {
    "model": {"name": "llama3-8b-tiny", "vocab_size": 258, "num_layers": 2},
    "batch": {"global": 4, "micro": 2, "seq_len": 16},
    "steps": 12,
    "device": "cpu",
    "checkpoint": {"every": 2},
    "validation": {"every": 2, "batches": 1},
}
GRPO = {
    "task": "grpo",
    "steps": 4,
    "data": {"template": "plain"},
    "batch": {"global": 16, "micro": 4, "seq_len": 32},
    "grpo": {
        "prompts": 4,
        "group": 4,
        "mock_digits": 2,
        "lag": 1,
        "kl": 0.1,
        "importance": "truncate",
        "reward": "tests.helpers.grpo:oddness",
    },
    "rollout": {"max_tokens": 8},
    "checkpoint": {"every": 1},
}

MEASURED = ("_s", "_sec", "_gpu", "mfu", "_gib")  # numbers that no two runs share end so


@dataclass
class Case:
    """A config, and the number of its ranks."""

    ranks: int
    tree: dict


CASES = {
    "one process": Case(1, TINY),
    "FSDP, asynchronous": Case(2, TINY | {"checkpoint": {"every": 3, "asynchronous": True}}),
    "GRPO": Case(1, TINY | GRPO),
}


def train(file: Path) -> None:
    from minitrain import train

    train.main(["--config", str(file)])


class Run:
    """A command line that is started again and again: `starts` times so far."""

    def __init__(self, case: Case, folder: Path):
        self.world, self.out, self.starts = case.ranks, folder / "out", 0
        self.file, self.log = folder / "config.yaml", folder / "log.txt"
        folder.mkdir(parents=True)
        self.file.write_text(yaml.safe_dump(case.tree | {"out_dir": str(self.out)}))

    def start(self) -> Ranks:
        self.starts += 1
        return Ranks(self.world, self.log, train, self.file)

    def numbers(self) -> list[dict]:
        """Those of all steps so far, without the times they took and what else was measured."""
        file = self.out / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        lines = [
            json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")
        ]
        return [{k: v for k, v in line.items() if not k.endswith(MEASURED)} for line in lines]

    def finish(self, ranks: Ranks) -> list[dict]:
        """The numbers of all steps, after a good end."""
        assert ranks.wait(120) and not any(ranks.codes()), (
            f"{ranks.codes()}\n{self.log.read_text()}"
        )
        return self.numbers()


def torment(case: Case, folder: Path, times: int, seed: int) -> dict:
    """Kill runs of a case so many times, and some run twice at least, if need be with more kills.

    Every run must in the end have the numbers of an undisturbed one.
    """
    generator = random.Random(seed)
    start_server()
    began = time.monotonic()
    undisturbed = Run(case, folder / "undisturbed")
    expected = undisturbed.finish(undisturbed.start())
    duration = time.monotonic() - began
    runs, seconds = [], []

    def most() -> int:
        return max((run.starts - 1 for run in runs), default=0)

    while len(seconds) < times or most() < 2:
        run = Run(case, folder / f"run-{len(runs)}")
        runs.append(run)
        began, ranks = time.monotonic(), run.start()
        while (len(seconds) < times or most() < 2) and not ranks.wait(
            generator.uniform(0, duration)
        ):
            seconds.append(ranks.kill(generator.randrange(case.ranks)))
            ranks = run.start()
        found = run.finish(ranks)
        if run.starts == 1:  # nobody was killed: the machine may have been slow before
            duration = min(duration, time.monotonic() - began)
        differing = [pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]]
        assert not differing, f"{run.out}, started {run.starts} times: {differing[0]}"
    return {
        "kills": len(seconds),
        "runs": len(runs),
        "most kills of one run": most(),
        "one run": duration,
        "slowest end after a kill": max(seconds),
    }


def share(times: int) -> dict[str, int]:
    """So many kills, divided among the cases."""
    return {name: times // len(CASES) + (i < times % len(CASES)) for i, name in enumerate(CASES)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name, times in share(options.times).items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="minitrain-kill-") as folder:
            numbers = torment(CASES[name], Path(folder), times, options.seed) | {
                "in all": time.monotonic() - began
            }
        told = [
            f"{key} {value if isinstance(value, int) else f'{value:.2f} s'}"
            for key, value in numbers.items()
        ]
        print(f"{name}: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
