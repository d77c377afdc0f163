"""The files beside a run's weights, and the special tokens in them, against what transformers makes of the folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from minitrain import generate, load_pretrained, merge, save_pretrained
from minitrain.data.tokenizer import load_tokenizer
from minitrain.errors import InputError
from minitrain.formats.config_hf import not_trained_with
from minitrain.formats.hf import read_config
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.run.tasks import train_model
from tests.helpers.chats import save_with_adapter, tokenizer_with
from tests.helpers.hf_models import (
    CONFIGS,
    HYBRID_CONFIGS,
    MOE_CONFIGS,
    build,
    random_tokens,
    reload,
)

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
RUN = {"steps": 1, "batch": {"global": 1, "micro": 1, "seq_len": 16}, "device": "cpu"}


def data(folder: Path, kind: str, **settings) -> dict:
    """Settings that read one small file of this kind in `folder`."""
    if kind == "tokens":
        np.save(folder / "a.npy", np.arange(64, dtype=np.uint16))
    elif kind == "jsonl":
        (folder / "a.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}))
    else:
        (folder / "a.txt").write_text("a text of some length. " * 4)
    name = {"tokens": "a.npy", "jsonl": "a.jsonl", "text": "a.txt"}[kind]
    return {"data": {"kind": kind, "path": str(folder / name), **settings}}


def own_tokenizer(folder: Path, **named) -> Path:
    """A tokenizer whose bos is 258 and whose eos is 259, where a tiny twin's are 256 and 257."""
    folder.mkdir()
    tokenizer_with(folder, "", ["<s>", "</s>", "<pad>"])
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    return folder


def run(out: Path, *settings: dict) -> Path:
    tree = RUN | {"out_dir": str(out)}
    for each in settings:
        tree = tree | each
    train_model.train(from_dict(tree))
    return out


# ---------------------------------------------------------------------------------------------- ids of random weights


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-32b", "llama3-8b-tiny"])
@pytest.mark.parametrize(
    "task, kind", [("pretrain", "text"), ("sft", "jsonl"), ("pretrain", "tokens")]
)
def test_random_weights_end_where_their_tokenizer_does(tmp_path, name, task, kind):
    """Not where the zoo's model of that name does: there its own vocabulary has other tokens, or none."""
    tokenizer = own_tokenizer(tmp_path / "own", pad_token="<pad>")
    model = {"model": {"name": name, "vocab_size": 320, **SMALL}, "task": task}
    out = run(tmp_path / "out", model, data(tmp_path, kind, tokenizer=str(tokenizer)))
    theirs, words = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    named = words.bos_token_id, words.eos_token_id, words.pad_token_id
    assert named == (258, 259, 260)
    config, generation = theirs.config, theirs.generation_config
    for found in (config, generation):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == named


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b", "gpt-oss-20b", "nemotron3-nano-30b-a3b", "gpt3-175b", "deepseek-v3"]
)
def test_random_weights_of_bytes_have_no_pad(tmp_path, name):
    """Some families have one by default, whatever the tokenizer says."""
    model = {"model": {"name": f"{name}-tiny", "vocab_size": 258, "num_layers": 2}}
    if "nemotron" in name:
        model["model"]["layer_pattern"] = "M*"
        model["model"] |= {
            "num_experts": 0,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 0,
            "shared_expert_intermediate_size": 0,
        }
    out = run(tmp_path / "out", model, data(tmp_path, "text"))
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 257, None)
    if name == "gpt3-175b":
        assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0


@pytest.mark.parametrize(
    "settings, eos", [({}, None), ({"document_end": 7}, 7), ({"document_end": 259}, 259)], ids=str
)
def test_tokens_without_a_tokenizer_end_where_their_documents_do(tmp_path, settings, eos):
    """Else at the zoo's own token, if the vocabulary has it."""
    zoo = {"model": {"name": "llama3-8b", "vocab_size": 320, **SMALL}}
    out = run(tmp_path / "out", zoo, data(tmp_path, "tokens", **settings))
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, eos)


