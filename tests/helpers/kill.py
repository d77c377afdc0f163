"""Kill runs at random times, restart them, and compare their numbers with those of an undisturbed run.

    python -m tests.helpers.kill --times 50 --seed 0

Times are uniform over the duration of a whole run, including start-up and the writing of checkpoints. A random rank
gets SIGKILL, and the others must end by themselves. Before all are in one process group, the others get SIGTERM, as
torchrun would send it. A run is killed and restarted until it finishes; then the next run begins.
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

# ends of the names of measured numbers, which differ between runs
MEASURED = ("_s", "_sec", "_gpu", "mfu", "_gib")


@dataclass
class Case:
    """A config and its number of ranks."""

    ranks: int
    tree: dict


CASES = {
    "one process": Case(1, TINY),
    "FSDP, asynchronous": Case(2, TINY | {"checkpoint": {"every": 3, "asynchronous": True}}),
    "GRPO": Case(1, TINY | GRPO),
    "GRPO in flight": Case(
        1, TINY | GRPO | {"grpo": GRPO["grpo"] | {"lag": 2, "in_flight": True}}
    ),
}


def train(file: Path) -> None:
    from minitrain import train

    train.main(["--config", str(file)])


class Run:
    """A training run that is restarted; `starts` counts its starts."""

    def __init__(self, case: Case, folder: Path):
        self.world = case.ranks
        self.starts = 0
        self.out = folder / "out"
        self.file = folder / "config.yaml"
        self.log = folder / "log.txt"
        folder.mkdir(parents=True)
        self.file.write_text(yaml.safe_dump(case.tree | {"out_dir": str(self.out)}))

    def start(self) -> Ranks:
        self.starts += 1
        return Ranks(self.world, self.log, train, self.file)

    def numbers(self) -> list[dict]:
        """Return the numbers of all steps so far, without the measured ones."""
        file = self.out / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        lines = [
            json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")
        ]
        return [{k: v for k, v in line.items() if not k.endswith(MEASURED)} for line in lines]

    def finish(self, ranks: Ranks) -> list[dict]:
        """Wait for a successful end, and return the numbers of all steps."""
        assert ranks.wait(120) and not any(ranks.codes()), (
            f"{ranks.codes()}\n{self.log.read_text()}"
        )
        return self.numbers()


def torment(case: Case, folder: Path, times: int, seed: int) -> dict:
    """Kill runs of a case this many times, and more often if needed until some run was killed twice.

    Every run must end with the numbers of an undisturbed one.
    """
    generator = random.Random(seed)
    start_server()
    began = time.monotonic()
    undisturbed = Run(case, folder / "undisturbed")
    expected = undisturbed.finish(undisturbed.start())
    duration = time.monotonic() - began
    runs = []
    seconds = []

    def most() -> int:
        return max((run.starts - 1 for run in runs), default=0)

    while len(seconds) < times or most() < 2:
        run = Run(case, folder / f"run-{len(runs)}")
        runs.append(run)
        began = time.monotonic()
        ranks = run.start()
        while (len(seconds) < times or most() < 2) and not ranks.wait(
            generator.uniform(0, duration)
        ):
            seconds.append(ranks.kill(generator.randrange(case.ranks)))
            ranks = run.start()
        found = run.finish(ranks)
        if run.starts == 1:
            # it was not killed in time: the machine was slower when the duration was measured
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
    """Return the number of kills for each case."""
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
        figures = [
            f"{key} {value if isinstance(value, int) else f'{value:.2f} s'}"
            for key, value in numbers.items()
        ]
        print(f"{name}: {', '.join(figures)}", flush=True)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
