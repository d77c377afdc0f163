"""data.validation_path: what is held out are the rows of other files, and none of data.path's is left out."""

import json

import numpy as np
import pytest
import torch

from minitrain.data.chat.problems import open_problems
from minitrain.data.datasets import open_dataset
from minitrain.data.video.latents import save_video
from minitrain.run.config.load import from_dict


def write(kind: str, folder) -> None:
    folder.mkdir()
    random = np.random.default_rng(len(folder.name))
    for i in range(3):
        words = " ".join(map(str, random.integers(100, size=60)))
        if kind == "text":
            (folder / f"{i}.txt").write_text(words)
        elif kind == "tokens":
            np.save(folder / f"{i}.npy", random.integers(258, size=200).astype(np.uint16))
        elif kind == "latents":
            save_video(folder / f"{i}.safetensors", torch.randn(16, 1, 4, 4), torch.randn(3, 64))
        else:
            line = json.dumps({"question": words[:20], "answer": words[:9]}) + "\n"
            (folder / f"{i}.jsonl").write_text(line)


@pytest.mark.parametrize(
    "task, kind",
    [
        ("pretrain", "text"),
        ("pretrain", "tokens"),
        ("sft", "jsonl"),
        ("diffusion", "latents"),
        ("grpo", "jsonl"),
    ],
)
def test_rows_are_those_of_other_files(tmp_path, task, kind):
    for name in ("train", "held"):
        write(kind, tmp_path / name)
    model = {"name": "wan2.1-1.3b-tiny" if task == "diffusion" else "llama3-8b-tiny"}
    tree = {
        "task": task,
        "model": model,
        "batch": {"global": 2, "micro": 1, "seq_len": 96},
        "validation": {"every": 1},
    }
    tree |= {"grpo": {"prompts": 1, "group": 2}, "rollout": {"max_tokens": 5}}

    def opened(path, **more):
        config = from_dict(
            tree | {"data": {"kind": kind, "path": str(tmp_path / path), "text_tokens": 3} | more}
        )
        return (open_problems if task == "grpo" else open_dataset)(config)

    def row(rows, n):
        return rows.problems[n]._asdict() if task == "grpo" else rows.row(n)

    train, held = opened("train", validation=0.5, validation_path=str(tmp_path / "held"))[:2]
    tree["validation"] = {}
    expected = opened("held")[1 if task == "diffusion" else 0]
    assert len(held) == len(expected)
    for found, wanted in ((held, expected), (train, opened("train")[0])):
        for n in range(2):
            a, b = row(found, n), row(wanted, n)
            assert a.keys() == b.keys()
            for key in a:
                same = (
                    torch.equal(a[key], b[key])
                    if isinstance(a[key], torch.Tensor)
                    else a[key] == b[key]
                )
                assert same, key
