"""Responses that are older than the weights they train: their versions, the queue, and runs that go on."""

import shutil
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from minitrain.grpo.responses import Response, describe_ages
from minitrain.run.config import load as configs
from tests.helpers.kill import MEASURED
from tests.helpers.lagging_runs import (
    SLOTS,
    STEPS,
    check_log_probs,
    lagging_tree,
    responses,
    run_lagging,
)

TALKS = {"environment": "tests.helpers.environments:Scripted", "environment_wait": 60.0}


@pytest.mark.parametrize("lag", [0, 3])
def test_a_queue_keeps_responses_for_as_many_steps(tmp_path, lag):
    tree = lagging_tree(lag)
    lines, weights, _ = run_lagging(tree, tmp_path, validates=False)
    found = check_log_probs(configs.from_dict(tree), tmp_path, weights, lag)
    ages = [min(step, lag) for step in range(STEPS)]
    for step, age in enumerate(ages):
        assert {version for versions in found[step] for version in versions} == {step - age}
    assert [line.get("age", 0) for line in lines] == ages
    assert [line.get("age_max", 0) for line in lines] == ages
    # each step has the next problems
    assert [line["problems"] for line in lines] == [3, 6, 9, 12, 15]


def simulated(lag, lengths):
    """The version of each token, if the first samples that have begun produce one token after the other.

    lengths: of the responses of each step.
    """
    versions = [[[] for _ in step] for step in lengths]

    def ended(step):
        return all(map(lambda v, n: len(v) == n, versions[step], lengths[step]))

    for step in range(STEPS):
        while not ended(step):
            begun = slice(step, min(step + lag + 1, STEPS))
            samples = zip(chain(*versions[begun]), chain(*lengths[begun]), strict=True)
            for one in [one for one, length in samples if len(one) < length][:SLOTS]:
                one.append(step)
    return versions


@pytest.mark.parametrize("lag", [1, 3])
def test_in_flight_no_step_waits_for_later_ones(tmp_path, lag):
    tree = lagging_tree(lag, in_flight=True)
    lines, weights, _ = run_lagging(tree, tmp_path)
    found = check_log_probs(configs.from_dict(tree), tmp_path, weights, lag)
    lengths = [[len(versions) for versions in step] for step in found]
    assert found == simulated(lag, lengths)
    assert sum(len(set(versions)) > 1 for versions in chain(*found)) > 5
    for step, line in enumerate(lines):
        ages = step - np.concatenate(found[step])
        assert line["age"] == pytest.approx(ages.mean()) and line["age_max"] == ages.max() <= lag
    assert max(line["age_max"] for line in lines) > lag / 2


def test_in_flight_rounds_of_sampling_take_what_has_begun(tmp_path):
    """With groups that are replaced, a step takes several rounds; each problem is in one step."""
    reward = "tests.helpers.policy_runs:of_some"
    tree = lagging_tree(2, in_flight=True, generations=3, reward=reward)
    lines, weights, task = run_lagging(tree, tmp_path)
    check_log_probs(configs.from_dict(tree), tmp_path, weights, 2)
    taken = [0, *(line["problems"] for line in lines)]
    counts = [after - before for before, after in pairwise(taken)]
    assert set(counts) <= {3, 6, 9} and len(set(counts)) > 1
    for step in range(STEPS):
        known = {p.answer for p in task.problems.take(taken[step], counts[step])}
        assert {r.answer for r in responses(tmp_path, step)} <= known


def test_in_flight_samples_talk_to_their_environments(tmp_path):
    """Tokens of all turns have versions, and what is given is neither drawn nor learned."""
    tree = lagging_tree(2, in_flight=True, turns=3, reward="exact", **TALKS)
    lines, weights, _ = run_lagging(tree, tmp_path)
    found = check_log_probs(configs.from_dict(tree), tmp_path, weights, 2)
    every = [response for step in range(STEPS) for response in responses(tmp_path, step)]
    assert sum(len(set(versions)) > 1 for versions in chain(*found)) > 5
    assert sum(bool(response.given) for response in every) > 10
    assert all(line["failed"] == 0 for line in lines)


def same(before, after):
    for one, other in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        assert all(one[key] == other[key] for key in one if not key.endswith(MEASURED))


@pytest.mark.parametrize(
    "grpo",
    [
        {"lag": 3},
        {"lag": 1, "in_flight": True},
        {"lag": 3, "in_flight": True, "keep_cache": True},
        {"lag": 2, "in_flight": True, "generations": 2},
    ],
    ids=str,
)
def test_a_run_goes_on_with_what_was_in_the_queue(tmp_path, grpo):
    """To the bit: metrics, evaluations, responses and weights."""
    tree = lagging_tree(**grpo)
    at_once, weights, _ = run_lagging(tree, tmp_path, saves=[2])
    before = [responses(tmp_path, step) for step in range(STEPS)]
    resumed, again, _ = run_lagging(tree, tmp_path)
    same(at_once[2:], resumed)
    assert [responses(tmp_path, step) for step in range(STEPS)] == before
    assert all(torch.equal(tensor, again[-1][name]) for name, tensor in weights[-1].items())


def test_responses_that_are_too_old_are_drawn_again(tmp_path):
    """With a lag that is less now; and with other settings, whatever has been drawn in flight."""
    run_lagging(lagging_tree(3), tmp_path, saves=[3], validates=False)
    assert [r.versions[0] for r in responses(tmp_path, 3)] == [[0, 0]] * 12
    run_lagging(lagging_tree(1), tmp_path, validates=False)
    assert [r.versions for r in responses(tmp_path, 3)] == [[[0, 3]]] * 12
    flying = tmp_path / "flying"
    run_lagging(lagging_tree(3, in_flight=True), flying, saves=[2])
    again = tmp_path / "again"
    shutil.copytree(flying, again)
    lines, *_ = run_lagging(lagging_tree(1, in_flight=True), flying)
    assert lines[0]["step"] == 3 and max(line["age_max"] for line in lines) == 1
    lines, *_ = run_lagging(
        lagging_tree(3, in_flight=True) | {"rollout": {"max_tokens": 20, "slots": SLOTS}}, again
    )
    assert lines[0]["step"] == 3 and lines[0]["age_max"] == 0
    assert max(len(r.response) for r in responses(again, 2)) <= 20


def test_ages_of_drawn_tokens():
    response = Response(0, [1], [5, 6, 7, 8, 9], [0.0] * 5, False, 0.0, 0.0, "", "")
    assert describe_ages([[response]], 4) == {"age": 0.0, "age_max": 0}
    response.versions, response.given = [[0, 1], [3, 4]], [[1, 2]]
    assert response.token_versions().tolist() == [1, 1, 1, 4, 4]
    assert describe_ages([[response]], 4) == {"age": 1.5, "age_max": 3}
