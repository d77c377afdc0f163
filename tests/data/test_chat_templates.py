"""Chats against transformers' apply_chat_template, with templates of published models, which TRL has."""

# ruff: noqa: RUF001 (DeepSeek's tokens)

import json
import re
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig

from minitrain import Sampler, generate, merge, save_pretrained
from minitrain.__main__ import dispatch
from minitrain.commands import generate_text
from minitrain.data.chat.chat_templates import built_in, choose_template
from minitrain.data.chat.chats import encode_chat, encode_question, end_of_reply
from minitrain.data.chat.messages import Message
from minitrain.data.chat.problems import open_problems
from minitrain.data.chat.read_chats import read_messages
from minitrain.data.chat.read_tools import read_shown
from minitrain.data.chat.rendering import Rendering
from minitrain.data.chat.reply_counts import ReplyCounts
from minitrain.data.faults.skips import Skips
from minitrain.data.files import find_files
from minitrain.data.records import read_records
from minitrain.data.tokenizer import ByteTokenizer, load_tokenizer
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.run.tasks import train_model
from minitrain.settings import Data
from tests.helpers.chats import published, save_with_adapter, specials_in, tokenizer_with
from tests.helpers.commands import command
from tests.helpers.grpo import TREE

pytestmark = pytest.mark.usefixtures("same_date")

LLAMA3 = built_in("llama3")
CHATML = built_in("chatml")
# what ends a reply in each; what TRL's form of it for training has the model say besides, of what is given or follows
PUBLISHED = {
    "llama3": ("<|eot_id|>", ""),
    "llama3_1": ("<|eot_id|>", None),
    "llama3_2": ("<|eot_id|>", None),
    "qwen2_5": ("<|im_end|>", "\n\n"),
    "qwen3": ("<|im_end|>", "\n"),
    "qwen3_instruct_2507": ("<|im_end|>", "\n"),
    "deepseekv3": ("<｜end▁of▁sentence｜>", "<｜Assistant｜>"),
    "gptoss": ("<|return|>", "<|start|>assistant"),
    "nemotron_3_nano": ("<|im_end|>", "<think>\n"),
    "nemotron_3_super": ("<|im_end|>", "<think>\n"),
    "gemma3": ("<end_of_turn>", "\n"),
    "phi3": ("<|end|>", None),
}
USER, REPLY = Message("user", " Who are you?\n"), Message("assistant", "I am 🙂.")
CHATS = {
    "one turn": [USER, REPLY],
    "system and two turns": [
        Message("system", "Be\nbrief. "),
        USER,
        REPLY,
        Message("user", "Oh?"),
        REPLY,
    ],
    "empty reply": [USER, Message("assistant", "")],
    "a question left": [USER, REPLY, USER],
    "two replies": [USER, REPLY, REPLY, USER],
    "thoughts": [
        USER,
        Message("assistant", "<think>\nhm\n</think>\n\nme"),
        USER,
        Message("assistant", "</think>you"),
    ],
    "markup": [
        USER,
        Message("assistant", "<b>me</b>"),
        USER,
        Message("assistant", "<t><think>you"),
    ],
}
MIXTRAL = (  # mistralai/Mixtral-8x7B-Instruct-v0.1, without its check of the roles
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
    "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module", params=PUBLISHED)
def tokenizers(request, tmp_path_factory):
    jinja = published(request.param)
    ours, theirs = tokenizer_with(tmp_path_factory.mktemp("tokenizer"), jinja, specials_in(jinja))
    return request.param, ours, theirs


def dicts(chat: list[Message]) -> list[dict[str, str]]:
    return [message.as_dict() for message in chat]


def template_and_tokens(chat, ours, theirs):
    """Ours of a chat, after the text and tokens were compared with transformers'; nothing where both refuse it."""
    template = choose_template("auto", ours)
    try:
        expected = theirs.apply_chat_template(dicts(chat), tokenize=False)
    except Exception as error:  # what a template raises
        with pytest.raises(InputError, match=f"refuses it: {re.escape(str(error)[:20])}"):
            encode_chat(chat, template, ours)
        return None
    assert "".join(text for text, _ in Rendering(template, chat).pieces()) == expected
    tokens, said = encode_chat(chat, template, ours)
    assert tokens.tolist() == theirs.apply_chat_template(dicts(chat), return_dict=False)
    return template, tokens, said


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_published_templates_are_rendered_as_in_transformers(tokenizers, chat):
    """And the model is to say all of the assistant's turns, each with its end, and nothing else."""
    name, ours, theirs = tokenizers
    encoded = template_and_tokens(chat, ours, theirs)
    if encoded is None:
        return
    template, tokens, said = encoded
    starts, ends = (
        np.flatnonzero(np.diff(said, prepend=0) == 1),
        np.flatnonzero(np.diff(said, append=0) == -1),
    )
    replies = [i for i, message in enumerate(chat) if message.role == "assistant"]
    assert len(starts) == len(ends) == len(replies)
    for start, end, i in zip(starts, ends, replies, strict=True):
        asked = theirs.apply_chat_template(
            dicts(chat[:i]), add_generation_prompt=True, return_dict=False
        )
        if chat[i - 1].role != "assistant":  # else it would be continued
            assert encode_question(chat[:i], template, ours) == asked
        given = len(asked)
        if (
            name == "qwen3" and i == 2 and chat == CHATS["two replies"]
        ):  # it writes a reply otherwise if one follows
            given = start
            assert theirs.decode(tokens[:start]).endswith("<|im_start|>assistant\n")
        # which ask for a thought
        if name in ("deepseekv3", "nemotron_3_nano", "nemotron_3_super"):
            given = start
            assert asked[:start] == tokens[:start].tolist() and "<think>\n".endswith(
                theirs.decode(asked[start:])
            )
        assert start == given
        last = {"<|return|>": "<|end|>"} if i < len(chat) - 1 else {}
        assert tokens[end] == ours.token_id(last.get(PUBLISHED[name][0], PUBLISHED[name][0]))
        words = ours.encode(chat[i].content.split("</think>")[-1].strip())
        assert ours.decode(tokens[start:end].tolist()).endswith(ours.decode(words))


