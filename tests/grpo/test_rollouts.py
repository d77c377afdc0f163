"""Which problems a step takes, what is sampled, kept and rewarded, and how it is scored."""

import itertools
import json
import math
import pickle
import sys
from contextlib import nullcontext
from decimal import Decimal
from statistics import stdev
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from minitrain import Sampler, load_pretrained, save_pretrained
from minitrain.data.chat.problems import open_problems
from minitrain.data.chat.read_problems import answer_of
from minitrain.data.faults.skips import Skips
from minitrain.data.records import read_records
from minitrain.errors import InputError
from minitrain.examples.reversal import reversals
from minitrain.grpo import rollouts
from minitrain.grpo.responses import describe_responses, rewards
from minitrain.grpo.rewards import exact, keeps_state, reward_state
from minitrain.grpo.rollouts import RolloutWorker, most_samples, pass_at, sampling_settings
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.rollout.scheduler import Sample
from minitrain.run.config import load as configs
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.launch.start import start
from minitrain.run.tasks import grpo_task
from minitrain.run.tasks.grpo_task import GrpoTask
from minitrain.run.tasks.rollout_files import read_rollouts, write_rollouts
from tests.helpers.grpo import TREE, made_up_groups


def problems_of(tmp_path, lines, positions=512, validation=0.0, **grpo):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"kind": "jsonl", "path": str(file), "template": "plain", "validation": validation}
    tree = TREE | {"data": data, "grpo": grpo, "batch": {"global": 8, "micro": 1, "seq_len": 64}}
    tree["model"] = tree["model"] | {"max_position_embeddings": positions}
    return open_problems(configs.from_dict(tree))


@pytest.mark.parametrize(
    "line, answer",
    [
        ({"question": "2+2?", "answer": "add\n#### 4"}, "add\n#### 4"),  # GSM8K
        # OpenMathInstruct-2
        ({"problem": "2+2?", "generated_solution": "so 4", "expected_answer": "4"}, "4"),
        # DAPO-Math-17k
        (
            {
                "prompt": [{"role": "user", "content": "2+2?"}],
                "reward_model": {"ground_truth": "4"},
            },
            "4",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "4"},
                ]
            },
            "4",
        ),
        # ShareGPT
        (
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            "4",
        ),
        ({"prompt": "2+2?", "answer": 4}, "4"),
        ({"prompt": "2+2?", "answer": 4.0}, "4.0"),
    ],
)
def test_usual_lines(tmp_path, line, answer):
    problems, held_out, tokenizer, ends = problems_of(tmp_path, [line])
    (problem,) = problems.problems
    assert (
        tokenizer.decode(problem.prompt) == "2+2?\n"
        and problem.answer == answer
        and problem.row == line
    )
    assert tokenizer.decode(problem.reply) == answer and (problem.reply[-1],) == ends == (
        tokenizer.eos_id,
    )
    assert held_out is None


@pytest.mark.parametrize(
    "line",
    [
        {"question": "2+2?", "answer": "4"},
        {"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"},
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4"},
            ]
        },
    ],
)
def test_keys_beside_a_problem_are_shown_or_refused(tmp_path, line):
    system = "Be exact." if "messages" in line else "Be short."
    (problem,) = problems_of(tmp_path, [line | {"system": system}])[0].problems
    assert bytes(problem.prompt) == f"{system}\n2+2?\n".encode() and problem.answer == "4"
    # the plain template shows neither tools nor documents
    for key in ("tools", "documents", "images"):
        with pytest.raises(InputError, match=f"problems.jsonl:1: '{key}' is not supported"):
            problems_of(tmp_path, [line | {key: ["x"]}])
    (again,) = problems_of(tmp_path, [{"messages": None, "problem": None, "tools": None} | line])[
        0
    ].problems
    assert (
        again.prompt == problems_of(tmp_path, [line])[0].problems[0].prompt
        and again.answer == "4"
    )


