"""Hostile checkpoints, adapters and tokenizers: the same tensors are loaded, or one line says what is wrong.

Real ones of every family are edited: bytes of safetensors headers, what these say, and values of JSON files. Memory is
limited meanwhile, so that nothing can be allocated because a file claims it. That the values of weights are right
nobody can tell: Hugging Face's formats have no checksums.
FAULT_CASES=20000 in the environment tries more of them.
"""

import contextlib
import copy
import json
import os
import re
import resource
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.data.chat.chat_templates import choose_template
from minitrain.data.chat.chats import encode_chat
from minitrain.data.chat.messages import Message
from minitrain.data.chat.rendering import Rendering
from minitrain.data.tokenizer import ByteTokenizer, fitting_tokenizer, load_tokenizer
from minitrain.errors import InputError
from minitrain.formats.hf import find_weights, load_pretrained, save_pretrained
from minitrain.formats.peft import load_adapter, save_adapter
from minitrain.formats.tensor_files import LONGEST_HEADER
from minitrain.models.decoder import Decoder
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.wan import Wan, WanConfig
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.settings import Lora
from minitrain.training.build import initialize

CASES = int(os.environ.get("FAULT_CASES", 100))
NAMES = (
    "llama3.1-8b",
    "nemotron4-15b",
    "mixtral-8x7b",
    "deepseek-v3",
    "gpt-oss-20b",
    "nemotron3-nano-30b-a3b",
    "gpt3-175b",
    "wan2.1-14b",
)
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    7,
    1000,
    10**12,
    2**63,
    10**400,
    0.5,
    -1.5,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "x",
    "..",
    "\0",
    "\n\x1b[31m",
    "\ud800",
    [],
    [0],
    [[]],
    ["x"],
    [None] * 3,
    [10**12] * 3,
    {},
    {"x": 1},
    {"rope_type": []},
    {"rope_type": "yarn", "factor": -1, "original_max_position_embeddings": 0},
    {"quant_method": []},
]
values = st.sampled_from(VALUES)


