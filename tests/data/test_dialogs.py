"""Replies with calls, and what follows them, in the chat templates of published models: against transformers."""

# ruff: noqa: RUF001 (DeepSeek's tokens)

import json
import re

import pytest

from minitrain.data.chat.chat_templates import ChatTemplate, built_in, choose_template
from minitrain.data.chat.dialogs import ChatDialog
from minitrain.data.chat.messages import Message
from minitrain.data.chat.read_tools import read_calls
from minitrain.data.chat.rendering import Rendering
from minitrain.data.chat.tool_calls import find_calls
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from tests.helpers.chats import published, specials_in, tokenizer_with

pytestmark = pytest.mark.usefixtures("same_date")

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
ARGUMENTS = [
    {"a": 3, "b": "x y"},
    {"b": "4", "c": [1, {"d": None}], "a": -2.5},
    {"b": 'lines\nand "quotes" </tool_cal> {"name"', "f": False},
    {},
]
# the templates of the families that this code trains, as TRL has them, and how many calls a reply may have there
FAMILIES = {
    "qwen2_5": 2,
    "qwen3": 2,
    "qwen3_instruct_2507": 2,
    "qwen3_5_nothink": 2,
    "nemotron_3_nano": 2,
    "nemotron_3_super": 2,
    "glm4moe": 2,
    "llama3_1": 1,
    "llama3_2": 1,
    "gptoss": 1,
}


def calls_of(*arguments):
    calls = [
        {"type": "function", "id": f"call0000{i}", "function": {"name": "add", "arguments": each}}
        for i, each in enumerate(arguments)
    ]
    return read_calls({"tool_calls": calls})


def jinja_of(name):
    jinja = published(name)
    return ChatTemplate(jinja, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_as_their_template_writes_them(name):
    """Whatever text stands before them, with an end behind them or cut off before it."""
    template = jinja_of(name)
    for some in [
        *([each] for each in ARGUMENTS),
        *([ARGUMENTS[:2]] if FAMILIES[name] > 1 else []),
    ]:
        reply = Message("assistant", "", {"tool_calls": calls_of(*some)})
        rendering = Rendering(template, [Message("user", "hi"), reply], {"tools": TOOLS})
        before = rendering.unmarked([Message("user", "hi")], ask=True)
        text = rendering.unmarked(rendering.messages)
        said = text[len(before) :] if text.startswith(before) else text.rpartition("hi")[2]
        end = r"(<\|im_end\|>|<\|eot_id\|>|<\|end_of_text\|>)?\s*\Z"
        said = re.sub(end, "", said)
        found = find_calls(said, TOOLS)
        assert [(call.name, call.arguments) for call in found] == [("add", each) for each in some]


BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
ALL_BEGIN, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
WRITTEN = {
    # deepseek-ai/DeepSeek-V3-0324 and DeepSeek-V3.1
    f'So.{ALL_BEGIN}{BEGIN}function{SEP}add\n```json\n{{"a": 1}}\n```{END}\n{BEGIN}function{SEP}add\n```json\n{{}}\n'
    f"```{END}{ALL_END}": [("add", {"a": 1}), ("add", {})],
    f'{ALL_BEGIN}{BEGIN}add{SEP}{{"a": 1}}{END}{BEGIN}sub{SEP}{{"b": "x"}}{END}{ALL_END}': [
        ("add", {"a": 1}),
        ("sub", {"b": "x"}),
    ],
    # mistralai: Mistral-7B-Instruct-v0.3, and Mistral-Small-3.2 and Ministral 3
    '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "b", "arguments": {}}]': [
        ("add", {"a": 1}),
        ("b", {}),
    ],
    '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]b[ARGS]{}': [
        ("add", {"a": 1}),
        ("b", {}),
    ],
    # meta-llama, with its token for code, and the arguments in a text as OpenAI's interface has them
    '<|python_tag|>{"name": "add", "parameters": {"a": "1"}}': [("add", {"a": "1"})],
    '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}': [
        ("add", {"a": 1})
    ],
    # openai/gpt-oss, as its own renderer writes it
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
    '<|message|>{"a": 1}<|call|>': [("add", {"a": 1})],
    # thoughts are no calls, and answers are none that look like them
    '<think>\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n</think>\n4': [],
    '<think>call</think><tool_call>{"name": "a", "arguments": {}}</tool_call>': [("a", {})],
    '{"answer": 4}': [],
    '{"name": "Ada"}': [],
    "It is {4}.": [],
    "": [],
    # what is marked as a call, and cannot be read
    '<tool_call>\n{"name": "add", "arguments": {"a": }}\n</tool_call>': [("", None)],
    '<tool_call>{"name": "add"}</tool_call>': [("add", None)],
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': [("add", None)],
    "<tool_call>[1, null]</tool_call>": [("", None), ("", None)],
    "[TOOL_CALLS]add[ARGS]{": [("add", None)],
    f"{BEGIN}add{SEP}[1]{END}": [("add", None)],
    "<tool_call>" + "[" * 100_000: [("", None)],
    # cut off, or the first of two
    '<tool_call>{"name": "a", "arguments": {}}': [("a", {})],
    '<tool_call>{"name": "a", "arguments": {}}</tool_call> and <tool_call>?': [
        ("a", {}),
        ("", None),
    ],
}


@pytest.mark.parametrize("text", WRITTEN, ids=lambda text: text[:40])
def test_calls_as_models_without_a_template_here_write_them(text):
    assert [(call.name, call.arguments) for call in find_calls(text)] == WRITTEN[text]


def test_texts_of_any_kind_take_no_time_and_raise_nothing():
    pieces = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        BEGIN,
        SEP,
        "to=functions.a",
        "{",
        "}",
        '"',
        "[ARGS]",
    ]
    pieces += [
        "<function=a>",
        "<parameter=b>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "name",
        ":",
        " ",
    ]
    for one in pieces:
        for other in pieces:
            for count in (1, 2000):
                for call in find_calls((one + other) * count):
                    assert isinstance(call.name, str)
    assert find_calls("\n" * 200_000) == []


