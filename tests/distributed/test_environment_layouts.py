"""Samples that talk to environments, over several ranks: what one process draws, and runs that go on."""

from unittest.mock import patch

import pytest
import torch

from minitrain.data.chat.problems import open_problems
from minitrain.errors import InputError
from minitrain.run.tasks import grpo_task
from minitrain.run.tasks.rollout_files import read_rollouts
from tests.helpers.environments import ENDS, TALK, Scripted
from tests.helpers.kill import MEASURED
from tests.helpers.oracle import check_close
from tests.helpers.policy_runs import run_policy

SCRIPTED = TALK | {
    "steps": 2,
    "optim": {"lr": 1e-3},
    "batch": {"global": 16, "micro": 2, "seq_len": 64},
    "grpo": {
        "prompts": 4,
        "group": 4,
        "mock_digits": 2,
        "environment": "tests.helpers.environments:Scripted",
        "environment_wait": 60.0,
        "importance": "truncate",
    },
}


def run_talking(tree, folder, steps=()):
    """`run_policy`, with a policy that knows many ends of a reply."""

    def with_ends(config):
        return *open_problems(config)[:3], ENDS

    with patch.object(grpo_task, "open_problems", with_ends):
        return run_policy(tree, folder, steps)


def said(folder, step):
    groups = read_rollouts(folder / f"rollouts/step-{step:08d}.jsonl")
    return [
        (r.prompt, r.response, r.given, r.turns, r.score, r.truncated)
        for group in groups
        for r in group
    ]


MOE = {"model": {"name": "qwen3-30b-a3b-tiny", "vocab_size": 258, "initializer_range": 0.05}}


@pytest.mark.parametrize(
    "split",
    [
        {"rollout": {"tp": 2}},
        {"rollout": {"tp": 2, "ep": 2}, "parallel": {"ep": 2}} | MOE,
        {"parallel": {"dp_shard": 2}},
        {"parallel": {"cp": 2}},
        {"grpo": {"lag": 1, "generation_ranks": 1}},
    ],
    ids=["tp", "ep", "replicas", "cp", "apart"],
)
def test_ranks_draw_what_one_process_draws(pool, tmp_path, split):
    """And learn from it: the environments of a sampler's samples run on all of its ranks."""
    tree = SCRIPTED | {"model": split.get("model", SCRIPTED["model"])}
    lag = split.get("grpo", {}).get("lag", 0)
    tree["grpo"] = SCRIPTED["grpo"] | {"lag": lag}
    [(expected, weights)] = pool.run(1, run_talking, tree, tmp_path / "one")
    tree = tree | {"parallel": split.get("parallel", {})}
    tree["rollout"] = TALK["rollout"] | split.get("rollout", {})
    tree["grpo"] = tree["grpo"] | split.get("grpo", {})
    results = pool.run(2, run_talking, tree, tmp_path / "two")
    found, trained = results[0]
    # later steps have weights that other sums have rounded
    for step in (1, 2):
        one, two = said(tmp_path / "one", step), said(tmp_path / "two", step)
        assert one == two or (
            step == 2 and sum(a != b for a, b in zip(one, two, strict=True)) < 3
        )
    assert found[0]["turns"] == expected[0]["turns"] > 1.2 and found[0]["given"] > 2
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-3, abs=1e-5)
    assert found[0]["token_mult_prob_error"] < 1 + 1e-4
    if lag:
        check_close([trained], weights, 1e-4, "weights")


@pytest.mark.parametrize("lag", [0, 1])
def test_a_run_goes_on_where_it_was(pool, tmp_path, lag):
    """In the middle of an epoch, to the bit: responses, numbers and weights."""
    tree = SCRIPTED | {"steps": 4, "grpo": SCRIPTED["grpo"] | {"lag": lag}}
    [(at_once, weights)] = pool.run(1, run_talking, tree, tmp_path, [2])
    responses = [said(tmp_path, step) for step in (3, 4)]
    [(resumed, again)] = pool.run(1, run_talking, tree, tmp_path)
    assert [line["step"] for line in resumed] == [3, 4]
    for before, after in zip(at_once[2:], resumed, strict=True):
        assert all(before[key] == after[key] for key in before if not key.endswith(MEASURED))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    assert responses == [said(tmp_path, step) for step in (3, 4)]


class FailsOnce(Scripted):
    """Fails for some rows, which only one of the ranks sees."""

    def step(self, response):
        if self.row["prompt"][-1] in "13579" and self.replies:
            raise OSError("gone")
        return super().step(response)


def refused(tree, folder):
    try:
        run_talking(tree, folder)
    except InputError as error:
        return str(error)


def test_all_ranks_of_a_sampler_end_with_the_same_line(pool, tmp_path):
    tree = SCRIPTED | {"rollout": TALK["rollout"] | {"tp": 2}}
    name = f"{__name__}:FailsOnce"
    tree["grpo"] = SCRIPTED["grpo"] | {"environment": name, "prompts": 16}
    one, other = pool.run(2, refused, tree, tmp_path)
    assert one == other and one.startswith(
        f"grpo.environment={name} raised OSError: gone for the "
    )


def test_failures_are_told_and_counted(pool, tmp_path, capfd):
    name = f"{__name__}:FailsOnce"
    grpo = {"environment": name, "prompts": 16, "environment_failure": "zero"}
    tree = SCRIPTED | {"steps": 1, "grpo": SCRIPTED["grpo"] | grpo}
    numbers, _ = run_talking(tree, tmp_path)
    groups = read_rollouts(tmp_path / "rollouts/step-00000001.jsonl")
    failed = [r for group in groups for r in group if r.failure]
    assert numbers[0]["failed"] == len(failed) / 64 > 0 and {r.score for r in failed} == {0.0}
    told = f"step 1: {len(failed)} environments failed, the first: {failed[0].failure}\n"
    assert told in capfd.readouterr().err