def test_an_eos_of_ones_own_is_not_replaced_in_silence(tmp_path):
    text = data(tmp_path, "text")
    zoo = {"name": "llama3-8b", "vocab_size": 258, **SMALL}
    with pytest.raises(
        InputError, match=r"model.eos_token_id=5, but data.tokenizer=bytes has 257"
    ):
        run(tmp_path / "out", {"model": zoo | {"eos_token_id": 5}}, text)
    several = run(tmp_path / "several", {"model": zoo | {"eos_token_id": [10, 257]}}, text)
    config = json.loads((several / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, [10, 257])


# --------------------------------------------------------------------------------------- what earlier weights have left


def old_model(folder: Path) -> None:
    save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=1)), folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 11, "top_k": 3}))


def test_a_new_model_has_nothing_of_the_old_ones_way_to_generate(tmp_path):
    """As transformers' save_pretrained, which writes the file anew."""
    old_model(tmp_path / "trained")
    run(
        tmp_path / "trained",
        {"model": {"name": "llama3-8b-tiny", "num_layers": 1}},
        data(tmp_path, "text"),
    )
    old_model(tmp_path / "saved")
    save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=1)), tmp_path / "saved")
    # merge asks for a new folder, and leaves an old one as it is
    old_model(tmp_path / "merged")
    words = [*save_with_adapter(tmp_path), "--out", str(tmp_path / "merged")]
    with pytest.raises(InputError, match=r"merged exists already \(name a new folder\)"):
        merge.main(words)
    (tmp_path / "merged").rename(tmp_path / "old")
    assert "top_k" in (tmp_path / "old/generation_config.json").read_text()
    merge.main(words)
    for folder in ("trained", "saved", "merged"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / folder).generation_config
        assert theirs.eos_token_id == 257 and theirs.top_k in (None, 50)


def test_a_new_tokenizer_has_no_tokens_of_the_old_one(tmp_path):
    """Which transformers adds to any tokenizer.json beside them, as vLLM takes weights for quantized."""
    names = "added_tokens.json", "hf_quant_config.json", "quantize_config.json"
    tmp_path.joinpath("out").mkdir()
    for name in names:
        (tmp_path / "out" / name).write_text(json.dumps({"old": 258}))
    run(
        tmp_path / "out",
        {"model": {"name": "llama3-8b-tiny", "num_layers": 1}},
        data(tmp_path, "text"),
    )
    assert not [name for name in names if (tmp_path / "out" / name).exists()]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("old").input_ids == [*b"old"] and len(theirs) == 258


def test_a_new_tokenizer_has_its_own_further_templates(tmp_path):
    """transformers takes tool_use.jinja where tools are given."""
    own = own_tokenizer(tmp_path / "own")
    theirs = AutoTokenizer.from_pretrained(own)
    theirs.chat_template = {"default": "new", "tool_use": "new tools"}
    theirs.save_pretrained(own)
    text = data(tmp_path, "text", tokenizer=str(own))
    model = {"model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 320}}
    for name in ("out", "plain"):
        old = tmp_path / name / "additional_chat_templates"
        old.mkdir(parents=True)
        for file in ("tool_use", "rag"):
            (old / f"{file}.jinja").write_text("old")
    ours = AutoTokenizer.from_pretrained(run(tmp_path / "out", model, text))
    assert ours.chat_template == theirs.chat_template
    run(tmp_path / "plain", model, data(tmp_path, "text"))
    assert not isinstance(AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template, dict)
    load_tokenizer(own).save(own)
    assert AutoTokenizer.from_pretrained(own).chat_template == theirs.chat_template


def test_a_model_keeps_its_own_way_to_generate(tmp_path):
    """Also saved into the folder that it came from, or elsewhere, as in transformers."""
    old_model(tmp_path / "a")
    model = load_pretrained(tmp_path / "a")
    AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "a")
    save_pretrained(model, tmp_path / "b")
    theirs = GenerationConfig.from_pretrained(tmp_path / "theirs")
    for folder in ("a", "b"):
        ours = GenerationConfig.from_pretrained(tmp_path / folder)
        assert (ours.eos_token_id, ours.top_k) == (theirs.eos_token_id, theirs.top_k) == (11, 3)


