"""Reading configs: what is accepted, and that each mistake is one line that names the key."""

import dataclasses
import os
import re

import pytest

from minitrain.errors import InputError
from minitrain.formats.hf import save_pretrained
from minitrain.formats.peft import save_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.decoder_config import DecoderConfig
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.zoo import model_config
from minitrain.run.config.aliases import ALIASES, OF_MODEL
from minitrain.run.config.checks import validate
from minitrain.run.config.config_yaml import read_yaml, to_yaml
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.load import from_dict, load, to_dict
from minitrain.settings import Config, Lora, Model


def config_file(tmp_path, text):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    return file


def test_defaults_are_valid():
    assert from_dict({}) == dataclasses.replace(Config(), model=Model(config=DecoderConfig()))


def test_nested_keys_overrides_and_numbers(tmp_path):
    text = "model: llama3-8b-tiny\nsteps: 1e3\noptim: {lr: 3e-4, clip: null}\nbatch: {global: 6, micro: 2}\n"
    words = ["batch.micro=3", "model.num_layers=2", "optim.betas=[0.8, 0.99]", "seed=7"]
    config = load(config_file(tmp_path, text), words)
    assert config.steps == 1000 and isinstance(config.steps, int)
    assert (
        config.optim.lr == 3e-4
        and config.optim.clip is None
        and config.optim.betas == [0.8, 0.99]
    )
    assert config.batch.global_ == 6 and config.batch.micro == 3 and config.seed == 7
    assert config.model.name == "llama3-8b-tiny" and config.model.config.num_layers == 2
    assert config.model.config.rope_theta == 500000.0


def test_an_override_is_of_one_place_among_those_that_share_an_anchor(tmp_path):
    file = config_file(tmp_path, "validation: &often {every: 10}\ncheckpoint: *often\n")
    config = load(file, ["validation.every=5"])
    assert (config.validation.every, config.checkpoint.every) == (5, 10)


def test_a_whole_section_in_a_word_gives_its_keys(tmp_path):
    """Some settings depend on which keys of a section are given, not only on their values."""
    config = load(config_file(tmp_path, "task: sft\n"), ["data={path: kind.jsonl, kind: jsonl}"])
    assert (config.data.kind, config.data.path) == ("jsonl", "kind.jsonl")
    with pytest.raises(InputError, match="data.path needs data.kind"):
        load(config_file(tmp_path, "task: sft\n"), ["data={path: kind.jsonl}"])


def test_overrides_go_below_a_folder_and_below_what_is_null(tmp_path):
    """The config.yaml that a run writes has `lora: null`."""
    model = Decoder(model_config("llama3-8b-tiny", num_layers=1))
    save_pretrained(model, tmp_path / "model")
    file = config_file(tmp_path, "lora: null\n")
    config = load(
        file,
        [
            f"model={tmp_path}/model",
            "model.max_position_embeddings=64",
            "lora.rank=3",
            "batch.seq_len=64",
        ],
    )
    assert (
        config.model.path == f"{tmp_path}/model"
        and config.model.name == ""
        and config.lora.rank == 3
    )
    assert config.model.config == dataclasses.replace(model.config, max_position_embeddings=64)