@pytest.mark.parametrize(
    "line, message",
    [
        (
            {"question": "2+2?", "choices": ["3", "4"], "answer": "4"},
            "'choices' is not supported",
        ),
        (
            {"prompt": [{"role": "user", "content": "2+2?"}], "context": "c", "answer": "4"},
            "'context' is not supported",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "2+2?"},
                    {"role": "assistant", "content": "5", "train": False},
                ]
            },
            "the last message of 'messages' is masked, but it is the answer",
        ),
        ({"question": "2+2?", "answer": "5", "train": False}, "the line is not to be learned"),
        (
            {"question": "2+2?", "answer": "5", "loss_weight": 0.0},
            "the line is not to be learned",
        ),
    ],
)
def test_keys_that_a_problem_would_lose_are_refused(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        problems_of(tmp_path, [line])


WRITTEN = [
    "0.00005",
    "5e-05",
    "5E-5",
    "10000000000000000.5",
    "1e16",
    "1.50e2",
    "-2.5e-7",
    "1234567890123456789",
    "0.10",
    "-0.0",
    "0.1000000000000000055",
    "1e-25",
]


@pytest.mark.parametrize("number", WRITTEN)
def test_numeric_answers_keep_their_digits(tmp_path, number):
    """The oracle is exact: a decimal number of the same value, written without a power of ten."""
    for name, template in (
        ("a", '{"question": "q", "answer": %s}'),
        ("b", '{"question": "q", "reward_model": {"ground_truth": %s}}'),
    ):
        (tmp_path / name).write_text(template % number + "\n")
        rows = list(read_records([tmp_path / name], lambda row: row, Skips()))
        answer = answer_of(rows[0], "")
        assert Decimal(answer) == Decimal(number) and "e" not in answer.lower()
        assert answer == number or "e" in number.lower()
        assert json.loads(json.dumps(rows)) == rows and pickle.loads(pickle.dumps(rows)) == rows
    (tmp_path / "a").write_text(
        '{"question": "q", "answer": 1e-999999999}\n{"question": "q", "answer": 1e300}\n'
    )
    rows = list(read_records([tmp_path / "a"], lambda row: row, Skips()))
    assert len(answer_of(rows[0], "")) < 400 and answer_of(rows[1], "") == "1e300"


@pytest.mark.parametrize("value", [True, False, 7, 0])
def test_answers_that_are_no_text_are_written_as_json_has_them(tmp_path, value):
    (problem,) = problems_of(tmp_path, [{"question": "q", "answer": value}])[0].problems
    assert problem.answer == json.dumps(value)


def test_keys_of_ones_own(tmp_path):
    line = {"question": "no", "q": "2+2?", "a": "4"}
    (problem,) = problems_of(tmp_path, [line], prompt_key="q", answer_key="a")[0].problems
    assert bytes(problem.prompt) == b"2+2?\n" and problem.answer == "4"
    line = {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "It is 4."},
        ],
        "a": "4",
    }
    (problem,) = problems_of(tmp_path, [line], answer_key="a")[0].problems
    assert bytes(problem.prompt) == b"2+2?\n" and problem.answer == "4"


def test_an_instruction_with_its_input(tmp_path):
    line = {"instruction": "Add.", "input": "2+2", "output": "4"}  # Alpaca
    (problem,) = problems_of(tmp_path, [line])[0].problems
    assert bytes(problem.prompt) == b"Add.\n2+2\n" and problem.answer == "4"
    (problem,) = problems_of(tmp_path, [line], prompt_key="instruction")[0].problems
    assert bytes(problem.prompt) == b"Add.\n"


def test_system_messages_stand_before_a_prompt(tmp_path):
    line = {"system_prompt": "Be exact.", "question": "2+2?", "response": "4"}  # OpenOrca
    (problem,) = problems_of(tmp_path, [line])[0].problems
    assert bytes(problem.prompt) == b"Be exact.\n2+2?\n"


def test_a_chat_that_is_all_prompt(tmp_path):
    line = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
    with pytest.raises(
        InputError, match="if all of it is the prompt, say so: grpo.prompt_key=messages"
    ):
        problems_of(tmp_path, [line])
    (problem,) = problems_of(tmp_path, [line], prompt_key="messages")[0].problems
    assert bytes(problem.prompt) == b"2+2?\n" and problem.answer == "4"


