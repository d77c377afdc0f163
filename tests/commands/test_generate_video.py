"""The command line that generates latents: what it writes, prints and refuses."""

import os
from itertools import pairwise

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from minitrain import generate, load_pretrained, save_pretrained
from minitrain.commands.generate_video import generate as draw
from minitrain.errors import InputError
from minitrain.formats.peft import save_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from minitrain.rollout.flow_sampling import sigma_schedule
from minitrain.run.launch import cli
from minitrain.settings import Lora
from tests.helpers.checkpoints import files_up_to


def save_model(folder, **overrides) -> Wan:
    torch.manual_seed(0)
    model = Wan(model_config("wan2.1-1.3b-tiny", num_layers=1, **overrides))
    save_pretrained(model, folder)
    return model


def main(words: list[str]) -> None:
    generate.main(["--task", "diffusion", *words])


def run(folder, *words: str) -> None:
    prompts = [] if "--prompts" in words else ["--prompts", str(folder / "prompts")]
    out = str(folder / "out")
    main(["--model", str(folder), *prompts, "--out", out, "--device", "cpu", *words])


@pytest.mark.parametrize("negatives", [0, 1, 2])
def test_latents_are_eulers_of_the_model_with_padded_text(tmp_path, negatives):
    """Image-to-video, so that everything is used; two steps, by hand."""
    model = save_model(tmp_path, in_channels=19, image_dim=6)
    prompts = {
        "text": torch.randn(2, 3, 64),
        "condition": torch.randn(2, 3, 1, 4, 4),
        "image": torch.randn(2, 5, 6),
    }
    hide = torch.zeros(2, 7, 64)
    if negatives:
        prompts["negative"] = torch.randn(negatives, 5, 64)
        hide[:, :5] = prompts["negative"]
    save_file(prompts, tmp_path / "prompts")
    run(
        tmp_path,
        "--size",
        "1",
        "4",
        "4",
        "--sampler",
        "euler",
        "--steps",
        "2",
        "--shift",
        "3",
        "--guidance",
        "2.5",
        "--text-tokens",
        "7",
        "--seed",
        "4",
    )
    x = torch.randn(2, 16, 1, 4, 4, generator=torch.Generator().manual_seed(4))
    text = torch.cat([prompts["text"], torch.zeros(2, 4, 64)], dim=1)
    sigmas = sigma_schedule(2, 3.0)
    with torch.no_grad():
        for now, after in pairwise(sigmas):
            noisy, timestep = (
                torch.cat([x, prompts["condition"]], dim=1),
                torch.full((2,), 1000 * now),
            )
            given, hidden = (
                model(noisy, timestep, each, prompts["image"]) for each in (text, hide)
            )
            x = x + (after - now) * (hidden + 2.5 * (given - hidden))
    torch.testing.assert_close(load_file(tmp_path / "out")["latents"], x, atol=1e-4, rtol=1e-4)


def test_weights_in_bf16_and_adapters(tmp_path):
    """As the model that is loaded so computes, and the adapted one: alpha is twice the rank."""
    model = save_model(tmp_path)
    adapted = load_pretrained(tmp_path)
    lora = Lora(rank=2, alpha=4, targets=["to_q", "ffn.net.2"])
    add_adapters(adapted, lora)
    adapters = {name: p for name, p in adapted.named_parameters() if is_adapter(name)}
    for p in adapters.values():
        torch.nn.init.normal_(p, std=0.5)
    save_adapter(adapters.items(), adapted.config, lora, tmp_path / "adapter")
    prompts = {"text": torch.randn(1, 3, 64)}
    save_file(prompts, tmp_path / "prompts")
    way = dict(sampler="euler", steps=2, shift=3.0, guidance=1.0)
    words = ["--size", "1", "4", "4", "--text-tokens", "3"]
    words += [word for name, value in way.items() for word in (f"--{name}", str(value))]
    bf16 = load_pretrained(tmp_path, torch.bfloat16)
    cases = [
        ([], model),
        (["--dtype", "bf16"], bf16),
        (["--adapter", str(tmp_path / "adapter")], adapted),
    ]
    found = []
    for more, expected in cases:
        run(tmp_path, *words, *more)
        found.append(load_file(tmp_path / "out")["latents"])
        with torch.no_grad():
            torch.testing.assert_close(
                found[-1], draw(expected, prompts, [1, 4, 4], **way), atol=1e-5, rtol=1e-5
            )
    assert 1e-4 < (found[1] - found[0]).abs().max() < 0.1 < (found[2] - found[0]).abs().max()


