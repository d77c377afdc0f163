"""The files beside a run's weights, and the special tokens in them, against what transformers makes of the folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from minitrain import load_pretrained, merge, save_pretrained, train
from minitrain.errors import InputError
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.settings import from_dict
from tests.test_chat_templates import save_with_adapter, tokenizer_with

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
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
    train.train(from_dict(tree))
    return out


# ---------------------------------------------------------------------------------------------- ids of random weights


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-32b", "llama3-8b-tiny"])
@pytest.mark.parametrize("task, kind", [("pretrain", "text"), ("sft", "jsonl"), ("pretrain", "tokens")])
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


@pytest.mark.parametrize("name", ["mixtral-8x7b", "gpt-oss-20b", "nemotron3-nano-30b-a3b", "gpt3-175b", "deepseek-v3"])
def test_random_weights_of_bytes_have_no_pad(tmp_path, name):
    """Some families have one by default, whatever the tokenizer says."""
    model = {"model": {"name": f"{name}-tiny", "vocab_size": 258, "num_layers": 2}}
    if "nemotron" in name:
        model["model"]["layer_pattern"] = "M*"
        model["model"] |= {"num_experts": 0, "num_experts_per_tok": 1, "moe_intermediate_size": 0,
                           "shared_expert_intermediate_size": 0}  # fmt: skip
    out = run(tmp_path / "out", model, data(tmp_path, "text"))
    config = AutoModelForCausalLM.from_pretrained(out).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 257, None)
    if name == "gpt3-175b":
        assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0


@pytest.mark.parametrize("settings, eos", [
    ({}, None), ({"document_end": 7}, 7), ({"document_end": 259}, 259),
], ids=str)  # fmt: skip
def test_tokens_without_a_tokenizer_end_where_their_documents_do(tmp_path, settings, eos):
    """Else at the zoo's own token, if the vocabulary has it."""
    zoo = {"model": {"name": "llama3-8b", "vocab_size": 320, **SMALL}}
    out = run(tmp_path / "out", zoo, data(tmp_path, "tokens", **settings))
    config = json.loads((out / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, eos)


def test_an_eos_of_ones_own_is_not_replaced_in_silence(tmp_path):
    text = data(tmp_path, "text")
    zoo = {"name": "llama3-8b", "vocab_size": 258, **SMALL}
    with pytest.raises(InputError, match=r"model.eos_token_id=5, but data.tokenizer=bytes has 257"):
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
    run(tmp_path / "trained", {"model": {"name": "llama3-8b-tiny", "num_layers": 1}}, data(tmp_path, "text"))
    old_model(tmp_path / "saved")
    save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=1)), tmp_path / "saved")
    old_model(tmp_path / "merged")
    merge.main([*save_with_adapter(tmp_path), "--out", str(tmp_path / "merged")])
    for folder in ("trained", "saved", "merged"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / folder).generation_config
        assert theirs.eos_token_id == 257 and theirs.top_k in (None, 50)


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
    with pytest.raises(InputError, match=r"a holds a tokenizer.json, which is not this model's"):
        merge.main([*save_with_adapter(tmp_path), "--out", str(tmp_path / "a")])
    old_model(tmp_path / "b")
    with pytest.raises(InputError, match=r"b holds a model, which adapters beside it do not belong to"):
        run(tmp_path / "b", small, {"task": "lora"}, data(tmp_path, "jsonl"))
