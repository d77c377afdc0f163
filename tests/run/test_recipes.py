"""The recipes of configs/train that name a downloaded model, at toy size: each runs as its head says.

A tiny twin with random weights and a tokenizer of bytes stand for the download; only sizes, paths and types change.
"""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from minitrain import save_pretrained, train
from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.data.video.latents import save_video
from minitrain.models.decoder import Decoder
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from tests.helpers.commands import ROOT
from tests.helpers.recipes import SHORT_ANSWER

FOLDER = ROOT / "configs/train"
CHAT = {"messages": [{"role": "user", "content": "1+%d?"}, {"role": "assistant", "content": "2"}]}
LINES = {
    "chats.jsonl": CHAT,
    "texts.jsonl": {"text": "Document %d of a few words."},
    "pairs.jsonl": {"prompt": "1+%d?", "chosen": "2", "rejected": "Two."},
    "problems.jsonl": {"question": "How much is 1 + %d?", "answer": "Sum. #### 2"},
}
SMALL = [
    "device=cpu",
    "precision=fp32",
    "compile=false",
    "steps=2",
    "optim.warmup=1",
    "checkpoint.asynchronous=false",
]
LANGUAGE = ["batch.global=8", "batch.micro=2", "batch.seq_len=64", "validation.batches=1"]
RECIPES = {
    "sft-chats": [],
    "lora-8b-24gb": [],
    "dpo": ["epochs=0"],
    "reward-model": ["epochs=0"],
    "full-8b-8gpu": [],
    "full-8b-80gb": [],
    # in the tests' fp32 there is nothing to round
    "full-1b-12gb": ["optim.stochastic_rounding=false"],
    "pretrain-tokens": [
        "model={name: llama3.1-8b-tiny, vocab_size: 258}",
        "data.document_end=257",
        "data.validation=0.2",
    ],
    "pretrain-mixed": ["model={name: llama3.1-8b-tiny, vocab_size: 258}", "data.validation=0.2"],
    "pretrain-muon": [
        "model={name: llama3.1-8b-tiny, vocab_size: 258}",
        "data.document_end=257",
        "data.validation=0.2",
    ],
    "continued-pretraining": ["data.validation=0.2"],
    "grpo-gsm8k": [
        "grpo.prompts=4",
        "grpo.group=2",
        "rollout.max_tokens=4",
        "rollout.compile=false",
        "data.validation=0.2",
    ],
    "grpo-own-reward": [
        "grpo.prompts=4",
        "grpo.group=2",
        "rollout.max_tokens=4",
        "rollout.compile=false",
    ],
    "wan-lora": ["batch.micro=2", "batch.seq_len=16"],
}
ADAPTERS = {"dpo", "reward-model", "lora-8b-24gb", "grpo-own-reward", "wan-lora"}


@pytest.fixture
def downloads(tmp_path, monkeypatch) -> Path:
    """A folder with what the heads of the recipes download or make."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    for name in (
        "qwen2.5-7b-instruct",
        "llama3.1-8b-instruct",
        "llama3.1-8b",
        "llama3.2-1b-instruct",
    ):
        twin = "qwen2.5-7b-tiny" if name.startswith("qwen") else "llama3.1-8b-tiny"
        ids = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 257}
        save_pretrained(Decoder(model_config(twin, **ids)), f"models/{name}")
        ByteTokenizer().save(f"models/{name}")
    for name, line in LINES.items():
        Path(name).write_text("".join(f"{json.dumps(line)}\n" % number for number in range(60)))
    Path("short_answer.py").write_text(SHORT_ANSWER)
    save_pretrained(Wan(model_config("wan2.1-1.3b-tiny")), "models/wan2.1-1.3b/transformer")
    os.mkdir("latents")
    for i in range(8):
        save_video(f"latents/{i}.safetensors", torch.randn(16, 2, 4, 8), torch.randn(3, 64))
    for name, key in (("web", "text"), ("code", "content")):
        os.mkdir(name)
        lines = (json.dumps({key: f"{name} {number}"}) + "\n" for number in range(60))
        Path(name, "a.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    os.mkdir("tokens")
    np.save("tokens/0.npy", np.arange(20_000, dtype=np.uint16) % 251)
    return tmp_path


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_as_its_head_says(downloads, name):
    config = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    words = [*SMALL, *(LANGUAGE if name != "wan-lora" else []), *RECIPES[name]]
    train.main(["--config", str(FOLDER / f"{name}.yaml"), *words])
    out = downloads / config["out_dir"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert any(key.startswith("val") for key in lines[-1])
    assert (
        out / ("adapter_model.safetensors" if name in ADAPTERS else "model.safetensors")
    ).exists()