@pytest.mark.parametrize(
    "name", [name for name, (_, more) in PUBLISHED.items() if more is not None]
)
@pytest.mark.parametrize("chat", ["one turn", "system and two turns", "empty reply"])
def test_trained_tokens_are_those_of_trl(tmp_path, name, chat):
    if (name, chat) == ("qwen3", "system and two turns"):
        pytest.skip("TRL's form writes thoughts into earlier turns, too")
    chat, jinja = CHATS[chat], published(name)
    ours, theirs = tokenizer_with(tmp_path, jinja, specials_in(jinja))
    _, tokens, said = template_and_tokens(chat, ours, theirs)
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    expected = theirs.apply_chat_template(
        dicts(chat), chat_template=published(f"{name}_training"), **options
    )
    assert expected["input_ids"] == tokens.tolist()
    trained = np.array(expected["assistant_masks"], bool)
    assert trained[said].all()
    assert theirs.decode(tokens[trained & ~said]) == PUBLISHED[name][1] * (len(chat) // 2)


def train_on_lines(folder, task):
    """One step of a tiny model on `folder`/a.jsonl, by the tokenizer in `folder`/own, into `folder`/out."""
    tree = {
        "task": task,
        "model": {"name": "llama3-8b-tiny", "vocab_size": 320, "num_layers": 1},
        "device": "cpu",
        "data": {
            "kind": "jsonl",
            "path": str(folder / "a.jsonl"),
            "tokenizer": str(folder / "own"),
        },
        "batch": {"global": 1, "micro": 1, "seq_len": 128},
        "steps": 1,
        "out_dir": str(folder / "out"),
    }
    train_model.train(from_dict(tree))


def test_an_exported_checkpoint_of_pairs_is_asked_as_in_training(tmp_path):
    jinja = published("deepseek_r1_distill")
    (tmp_path / "own").mkdir()
    tokenizer_with(tmp_path / "own", jinja, specials_in(jinja))
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1?", "chosen": "2", "rejected": "3"}\n')
    train_on_lines(tmp_path, "dpo")
    (tmp_path / "a.jsonl").unlink()
    dispatch(["export", "--run", str(tmp_path / "out"), "--out", str(tmp_path / "exported")])
    exported, ended = (
        (tmp_path / folder / "chat_template.jinja").read_text() for folder in ("exported", "out")
    )
    assert exported == ended != jinja


@pytest.mark.parametrize(
    "name, shortened",
    [
        ("deepseek_r1_distill", 2),
        ("deepseekv3", 2),
        ("nemotron_3_nano", 0),
        ("nemotron_3_super", 0),
        ("qwen3", 0),
        ("llama3", 0),
    ],
)
@pytest.mark.parametrize("thoughts", ["none", "some", "all"])
def test_a_tuned_model_is_asked_as_in_training(tmp_path, capsys, name, shortened, thoughts):
    """By whoever asks: its template's prompt is that of training, where that is one and the same. What the template
    leaves out of the replies is told."""
    jinja = published(name)
    (tmp_path / "own").mkdir()
    ours, theirs = tokenizer_with(tmp_path / "own", jinja, specials_in(jinja))
    thinking = {"none": [], "some": [0, 1], "all": [0, 1, 2]}[thoughts]
    replies = ["<think>\nso\n</think>\n\n6" if i in thinking else "6" for i in range(3)]
    lines = [
        json.dumps({"prompt": f"{i}+6?", "response": reply}) for i, reply in enumerate(replies)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    train_on_lines(tmp_path, "sft")
    said = " ".join(capsys.readouterr().out.split())
    (tmp_path / "a.jsonl").unlink()
    dispatch(["export", "--run", str(tmp_path / "out"), "--out", str(tmp_path / "exported")])
    exported = {file.name: file.read_bytes() for file in (tmp_path / "exported").iterdir()}
    assert exported == {file: (tmp_path / "out" / file).read_bytes() for file in exported}
    assert ("chat_template.jinja" in exported) == (
        tmp_path / "out" / "chat_template.jinja"
    ).exists()
    lost = len(thinking) if shortened else 0
    assert (f"{lost} of 3 replies lose text" in said) == bool(lost) == ("lose text" in said)
    tuned, template = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        choose_template("auto", ours),
    )
    prompts = set()
    for i, reply in enumerate(replies):
        chat = [Message("user", f"{i}+6?"), Message("assistant", reply)]
        (given, _), _, _ = Rendering(template, chat).pieces()
        asked = tuned.apply_chat_template(
            dicts(chat[:1]), tokenize=False, add_generation_prompt=True
        )
        assert tuned.apply_chat_template(
            dicts(chat), tokenize=False
        ) == theirs.apply_chat_template(dicts(chat), tokenize=False)
        before = theirs.apply_chat_template(
            dicts(chat[:1]), tokenize=False, add_generation_prompt=True
        )
        prompts.add((given == before, asked == given))
    if len(prompts) > 1:  # nothing is right for all of them: the template stays
        assert prompts == {(True, True), (False, False)} and "of 3 replies follow" in said
    else:
        assert prompts in ({(True, True)}, {(False, True)})
        assert ("3 of 3 replies follow" in said) == (prompts == {(False, True)})


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
]