@contextlib.contextmanager
def little_memory(allowed: int = 1 << 30):
    """At most so many bytes more of address space than there are, and ten seconds."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + allowed, before[1]))
    start = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - start < 30


def loaded(function, *arguments):
    """What function returns, or None if it refuses in one line."""
    try:
        with little_memory():
            return function(*arguments)
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < 10 * InputError.LONGEST
        return None


def small_model(name: str) -> Decoder | Wan:
    config = model_config(f"{name}-tiny")
    model = (Wan if isinstance(config, WanConfig) else Decoder)(config)
    initialize(model, seed=0)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each family in several files; Wan's also in its own spelling."""
    found = {}
    for name in NAMES:
        model, found[name] = small_model(name), tmp_path_factory.mktemp(name)
        size = sum(p.numel() * 4 for p in model.parameters())
        save_pretrained(model, found[name], max_shard_bytes=size // 2)
    found["original"] = tmp_path_factory.mktemp("original")
    save_pretrained(model, found["original"], original_names=True)
    return found


def edited(folder: Path, target: Path) -> Path:
    """A copy to spoil."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(folder, target))


# ---------------------------------------------------------------------------------------------------- JSON beside them


def edit_json(file: Path, edits: list[tuple[int, object, bool]]) -> None:
    """Replace or remove values, in the mapping itself or one inside it."""
    tree = json.loads(file.read_text(encoding="utf-8"))
    for place, value, remove in edits:
        sections = (
            [tree, *(x for x in tree.values() if isinstance(x, dict) and x)]
            if tree
            else [{"x": 0}]
        )
        section = sections[place % 97 % len(sections)]
        key = sorted(section)[place % len(section)]
        section[key] = copy.deepcopy(value)
        if remove:
            del section[key]
    file.write_text(json.dumps(tree), encoding="utf-8")


edits = st.lists(
    st.tuples(st.integers(0, 10_000), values, st.sampled_from([False] * 4 + [True])),
    min_size=1,
    max_size=3,
)


@settings(max_examples=CASES)
@given(st.sampled_from([*NAMES, "original"]), edits)
def test_any_config_json(folders, tmp_path_factory, name, edits):
    folder = edited(folders[name], tmp_path_factory.getbasetemp() / "edited")
    edit_json(folder / "config.json", edits)
    model = loaded(load_pretrained, folder)
    if model is not None:
        expected = load_pretrained(folders[name]).state_dict()
        assert all(
            torch.equal(x, expected[key].to(x.dtype)) for key, x in model.state_dict().items()
        )


@pytest.mark.parametrize(
    "name, changes, message",
    [
        (
            "llama3.1-8b",
            {"num_hidden_layers": 10**12},
            "json: num_hidden_layers=1000000000000 must be at most 1,000",
        ),
        (
            "llama3.1-8b",
            {"num_hidden_layers": 1000},
            "config.json claims 1000 layers, the files hold",
        ),
        (
            "llama3.1-8b",
            {"vocab_size": 1 << 24},
            r"embed_tokens.weight has shape \[512, 64\], expected \[16777216, 64\]",
        ),
        (
            "llama3.1-8b",
            {"num_attention_heads": -8},
            "json: num_attention_heads=-8 must be at least 1",
        ),
        ("llama3.1-8b", {"hidden_size": None}, "hidden_size=None must be a whole number"),
        ("llama3.1-8b", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be finite"),
        (
            "deepseek-v3",
            {"n_routed_experts": 1 << 16},
            r"mlp.gate.weight has shape \[16, 64\], expected \[65536, 64\]",
        ),
        (
            "wan2.1-14b",
            {"num_layers": 10**12},
            "model.num_layers=1000000000000 must be at most 1,000",
        ),
        ("wan2.1-14b", {"ffn_dim": 1 << 20}, "expected"),
    ],
)
def test_absurd_claims_are_refused_at_once(folders, tmp_path, name, changes, message):
    folder = edited(folders[name], tmp_path / "edited")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    start = time.process_time()
    with pytest.raises(InputError, match=message), little_memory(256 << 20):
        load_pretrained(folder)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ({"a": "../model.safetensors"}, "must be a safetensors file of the same folder"),
        ({"a": "/etc/model.safetensors"}, "must be a safetensors file of the same folder"),
        ({"a": "sub/model.safetensors"}, "must be a safetensors file of the same folder"),
        ({"a": "config.json"}, "must be a safetensors file of the same folder"),
        ({"a": "\0.safetensors"}, "must be a safetensors file of the same folder"),
        ({"a": "a" * 300 + ".safetensors"}, "cannot be read as safetensors"),
        (
            {"a": "gone.safetensors"},
            "gone.safetensors cannot be read as safetensors: .* No such file",
        ),
        ({"a": 7}, "weight_map must map tensor names to file names"),
        (["model.safetensors"], "weight_map must map tensor names to file names"),
        ({}, "config.json claims 4 layers, the files hold 0 tensors"),
    ],
)
def test_indexes(folders, tmp_path, weight_map, message):
    """A link may lead out of the folder: in the hub's own cache all files are links."""
    folder = edited(folders["llama3.1-8b"], tmp_path / "edited")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InputError, match=message):
        load_pretrained(folder)
    with pytest.raises(InputError, match=message):
        find_weights(model_config("llama3.1-8b-tiny"), folder)


def test_files_that_the_index_does_not_name_are_not_read(folders, tmp_path):
    folder = edited(folders["llama3.1-8b"], tmp_path / "edited")
    (folder / "model-00099-of-00099.safetensors").write_bytes(b"garbage")
    assert loaded(load_pretrained, folder) is not None
    next(folder.glob("model-00001*")).unlink()
    with pytest.raises(InputError, match=r"model-00001.*cannot be read"):
        load_pretrained(folder)


# ------------------------------------------------------------------------------------------------------------- headers


def parts_of(file: Path) -> tuple[bytes, bytes]:
    raw = file.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    return raw[8:end], raw[end:]


def put_together(file: Path, header: bytes, body: bytes) -> None:
    file.write_bytes(struct.pack("<Q", len(header)) + header + body)


def flip(file: Path, where: int, what: int) -> None:
    """One byte of the header or of its length becomes another."""
    raw = bytearray(file.read_bytes())
    raw[where % (8 + len(parts_of(file)[0]))] ^= what
    file.write_bytes(raw)


def splice(file: Path, where: int, what: int) -> None:
    """A piece of the header goes, or comes twice; its length is right."""
    header, body = parts_of(file)
    at = where % len(header)
    put_together(file, header[:at] + header[at : at + 9] * (what % 3) + header[at + 9 :], body)


def cut(file: Path, where: int, what: int) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[: where % len(raw)] if what % 2 else raw + bytes(what))