@pytest.mark.parametrize(
    "line, message",
    [
        ({"text": "2+2"}, r"jsonl:1: 'text' is a document, for task=pretrain"),
        (
            {"question": "2+2?"},
            r"jsonl:1: no answer .one of expected_answer, .*, completion; or .* grpo.answer_key",
        ),
        ({"question": 5, "answer": "4"}, "'question' must be text, not int"),
        ({"messages": []}, "must end with"),
        ({"question": 0.5, "answer": "4"}, "'question' must be text, not Number"),
        (
            {"messages": [{"role": "assistant", "content": "4"}]},
            "must end with the assistant's answer to what comes",
        ),
        (
            {"question": "x" * 100, "answer": "4"},
            "leaves no room for a response to a prompt of 101 tokens",
        ),
    ],
    ids=str,
)
def test_other_lines_are_refused(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        problems_of(tmp_path, [line])


def test_warming_up_needs_room_for_the_answers(tmp_path):
    line = {"question": "2+2?", "answer": "4" * 70}
    problems_of(tmp_path, [line])
    with pytest.raises(
        InputError, match="too short to warm up .* 75 tokens .use grpo.warmup_steps=0, or"
    ):
        problems_of(tmp_path, [line], warmup_steps=1)


def test_a_prompt_leaves_a_position_for_its_response(tmp_path):
    """Of the model's, as the sampler wants, and not only of batch.seq_len."""
    problems_of(tmp_path, [{"question": "x" * 63, "answer": "4"}])
    problems_of(tmp_path, [{"question": "x" * 62, "answer": "4"}], positions=64)
    with pytest.raises(
        InputError, match="leaves no room for a response to a prompt of 64 tokens"
    ):
        problems_of(tmp_path, [{"question": "x" * 63, "answer": "4"}], positions=64)


# of 4,000 draws of 1,000 strings some are alike
@pytest.mark.parametrize("digits, least", [(3, 900), (12, 4000)])
def test_made_up_problems_are_different_strings_to_be_reversed(digits, least):
    prompts = [messages[0].content for messages, *_ in reversals(digits)]
    assert [answer for _, answer, _ in reversals(digits)] == [prompt[::-1] for prompt in prompts]
    assert {len(prompt) for prompt in prompts} == {digits} and least <= len(set(prompts)) == len(
        prompts
    ) <= 4000


def test_an_epoch_has_every_problem_once(tmp_path):
    problems = problems_of(tmp_path, [{"question": str(i), "answer": str(i)} for i in range(10)])[
        0
    ]
    epochs = [[problem.answer for problem in problems.take(first, 10)] for first in (0, 10)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] and [p.answer for p in problems.take(5, 3)] == epochs[0][5:8]


def test_held_out_problems_are_not_trained_on_in_another_line(tmp_path):
    """DAPO-Math-17k has each prompt about a hundred times."""
    lines = [
        {"question": str(i % 10), "answer": f"{i % 10}, as was known {i} times"}
        for i in range(30)
    ]
    problems, held_out, *_ = problems_of(tmp_path, lines, validation=0.3)
    held = [problem.row["question"] for problem in held_out.problems]
    assert len(held) == len({*held}) == 3
    assert [problem.row for problem in problems.problems] == [
        line for line in lines if line["question"] not in held
    ]


# ------------------------------------------------------------------------------------------------------------ sampling


class Scripted:
    """A sampler whose responses are right as often as the problem's number says."""

    def __init__(self, right):
        self.right = right  # of the samples of the n-th prompt that it ever sees
        self.seen = itertools.count()
        self.requests = []
        self.weights = SimpleNamespace(in_use=nullcontext)
        self.version = 0

    def submit(self, prompt, request):
        right = self.right[next(self.seen) % len(self.right)]
        self.requests.append(request)
        answer = prompt[:-1][::-1]
        return [
            said([*answer, 257], "stop") if i < right else said([48]) for i in range(request.n)
        ]

    def pause(self):
        return []

    def go_on(self, samples):
        pass


def said(tokens, finish_reason="length"):
    """A sample that has ended."""
    return Sample(
        [], None, 0, 0, 0, tokens, [-1.0] * len(tokens), [[0, 0]], finish_reason=finish_reason
    )


def worker(right, seed=0, **grpo):
    config = configs.from_dict(
        TREE | {"seed": seed, "grpo": {"prompts": 2, "group": 4, "mock_digits": 2} | grpo}
    )
    problems, _, tokenizer, ends = open_problems(config)
    start(config)  # replicas talk to each other even if there is one
    return RolloutWorker(config, Scripted(right), tokenizer, ends, exact, 0, 1, None), problems


def test_rewards_and_ends():
    sampling, problems = worker([3])
    groups = sampling.collect(problems, first=0)
    assert [[r.reward for r in group] for group in groups] == [[1.0, 1.0, 1.0, 0.0]] * 2
    assert [r.truncated for r in groups[0]] == [False] * 3 + [True]
    # some show the token that ends a response
    sampling.tokenizer = SimpleNamespace(decode=lambda tokens: f"{tokens}")
    assert not any("257" in r.text for r in sampling.collect(problems, first=0)[0])
    assert groups[0][0].text == groups[0][0].answer and [r.group for r in groups[1]] == [1] * 4


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_responses_end_where_transformers_ends_them(tmp_path, name):
    """At any token that the model's files name, and not at the template's alone: a base model ends a text at another,
    after which it would begin a new one, and be rewarded for what that says."""
    torch.manual_seed(0)
    save_pretrained(
        Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)), tmp_path
    )

    def greedy():
        config = configs.from_dict(TREE | {"model": {"path": str(tmp_path)}})
        problems, _, tokenizer, ends = open_problems(config)
        start(config)
        sampler = Sampler(load_pretrained(tmp_path), tokenizer, config.rollout)
        sampling = RolloutWorker(config, sampler, tokenizer, ends, exact, 0, 1, None)
        [[response]] = sampling.sample(problems.take(0, 1), 0, n=1, greedy=True)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
        tokens = theirs.generate(torch.tensor([response.prompt]), max_new_tokens=8)[0].tolist()
        assert response.prompt + response.response == tokens
        return response

    whole = greedy()
    assert whole.truncated and whole.response[3] not in whole.response[:3]
    tree = json.loads((tmp_path / name).read_text()) if name == "config.json" else {}
    (tmp_path / name).write_text(json.dumps(tree | {"eos_token_id": [whole.response[3], 257]}))
    ended = greedy()
    assert ended.response == whole.response[:4] and not ended.truncated
    assert ended.text == open_problems(configs.from_dict(TREE))[2].decode(whole.response[:3])


