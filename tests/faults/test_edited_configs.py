"""Bad configs: every one is either valid, and its model can be built, or refused in one line that names the key.

Cases are the configs of this project with random edits, of their values, keys, nesting and text.
FAULT_CASES=20000 in the environment tries more of them.
"""

import copy
import dataclasses
import os
import re
import time
import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from minitrain.errors import InputError
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.wan import WanConfig
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import from_dict, load, to_dict
from minitrain.settings import Config, Model
from minitrain.training.build import make_model

FILES = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))
# not downloaded
TEXTS = [
    text for file in FILES if "path: models/" not in (text := file.read_text(encoding="utf-8"))
]
TREES = [yaml.safe_load(text) for text in TEXTS]
for tree in TREES:
    # then all layers are laid out to find what is adapted
    if "lora" in (*tree, tree.get("task")):
        tree["model"] = (
            {"name": tree["model"]} if isinstance(tree["model"], str) else tree["model"]
        ) | {"num_layers": 2}
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
CASES = int(os.environ.get("FAULT_CASES", 500))

VALUES = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    8,
    16,
    64,
    1000,
    2**31,
    10**9,
    10**12,
    2**62,
    2**63,
    -(2**63),
    10**400,
    0.0,
    0.3,
    0.5,
    1.0,
    1.5,
    -2.5,
    1e-300,
    1e18,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "none",
    "full",
    "1",
    "true",
    "mock",
    "jsonl",
    "fp8",
    "M*E-",
    "a\nb",
    "\x1b[31m",
    "d\u00e9j\u00e0",
    "y" * 5000,
    "../..",
    "~",
    "{stdlib}",
    "llama3-8b-tiny",
    "deepseek-v3-tiny",
    "nemotron3-nano-30b-a3b-tiny",
    "wan2.1-14b-tiny",
    [],
    [1],
    [-1],
    ["x"],
    [[1]],
    [1, "x", None],
    {},
    {"x": 1},
    {1: 2},
    {None: None},
    {"rope_type": []},
    {"a": {}},
    {"rope_type": "yarn", "factor": "x", "original_max_position_embeddings": 0},
    {
        "rope_type": "llama3",
        "factor": 0,
        "low_freq_factor": 1,
        "high_freq_factor": 1,
        "original_max_position_embeddings": 10**400,
    },
]


def keys_of(kind: type, prefix: tuple = ()) -> list[tuple]:
    """The path of every setting, sections too."""
    found = []
    for name, hint in typing.get_type_hints(kind).items():
        if (*prefix, name) == ("model", "config"):
            found += keys_of(DecoderConfig, prefix) + keys_of(WanConfig, prefix)
            continue
        path = (*prefix, name.rstrip("_"))
        found.append(path)
        sections = [
            each for each in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(each)
        ]
        found += [deeper for section in sections for deeper in keys_of(section, path)]
    return found


KEYS = keys_of(Config)
NAMES = {name for path in KEYS for name in path}

paths = st.sampled_from(KEYS)
values = st.sampled_from(VALUES)
edits = st.lists(
    st.one_of(
        st.tuples(st.just("set"), paths, values),
        st.tuples(st.just("set"), paths, values),
        st.tuples(st.just("delete"), paths, st.none()),
        st.tuples(
            st.just("rename"),
            paths,
            st.sampled_from(["x", "", 7, None, True, "a\nb", "lr", "Steps", "k" * 3000]),
        ),
        st.tuples(st.just("move"), paths, paths),
        st.tuples(
            st.just("wrap"),
            paths,
            st.sampled_from([lambda x: [x], lambda x: {"x": x}, str, lambda x: [x] * 3]),
        ),
    ),
    min_size=1,
    max_size=4,
)


def edit(tree: dict, edits: list[tuple]) -> dict:
    tree = copy.deepcopy(tree)
    for action, (*parents, last), what in edits:
        section = open_section(tree, parents)
        if action == "set":
            section[last] = what
        elif last in section:
            value = section.pop(last)
            if action == "rename":
                section[what] = value
            elif action == "move":
                open_section(tree, what[:-1])[what[-1]] = value
            elif action == "wrap":
                section[last] = what(value)
    return tree


def open_section(tree: dict, parents: list[str]) -> dict:
    for parent in parents:
        if isinstance(tree.get(parent), str) and parent == "model":
            tree[parent] = {"name": tree[parent]}
        if not isinstance(tree.get(parent), dict):
            tree[parent] = {}
        tree = tree[parent]
    return tree


