"""Runs of GRPO on several ranks."""

import torch.distributed as dist

from minitrain.run.config import load as configs
from minitrain.run.tasks.grpo_task import GrpoTask
from tests.helpers.grpo import oddness
from tests.helpers.oracle import snapshot


def run_policy(tree, folder, steps):
    """A run's numbers by step, the responses that it sampled, and its last weights, for ranks that train."""
    config = configs.from_dict(tree)
    task = GrpoTask(config, folder)
    if dist.get_rank():  # on some file systems others see what rank 0 has written only later
        task.rollouts = lambda step: folder / "not yet here"
    first = task.begin()
    numbers = []
    for line in task.steps(first):
        numbers.append(line)
        if line["step"] in steps:
            task.save(line)
    task.wait()
    return numbers, snapshot(task.policy.model.named_parameters()) if task.policy else None


def of_some(response, answer, row):
    """A reward that differs only where the question says so: of about half of all."""
    return oddness(response, answer, row) if int(answer, 10) % 2 else 0.0
