"""generate as a conversation, and the sampler's texts: oracles are transformers' replies."""

import ast
import io
import json
import re
import shlex
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

import minitrain
from minitrain import generate
from minitrain.commands import generate_text
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from tests.helpers.commands import ROOT


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(3)
    minitrain.save_pretrained(
        Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=258)), tmp_path / "m"
    )
    ByteTokenizer().save(tmp_path / "m")
    return tmp_path / "m"


def replies(folder, prompt: str | list[int], count: int = 6) -> str:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([list(prompt.encode()) if isinstance(prompt, str) else prompt])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    return ByteTokenizer().decode([token for token in found.tolist() if token != 257])


WORDS = ["--max-tokens", "6", "--temperature", "0", "--device", "cpu"]


def test_a_conversation_has_all_that_was_said_before(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nyou\n"))
    generate.main(["--model", str(folder), "--chat", "--system", "be", *WORDS])
    first = replies(folder, "be\nhi\n")
    second = replies(folder, [*f"be\nhi\n{first}".encode(), 257, *b"you\n"])
    assert capsys.readouterr().out == f"> {first}\n> {second}\n> "


def test_a_conversation_that_fills_the_positions_begins_anew(tmp_path, monkeypatch, capsys):
    """With the question that found no room, and the system's text; one that never fits is told."""
    torch.manual_seed(3)
    small = {"num_layers": 1, "vocab_size": 258, "max_position_embeddings": 32}
    config = model_config("llama3-8b-tiny", **small)
    minitrain.save_pretrained(Decoder(config), tmp_path / "m")
    ByteTokenizer().save(tmp_path / "m")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"hello, you\nwhat is this?\n{'x' * 40}\nhi\n"))
    generate.main(["--model", str(tmp_path / "m"), "--chat", "--system", "be", *WORDS])
    each = [
        replies(tmp_path / "m", f"be\n{ask}\n") for ask in ("hello, you", "what is this?", "hi")
    ]
    out, err = capsys.readouterr()
    assert out == f"> {each[0]}\n> {each[1]}\n> > {each[2]}\n> "
    # the second question, and the third with what was said; then the third alone
    assert err.count("there are 32 positions: the conversation begins anew") == 2
    assert err.count("there are 32 positions\n") == 1


def test_a_question_that_is_refused_ends_no_conversation(folder, monkeypatch, capsys):
    lines = "hi\n\ud800\nyou\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    generate.main(["--model", str(folder), "--chat", "--system", "be", *WORDS])
    first = replies(folder, "be\nhi\n")
    second = replies(folder, [*f"be\nhi\n{first}".encode(), 257, *b"you\n"])
    out, err = capsys.readouterr()
    assert out == f"> {first}\n> > {second}\n> "
    assert err.count("note: --prompt is not UTF-8") == 1 and "anew" not in err.split("UTF-8")[1]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_of_prompts_becomes_lines_of_json(folder, tmp_path, capsys, name):
    prompts = ["ab", "c", "a longer one"]
    lines = [
        json.dumps({"prompt": prompt}) if name.endswith("l") else prompt for prompt in prompts
    ]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    expected = [{"prompt": prompt, "text": replies(folder, prompt)} for prompt in prompts]
    words = ["--model", str(folder), "--prompts", str(tmp_path / name), *WORDS]
    generate.main(words)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == expected
    generate.main([*words, "--out", str(tmp_path / "out.jsonl"), "--n", "2"])
    assert capsys.readouterr().out.startswith(
        f"{tmp_path}/out.jsonl holds 6 answers, each a line with prompt and text\nnext: "
    )
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert written == [line for line in expected for _ in range(2)]


CHAT_LINES = [
    ({"prompt": "hi", "system": "be", "id": 7}, "be\nhi\n"),
    ({"question": "hi", "context": "c"}, "hi\nc\n"),
    (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]},
        "hi\n",
    ),
    (
        {"prompt": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]},
        "be\nhi\n",
    ),
    ({"conversations": [{"from": "human", "value": "hi"}]}, "hi\n"),
]


@pytest.mark.parametrize("form", ["a.jsonl", "a.json"])
def test_lines_of_prompts_are_chats_as_in_training(folder, tmp_path, capsys, form):
    """With all that they show beside the question; what belongs to a line is in its answer's."""
    lines = [line for line, _ in CHAT_LINES]
    text = json.dumps(lines) if form == "a.json" else "\n".join(map(json.dumps, lines))
    (tmp_path / form).write_text(text)
    words = ["--model", str(folder), "--prompts", str(tmp_path / form), *WORDS]
    generate.main([*words, "--chat"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [line | {"text": replies(folder, asked)} for line, asked in CHAT_LINES]
    with pytest.raises(InputError, match=f"{form}.*1?.?: 'system' is of a chat .add --chat"):
        generate.main(words)


@pytest.mark.parametrize(
    "line, words, message",
    [
        ({"tools": [{"name": "f"}]}, ["--chat"], "'tools' is not supported by data.template"),
        ({"tools": [{"name": "f"}]}, [], r"'tools' is of a chat \(add --chat\)"),
        ({"chat_template_kwargs": {"x": 1}}, ["--chat"], "'x' is not supported by data.template"),
        ({"images": ["a.png"]}, ["--chat"], "'images' is not supported"),
        ({"images": ["a.png"]}, [], "'images' is not supported"),
        ({"context": "c"}, [], "'context' is not supported"),
        ({"system": "be"}, ["--chat", "--system", "not"], "say different things"),
    ],
)
def test_keys_that_a_line_of_prompts_would_lose_are_refused(
    folder, tmp_path, line, words, message
):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "hi"} | line))
    with pytest.raises(InputError, match=f"a.jsonl:1: .*{message}"):
        generate.main(["--model", str(folder), "--prompts", str(tmp_path / "a.jsonl"), *words])


