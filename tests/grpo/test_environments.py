"""Samples that talk to environments: what they are told, what is learned of it, and what goes wrong."""

import math
import re
import time
from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minitrain import Sampler, SamplingParams
from minitrain.data.chat.dialogs import ChatDialog
from minitrain.data.chat.problems import open_problems
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.grpo.advantages import advantages
from minitrain.grpo.batches import response_example
from minitrain.grpo.environments import load_environment
from minitrain.grpo.episode_runner import EpisodeRunner
from minitrain.grpo.policy_trainer import PolicyTrainer
from minitrain.grpo.responses import Response, averages, rewards
from minitrain.grpo.rollouts import sampling_settings
from minitrain.run.config import load as configs
from minitrain.run.config.unread import unread
from minitrain.run.launch.start import start
from minitrain.settings import Rollout
from minitrain.training.loss import IGNORE
from tests.helpers.environments import (
    ENDS,
    TALK,
    Awaited,
    Different,
    OneTurn,
    Scripted,
    Slow,
    talking_worker,
)
from tests.helpers.grpo import TREE, oddness
from tests.helpers.oracle import snapshot
from tests.helpers.sampling import trainer_logprobs

TOKENIZER = ByteTokenizer()


def flat(groups):
    return [response for group in groups for response in group]


def said(groups):
    """All that is drawn and given, without the log-probabilities, which batches round in their own ways."""
    return [(r.prompt, r.response, r.given, r.score, r.truncated, r.turns) for r in flat(groups)]


def log_probs(groups):
    return [r.log_probs for r in flat(groups)]


@cache
def scripted():
    """The groups of a step with the scripted environment, and the model that drew them."""
    worker, problems = talking_worker(Scripted)
    return worker.collect(problems, 0), worker.sampler.model


def test_drawn_and_given_tokens_of_a_response():
    """Replies end with an end, what is given follows from them, and log-probabilities are the trainer's."""
    groups, model = scripted()
    assert [len(group) for group in groups] == [4] * 3
    kinds = Counter()
    for r in flat(groups):
        drawn, score, start = r.drawn(), 0.0, 0
        borders = [*r.given, [len(r.response), len(r.response)]]
        assert r.turns == len(borders)
        for number, (first, end) in enumerate(borders, 1):
            reply = r.response[start:first]
            ended = reply[-1] in ENDS
            assert not set(reply[:-1]) & set(ENDS) and drawn[start:first].all()
            text = TOKENIZER.decode(reply[:-1] if ended else reply)
            score += oddness(text, "", {})
            if end > first:
                told = f"{number}: {len(text)}\n".encode()
                assert (
                    ended and bytes(r.response[first:end]) == told and not drawn[first:end].any()
                )
            start = end
        assert r.score == r.reward == pytest.approx(score, abs=1e-12)
        assert r.truncated == (r.turns < 3 or not ended) and len(r.response) <= 40
        kinds["truncated" if r.truncated else "done", r.turns] += 1
        own = trainer_logprobs(model, r.prompt, r.response)[drawn]
        found = torch.tensor(r.log_probs)
        torch.testing.assert_close(found[drawn], own, atol=3e-5, rtol=0)
        assert not found[~torch.from_numpy(drawn)].any()
        assert r.text == TOKENIZER.decode(r.response, special=True)
    # some of all kinds: cut off in each turn, and played to the end
    assert kinds["done", 3] > 1 and kinds["truncated", 3] + kinds["truncated", 2] > 0


def test_a_turn_alone_is_a_reward_function():
    """To the bit, truncated ones and the penalty for length included."""
    length = {"max_tokens": 6, "overlong_buffer": 4, "overlong_penalty": 0.5}
    worker, problems = talking_worker(OneTurn, **length)
    talked = worker.collect(problems, 0)
    plain, _ = talking_worker(None, **length)
    plain.reward = oddness
    expected = plain.collect(problems, 0)
    for one, other in zip(flat(talked), flat(expected), strict=True):
        assert one.turns == 1 and one.given == []
        names = (
            "group",
            "prompt",
            "response",
            "log_probs",
            "truncated",
            "score",
            "reward",
            "answer",
        )
        assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    assert {r.truncated for r in flat(talked)} == {True, False}
    assert any(r.reward < r.score for r in flat(talked))


