"""Runs of GRPO whose samples are older than the weights they train."""

from itertools import chain
from unittest.mock import patch

import numpy as np

from minitrain.data.chat.problems import open_problems
from minitrain.models.decoder import Decoder
from minitrain.parallel.shards import full_tensor
from minitrain.run.config import load as configs
from minitrain.run.tasks import grpo_task
from minitrain.run.tasks.grpo_task import GrpoTask
from minitrain.run.tasks.rollout_files import read_rollouts
from tests.helpers.environments import ENDS
from tests.helpers.grpo import TREE
from tests.helpers.sampling import trainer_logprobs

STEPS = 5
# rows of the sampler, for which the 12 samples of each step that has begun wait
SLOTS = 8


def lagging_tree(lag, **grpo):
    return TREE | {
        "steps": STEPS,
        "batch": {"global": 12, "micro": 2, "seq_len": 48},
        "grpo": {
            "prompts": 3,
            "group": 4,
            "mock_digits": 2,
            "lag": lag,
            "importance": "truncate",
            "reward": "tests.helpers.grpo:oddness",
            "eval_samples": 2,
        }
        | grpo,
        "rollout": {"max_tokens": 24, "slots": SLOTS},
        "optim": {"lr": 1e-2},
        "validation": {"every": 1, "batches": 1},
    }


def run_lagging(tree, folder, saves=(), validates=True):
    """A run's log, weights at the beginning of each step and at the end, and what its worker was to the end."""

    def with_ends(config):
        return *open_problems(config)[:3], ENDS

    with patch.object(grpo_task, "open_problems", with_ends):
        task = GrpoTask(configs.from_dict(tree), folder)
    first = task.begin()
    weights = [weights_of(task)]
    lines = []
    for line in task.steps(first):
        lines.append(line)
        weights.append(weights_of(task))
        if line["step"] in saves:
            task.save(line)
        if validates:
            task.finish(line, lambda: "")
    task.wait()
    return lines, weights, task


def weights_of(task):
    state = task.policy.model.state_dict() if task.policy else {}
    return {name: full_tensor(x.detach()).clone() for name, x in state.items()}


def responses(folder, step):
    return list(chain(*read_rollouts(folder / f"rollouts/step-{step + 1:08d}.jsonl")))


def check_log_probs(config, folder, weights, most):
    """Every drawn token's log-probability is that of a full pass with the weights of its version.

    Returns the versions of each response's tokens, by step.
    """
    model = Decoder(config.model.config)
    found = []
    for step in range(STEPS):
        found.append([])
        for response in responses(folder, step):
            versions, drawn = response.token_versions(), response.drawn()
            assert len(versions) == len(response.response)
            assert (versions <= step).all() and (versions >= step - most).all()
            found[-1].append(versions.tolist())
            for version in set(versions):
                model.load_state_dict(weights[version])
                own = trainer_logprobs(model, response.prompt, response.response).numpy()
                chosen = drawn & (versions == version)
                np.testing.assert_allclose(
                    np.array(response.log_probs)[chosen], own[chosen], atol=5e-5, rtol=0
                )
    return found
