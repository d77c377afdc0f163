"""Diffusion from a config to files: what is refused, what a run writes, resumes and validates on, and its memory."""

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from safetensors.torch import load_file, save_file

from minitrain import generate, load_pretrained, merge, save_pretrained, train
from minitrain.bench.measure import activation_bytes
from minitrain.data.datasets import open_dataset
from minitrain.data.video.latents import save_video
from minitrain.errors import InputError
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict, load, to_dict
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.simulator.dry_run import announce_memory, estimate_memory
from tests.helpers.commands import ROOT

TREE = {
    "task": "diffusion",
    "device": "cpu",
    "model": "wan2.1-1.3b-tiny",
    "data": {"size": [2, 4, 8], "text_tokens": 6},
    "batch": {"global": 4, "micro": 2, "seq_len": 16},
}


def with_settings(**settings) -> dict:
    nested = {
        key: TREE.get(key, {}) | value if isinstance(value, dict) else value
        for key, value in settings.items()
    }
    return TREE | nested


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"task": "pretrain"}, "model='wan2.1-1.3b-tiny' is for task=diffusion alone"),
        (
            {"model": "llama3-8b-tiny"},
            "model='llama3-8b-tiny' is not a diffusion model, as task=diffusion needs",
        ),
        ({"data": {"kind": "text", "path": "x"}}, "data.kind=text holds no videos"),
        ({"data": {"kind": "latents"}}, "data.kind=latents needs data.path"),
        ({"data": {"size": [2, 4]}}, "data.size=[2, 4] must be frames, height and width"),
        ({"data": {"size": [2, 5, 8]}}, "which patches of [1, 2, 2] divide"),
        (
            {"batch": {"seq_len": 32}},
            "batch.seq_len=32 is not the number of patches of data.size=[2, 4, 8], 16",
        ),
        ({"parallel": {"pp": 2}}, "parallel.pp=2 is not for diffusion"),
        (
            {"data": {"size": [-2, -4, 8]}},
            "data.size=[-2, -4, 8] must be frames, height and width",
        ),
        (
            {"data": {"packed": True}},
            "data.packed=true is for task=sft, lora, dpo, reward, not for task=diffusion",
        ),
        (
            {"parallel": {"cp": 2, "tp": 4, "context": "ulysses"}},
            "tp=4 x cp=2 with context=ulysses does not divide num_a",
        ),
        (
            {"parallel": {"cp": 8, "tp": 4}},
            "parallel.tp=4 x cp=8 with context=allgather does not divide batch.seq_len=16",
        ),
        (
            {"model": {"name": "wan2.1-1.3b-tiny", "ffn_dim": 54}, "parallel": {"tp": 4}},
            "does not divide ffn_dim=54",
        ),
        (
            {"model": {"name": "wan2.1-1.3b-tiny", "in_channels": 8}},
            "model.in_channels=8 must be at least out_channels=16",
        ),
        (
            {"parallel": {"vp": 2}},
            "parallel.vp=2, layers_per_stage=None, head_layers=1 need parallel.pp above 1",
        ),
        (
            {"parallel": {"tp": 3}},
            "parallel.tp=3 x cp=1 with context=allgather does not divide num_attention_heads=4",
        ),
        (
            {"parallel": {"cp": 8, "context": "ulysses"}},
            "context=ulysses does not divide num_attention_heads=4",
        ),
        ({"parallel": {"cp": 3}}, "cp=3 with context=allgather does not divide batch.seq_len=16"),
        (
            {"diffusion": {"sampling": "logitnormal"}},
            "diffusion.sampling='logitnormal' is not one of uniform",
        ),
        (
            {"diffusion": {"timestep_sampling": "uniform"}},
            "unknown key diffusion.timestep_sampling",
        ),
        (
            {"validation": {"exact_match": 3}},
            "validation.exact_match=3 needs chats that are held out: task=sft, lora or dpo",
        ),
        ({"diffusion": {"shift": 0}}, "diffusion.shift=0.0 must be above 0"),
        (
            {"model": {"name": "wan2.1-1.3b-tiny", "patch_size": 3}},
            "model.patch_size must be a list, not int 3",
        ),
        (
            {"model": {"name": "wan2.1-1.3b-tiny", "hidden_size": 64}},
            "unknown key model.hidden_size",
        ),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings, message):
    chosen = {key: value for key, value in settings.items() if key == "model"}
    tree = (
        with_settings(**{key: value for key, value in settings.items() if key != "model"})
        | chosen
    )
    with pytest.raises(InputError) as error:
        from_dict(tree)
    assert message in str(error.value)


