"""Write tokenizers with chat templates, and models with adapters; find published templates."""

# ruff: noqa: RUF001 (DeepSeek's tokens)

import json
import re
from pathlib import Path

import pytest
import torch
import trl
from transformers import AutoTokenizer

from minitrain import save_pretrained
from minitrain.data.tokenizer import ByteTokenizer, load_tokenizer
from minitrain.formats.peft import adapter_shapes, save_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.settings import Lora


def tokenizer_with(folder: Path, jinja: str | list, specials: list[str]):
    """Write a byte tokenizer with further special tokens and a chat template; load it as ours and theirs."""
    ByteTokenizer().save(folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    flags = {
        key: value
        for key, value in tree["added_tokens"][0].items()
        if key not in ("id", "content")
    }
    tree["added_tokens"] += [
        {"id": 258 + i, "content": token, **flags} for i, token in enumerate(specials)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": jinja}))
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


def save_with_adapter(folder: Path, **fields) -> list[str]:
    """Write a model, and adapters of zeros for it; return the command-line options that name them."""
    model = Decoder(model_config("llama3-8b-tiny", vocab_size=320, **fields))
    lora = Lora(rank=2, targets=["q_proj"])
    save_pretrained(model, folder / "model")
    zeros = (
        (name, torch.zeros(shape)) for name, shape in adapter_shapes(model.config, lora).items()
    )
    save_adapter(zeros, model.config, lora, folder / "adapter")
    return ["--model", str(folder / "model"), "--adapter", str(folder / "adapter")]


def published(name: str) -> str:
    """Return a family's chat template, as TRL has it."""
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not file.exists():
        pytest.skip(f"this version of TRL has no {file.name}")
    return file.read_text()


def specials_in(jinja: str) -> list[str]:
    """Return the special tokens that a template names."""
    named = r"<[|｜][^|｜>\s']+[|｜]>|</?(?:think|start_of_turn|end_of_turn)>"
    return ["<s>", "</s>", *sorted(set(re.findall(named, jinja)))]