def called(*arguments, content="", **more) -> dict:
    calls = [
        {
            "id": f"call_{i:04}",
            "type": "function",
            "function": {"name": "add", "arguments": given},
        }
        for i, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def answered(number: int = 0) -> dict:
    return {
        "role": "tool",
        "content": str(number),
        "name": "add",
        "tool_call_id": f"call_{number:04}",
    }


ASK, TELL = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}
LINES = {
    "tools": ([ASK, called({"a": 2, "b": "x"}), answered(), TELL], TOOLS, {}),
    "two calls": (
        [ASK, called({"a": 2}, {}, content="I add."), answered(0), answered(1), TELL, ASK, TELL],
        TOOLS,
        {},
    ),
    "no content": ([ASK, called({"a": 2}, content=None), answered(), TELL], TOOLS, {}),
    "ends with a call": (
        [{"role": "system", "content": "Add."}, ASK, called({"b": "x"})],
        TOOLS,
        {},
    ),
    "thoughts": (
        [ASK, TELL | {"reasoning_content": "hm"}, ASK, TELL | {"reasoning_content": "again"}],
        None,
        {},
    ),
    "a thought": ([ASK, TELL | {"thinking": "hm"}], None, {}),
    "thoughtful calls": (
        [ASK, called({"a": 2}, reasoning_content="hm"), answered(), TELL, ASK, TELL],
        TOOLS,
        {},
    ),
    "developer": ([{"role": "developer", "content": "Be brief."}, ASK, TELL], None, {}),
    "variables": ([ASK, TELL], None, {"enable_thinking": False}),
    "masked": ([ASK, TELL | {"content": "5!", "weight": 0}, ASK, TELL], None, {}),
}
# where it is not shown, or not where it ends (two calls in gpt-oss: it shows one), in templates of the zoo's families
REFUSED = {
    "deepseek_r1_distill": {
        "tools",
        "two calls",
        "ends with a call",
        "thoughts",
        "a thought",
        "thoughtful calls",
    },
    "gptoss": {"two calls"},
}


def all_templates() -> list[str]:
    folder = Path(trl.__file__).parent / "chat_templates"
    return sorted(file.stem for file in folder.glob("*.jinja"))


@pytest.mark.parametrize("name", all_templates())
def test_lines_of_2026_are_rendered_and_masked_as_in_transformers(tmp_path, name):
    """Over all templates that TRL has, or refused in one line. Where a template marks replies, the marks count; in
    those without, what is said are the replies: each as it follows the prompt for it, up to a token that ends it."""
    jinja = published(name)
    marked = re.search(r"generation\s*-?%}", jinja) is not None
    specials = [
        *specials_in(jinja),
        *re.findall(r"</?tool_(?:call|response)>|<tool_call\|>", jinja),
    ]
    ours, theirs = tokenizer_with(tmp_path, jinja, list(dict.fromkeys(specials)))
    template, done = choose_template("auto", ours), set()
    for kind, (messages, tools, variables) in LINES.items():
        line = {"messages": messages, "tools": tools, "chat_template_kwargs": variables}
        bare = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in messages
        ]
        options = {
            "tools": tools,
            "return_dict": True,
            "return_assistant_tokens_mask": marked,
            **variables,
        }
        try:
            if kind == "developer" and "developer" not in jinja and "system" in jinja:
                bare[0]["role"] = "system"
            expected = theirs.apply_chat_template(bare, **options)
        except Exception:  # what a template raises
            with pytest.raises(InputError):
                encode_chat(read_messages(line), template, ours, read_shown(line))
            continue
        try:
            tokens, said = encode_chat(read_messages(line), template, ours, read_shown(line))
        except InputError as error:
            why = "( leaves out message|: it is not in its text| does not show where message| refuses it: Message has)"
            assert re.match(
                f"('[a-z_]+' is not supported by )?the chat template beside .*json{why}",
                str(error),
            )
            continue
        done.add(kind)
        assert tokens.tolist() == expected["input_ids"]
        if marked:
            masks = np.array(expected["assistant_masks"], bool)
            assert (
                np.array_equal(said, masks)
                if kind != "masked"
                else (said <= masks).all() and (said < masks).any()
            )
            continue
        starts, ends = (
            np.flatnonzero(np.diff(said, prepend=0) == 1),
            np.flatnonzero(np.diff(said, append=0) == -1),
        )
        replies = [
            i
            for i, turn in enumerate(messages)
            if turn["role"] == "assistant" and "weight" not in turn
        ]
        assert len(starts) == len(replies)
        for start, end, i in zip(starts, ends, replies, strict=True):
            reply = ours.decode(tokens[start : end + 1].tolist(), special=True)
            words = reply if messages[i]["content"] is None else messages[i]["content"]
            assert words in reply or name == "muse_glimmer"  # it drops text beside calls
            assert tokens[end] > 257 or "glm" in name
            calls = [call["function"] for call in messages[i].get("tool_calls", ())]
            assert all(key in reply for call in calls for key in call["arguments"])
            prompt = {
                "tools": tools,
                "add_generation_prompt": True,
                "return_dict": False,
                **variables,
            }
            asked = theirs.apply_chat_template(bare[:i], **prompt)
            common = min(len(asked), start)
            if (
                tokens[:common].tolist() == asked[:common]
            ):  # but for earlier turns, whose thoughts go if more follow
                assert re.fullmatch(r"(<think>)?\s*(</think>)?\s*", theirs.decode(asked[start:]))
    if name in ("qwen3", "qwen2_5", "llama3_1", "gptoss", "nemotron_3_nano", "qwen3_5_think"):
        assert {"tools", "no content", "ends with a call", "masked"} - REFUSED.get(
            name, set()
        ) <= done


