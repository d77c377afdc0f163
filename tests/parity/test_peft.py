"""Adapters against peft on transformers and diffusers: logits, gradients, and both ways of the files."""

import json
import re
import shutil

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from minitrain import (
    InputError,
    load_adapter,
    load_pretrained,
    merge,
    merge_adapters,
    save_pretrained,
)
from minitrain.formats.peft import (
    adapter_shapes,
    read_adapter_config,
    save_adapter,
    unreadable_note,
)
from minitrain.formats.peft_names import our_target, peft_module
from minitrain.formats.wan_names import adapter_place
from minitrain.models.lora import add_adapters, is_adapter
from minitrain.models.zoo import model_config
from minitrain.run.config.load import from_dict
from minitrain.run.tasks.train_model import train
from minitrain.settings import TARGETS, Lora
from tests.helpers import wan
from tests.helpers.hf_models import (
    build,
    compare_and_differentiate,
    edit_json,
    random_tokens,
    reload,
)

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CASES = {  # family: Linears, parameters
    "llama3-tied": (LINEARS, None),
    "qwen2.5": (["q_proj", "self_attn.v_proj"], None),
    "qwen3": (r"model\.layers\.(0\.self_attn\.q|1\.mlp\.down)_proj", None),
    "mixtral": (["q_proj"], EXPERTS),
    "gpt-oss": ([], EXPERTS),
    "qwen3-moe": (["o_proj"], ["mlp.experts.down_proj"]),
    "deepseek-v3": (["kv_a_proj_with_mqa", "q_b_proj"], ["experts.gate_up_proj"]),
    "qwen3-next": (
        ["q_proj", "in_proj_qkvz", "in_proj_ba", "shared_expert_gate"],
        ["experts.gate_up_proj", "experts.down_proj"],
    ),
    "qwen3.5": (["in_proj_qkv", "in_proj_z", "o_proj"], None),
    "nemotron_h": (r".*\.(q_proj|in_proj)", ["experts.up_proj", "experts.down_proj"]),
    "glm-4.5": (["q_proj", "v_proj"], EXPERTS),
    "minimax-m2": (["q_proj"], EXPERTS),
    "olmo3": (LINEARS, None),
    "gemma3": (LINEARS, None),
    "granite": (LINEARS, None),
    "granite-4": (["q_proj", "o_proj", "in_proj", "out_proj"], None),
    "nemotron_h-latent": (
        ["q_proj", "in_proj", "fc1_latent_proj"],
        ["experts.up_proj", "experts.down_proj"],
    ),
}


