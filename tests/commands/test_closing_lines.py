"""Every command says what it wrote, which is there, and what to do next."""

import json
import re

import pytest
import torch

from minitrain import save_pretrained
from minitrain.__main__ import COMMANDS, dispatch
from minitrain.data.byte_tokenizer import ByteTokenizer
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from tests.helpers.videos import write_pipeline

CHAT = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
NEXT = r"^next\b.*(minitrain|open)|\bopen it|makes a page of it"


@pytest.mark.parametrize("videos", [False, True])
def test_every_command_says_what_it_wrote_and_what_is_next(tmp_path, monkeypatch, capsys, videos):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    (tmp_path / "texts").mkdir()
    ByteTokenizer().save("tok")
    for number in range(6):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"a line of some text {number}\n" * 20)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(CHAT) + "\n" for _ in range(4)))
    (tmp_path / "empty.yaml").write_text("")
    size = "batch.global=2 batch.micro=2 batch.seq_len=32 steps=2 checkpoint.every=1 device=cpu"
    model = "model={name:llama3-8b-tiny,vocab_size:258,num_layers:1}".replace(":", ": ")
    tokens = "data.kind=tokens data.path=tokens data.tokenizer=tok data.document_end=257"
    chats = (
        "task=lora data.kind=jsonl data.path=chats.jsonl data.tokenizer=tok model=run lora.rank=2"
    )
    train = ["train", "--config", "empty.yaml", *size.split()]
    ends = [
        (
            "tokens",
            ["tokenize", "--tokenizer", "tok", "--out", "tokens", "--processes", "1", "texts"],
        ),
        ("run", [*train, model, *tokens.split(), "out_dir=run"]),
        ("run/curves.svg", ["curves", "run"]),
        ("half", ["export", "--run", "run", "--step", "1", "--out", "half"]),
        (None, ["evaluate", "--model", "half", "--device", "cpu", "texts/0.txt"]),
        (
            "answers.jsonl",
            [
                "generate",
                "--model",
                "run",
                "--prompts",
                "texts/0.txt",
                "--out",
                "answers.jsonl",
                "--max-tokens",
                "1",
                "--device",
                "cpu",
            ],
        ),
        ("random", [*train, model, "out_dir=random"]),  # a model without a tokenizer
        ("late", ["export", "--run", "random", "--out", "late"]),
        ("lora", [*train, *chats.split(), "out_dir=lora"]),
        (
            None,
            [
                "evaluate",
                "--model",
                "run",
                "--adapter",
                "lora",
                "--chat",
                "--device",
                "cpu",
                "chats.jsonl",
            ],
        ),
        ("merged", ["merge", "--model", "run", "--adapter", "lora", "--out", "merged"]),
        (
            "r.json",
            [
                "bench",
                "--config",
                "empty.yaml",
                model,
                *size.split()[:3],
                "device=cpu",
                "--steps",
                "1",
                "--warmup",
                "0",
                "--json",
                "r.json",
            ],
        ),
    ]
    if videos:
        encoders = str(write_pipeline(tmp_path / "wan"))
        save_pretrained(
            Wan(model_config("wan2.1-1.3b-tiny", num_layers=1, in_channels=8, out_channels=8)),
            "shapes",
        )
        draw = ["generate", "--task", "diffusion", "--device", "cpu", "--steps", "1", "--model"]
        ends = [
            (
                "latents",
                [
                    "encode-video",
                    "--encoders",
                    encoders,
                    "--out",
                    "latents",
                    "--size",
                    "32",
                    "48",
                    "--device",
                    "cpu",
                    f"{encoders}/videos",
                ],
            ),
            ("sheet.png", [*draw, "shapes", "--prompts", "shapes", "--out", "sheet.png"]),
        ]
    for path, words in ends:
        dispatch(words)
        streams = [text.strip().replace(" \\\n", "").splitlines() for text in capsys.readouterr()]
        assert path is None or (tmp_path / path).exists(), words
        assert path is None or any(path in line for said in streams for line in said[-8:]), words
        last = [said[-1] for said in streams if said]
        assert any(re.search(NEXT, line) for line in last), (words, last)
        if " curves " in last[0]:  # which works as it stands
            dispatch(last[0].split(" minitrain ")[1].split())
            capsys.readouterr()
        if words[0] == "evaluate":
            adapter, chat = (" --adapter lora", " --chat") if "--chat" in words else ("", "")
            assert (
                last[0]
                == f"next: minitrain generate --model {words[2]}{adapter}{chat} --prompt TEXT"
            )
    if not videos:
        assert {words[0] for _, words in ends} == {*COMMANDS} - {"encode-video"}