@pytest.mark.parametrize(
    "rollout",
    [
        Rollout(slots=2, page_size=4, pages=18, chunk=5),
        Rollout(slots=5, page_size=16, pages=9, steps=4),
        Rollout(slots=1, page_size=64, pages=1),
    ],
    ids=["small", "steps", "one"],
)
def test_little_memory_and_few_rows_change_nothing(rollout):
    worker, problems = talking_worker(Scripted, rollout)
    groups = worker.collect(problems, 0)
    assert said(groups) == said(scripted()[0])
    for one, other in zip(log_probs(groups), log_probs(scripted()[0]), strict=True):
        assert one == pytest.approx(other, abs=3e-5)
    assert worker.sampler.idle and worker.sampler.scheduler.pages.available == rollout.pages
    # again, from what the prefix cache has of it
    assert said(worker.collect(problems, 0)) == said(groups)


@pytest.mark.parametrize("environment", [Slow, Awaited])
def test_others_go_on_while_an_environment_takes_its_time(environment):
    """Or wait for it, as long as it is told to be worth it: then all is as if it took none, to the bit."""
    groups = scripted()[0]
    for wait in (60.0, 0.0):
        worker, problems = talking_worker(environment, environment_wait=wait)
        play, overlaps = worker.episodes, []
        answers = play.answers

        def counted(answers=answers, play=play, overlaps=overlaps):
            found = answers()
            overlaps.append(len(play.waiting) > len(found) and play.sampler.busy)
            return found

        with patch.object(play, "answers", counted):
            found = worker.collect(problems, 0)
        assert said(found) == said(groups)
        assert any(overlaps) == (wait == 0)
        assert (log_probs(found) == log_probs(groups)) or wait == 0
        for one, other in zip(log_probs(found), log_probs(groups), strict=True):
            assert one == pytest.approx(other, abs=3e-5)


def test_patience_ends_with_the_first_answer_that_takes_longer():
    worker, problems = talking_worker(Slow, environment_wait=0.005)
    assert said(worker.collect(problems, 0)) == said(scripted()[0])
    assert not worker.episodes.patient


def test_samples_of_a_problem_that_begin_differently():
    """Each reply is that of a request with the sample's own prompt and number."""
    Different.made = 0
    worker, problems = talking_worker(Different, turns=1)
    groups = worker.collect(problems, 0)
    assert len({tuple(r.prompt) for r in groups[0]}) == 2
    fresh = Sampler(worker.sampler.model, None, Rollout(page_size=4, pages=60))
    for index, group in enumerate(groups):
        for number, r in enumerate(group):
            params = SamplingParams(
                max_tokens=40, stop_tokens=ENDS, seed=worker.seed(index), ignore_eos=True
            )
            (sample,) = fresh.submit(r.prompt, params, first=number)
            while fresh.busy:
                fresh.step()
            assert r.response == sample.produced and len(r.prompt) > 3


def test_limits_of_turns_and_tokens():
    whole = flat(scripted()[0])
    worker, problems = talking_worker(Scripted, turns=2)
    for r, other in zip(flat(worker.collect(problems, 0)), whole, strict=True):
        assert r.turns == min(2, other.turns) and r.truncated and len(r.given) == r.turns - 1
        assert r.response == other.response[: len(r.response)]
    # an answer that leaves no room for a reply is not given
    wordy, problems = talking_worker(Wordy)
    groups = flat(wordy.collect(problems, 0))
    assert {r.turns for r in groups} == {1} and all(r.truncated and not r.given for r in groups)


class Wordy(Scripted):
    def said(self, response):
        return [{"role": "user", "content": "x" * 40}]


# ------------------------------------------------------------------------------------------- what goes wrong


class Failing(Scripted):
    """Fails for rows that begin with an odd digit, as `how` says."""

    how = None

    @property
    def fails(self):
        return self.row["prompt"][0] in "13579"

    def reset(self, row):
        begun = super().reset(row)
        return self.how("reset", begun) if self.fails else begun

    def step(self, response):
        answer = super().step(response)
        return self.how("step", answer) if self.fails and self.replies == 2 else answer


def fails_in(place, function):
    return lambda where, answer: function(answer) if where == place else answer


def raises(error):
    def function(answer):
        raise error

    return function


def later(answer):
    async def wait():
        raise ValueError("later\nand more")

    return wait()


def hangs(answer):
    time.sleep(20)
    return answer