def randomize(parameters):
    """B starts at zero, and would hide all mistakes."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, 0.1, generator=generator)


@pytest.fixture(params=CASES)
def pair(request, tmp_path):
    """An adapted model in peft, and the same here: the base and the adapters through files."""
    modules, parameters = CASES[request.param]
    base = build(request.param)
    base.save_pretrained(tmp_path / "base")
    settings = dict(
        target_modules=modules,
        target_parameters=parameters,
        use_rslora=request.param == "qwen2.5",
    )
    # grouped products by themselves take multiples of 8
    rank = 3 if request.param == "mixtral" else 8
    theirs = get_peft_model(base, LoraConfig(r=rank, lora_alpha=12, **settings)).eval()
    randomize(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_pretrained(tmp_path / "base")
    load_adapter(ours, tmp_path / "adapter")
    return theirs, ours


def save_ours(model, tensors, path, source):
    save_adapter(tensors, model.config, read_adapter_config(source), path)


def compare_gradients(ours, theirs, source, tolerance):
    """Ours are written as if they were adapters, so that the file says which of peft's each belongs to.

    tolerance: on each difference, of the parameter's largest gradient; and ten times it, of the gradient itself.
    """
    gradients = ((name, p.grad) for name, p in ours.named_parameters() if is_adapter(name))
    save_ours(ours, gradients, source / "gradients", source)
    found = load_file(source / "gradients" / "adapter_model.safetensors")
    expected = {
        name.replace(".default", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        largest = expected[name].abs().max().item()
        assert largest > 0
        torch.testing.assert_close(
            gradient, expected[name], atol=tolerance * largest, rtol=10 * tolerance
        )


def test_logits_gradients_and_files(pair, tmp_path):
    theirs, ours = pair
    tokens = random_tokens(2, 24)
    compare_and_differentiate(ours(tokens), theirs(tokens).logits)
    adapters = {name: p for name, p in ours.named_parameters() if is_adapter(name)}
    assert {name for name, p in ours.named_parameters() if p.requires_grad} == set(adapters)
    assert all(p.grad is None for name, p in ours.named_parameters() if name not in adapters)
    compare_gradients(ours, theirs, tmp_path / "adapter", 2e-5)
    save_ours(ours, adapters.items(), tmp_path / "ours", tmp_path / "adapter")
    again = PeftModel.from_pretrained(reload(tmp_path / "base"), tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)
        adapted = ours(tokens)
        merge_adapters(ours)
        assert not any(is_adapter(name) for name in ours.state_dict())
        torch.testing.assert_close(ours(tokens), adapted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3"])
def test_experts_of_another_rank(family, tmp_path):
    """So peft does what it is asked for gate_proj, up_proj and down_proj where transformers has stacks of experts."""
    base = build(family)
    base.save_pretrained(tmp_path / "base")
    asked = ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    theirs = get_peft_model(
        base, LoraConfig(r=3, lora_alpha=6, target_modules=["o_proj", *asked])
    ).eval()
    assert theirs.peft_config["default"].rank_pattern
    randomize(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = load_pretrained(tmp_path / "base")
    load_adapter(ours, tmp_path / "adapter")
    tokens = random_tokens(2, 24)
    compare_and_differentiate(ours(tokens), theirs(tokens).logits)
    adapters = {name: p for name, p in ours.named_parameters() if is_adapter(name)}
    for name, p in adapters.items():
        rank = 6 if "gate_up_proj" in name else 3
        used, filled = p.grad.split([rank, 6 - rank], dim=-2 if name.endswith("A") else -1)
        assert used.norm() > 0 and not filled.any()  # what is filled up stays so
    save_ours(ours, adapters.items(), tmp_path / "ours", tmp_path / "adapter")
    again = PeftModel.from_pretrained(reload(tmp_path / "base"), tmp_path / "ours").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)


def test_wan_adapters_are_those_of_peft_on_diffusers(tmp_path):
    base, ours = wan.pair("i2v")
    targets = ["to_q", "attn2.add_v_proj", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
    theirs = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=targets)).eval()
    randomize(p for p in theirs.parameters() if p.requires_grad)
    theirs.save_pretrained(tmp_path / "theirs")
    load_adapter(ours, tmp_path / "theirs")
    given = wan.inputs(wan.CONFIGS["i2v"])
    expected, found = wan.run_diffusers(theirs, **given), ours(**given)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    cotangent = torch.randn(found.shape, generator=torch.Generator().manual_seed(3))
    found.backward(cotangent)
    expected.backward(cotangent)
    compare_gradients(ours, theirs, tmp_path / "theirs", 1e-4)
    adapted = ours(**given)
    wan.pair("i2v")[0].save_pretrained(tmp_path / "base")
    words = {
        "--model": tmp_path / "base",
        "--adapter": tmp_path / "theirs",
        "--out": tmp_path / "merged",
    }
    merge.main([str(word) for pair in words.items() for word in pair])
    torch.testing.assert_close(
        load_pretrained(tmp_path / "merged")(**given), adapted, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_wan_adapters_are_loaded_by_pipelines_of_diffusers(kind, tmp_path):
    """By `load_lora_weights`, from the folder, at full strength: alpha is twice the rank."""
    theirs, ours = wan.pair(kind)
    lora = Lora(
        rank=4, alpha=8, targets=[*TARGETS, *["add_k_proj", "add_v_proj"] * (kind == "i2v")]
    )
    add_adapters(ours, lora)
    adapters = {name: p for name, p in ours.named_parameters() if is_adapter(name)}
    randomize(adapters.values())
    save_adapter(adapters.items(), ours.config, lora, tmp_path)
    pipeline = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), theirs)
    pipeline.load_lora_weights(tmp_path)
    given = wan.inputs(wan.CONFIGS[kind])
    torch.testing.assert_close(
        ours(**given), wan.run_diffusers(theirs, **given), atol=1e-4, rtol=0
    )


ORIGINAL = {  # as Wan's own code calls the Linears of a block
    "attn1.to_q": "self_attn.q",
    "attn1.to_k": "self_attn.k",
    "attn1.to_v": "self_attn.v",
    "attn1.to_out.0": "self_attn.o",
    "attn2.to_out.0": "cross_attn.o",
    "attn2.to_q": "cross_attn.q",
    "attn2.to_k": "cross_attn.k",
    "attn2.to_v": "cross_attn.v",
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}


def spelt_elsewhere(tensors: dict, spelling: str, alpha: float | None) -> dict:
    """Adapters of Wan in PEFT's names -> in those of others' files, with an alpha beside each if it is given."""
    renamed = {}
    for name, tensor in tensors.items():
        _, block, linear, letter = re.fullmatch(
            r"(.*\.)?blocks\.(\d)\.(.*)\.lora_([AB])\.weight", name
        ).groups()
        module = {
            "diffusers": f"transformer.blocks.{block}.{linear}",
            "comfyui": f"diffusion_model.blocks.{block}.{ORIGINAL[linear]}",
            "kohya": f"lora_unet_blocks_{block}_{ORIGINAL[linear].replace('.', '_')}",
        }[spelling]
        pair = {"A": "lora_down", "B": "lora_up"} if alpha else {"A": "lora_A", "B": "lora_B"}
        renamed[f"{module}.{pair[letter]}.weight"] = tensor
        renamed |= {f"{module}.alpha": torch.tensor(alpha)} if alpha else {}
    return renamed


@pytest.mark.parametrize("kind", ["t2v", "i2v"])
@pytest.mark.parametrize(
    "spelling, alpha", [("diffusers", None), ("comfyui", None), ("comfyui", 6.0), ("kohya", 6.0)]
)
def test_wan_adapters_of_other_programs_are_read_as_by_diffusers(spelling, alpha, kind, tmp_path):
    """One file without adapter_config.json: what `load_lora_weights` makes of it, with a scale of alpha / rank or 1."""
    theirs, ours = wan.pair(kind)
    lora = Lora(rank=4, targets=[*TARGETS, *["add_k_proj", "add_v_proj"] * (kind == "i2v")])
    shapes = adapter_shapes(ours.config, lora)
    adapters = {name: torch.empty(shape) for name, shape in shapes.items()}
    randomize(adapters.values())
    save_adapter(adapters.items(), ours.config, lora, tmp_path / "peft")
    tensors = spelt_elsewhere(
        load_file(tmp_path / "peft" / "adapter_model.safetensors"), spelling, alpha
    )
    file = tmp_path / "pytorch_lora_weights.safetensors"
    save_file(tensors, file)
    pipeline = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), theirs)
    given = wan.inputs(wan.CONFIGS[kind])
    before = wan.run_diffusers(theirs, **given)
    pipeline.load_lora_weights(tmp_path)
    expected = wan.run_diffusers(theirs, **given)
    assert (expected - before).abs().max() > 0.1
    settings = read_adapter_config(tmp_path)
    assert (settings.rank, settings.alpha) == (4, alpha or 4)
    load_adapter(ours, file)
    torch.testing.assert_close(ours(**given), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("told", ["by diffusers", "by finetrainers", "by diffusion-pipe"])
def test_settings_of_wan_adapters_that_are_told_are_heeded(told, tmp_path):
    """In the file's header, or in PEFT's own file beside ComfyUI's names."""
    theirs, ours = wan.pair("t2v")
    targets = ["to_q", "blocks.1.attn1.to_out.0", "ffn.net.0.proj"]
    adapted = get_peft_model(theirs, LoraConfig(r=4, lora_alpha=6, target_modules=targets)).eval()
    randomize(p for p in adapted.parameters() if p.requires_grad)
    adapted.save_pretrained(tmp_path / "peft")
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    if told == "by diffusers":
        layers = {
            name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()
        }
        settings = adapted.peft_config["default"].to_dict()
        WanPipeline.save_lora_weights(
            tmp_path, layers, transformer_lora_adapter_metadata=settings
        )
    elif told == "by finetrainers":
        header = {"lora_config": json.dumps({"r": 4, "lora_alpha": 6, "target_modules": targets})}
        save_file(
            spelt_elsewhere(tensors, "diffusers", None),
            tmp_path / "pytorch_lora_weights.safetensors",
            header,
        )
    else:
        shutil.copyfile(
            tmp_path / "peft" / "adapter_config.json", tmp_path / "adapter_config.json"
        )
        edit_json(tmp_path / "adapter_config.json", target_modules=["blocks.0.self_attn.q"])
        save_file(
            spelt_elsewhere(tensors, "comfyui", None), tmp_path / "adapter_model.safetensors"
        )
    load_adapter(
        ours, tmp_path if told != "by diffusion-pipe" else tmp_path / "adapter_model.safetensors"
    )
    given = wan.inputs(wan.CONFIGS["t2v"])
    torch.testing.assert_close(
        ours(**given), wan.run_diffusers(adapted, **given), atol=1e-4, rtol=0
    )