def test_what_is_not_of_this_model_is_refused(tmp_path):
    """A tokenizer beside weights that have none, and a model beside adapters."""
    own_tokenizer(tmp_path / "a")
    small = {"model": {"name": "llama3-8b-tiny", "num_layers": 1}}
    with pytest.raises(InputError, match=r"a holds a tokenizer.json, which is not this model's"):
        run(tmp_path / "a", small, data(tmp_path, "tokens"))
    with pytest.raises(InputError, match=r"a exists already \(name a new folder\)"):
        merge.main([*save_with_adapter(tmp_path), "--out", str(tmp_path / "a")])
    old_model(tmp_path / "b")
    with pytest.raises(
        InputError, match=r"b holds a model, which adapters beside it do not belong to"
    ):
        run(tmp_path / "b", small, {"task": "lora"}, data(tmp_path, "jsonl"))


# ------------------------------------------------------------------------------------- which weights, which tokenizer


def other_tokenizer(folder: Path, specials: list[str], *swapped: int) -> Path:
    """A tokenizer like `own_tokenizer`'s, in which neighbors among the bytes have changed places."""
    folder.mkdir()
    tokenizer_with(folder, "", specials)
    file = folder / "tokenizer.json"
    tree = json.loads(file.read_text())
    vocabulary, texts = (
        tree["model"]["vocab"],
        {number: text for text, number in tree["model"]["vocab"].items()},
    )
    for number in swapped:
        vocabulary[texts[number]], vocabulary[texts[number + 1]] = number + 1, number
    file.write_text(json.dumps(tree))
    return folder


SPECIALS = ["<s>", "</s>", "<pad>"]


@pytest.mark.parametrize(
    "settings, kind",
    [
        ({"task": "sft"}, "jsonl"),
        ({"task": "lora"}, "jsonl"),
        ({"task": "grpo"}, "jsonl"),
        ({}, "text"),
        ({}, "tokens"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "specials, swapped",
    [
        (SPECIALS, (65,)),
        (SPECIALS, (0, 100, 200)),
        (["<s>", "<pad>", "</s>"], ()),
        (SPECIALS[::-1], (65,)),
    ],
    ids=str,
)
def test_a_model_folder_refuses_the_ids_of_another_tokenizer(
    tmp_path, settings, kind, specials, swapped
):
    base = other_tokenizer(tmp_path / "base", SPECIALS)
    save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=320)), base)
    other = other_tokenizer(tmp_path / "other", specials, *swapped)
    ours, theirs = (
        {
            number: text
            for text, number in AutoTokenizer.from_pretrained(folder).get_vocab().items()
        }
        for folder in (other, base)
    )
    count = sum(theirs[number] != text for number, text in ours.items())
    assert count == 2 * len(swapped) + sum(
        a != b for a, b in zip(specials, SPECIALS, strict=True)
    )
    with pytest.raises(
        InputError, match=rf"other: {count} of 261 ids are other tokens in .*base/tokenizer.json"
    ):
        run(
            tmp_path / "out",
            {"model": str(base)},
            settings,
            data(tmp_path, kind, tokenizer=str(other)),
        )
    assert not (tmp_path / "out").exists()


def test_a_model_folder_takes_tokenizers_with_more_or_fewer_tokens(tmp_path):
    base = other_tokenizer(tmp_path / "base", SPECIALS)
    save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=1, vocab_size=320)), base)
    for name, specials in (("more", [*SPECIALS, "<|im_start|>"]), ("fewer", SPECIALS[:2])):
        other = other_tokenizer(tmp_path / name, specials)
        run(
            tmp_path / f"out-{name}",
            {"model": str(base)},
            data(tmp_path, "text", tokenizer=str(other)),
        )


def test_a_prompt_and_adapters_have_the_ids_of_the_model(tmp_path):
    words = save_with_adapter(tmp_path)
    other_tokenizer(tmp_path / "own", SPECIALS)
    for file in (tmp_path / "own").iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    other = other_tokenizer(tmp_path / "other", SPECIALS, 65)
    message = r"other: 2 of 261 ids are other tokens in .*model/tokenizer.json"
    with pytest.raises(InputError, match=message):
        generate.main([*words[:2], "--tokenizer", str(other), "--prompt", "a"])
    for file in other.iterdir():
        (tmp_path / "adapter" / file.name).write_bytes(file.read_bytes())
    message = r"adapter: 2 of 261 ids are other tokens in .*model/tokenizer.json"
    with pytest.raises(InputError, match=message):
        merge.main([*words, "--out", str(tmp_path / "out")])
    with pytest.raises(InputError, match=message):
        generate.main([*words, "--prompt", "a"])