def test_arguments_in_json_are_not_quoted_twice(tmp_path):
    """As a text, which is how OpenAI's interface has them, and vLLM makes objects of: some templates would quote it."""
    for name in ("llama3_1", "qwen2_5", "qwen3", "gptoss"):
        jinja = published(name)
        ours, theirs = tokenizer_with(tmp_path / name, jinja, specials_in(jinja))
        texts = [ASK, called('{"a": 2, "b": "x"}'), answered(), TELL]
        objects = [ASK, called({"a": 2, "b": "x"}), answered(), TELL]
        line = {"messages": texts, "tools": TOOLS}
        template = choose_template("auto", ours)
        tokens, _ = encode_chat(read_messages(line), template, ours, read_shown(line))
        assert tokens.tolist() == theirs.apply_chat_template(
            objects, tools=TOOLS, return_dict=False
        )


def encoded(line: dict, ours) -> list[int]:
    template = choose_template("auto", ours)
    return encode_chat(read_messages(line), template, ours, read_shown(line))[0].tolist()


def test_arguments_are_a_text_where_the_template_adds_them_to_one(tmp_path):
    """DeepSeek-V3's takes no objects; what it writes is the text as it was given."""
    ours, theirs = tokenizer_with(
        tmp_path, published("deepseekv3"), specials_in(published("deepseekv3"))
    )
    for given in ('{"a": 2, "b": "x"}', '{"b":"x",  "a":null}', "{}"):
        messages = [ASK, called(given), answered(), TELL]
        expected = theirs.apply_chat_template(messages, return_dict=False)
        assert encoded({"messages": messages}, ours) == expected


ARGUMENTS = {"a": 2, "b": "x", "c": None}
OTHER_CALLS = [
    {"name": "add", "parameters": ARGUMENTS},
    {"name": "add", "args": json.dumps(ARGUMENTS)},
    {"id": "1", "name": "add", "input": ARGUMENTS, "type": "tool_use"},
    {"function": {"name": "add", "parameters": ARGUMENTS}},
    {"function": {"name": "add"}, "arguments": ARGUMENTS},
    {"function": {"name": "add", "arguments": None}, "args": ARGUMENTS},
    {"function": {"name": "add", "arguments": {}}, "input": ARGUMENTS},
    {"function": json.dumps({"name": "add", "arguments": ARGUMENTS})},
    {"function": None, "name": "add", "arguments": ARGUMENTS, "parameters": None},
    json.dumps({"name": "add", "parameters": ARGUMENTS}),
]


@pytest.fixture(scope="module")
def qwens(tmp_path_factory):
    both = {}
    for name in ("qwen2_5", "qwen3", "llama3_1"):
        folder = tmp_path_factory.mktemp(name)
        both[name] = tokenizer_with(folder, published(name), specials_in(published(name)))
    return both


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_arguments_of_another_name_are_those_of_the_call(qwens, call):
    for ours, theirs in qwens.values():
        expected = theirs.apply_chat_template(
            [ASK, called(ARGUMENTS), answered(), TELL], tools=TOOLS, return_dict=False
        )
        turn = called() | {"tool_calls": [call]}
        line = {"messages": [ASK, turn, answered(), TELL], "tools": TOOLS}
        assert encoded(line, ours) == expected


@pytest.mark.parametrize(
    "call, message",
    [
        ({"name": "add"}, "the call of 'add' has no key 'arguments'"),
        ({"function": {"name": "add", "arguments": None}}, "the call of 'add' has no key 'argum"),
        ({"name": "add", "kwargs": {"a": 2}}, "the call of 'add' has no key 'arguments'"),
        ({"name": "add", "args": {"a": 2}, "input": {"a": 3}}, "two different sets of arguments"),
        ({"name": "add", "args": [2]}, "'args' must be a dict, not list"),
        ({"name": "add", "args": "a=2"}, "'args' is a text that is not valid JSON"),
        (5, "'tool_calls' is not supported with 5 in it"),
    ],
)
def test_calls_whose_arguments_would_be_lost_are_refused(call, message):
    turn = called() | {"tool_calls": [call]}
    with pytest.raises(InputError, match=r"'messages'\[1\]: .*" + message):
        read_messages({"messages": [ASK, turn]})
    no_arguments = called() | {"tool_calls": [{"name": "now", "arguments": {}}]}
    [read] = read_messages({"messages": [ASK, no_arguments]})[1].more["tool_calls"]
    assert read["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    "given",
    [
        [json.dumps(TOOLS[0])],
        json.dumps([json.dumps(TOOLS[0])]),
        [{"type": "function", "function": json.dumps(TOOLS[0]["function"])}],
        [
            {
                "type": "function",
                "function": TOOLS[0]["function"]
                | {"parameters": json.dumps(TOOLS[0]["function"]["parameters"])},
            }
        ],
    ],
)
def test_tools_in_json_are_not_quoted_twice(qwens, given):
    for ours, theirs in qwens.values():
        expected = theirs.apply_chat_template([ASK, TELL], tools=TOOLS, return_dict=False)
        for line in ({"tools": given}, {"chat_template_kwargs": {"tools": given}}):
            assert encoded({"messages": [ASK, TELL]} | line, ours) == expected