def test_ranks_of_wan_adapters_may_differ(tmp_path):
    """As in those that were extracted from a tuned model. Without alphas the scale of each is 1."""
    theirs, ours = wan.pair("t2v")
    dims, random = {"attn1.to_q": 3, "ffn.net.2": 5}, torch.Generator().manual_seed(0)
    tensors = {}
    for linear, rank in dims.items():
        out, into = theirs.blocks[1].get_submodule(linear).weight.shape
        name = f"diffusion_model.blocks.1.{ORIGINAL[linear]}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, into, generator=random)
        tensors[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=random)
    save_file(tensors, tmp_path / "any name.safetensors")
    WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), theirs).load_lora_weights(
        tensors
    )
    load_adapter(ours, tmp_path / "any name.safetensors")
    given = wan.inputs(wan.CONFIGS["t2v"])
    torch.testing.assert_close(
        ours(**given), wan.run_diffusers(theirs, **given), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "name",
    [
        "blocks.3.self_attn.o.lora_A.default.weight",
        "pipe.dit.blocks.3.self_attn.o.lora_A.default.weight",
        "lora_unet__blocks_3_self_attn_o.lora_down.weight",
    ],
)
def test_further_names_of_wan_adapters(name):
    """Of DiffSynth-Studio and VideoX-Fun, which diffusers does not read."""
    assert adapter_place(name) == ("blocks.3.attn1.to_out.0", "A")


