"""Tokenizers against transformers, the tokenizers package and Python's own UTF-8 codec."""

import codecs
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from minitrain.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from minitrain.errors import InputError
from minitrain.rollout.streaming import stream

ONE_WORD = (
    '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": ""}}'
)
SENTENCES = [
    "the cat sat on the mat",
    "naïve café, 你好 🙂",
    "  two  spaces\n\tand\r\n\x00 control",
]
any_ids = st.lists(st.integers(0, 300) | st.integers(0x80, 0xFF), max_size=30)


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def auto_tokenizer(byte_folder):
    return AutoTokenizer.from_pretrained(byte_folder)


@pytest.fixture
def bpe_folder(tmp_path):
    """A small trained vocabulary whose decoder drops the space before the first word, as Llama 2's does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens]
    )
    tokenizer.train_from_iterator([SENTENCES[0]], trainer)
    # The bytes must be ordinary tokens, or decoding skips them as special ones.
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = tree["added_tokens"][:3]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    return tmp_path


def write_json(folder, name, tree):
    (folder / name).write_text(json.dumps(tree))


# ---------------------------------------------------------------------------------------------------------------- bytes


@given(st.text())
def test_bytes_are_the_utf8_of_the_text(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode("utf-8"))
    assert tokenizer.encode_array(text).tolist() == ids
    assert tokenizer.decode(ids) == text


def test_decode_drops_specials_and_replaces_invalid_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([256, 104, 105, 257, 1000, -1]) == "hi"
    assert tokenizer.decode([0xE4, 0x61, 0xFF]) == "\ufffda\ufffd"


@given(st.text().filter(lambda text: "<|bos|>" not in text and "<|eos|>" not in text))
def test_saved_bytes_encode_alike_in_transformers(auto_tokenizer, text):
    assert auto_tokenizer.encode(text, add_special_tokens=False) == ByteTokenizer().encode(text)


@given(any_ids)
def test_saved_bytes_decode_alike_in_transformers(auto_tokenizer, ids):
    assert auto_tokenizer.decode(ids, skip_special_tokens=True) == ByteTokenizer().decode(ids)


def test_text_never_encodes_to_a_special(auto_tokenizer):
    """Where transformers, by default, lets a text end a document."""
    assert ByteTokenizer().encode("a<|eos|>") == list(b"a<|eos|>")
    assert auto_tokenizer.encode("a<|eos|>", add_special_tokens=False) == [97, 257]
    assert auto_tokenizer.encode(
        "a<|eos|>", add_special_tokens=False, split_special_tokens=True
    ) == list(b"a<|eos|>")


def test_saved_bytes_have_the_same_specials_in_transformers(auto_tokenizer):
    assert (auto_tokenizer.bos_token_id, auto_tokenizer.eos_token_id, len(auto_tokenizer)) == (
        256,
        257,
        258,
    )


@pytest.mark.parametrize("resaved", [False, True])
def test_saved_bytes_need_no_package(byte_folder, auto_tokenizer, tmp_path, monkeypatch, resaved):
    if resaved:
        auto_tokenizer.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    folder = tmp_path if resaved else byte_folder
    assert isinstance(load_tokenizer(folder), ByteTokenizer)
    assert isinstance(load_tokenizer(folder / "tokenizer.json"), ByteTokenizer)


@pytest.mark.parametrize("change", ["merge", "vocabulary", "specials", "normalizer"])
def test_tokenizers_that_only_resemble_bytes_are_not_taken_for_them(
    byte_folder, tmp_path, change
):
    tree = json.loads((byte_folder / "tokenizer.json").read_text())
    if change == "merge":
        tree["added_tokens"] = []
        tree["model"]["vocab"]["ab"] = 256
        tree["model"]["merges"] = [["a", "b"]]
    elif change == "vocabulary":
        tree["model"]["vocab"] |= {"a": 98, "b": 97}
    elif change == "specials":
        tree["added_tokens"].pop()
    else:
        tree["normalizer"] = {"type": "Lowercase"}
    write_json(tmp_path, "tokenizer.json", tree)
    assert isinstance(load_tokenizer(tmp_path), HuggingFaceTokenizer)


# --------------------------------------------------------------------------------------------------------- Hugging Face


def test_hugging_face_file_encodes_and_decodes_as_its_package_does(bpe_folder):
    ours, theirs = (
        load_tokenizer(bpe_folder),
        Tokenizer.from_file(str(bpe_folder / "tokenizer.json")),
    )
    assert ours.vocab_size == theirs.get_vocab_size()
    for text in SENTENCES:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids == ours.encode_array(text).tolist()
        assert ours.decode(ids) == theirs.decode(ids)


def test_only_prompts_get_specials(bpe_folder):
    tree = json.loads((bpe_folder / "tokenizer.json").read_text())
    single = [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    write_json(bpe_folder, "tokenizer.json", tree)
    ours, theirs = (
        load_tokenizer(bpe_folder),
        Tokenizer.from_file(str(bpe_folder / "tokenizer.json")),
    )
    assert (
        [1, *ours.encode("the cat")]
        == ours.encode_prompt("the cat")
        == theirs.encode("the cat").ids
    )
    write_json(bpe_folder, "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": True})
    # once is enough
    assert load_tokenizer(bpe_folder).encode_prompt("the cat") == ours.encode_prompt("the cat")
    assert AutoTokenizer.from_pretrained(bpe_folder)("the cat").input_ids == ours.encode_prompt(
        "the cat"
    )
    assert ours.decode([1, *ours.encode("the cat"), 2]) == "the cat"


@pytest.mark.parametrize("add, expected", [(True, [1]), (False, []), (None, [])])
def test_bos_is_put_where_only_the_file_beside_says_so(bpe_folder, add, expected):
    """As in DeepSeek's, whose tokenizer.json has no place for it: transformers 4 puts it, 5 reads it and forgets it."""
    about = {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": {"content": "<s>"},
        "add_bos_token": add,
    }
    write_json(bpe_folder, "tokenizer_config.json", about)
    ours = load_tokenizer(bpe_folder)
    assert ours.encode_prompt("the cat") == [*expected, *ours.encode("the cat")]
    assert ours.beginning == "<s>" * len(expected)