@pytest.mark.parametrize("key", ["tools", "documents"])
@pytest.mark.parametrize("items", [["add"], [5], ["[]", "[1]"], [None]])
def test_tools_that_are_no_objects_are_refused(key, items):
    with pytest.raises(InputError, match=f"'{key}' "):
        read_shown({key: items})


def test_rows_with_other_tools_teach_the_same_from_every_form(tmp_path, qwens):
    """A table gives all structs of a column the keys of each. What was written is the oracle, by transformers."""
    rows = []
    for name, key, value in (("weather", "city", "Paris"), ("book", "seats", 3), ("now", "", "")):
        properties = {key: {"type": "string"}} if key else {"zone": {"enum": ["a"]}}
        tool = {
            "type": "function",
            "function": {"name": name, "parameters": {"properties": properties}},
        }
        call = {
            "type": "function",
            "function": {"name": name, "arguments": {key: value} if key else {}},
        }
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        rows.append(
            {"messages": [ASK, turn, {"role": "tool", "content": "1"}, TELL], "tools": [tool]}
        )
    table = Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pa.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for ours, theirs in qwens.values():
        expected = [
            theirs.apply_chat_template(row["messages"], tools=row["tools"], return_dict=False)
            for row in rows
        ]
        for name in ("a.jsonl", "a.parquet", "pa.parquet", "saved"):
            files = find_files(Data("jsonl", str(tmp_path / name)))
            found = list(read_records(files, partial(encoded, ours=ours), Skips()))
            assert found == expected, name


def test_nulls_that_a_file_shows_are_told(tmp_path, qwens):
    """Of JSON nobody knows who wrote them: they are shown as in transformers, with a note."""
    ours, theirs = qwens["qwen2_5"]
    template = choose_template("auto", ours)
    counts = ReplyCounts()
    shown = [called({"a": None}), called({"a": {"b": [{"c": None}]}})]
    for turn in (*shown, called({"a": [None]})):
        line = {"messages": [ASK, turn], "tools": TOOLS}
        found = encode_chat(read_messages(line), template, ours, read_shown(line), counts)[0]
        assert found.tolist() == theirs.apply_chat_template(
            [ASK, turn], tools=TOOLS, return_dict=False
        )
    assert any(note.startswith("2 chats show null in tools or calls") for note in counts.notes)


def test_calls_that_a_template_drops_count_as_lost(tmp_path):
    """R1-Distill's writes none beside a text, as in transformers."""
    jinja = published("deepseek_r1_distill")
    ours, _ = tokenizer_with(tmp_path / "r1", jinja, specials_in(jinja))
    qwen, _ = tokenizer_with(
        tmp_path / "qwen", published("qwen3"), specials_in(published("qwen3"))
    )
    turns = [ASK, called({"a": 2, "b": 'say "é"\n'}, content="I add."), answered(), TELL]
    for tokenizer, lost in ((ours, 1), (qwen, 0)):
        counts = ReplyCounts()
        template = choose_template("auto", tokenizer)
        encode_chat(read_messages({"messages": turns}), template, tokenizer, counts=counts)
        assert (counts.replies, counts.shortened) == (2, lost)
    jinja = published("qwen3").replace("tool_call.arguments | tojson", "'{}'")
    part, _ = tokenizer_with(tmp_path / "part", jinja, specials_in(jinja))
    counts = ReplyCounts()
    template = choose_template("auto", part)
    encode_chat(read_messages({"messages": turns}), template, part, counts=counts)
    assert counts.shortened == 1


@pytest.mark.parametrize("code", range(0xFDD0, 0xFDD4))
def test_characters_that_stand_for_marks_are_refused(qwens, code):
    """In any place of a chat: they would become bos or eos, or end a reply."""
    ours, _ = qwens["qwen2_5"]
    text = f"a{chr(code)}b"
    for messages, more in (
        ([ASK | {"content": text}, TELL], {}),
        ([ASK, TELL | {"content": text}], {}),
        ([ASK, called({"a": text})], {}),
        ([ASK, TELL], {"tools": [{"name": text}]}),
    ):
        with pytest.raises(InputError, match=f"holds U.{code:04X}, which Unicode keeps"):
            encoded({"messages": messages} | more, ours)


@pytest.mark.parametrize(
    "line, message",
    [
        (
            {"tools": TOOLS},
            "'tools' is not supported by the chat template beside .*: it is not in its text",
        ),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            "'enable_thinking' is not supported by the chat",
        ),
        (
            {"messages": [ASK, called({"a": 2})]},
            "'tool_calls' is not supported by the chat template",
        ),
        (
            {"messages": [ASK, TELL | {"thought": "hm"}]},
            "'reasoning_content' is not supported by the chat",
        ),
        (
            {"messages": [{"role": "developer", "content": "Be."}, ASK, TELL]},
            ".* leaves out message 1, the dev",
        ),
    ],
)
def test_keys_that_a_template_does_not_show_are_refused(tmp_path, line, message):
    """transformers leaves it out without a word."""
    jinja = published("deepseek_r1_distill").replace("tool_calls", "calls") + "{# developer #}"
    ours, _ = tokenizer_with(tmp_path, jinja, specials_in(jinja))
    line = {"messages": [ASK, TELL]} | line
    with pytest.raises(InputError, match=message):
        encode_chat(read_messages(line), choose_template("auto", ours), ours, read_shown(line))


