"""Lines of chats, by hand; packed rows against brute force; see test_chat_templates.py for the text of a chat."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from minitrain.data.chat.chat_templates import built_in, choose_template
from minitrain.data.chat.chats import encode_chat, make_sample, split_reply
from minitrain.data.chat.messages import Message
from minitrain.data.chat.read_chats import read_messages
from minitrain.data.chat.read_tools import read_shown
from minitrain.data.chat.reply_counts import ReplyCounts
from minitrain.data.chat.sft import MockChats
from minitrain.data.datasets import open_dataset
from minitrain.data.tokenizer import ByteTokenizer, encode_after
from minitrain.errors import InputError
from minitrain.examples import arithmetic
from minitrain.models.decoder import Decoder
from minitrain.run.config import load as configs
from minitrain.run.config.checks import validate
from minitrain.run.tasks.exact_match import exact_match
from minitrain.run.tasks.train_model import train
from minitrain.settings import Config, Parallel
from minitrain.training.build import initialize
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loss import IGNORE
from minitrain.training.packing import rows
from tests.helpers.oracle import check_close


def test_replies_are_counted_by_dataset_not_by_process():
    """Also in a template that is not a tokenizer's, which is the same for all."""
    chat = [Message("user", "q"), Message("assistant", "a")]
    template = choose_template("plain", ByteTokenizer())
    for replies in (1, 3):
        counts = ReplyCounts()
        for _ in range(replies):
            encode_chat(chat, template, ByteTokenizer(), counts=counts)
        assert counts.replies == replies


def test_plain_by_hand():
    chat = [
        Message("system", "s"),
        Message("user", "q"),
        Message("assistant", "ab"),
        Message("user", "r"),
    ]
    tokens, said = encode_chat(
        [*chat, Message("assistant", ""), Message("user", "?")],
        built_in("plain"),
        ByteTokenizer(),
    )
    assert tokens.tolist() == [*b"s\nq\nab", 257, *b"r\n", 257, *b"?\n"]
    assert np.flatnonzero(said).tolist() == [4, 5, 6, 9]
    sample = make_sample(tokens, said)
    assert sample.tokens.tolist() == [*b"s\nq\nab", 257, *b"r\n"]
    assert sample.labels.tolist() == [IGNORE] * 3 + [*b"ab", 257, IGNORE, IGNORE, 257]
    assert split_reply(sample) == ([*b"s\nq\nab", 257, *b"r\n"], [257])
    assert split_reply(make_sample(tokens[:7], said[:7])) == ([*b"s\nq\n"], [*b"ab", 257])


def test_a_text_whose_first_token_would_take_from_the_one_before_is_encoded_alone():
    tokenizer = SimpleNamespace(
        encode={"a": [1], "b": [2], "ab": [3], "c": [4], "ac": [1, 5]}.get
    )
    assert encode_after("a", "b", tokenizer.encode) == [2] and encode_after(
        "a", "c", tokenizer.encode
    ) == [5]


# --------------------------------------------------------------------------------------------------------------- lines

PAIR = [Message("user", "q"), Message("assistant", "a")]