@pytest.mark.parametrize("name", ["llama3-8b-tiny", "qwen3-32b-tiny", "mixtral-8x7b-tiny"])
def test_a_name_of_the_zoo_is_not_a_folder(tmp_path, monkeypatch, capsys, name):
    """./NAME is; the first line says which weights a run starts from."""
    monkeypatch.chdir(tmp_path)
    save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=3)), name)
    zoo, folder = (from_dict({"model": word}).model for word in (name, f"./{name}"))
    assert (zoo.name, zoo.path, folder.name, folder.path) == (name, "", "", f"./{name}")
    assert zoo.config == model_config(name) and folder.config.num_layers == 3
    run(tmp_path / "out", {"model": f"./{name}"}, data(tmp_path, "text"))
    assert f"weights of ./{name}, 0.3M parameters: pretrain" in capsys.readouterr().out
    run(
        tmp_path / "fresh",
        {"model": {"name": name, "num_layers": 1}, "task": "sft"},
        data(tmp_path, "jsonl"),
    )
    said = capsys.readouterr().out
    assert (
        f"{name} with random weights, " in said
        and "note: what is fine-tuned are random weights" in said
    )


def test_names_of_the_hub_are_told_how_to_come_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = "meta-llama/Llama-3.1-8B"
    tried = {
        rf"^model '{hub}' is no folder \(of the hub\? hf download {hub} --local-dir DIR, then model=DIR\)": (
            lambda: from_dict({"model": hub})
        ),
        rf"^{hub} is no folder \(of the hub\? hf download {hub} --local-dir DIR": lambda: (
            load_pretrained(hub)
        ),
        rf"^tokenizer '{hub}' is not .* hf download {hub}": lambda: load_tokenizer(hub),
        rf"^{hub} is no folder .*hf download {hub} --local-dir": (
            lambda: from_dict({"task": "lora", "lora": {"path": hub}})
        ),
        rf"^--model {hub} is no folder .*then --model DIR": lambda: generate.main(
            ["--model", hub, "--prompt", "a"]
        ),
        r"no file matches 'openai/gsm8k' .*hf download openai/gsm8k --repo-type dataset --local-dir DIR": (
            lambda: run(tmp_path, {"data": {"kind": "text", "path": "openai/gsm8k"}})
        ),
        r"^model './nope' is no folder$": lambda: from_dict({"model": "./nope"}),
        r"^model 'Llama-3.1-8B' is unknown .*hf download ORG/NAME": lambda: from_dict(
            {"model": "Llama-3.1-8B"}
        ),
    }
    for message, call in tried.items():
        with pytest.raises(InputError, match=message):
            call()
    (tmp_path / "runs").mkdir()  # a folder here, not an organization there
    with pytest.raises(InputError, match="^model 'runs/first' is no folder$"):
        from_dict({"model": "runs/first"})


# ------------------------------------------------------------------------------------------------ a pad beyond the rest


@pytest.mark.parametrize(
    "task, kind", [("pretrain", "text"), ("sft", "jsonl"), ("lora", "jsonl")]
)
def test_a_pad_beyond_the_embedding_is_no_obstacle(tmp_path, task, kind):
    """As transformers' add_special_tokens makes it, which resizes nothing."""
    own = own_tokenizer(tmp_path / "own", pad_token="<pad>")
    settings = data(tmp_path, kind, tokenizer=str(own))
    model = {
        "model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 260},
        "task": task,
    }
    out = run(tmp_path / "out", model, settings)
    assert AutoTokenizer.from_pretrained(out).pad_token_id == 260
    if task != "lora":
        assert AutoModelForCausalLM.from_pretrained(out).config.pad_token_id is None
    with pytest.raises(
        InputError, match="model.vocab_size=259 is smaller than the tokenizer's 261"
    ):
        run(
            tmp_path / "next",
            model | {"model": {"name": "llama3-8b-tiny", "vocab_size": 259}},
            settings,
        )
    Path(settings["data"]["path"]).write_text(
        "a <pad> in a text"
        if kind == "text"
        else json.dumps({"prompt": "a <pad>", "response": "b"})
    )
    with pytest.raises(
        InputError, match="holds a token that the model's vocabulary of 260 does not have"
    ):
        run(tmp_path / "next", model, settings)


# ------------------------------------------------------------------------------------ what config.json says of training