def test_a_policy_is_asked_as_transformers_asks(tmp_path):
    """Though what it should answer is written without the thought that DeepSeek's template asks for."""
    jinja = published("deepseekv3")
    _, theirs = tokenizer_with(tmp_path, jinja, specials_in(jinja))
    line = {"prompt": "2+2?", "answer": "4"}
    (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line))
    data = {"kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path)}
    tree = TREE | {
        "data": data,
        "model": TREE["model"] | {"vocab_size": 300},
        "batch": {"global": 8, "micro": 1, "seq_len": 64},
    }
    problems, _, tokenizer, ends = open_problems(from_dict(tree))
    question = [{"role": "user", "content": "2+2?"}]
    expected = theirs.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    for problem in problems.problems:
        assert problem.prompt == expected
        assert problem.reply == [*b"4", ends[0]] and ends[0] == tokenizer.token_id(
            "<｜end▁of▁sentence｜>"
        )


BEGUN = ["<think>", "<think>\n", "The answer is ", " 2 + ", "2\n\n", "no</think>2"]


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize("before", ["one turn", "system and two turns"])
def test_a_begun_reply_is_continued_as_in_transformers(tokenizers, begun, before):
    _, ours, theirs = tokenizers
    chat = [*CHATS[before][:-1], Message("assistant", begun)]
    template = choose_template("auto", ours)
    try:
        expected = theirs.apply_chat_template(
            dicts(chat), continue_final_message=True, return_dict=False
        )
    except Exception:  # a template may refuse roles, or drop the beginning
        with pytest.raises(InputError):
            encode_question(chat, template, ours)
    else:
        assert encode_question(chat, template, ours) == expected


@pytest.mark.parametrize("begun", BEGUN)
@pytest.mark.parametrize(
    "template", [LLAMA3, CHATML, built_in("plain")], ids=["llama3", "chatml", "plain"]
)
def test_a_begun_reply_is_continued_in_templates_of_ours(tmp_path, template, begun):
    specials = [
        "<s>",
        "</s>",
        "<|begin_of_text|>",
        "<|end_header_id|>",
        *LLAMA3.special,
        *CHATML.special,
    ]
    ours, _ = tokenizer_with(tmp_path, "", specials)
    ours, theirs = tokenizer_with(tmp_path, template.jinja(ours), specials)
    chat = [USER, REPLY, USER, Message("assistant", begun)]
    expected = theirs.apply_chat_template(
        dicts(chat), continue_final_message=True, return_dict=False
    )
    assert encode_question(chat, template, ours) == expected


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_a_policy_continues_a_begun_reply(tmp_path, key):
    """As TRL has it, which gives transformers the prompt so; the answer is what comes after."""
    jinja = published("qwen2_5")
    ours, theirs = tokenizer_with(tmp_path, jinja, specials_in(jinja))
    prompt = dicts([Message("user", "2+2?"), Message("assistant", "<think>")])
    line = {"prompt": prompt, "answer": "4"}
    if key == "messages":
        line = {"messages": [*prompt, {"role": "assistant", "content": "4"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    tree = TREE | {
        "data": {"kind": "jsonl", "path": str(tmp_path / "a.jsonl"), "tokenizer": str(tmp_path)},
        "model": TREE["model"] | {"vocab_size": 300},
        "batch": {"global": 8, "micro": 1, "seq_len": 256},
    }
    [problem] = open_problems(from_dict(tree))[0].problems
    text = trl.data_utils.apply_chat_template({"prompt": prompt}, theirs)["prompt"]
    assert problem.prompt == theirs(text, add_special_tokens=False).input_ids
    assert theirs.decode(problem.prompt).endswith("<|im_start|>assistant\n<think>")
    assert problem.reply == [*b"4", ours.token_id("<|im_end|>")] and problem.answer == "4"


def test_tags_around_what_to_train_are_ignored(tmp_path):
    """Which some models are published with. TRL's are about what is said here."""
    jinja = published("llama3_training")
    ours, theirs = tokenizer_with(tmp_path, jinja, specials_in(jinja))
    chat = CHATS["system and two turns"]
    _, _, said = template_and_tokens(chat, ours, theirs)
    expected = theirs.apply_chat_template(
        dicts(chat), return_assistant_tokens_mask=True, return_dict=True
    )
    assert said.tolist() == [bool(mask) for mask in expected["assistant_masks"]]


@pytest.mark.parametrize("prepend", ["always", "first"])
def test_spaces_that_a_vocabulary_adds_are_where_transformers_has_them(tmp_path, prepend):
    """Vocabularies of Llama 2's kind begin a text with a space, older ones also what follows a special token."""
    tokenizer = Tokenizer(models.BPE({chr(i): i for i in range(9700)}, [], byte_fallback=True))
    if prepend == "always":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(about | {"chat_template": MIXTRAL})
    )
    chat = [
        Message("user", "Who are you?"),
        Message("assistant", "Me."),
        Message("user", "Oh?"),
        Message("assistant", "I am. "),
    ]
    both = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    said = template_and_tokens(chat, *both)[2]
    assert said.sum() == len("Me.") + len("I am. ") + 2
    assert template_and_tokens([Message("system", "?"), *chat], *both) is None


# ---------------------------------------------------------------------------------------------------------- written out


@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_written_out_templates_are_the_published_ones(tmp_path, chat):
    chatml = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
        "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    llama3 = published("llama3").replace("bos_token", "'<|begin_of_text|>'")
    for name, jinja in (("llama3", llama3), ("chatml", chatml)):
        ours, theirs = tokenizer_with(
            tmp_path / name, jinja, [*specials_in(jinja), "<|begin_of_text|>"]
        )
        template, tokens, said = template_and_tokens(chat, ours, theirs)
        written = choose_template(name, ours)
        assert all(map(np.array_equal, encode_chat(chat, written, ours), (tokens, said)))
        asked = [*chat, USER]
        assert encode_question(asked, written, ours) == encode_question(asked, template, ours)
        check_jinja(tmp_path / name, written, ours, chat)


def check_jinja(folder: Path, written, ours, chat: list[Message]) -> None:
    """A template written out in Jinja, as transformers renders it, and as we read it again."""
    (folder / "chat_template.jinja").write_text(written.jinja(ours))
    again, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    tokens, said = encode_chat(chat, written, ours)
    assert theirs.apply_chat_template(dicts(chat), return_dict=False) == tokens.tolist()
    asked = [*chat, USER]
    question = theirs.apply_chat_template(
        dicts(asked), add_generation_prompt=True, return_dict=False
    )
    assert question == encode_question(asked, written, ours)
    if not isinstance(again, ByteTokenizer):
        assert all(
            map(
                np.array_equal,
                encode_chat(chat, choose_template("auto", again), again),
                (tokens, said),
            )
        )


@pytest.mark.parametrize("bos, eos", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
def test_the_plain_template_in_jinja(tmp_path, chat, bos, eos):
    """eos: behind a whole text, as many were told who saved a tokenizer for training (add_eos_token)."""
    ours, _ = tokenizer_with(tmp_path, "", ["<s>", "</s>"])
    if bos:
        single = [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        single += [{"SpecialToken": {"id": "</s>", "type_id": 0}}] * eos
        pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
        tokens = {
            token: {"id": token, "ids": [i], "tokens": [token]}
            for i, token in ((258, "<s>"), (259, "</s>"))
        }
        tree = json.loads((tmp_path / "tokenizer.json").read_text())
        tree["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": pair,
            "special_tokens": tokens,
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
        ours = load_tokenizer(tmp_path)
    assert encode_chat(chat, built_in("plain"), ours)[0][0] == (
        258 if bos else ord(chat[0].content[0])
    )
    check_jinja(tmp_path, built_in("plain"), ours, chat)


def test_bytes_have_the_plain_template_in_transformers(tmp_path):
    ByteTokenizer().save(tmp_path)
    check_jinja(tmp_path, built_in("plain"), ByteTokenizer(), CHATS["system and two turns"])


def test_the_tokenizer_chooses_the_template(tmp_path):
    for kind, bare, specials in (
        ("llama3", LLAMA3, LLAMA3.special),
        ("chatml", CHATML, CHATML.special),
    ):
        tokenizer, _ = tokenizer_with(tmp_path / kind, "", [*specials, "</s>"])
        chosen = choose_template("auto", tokenizer), choose_template(kind, tokenizer)
        assert {template.source for template in chosen} == {bare.source}
        other = {"llama3": "chatml", "chatml": "llama3"}[kind]
        with pytest.raises(
            InputError,
            match=rf"data.template={other} needs the token <\|.*\|>, which data.tokenizer la",
        ):
            choose_template(other, tokenizer)
    assert choose_template("auto", ByteTokenizer()).source == built_in("plain").source
    tokenizer.eos_id = None
    with pytest.raises(InputError, match="data.template=plain ends answers with eos"):
        choose_template("plain", tokenizer)


def test_a_template_is_found_wherever_transformers_keeps_it(tmp_path):
    jinja = published("qwen2_5")
    _, theirs = tokenizer_with(tmp_path / "a", jinja, ["</s>"])
    theirs.save_pretrained(tmp_path / "b")  # as chat_template.jinja
    tokenizer_with(
        tmp_path / "c",
        [{"name": "tools", "template": "x"}, {"name": "default", "template": jinja}],
        ["</s>"],
    )
    for folder in "abc":
        assert load_tokenizer(tmp_path / folder).chat_template == jinja


def test_adapters_are_asked_and_merged_in_the_template_that_they_were_tuned_in(tmp_path):
    jinja = {
        name: f"{{{{ '{name}: ' + messages[0]['content'] }}}}" for name in ("model", "adapter")
    }
    folders = {name: tmp_path / name for name in (*jinja, "out")}
    for name, template in jinja.items():
        folders[name].mkdir()
        tokenizer_with(folders[name], template, ["<s>", "</s>"])
    words = save_with_adapter(tmp_path)
    merge.main([*words, "--out", str(folders["out"])])
    assert load_tokenizer(folders["out"]).chat_template == jinja["adapter"]
    with mock.patch.object(generate_text, "encode", side_effect=generate_text.encode) as encode:
        generate.main([*words, "--chat", "--prompt", "a", "--max-tokens", "1", "--device", "cpu"])
    assert encode.call_args.args[1].source == jinja["adapter"]
    (folders["adapter"] / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"out exists already \(name a new folder\)"):
        merge.main([*words, "--out", str(folders["out"])])
    merge.main([*words, "--out", str(folders["out"] / "new")])
    assert load_tokenizer(folders["out"] / "new").chat_template == jinja["model"]


def test_a_reply_ends_with_the_token_of_its_template(tokenizers):
    name, ours, _ = tokenizers
    assert end_of_reply(choose_template("auto", ours), ours) == ours.token_id(PUBLISHED[name][0])


def test_a_template_that_does_not_show_where_a_reply_ends_has_no_end(tmp_path):
    ours, _ = tokenizer_with(tmp_path, "{{ messages[0]['content'] }}", ["<s>", "</s>"])
    assert end_of_reply(choose_template("auto", ours), ours) is None


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(
    "stored, in_all",
    [
        (None, None),
        ({}, [257, 263]),
        ({"eos_token_id": None}, [257, 263]),
        ({"eos_token_id": 257}, [257, 263]),
        ({"eos_token_id": [257, 260]}, [257, 260, 263]),
    ],
    ids=str,
)
def test_a_model_tuned_in_a_template_stops_at_its_end_of_reply(tmp_path, lora, stored, in_all):
    """In transformers, too, which asks generation_config.json first; a merged adapter like a tuned model."""
    base, out, merged = (tmp_path / name for name in ("base", "out", "merged"))
    base.mkdir()
    tokenizer_with(
        base, "", ["<s>", "</s>", "<|begin_of_text|>", "<|end_header_id|>", *LLAMA3.special]
    )
    save_pretrained(
        Decoder(model_config("llama3-8b-tiny", vocab_size=320, eos_token_id=257)), base
    )
    if stored is not None:
        (base / "generation_config.json").write_text(json.dumps(stored | {"top_k": 7}))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    settings = f"model={base} data.kind=jsonl data.path={tmp_path}/chats.jsonl data.tokenizer={base} out_dir={out}"
    task = "task=lora lora.rank=2" if lora else "task=sft"
    size = "steps=1 batch.global=1 batch.micro=1 batch.seq_len=32 device=cpu"
    config = tmp_path / "empty.yaml"
    config.touch()
    done = command(
        "-m", "minitrain.train", "--config", config, *f"{task} {settings} {size}".split()
    )
    assert done.returncode == 0, done.stderr
    if lora:
        merge.main(["--model", str(base), "--adapter", str(out), "--out", str(merged)])
    end, tuned = 263, merged if lora else out
    assert json.loads((tuned / "config.json").read_text())["eos_token_id"] == [257, end]
    if stored is not None:
        generation = GenerationConfig.from_pretrained(tuned)
        assert generation.eos_token_id == in_all and generation.top_k == 7
    assert (tuned / "chat_template.jinja").exists()
    words = ["--model", str(base if lora else out), *(["--adapter", str(out)] if lora else [])]
    with mock.patch.object(
        Sampler, "submit", autospec=True, side_effect=Sampler.submit
    ) as submit:
        generate.main([*words, "--chat", "--prompt", "a", "--max-tokens", "1", "--device", "cpu"])
        generate.main([*words, "--prompt", "a", "--max-tokens", "1", "--device", "cpu"])
    asked, continued = (
        (*call.args[0].ends, *call.args[2].stop_tokens) for call in submit.call_args_list
    )
    assert end in asked and (end in continued) == (not lora)


@pytest.mark.parametrize("jinja", ["{% if %}", "", "{{ messages[0]['content'] }}"])
def test_adapters_are_merged_whatever_their_template(tmp_path, jinja):
    words = save_with_adapter(tmp_path, eos_token_id=None)
    tokenizer_with(tmp_path / "adapter", "", ["<s>", "</s>"])
    (tmp_path / "adapter" / "chat_template.jinja").write_text(jinja)
    merge.main([*words, "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == jinja
    # the tokenizer's
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 259


def test_a_merged_model_of_bytes_keeps_the_chat_template(tmp_path):
    words = save_with_adapter(tmp_path)
    ByteTokenizer().save(tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text(
        built_in("plain").jinja(ByteTokenizer())
    )
    merge.main([*words, "--out", str(tmp_path / "out")])
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == built_in("plain").jinja(
        ByteTokenizer()
    )


def test_bos_comes_first_where_the_tokenizer_puts_it(monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "beginning_ids", (256,))
    tokens, said = encode_chat([USER, REPLY], built_in("plain"), ByteTokenizer())
    assert tokens.tolist() == [256, *b" Who are you?\n\n", *"I am 🙂.".encode(), 257]
    assert np.flatnonzero(said).tolist() == [*range(16, len(tokens))]
    assert encode_question([USER, REPLY, USER], built_in("plain"), ByteTokenizer()) == [
        *tokens,
        *b" Who are you?\n\n",
    ]


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "jinja, message",
    [
        (
            "{% for m in messages %}",
            r"beside .*tokenizer.json is not valid: line 1: Unexpected end of template",
        ),
        (
            "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
            "beside .* is not valid: maximum recursion depth exceeded",
        ),
        (
            "{{ ''.__class__.__mro__ }}",
            "the chat template .* refuses it: access to attribute '__class__'",
        ),
        ("{{ messages.append(1) }}", "the chat template .* refuses it: .*append"),
        ("{{ 1 / 0 }}", "the chat template .* refuses it: division by zero"),
        (
            "{{ messages[0].content }}",
            ".* does not show where message 2, a reply, begins and ends",
        ),
        (
            "{% for m in messages %}{{ m.content }}\n{% endfor %}",
            ".* does not show where message 2, a reply",
        ),
        (
            "{% for m in messages %}{{ m.content + m.content + '</s>' }}{% endfor %}",
            ".* does not show where",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}",
            ".* not show",
        ),
    ],
)
def test_templates_that_do_not_serve_are_told_in_one_line(tmp_path, jinja, message):
    tokenizer, _ = tokenizer_with(tmp_path, jinja, ["</s>"])
    with pytest.raises(InputError, match=message) as error:
        encode_chat([USER, REPLY], choose_template("auto", tokenizer), tokenizer)
    assert "\n" not in str(error.value)