FAILURES = {
    "raises": (
        fails_in("step", raises(KeyError("x"))),
        "raised KeyError: 'x' for the row .*, at ",
    ),
    "raises at first": (
        fails_in("reset", raises(OSError("gone"))),
        "raised OSError: gone for the ",
    ),
    "exits": (fails_in("step", raises(SystemExit(3))), "raised SystemExit: 3 for the row "),
    "raises later": (fails_in("step", later), "raised ValueError: later for the row "),
    "hangs": (
        fails_in("step", hangs),
        "took longer than grpo.environment_seconds=1 for the row ",
    ),
    "hangs at first": (fails_in("reset", hangs), "took longer than grpo.environment_seconds=1 "),
    "nothing": (fails_in("step", lambda answer: None), r"step\(\) returned None, and not \(mess"),
    "two": (fails_in("step", lambda answer: answer[:2]), r"and not \(messages, reward, done\)"),
    "no list": (
        fails_in("reset", lambda answer: "hi"),
        r"reset\(\) returned 'hi', and not a list",
    ),
    "no message": (
        fails_in("step", lambda answer: ([], 0.0, False)),
        r"step\(\) returned \[\], and not a list of messages with 'role' and 'content'",
    ),
    "no role": (
        fails_in("step", lambda answer: ([{"content": "x"}], 0.0, False)),
        r"'step\(\)'\[0\]: no key 'role'",
    ),
    "the policy's role": (
        fails_in("step", lambda answer: ([{"role": "assistant", "content": "x"}], 0.0, False)),
        r"step\(\) returned a message of the assistant, which is the policy",
    ),
    "a word as reward": (
        fails_in("step", lambda answer: (answer[0], "many", False)),
        r"step\(\) returned the reward 'many', not a finite number",
    ),
    "NaN as reward": (
        fails_in("step", lambda answer: (answer[0], math.nan, True)),
        r"step\(\) returned the reward nan, not a finite number",
    ),
    "a number as done": (
        fails_in("step", lambda answer: (answer[0], 1.0, 1)),
        r"step\(\) returned 1 as done, not True or False",
    ),
    "what no text may hold": (
        fails_in("step", lambda answer: ([{"role": "user", "content": "\ufdd0"}], 0, False)),
        r"its text holds U\+FDD0",
    ),
    "an array as reward": (
        fails_in("step", lambda answer: (answer[0], np.ones((2, 40)), np.False_)),
        r"step\(\) returned the reward array\(\[\[1.*, not a finite number",
    ),
    "what cannot be looked at": (
        fails_in("step", lambda answer: ([Unreadable()], 1.0, False)),
        r"its answer cannot be read, ValueError\('no, never'\), for the row",
    ),
    "a prompt without end": (
        fails_in("reset", lambda answer: [{"role": "user", "content": "x" * 70}]),
        "a prompt of 71 tokens leaves no room for a response",
    ),
}


class Unreadable(dict):
    """A message that raises when it is looked at."""

    def get(self, key, default=None):
        raise ValueError("no, never")


AT_FIRST = {"raises at first", "hangs at first", "no list", "a prompt without end"}


@cache
def failing_worker():
    """One for all failures. Problems of which some fail, and some do not."""
    worker, problems = talking_worker(Failing)
    problems = problems.take(0, 6)
    odd = [problem.row["prompt"][0] in "13579" for problem in problems]
    assert 0 < sum(odd) < 6
    episodes = worker.episodes
    with patch.object(episodes, "factory", episodes.factory._replace(environment=Scripted)):
        whole = worker.sample(problems, 0, 2)
    return worker, problems, odd, whole