def judge(read, named=NAMES) -> Config | None:
    """The config, which must be one that can be used, or None if it was refused in one line with a key or a place."""
    try:
        config = read()
    except InputError as error:
        line = str(error)
        assert line.isprintable() and len(line) < 10 * InputError.LONGEST, line
        assert re.search(r"\.yaml:\d+:\d+: |\.yaml: |\.json ", line) or set(
            re.findall(r"[\w-]+", line)
        ) & set(named), line
        return None
    assert from_dict(to_dict(config)) == config
    for ranks in (1, 8):
        try:
            check_layout(config, ranks)
        except InputError as error:
            assert str(error).isprintable()
    make_model(
        dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, config=fewer_layers(config.model.config)),
        )
    )
    return config


def fewer_layers(shape: DecoderConfig | WanConfig) -> DecoderConfig | WanConfig:
    """The same with one layer of each kind, so that it is built at once."""
    if isinstance(shape, WanConfig):
        return dataclasses.replace(shape, num_layers=1)
    dense = min(shape.first_k_dense_replace, 1)
    pattern = "".join(dict.fromkeys(shape.layer_pattern))
    layers = len(pattern) or min(shape.num_layers, 1 + dense)
    return dataclasses.replace(
        shape, num_layers=layers, first_k_dense_replace=dense, layer_pattern=pattern
    )


@settings(max_examples=CASES)
@given(st.sampled_from(TREES), edits, st.booleans())
def test_an_edited_config_is_valid_or_refused_in_one_line(
    tmp_path_factory, tree, edits, as_words
):
    file = tmp_path_factory.getbasetemp() / "edited.yaml"
    words = []
    if as_words:
        words = [
            f"{'.'.join(path)}={yaml.dump(value, Dumper=DUMPER, default_flow_style=True)}"
            for action, path, value in edits
            if action == "set"
        ]
        edits = [each for each in edits if each[0] != "set"]
    edited = edit(tree, edits)
    file.write_text(yaml.dump(edited, Dumper=DUMPER, allow_unicode=True), encoding="utf-8")
    moved = {str(what) for action, _, what in edits if action == "rename"}
    judge(lambda: load(file, words), NAMES | moved | {"key"})


@settings(max_examples=CASES // 4)
@given(
    st.sampled_from(TEXTS),
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 9), st.text(max_size=6)),
        min_size=1,
        max_size=4,
    ),
)
def test_edited_text_is_valid_or_refused_in_one_line(tmp_path_factory, text, edits):
    """Characters go, come and go again: indentation, colons, brackets, quotes, anchors."""
    for place, gone, new in edits:
        at = place % (len(text) + 1)
        text = text[:at] + new + text[at + gone :]
    file = tmp_path_factory.getbasetemp() / "edited.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    judge(lambda: load(file), NAMES | {"key", "mapping", "edited"})