def test_wan_adapters_of_other_programs_that_cannot_be_loaded(tmp_path):
    ours, file = wan.pair("t2v")[1], tmp_path / "one.safetensors"
    width = ours.config.dim
    pair = {
        "diffusion_model.blocks.0.self_attn.q.lora_down.weight": torch.ones(4, width),
        "diffusion_model.blocks.0.self_attn.q.lora_up.weight": torch.ones(width, 4),
    }

    def refused(line, more, header=None):
        save_file({name: x for name, x in (pair | more).items() if x is not None}, file, header)
        with pytest.raises(InputError, match=line):
            load_adapter(ours, file)
        assert not any(is_adapter(key) for key in ours.state_dict())

    first, second = pair
    for name in (
        "blocks.0.self_attn.q.diff_b",
        "blocks.0.norm3.diff",
        "head.head.lora_down.weight",
        "blocks.0.q.alpha",
    ):
        refused(
            f"tensor diffusion_model.{name} has no place",
            {f"diffusion_model.{name}": torch.ones(1)},
        )
    refused(
        "tensor base_model.model.blocks.0.attn1.to_q.lora_B.weight .*is missing", {second: None}
    )
    larger = {
        f"diffusion_model.blocks.{i}.ffn.0.lora_A.weight": torch.ones(4, width) for i in range(9)
    }
    named = ", ".join(f"blocks.{i}.ffn.net.0.proj" for i in range(2, 6))
    refused(f"one.safetensors: lora.targets: the model has no {named} and 3 more .it has", larger)
    refused(
        "without an adapter_config.json it must be a LoRA of Wan, named as by",
        {first: None, second: None},
    )
    refused(
        r"blocks.0.self_attn.q.alpha has shape \[2\]",
        {first.replace("lora_down.weight", "alpha"): torch.ones(2)},
    )
    refused(
        "lora_alpha=nan must be a number",
        {first.replace("lora_down.weight", "alpha"): torch.tensor(torch.nan)},
    )
    refused(
        "only plain LoRA is supported, not use_dora",
        {},
        {
            "lora_adapter_metadata": json.dumps(
                {"transformer.use_dora": True, "transformer.peft_type": "LORA"}
            )
        },
    )
    for text in ("{", "[1]"):
        refused("the settings in its header are no JSON object", {}, {"lora_config": text})


def test_usual_targets_of_wan_are_the_same_linears_for_peft(tmp_path):
    """Not those of the image's embedder, which are called net.0.proj and net.2, too."""
    theirs, ours = wan.pair("i2v")
    add_adapters(ours, Lora())
    adapters = {name: p for name, p in ours.named_parameters() if is_adapter(name)}
    save_adapter(adapters.items(), ours.config, Lora(), tmp_path)
    theirs = PeftModel.from_pretrained(theirs, tmp_path)
    assert sum("lora_" in name for name, _ in theirs.named_parameters()) == len(adapters)