def claim(file: Path, where: int, what: int) -> None:
    """An entry says something else of its tensor, or a tensor is called something else."""
    header, body = parts_of(file)
    tree = json.loads(header)
    names = [name for name in tree if name != "__metadata__"]
    name = names[where % len(names)]
    entry, value = tree[name], VALUES[what % len(VALUES)]
    start, stop = entry["data_offsets"]
    claims = [
        {"dtype": "I32"},
        {"dtype": "F16"},
        {"dtype": "F4"},
        {"dtype": value},
        {"shape": value},
        {"shape": entry["shape"][::-1]},
        {"shape": [1 << 62, 0]},
        {"shape": [1 << 40, 1 << 40]},
        {"shape": []},
        {"data_offsets": [start, 1 << 62]},
        {"data_offsets": [stop, start]},
        {"data_offsets": [-start, stop]},
        {"data_offsets": [start + 4, stop + 4]},
        {"data_offsets": [0, stop]},
        {"data_offsets": value},
    ]
    if what % 16 == 15:
        tree[str(value)] = tree.pop(name)
    else:
        tree[name] = entry | claims[what % 16]
    put_together(file, json.dumps(tree).encode(), body)


changes = st.lists(
    st.tuples(
        st.sampled_from([flip, splice, cut, claim]), st.integers(0, 1 << 20), st.integers(1, 255)
    ),
    min_size=1,
    max_size=2,
)


@settings(max_examples=CASES)
@given(st.sampled_from([*NAMES, "original"]), changes)
def test_any_header(folders, tmp_path_factory, name, changes):
    folder = edited(folders[name], tmp_path_factory.getbasetemp() / "edited")
    files = sorted(folder.glob("*.safetensors"))
    for change, where, what in changes:
        # twice is too much
        with contextlib.suppress(
            ValueError, struct.error, LookupError, TypeError, ZeroDivisionError
        ):
            change(files[where % len(files)], where, what)
    model = loaded(load_pretrained, folder)
    if model is not None:
        expected = load_pretrained(folders[name]).state_dict()
        assert all(torch.equal(x, expected[key]) for key, x in model.state_dict().items())


@pytest.mark.parametrize(
    "header, claimed, message",
    [
        (b"{}", 1 << 63, "its header claims 9,223,372,036,854,775,808 bytes"),
        (b" " * (LONGEST_HEADER + 1), None, "its header claims 16,777,217 bytes"),
        (b"{}", 1000, "cannot be read"),
        (b"[" * 10_000, None, "cannot be read"),
        (b'{"a\n\x1b[31m": 1}', None, "cannot be read"),
        (b"", None, "cannot be read"),
        (
            b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 64]}}',
            None,
            "cannot be read",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}, '
            b'"b": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]}}',
            None,
            "cannot be read",
        ),
        (
            b'{"a": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]}}',
            None,
            "cannot be read",
        ),
        (
            b'{"a\\n\\u001b[31m": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}',
            None,
            "claims 4 layers",
        ),
    ],
)
def test_headers(folders, tmp_path, header, claimed, message):
    shutil.copy(folders["llama3.1-8b"] / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", claimed or len(header)) + header + bytes(64)
    )
    start = time.process_time()
    with pytest.raises(InputError, match=message) as caught, little_memory(256 << 20):
        load_pretrained(tmp_path)
    assert str(caught.value).isprintable() and time.process_time() - start < 5


# the package maps it, and then torch does once more
@pytest.mark.parametrize("room", [1 << 30, 5 << 30])
def test_a_file_that_memory_has_no_room_to_map(folders, tmp_path, room):
    shutil.copy(folders["llama3.1-8b"] / "config.json", tmp_path)
    header = b'{"a": {"dtype": "F32", "shape": [1073741824], "data_offsets": [0, 4294967296]}}'
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (4 << 30))  # a hole: no disk is used
    with (
        pytest.raises(InputError, match="cannot be read as safetensors: .*allocate memory"),
        little_memory(room),
    ):
        load_pretrained(tmp_path)


