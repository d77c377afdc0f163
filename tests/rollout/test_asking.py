"""Asking a model from Python: chats, keywords, what is given up.

Oracles: transformers' chat templates, and text that is made without a cache.
"""

import json

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import minitrain
from minitrain import InputError, SamplingParams
from minitrain.data.byte_tokenizer import ByteTokenizer, byte_level_bpe
from minitrain.data.tokenizer import load_tokenizer
from minitrain.settings import Rollout
from minitrain.training.loss import linear_cross_entropy
from tests.helpers.sampling import make, uncached

SETTINGS = Rollout(slots=4, page_size=4, pages=60, chunk=7)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "47 + 38"},
        {"role": "assistant", "content": "85"},
        {"role": "user", "content": "né"},
    ],
]


@pytest.fixture(scope="module")
def model():
    return make("qwen3-32b", vocab_size=260)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes with ChatML's tokens and template, as transformers reads it."""
    folder = tmp_path_factory.mktemp("chatml")
    tree = byte_level_bpe()
    same = {key: value for key, value in tree["added_tokens"][0].items()}
    for number, text in enumerate(("<|im_start|>", "<|im_end|>"), 258):
        tree["added_tokens"].append(same | {"id": number, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": CHATML}))
    return folder


@pytest.fixture
def sampler(model, folder):
    return minitrain.Sampler(model, minitrain.load_tokenizer(folder), SETTINGS)


def check_idle(sampler) -> None:
    assert not sampler.busy
    assert sampler.scheduler is None or sampler.scheduler.pages.available == 60
    sampler.refresh()


def expected_reply(model, folder, chat: list[dict], count: int) -> str:
    """The likeliest reply to what transformers makes of a chat, up to the template's end token."""
    theirs = AutoTokenizer.from_pretrained(folder)
    assert isinstance(theirs, PreTrainedTokenizerFast)
    prompt = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    produced = uncached(model, prompt, count)
    ends = [number for number in (257, 259) if number in produced]
    produced = produced[: min(map(produced.index, ends), default=count)]
    return theirs.decode(produced, skip_special_tokens=True)


def test_chats_are_asked_with_the_models_own_template(model, folder, sampler):
    expected = [expected_reply(model, folder, chat, 12) for chat in CHATS]
    assert all(expected) and expected[0] != expected[1]
    assert sampler.chat(CHATS[0], temperature=0, max_tokens=12) == expected[:1]
    assert sampler.chat(CHATS, SamplingParams(temperature=0), max_tokens=12) == expected
    assert sampler.chat(CHATS[1], temperature=0, max_tokens=12, n=2) == expected[1:] * 2
    pieces = list(sampler.stream(CHATS[1], temperature=0, max_tokens=12))
    assert "".join(pieces) == expected[1] and len(pieces) > 1
    check_idle(sampler)


def test_a_reply_ends_where_the_template_ends_one(model, folder):
    """The likeliest token is <|im_end|> for every input: the reply is empty, unless ends are ignored."""
    ended = make("qwen3-32b", vocab_size=260)
    with torch.no_grad():
        hidden = 0 * ended.head_weight[259] + 1
        ended.model.norm.weight.zero_()
        ended.head_weight.zero_()
        ended.head_weight[259] = hidden
    ended.model.norm.register_forward_hook(lambda module, args, x: x + 1)
    sampler = minitrain.Sampler(ended, minitrain.load_tokenizer(folder), SETTINGS)
    assert sampler.chat(CHATS[0], temperature=0) == [""]
    (found,) = sampler.generate([CHATS[0]], temperature=0, max_tokens=5)
    assert found.tokens == [259] and found.finish_reason == "stop"
    (found,) = sampler.generate([CHATS[0]], temperature=0, max_tokens=5, ignore_eos=True)
    assert found.tokens == [259] * 5


def test_keywords_are_the_settings_of_every_way_to_ask(model, sampler):
    params = SamplingParams(temperature=0, max_tokens=6)
    prompt = [5, 6, 7]
    expected = uncached(model, prompt, 6)
    for words in ({}, {"max_tokens": 4}):
        wanted = expected[: words.get("max_tokens", 6)]
        text = sampler.tokenizer.decode(wanted)
        each = {"temperature": 0, "max_tokens": 6} | words
        assert sampler.generate([prompt], params, **words)[0].tokens == wanted
        assert sampler.generate([prompt], **each)[0].tokens == wanted
        assert sampler.generate([prompt, prompt], [params] * 2, **words)[1].tokens == wanted
        assert sampler.generate_text([prompt], params, **words) == [text]
        assert sampler.generate_text([prompt], **each) == [text]
        assert "".join(sampler.stream(prompt, params, **words)) == text
        assert "".join(sampler.stream(prompt, **each)) == text
        (sample,) = sampler.submit(prompt, **each)
        assert "".join(sampler.follow(sample)) == text and sample.produced == wanted
    ways = (sampler.generate, sampler.generate_text, sampler.chat)
    for ask in (*ways, lambda *args, **words: next(sampler.stream("a", **words))):
        with pytest.raises(InputError, match="no setting 'max_new_tokens' .it has temperature, "):
            ask(CHATS, max_new_tokens=3)
        with pytest.raises(InputError, match="sampling max_tokens=0 must be at least 1"):
            ask(CHATS, max_tokens=0)
    check_idle(sampler)


@pytest.mark.parametrize(
    "messages",
    ["hi", ["hi"], [5, 6], [], {"role": "user", "content": "hi"}, None, [[]], [CHATS[0], "hi"]],
)
def test_messages_that_are_no_chat_are_refused(sampler, messages):
    with pytest.raises(InputError, match=r"is no chat .give \[\{'role': 'user', 'content'"):
        sampler.chat(messages)
    check_idle(sampler)


@pytest.mark.parametrize(
    ("turn", "line"),
    [
        ({"content": "hi"}, "no key 'role'"),
        ({"role": "pirate", "content": "hi"}, "the role 'pirate' is not system"),
        ({"role": "user", "content": "hi", "images": ["a"]}, "'images' is not supported"),
        ({"role": "user", "content": ""}, "'content' is empty"),
    ],
)
def test_turns_that_the_template_does_not_show_are_refused(sampler, turn, line):
    for ask in (sampler.chat, lambda chat: next(sampler.stream(chat))):
        with pytest.raises(InputError, match=f"'messages'.0.: {line}"):
            ask([turn])
    check_idle(sampler)


def test_text_needs_a_tokenizer(model, folder, sampler):
    mute = minitrain.Sampler(model, settings=SETTINGS)
    for words in ({}, {"n": 2}):
        for ask in (
            lambda **words: mute.generate_text(["a"], **words),
            lambda **words: mute.chat(CHATS, **words),
        ):
            with pytest.raises(InputError, match="needs a sampler with a tokenizer"):
                ask(**words)
    with pytest.raises(InputError, match="text of samples needs a sampler with a tokenizer"):
        next(mute.stream([5, 6]))
    with pytest.raises(
        InputError, match="a chat needs a sampler with a tokenizer .as minitrain.l"
    ):
        mute.generate([CHATS[0]])
    plain = minitrain.Sampler(model, load_tokenizer(folder), SETTINGS)
    with pytest.raises(
        InputError, match="a chat needs a sampler with a tokenizer .as minitrain.l"
    ):
        plain.chat(CHATS[0])
    for wrong in (str(folder), AutoTokenizer.from_pretrained(folder)):
        with pytest.raises(InputError, match="is none of ours .give minitrain.load_tokenizer"):
            minitrain.Sampler(model, wrong)
        with pytest.raises(InputError, match="is none of ours .give minitrain.load_tokenizer"):
            minitrain.save_pretrained(model, folder / "new", wrong)
    assert not (folder / "new").exists()
    assert not mute.busy and not plain.busy


def test_a_stream_that_is_held_but_not_read_keeps_nothing(sampler):
    """Neither a place in the queue, nor the model: it is as training needs it between two pieces."""
    words = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    (whole,) = sampler.generate_text(["123"], **words)
    blocks = [type(block) for block in sampler.model.blocks]
    linears = [type(module) for module in sampler.model.modules()]
    for end in (sampler.refresh, sampler.forget, sampler.free):
        for piece in sampler.stream("123", **words):
            assert sampler.busy and whole.startswith(piece)
            break
        check_idle(sampler)
        held = sampler.stream("123", **words)
        next(held)
        assert [type(block) for block in sampler.model.blocks] == blocks
        assert [type(module) for module in sampler.model.modules()] == linears
        end()
        check_idle(sampler)
        with pytest.raises(InputError, match="the text ends early: the sampler was refreshed"):
            list(held)
        # what has been drawn to its end is whole
        (sample,) = sampler.submit("123", **words | {"max_tokens": 1})
        held = sampler.follow(sample)
        assert next(held) == whole[0]
        end()
        assert list(held) == []
    # what was submitted without a reader is somebody's work
    sampler.submit("123", **words)
    with pytest.raises(RuntimeError, match="unfinished requests"):
        sampler.refresh()
    assert "busy" in repr(sampler)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_an_error_between_pieces_or_in_a_step_cancels_the_stream(sampler, failure, monkeypatch):
    def read() -> None:
        for _ in sampler.stream("123", max_tokens=6, ignore_eos=True):
            raise failure

    with pytest.raises(failure):
        read()
    check_idle(sampler)
    for ask in (lambda: list(sampler.stream("123")), lambda: sampler.chat(CHATS, n=2)):
        with monkeypatch.context() as patch, pytest.raises(failure):
            patch.setattr(sampler, "_decode", lambda work: (_ for _ in ()).throw(failure))
            ask()
        check_idle(sampler)


def test_repr_of_sampler_and_tokenizer(sampler, folder):
    assert repr(ByteTokenizer()) == "bytes: 258 tokens, texts end with '<|eos|>'"
    assert (
        repr(sampler.tokenizer)
        == f"{folder}/tokenizer.json: 260 tokens, texts end with '<|eos|>'"
    )
    assert repr(sampler).startswith("Sampler(a Decoder of ") and "idle" in repr(sampler)


def test_labels_without_a_head_are_refused(model):
    tokens = torch.tensor([[1, 2, 3]])
    with pytest.raises(
        InputError, match="labels are for a head: model.tokens, labels=..., head="
    ):
        model(tokens, labels=tokens)
    logits = model(tokens)
    loss = model(tokens, labels=tokens, head=linear_cross_entropy)
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[0], reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_models_in_and_out_of_folders(model, folder, tmp_path):
    minitrain.save_pretrained(model, tmp_path / "m", minitrain.load_tokenizer(folder))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert theirs.chat_template == CHATML and theirs.eos_token == "<|eos|>"
    names = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp32": torch.float32}
    names |= {"float64": torch.float64, "fp16": torch.float16, torch.bfloat16: torch.bfloat16}
    for name, dtype in names.items():
        loaded = minitrain.load_pretrained(tmp_path / "m", dtype=name)
        for (key, ours), x in zip(loaded.named_parameters(), model.parameters(), strict=True):
            assert ours.dtype == dtype and torch.equal(ours, x.to(dtype)), key
    for wrong in ("bf-16", "int8", torch.int8, 16):
        with pytest.raises(InputError, match="dtype=.* is not one of bf16, fp16, fp32, float64"):
            minitrain.load_pretrained(tmp_path / "m", dtype=wrong)
    for missing in ("/nowhere/m", "nowhere", tmp_path / "none"):
        told = f"{missing}/config.json cannot be read .give a folder that holds it, .*: No such"
        with pytest.raises(InputError, match=told):
            minitrain.load_pretrained(missing)