def test_a_model_has_no_place_beside_adapters(tmp_path):
    """transformers adds them to it, a second time where they are merged into it."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    build("qwen3").save_pretrained(base)
    model = load_pretrained(base)
    add_adapters(model, Lora(rank=4))
    adapters = {name: tensor for name, tensor in model.named_parameters() if is_adapter(name)}
    randomize(adapters.values())
    save_adapter(adapters.items(), model.config, Lora(rank=4), adapter)
    merge_adapters(model)
    save_pretrained(model, tmp_path / "merged")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(
        random_tokens(1, 12)
    ).logits
    shutil.copytree(adapter, tmp_path / "merged", dirs_exist_ok=True)
    twice = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(random_tokens(1, 12)).logits
    assert (twice - expected).abs().max() > 0.1 * expected.abs().max()

    before, complaint = (
        sorted(adapter.iterdir()),
        "adapter holds adapter_config.json: transformers would add",
    )
    with pytest.raises(InputError, match=complaint):
        save_pretrained(model, adapter)
    with pytest.raises(InputError, match=complaint):  # before a step is done
        train(from_dict({"model": str(base), "out_dir": str(adapter), "batch": {"seq_len": 8}}))
    shutil.copytree(adapter, tmp_path / "other")
    # merging makes a new folder
    for out in ("merged", "other"):
        with pytest.raises(InputError, match=f"{out} exists already .name a new folder"):
            merge.main(
                ["--model", str(base), "--adapter", str(adapter), "--out", str(tmp_path / out)]
            )
    assert sorted(adapter.iterdir()) == before


def test_targets_that_a_model_has_not_are_not_written(tmp_path):
    """PEFT would take gate_proj of a model whose MLPs are all experts for their stacks."""
    base = build("qwen3-moe")
    base.save_pretrained(tmp_path / "base")
    ours, lora = load_pretrained(tmp_path / "base"), Lora(rank=4, alpha=8, dropout=0.1)
    add_adapters(ours, lora)
    adapters = {name: p for name, p in ours.named_parameters() if is_adapter(name)}
    randomize(adapters.values())
    save_adapter(adapters.items(), ours.config, lora, tmp_path / "adapter", base="Qwen/Base")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert (settings["lora_dropout"], settings["base_model_name_or_path"]) == (0.1, "Qwen/Base")
    theirs = PeftModel.from_pretrained(reload(tmp_path / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        tokens = random_tokens(2, 24)
        # no dropout without grad
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_targets_inside_nemotron_h_mean_the_same_in_files(tmp_path):
    """Every part of it is a `mixer` there; `up_proj` alone would be the shared expert's too."""
    config = model_config("nemotron3-nano-30b-a3b-tiny", layer_pattern="ME*-")
    targets = [
        "mlp.up_proj",
        "2.self_attn.q_proj",
        "self_attn.o_proj",
        "mamba.in_proj",
        "mamba.out_proj",
    ]
    targets.append("1.mlp.experts.down_proj")
    lora = Lora(rank=8, dropout=0.1, targets=targets)
    shapes = adapter_shapes(config, lora)
    save_adapter(
        ((name, torch.ones(shape)) for name, shape in shapes.items()), config, lora, tmp_path
    )
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    linears = [
        "mixer.up_proj",
        "2.mixer.q_proj",
        "mixer.o_proj",
        "mixer.in_proj",
        "mixer.out_proj",
    ]
    assert settings["target_modules"] == linears
    assert settings["target_parameters"] == ["1.mixer.experts.down_proj"]
    assert settings["lora_dropout"] == 0  # with any other number PEFT refuses experts
    assert adapter_shapes(config, read_adapter_config(tmp_path)) == shapes