def test_a_model_that_begins_with_bytes_has_no_end_but_theirs():
    """Mixtral's own, 2, is a byte there like any other."""
    config = configs.from_dict(
        TREE | {"model": {"name": "mixtral-8x7b-tiny", "vocab_size": 258, "eos_token_id": 2}}
    )
    assert open_problems(config)[3] == (257,)


def test_groups_are_in_the_order_of_their_problems():
    sampling, problems = worker([0, 3])
    assert [sum(r.reward for r in group) for group in sampling.collect(problems, first=0)] == [
        0,
        3,
    ]


def test_a_response_fills_its_row_at_most():
    """Of a prompt of 29 tokens and a response of 4, a row of 32 reads all but the last."""
    sampling, problems = worker([0], mock_digits=28)
    sampling.collect(problems, first=0)
    assert len(problems.problems[0].prompt) == 29 and [
        r.max_tokens for r in sampling.sampler.requests
    ] == [4, 4]


def test_another_seed_draws_other_responses():
    seeds = [[worker([0], seed=seed)[0].seed(number) for number in range(3)] for seed in (0, 1)]
    assert len({*seeds[0], *seeds[1]}) == 6


def test_statistics_of_a_steps_responses():
    groups = made_up_groups()[:2]  # of 1 + (3 g + 5 n) % 8 tokens; every third is right
    groups[0][1].truncated = True
    for response in itertools.chain(*groups):
        response.no_signal, response.problems = 0.25, 6
    right, lengths = [1, 0, 0, 1, 0, 1, 0, 0], [1, 6, 3, 8, 4, 1, 6, 3]
    assert describe_responses(groups) == {
        "reward": 3 / 8,
        "reward_std": pytest.approx(stdev(right)),
        "no_signal": 0.25,
        "problems": 6,
        "length": sum(lengths) / 8,
        "longest": 8,
        "truncated": 1 / 8,
    }


def test_length_costs():
    # from 4 of 8 tokens on
    sampling, problems = worker([2], mock_digits=4, overlong_buffer=4, overlong_penalty=0.5)
    assert [r.reward for r in sampling.collect(problems, 0)[0]] == [1 - 0.5 / 4] * 2 + [0.0] * 2
    assert sampling.evaluate(problems, 2)["pass@1"] == 2 / 8  # right is right
    sampling.reward = lambda *_: 0.5  # and in part right is not
    assert set(sampling.evaluate(problems, 2).values()) == {0}


@pytest.mark.parametrize(
    "limit", [{"batch": {"seq_len": 32}}, {"model": {"max_position_embeddings": 33}}], ids=str
)
def test_length_costs_all_where_a_response_is_cut_off(limit):
    """A prompt of 29 tokens leaves 4 for its response, in the row or in the model, and not the 8 of rollout.max_tokens:
    a response of 4 was cut off, one of 3 is half as far into the buffer."""
    limit = {key: TREE[key] | value for key, value in limit.items()}
    config = configs.from_dict(TREE | limit | {"grpo": {"mock_digits": 28, "overlong_buffer": 2}})
    problem = open_problems(config)[0].take(0, 1)[0]
    sampling = RolloutWorker(
        config, None, SimpleNamespace(decode=str), (), lambda *_: 1, 0, 1, None
    )
    assert len(problem.prompt) == 29 and sampling.request(problem, 0, 1, False).max_tokens == 4
    lengths = [sampling.rewarded(0, problem, said([1] * n)).reward for n in (2, 3, 4)]
    assert lengths == [1, 0.5, 0]


def test_rewards_keep_all_digits():
    sampling, problems = worker([2])
    sampling.reward = lambda *_: 0.1
    assert rewards(sampling.collect(problems, 0)).tolist() == [[0.1] * 4] * 2


def test_rewards_that_are_no_numbers():
    sampling, problems = worker([2])
    for given in (None, "good", float("nan"), 10**400, torch.ones(2)):
        sampling.reward = lambda *_, given=given: given
        with pytest.raises(
            InputError,
            match="grpo.reward=exact returned .* for the response '.*', and not a finite",
        ):
            sampling.collect(problems, 0)


def test_rewards_that_raise():
    """One line, which names the response and the place; of an interrupt nothing is made."""

    def wrong(response, answer, row):
        return 1 / row["missing"]

    sampling, problems = worker([2])
    for fails, line in (
        (wrong, r"raised KeyError: 'missing' for the response '.*', at .*test_rollouts.py:\d+$"),
        (
            lambda *_: [][1],
            r"raised IndexError: list index out of range for the response '.*', at .*:\d+$",
        ),
        (
            lambda *_: json.loads("{"),
            "raised json.decoder.JSONDecodeError: Expecting .* for the response",
        ),
        (lambda *_: next(iter(())), "raised StopIteration for the response"),
        (lambda *_: sys.exit(3), "raised SystemExit: 3 for the response"),
        (
            lambda *_: torch.ones(2) @ torch.ones(3),
            r"raised RuntimeError: [^\n]* for the response [^\n]*$",
        ),
    ):
        sampling.reward = fails
        with pytest.raises(InputError, match="^grpo.reward=exact " + line):
            sampling.collect(problems, 0)
    sampling.reward = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        sampling.collect(problems, 0)