# ------------------------------------------------------------------------------------------- what follows a reply

SAID = [
    ("It is 5.", [{"role": "user", "content": " And 6?\n"}]),
    ("No.", [{"role": "user", "content": "Why?"}]),
]


@pytest.mark.parametrize("name", [*FAMILIES, "llama3", "deepseekv3", "gemma3", "phi3"])
def test_tokens_after_a_reply_are_those_of_the_template(name, tmp_path):
    """The tokens of transformers for the whole chat end in it, right behind the reply's own end."""
    jinja = published(name)
    ours, theirs = tokenizer_with(tmp_path, jinja, specials_in(jinja))
    dialog = ChatDialog(choose_template("auto", ours), ours)
    chat = [{"role": "user", "content": "2+3?"}]
    prompt = dialog.ask(chat, {}, None)
    options = {"add_generation_prompt": True, "return_dict": False}
    assert prompt == theirs.apply_chat_template(chat, **options)
    for reply, told in SAID:
        end = end_of(name, theirs)
        heard = dialog.hear([*ours.encode(reply), *theirs.encode(end)], True)
        assert heard == reply and heard.tool_calls == []
        given = dialog.tell(told)
        chat += [{"role": "assistant", "content": reply}, *told]
        whole = theirs.apply_chat_template(chat, **options)
        assert whole[-len(given) :] == given
        before = theirs.decode(whole[: -len(given)])
        assert re.search(rf"{re.escape(reply)}\s*<[^<>]*>\Z", before), before


def end_of(name, theirs):
    """A token that ends a reply: of a few templates, what their models say there themselves."""
    known = {"gptoss": "<|return|>", "glm4moe": "<|user|>"}
    for token in (known.get(name), "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>"):
        if token and len(theirs.encode(token, add_special_tokens=False)) == 1:
            return token
    return "<｜end▁of▁sentence｜>"