@pytest.mark.parametrize(
    "token",
    [
        {"content": "<new>", "special": True},
        {"content": "<new>", "special": False, "normalized": True},
        {"content": "the", "special": False},  # a word of the vocabulary
        # tokenizer.json says otherwise, as Phi-3's once did
        {"content": "</s>", "special": True, "rstrip": True},
        {"content": "</s>", "special": True, "lstrip": True},
    ],
)
def test_tokens_that_are_listed_beside_the_file_are_those_of_transformers(bpe_folder, token):
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    number = {"</s>": 2}.get(token["content"], 281)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    listed = {str(number): flags | token, "0": {"content": "<unk>", "special": True} | flags}
    write_json(bpe_folder, "tokenizer_config.json", about | {"added_tokens_decoder": listed})
    ours, theirs = load_tokenizer(bpe_folder), AutoTokenizer.from_pretrained(bpe_folder)
    assert ours.vocab_size == len(theirs)
    for text in ("the <new> cat", "cat </s>  the", "<new></s>"):
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def test_texts_are_neither_cut_nor_padded(bpe_folder):
    """Whatever the program that saved the file had been told, which the file keeps."""
    texts = Tokenizer.from_file(str(bpe_folder / "tokenizer.json"))
    expected = texts.encode(SENTENCES[0]).ids
    texts.enable_truncation(4)
    texts.enable_padding(length=50)
    texts.save(str(bpe_folder / "tokenizer.json"))
    ours = load_tokenizer(bpe_folder)
    assert ours.encode(SENTENCES[0]) == ours.encode_prompt(SENTENCES[0]) == expected
    assert AutoTokenizer.from_pretrained(bpe_folder)(SENTENCES[0]).input_ids == expected