def test_a_wrong_reward_is_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr(grpo_task, "start", None)
    with pytest.raises(
        InputError,
        match="grpo.reward='exakt' is not exact, math, math_verify, a reward model's folder or package",
    ):
        GrpoTask(configs.from_dict(TREE | {"grpo": {"reward": "exakt"}}), folder=None)


def test_groups_without_signal_are_replaced():
    sampling, problems = worker([0, 4, 2, 0, 3], generations=5)
    groups = sampling.collect(problems, first=0)
    assert [sum(r.reward for r in group) for group in groups] == [2, 3]
    assert [group[0].group for group in groups] == [0, 1]
    assert next(sampling.sampler.seen) == 6  # three rounds of two prompts were enough
    assert len({request.seed for request in sampling.sampler.requests}) == 6
    # 0, 4, 0, 0 of 0, 4, 2, 0, 3, 0
    assert {r.no_signal for group in groups for r in group} == {4 / 6}


def test_statistics_of_a_step_count_replaced_groups(tmp_path):
    """By hand: 0, 4, 2, 0, 3, 0 of 4 are right and as long as their problem, the others cut off after a token."""
    sampling, problems = worker([0, 4, 2, 0, 3], generations=5)
    groups = sampling.collect(problems, first=0)
    size = len(groups[0][0].prompt)
    right = [1.0] * 9 + [0.0] * 15
    expected = {
        "reward": 9 / 24,
        "reward_std": pytest.approx(stdev(right)),
        "length": (9 * size + 15) / 24,
        "longest": size,
        "truncated": 15 / 24,
        "no_signal": 4 / 6,
        "problems": 6,
        "trained_reward": 5 / 8,
        "trained_reward_std": pytest.approx(stdev(right[4:12])),
        "trained_length": (5 * size + 3) / 8,
        "trained_longest": size,
        "trained_truncated": 3 / 8,
    }
    assert describe_responses(groups) == expected
    sampling, problems = worker([0, 4, 2, 0, 3])
    assert not any(
        name.startswith("trained") for name in describe_responses(sampling.collect(problems, 0))
    )


def test_groups_without_signal_fill_up_after_the_last_round():
    sampling, problems = worker([0, 0, 1, 4], generations=2)
    assert [sum(r.reward for r in group) for group in sampling.collect(problems, 0)] == [1, 0]
    sampling.collect(problems, 4)
    # no step has a problem of another's, replaced or not
    assert len({request.seed for request in sampling.sampler.requests}) == 8


def test_an_epoch_has_each_problem_once():
    """However many rounds a step takes; by brute force, over three epochs."""
    sampling, problems = worker([2, 1, 0, 3, 4, 0, 0, 1, 2], generations=4, mock_digits=2)
    seen, begin, taken = [], sampling.begin, 0
    sampling.begin = lambda chosen, *more: (
        seen.extend(problem.answer for problem in chosen) or begin(chosen, *more)
    )
    size, rounds = len(problems), set()
    while taken < 3 * size:
        groups = sampling.collect(problems, taken)
        rounds.add((groups[0][0].problems - taken) // 2)
        taken = groups[0][0].problems
        assert taken == len(seen) and all(
            response.problems == taken for group in groups for response in group
        )
    everyone = sorted(problem.answer for problem in problems.problems)
    assert size > 80 and len(rounds) > 2
    assert [sorted(seen[n : n + size]) for n in (0, size, 2 * size)] == [everyone] * 3


def test_length_alone_is_no_signal():
    """Of responses that are all wrong, or all right, DAPO keeps none, though what they cost differs with their length.

    The longer ones would otherwise be the worse ones, and a policy that only gives up early would be the better one.
    """
    sampling, problems = worker([2], mock_digits=4, generations=3, overlong_buffer=4)
    sampling.reward = lambda *_: 0.0
    groups = sampling.collect(problems, first=0)
    assert [r.reward for r in groups[0]] == [-1 / 4] * 2 + [0.0] * 2 and [
        len(group) for group in groups
    ] == [4, 4]
    # none of three rounds of two prompts had what was looked for
    assert next(sampling.sampler.seen) == 6
    assert {r.no_signal for group in groups for r in group} == {1.0}


def test_pass_at_by_enumeration():
    for n, c in [(5, 0), (5, 2), (6, 6), (4, 1)]:
        for k in range(1, n + 1):
            draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at(k, n, c) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_evaluation():
    # two greedy responses, then two groups
    sampling, problems = worker([1, 0, 4, 2], eval_samples=4)
    numbers = sampling.evaluate(problems, 2)
    assert numbers == {
        "greedy": 0.5,
        "pass@1": 0.75,
        "pass@2": pytest.approx((1 + 5 / 6) / 2),
        "pass@4": 1.0,
    }
    assert [request.temperature for request in sampling.sampler.requests] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("replicas", "every", "most"), [(1, 0, 12), (2, 0, 8), (1, 2, 30), (2, 2, 15)]
)
def test_samples_that_are_asked_for_at_once(replicas, every, most):
    """By the replica that has the most: of 3 prompts with 4 responses each, and of 6 held-out ones with 5."""
    tree = {
        "grpo": {"prompts": 3, "group": 4, "eval_samples": 5},
        "batch": {"global": 12, "micro": 1, "seq_len": 32},
    }
    config = configs.from_dict(TREE | tree | {"validation": {"every": every, "batches": 2}})
    problems, _, tokenizer, ends = open_problems(config)
    start(config)
    sampler, counts = Scripted([1, 0]), []
    asked = RolloutWorker(config, sampler, tokenizer, ends, exact, 0, replicas, None)
    with patch.object(rollouts, "gather", lambda groups, group: [groups]):
        asked.sample(problems.take(0, 3), 0, config.grpo.group)
        counts.append(sum(request.n for request in sampler.requests))
        sampler.requests.clear()
        asked.sample(problems.take(0, 6), 0, config.grpo.eval_samples)
        counts.append(sum(request.n for request in sampler.requests))
    assert most_samples(config, replicas) == max(counts[: 1 + bool(every)]) == most