HOSTILE = {
    "an unknown alias": ("steps: *nothing", "undefined alias"),
    "a long line": ("out_dir: " + "x" * 99_900 + "\nstep: 1", "unknown key step"),
    "a long key": ("? " + "k" * 90_000 + "\n: 1", "unknown key kkk"),
    "an object": ("steps: !!python/object:os.system x", "could not determine a constructor"),
    "a call": (
        "steps: !!python/object/apply:os.system [echo]",
        "could not determine a constructor",
    ),
    "a tag that lies": ("steps: !!int x", "not valid YAML: invalid literal"),
    "5,000 digits": ("steps: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
    "a key twice": ("steps: 1\nsteps: 1", "key 'steps' is given twice"),
    "a section twice": (
        "optim: {lr: 1}\nbatch: {}\noptim: {eps: 1}",
        "key 'optim' is given twice",
    ),
    "a list as a key": ("? [a]\n: 1", "found unhashable key"),
    "a mapping as a key": ("{a: 1}: 1", "found unhashable key"),
    "bytes": ("out_dir: !!binary eHg=", "out_dir must be text, not bytes"),
    "a set": ("parallel: !!set {tp, pp}", "parallel must be a mapping, not set"),
    "a base of 60": ("steps: 1:59", "steps must be a whole number, not str '1:59'"),
    "a list": ("- steps: 1", "a config must be a mapping"),
    "a word": ("steps", "a config must be a mapping"),
    "two documents": ("steps: 1\n---\nsteps: 2", "but found another document"),
    "tabs": ("optim:\n\tlr: 1", "cannot start any token"),
    "colours": ('"steps\\e[31m\\n": 1', r"unknown key steps\\x1b\[31m\\n"),
    "directional marks": ("st\u202eeps: 1", "unknown key st\\\\u202eeps"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml(tmp_path, name):
    text, message = HOSTILE[name]
    file = tmp_path / "a.yaml"
    file.write_text(text, encoding="utf-8")
    start = time.process_time()
    with pytest.raises(InputError, match=message) as caught:
        load(file)
    assert str(caught.value).isprintable() and time.process_time() - start < 20
    key, colon, value = text.partition(": ")
    if key.isalpha() and colon and "\n" not in text:  # the same as a word, but for text
        with pytest.raises(InputError, match=message):
            load(os.devnull, [f"{key}={value}"])
    if text.startswith("out_dir: ") and "\n" not in text:
        assert load(os.devnull, [f"out_dir={value}"]).out_dir == value


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}", "\ufeffsteps: 100"])
def test_an_empty_file_is_all_defaults(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    assert load(tmp_path / "a.yaml") == dataclasses.replace(
        Config(), model=Model(config=DecoderConfig())
    )


def test_merge_keys_are_read(tmp_path):
    """Not keys of one letter, of which no setting has any: merged twice, PyYAML 6.0.4 takes the wrong value."""
    (tmp_path / "a.yaml").write_text("reference: {a: &a {lr: 1, tp: 1}, b: {<<: *a, tp: 2}}")
    assert load(tmp_path / "a.yaml").reference == {
        "a": {"lr": 1, "tp": 1},
        "b": {"lr": 1, "tp": 2},
    }
    # c is made before b
    (tmp_path / "a.yaml").write_text("reference: {a: {b: &b {<<: {lr: 1}, lr: 2}}, c: {<<: *b}}")
    assert load(tmp_path / "a.yaml").reference == {"a": {"b": {"lr": 2}}, "c": {"lr": 2}}


@pytest.mark.parametrize(
    "content", [bytes(range(256)), b"\xff\xfe\0\0", b"\x89PNG\r\n\x1a\n" + b"\0" * 99, None]
)
def test_configs_that_are_no_text_are_refused(tmp_path, content):
    (tmp_path / "a").mkdir() if content is None else (tmp_path / "a").write_bytes(content)
    with pytest.raises(InputError, match=r"a(.yaml)? cannot be read|not valid YAML|config file"):
        load(tmp_path / "a")


@pytest.mark.parametrize("path", ["no/such/file", "x" * 5000])
def test_paths_that_are_none(path):
    with pytest.raises(InputError):
        load(path)


@pytest.mark.parametrize(
    "word, message",
    [
        ("", "not of the form key=value"),
        ("steps", "not of the form key=value"),
        ("=1", "not of the form key=value"),
        ("steps.x=1", "steps must be a whole number, not dict"),
        ("a..b=1", "unknown key a"),
        (".=1", "unknown key"),
        (".".join("abc" * 2000) + "=1", "unknown key a"),
        ("optim=3", "optim must be a mapping"),
        ("model.=1", "unknown key model."),
        ("model=" + "m" * 5000, "is unknown"),
        ("lora.rank=1000000000", "lora.rank=1000000000 must be between 1 and 65,536"),
        ("grpo.lag=-1", "grpo.lag=-1 must be between 0 and 65,536"),
        ("grpo.in_flight_cache=7", "grpo.in_flight_cache=7 is not one of recompute, keep"),
        ("grpo.lag=true", "grpo.lag must be a whole number, not bool True"),
        ("model.num_layers=1000000000", "model.num_layers=1000000000 must be at most 1,000"),
        ("model.vocab_size=100000000", "model.vocab_size=100000000 must be at most"),
        ("model.rope_scaling={rope_type: []}", "model.rope_scaling=.* is not supported"),
        (
            "batch.global=100000000000",
            "batch.global=100000000000 must be between 1 and 16,777,216",
        ),
    ],
)
def test_hostile_words(word, message):
    with pytest.raises(InputError, match=message) as caught:
        load(os.devnull, [word])
    assert str(caught.value).isprintable()