def test_lines_of_a_file_of_prompts_end_where_editors_end_them(folder, tmp_path, capsys):
    """Not at other separators, which belong to a line; blank lines are no prompts."""
    file = tmp_path / "prompts.txt"
    file.write_bytes("a\u2028b\x0cc\r\n\n \nd\x85".encode())
    generate.main(["--model", str(folder), "--prompts", str(file), *WORDS])
    answers = map(json.loads, capsys.readouterr().out.split("\n")[:-1])
    assert [answer["prompt"] for answer in answers] == ["a\u2028b\x0cc", "d\x85"]
    for content in (b"", b"\n \n"):
        file.write_bytes(content)
        with pytest.raises(InputError, match="prompts.txt holds no line of text"):
            generate.main(["--model", str(folder), "--prompts", str(file), *WORDS])


def test_the_sampler_gives_text(folder):
    sampler = minitrain.Sampler(
        minitrain.load_pretrained(folder), minitrain.load_tokenizer(folder)
    )
    params = minitrain.SamplingParams(max_tokens=6, temperature=0)
    expected = [replies(folder, prompt) for prompt in ("ab", "xyz")]
    assert sampler.generate_text(["ab", "xyz"], params) == expected
    pieces = list(sampler.stream("ab", params))
    assert "".join(pieces) == expected[0] and len(pieces) > 1
    assert not sampler.busy


@pytest.mark.parametrize(
    "words, line",
    [
        (["--prompt", "a", "--prompts", "b"], "--prompt and --prompts: give one of them"),
        (["--prompt", "a", "--out", "b"], r"--out is for the answers to --prompts \(add it\)"),
        (["--prompt", "a", "--system", "b"], r"--system is of a chat \(add --chat\)"),
    ],
)
def test_options_that_would_be_lost_are_refused(folder, words, line):
    with pytest.raises(InputError, match=line):
        generate.main(["--model", str(folder), *words])


def test_a_prompt_is_needed(folder):
    with pytest.raises(
        InputError,
        match=r"--prompt is missing \(or --prompts FILE, or --chat alone to converse\)",
    ):
        generate.main(["--model", str(folder)])


def test_the_snippet_of_the_readme_answers_as_the_command_above_it(
    folder, tmp_path, monkeypatch, capsys
):
    (tmp_path / "out").mkdir()
    folder.rename(tmp_path / "out" / "arithmetic")
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    line = re.search(r"python -m minitrain.generate (--model out/arithmetic --chat .*)", readme)[
        1
    ]
    generate.main([*shlex.split(line), "--device", "cpu", "--max-tokens", "128"])
    answer = capsys.readouterr().out.removesuffix("\n")
    assert answer == replies("out/arithmetic", "47 + 38\n", 128)
    exec(re.search(r"```python\n(.*?)```", readme, re.S)[1], {})
    printed, streamed = capsys.readouterr().out.split("\n", 1)
    assert ast.literal_eval(printed) == [answer] and streamed
    assert AutoTokenizer.from_pretrained("copy").eos_token_id == 257
    assert replies("copy", "47 + 38\n", 128) == answer


def test_orders_in_a_conversation(folder, monkeypatch, capsys):
    """/clear and /system begin anew, /exit ends, what is none of these is told, and asked is the rest."""
    lines = iter(
        ["a", "b", "/clear", "c", "/system be short", "d", "/help", "e", "/exit", "never"]
    )
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with mock.patch.object(generate_text, "encode", side_effect=generate_text.encode) as encode:
        generate.main(["--model", str(folder), "--chat", "--max-tokens", "1", "--device", "cpu"])
    asked = [[(m.role, m.content) for m in call.args[0]] for call in encode.call_args_list]
    users = [[text for role, text in chat if role == "user"] for chat in asked]
    assert users == [["a"], ["a", "b"], ["c"], ["d"], ["d", "e"]]
    systems = [[text for role, text in chat if role == "system"] for chat in asked]
    assert systems == [[], [], [], ["be short"], ["be short"]]
    assert "note: /help is no order (/clear begins anew, " in capsys.readouterr().err
    assert list(lines) == ["never"]