# ------------------------------------------------------------------------------------------------ adapters, tokenizers


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A model, the folder of its adapters and those: of Linears, and of experts."""
    found = []
    for name, targets in (
        ("llama3.1-8b", ["q_proj", "down_proj"]),
        ("mixtral-8x7b", ["experts.down_proj"]),
    ):
        model, lora, folder = (
            small_model(name),
            Lora(rank=8, targets=targets),
            tmp_path_factory.mktemp("adapter"),
        )
        add_adapters(model, lora)
        initialize(model, 0, is_adapter)
        tensors = [(key, x) for key, x in model.state_dict().items() if is_adapter(key)]
        save_adapter(tensors, model.config, lora, folder)
        found.append((small_model(name), folder, dict(tensors)))
    return found


def adapted(model: Decoder, folder: Path) -> dict[str, torch.Tensor]:
    model = copy.deepcopy(model)
    load_adapter(model, folder)
    return {key: x for key, x in model.state_dict().items() if is_adapter(key)}


@settings(max_examples=CASES // 3)
@given(st.integers(0, 1), edits, changes, st.booleans())
def test_any_adapter(adapters, tmp_path_factory, which, edits, changes, of_config):
    model, original, expected = adapters[which]
    folder = edited(original, tmp_path_factory.getbasetemp() / "edited")
    if of_config:
        edit_json(folder / "adapter_config.json", edits)
    else:
        change, where, what = changes[0]
        with contextlib.suppress(ZeroDivisionError):
            change(folder / "adapter_model.safetensors", where, what)
    found = loaded(adapted, model, folder)
    if found is not None:
        assert all(torch.equal(x, expected[key]) for key, x in found.items())


def test_an_adapters_impossible_rank_is_refused_before_training_too(adapters, tmp_path):
    folder = edited(adapters[0][1], tmp_path / "edited")
    edit = json.loads((folder / "adapter_config.json").read_text()) | {"r": 10**9}
    (folder / "adapter_config.json").write_text(json.dumps(edit))
    with pytest.raises(
        InputError, match=r"adapter_config.json: r=1000000000 must be a whole number from 1 to"
    ):
        from_dict(
            {
                "model": "llama3.1-8b-tiny",
                "task": "lora",
                "lora": {"path": str(folder)},
                "batch": {"seq_len": 32},
            }
        )


TEMPLATE = (
    "{{ bos_token }}{%- for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% else %}"
    "{{ m.role + ':' + m.content | trim + '<|eos|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CHAT = [
    Message(role, content)
    for role, content in (("user", "a b"), ("assistant", "c"), ("user", "d"))
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """Files of a tokenizer that is not ours, with all that may stand beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": {"content": "<|eos|>"}})
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [257], "bos_token_id": 256}))
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool", "template": "y"}]
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "chat_template": templates
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@settings(max_examples=CASES)
@given(
    st.sampled_from(
        ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"]
    ),
    edits,
    st.booleans(),
    st.integers(0, 1 << 16),
)
def test_any_tokenizer(tokenizer_folder, tmp_path_factory, name, edits, as_json, place):
    folder = edited(tokenizer_folder, tmp_path_factory.getbasetemp() / "edited")
    if name in ("special_tokens_map.json", "config.json"):
        (folder / "tokenizer_config.json").write_text("{}")
    if as_json:
        edit_json(folder / name, edits)
    else:
        raw = (folder / name).read_bytes()
        (folder / name).write_bytes(
            raw[: place % len(raw)] + b"\xff\x00[" + raw[place % len(raw) + 2 :]
        )
    tokenizer = loaded(fitting_tokenizer, str(folder), 300)
    if tokenizer is not None:
        assert all(0 <= token < 300 for token in tokenizer.encode("some text"))
        loaded(encode, CHAT, tokenizer)


def encode(chat, tokenizer):
    return encode_chat(chat, choose_template("auto", tokenizer), tokenizer)


PARTS = re.findall(r"\{%-?|-?%\}|\{\{|\}\}|\w+|.", TEMPLATE)


@settings(max_examples=CASES)
@given(
    st.lists(
        st.tuples(st.integers(0, len(PARTS)), st.sampled_from(["", *PARTS])),
        min_size=1,
        max_size=4,
    )
)
def test_any_chat_template(tokenizer_folder, tmp_path_factory, edits):
    """A chat's tokens hold those of its messages, in order, or one line says why there are none."""
    parts = [*PARTS, ""]
    for place, part in edits:
        parts[place] = part
    folder = edited(tokenizer_folder, tmp_path_factory.getbasetemp() / "edited")
    (folder / "chat_template.jinja").write_text("".join(parts))
    tokenizer = load_tokenizer(folder)
    encoded = loaded(encode, CHAT, tokenizer)
    if encoded is not None:
        tokens, said = encoded
        assert b"c" in bytes(token for token in tokens[said] if token < 256)
        assert tokenizer.decode(tokens.tolist()) == "".join(
            text for text, _ in Rendering(choose_template("auto", tokenizer), CHAT).pieces()
        ).replace("<|eos|>", "").replace("<|bos|>", "")
