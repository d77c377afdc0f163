"""Models that transformers does not know: trained, exported with our own fields, and read back to the bit."""

import dataclasses
import json
import re

import pytest
import torch

from minitrain import InputError, Sampler, SamplingParams, load_pretrained, save_pretrained, train
from minitrain.data.tokenizer import ByteTokenizer
from minitrain.formats.config_hf import export_fault
from minitrain.formats.hf import read_config, save_tensors
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.run.tasks.exports import export
from minitrain.run.tasks.initial_weights import make_trainer
from tests.helpers.commands import command
from tests.helpers.hf_models import edit_json

# a router that Qwen 3's config.json has no word for
MODEL = {
    "name": "qwen3-30b-a3b-tiny",
    "num_layers": 2,
    "vocab_size": 258,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
}
TREE = {
    "model": MODEL,
    "data": {"kind": "text", "path": "{stdlib}/this.py"},
    "batch": {"global": 2, "micro": 2, "seq_len": 32},
    "steps": 2,
    "device": "cpu",
    "compile": False,
}
FAULT = (
    r"model.scoring_func='sigmoid' cannot be saved as Qwen3MoeForCausalLM \(must be 'softmax'\)"
)
OTHERS = {
    "llama3-8b": dict(qk_norm=True),
    "mixtral-8x7b": dict(num_experts=0, moe_intermediate_size=0),
    "deepseek-v3": dict(num_experts=0),
    "gpt-oss-20b": dict(sliding_window=0),
    "gpt3-175b": dict(position_embedding="rotary", num_key_value_heads=2, rope_theta=500.0),
    "nemotron3-nano-30b-a3b": dict(layer_pattern="", tie_word_embeddings=True),
}


def random_model(config, seed=0):
    torch.manual_seed(seed)
    model = Decoder(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
    return model


def logits(model, vocab=258):
    tokens = torch.randint(vocab, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(tokens)


@pytest.fixture
def exported(tmp_path):
    """The model after two steps, and the folder of its export."""
    config = from_dict(TREE | {"out_dir": str(tmp_path / "out")})
    trainer = make_trainer(config, start(config))
    rows = [torch.arange(33) % 258, torch.arange(33) * 7 % 258]
    data = type(
        "Rows", (), {"row": lambda self, n: dict(tokens=rows[n % 2][:-1], labels=rows[n % 2][1:])}
    )
    for step in range(2):
        trainer.step(data(), step)
    folder = tmp_path / "exported"
    folder.mkdir()
    export(trainer, config, folder)
    return trainer.model, folder


def test_what_was_trained_is_loaded(exported):
    model, folder = exported
    raw = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == "minitrain" and raw["scoring_func"] == "sigmoid"
    again = load_pretrained(folder)
    assert torch.equal(logits(again), logits(model))
    # model.path goes on from it
    config = from_dict(TREE | {"model": str(folder), "out_dir": str(folder / "next")})
    assert config.model.config == again.config and not export_fault(again.config)
    tokens = Sampler(again).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    expected = [1, 2, 3]
    for _ in range(len(tokens[0].tokens)):
        with torch.no_grad():
            expected.append(int(again(torch.tensor([expected]))[0, -1].argmax()))
    assert tokens[0].tokens == expected[3:]


def test_adapters_of_it_are_trained_generated_with_and_merged(exported, tmp_path):
    _, folder = exported
    words = ["task=lora", "data.kind=mock", "data.path=", "steps=1", "lora.rank=2"]
    (tmp_path / "run.yaml").write_text(json.dumps(TREE))
    words += [f"model={folder}", f"out_dir={tmp_path / 'adapters'}"]
    train.main(["--config", str(tmp_path / "run.yaml"), *words])
    ByteTokenizer().save(folder)
    both = ["--model", folder, "--adapter", tmp_path / "adapters"]
    said = command("-m", "minitrain.generate", *both, "--prompt", "x", "--max-tokens", "2")
    assert said.returncode == 0, said.stderr
    merged = command("-m", "minitrain.merge", *both, "--out", tmp_path / "merged")
    assert merged.returncode == 0, merged.stderr
    assert read_config(tmp_path / "merged").family == "minitrain"
    assert (
        load_pretrained(tmp_path / "merged").state_dict().keys()
        == load_pretrained(folder).state_dict().keys()
    )


def test_a_run_says_so_once_and_others_are_simulated(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(TREE | {"out_dir": str(tmp_path / "out")}))
    train.main(["--config", str(file)])
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("cannot be saved as Qwen3MoeForCausalLM") == 1
    assert load_pretrained(tmp_path / "out").config.scoring_func == "sigmoid"
    words = ("precision=bf16", "data.kind=mock", "data.path=", "--config", file)
    for mode in ("--dry-run", "--simulate"):
        done = command("bench.py", mode, *words)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", OTHERS)
def test_every_field_and_tensor_survives(name, tmp_path):
    config = model_config(f"{name}-tiny", **OTHERS[name])
    if name == "nemotron3-nano-30b-a3b":
        config = dataclasses.replace(config, extra_config={"pad_token_id": 3})
    model = random_model(config)
    with pytest.raises(InputError, match="cannot be saved as"):
        save_pretrained(model, tmp_path)
    save_tensors(model.state_dict().items(), config, torch.float32, tmp_path)
    again = load_pretrained(tmp_path)
    assert again.config == dataclasses.replace(config, family="minitrain")
    assert again.config.extra_config == config.extra_config
    assert all(torch.equal(x, again.state_dict()[key]) for key, x in model.state_dict().items())
    assert torch.equal(logits(again), logits(model))
    save_pretrained(again, tmp_path / "copy")
    assert read_config(tmp_path / "copy") == again.config


def test_faults_are_those_of_transformers_config():
    assert export_fault(model_config("llama3-8b-tiny")) == ""
    assert re.fullmatch(FAULT, export_fault(model_config(**MODEL)))
    for name, changes in OTHERS.items():
        assert " cannot be saved as " in export_fault(model_config(f"{name}-tiny", **changes))
    with pytest.raises(InputError, match="model.family='foo' cannot be saved .known: llama"):
        from_dict(TREE | {"model": MODEL | {"family": "foo"}})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scoring": "x"}, "key scoring is no field of a model"),
        ({"scoring_func": 3}, "scoring_func=3 must be a text"),
        ({"scoring_func": "tanh"}, "scoring_func='tanh' is not one of softmax, sigmoid"),
        ({"hidden_size": "wide"}, "hidden_size='wide' must be a whole number"),
        ({"qk_norm": 1}, "qk_norm=1 must be true or false"),
        ({"rope_scaling": []}, r"rope_scaling=\[\] must be an object"),
        ({"eos_token_id": "x"}, "eos_token_id='x' must be a token id"),
        ({"architectures": ["LlamaForCausalLM"]}, "model_type='minitrain' contradicts"),
    ],
)
def test_wrong_values_are_named(change, message, tmp_path):
    config = model_config("llama3-8b-tiny", family="minitrain")
    save_tensors(random_model(config).state_dict().items(), config, torch.float32, tmp_path)
    edit_json(tmp_path / "config.json", **change)
    with pytest.raises(InputError, match=message):
        read_config(tmp_path)