@pytest.mark.parametrize("name", FAILURES)
def test_failures_are_one_line_with_the_row_or_worth_nothing(name):
    worker, problems, odd, whole = failing_worker()
    start(worker.config)
    how, line = FAILURES[name]
    play = worker.episodes
    # few only where one hangs: a busy machine may take long for the others' answers
    seconds = 1.0 if "environment_seconds" in line else 60.0
    with (
        patch.object(Failing, "how", staticmethod(how)),
        patch.object(play.settings, "environment_seconds", seconds),
    ):
        worker.sampler.forget()
        with pytest.raises(InputError, match=line) as raised:
            worker.sample(problems, 0, 2)
        told = str(raised.value)
        assert told.startswith("grpo.environment=") and "\n" not in told
        rows = [problem.row for problem, fails in zip(problems, odd, strict=True) if fails]
        assert any(f'for the row {{"prompt": "{row["prompt"]}"}}' in told for row in rows)
        assert worker.sampler.idle
        with patch.object(play.settings, "environment_failure", "zero"):
            groups = worker.sample(problems, 0, 2)
    for fails, group, right in zip(odd, groups, whole, strict=True):
        for r, other in zip(group, right, strict=True):
            fails_here = fails and (name in AT_FIRST or other.turns > 1)
            assert bool(r.failure) == fails_here
            if not fails_here:
                assert said([[r]]) == said([[other]])
                continue
            assert re.search(line, r.failure) and "\n" not in r.failure and r.score == 0
            assert r.response == other.response[: len(r.response)]
            assert len(r.log_probs) == len(r.response) and r.turns == 2 * (name not in AT_FIRST)
    failures = [r for r in flat(groups) if r.failure]
    assert failures and averages(groups)["failed"] == len(failures) / 12
    assert worker.sampler.idle


def test_a_reply_that_cannot_be_read_is_a_failure_of_its_row():
    """Reading it is part of the environment's step, in a thread: it may fail, or take long."""
    worker, problems, *_ = failing_worker()
    start(worker.config)
    settings = worker.episodes.settings
    with (
        patch.object(Failing, "how", staticmethod(lambda where, answer: answer)),
        patch.object(ChatDialog, "hear", side_effect=ValueError("no")),
    ):
        with pytest.raises(
            InputError, match="^grpo.environment=.*raised ValueError: no for the row"
        ):
            worker.sample(problems, 0, 1)
        with patch.object(settings, "environment_failure", "zero"):
            groups = worker.sample(problems, 0, 1)
    assert all("raised ValueError: no" in r.failure and r.score == 0 for r in flat(groups))


def test_environments_that_are_none_are_refused_at_once():
    for name, line in {
        "tests.helpers.environments:Scripted": None,
        "Scripted": "grpo.environment='Scripted' is not empty or package.module:function",
        "tests.helpers.environments:NoSuch": "cannot be imported: AttributeError",
        "tests.helpers.environments:ENDS": "is a tuple, not a function",
        "tests.helpers.environments:talking_worker": r"must take \(\)",
        "collections:Counter": r"has no reset\(\)",
    }.items():
        if line is None:
            assert load_environment(name) is not None
            continue
        with pytest.raises(InputError, match=line):
            load_environment(name)


def test_unread_settings_of_environments_get_notes():
    tree = TREE | {"grpo": {"turns": 3, "environment_wait": 1.0, "reward": "math"}}
    lines = list(unread(configs.from_dict(tree)))
    assert [line.partition("=")[0] for line in lines] == [
        "note: nothing reads grpo.turns",
        "note: nothing reads grpo.environment_wait",
    ]
    tree["grpo"]["environment"] = "x:Y"
    (line,) = unread(configs.from_dict(tree))
    assert line == "note: nothing reads grpo.reward=math, which is for no grpo.environment"
    digests = {
        sampling_settings(configs.from_dict(TREE | {"grpo": grpo}))
        for grpo in ({}, {"environment": "x:Y"}, {"turns": 3}, {"environment_failure": "zero"})
    }
    assert len(digests) == 4