def test_videos_are_for_diffusion_only():
    with pytest.raises(
        InputError, match="data.kind=shapes holds videos: it needs task=diffusion"
    ):
        from_dict({"data": {"kind": "shapes"}})


def test_the_size_of_mock_videos_matters_to_those_alone():
    tree = TREE | {"model": {"name": TREE["model"], "patch_size": [1, 8, 8]}}
    from_dict(tree | {"data": {"kind": "latents", "path": "x"}})
    with pytest.raises(InputError, match=r"data.size=\[24, 104, 60\] must be"):
        from_dict(tree | {"data": {}})


def test_a_config_survives_its_own_yaml():
    config = load(ROOT / "configs/train/shapes.yaml")
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config)))) == config


@pytest.fixture
def folder(tmp_path):
    """Ten videos of two shapes, 8 and 16 patches."""
    (tmp_path / "videos").mkdir()
    generator = torch.Generator().manual_seed(0)
    for i in range(10):
        latents, text = ((16, 1 + i % 2, 4, 8), (1 + i % 5, 64))
        video = [torch.randn(shape, generator=generator) for shape in (latents, text)]
        save_video(tmp_path / f"videos/{i}.safetensors", *video)
    return tmp_path


def latents(folder, **data) -> dict:
    return with_settings(
        data={"kind": "latents", "path": str(folder / "videos")} | data,
        out_dir=str(folder / "out"),
    )


def run(tree: dict, folder: Path) -> list[dict]:
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    train.main(["--config", str(folder / "config.yaml")])
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def test_a_run_logs_validates_resumes_and_exports(folder):
    """Resumed from its middle, a run repeats what it did without interruption, validation and all."""
    tree = latents(folder, validation=0.3) | {
        "validation": {"every": 2, "batches": 1},
        "steps": 4,
    }
    tree["batch"] = {"global": 2, "micro": 2, "seq_len": 16}
    lines = run(tree | {"checkpoint": {"every": 2, "keep": 3}}, folder)
    assert (
        [line["step"] for line in lines] == [1, 2, 3, 4]
        and "val_loss" in lines[1]
        and "val_loss" in lines[3]
    )
    for line in lines:
        quartiles = [line[key] for key in line if key.startswith("loss_sigma_q")]
        assert min(quartiles) - 1e-6 <= line["loss"] <= max(quartiles) + 1e-6
        assert line["step_tokens"] == line["video_tokens"]
        assert line["tokens_per_sec"] * line["step_time_s"] == pytest.approx(line["video_tokens"])
    exported = folder / "out"
    theirs = WanTransformer3DModel.from_pretrained(exported)
    assert torch.equal(theirs.proj_out.weight, load_pretrained(exported).proj_out.weight)
    shutil.rmtree(exported / "checkpoints/step-00000004")
    again = run(tree | {"checkpoint": {"every": 2, "keep": 3}}, folder)
    assert again[2]["step_time_s"] != lines[2]["step_time_s"] and again[1] == lines[1]
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert again[3]["val_loss"] == lines[3]["val_loss"]
    data, _ = open_dataset(from_dict(tree))
    patches = [data.row(n)["latents"][0].numel() // 4 for n in range(8)]
    seen = [sum(patches[: 2 * line["step"]]) for line in again]
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in again] == seen