def test_settings_that_decide_which_responses_a_step_has():
    """All that say what is sampled, from which prompts and for which reward, and none of those that train."""
    deciding = {
        "seed": 1,
        "data.path": "x",
        "batch.seq_len": 16,
        "rollout.temperature": 0.5,
        "rollout.max_tokens": 4,
        "grpo.prompts": 8,
        "grpo.group": 2,
        "grpo.generations": 2,
        "grpo.prompt_key": "q",
        "grpo.answer_key": "a",
        "grpo.mock_digits": 3,
        "grpo.reward": "math",
        "grpo.environment": "x:Y",
        "grpo.turns": 2,
        "grpo.environment_failure": "zero",
        "grpo.overlong_buffer": 4,
        "grpo.overlong_penalty": 0.5,
    }

    def digest(setting=None, value=None):
        config = configs.from_dict(TREE)
        if setting:
            section, _, name = setting.rpartition(".")
            setattr(getattr(config, section) if section else config, name, value)
        return sampling_settings(config)

    assert len({digest(), *(digest(*change) for change in deciding.items())}) == 1 + len(deciding)
    for setting, value in {
        "steps": 9,
        "grpo.kl": 0.5,
        "optim.lr": 0.1,
        "batch.global_": 4,
    }.items():
        assert digest(setting, value) == digest()


def described_groups():
    """Made-up groups that others were replaced by."""
    groups = made_up_groups()
    for response in itertools.chain(*groups):
        response.sampled = {"reward": 0.1 + 0.2, "longest": 7}
    return groups


def write_together(file):
    write_rollouts(file, described_groups(), dist.group.WORLD)