def test_vocab_size_covers_gaps(tmp_path):
    tree = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 5}, "unk_token": "a"},
    }
    write_json(tmp_path, "tokenizer.json", tree)
    assert load_tokenizer(tmp_path).vocab_size == 6


@pytest.mark.parametrize(
    "files, eos",
    [
        ({}, None),
        ({"tokenizer_config.json": {"eos_token": "</s>"}}, 2),
        ({"tokenizer_config.json": {"eos_token": {"content": "</s>", "lstrip": False}}}, 2),
        (
            {"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 1}},
            None,
        ),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": "</s>"}}, 2),
        ({"config.json": {"eos_token_id": 1}}, 1),
        ({"config.json": {"eos_token_id": [2, 1]}}, 2),
        ({"config.json": {"eos_token_id": None}}, None),
    ],
)
def test_eos_comes_from_the_files_beside_it(bpe_folder, files, eos):
    for name, tree in files.items():
        write_json(bpe_folder, name, tree)
    assert (
        load_tokenizer(bpe_folder).eos_id
        == load_tokenizer(bpe_folder / "tokenizer.json").eos_id
        == eos
    )


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("eos", ["</s>", None])
def test_files_that_disagree_count_as_in_transformers(bpe_folder, listed, eos):
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "unk_token": "<unk>"}
    if listed:
        about["added_tokens_decoder"] = {
            "1": {"content": "<s>"} | flags,
            "2": {"content": "</s>"} | flags,
        }
    write_json(bpe_folder, "tokenizer_config.json", about)
    write_json(bpe_folder, "special_tokens_map.json", {"eos_token": "<s>", "unk_token": "<unk>"})
    ours, theirs = load_tokenizer(bpe_folder), AutoTokenizer.from_pretrained(bpe_folder)
    assert ours.eos_id == theirs.eos_token_id
    assert ours.special_tokens() == theirs.special_tokens_map


def test_bos_is_not_eos_and_may_be_anything(bpe_folder):
    """What stands before a prompt is a matter of tokenizer.json; some files name a bos that it does not hold."""
    write_json(bpe_folder, "tokenizer_config.json", {"bos_token": "<s>"})
    assert load_tokenizer(bpe_folder).eos_id is None
    write_json(bpe_folder, "tokenizer_config.json", {"bos_token": "<none>", "eos_token": "</s>"})
    assert load_tokenizer(bpe_folder).eos_id == 2


def test_save_copies_what_others_read(bpe_folder, tmp_path_factory):
    write_json(
        bpe_folder,
        "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"},
    )
    write_json(bpe_folder, "special_tokens_map.json", {"eos_token": "</s>"})
    (bpe_folder / "chat_template.jinja").write_text("{{ messages }}")
    (bpe_folder / "tokenizer.model").write_bytes(b"for llama.cpp")
    write_json(bpe_folder, "config.json", {"model_type": "of another model"})
    target = tmp_path_factory.mktemp("export") / "new" / "folder"
    tokenizer = load_tokenizer(bpe_folder)
    tokenizer.save(target)
    assert {file.name for file in target.iterdir()} == {
        file.name for file in bpe_folder.iterdir()
    } - {"config.json"}
    assert all(
        file.read_bytes() == (bpe_folder / file.name).read_bytes() for file in target.iterdir()
    )
    theirs = AutoTokenizer.from_pretrained(target)
    assert theirs.eos_token_id == tokenizer.eos_id == 2
    assert theirs.encode(SENTENCES[0], add_special_tokens=False) == tokenizer.encode(SENTENCES[0])