@pytest.mark.parametrize(
    "image_dim, text_tokens, told", [(10, 6, True), (10, 512, False), (None, 6, False)]
)
def test_what_diffusers_would_split_elsewhere_is_told(tmp_path, image_dim, text_tokens, told):
    """Of its image-to-video models it takes all but the last 512 tokens for the image's."""
    (tmp_path / "videos").mkdir()
    image = {"image": torch.zeros(257, 10)} if image_dim else {}
    save_video(
        tmp_path / "videos/0.safetensors", torch.zeros(16, 1, 4, 8), torch.zeros(2, 64), **image
    )
    model = {"name": "wan2.1-14b-tiny", "image_dim": image_dim}
    data, _ = open_dataset(
        from_dict(latents(tmp_path, text_tokens=text_tokens) | {"model": model})
    )
    assert ("data.text_tokens=6: diffusers splits" in data.about) == told
    assert "image_context_length = encoder_hidden_states.shape[1] - 512" in inspect.getsource(
        WanAttnProcessor
    )


def test_a_model_that_was_read_from_files_is_trained_further(folder):
    torch.manual_seed(0)
    shape = dict(
        num_attention_heads=2,
        attention_head_dim=12,
        ffn_dim=40,
        num_layers=1,
        text_dim=64,
        freq_dim=16,
    )
    WanTransformer3DModel(**shape).save_pretrained(folder / "base")
    run(
        latents(folder)
        | {"model": str(folder / "base"), "batch": {"global": 2, "micro": 1, "seq_len": 16}},
        folder,
    )
    trained = WanTransformer3DModel.from_pretrained(folder / "out")
    assert not torch.equal(
        trained.proj_out.weight, load_pretrained(folder / "base").proj_out.weight
    )


def test_validation_noise_is_fixed_and_its_videos_are_held_out(folder):
    tree = latents(folder, validation=0.4) | {"batch": {"global": 2, "micro": 1, "seq_len": 16}}
    sides, again = (open_dataset(from_dict(tree)) for _ in range(2))
    trained, held = (
        {each.row(n)["latents"].flatten()[0].item() for n in range(len(each))} for each in sides
    )
    assert len(trained) == 6 and len(held) == 4 and not trained & held
    for key, value in sides[1].row(3).items():
        assert torch.equal(value, again[1].row(3)[key])
    _, other = open_dataset(from_dict(tree | {"seed": 1}))
    assert held != {other.row(n)["latents"].flatten()[0].item() for n in range(4)}


@pytest.mark.parametrize("data", [None, {}], ids=str)
def test_validation_hides_no_text(folder, data):
    """Of the videos to train on too, where none are held out."""
    tree = TREE if data is None else latents(folder, **data)
    train, held = open_dataset(from_dict(tree | {"diffusion": {"text_dropout": 1.0}}))
    assert len(train) == len(held)
    for side, shown in ((train, False), (held, True)):
        row = side.row(0)
        assert row["text"].any() == shown and row["text"].shape[-2:] == (6, 64)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"model": "wan2.1-14b-tiny", "batch": {"seq_len": 8}},
            "16 patches are more than batch.seq_len=8",
        ),
        (
            {"model": {"name": "wan2.1-14b-tiny", "in_channels": 20}},
            "condition is none, the model takes [4, 1, 4, 8]",
        ),
        (
            {"model": {"name": "wan2.1-14b-tiny", "text_dim": 32}},
            "64], the model takes [tokens, 32]",
        ),
        (
            {"model": {"name": "wan2.1-14b-tiny", "patch_size": [2, 2, 2]}},
            "do not divide into patches [2, 2, 2]",
        ),
        ({"parallel": {"cp": 16}}, "8 patches do not divide by parallel.cp=16 x tp=1"),
        ({"parallel": {"cp": 4, "tp": 4}}, "8 patches do not divide by parallel.cp=4 x tp=4"),
    ],
    ids=str,
)
def test_videos_that_do_not_fit(folder, settings, message):
    tree = latents(folder) | {"batch": TREE["batch"]} | settings
    tree["batch"] = TREE["batch"] | settings.get("batch", {})
    with pytest.raises(InputError) as error:
        open_dataset(from_dict(tree))
    assert message in str(error.value)


def test_a_condition_that_is_not_of_the_latents_size(tmp_path):
    (tmp_path / "videos").mkdir()
    more = {"condition": torch.zeros(20, 1, 8, 8)}
    save_video(
        tmp_path / "videos/0.safetensors", torch.zeros(16, 1, 4, 8), torch.zeros(2, 64), **more
    )
    config = from_dict(
        latents(tmp_path) | {"model": {"name": "wan2.1-14b-tiny", "in_channels": 36}}
    )
    with pytest.raises(
        InputError, match=r"condition is \[20, 1, 8, 8\], the model takes \[20, 1, 4, 8\]"
    ):
        open_dataset(config)