@pytest.mark.parametrize("family", [*CONFIGS, *MOE_CONFIGS, *HYBRID_CONFIGS])
def test_keys_that_are_not_ours_are_kept(tmp_path, family):
    """transformers takes the saved model for what it was, with every setting of its config."""
    odd = {
        "attention_dropout": 0.125,
        "pad_token_id": 3,
        "use_cache": False,
        "router_jitter_noise": 0.25,
        "router_aux_loss_coef": 0.5,
        "output_router_logits": True,
        "hidden_dropout": 0.2,
        "resid_pdrop": 0.3,
        "embd_pdrop": 0.0,
        "pretraining_tp": 2,
        "own_key": {"a": [1, None]},
    }
    theirs = build(family, **odd)
    theirs.save_pretrained(tmp_path / "a")
    save_pretrained(load_pretrained(tmp_path / "a"), tmp_path / "b")
    a, b = (AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in "ab")
    spelled = {
        # what the files hold, which here have no such layer
        "num_nextn_predict_layers",
        "_name_or_path",
        "architectures",
        "dtype",
        "rope_parameters",
        "original_max_position_embeddings",
    }
    assert {key: b[key] for key in odd} == {key: a[key] for key in odd} == odd
    assert not [
        key for key, value in a.items() if value not in (None, b.get(key)) and key not in spelled
    ]


@pytest.mark.parametrize("family", [*CONFIGS, *MOE_CONFIGS, *HYBRID_CONFIGS])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_dropout": 0.25},
        {"router_jitter_noise": 0.25},
        {"output_router_logits": True},
        {"hidden_dropout": 0.25},
        {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        {"resid_pdrop": 0.25, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
        {
            "summary_first_dropout": 0.3,
            "classifier_dropout": 0.3,
            "attn_pdrop": 0,
            "embd_pdrop": 0,
            "resid_pdrop": 0,
        },
    ],
    ids=str,
)
def test_settings_that_change_training_in_transformers_are_told(tmp_path, family, changes):
    """By brute force: does its loss in training differ from what the same weights give otherwise?"""
    theirs = build(family, **changes)
    theirs.save_pretrained(tmp_path)
    options = {}
    if getattr(theirs.config, "num_local_experts", 1) == 0:
        # transformers fails where it is to balance experts of a Granite without any
        theirs.config.output_router_logits = False
        options = dict(output_router_logits=False)
    tokens = random_tokens(2, 24)
    with torch.no_grad():
        plain = next_token_loss(theirs(tokens).logits, tokens)
        trained = reload(tmp_path, **options).train()(tokens, labels=tokens).loss
    told = not_trained_with(read_config(tmp_path))
    assert bool(told) == (abs(trained - plain) > 1e-5), told


def next_token_loss(logits, tokens):
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )


def test_a_run_tells_what_it_leaves_out_once(tmp_path, capsys):
    build("gpt2", attn_pdrop=0.0, vocab_size=300).save_pretrained(tmp_path / "base")
    settings = {"model": str(tmp_path / "base"), "steps": 1}, data(tmp_path, "text")
    run(tmp_path / "out", *settings)
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "note: config.json says embd_pdrop=0.1, resid_pdrop=0.1, which training here is without"
        in said
    )
    run(tmp_path / "out", *settings, {"steps": 2})
    assert "pdrop" not in capsys.readouterr().out
    theirs = AutoConfig.from_pretrained(tmp_path / "out")
    assert (theirs.attn_pdrop, theirs.resid_pdrop, theirs.embd_pdrop) == (0.0, 0.1, 0.1)


def test_the_dropout_of_adapters_to_start_from_is_told(tmp_path, capsys):
    small = (
        {"model": {"name": "llama3-8b-tiny", "num_layers": 1}, "task": "lora"},
        data(tmp_path, "jsonl"),
    )
    first = run(tmp_path / "first", *small, {"lora": {"rank": 2, "dropout": 0.25}})
    capsys.readouterr()
    run(tmp_path / "other", *small, {"lora": {"path": str(first)}})
    assert "note: lora_dropout=0.25 of lora.path" in capsys.readouterr().out
    run(tmp_path / "same", *small, {"lora": {"path": str(first), "dropout": 0.25}})
    assert "lora_dropout" not in capsys.readouterr().out