@pytest.mark.parametrize("model", ["~/base", {"path": "~/base"}])
def test_the_home_folder_is_meant_as_in_a_shell(tmp_path, monkeypatch, model):
    """Which expands it at the start of words only: `~` of out_dir=~/run would be the name of a folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    base = Decoder(model_config("llama3-8b-tiny", num_layers=1))
    save_pretrained(base, tmp_path / "base")
    add_adapters(base, Lora(rank=2))
    save_adapter(
        [pair for pair in base.named_parameters() if is_adapter(pair[0])],
        base.config,
        Lora(rank=2),
        tmp_path,
    )
    tree = {
        "model": model,
        "out_dir": "~/run",
        "data": {"tokenizer": "~/base"},
        "lora": {"path": "~"},
    }
    config = from_dict(tree)
    assert (config.model.path, config.model.name, config.out_dir) == (
        f"{tmp_path}/base",
        "",
        f"{tmp_path}/run",
    )
    assert (config.data.tokenizer, config.lora.path, config.lora.rank) == (
        f"{tmp_path}/base",
        str(tmp_path),
        2,
    )
    with pytest.raises(InputError, match="is model.path, which the result would overwrite"):
        from_dict(tree | {"out_dir": "~/base"})


def test_numbers_as_people_write_them():
    assert read_yaml("[1e3, -1E+2, .5e1, 5.e-1, +1e0]", "it") == [1000, -100, 5, 0.5, 1]
    assert isinstance(from_dict({"grpo": {"lag": 1.0}}).grpo.lag, int)


def test_the_first_equals_sign_ends_the_key(tmp_path):
    assert load(config_file(tmp_path, ""), ["out_dir=lr=1"]).out_dir == "lr=1"


def test_a_model_can_be_given_by_its_fields_alone():
    config = from_dict({"model": {"hidden_size": 96, "num_key_value_heads": 2}})
    assert config.model.name == "" and config.model.config.hidden_size == 96


def test_eps_is_adamws():
    from_dict({"optim": {"name": "sgd", "eps": 0}})


def test_values_at_the_edge_of_what_is_possible():
    optim = {"betas": [0, 0], "warmup": 100, "final_lr": 1, "weight_decay": 0}
    from_dict(
        {
            "steps": 100,
            "optim": optim,
            "batch": {"seq_len": 8192},
            "profile": {"steps": [100, 100]},
        }
    )
    check_layout(from_dict({"rollout": {"memory": 1}, "parallel": {"schedule": "DualPipeV"}}), 1)


def test_mock_data_needs_no_share_held_out_and_has_chats():
    from_dict({"task": "sft", "validation": {"every": 5}})


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"norm_topk_prob": True, "fake_balanced_gate": True},
        {"num_experts": 1},
    ],
)
def test_one_expert_for_each_token_where_its_weight_or_nothing_tells_the_router(changes):
    from_dict({"model": {"name": "qwen3-30b-a3b-tiny", "num_experts_per_tok": 1} | changes})


def test_one_expert_for_each_token_of_a_router_that_is_read_or_frozen(tmp_path):
    shape = {"name": "mixtral-8x7b-tiny", "num_experts_per_tok": 1}
    adapted = from_dict({"model": shape, "lora": {"rank": 2}})
    save_pretrained(Decoder(adapted.model.config), tmp_path)
    assert from_dict({"model": str(tmp_path)}).model.config == adapted.model.config


def test_what_is_written_is_read_back_the_same():
    tree = {
        "model": {"name": "llama3.1-8b-tiny", "num_layers": 3},
        "batch": {"global": 4, "micro": 2, "seq_len": 32},
    }
    config = from_dict(tree | {"out_dir": "1e5", "optim": {"lr": 1e-5}})
    assert from_dict(to_dict(config)) == config
    assert from_dict(read_yaml(to_yaml(to_dict(config)), "it")) == config


@pytest.mark.parametrize(
    "tree, line",
    [
        ({"stepz": 1}, r"unknown key stepz \(nearest: steps\)"),
        ({"optim": {"learning_rate": 1}}, r"unknown key optim.learning_rate \(use optim.lr\)"),
        (
            {"model": {"name": "llama3-8b", "layers": 2}},
            r"unknown key model.layers \(nearest: num_layers\)",
        ),
        ({"model": "lama3-8b"}, r"model 'lama3-8b' is unknown \(nearest: 'llama3-8b'"),
        ({"model": ["llama3-8b"]}, "model must be a name, a folder or a mapping, not list"),
        ({"model": {"path": "/nowhere/at/all"}}, "/nowhere/at/all"),
        ({"model": {"name": "a", "path": "b"}}, "cannot both be given"),
        (
            {"model": {"num_attention_heads": 6, "num_key_value_heads": 4}},
            "num_key_value_heads=4 does not divide",
        ),
        ({"model": {"hidden_size": 0}}, "model.hidden_size=0 must be at least 1"),
        (
            {"model": {"norm": "batchnorm"}},
            "model.norm='batchnorm' is not one of rmsnorm, rmsnorm1p, layernorm, layernorm1p",
        ),
        (
            {"model": {"rope_scaling": {"rope_type": "yarn"}}},
            "model.rope_scaling=.* is not supported",
        ),
        (
            {
                "model": {
                    "rope_scaling": {
                        "rope_type": "yarn",
                        "factor": 2.0,
                        "original_max_position_embeddings": 64,
                        "rope_theta": 50.0,
                    }
                }
            },
            "model.rope_scaling.rope_theta is not a setting of yarn",
        ),
        ({"model": {"partial_rotary_factor": 1.5}}, "model.partial_rotary_factor=1.5"),
        ({"steps": "many"}, "steps must be a whole number, not str 'many'"),
        ({"steps": 2.5}, "steps must be a whole number, not float 2.5"),
        ({"steps": True}, "steps must be a whole number, not bool True"),
        ({"steps": float("nan")}, "steps must be a whole number, not float nan"),
        ({"steps": float("inf")}, "steps must be a whole number, not float inf"),
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"optim": {"eps": 0}}, "optim.eps=0.0 must be at least 1e-30"),
        ({"optim": {"lr": float("inf")}}, "optim.lr must be a finite number"),
        ({"optim": {"lr": -float("inf")}}, "optim.lr must be a finite number"),
        ({"optim": {"lr": -1}}, "optim.lr=-1.0 must be at least 0"),
        ({"optim": {"betas": [0.9]}}, "optim.betas=.* must be two numbers"),
        ({"optim": {"betas": [0.9, "x"]}}, r"optim.betas\[1\] must be a finite number"),
        ({"optim": {"betas": 0.9}}, "optim.betas must be a list"),
        ({"optim": {"clip": 0}}, "optim.clip=0.0 must be above 0, or null"),
        (
            {"optim": {"name": "sgd", "states": "bf16"}},
            "optim.states=bf16 is for optim.name=adamw, not sgd",
        ),
        (
            {"optim": {"name": "sgd", "stochastic_rounding": True}},
            "stochastic_rounding=true is for optim.name=adamw or muon, not sgd",
        ),
        ({"optim": {"decay": 2}}, "optim.decay=2.0 must be between 0 and 1"),
        (
            {"optim": {"name": "muon", "states": "bf16"}},
            "optim.states=bf16 is for optim.name=adamw, not muon",
        ),
        (
            {"optim": {"name": "muon"}, "precision": "bf16-pure"},
            "optim.name=muon with precision=bf16-pure loses nearly all updates to rounding",
        ),
        (
            {"optim": {"name": "muon"}, "lora": {"rank": 2}},
            "optim.name=muon is for whole matrices, not for lora's",
        ),
        (
            {"optim": {"newton_schulz": "fp32"}},
            "optim.newton_schulz=fp32 is for optim.name=muon, not adamw",
        ),
        ({"optim": {"ema": 1}}, "optim.ema=1.0 must be at least 0 and below 1"),
        ({"optim": {"final_lr": 2}}, "optim.final_lr=2.0 must be between 0 and 1"),
        ({"optim": 3}, "optim must be a mapping, not int 3"),
        ({"precision": "fp64"}, "precision='fp64' is not one of fp32, bf16, bf16-pure"),
        ({"batch": {"global": 6, "micro": 4}}, "batch.micro=4 does not divide batch.global=6"),
        (
            {"batch": {"seq_len": 9000}},
            "batch.seq_len=9000 exceeds the model's max_position_embeddings=8192",
        ),
        ({"parallel": {"dp_shard": 0}}, "parallel.dp_shard=0 must be at least 1, or -1"),
        ({"data": {"kind": "text"}}, "data.kind=text needs data.path"),
        ({"data": {"path": "x"}}, "data.path needs data.kind .*: by default it is mock"),
        ({"data": {"validation": 1.0}}, "data.validation=1.0 must be at least 0 and below 1"),
        (
            {"data": {"kind": "text", "path": "x"}, "validation": {"every": 5}},
            "every=5 needs data.validation above 0",
        ),
        (
            {"model": {"name": "mixtral-8x7b-tiny", "num_experts_per_tok": 1}},
            "model.num_experts_per_tok=1 with norm_topk_prob=true: each token's weight would be 1, and the router get "
            r"no gradient \(use 2, or false\)",
        ),
        ({"parallel": {"vp": 0}}, "parallel.vp=0 must be at least 1"),
        ({"parallel": {"prefetch": -1}}, "parallel.prefetch=-1 must be at least 0"),
        ({"parallel": {"dp_shard": -2}}, "parallel.dp_shard=-2 must be at least 1, or -1"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep=0 must be at least 1"),
        ({"checkpoint": {"every": -1}}, "checkpoint.every=-1 must be at least 0"),
        ({"validation": {"batches": 0}}, "validation.batches=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"optim": {"weight_decay": -0.1}}, "optim.weight_decay=-0.1 must be at least 0"),
        ({"optim": {"betas": [0.9, 1]}}, "optim.betas=.0.9, 1.0. must be two numbers"),
        ({"data": {"text_tokens": 0}}, "data.text_tokens=0 must be between 1 and 1,048,576"),
        (
            {"data": {"text_tokens": 1 << 21}},
            "data.text_tokens=2097152 must be between 1 and 1,048,576",
        ),
        (
            {"rollout": {"max_tokens": 1 << 31}},
            "rollout.max_tokens=2147483648 must be between 1 and 1,073,741,824",
        ),
        ({"grpo": {"mock_digits": 1001}}, "grpo.mock_digits=1001 must be between 1 and 1,000"),
        (
            {"grpo": {"generations": 2**63 - 1}},
            "grpo.generations=9223372036854775807 must be between 1 and 1,000",
        ),
        (
            {"grpo": {"warmup_steps": 2**63 - 1}},
            "grpo.warmup_steps=9223372036854775807 must be between 0 and 1,048,576",
        ),
        (
            {"grpo": {"eval_samples": 1e9}},
            "grpo.eval_samples=1000000000 must be between 1 and 1,048,576",
        ),
        (
            {"task": "sft", "data": {"validation": 0.5}, "validation": {"exact_match": 2}},
            "needs chats that are held",
        ),
        (
            {"model": "gpt3-175b-tiny", "lora": {}},
            "lora: adapters of GPT-3's q_proj, k_proj and v_proj have no form",
        ),
        (
            {"model": {"name": "deepseek-v3-tiny", "bias_update_speed": 0.1}, "lora": {}},
            "bias_update_speed=0.1: lora",
        ),
        ({"compile": "yes"}, "compile must be true or false"),
        ({"reference": 3}, "reference must be a mapping"),
    ],
)
def test_mistakes_are_one_line(tree, line):
    with pytest.raises(InputError, match=line) as error:
        from_dict(tree)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, line",
    [
        ("steps: [1, 2\nseed: 0\n", r"config.yaml:2:5: "),
        ("steps: 1\nsteps: 2\n", r"config.yaml:2:1: key 'steps' is given twice"),
        ("- a\n- b\n", "a config must be a mapping of keys to values"),
        (
            "steps: !!python/object:os.system 1\n",
            r"config.yaml:1:8: could not determine a constructor",
        ),
        ("a: \x00\n", "config.yaml: not valid YAML"),
        ("timeout_s: 1:30\n", "timeout_s must be a finite number, not str '1:30'"),
    ],
)
def test_malformed_files_name_the_place(tmp_path, text, line):
    with pytest.raises(InputError, match=line) as error:
        load(config_file(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, value", [("0100", 100), ("1e2", 100.0), ("-7", -7), (".5", 0.5), ("+3.", 3.0)]
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    """Where 0100, such as `seq -w` makes, is no octal number. The oracle is Python."""
    assert read_yaml(f"x: {text}", "it") == {"x": value} and float(text) == value
    assert read_yaml(to_yaml({"x": text}), "it") == {"x": text}
    assert read_yaml(to_yaml({"x": value}), "it") == {"x": value}


def test_a_date_is_text():
    assert read_yaml("a: 2024-12-24\nb: 1:30", "it") == {"a": "2024-12-24", "b": "1:30"}


@pytest.mark.parametrize(
    "word, line",
    [
        ("steps", "argument 'steps' is not of the form key=value"),
        ("steps.x=1", "'steps' is a value, it has no keys under it"),
        ("optim.lr=[", r"argument 'optim.lr=\['"),
        ("out_dir=a\0", "out_dir must not hold a zero byte"),
        (
            "steps=99999999999999999999",
            "steps=99999999999999999999 must be at most 9,223,372,036,854,775,807",
        ),
        ("lr=1", r"unknown key lr \(use optim.lr\)"),
        ("optm.lr=1", r"unknown key optm \(nearest: optim\)"),
        ("optim.learning_rate=1", r"unknown key optim.learning_rate \(use optim.lr\)"),
        ("STEP=1", r"unknown key STEP \(nearest: steps\)"),
        ("out_dir=", "out_dir is empty"),
        ("every=5", r"unknown key every \(nearest: validation.every or checkpoint.every\)"),
        ("zzzzzz=5", r"unknown key zzzzzz \(minitrain train --help lists all settings\)"),
        ("precision=int4", r"precision='int4' is not one of fp32, bf16, bf16-pure, fp8$"),
        ("model=qqqq", r"model 'qqqq' is unknown \(known: "),
    ],
)
def test_wrong_overrides(tmp_path, word, line):
    with pytest.raises(InputError, match=line) as error:
        load(config_file(tmp_path, "steps: 5\n"), [word])
    assert "\n" not in str(error.value)


AS_IT_STANDS = [
    "exp/a #2",
    "2024-12-24",
    "0100",
    "1:30",
    "*.txt",
    "&a",
    "!x",
    "null",
    "true",
    "007",
    " a b ",
    "a: b",
    "{a",
    "[ab]*.txt",
    "'quoted'",
    "- x",
    "a\\n",
    "~x #",
    "%",
    "@",
    "`",
]


@pytest.mark.parametrize("text", AS_IT_STANDS)
def test_text_in_a_word_is_no_yaml(tmp_path, text):
    """The oracle is the word itself: what the shell has handed over."""
    keys = ("data.path", "out_dir", "data.field", "data.exclude")
    config = load(config_file(tmp_path, "data: {kind: jsonl}"), [f"{key}={text}" for key in keys])
    assert (config.data.path, config.data.field, config.data.exclude) == (
        text,
        text,
        [text.strip().strip("'")],
    )
    assert config.out_dir == text
    for key in ("model", "model.name"):
        told = f"^model {re.escape(repr(text))} is (unknown|no folder)|^argument .model={{a"
        with pytest.raises(InputError, match=told):
            load(os.devnull, [f"{key}={text}"])


def test_lists_in_a_word():
    def read(word):
        return load(os.devnull, [word])

    for value in ("[10,12]", "10,12", "10, 12", "[10, 1.2e1]"):
        assert read(f"profile.steps={value}").profile.steps == [10, 12]
    assert read("optim.betas=0.8,0.9").optim.betas == [0.8, 0.9] and read(
        "data.size=1,2,3"
    ).data.size == [1, 2, 3]
    assert read("parallel.layers_per_stage=null").parallel.layers_per_stage is None
    for value in ("[*.txt, a b #2,'x,y', \"&z\"]", "*.txt,a b #2,'x,y',\"&z\""):
        assert read(f"data.exclude={value}").data.exclude == ["*.txt", "a b #2", "x,y", "&z"]
    assert read("data.exclude=").data.exclude == read("data.exclude=[]").data.exclude == []
    assert load(os.devnull, ["data.kind=text", "data.path=[a,*.b]"]).data.path == ["a", "*.b"]
    # a file may be called so
    assert load(os.devnull, ["data.kind=text", "data.path=a,b"]).data.path == "a,b"
    assert read("lora.targets=q_proj,v_proj").lora.targets == ["q_proj", "v_proj"]
    with pytest.raises(InputError, match="optim.betas=.0.9. must be two numbers"):
        read("optim.betas=0.9")


@pytest.mark.parametrize(
    "alias, ours",
    [
        ("deepspeed", "parallel.dp_shard"),
        ("qlora", "task=lora, lora.base=nf4"),
        ("learning_rate", "optim.lr"),
        ("bf16", "precision=bf16"),
        ("max_seq_len", "batch.seq_len"),
        ("gradient_accumulation_steps", "batch.global, which is"),
        ("save_every", "checkpoint.every"),
        ("num_epochs", "epochs"),
        ("wandb", "out_dir/metrics.jsonl, or metrics.tensorboard"),
        ("beta", "grpo.kl"),
        ("tp_size", "parallel.tp"),
        ("dtype", "precision"),
        ("lora_r", "lora.rank"),
        ("lora_alpha", "lora.alpha"),
        ("per_device_train_batch_size", "batch.micro"),
        ("num_train_epochs", "epochs"),
        ("output_dir", "out_dir"),
        ("logging_steps", "out_dir/metrics.jsonl"),
        ("data.seed", "seed"),
        ("optim.learning-rate", "optim.lr"),
        ("MAX_STEPS", "steps"),
        ("model.n_layer", "num_layers"),
        ("model.hidden_dim", "hidden_size"),
        ("beta", "grpo.kl, or dpo.beta"),
        ("dpo.loss_type", "dpo.loss"),
        ("ckpt_dir", "out_dir"),
        ("nproc_per_node", "parallel, and torchrun --nproc_per_node N"),
        ("quantization", "task=lora, lora.base=nf4"),
    ],
)
def test_names_that_people_bring(alias, ours):
    with pytest.raises(InputError, match=rf"^unknown key {alias} \(use {ours}"):
        load(os.devnull, [f"{alias}=1"])


@pytest.mark.parametrize("name", ["lr", "weight_decay", "betas", "eps", "clip", "warmup"])
def test_the_optimizers_settings_alone_lead_to_their_section(tmp_path, name):
    (tmp_path / "a.yaml").write_text("model: llama3-8b-tiny\n")
    for word in (name, name.upper()):
        with pytest.raises(InputError, match=rf"^unknown key {word} \(use optim.{name}\)$"):
            load(tmp_path / "a.yaml", [f"{word}=1"])


def test_every_alias_leads_to_a_setting():
    for alias, ours in ALIASES.items():
        known = to_dict(dataclasses.replace(from_dict({}), lora=Lora()))
        for key in re.split("[=:, ]", ours)[0].split("."):
            if ours.startswith("out_dir/"):
                continue
            assert key in known, (alias, ours)
            known = known[key]
    assert set(OF_MODEL.values()) <= {"path", *to_dict(from_dict({}))["model"]}


def test_sizes_of_parallel_need_not_name_their_section():
    short, long = (
        load(os.devnull, [f"{name}tp=2", f"{name}cp=2", f"{name}dp_shard=2"])
        for name in ("", "parallel.")
    )
    assert short == long and (long.parallel.tp, long.parallel.cp) == (2, 2)


def test_adapters_are_not_overwritten_by_those_that_start_from_them():
    config = from_dict({"lora": {"rank": 2}, "out_dir": "out/../adapters"})
    config.lora = dataclasses.replace(config.lora, path="adapters")
    with pytest.raises(
        InputError,
        match="^out_dir='out/../adapters' is lora.path, which the result would overwrite",
    ):
        validate(config)


def test_missing_and_binary_files(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(bytes(range(256)))
    with pytest.raises(InputError, match="binary.yaml"):
        load(binary)


def layout(**parallel):
    return from_dict({"batch": {"global": 8, "micro": 2}, "parallel": parallel})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_possible_layouts(ranks):
    check_layout(layout(), ranks)
    check_layout(layout(dp_replicate=ranks), ranks)


@pytest.mark.parametrize(
    "parallel, ranks, line",
    [
        (
            {},
            3,
            r"batch.global=8 is not a multiple of batch.micro=2 x 3 .*\(use a multiple of 6\)",
        ),
        (
            {},
            8,
            r"batch.global=8 is not a multiple of batch.micro=2 x 8 .*\(use batch.micro=1, or a multiple of 16\)",
        ),
        ({"dp_shard": 2}, 4, "dp_shard=2 x tp=1 x cp=1 x pp=1 = 2 is not the number of ranks, 4"),
        (
            {"dp_shard": 2, "tp": 2},
            3,
            "dp_shard=2 x tp=2 x cp=1 x pp=1 = 4 is not the number of ranks, 3",
        ),
        (
            {"dp_replicate": 3},
            4,
            "x tp=1 x cp=1 x pp=1 = 3 does not divide the number of ranks, 4 .start 3",
        ),
    ],
)
def test_impossible_layouts(parallel, ranks, line):
    with pytest.raises(InputError, match=line):
        check_layout(layout(**parallel), ranks)