def test_shapes_are_drawn_before_and_after(tmp_path, capsys):
    tree = yaml.safe_load((ROOT / "configs/train/shapes.yaml").read_text())
    tree["model"] |= {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 32}
    tree |= {"steps": 1, "out_dir": str(tmp_path / "out"), "device": "cpu"}
    tree |= {"optim": {}, "batch": {"global": 2, "micro": 2, "seq_len": 16}}
    run(tree, tmp_path)
    printed = capsys.readouterr()
    for name in ("before", "after"):
        assert (tmp_path / f"out/{name}.png").exists()
        assert re.search(
            rf"{name}\.png: right in color \d+%, shape \d+%, direction \d+%",
            printed.out + printed.err,
        )
    run(tree, tmp_path)
    assert "before.png" not in capsys.readouterr().out  # of a run that continues it is no picture
    prompts = tmp_path / "prompts"
    save_file({"text": torch.zeros(1, 3, 64)}, prompts)
    generate.main(
        [
            "--task",
            "diffusion",
            "--model",
            str(tmp_path / "out"),
            "--prompts",
            str(prompts),
            "--steps",
            "1",
            "--out",
            str(tmp_path / "latents"),
            "--size",
            "1",
            "4",
            "4",
            "--device",
            "cpu",
        ]
    )
    assert load_file(tmp_path / "latents")["latents"].shape == (1, 8, 1, 4, 4)


def test_adapters_of_other_programs_are_trained_further_and_merged(tmp_path):
    """ComfyUI's names, in one file whose alpha is twice the rank."""
    base, random = Wan(model_config("wan2.1-1.3b-tiny")), torch.Generator().manual_seed(0)
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, 0, 0.1, generator=random)
    save_pretrained(base, tmp_path / "base")
    module, ours = "diffusion_model.blocks.1.cross_attn.o", "blocks.1.attn2.to_out.0.weight"
    a, b = (
        torch.randn(shape, generator=random)
        for shape in ((2, base.config.dim), (base.config.dim, 2))
    )
    stored = {
        f"{module}.lora_down.weight": a,
        f"{module}.lora_up.weight": b,
        f"{module}.alpha": torch.tensor(4),
    }
    save_file(stored, tmp_path / "adapters.safetensors")
    tree = with_settings(
        model=str(tmp_path / "base"), lora={"path": str(tmp_path / "adapters.safetensors")}
    )
    run(
        tree
        | {"steps": 1, "optim": {"name": "sgd", "lr": 1e-9}, "out_dir": str(tmp_path / "out")},
        tmp_path,
    )
    for adapter in ("adapters.safetensors", "out"):
        words = {
            "--model": tmp_path / "base",
            "--adapter": tmp_path / adapter,
            "--out": tmp_path / f"merged-{adapter}",
        }
        merge.main([str(word) for pair in words.items() for word in pair])
        for name, tensor in load_pretrained(words["--out"]).state_dict().items():
            expected = base.state_dict()[name] + (2 * b @ a if name == ours else 0)
            torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_as_estimated(pool, recompute):
    """Activations as torch's profiler counts them, at a length where they outweigh all else."""
    tree = with_settings(
        data={"size": [8, 16, 16]},
        batch={"global": 1, "micro": 1, "seq_len": 512},
        recompute=recompute,
    )
    kinds = estimate_memory(from_dict(tree), 1)
    (measured,) = pool.run(1, measure_activations, tree)
    assert (kinds["activations"] + kinds["gathered"]) * 2**30 == pytest.approx(measured, rel=0.15)


def test_memory_is_estimated_for_each_config_of_a_process():
    """Also when those before it have left their group running."""
    for _ in range(2):
        assert announce_memory("row", from_dict(TREE))["estimated_memory_gib"] > 0
        start(from_dict(TREE))


def measure_activations(tree: dict) -> int:
    config = from_dict(tree)
    trainer = make_trainer(config, start(config))
    return activation_bytes(trainer, open_dataset(config)[0])