def test_what_cannot_be_loaded(tmp_path):
    build("llama3-tied").save_pretrained(tmp_path / "base")
    model = load_pretrained(tmp_path / "base")
    lora = Lora(rank=4, targets=["q_proj"])
    shapes = adapter_shapes(model.config, lora)
    save_adapter(
        ((n, torch.ones(s)) for n, s in shapes.items()), model.config, lora, tmp_path / "good"
    )
    config = json.loads((tmp_path / "good" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "good" / "adapter_model.safetensors")
    name = next(iter(tensors))

    def refused(line, changes=None, weights=None):
        folder = tmp_path / "bad"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(config | (changes or {})))
        save_file(weights or tensors, folder / "adapter_model.safetensors")
        with pytest.raises(InputError, match=line):
            load_adapter(model, folder)
        assert not any(is_adapter(key) for key in model.state_dict())

    for variant in ("use_dora", "lora_bias", "modules_to_save", "exclude_modules"):
        refused(f"only plain LoRA is supported, not {variant}", {variant: True})
    refused("only plain LoRA is supported, not bias", {"bias": "all"})
    for start in ("pissa", "loftq"):
        refused(
            f"only plain LoRA is supported, not init_lora_weights={start}",
            {"init_lora_weights": start},
        )
    refused("only plain LoRA is supported, not IA3", {"peft_type": "IA3"})
    for rank in (None, 0, True):
        refused(f"r={rank} must be a whole number from 1 to 65,536", {"r": rank})
    for alpha in (True, float("nan"), 2e9):
        refused("lora_alpha=.* must be a number", {"lora_alpha": alpha})
    for pattern in ("rank_pattern", "alpha_pattern"):
        refused("rank_pattern and alpha_pattern must give numbers by name", {pattern: [1]})
        refused("a rank_pattern that changes the scale of updates", {pattern: {"q_proj": 3}})
    refused(r"r='3' must be a whole number", {"rank_pattern": {"q_proj": "3"}})
    refused("lora_alpha=None must be a number", {"alpha_pattern": {"q_proj": None}})
    refused(
        r"has shape \[4, 48\], expected \[6, 48\]",
        {"r": 3, "rank_pattern": {"q": 6}, "alpha_pattern": {"q": 64}},
    )
    unused = {"rank_pattern": {"k_proj": 65536}, "alpha_pattern": {"k_proj": 8 * 65536}}
    refused("no adapter has the largest rank, 65536", unused)
    refused("target_modules must be a list of names", {"target_modules": [1]})
    refused("the model has no to_q", {"target_modules": ["to_q"]})
    refused(
        "the model has no target", {"target_modules": ".*q_proj"}, weights={"more": torch.ones(1)}
    )
    refused(
        r"tensor .*k_proj.lora_A.weight of shape \[4, 48\] is missing",
        {"target_modules": ["q_proj", "k_proj"]},
    )
    refused(r"has shape \[4, 48\], expected \[8, 48\]", {"r": 8})
    refused("tensor more has no place", weights=tensors | {"more": torch.ones(1)})
    refused(
        f"tensor {name} .*is missing",
        weights={key: x for key, x in tensors.items() if key != name},
    )
    with pytest.raises(InputError, match="adapter_config.json"):
        load_adapter(model, tmp_path / "base")
    (tmp_path / "good" / "adapter_model.safetensors").rename(
        tmp_path / "good" / "adapter_model.bin"
    )
    with pytest.raises(
        InputError,
        match="good/adapter_model.bin is not read .save the adapters again with PEFT's",
    ):
        load_adapter(model, tmp_path / "good")


@pytest.mark.parametrize(
    ("name", "theirs"), [("qwen3-next-80b-a3b", "shared_expert"), ("glm-4.5", "shared_experts")]
)
def test_a_shared_expert_is_called_as_in_transformers(name, theirs):
    path = "model.layers.1.mlp.{}.up_proj"
    assert peft_module(path.format("shared_experts"), model_config(name)) == path.format(theirs)
    target = our_target(f"{theirs}.up_proj", "target_modules")
    assert target == "shared_experts.up_proj"


@pytest.mark.parametrize(
    "name, targets, said",
    [
        ("deepseek-v3-tiny", list(TARGETS), "this model's down_proj, gate_proj, up_proj, but"),
        ("deepseek-v3-tiny", ["q_a_proj", "experts.down_proj"], None),
        ("glm-4.5-tiny", ["down_proj", "experts.down_proj"], "this model's down_proj, but"),
        ("granite-4.0-h-micro-tiny", ["q_proj", "up_proj"], "this model's up_proj, but"),
        ("kimi-k2-tiny", ["mlp.gate_proj"], "this model's gate_proj, but"),
        ("nemotron3-nano-30b-a3b-tiny", ["in_proj", "out_proj"], "this model's out_proj, but"),
        (
            "qwen3.5-35b-a3b-tiny",
            list(TARGETS),
            "this model's down_proj, gate_proj, up_proj, but",
        ),
        ("qwen3-30b-a3b-tiny", list(TARGETS), None),
        ("llama3-8b-tiny", list(TARGETS), None),
    ],
    ids=str,
)
def test_a_run_says_which_adapters_peft_cannot_read(name, targets, said):
    notes = unreadable_note(model_config(name), Lora(rank=2, targets=targets))
    assert [said in note for note in notes] == [True] * bool(said)