def test_rows_without_questions(tmp_path):
    """An environment makes its own; only a warm-up needs questions with answers. Rows that are alike stay together."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"level": {i // 2}}}\n' for i in range(40)))
    data = {"kind": "jsonl", "path": str(file), "template": "plain", "validation": 0.2}
    tree = TALK | {"data": data, "grpo": TALK["grpo"] | {"environment": "x:Y"}}
    train, held, _, ends = open_problems(configs.from_dict(tree))
    levels = [{problem.row["level"] for problem in side.problems} for side in (train, held)]
    assert len(levels[1]) == len(held) == 4 and not levels[0] & levels[1] and len(train) == 32
    assert ends == (257,)
    tree["grpo"] = tree["grpo"] | {"warmup_steps": 1}
    with pytest.raises(InputError, match=r"rows.jsonl:1: no prompt"):
        open_problems(configs.from_dict(tree))


# ----------------------------------------------------------------------------------------------------- learning


def made_up_talks():
    """Responses of several turns, one that failed before it began, and one that has said nothing but an end."""
    generator = torch.Generator().manual_seed(0)

    def talk(group, number):
        size = 6 + (3 * group + 5 * number) % 9
        tokens = torch.randint(258, (4 + size,), generator=generator).tolist()
        given = [[2, 4]] if number % 2 else [[1, 2], [3, 5]]
        values = (-5.5 + 0.2 * torch.randn(size, generator=generator)).tolist()
        for first, end in given:
            values[first:end] = [0.0] * (end - first)
        reward = float(number % 3 == group % 3)
        more = {"given": given, "turns": len(given) + 1}
        return Response(
            group, tokens[:4], tokens[4:], values, False, reward, reward, "", "", **more
        )

    groups = [[talk(group, number) for number in range(4)] for group in range(4)]
    groups[1][2] = Response(1, [257], [], [], False, 0.0, 0.0, "", "", failure="gone")
    groups[2][0] = Response(2, [5, 6], [257], [-5.0], False, 1.0, 1.0, "", "", turns=1)
    return groups


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_loss_counts_drawn_tokens_alone(aggregation):
    """The whole update is that of the formula, written out over full passes of single samples."""
    tree = TREE | {
        "batch": {"global": 16, "micro": 2, "seq_len": 32},
        "optim": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": None},
        "grpo": {
            "prompts": 4,
            "group": 4,
            "mock_digits": 2,
            "surrogate": "reinforce",
            "aggregation": aggregation,
        },
    }
    config = configs.from_dict(tree)
    policy = PolicyTrainer(config, start(config), lambda name: nullcontext())
    model = deepcopy(policy.model)
    groups = made_up_talks()
    numbers = policy.learn(groups, step=0)
    values = advantages(rewards(groups), "leave_one_out", True).flatten().tolist()
    loss, tokens, sequences = 0.0, 0, 0
    for r, advantage in zip(flat(groups), values, strict=True):
        drawn = torch.from_numpy(r.drawn())
        if not len(drawn):
            continue
        logits = model(torch.tensor([r.prompt + r.response]))[0, len(r.prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(r.response)[:, None])[:, 0]
        weight = 1 / int(drawn.sum()) if aggregation == "sequence" else 1.0
        loss = loss - advantage * weight * own[drawn].sum()
        tokens += int(drawn.sum())
        sequences += 1
    divisor = {"token": tokens, "sequence": sequences, "constant": sequences * 8}[aggregation]
    (loss / divisor).backward()
    after = snapshot(policy.model.named_parameters())
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - parameter.grad
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(after[name], expected, atol=2e-5 * max(scale, 1e-3), rtol=1e-6)
    assert numbers["loss"] == pytest.approx(loss.item() / divisor, rel=1e-5)


def test_labels_and_columns_of_a_talk():
    config = configs.from_dict(TREE | {"grpo": {"aggregation": "sequence"}})
    r = Response(0, [1, 2, 3], [4, 5, 6, 7, 8], [-1.0, -2.0, 0.0, 0.0, -3.0], False, 1, 1, "", "")
    r.given = [[2, 4]]
    sample = response_example(r, 0.5, config)
    expected = {
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "labels": [IGNORE, IGNORE, 4, 5, IGNORE, IGNORE, 8],
        "advantages": [0, 0, 0.5, 0.5, 0, 0, 0.5],
        "sampled": [0, 0, -1, -2, 0, 0, -3],
        "weights": np.float32([0, 0, 1 / 3, 1 / 3, 0, 0, 1 / 3]).tolist(),
        "starts": [0, 0, 1, 0, 0, 0, 0],
    }
    assert {key: column.tolist() for key, column in sample.items()} == expected


def test_numbers_for_the_log():
    numbers = averages(made_up_talks())
    assert numbers["failed"] == 1 / 16
    # of 16: 8 with one given span of 2 tokens, 8 with two of 3; one of each kind is another response
    assert (
        numbers["turns"] == (8 * 2 + 6 * 3 + 1) / 16 and numbers["given"] == (8 * 2 + 6 * 3) / 16
    )
    assert "turns" not in averages([[Response(0, [1], [2], [-1.0], False, 1, 1, "", "")] * 2])


def test_evaluation_counts_what_environments_reward():
    worker, problems = talking_worker(Scripted, eval_samples=2)
    with patch.object(EpisodeRunner, "go_on", go_on_and_win):
        numbers = worker.evaluate(problems, 4)
    assert numbers == {"greedy": 1.0, "pass@1": 1.0, "pass@2": 1.0}


def go_on_and_win(self, episode, answer):
    episode.score = 1.0
    return False