@pytest.mark.parametrize("name", FAMILIES)
def test_tool_calls_are_found_and_answers_rendered_as_in_transformers(name, tmp_path):
    """Calls are found in the reply, and their answers follow it as in transformers' rendering of the whole chat."""
    jinja = published(name)
    marks = re.findall(r"</?tool_(?:call|response)>", jinja)
    ours, theirs = tokenizer_with(
        tmp_path, jinja, list(dict.fromkeys([*specials_in(jinja), *marks]))
    )
    template = choose_template("auto", ours)
    dialog = ChatDialog(template, ours)
    ask = [{"role": "user", "content": "2+3?"}]
    dialog.ask(ask, {}, TOOLS)
    some = [{"a": 2, "b": "x"}, {"a": 3}][: FAMILIES[name]]
    calls = [
        {
            "type": "function",
            "id": f"call001{i:02}",
            "function": {"name": "add", "arguments": each},
        }
        for i, each in enumerate(some)
    ]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    rendering = Rendering(
        template,
        [Message("user", "2+3?"), Message("assistant", "", {"tool_calls": calls})],
        {"tools": TOOLS},
    )
    pieces = list(rendering.pieces())
    (said,) = [text for text, is_reply in pieces if is_reply]
    # its models end a reply with the mark of the next turn
    tokens = ours.encode(said + ("<|observation|>" if name == "glm4moe" else ""))
    heard = dialog.hear(tokens, True)
    assert [call.arguments for call in heard.tool_calls] == some
    answers = [{"role": "tool", "content": f"is {5 + i}"} for i in range(len(some))]
    given = dialog.tell(answers)
    named = [
        answer | {"name": "add", "tool_call_id": call["id"]}
        for answer, call in zip(answers, calls, strict=True)
    ]
    whole = theirs.apply_chat_template(
        [*ask, reply, *named], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert whole[-len(given) :] == given
    shown = theirs.decode(given)
    assert all(f"is {5 + i}" in shown for i in range(len(some)))
    assert theirs.decode(whole[: -len(given)]).endswith(theirs.decode(tokens[-1:]))


@pytest.mark.parametrize("name", ["plain", "chatml", "llama3"])
def test_our_own_templates(name, tmp_path):
    template = built_in(name)
    ours = ByteTokenizer()
    if name != "plain":
        ours, _ = tokenizer_with(tmp_path, "", ["<s>", "</s>", *template.special])
    dialog = ChatDialog(template, ours)
    prompt = dialog.ask(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], {}, None
    )
    text = ours.decode(prompt, special=True)
    for turn in range(3):
        end = {
            "plain": [257],
            "chatml": ours.encode("<|im_end|>"),
            "llama3": ours.encode("<|eot_id|>"),
        }
        reply = [*ours.encode(f"R{turn}"), *end[name]]
        assert dialog.hear(reply, True) == f"R{turn}"
        given = dialog.tell([{"role": "user", "content": "A"}, {"role": "tool", "content": ""}])
        text += ours.decode(reply, special=True) + ours.decode(given, special=True)
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    for turn in range(3):
        turns += [{"role": "assistant", "content": f"R{turn}"}]
        turns += [{"role": "user", "content": "A"}, {"role": "tool", "content": ""}]
    chat = [Message(turn["role"], turn["content"]) for turn in turns]
    rendered = Rendering(template, chat).unmarked(chat, ask=True)
    if name == "plain":
        rendered = rendered.replace("\ufdd3", "<|eos|>")
    assert text.removeprefix("<s>") == rendered.replace("\ufdd2", "")


def test_replies_with_template_marks_do_not_spoil_later_turns():
    """Marks, placeholders and half a character in replies, of which later turns are rendered."""
    dialog = ChatDialog(built_in("plain"), ByteTokenizer())
    dialog.ask([{"role": "user", "content": "U"}], {}, None)
    for said in ("\ufdd0", "\ue000a reply\ue000", "{{ x }}", "<tool_call>{}</tool_call>", ""):
        assert dialog.hear([*said.encode(), 257], True) == said
        assert bytes(dialog.tell([{"role": "user", "content": "A"}])) == b"A\n"
    assert dialog.hear([0xE2, 0x82], False) == "\ufffd"


def test_a_cut_off_call_is_answered_as_no_call():
    dialog = ChatDialog(built_in("chatml"), ByteTokenizer())
    with pytest.raises(InputError, match="'tools' is not supported"):
        dialog.ask([{"role": "user", "content": "U"}], {}, TOOLS)
    with pytest.raises(InputError, match="'tools' is not supported"):
        dialog.ask([{"role": "user", "content": "U"}], {"tools": json.dumps(TOOLS)}, None)