@pytest.mark.parametrize(
    "record, messages",
    [
        (
            {
                "messages": [
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                ],
                "id": 3,
            },
            PAIR,
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            PAIR,
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": ""},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            [Message("system", ""), *PAIR],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "q", "thinking": None},
                    {"role": "assistant", "content": "a", "tool_calls": [], "weight": 1},
                ],
                "tools": [],
            },
            PAIR,
        ),
        ({"prompt": "q", "completion": "a"}, PAIR),
        ({"problem": "q", "generated_solution": "a", "expected_answer": "5"}, PAIR),
        ({"instruction": "q", "input": "", "output": "a"}, PAIR),
        ({"instruction": "q", "input": "i", "output": "a"}, [Message("user", "q\ni"), PAIR[1]]),
        ({"input": "q", "output": "a"}, PAIR),
        ({"question": "q", "input": "", "answer": "a", "choices": []}, PAIR),
        (
            {"system_message": "s", "question": "q", "response": "a", "weight": 1.0, "label": 0},
            [Message("system", "s"), *PAIR],
        ),
        (
            {
                "messages": [
                    # as Axolotl's own example has it
                    {"role": "user", "content": "q", "train": False},
                    {
                        "role": "assistant",
                        "content": "a",
                        "train": True,
                        "weight": None,
                        "mask": 0,
                    },
                ],
                "choices": ["a"],
                "loss": 1.5,
            },
            PAIR,
        ),
        (
            # Dolly
            {"instruction": "q", "context": "c", "response": "a", "category": "closed_qa"},
            [Message("user", "q\nc"), PAIR[1]],
        ),
        ({"instruction": "q", "context": "", "response": "a"}, PAIR),
        ({"question": "q", "context": "c", "answer": "a"}, [Message("user", "q\nc"), PAIR[1]]),
        # OpenOrca
        (
            {"system_prompt": "s", "question": "q", "response": "a"},
            [Message("system", "s"), *PAIR],
        ),
        ({"system_prompt": "", "question": "q", "response": "a"}, PAIR),
        # ShareGPT
        (
            {
                "system": "s",
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            },
            [Message("system", "s"), *PAIR],
        ),
        (
            {
                "system": "t",
                "messages": [
                    {"role": "system", "content": "t"},
                    {"role": "user", "content": "q"},
                    {"role": "assistant", "content": "a"},
                ],
            },
            [Message("system", "t"), *PAIR],
        ),
        (
            {
                "context": "c",
                "question": "q",
                "answers": {"text": ["a", "b"], "answer_start": [0, 1]},
            },
            [Message("user", "Context: c Question: q Answer:"), PAIR[1]],
        ),
        (
            {"context": "c", "question": "q", "answers": [{"text": "a"}]},
            [Message("user", "Context: c Question: q Answer:"), PAIR[1]],
        ),
    ],
)
def test_usual_keys(record, messages):
    assert read_messages(record) == messages


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "q"}', "a.jsonl:2: neither 'messages', nor"),
        ('{"prompt": "q", "response": null}', "a.jsonl:2: neither 'messages', nor"),
        ('{"prompt": "q", "response": ""}', "a.jsonl:2: 'response' is empty"),
        ('{"prompt": "q", "response": 5}', "a.jsonl:2: 'response' must be text, not int"),
        ('{"prompt": " ", "response": "a"}', "a.jsonl:2: 'prompt' is empty"),
        (
            '{"messages": [{"role": "user", "content": "\\n"}, {"role": "assistant", "content": "a"}]}',
            r"a.jsonl:2: 'messages'\[0\]: 'content' is empty",
        ),
        ('{"messages": "q"}', "a.jsonl:2: 'messages' must be a list of objects"),
        ('{"messages": []}', "a.jsonl:2: 'messages' has no message of the assistant"),
        ('{"messages": [{"role": "user"}]}', r"a.jsonl:2: 'messages'\[0\]: no key 'content'"),
        (
            '{"messages": [{"role": "critic", "content": ""}]}',
            r"'messages'\[0\]: the role 'critic' is not system",
        ),
        (
            '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]}',
            r"a.jsonl:2: 'messages'\[1\]: 'weight' is 0.5, but a reply is learned or not .1 and true, or 0 and false.",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            r"'messages'\[0\]: part 0 of its content is 'image', not text",
        ),
        (
            '{"messages": [{"role": "assistant", "content": null}]}',
            r"'messages'\[0\]: 'content' must be text, not N",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]}',
            r"'messages'\[0\]: 'tool_calls' must be a list of objects with 'function': {'name': ...}",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}',
            r"'messages'\[0\]: 'arguments' is a text that is not valid JSON",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}]}',
            r"'messages'\[0\]: 'arguments' must be a dict, not list",
        ),
        (
            '{"prompt": "q", "response": "a", "tools": {"name": "f"}}',
            "a.jsonl:2: 'tools' must be a list, not dict",
        ),
        (
            '{"prompt": "q", "response": "a", "tools": [{}]}',
            "a.jsonl:2: 'tools' is not supported by data.template",
        ),
        (
            '{"prompt": "q", "response": "a", "thinking": "t"}',
            "'reasoning_content' is not supported by data.template",
        ),
        (
            '{"system": "s", "messages": [{"role": "system", "content": "t"}, {"role": "assistant", "content": "a"}]}',
            "a.jsonl:2: 'system' and a message of the system say different things",
        ),
        (
            '{"prompt": "q", "response": "a", "label": false}',
            "a.jsonl:2: 'label' is false, as of KTO's bad replies",
        ),
        (
            '{"context": "c", "question": "q", "answers": {"text": []}}',
            "a.jsonl:2: 'answers' must hold a text",
        ),
        (
            '{"prompt": "q", "context": ["c"], "response": "a"}',
            "a.jsonl:2: 'context' must be text, not list",
        ),
        (
            '{"prompt": "q", "history": [["p", "b"]], "response": "a"}',
            "a.jsonl:2: 'history' is not supported .write",
        ),
        (
            '{"prompt": "q", "system": 5, "response": "a"}',
            "a.jsonl:2: 'system' must be text, not int",
        ),
        ('{"context": "c", "answers": ["a"]}', "a.jsonl:2: no key 'question'"),
        ('{"prompt": ', "a.jsonl:2: not valid JSON"),
    ],
)
def test_a_line_that_is_no_chat_is_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "response": "a"}\n' + line + "\n")
    with pytest.raises(InputError, match=message) as error:
        open_dataset(config_of(tmp_path))
    assert "\n" not in str(error.value)


CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
LAYOUTS = {
    "messages": CHAT,
    "conversations": {
        "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    },
    "pair": {"prompt": "q", "completion": "a"},
    "alpaca": {"instruction": "q", "output": "a"},
    "squad": {"context": "c", "question": "q", "answers": {"text": ["a"]}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
PARTLY = [
    ("weight", 0.5),
    ("mask", True),
    ("trainable", "no"),
    ("train_detail", [{"train": False}]),
    ("skip", True),
    ("assistant_masks", [0, 1]),
    ("is_trainable", False),
    ("train_on_turn", False),
    ("no_loss", True),
    ("calculate_loss", 0),
    ("train_on_input", True),
    ("response_mask", [0, 1]),
    ("supervised", False),
    ("step_mask", 0),
    ("token_weight", 0.0),
    ("rejected_messages", [{"role": "assistant", "content": "b"}]),
]
MASKED = [
    ("train", False),
    ("weight", 0),
    ("weight", 0.0),
    ("loss_mask", 0),
    ("trainable", False),
    ("learn", False),
    ("learnable", 0),
    ("loss_scale", 0.0),
    ("compute_loss", False),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "key, value",
    [
        ("functions", TOOLS),
        ("images", ["a.png"]),
        ("image", "a.png"),
        ("videos", ["a.mp4"]),
        ("files", ["a.pdf"]),
        ("tool_definitions", TOOLS),
        ("attachments", ["a.pdf"]),
        ("loss", 0),
        ("audio", {"path": "a.wav"}),
        ("sample_weight", 0.1),
        ("kto_tag", False),
        ("label", False),
        ("rejected", "b"),
        ("rejected", [{"role": "assistant", "content": "b"}]),
        ("rejected_response", "b"),
        *PARTLY,
    ],
)
def test_a_line_that_hides_more_is_refused_in_every_layout(layout, key, value):
    assert read_messages(LAYOUTS[layout]) == read_messages(LAYOUTS[layout] | {key: None})
    with pytest.raises(InputError, match=f"^'{key}' is "):
        read_messages(LAYOUTS[layout] | {key: value})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_that_only_sound_like_masks_are_ignored(layout):
    """As constraints of instructions, the scores of ratings, or a corpus's name."""
    line = LAYOUTS[layout]
    more = {
        "constraints": [1, 2],
        "rejected_score": 1.0,
        "strain": 0,
        "glossary": [0],
        "lossy_source": "x",
        "skips": None,
        "train_index": 0,
        "trainIdx": 1,
        "train_ids": [0, 1],
        "skip_count": 0,
        "loss": 0.0,
        "train_loss": 1.0,
        "lossless": 1,
        "weight_kg": 1,
        "skipped": 0,
        "trained": True,
        "masks_in_picture": 1,
        "attention_mask": [1, 1],
        "is_trainable": True,
    }
    assert read_messages(line | more) == read_messages(line)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_a_line_that_reach_the_template(layout):
    line = LAYOUTS[layout]
    kwargs = {"enable_thinking": False, "none": None}
    assert read_shown(line | {"enable_thinking": False}) == {"enable_thinking": False}
    shown = read_shown(
        line | {"tools": TOOLS, "documents": [{"text": "d"}], "chat_template_kwargs": kwargs}
    )
    assert shown == {"tools": TOOLS, "documents": [{"text": "d"}], "enable_thinking": False}
    assert read_shown(line | {"tools": json.dumps(TOOLS), "documents": []}) == {"tools": TOOLS}
    assert read_shown(line | {"tools": None}) == {} == read_shown(line)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("key, value", MASKED)
def test_a_masked_line_is_not_learned(tmp_path, layout, key, value):
    assert not any(turn.learned for turn in read_messages(LAYOUTS[layout] | {key: value}))
    lines = [LAYOUTS[layout] | {key: value}, {"prompt": "b", "response": "c"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data, _ = open_dataset(config_of(tmp_path))
    assert data.questions(9) == [(list(b"b\n"), [*b"c", 257])] and "1 dropped" in data.about


@pytest.mark.parametrize("layout", ["messages", "conversations"])
@pytest.mark.parametrize(
    "key, value", [*MASKED, ("loss", False), ("training", False), ("step_loss_mask", 0)]
)
def test_a_masked_reply_is_seen_and_not_learned(layout, key, value):
    record = json.loads(json.dumps(LAYOUTS[layout]))
    turns = record[layout]
    turns += json.loads(json.dumps(turns))
    turns[1][key] = value
    tokens, said = encode_chat(read_messages(record), built_in("plain"), ByteTokenizer())
    assert tokens.tolist() == [*b"q\na", 257, *b"q\na", 257]
    assert np.flatnonzero(said).tolist() == [6, 7]


def test_turns_with_tools():
    function = {"name": "f", "arguments": {"x": 1}}
    call = {"type": "function", "function": function}
    parts = [{"type": "text", "text": "4"}, {"text": "!"}]
    turns = [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "t"},
        {"role": "tool", "content": "", "name": "f", "tool_call_id": "1"},
        {"role": "assistant", "content": parts},
    ]
    expected = [
        Message("developer", "d"),
        Message("user", "q"),
        Message("assistant", None, {"reasoning_content": "t", "tool_calls": [call]}),
        Message("tool", "", {"name": "f", "tool_call_id": "1"}),
        Message("assistant", "4!"),
    ]
    assert read_messages({"messages": turns}) == expected
    for calls in (
        [function],
        json.dumps([call]),
        [call | {"function": function | {"arguments": '{"x": 1}'}}],
    ):
        turns[2]["tool_calls"] = calls
        [read] = read_messages({"messages": turns})[2].more["tool_calls"]
        assert read["function"] == function
    del turns[2]["content"]
    assert read_messages({"messages": turns})[2].content is None


@pytest.mark.parametrize("layout", ["pair", "alpaca", "squad"])
@pytest.mark.parametrize(
    "key, value",
    [
        ("history", [["a", "b"]]),
        ("choices", ["a", "b"]),
        ("options", {"A": "a"}),
        ("passage", "p"),
        ("document", "d"),
        ("article", "p"),
        ("background", "b"),
        ("knowledge", ["k"]),
        ("evidence", "e"),
        ("schema", "CREATE TABLE t (a)"),
    ],
)
def test_keys_beside_a_prompt_are_refused_not_lost(layout, key, value):
    with pytest.raises(InputError, match=f"^'{key}' is not supported"):
        read_messages(LAYOUTS[layout] | {key: value})
    for key in ("prompt", "question"):
        with pytest.raises(InputError, match="^'input' is not supported"):
            read_messages({key: "q", "input": "i", "answer": "a"})
    with pytest.raises(InputError, match="^'context' is not supported"):
        read_messages(CHAT | {"context": "c"})
    for name in ("thinking", "reasoning_content", "cot"):
        _, reply = read_messages(LAYOUTS[layout] | {name: "t"})
        assert reply == Message("assistant", "a", {"reasoning_content": "t"})


@pytest.mark.parametrize("layout", ["messages", "conversations"])
@pytest.mark.parametrize(
    "key, value",
    [
        ("function_call", {"name": "f"}),
        ("images", ["a.png"]),
        ("name", "Ann"),
        ("channel", "analysis"),
        ("functions", TOOLS),
        ("tools", TOOLS),
        ("documents", ["d"]),
        ("tool_plan", "p"),
        ("refusal", "no"),
        ("train_detail", [{"begin_offset": 0, "end_offset": 1, "train": False}]),
        *PARTLY,
    ],
)
def test_a_reply_that_hides_or_shows_more_is_refused(layout, key, value):
    record = json.loads(json.dumps(LAYOUTS[layout]))
    reply = record[layout][1]
    reply[key] = None
    assert read_messages(record) == PAIR
    reply[key] = value
    with pytest.raises(InputError, match=rf"^'{layout}'\[1\]: '{key}' is "):
        read_messages(record)


def test_lines_of_several_layouts_that_datasets_has_joined(tmp_path):
    """Its table has a column for every key, null in the lines of other layouts."""
    rows = [*LAYOUTS.values(), {"prompt": "3+3?", "response": "6", "system": "s"}]
    for row in (rows[0], rows[1]):  # one more key in a column of structures
        row = {key: [turn | {"weight": 1} for turn in turns] for key, turns in row.items()}
        rows.append(row)
    columns = dict.fromkeys(key for row in rows for key in row)
    Dataset.from_dict({key: [row.get(key) for row in rows] for key in columns}).to_json(
        tmp_path / "a.jsonl"
    )
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert lines[2]["messages"] is None and lines[0]["prompt"] is None
    for line, row in zip(lines, rows, strict=True):
        assert read_messages(line) == read_messages(row)
    empty = {"messages": [], "conversations": [], "prompt": "", "system": ""}
    assert read_messages(empty | LAYOUTS["alpaca"]) == read_messages(LAYOUTS["alpaca"])
    mixed = [{"from": None, "value": None} | turn for turn in CHAT["messages"]]
    assert read_messages({"messages": mixed}) == PAIR


# ---------------------------------------------------------------------------------------------------------------- rows


def config_of(
    path: Path, seq_len=32, seed=0, task="sft", model="llama3-8b-tiny", **data
) -> Config:
    model = {"name": model, "vocab_size": 258, "num_layers": 2}
    return configs.from_dict(
        {
            "model": model,
            "task": task,
            "seed": seed,
            "batch": {"global": 2, "micro": 2, "seq_len": seq_len},
            "data": {"kind": "jsonl", "path": str(path)} | data,
        }
    )


def write_pairs(folder: Path, lengths: list[tuple[int, int]]) -> list[tuple[bytes, bytes]]:
    """Prompts and responses of so many bytes, no two alike."""
    generator = np.random.default_rng(0)
    pairs = [
        tuple(bytes(generator.integers(97, 123, n, np.uint8)) for n in pair) for pair in lengths
    ]
    lines = [json.dumps({"prompt": q.decode(), "response": a.decode()}) for q, a in pairs]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return pairs


LENGTHS = [(3, 2), (10, 5), (1, 1), (7, 20), (2, 9), (4, 4), (12, 3), (5, 1), (8, 8), (2, 2)]


def epoch(dataset, number=0) -> list[dict[str, torch.Tensor]]:
    return [dataset.row(n) for n in range(number * len(dataset), (number + 1) * len(dataset))]


@pytest.mark.parametrize("packed", [True, False])
def test_rows_hold_every_sample_once_an_epoch(tmp_path, packed):
    pairs = write_pairs(tmp_path, LENGTHS)
    data, held = open_dataset(config_of(tmp_path, packed=packed))
    assert held is None
    expected = Counter((q + b"\n" + a, (-100,) * len(q) + (*a, 257)) for q, a in pairs)
    for number in (0, 1, 7):
        found = Counter()
        for row in epoch(data, number):
            documents = row.get("document_ids", (row["tokens"] == 0).long())  # no text has a zero
            for d in documents.unique() if packed else [0]:
                part = {key: value[documents == d] for key, value in row.items()}
                if (part["tokens"] > 0).all():
                    found[bytes(part["tokens"].tolist()), tuple(part["labels"].tolist())] += 1
                else:  # what is left of a row
                    assert (
                        (part["tokens"] == 0).all()
                        and (part["labels"] == IGNORE).all()
                        and d == -1
                    )
                if packed:
                    assert part["positions"].tolist() == list(range(len(part["positions"])))
        assert found == expected
    filled = sum(len(q) + 1 + len(a) for q, a in pairs)
    assert data.fill == filled / (len(data) * 32) and f"{data.fill:.1%} filled" in data.about
    assert len(data) == (-(-filled // 32) if packed else len(pairs))


def test_rows_say_what_is_padding_where_experts_are_balanced(tmp_path):
    write_pairs(tmp_path, LENGTHS)
    config = config_of(tmp_path, packed=False, model="deepseek-v3-tiny")
    plain, _ = open_dataset(config)
    config.model.config = replace(config.model.config, bias_update_speed=0.01)
    balanced, _ = open_dataset(config)
    for bare, row in zip(epoch(plain), epoch(balanced), strict=True):
        assert "document_ids" not in bare and all(
            torch.equal(row[key], bare[key]) for key in bare
        )
        assert (
            torch.equal(row["document_ids"] == -1, row["tokens"] == 0)
            and (row["document_ids"] <= 0).all()
        )


def test_order_is_a_function_of_seed_and_epoch(tmp_path):
    write_pairs(tmp_path, LENGTHS * 3)

    def order(seed, number):
        return tuple(
            tuple(row["tokens"].tolist())
            for row in epoch(open_dataset(config_of(tmp_path, seed=seed))[0], number)
        )

    assert order(0, 0) == order(0, 0)
    orders = {order(seed, number) for seed in (0, 1) for number in (0, 1, 2)}
    assert len(orders) == 6 and len({tuple(sorted(each)) for each in orders}) == 1


# the latter knows absolute positions
@pytest.mark.parametrize("model", ["llama3-8b-tiny", "gpt3-175b-tiny"])
def test_packed_and_unpacked_give_the_same_gradients(tmp_path, model):
    write_pairs(tmp_path, LENGTHS)
    gradients = [
        mean_gradients(config_of(tmp_path, model=model, packed=packed))
        for packed in (False, True)
    ]
    check_close([gradients[1]], gradients[0], 1e-6, "gradients of an epoch")


def mean_gradients(config) -> dict[str, torch.Tensor]:
    """Of the mean loss over an epoch, all of it in one batch; but not of key biases, which softmax cannot see."""
    data, _ = open_dataset(config)
    model = Decoder(config.model.config)
    initialize(model, seed=0)
    batch, objective = rows(data, range(len(data))), LanguageModeling()
    (objective.loss(model, batch) / objective.count(batch)).backward()
    return {
        name: p.grad for name, p in model.named_parameters() if not name.endswith("k_proj.bias")
    }


@pytest.mark.parametrize(
    "policy, kept, note",
    [("truncate", 9, " (1 truncated, 1 dropped)"), ("drop", 8, " (0 truncated, 2 dropped)")],
)
def test_chats_longer_than_a_row(tmp_path, policy, kept, note):
    """(7, 20) loses its end; (40, 3) would have nothing left to learn."""
    pairs = write_pairs(tmp_path, [(40, 3) if pair == (8, 8) else pair for pair in LENGTHS])
    data, _ = open_dataset(config_of(tmp_path, seq_len=20, over_long=policy))
    assert data.about.startswith(f"{kept} chats{note} in ")
    labels = Counter(label for row in epoch(data) for label in row["labels"].tolist())
    assert labels[257] == 8
    question, answer = pairs[3]
    rest = (*question, 10, *answer)[:20]
    assert (rest in {tuple(row["tokens"].tolist()) for row in epoch(data)}) == (
        policy == "truncate"
    )


def test_a_chat_that_is_cut_within_a_question_ends_with_the_reply_before_it(tmp_path):
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "e" * 40), ("assistant", "f")]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat))
    data, _ = open_dataset(config_of(tmp_path, seq_len=20))
    assert data.questions(1) == [(list(b"ab\n"), [*b"cd", 257])]
    assert (data.row(0)["document_ids"] == -1).sum() == 20 - len("ab\ncd")


def test_validation_holds_out_chats(tmp_path):
    pairs = write_pairs(tmp_path, LENGTHS)
    train, held = open_dataset(config_of(tmp_path, validation=0.3))
    sides = [{bytes(prompt[:-1]) for prompt, _ in side.questions(99)} for side in (train, held)]
    assert (len(sides[0]), len(sides[1])) == (7, 3) and sides[0] | sides[1] == {
        q for q, _ in pairs
    }


def test_settings_that_contradict_fine_tuning(tmp_path):
    write_pairs(tmp_path, [(3, 40)])
    with pytest.raises(
        InputError,
        match=r"holds no chat to learn from with batch.seq_len=32 \(0 truncated, 1 dropped\)",
    ):
        open_dataset(config_of(tmp_path, over_long="drop"))
    with pytest.raises(InputError, match="data.kind=text holds no chats, as task=sft needs"):
        config_of(tmp_path, kind="text")
    for task in ("pretrain", "grpo"):
        with pytest.raises(
            InputError, match="data.packed=true is for task=sft, lora, dpo, reward, not"
        ):
            config_of(tmp_path, task=task, packed=True)
    config = config_of(tmp_path)
    config.validation.exact_match = 5
    with pytest.raises(
        InputError, match="validation.exact_match=5 needs chats that are held out"
    ):
        validate(config)
    config.data.validation = 0.5
    for name in ("tp", "cp", "pp"):
        config.parallel = Parallel(**{name: 2})
        with pytest.raises(
            InputError,
            match="validation.exact_match=5 generates token by token, so tp, cp and pp must be 1",
        ):
            validate(config)


def test_exact_match_counts_whole_replies():
    """A model that always says its last token plus one: layers of zeros, and a head that knows the embedding."""
    shape = replace(configs.from_dict({"model": "llama3-8b-tiny"}).model.config, vocab_size=10)
    model = Decoder(replace(shape, max_position_embeddings=6))
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.fill_(name.endswith("norm.weight"))
    model.model.embed_tokens.weight.fill_diagonal_(1)
    model.lm_head.weight.copy_(model.model.embed_tokens.weight.roll(1, 0))
    questions = [([1], [2, 3, 4]), ([5, 1], [2]), ([1], [2, 3, 5]), ([9], [0, 2])]
    assert exact_match(model, questions) == 0.5
    too_long = [([0, 1, 2, 3, 4, 5], [6]), ([0, 1, 2, 3], [4, 5, 6])]  # for six positions
    assert exact_match(model, [*too_long, *questions]) == 0.5 and math.isnan(
        exact_match(model, too_long)
    )


def test_a_run_answers_what_was_held_out(tmp_path, capsys):
    """The data of the ready example, a few steps of training, and its resuming with no step left to do."""
    data = tmp_path / "data" / "sums.jsonl"
    arithmetic.main([str(data), "--count", "40"])
    config = config_of(data, seq_len=128, validation=0.1)
    config.out_dir, config.steps, config.validation.exact_match, config.validation.every = (
        str(tmp_path),
        3,
        2,
        3,
    )
    train(config)
    output = capsys.readouterr()
    assert (
        "36 chats in" in output.out + output.err
        and ", exact match 0.0%" in output.out + output.err
    )
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["val_exact_match"] == 0 and last["val_loss"] > 0
    asked = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": "user", "content": "1 + 1"}], tokenize=False
    )
    assert asked == "1 + 1\n"  # the template of training goes with the model


def test_arithmetic_is_right(tmp_path):
    for messages in arithmetic.dialogues(300, seed=1):
        first, working, second, more = (message["content"] for message in messages)
        for question, reply in ((first, working), (working.split()[-1] + " " + second, more)):
            *columns, result = reply.split()
            assert eval(question) == int(result) >= 0  # "47 + 38"
            assert all(
                eval(left) == int(right)
                for left, right in (column.split("=") for column in columns)
            )
            highest = columns[-1].split("=")[1]
            assert int(highest + "".join(column[-1] for column in columns[-2::-1])) == int(result)


@pytest.mark.parametrize(
    "count, line", [("-3", "-3 must be above 0"), ("1000000", "count: 1000000 must .* at most")]
)
def test_so_many_dialogues_cannot_be_made(tmp_path, count, line):
    with pytest.raises(InputError, match=line):
        arithmetic.main([str(tmp_path / "a.jsonl"), "--count", count])
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------- mock


@pytest.mark.parametrize("seq_len", [2048, 4096])
def test_mock_rows_have_the_shape_of_packed_squad(seq_len):
    """17 slots empty in each row, and attention over sum(s^2) / sum(s) = 208 tokens: what the tables' FLOPs count."""
    data, held = MockChats(seq_len, 1000, 0, split=0), MockChats(seq_len, 1000, 0, split=1)
    lengths = []
    for n in range(200):
        row = data.row(n)
        sizes = torch.bincount(row["document_ids"] + 1)
        assert sizes[0] == 17 and (row["labels"][-17:] == IGNORE).all()
        lengths += sizes[1:].tolist()
        predicted = row["labels"] != IGNORE
        assert (row["labels"][:-1][predicted[:-1]] == row["tokens"][1:][predicted[:-1]])[
            :-1
        ].float().mean() > 0.7
    lengths = np.array(lengths, float)
    assert (lengths**2).sum() / lengths.sum() == pytest.approx(208, rel=0.02)
    assert not torch.equal(data.row(0)["tokens"], held.row(0)["tokens"])
    assert torch.equal(
        data.row(5)["tokens"], MockChats(seq_len, 1000, 0, split=0).row(5)["tokens"]
    )