def test_save_into_its_own_folder_changes_nothing(bpe_folder):
    before = (bpe_folder / "tokenizer.json").read_bytes()
    load_tokenizer(bpe_folder).save(bpe_folder)
    assert (bpe_folder / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize("in_bytes", [False, True])
def test_save_leaves_nothing_of_an_earlier_tokenizer(bpe_folder, tmp_path_factory, in_bytes):
    """Which transformers would ask first: its template, and its names of tokens."""
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "chat_template": "its own",
    }
    write_json(bpe_folder, "tokenizer_config.json", own)
    target = tmp_path_factory.mktemp("export")
    (target / "chat_template.jinja").write_text("of another")
    (target / "tokenizer.model").write_bytes(b"of another")
    write_json(target, "special_tokens_map.json", {"eos_token": "<s>", "pad_token": "<unk>"})
    (target / "notes.txt").write_text("of the user")
    tokenizer = ByteTokenizer() if in_bytes else load_tokenizer(bpe_folder)
    tokenizer.save(target)
    assert {file.name for file in target.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "notes.txt",
    }
    theirs, template = AutoTokenizer.from_pretrained(target), None if in_bytes else "its own"
    assert (theirs.chat_template, theirs.eos_token_id, theirs.pad_token) == (
        template,
        tokenizer.eos_id,
        None,
    )


# -------------------------------------------------------------------------------------------------------------- stream


@given(any_ids)
def test_stream_joins_to_the_decoded_text(ids):
    tokenizer = ByteTokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.text())
def test_stream_shows_a_character_with_its_last_byte(text):
    """Python's incremental decoder shows each character as soon as it can; only a literal U+FFFD may come later."""
    text = text.replace("\ufffd", "?")
    ids, taken, shown = ByteTokenizer().encode(text), [], ""
    decoder, expected = codecs.getincrementaldecoder("utf-8")(), ""
    for piece in stream(ByteTokenizer(), (i for i in ids if not taken.append(i))):
        shown += piece
        while len(expected) < len(shown):
            expected += decoder.decode(bytes([taken.pop(0)]))
        assert shown == expected and not taken  # nothing came late
    assert shown == text


def test_stream_keeps_the_spaces_between_words(bpe_folder):
    tokenizer = load_tokenizer(bpe_folder)
    for text in SENTENCES:
        ids = tokenizer.encode(text)
        pieces = list(stream(tokenizer, ids))
        assert "".join(pieces) == tokenizer.decode(ids)
        assert len(pieces) > 5
    prompt = tokenizer.encode("the cat")
    assert "".join(stream(tokenizer, tokenizer.encode("sat on"), prompt)) == " sat on"


# -------------------------------------------------------------------------------------------------------------- errors


def test_missing_package_names_the_extra(bpe_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[text\]'"):
        load_tokenizer(bpe_folder)


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {},
            r"holds no tokenizer.json \(save_pretrained of transformers' AutoTokenizer writes one\)",
        ),
        ({"tokenizer.json": "{"}, "tokenizer.json:1:2: not valid JSON"),
        ({"tokenizer.json": "[]"}, "must hold a JSON object, not a list"),
        (
            {"tokenizer.json": '{"model": {"type": "none such"}}'},
            "is not a Hugging Face tokenizer",
        ),
        (
            {"tokenizer.json": ONE_WORD, "tokenizer_config.json": '{"eos_token": "</s>"}'},
            r"tokenizer_config.json names the token '</s>', which .*tokenizer.json does not hold",
        ),
        *(
            (
                {
                    "tokenizer.json": ONE_WORD,
                    "tokenizer_config.json": '{"added_tokens_decoder": ' + listed + "}",
                },
                r"tokenizer_config.json: added_tokens_decoder must list tokens by their ids: .",
            )
            for listed in (
                '["b"]',
                '{"1": "b"}',
                '{"one": {"content": "b"}}',
                '{"1": {"content": 5}}',
            )
        ),
    ],
)
def test_wrong_files_are_told_in_one_line(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