@pytest.mark.parametrize("world", [1, 3])
def test_rollouts_on_disk_are_exact(pool, tmp_path, world):
    groups = described_groups()
    pool.run(world, write_together, tmp_path / "some" / "step.jsonl")
    assert read_rollouts(tmp_path / "some" / "step.jsonl") == groups
    with pytest.raises(InputError, match=r"gone\.jsonl"):
        read_rollouts(tmp_path / "gone.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match=r"empty\.jsonl does not hold the responses"):
        read_rollouts(tmp_path / "empty.jsonl")
    line, *_ = (tmp_path / "some" / "step.jsonl").read_text().splitlines()
    (tmp_path / "damaged.jsonl").write_text(json.dumps(json.loads(line) | {"response": 5}))
    with pytest.raises(InputError, match=r"damaged\.jsonl .* is not a list of tokens"):
        read_rollouts(tmp_path / "damaged.jsonl")


# ------------------------------------------------------------------------------------------------------------ all of it


def count_sevens(response, answer, row):
    return response.count("7") / 4


def test_it_learns(tmp_path):
    """From random weights to nothing but sevens."""
    tree = TREE | {
        "model": TREE["model"] | {"vocab_size": 258, "num_layers": 1},
        "steps": 30,
        "optim": {"lr": 5e-3},
        "batch": {"global": 64, "micro": 8, "seq_len": 64},
        "grpo": {"prompts": 8, "group": 8, "reward": f"{__name__}:count_sevens"},
        "rollout": {"max_tokens": 4},
    }
    run = GrpoTask(configs.from_dict(tree), tmp_path)
    numbers = list(run.steps(run.begin()))
    assert numbers[0]["reward"] < 0.05 and numbers[-1]["reward"] > 0.8
    assert all(line["token_mult_prob_error"] < 1 + 1e-4 for line in numbers)
    assert (
        numbers[-1]["step_tokens"] == 64 * (5 + 4)
        and numbers[-1]["step_time_s"] >= numbers[-1]["generation_s"] > 0
    )


class Novelty:
    """A reward that falls with the number of responses before: it remembers them."""

    def __init__(self):
        self.seen = {"all": [0]}

    def __call__(self, response, answer, row):
        self.seen["all"][0] += 1
        return (len(response) + 7 * self.seen["all"][0]) % 5

    def state_dict(self):
        return self.seen

    def load_state_dict(self, state):
        self.seen = state


novelty = Novelty()


def run_novelty(folder, lag, stop):
    """Run until step `stop` of four, as a process of its own does; return each step's figures."""
    tree = TREE | {
        "steps": 4,
        "grpo": {"prompts": 2, "group": 4, "reward": f"{__name__}:novelty", "lag": lag},
        "validation": {"every": 1, "batches": 1},
        "optim": {"lr": 1e-3},
    }
    novelty.seen = {"all": [0]}
    task = GrpoTask(configs.from_dict(tree), folder)
    found = []
    for numbers in task.steps(task.begin()):
        task.save(numbers)
        task.finish(numbers, lambda: "")
        found.append((numbers["step"], numbers["reward"], numbers["loss"]))
        if numbers["step"] == stop:
            break
    task.wait()
    return found


@pytest.mark.parametrize("lag", [0, 1])
def test_state_of_a_reward_is_kept_in_checkpoints(tmp_path, lag):
    """A run that stops and goes on is one that does not, and evaluations leave no trace."""
    parts = run_novelty(tmp_path / "parts", lag, 2) + run_novelty(tmp_path / "parts", lag, 4)
    assert novelty.seen == {"all": [4 * 8]}
    assert parts == run_novelty(tmp_path / "whole", lag, 4) and len(parts) == 4


def test_states_of_rewards_that_cannot_be_kept_are_one_line(monkeypatch):
    def raises(*_):
        raise KeyError("gone")

    for state in ({1: 2}, (1, 2), {"a": {3}}, None, {"a": math.nan}):
        monkeypatch.setattr(novelty, "seen", state)
        with pytest.raises(
            InputError, match="^grpo.reward=x:y: state_dict.. must return what JSON"
        ):
            reward_state(novelty, "x:y")
    monkeypatch.setattr(novelty, "state_dict", raises, raising=False)
    with pytest.raises(
        InputError, match="^grpo.reward=x:y raised KeyError: 'gone' in state_dict"
    ):
        reward_state(novelty, "x:y")
    assert not keeps_state(exact) and not keeps_state(torch.nn.Linear(2, 1))


def test_states_of_other_ranks_or_rewards(monkeypatch):
    task = SimpleNamespace(reward=novelty, config=configs.from_dict(TREE))
    monkeypatch.setattr(novelty, "seen", {"all": [3]})
    start(task.config)
    for other in (None, {"reward": "another", "states": [{"all": [8]}]}):
        GrpoTask.load_reward(task, other)
        assert novelty.seen == {"all": [3]}
    GrpoTask.load_reward(task, {"reward": "exact", "states": [{"all": [8]}]})
    assert novelty.seen == {"all": [8]}
    with pytest.raises(InputError, match="kept the states of 2 processes, and these are 1"):
        GrpoTask.load_reward(task, {"reward": "exact", "states": [{"all": [8]}] * 2})


@pytest.mark.parametrize(
    "setting, message",
    [
        (
            {"data": {"kind": "text", "path": "x"}},
            "data.kind=text holds no problems, as task=grpo needs",
        ),
        (
            {"data": {"size": [1, 1 << 21, 1]}},
            "data.size=.1, 2097152, 1. must be numbers of at most 1,048,576",
        ),
        ({"grpo": {"group": 1}}, "grpo.group=1 must be at least 2"),
        (
            {"grpo": {"prompts": 3, "group": 3}},
            "batch.global=8 does not divide grpo.prompts=3 x group=3 = 9 responses",
        ),
        (
            {"rollout": {"temperature": 0}},
            "rollout.temperature=0.0 must be above 0, for samples that differ",
        ),
        (
            {"lora": {"rank": 2, "dropout": 0.1}},
            "lora.dropout=0.1: the sampler would disagree with the trainer",
        ),
        ({"optim": {"ema": 0.9}}, "optim.ema=0.9 is not for task=grpo"),
        (
            {"grpo": {"dual_clip": 1.2, "clip_high": 0.2}},
            "grpo.dual_clip=1.2 must be above 1 . clip_high=1.2",
        ),
        (
            {"grpo": {"dual_clip": 3, "surrogate": "cispo"}},
            "dual_clip=3.0 is of surrogate=clip alone, not of cispo",
        ),
        (
            {"grpo": {"ratio": "sequence", "surrogate": "reinforce"}},
            "surrogate=reinforce has no ratio .use ratio=token",
        ),
        ({"grpo": {"overlong_penalty": -1}}, "grpo.overlong_penalty=-1.0 must be at least 0"),
        (
            {"grpo": {"clip_low": 1e300}},
            "grpo.clip_low=1e.300 must be between 0 and 1,000,000,000",
        ),
        (
            {"grpo": {"clip_high": 1e300}},
            "grpo.clip_high=1e.300 must be between 0 and 1,000,000,000",
        ),
        (
            {"grpo": {"importance_high": 1e300}},
            "grpo.importance_high=1e.300 must be between 0 and 1,000,000,000",
        ),
        ({"grpo": {"warmup_steps": -1}}, "grpo.warmup_steps=-1 must be between 0 and 1,048,576"),
        ({"grpo": {"generation_ranks": -1}}, "grpo.generation_ranks=-1 must be at least 0"),
        (
            {
                "rollout": {"tp": 4, "ep": 4},
                "model": {"name": "qwen3-30b-a3b-tiny", "num_experts": 6},
            },
            "num_experts=6",
        ),
        (
            {"grpo": {"importance_low": 3, "importance_high": 2}},
            "importance_low=3.0 exceeds importance_high=2.0",
        ),
        ({"grpo": {"overlong_buffer": 9}}, "grpo.overlong_buffer=9 exceeds rollout.max_tokens=8"),
        (
            {"grpo": {"generation_ranks": 2}},
            "grpo.generation_ranks=2 of their own need grpo.lag=1",
        ),
        (
            {"grpo": {"in_flight": True}},
            "grpo.in_flight=true begins the .* it needs grpo.lag=1 or more",
        ),
        (
            {"grpo": {"in_flight": True, "lag": 1, "in_flight_cache": "keep"}},
            "grpo.in_flight_cache=keep: .*use grpo.keep_cache=true, or generation_ranks",
        ),
        (
            {"grpo": {"ratio": "sequence"}, "parallel": {"cp": 2}},
            "parallel.cp=2: no rank sees whole sequences",
        ),
        (
            {"grpo": {"importance": "sequence-mask"}, "parallel": {"cp": 2}},
            "parallel.cp=2: no rank sees whole sequences",
        ),
        (
            {"grpo": {"offload": True, "lag": 1}},
            "grpo.offload=true .* needs lag=0 and keep_cache=false",
        ),
        (
            {"grpo": {"offload": True, "keep_cache": True}},
            "grpo.offload=true .* needs lag=0 and keep_cache=false",
        ),
        (
            {"rollout": {"tp": 3}},
            "rollout.tp=3 does not divide num_key_value_heads=4 .use 1 or 2.",
        ),
        ({"rollout": {"ep": 2}}, "rollout.ep=2 must be 1 or rollout.tp=1"),
        ({"rollout": {"tp": 2, "ep": 2}}, "rollout.ep=2 needs a model with experts"),
        (
            {
                "rollout": {"tp": 4},
                "model": {"name": "qwen3-30b-a3b-tiny", "moe_intermediate_size": 16},
            },
            "moe_intermediate",
        ),
        (
            {
                "rollout": {"tp": 4},
                "model": {"name": "nemotron3-nano-30b-a3b-tiny", "mamba_n_groups": 2},
            },
            "mamba_n_groups=2",
        ),
        ({"task": "pretrain", "grpo": {"generation_ranks": 2}}, "task=grpo"),
    ],
    ids=str,
)
def test_contradictions_are_refused(setting, message):
    with pytest.raises(InputError, match=message):
        configs.from_dict(TREE | {"grpo": {}} | setting)


@pytest.mark.parametrize(
    "setting",
    [
        {"grpo": {"overlong_buffer": 8, "importance_low": 2, "ratio": "sequence"}},
        {
            "rollout": {"tp": 4, "ep": 4},
            "model": {"name": "qwen3-30b-a3b-tiny", "moe_intermediate_size": 16},
        },
        # which never moves
        {"lora": {}, "model": {"name": "deepseek-v3-tiny", "bias_update_speed": 0.1}},
    ],
    ids=str,
)
def test_settings_that_only_seem_contradictory_are_accepted(setting):
    configs.from_dict(TREE | {"rollout": {"max_tokens": 8}} | setting)


@pytest.mark.parametrize(
    "apart, tp, ranks, possible, message",
    [
        (
            2,
            1,
            5,
            4,
            "grpo.generation_ranks=2 of 5 ranks must be a multiple of those that train .use 0 or 4.",
        ),
        (
            4,
            1,
            4,
            8,
            "grpo.generation_ranks=4 of 4 ranks must be a multiple of those that train .use 0, 2 or 3.",
        ),
        (0, 2, 3, 4, "rollout.tp=2 does not divide the 3 ranks that train"),
    ],
)
def test_ranks_that_sample_are_a_multiple_of_those_that_train(
    apart, tp, ranks, possible, message
):
    tree = TREE | {
        "grpo": {"lag": 1, "generation_ranks": apart},
        "rollout": {"max_tokens": 8, "tp": tp},
    }
    with pytest.raises(InputError, match=message):
        check_layout(configs.from_dict(tree), ranks)
    check_layout(configs.from_dict(tree), possible)