def test_shapes_end_in_a_picture_and_a_score(tmp_path, capsys):
    save_model(tmp_path, in_channels=8, out_channels=8)
    main(
        [
            "--model",
            str(tmp_path),
            "--prompts",
            "shapes",
            "--out",
            str(tmp_path / "out.png"),
            "--steps",
            "2",
            "--device",
            "cpu",
            "--seed",
            "9" * 30,
        ]
    )
    assert Image.open(tmp_path / "out.png").size == (1040, 640)
    assert Image.open(tmp_path / "out.apng").n_frames == 4
    printed = capsys.readouterr().out
    assert "out.png: right in color " in printed and printed.count("%") == 3


@pytest.mark.parametrize(
    "tensors, words, message",
    [
        ({"text": torch.zeros(1, 3, 64)}, ["--guidance", "1"], "--size is missing"),
        (
            {"text": torch.zeros(3, 64)},
            ["--size", "1", "4", "4"],
            "must hold a tensor `text` [videos, tokens, text_dim]",
        ),
        ({"text": torch.zeros(0, 3, 64)}, ["--size", "1", "4", "4"], "of one video at least"),
        (
            {"text": torch.full((1, 3, 64), torch.nan)},
            ["--size", "1", "4", "4"],
            "prompts: tensor text holds values that are not finite",
        ),
        (
            {"text": torch.zeros(1, 3, 64).long()},
            ["--size", "1", "4", "4"],
            "prompts: tensor text is stored as I64, not one of F64, F32, F16, BF16",
        ),
        (
            {"text": torch.zeros(1, 3, 64)},
            ["--prompts", "shapes"],
            "latents have 8 channels, the model's 16",
        ),
        (
            {"text": torch.zeros(1, 3, 60)},
            ["--size", "1", "4", "4"],
            "60], the model takes [1, tokens, 64]",
        ),
        (
            {"text": torch.zeros(1, 9, 64)},
            ["--size", "1", "4", "4", "--text-tokens", "8"],
            "more than --text-tokens 8",
        ),
        (
            {"text": torch.zeros(1, 3, 64), "negative": torch.zeros(1, 9, 64)},
            ["--size", "1", "4", "4", "--text-tokens", "8"],
            "negative has 9 tokens, more than --text-tokens 8",
        ),
        (
            {"text": torch.zeros(3, 3, 64), "negative": torch.zeros(2, 3, 64)},
            ["--size", "1", "4", "4"],
            "negative is [2, 512, 64], the model takes [3, tokens, 64]",
        ),
        (
            {"text": torch.zeros(1, 3, 64), "negative": torch.tensor(0.0)},
            ["--size", "1", "4", "4"],
            "negative is none, the model takes [1, tokens, 64]",
        ),
        (
            {"text": torch.zeros(1, 3, 64), "condition": torch.zeros(1, 3, 1, 4, 4)},
            ["--size", "1", "4", "4"],
            "condition is [1, 3, 1, 4, 4], the model takes none",
        ),
        (
            {"text": torch.zeros(1, 3, 64)},
            ["--size", "1", "5", "4"],
            "do not divide into patches",
        ),
        (
            {"text": torch.zeros(1, 3, 64)},
            ["--size", "1", "4", "4", "--shift", "1e6"],
            "from pure noise (use euler, or",
        ),
        (
            {"text": torch.randn(1, 3, 64)},
            ["--size", "1", "4", "4", "--guidance", "1e38"],
            "the latents are not finite",
        ),
        (
            {"text": torch.zeros(1, 3, 64)},
            ["--size", "1", "4", "9" * 30],
            "must be above 0, and at most 1,048,576",
        ),
        (
            {"text": torch.zeros(1, 3, 64)},
            ["--steps", "9" * 30],
            "must be above 0, and at most 1,048,576",
        ),
        (
            {"text": torch.zeros(1, 3, 64)},
            ["--text-tokens", "9" * 30],
            "must be above 0, and at most 1,048,576",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes(tmp_path, tensors, words, message):
    save_model(tmp_path)
    save_file(tensors, tmp_path / "prompts")
    with pytest.raises(InputError) as error:
        run(tmp_path, *words)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"condition": torch.zeros(2, 3, 1, 4, 6)},
            "is [2, 3, 1, 4, 6], the model takes [2, 3, 1, 4, 4]",
        ),
        (
            {"condition": torch.zeros(1, 3, 1, 4, 4)},
            "is [1, 3, 1, 4, 4], the model takes [2, 3, 1, 4, 4]",
        ),
        ({"condition": None}, "condition is none, the model takes"),
        ({"image": torch.zeros(2, 5, 7)}, "image is [2, 5, 7], the model takes [2, tokens, 6]"),
        ({"image": torch.zeros(5, 6)}, "image is [5, 6], the model takes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_with_images(tmp_path, changes, message):
    save_model(tmp_path, in_channels=19, image_dim=6)
    good = {
        "text": torch.zeros(2, 3, 64),
        "condition": torch.zeros(2, 3, 1, 4, 4),
        "image": torch.zeros(2, 5, 6),
    }
    save_file(
        {key: x for key, x in (good | changes).items() if x is not None}, tmp_path / "prompts"
    )
    with pytest.raises(InputError) as error:
        run(tmp_path, "--size", "1", "4", "4")
    assert message in str(error.value)


@pytest.mark.parametrize("size", ["100000", "1048576"])
def test_more_memory_than_there_is_is_one_line(tmp_path, size):
    save_model(tmp_path)
    save_file({"text": torch.zeros(1, 3, 64)}, tmp_path / "prompts")
    with pytest.raises(RuntimeError) as error:
        run(tmp_path, "--size", *[size] * 3)
    assert cli.in_one_line(error.value).startswith("rank 0 is out of memory")


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(
        InputError, match="--out .*/nowhere/out: the folder .*/nowhere does not exist"
    ):
        main(["--model", str(tmp_path), "--prompts", "x", "--out", str(tmp_path / "nowhere/out")])


def test_a_place_that_is_taken_and_a_disk_that_is_full(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # a device too would become a file
    for taken in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match="--out .* is a folder or a device"):
            main(["--model", "nowhere", "--prompts", "x", "--out", str(taken)])
    save_model(tmp_path)
    save_file({"text": torch.zeros(1, 3, 64)}, tmp_path / "prompts")
    with (
        files_up_to(100),
        pytest.raises(InputError, match="out cannot be written: .*File too large"),
    ):
        run(tmp_path, "--size", "1", "4", "4", "--steps", "1")


def test_a_language_model_is_refused(tmp_path):
    save_pretrained(Decoder(model_config("llama3-8b-tiny", num_layers=1)), tmp_path)
    with pytest.raises(InputError, match="--prompts .*prompts is neither a file nor shapes"):
        run(tmp_path)
    (tmp_path / "prompts").touch()
    with pytest.raises(InputError, match="is not a Wan model"):
        run(tmp_path, "--size", "1", "4", "4")
    with files_up_to(0), pytest.raises(InputError, match="--out=/proc/out cannot be written: "):
        main(["--model", "nowhere", "--prompts", "x", "--out", "/proc/out"])


def test_texts_are_not_asked_of_a_diffusion_model(tmp_path):
    save_model(tmp_path)
    with pytest.raises(
        InputError, match=r"--model .* is a diffusion model, which needs --task diffusion"
    ):
        generate.main(["--model", str(tmp_path), "--prompt", "a"])
