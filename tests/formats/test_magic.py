"""Folders and files of models that are something else than what was asked for: each is told as what it is."""

import json
from pathlib import Path

import peft
import pytest
from transformers import LlamaConfig

from minitrain.data.tokenizer import load_tokenizer
from minitrain.errors import InputError
from minitrain.formats.hf import read_config
from minitrain.formats.peft import read_adapter_config
from minitrain.formats.tensor_files import open_tensors
from minitrain.run.config.load import from_dict
from tests.helpers.commands import command

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def told(function, *arguments) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def folder_of(path: Path, **files) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def test_adapters_as_a_model_and_a_model_as_adapters(tmp_path):
    """As peft and transformers save them."""
    adapter, model = tmp_path / "adapter", tmp_path / "model"
    peft.LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(adapter)
    LlamaConfig().save_pretrained(model)
    expected = (
        f"{adapter} holds no config.json; it is an adapter (give it as --adapter, or as lora.path"
    )
    assert told(read_config, adapter).startswith(expected)
    assert told(from_dict, {"model": str(adapter)}).startswith(expected)
    expected = f"{model} holds no adapter_config.json; it is a model (give it as the model"
    assert told(read_adapter_config, model).startswith(expected)
    assert told(from_dict, {"lora": {"path": str(model)}}).startswith(expected)
    done = command("-m", "minitrain.generate", "--model", adapter, "--prompt", "x")
    assert done.returncode == 2 and "it is an adapter (give it as --adapter" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "name, settings",
    [
        ("IA3", peft.IA3Config(target_modules=["k"], feedforward_modules=[])),
        ("PROMPT_TUNING", peft.PromptTuningConfig()),
        ("LOHA", peft.LoHaConfig()),
        ("OFT", peft.OFTConfig()),
        ("VERA", peft.VeraConfig()),
        (
            "adapters of mlx-lm",
            {"fine_tune_type": "lora", "lora_parameters": {"rank": 8}, "num_layers": 16},
        ),
        (
            "adapters of the library adapters",
            {"config": {"architecture": "lora", "r": 8}, "model_type": "llama"},
        ),
    ],
)
def test_adapters_of_other_kinds_and_libraries(tmp_path, name, settings):
    if isinstance(settings, dict):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    else:
        settings.save_pretrained(tmp_path)
    assert f"only plain LoRA is supported, not {name}" in told(read_adapter_config, tmp_path)


@pytest.mark.parametrize(
    "files, what",
    [
        ({"snapshots": ""}, "it is a folder of the hub's cache"),
        ({"metrics__jsonl": "", "config__yaml": ""}, "it is a run that has not ended"),
        ({"model__gguf": ""}, "it is model.gguf, which is not read"),
        ({"adapter_0__pt": ""}, "it is adapter_0.pt, which is not read"),
        (
            {"config__json__incomplete": ""},
            "it is config.json.incomplete, an unfinished download",
        ),
        ({"README__md": ""}, "holds no config.json"),
    ],
)
def test_folders_that_are_no_models(tmp_path, files, what):
    folder = folder_of(tmp_path / "a", **files)
    assert told(read_config, folder).startswith(
        f"{folder} holds no config.json"
    ) and what in told(read_config, folder)
    assert told(read_adapter_config, folder).startswith(f"{folder} holds no adapter_config.json")


def test_pointers_and_cut_files_of_models(tmp_path):
    names = {"config__json": POINTER, "tokenizer__json": POINTER, "model__safetensors": POINTER}
    folder = folder_of(tmp_path / "a", **names)
    weights = folder / "model.safetensors"
    for function, path in (
        (read_config, folder),
        (load_tokenizer, folder),
        (open_tensors, weights),
    ):
        assert "is a pointer of git-lfs, not the file itself (git lfs pull)" in told(
            function, path
        )
    weights.write_bytes((99).to_bytes(8, "little") + b'{"a": {"dtype": "F32", ')
    assert told(open_tensors, weights).endswith("(is the download whole?)")
