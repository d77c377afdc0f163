"""Weights as they lie on the hub: FP8 blocks, MXFP4, stacked and separate experts, extra layers; and parts of them."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minitrain import load_pretrained
from minitrain.formats import hf as checkpoint_hf
from minitrain.formats.hf import load_weights, read_config, save_pretrained
from minitrain.formats.layouts_hf import fp8_note
from minitrain.models.decoder import Decoder
from minitrain.models.fp8 import Fp8Linear, in_fp8
from minitrain.models.fp8 import to_fp8 as multiply_in_fp8
from minitrain.models.frozen import freeze, frozen_weights
from minitrain.models.quantize import dequantize, quantize
from minitrain.models.variants import base_class
from minitrain.models.zoo import empty_model
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_trainer
from tests.helpers.hf_models import (
    CONFIGS,
    HYBRID_CONFIGS,
    MOE_CONFIGS,
    build,
    call_refused,
    edit_json,
    edit_weights,
    random_tokens,
    reload,
)

FP8_SETTINGS = dict(
    activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
)
MXFP4_SETTINGS = dict(
    quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"]
)
NOT_FP8 = (
    "norm.weight",
    "gate.weight",
    "embed_tokens.weight",
    "lm_head.weight",
    "e_score_correction_bias",
)


def to_fp8(weight):
    """Block by block. Returns the stored values, their scales, and what they mean."""
    stored, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), []
    meant = torch.empty_like(weight)
    for top in range(0, len(weight), 128):
        scales.append([])
        for left in range(0, weight.shape[1], 128):
            block = (slice(top, top + 128), slice(left, left + 128))
            scale = (weight[block].abs().max() / 448).item()
            stored[block] = (weight[block] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            meant[block] = stored[block].float() * torch.tensor(scale)
            scales[-1].append(scale)
    return stored, torch.tensor(scales), meant


@pytest.fixture
def fp8(tmp_path):
    """Folders of the same DeepSeek in FP8, with a layer for multi-token prediction, and in fp32."""
    sizes = dict(
        hidden_size=152,
        intermediate_size=264,
        moe_intermediate_size=136,
        n_routed_experts=4,
        n_group=2,
    )
    theirs = build("deepseek-v3", **sizes, topk_group=2, num_experts_per_tok=2)
    for name in ("fp8", "fp32"):
        theirs.save_pretrained(tmp_path / name)
    tensors, plain = {}, {}
    stored = load_file(tmp_path / "fp32/model.safetensors")
    # a layer that is a copy of the last, and what it has besides
    last = {key: weight for key, weight in stored.items() if key.startswith("model.layers.2.")}
    stored |= {key.replace("layers.2.", "layers.3."): weight / 2 for key, weight in last.items()}
    stored["model.layers.3.eh_proj.weight"] = torch.randn(152, 304)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        stored[f"model.layers.3.{norm}.weight"] = torch.randn(152)
    for key, weight in stored.items():
        tensors[key] = plain[key] = weight
        if not key.endswith(NOT_FP8):
            tensors[key], tensors[key + "_scale_inv"], plain[key] = to_fp8(weight)
    save_file(tensors, tmp_path / "fp8/model.safetensors")
    save_file(plain, tmp_path / "fp32/model.safetensors")
    for name in ("fp8", "fp32"):
        edit_json(tmp_path / name / "config.json", num_nextn_predict_layers=1)
    edit_json(tmp_path / "fp8" / "config.json", quantization_config=FP8_SETTINGS)
    return tmp_path / "fp8", tmp_path / "fp32"


@pytest.fixture
def mxfp4(tmp_path):
    """Folders of the same GPT-OSS with experts in MXFP4 and in fp32."""
    theirs = build("gpt-oss", hidden_size=64, intermediate_size=96)
    for name in ("mxfp4", "fp32"):
        theirs.save_pretrained(tmp_path / name)
    tensors, plain = {}, {}
    generator = torch.Generator().manual_seed(0)
    for key, weight in load_file(tmp_path / "fp32/model.safetensors").items():
        tensors[key] = plain[key] = weight
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, into, out = weight.shape
            blocks = torch.randint(
                0, 256, (experts, out, into // 32, 16), dtype=torch.uint8, generator=generator
            )
            scales = torch.randint(
                118, 128, (experts, out, into // 32), dtype=torch.uint8, generator=generator
            )
            del tensors[key]
            tensors |= {key + "_blocks": blocks, key + "_scales": scales}
            plain[key] = convert_moe_packed_tensors(
                blocks, scales, dtype=torch.float32
            ).contiguous()
            assert plain[key].shape == weight.shape
    save_file(tensors, tmp_path / "mxfp4/model.safetensors")
    save_file(plain, tmp_path / "fp32/model.safetensors")
    edit_json(tmp_path / "mxfp4" / "config.json", quantization_config=MXFP4_SETTINGS)
    return tmp_path / "mxfp4", tmp_path / "fp32"


def assert_same_weights(found, expected):
    found, expected = found.state_dict(), expected.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    "family, sizes", [("qwen3", {}), ("qwen3-moe", dict(moe_intermediate_size=128))]
)
def test_fp8_blocks_of_qwen_are_those_of_transformers(family, sizes, tmp_path):
    """Which says what is not quantised, and has scales in bf16. transformers takes partial blocks for smaller ones."""
    theirs = build(family, hidden_size=256, intermediate_size=384, head_dim=64, **sizes)
    theirs.save_pretrained(tmp_path)
    tensors, plain = {}, load_file(tmp_path / "model.safetensors")
    for key, weight in plain.items():
        tensors[key] = weight
        if not key.endswith(NOT_FP8):
            tensors[key], scales, _ = to_fp8(weight)
            tensors[key + "_scale_inv"] = scales.bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept = ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    edit_json(
        tmp_path / "config.json",
        quantization_config=FP8_SETTINGS | dict(modules_to_not_convert=kept),
    )
    dequantised = FineGrainedFP8Config(dequantize=True, modules_to_not_convert=kept)
    theirs, tokens = (
        reload(tmp_path, quantization_config=dequantised, dtype=torch.float32),
        random_tokens(2, 24),
    )
    with torch.no_grad():
        torch.testing.assert_close(
            load_pretrained(tmp_path)(tokens), theirs(tokens).logits, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    "family, sizes", [("qwen3", {}), ("qwen3-moe", dict(moe_intermediate_size=128))]
)
def test_what_is_saved_in_fp8_is_what_transformers_reads(family, sizes, tmp_path):
    """And what this reads again, whose blocks fp8.form=block multiplies as they are."""
    build(family, hidden_size=256, intermediate_size=384, head_dim=64, **sizes).save_pretrained(
        tmp_path / "plain"
    )
    plain = load_pretrained(tmp_path / "plain")
    save_pretrained(plain, tmp_path / "fp8", fp8=True)
    stored = load_file(tmp_path / "fp8/model.safetensors")
    for key, weight in load_file(tmp_path / "plain/model.safetensors").items():
        if key.endswith(NOT_FP8):
            assert torch.equal(stored.pop(key), weight)
            continue
        x8, scales = stored.pop(key), stored.pop(key + "_scale_inv")
        assert x8.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
        assert scales.shape == (-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        largest = weight.abs().max()
        assert torch.equal(scales.log2(), scales.log2().round()) and scales.max() <= largest / 224
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        off = (x8.float() * spread[: len(weight), : weight.shape[1]] - weight).abs()
        assert (off <= (weight.abs() * 2**-4).clamp(min=scales.max() * 2**-10)).all()
    assert not stored
    theirs, tokens = reload(tmp_path / "fp8", dtype=torch.float32), random_tokens(2, 24)
    ours = load_pretrained(tmp_path / "fp8")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)
    weights = {name: p.detach().clone() for name, p in ours.named_parameters()}
    multiply_in_fp8(ours.blocks, "none", form="block")
    rounded = [m for m in ours.modules() if isinstance(m, Fp8Linear)]
    assert rounded
    for module in rounded:
        x8, inverse, _ = in_fp8(module, "weight")
        assert torch.equal(dequantize(x8, inverse, torch.float32, (128, 128)), module.weight)
    save_pretrained(load_pretrained(tmp_path / "fp8"), tmp_path / "again", fp8=True)
    again = load_pretrained(tmp_path / "again").named_parameters()
    assert all(torch.equal(p, weights[name]) for name, p in again)


def test_families_without_fp8_files_are_not_saved_so(tmp_path):
    build("llama3").save_pretrained(tmp_path / "plain")
    model = load_pretrained(tmp_path / "plain")
    call_refused(
        lambda: save_pretrained(model, tmp_path / "fp8", fp8=True),
        "family llama",
        "no FP8 blocks",
    )
    assert not (tmp_path / "fp8").exists()


def test_fp8_blocks(fp8):
    quantised, plain = fp8
    assert_same_weights(load_pretrained(quantised, dtype=torch.float32), load_pretrained(plain))


def test_fp8_files_are_written_again_to_the_byte(fp8, tmp_path):
    """Their scales, of max / 448, are no powers of two."""
    save_pretrained(load_pretrained(fp8[0], torch.float32), tmp_path / "again", fp8=True)
    found, expected = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "again", fp8[0])
    )
    scales = [key for key in found if key.endswith("_scale_inv")]
    assert len(scales) > 60 and all((found[key].log2() % 1).any() for key in scales)
    for scale in scales:
        key = scale.removesuffix("_scale_inv")
        assert torch.equal(found[scale], expected[scale]), scale
        assert torch.equal(found[key].view(torch.uint8), expected[key].view(torch.uint8)), key


def lora_on(path, **changes):
    """A trainer of adapters on the model in a folder, on this process."""
    tree = {
        "task": "lora",
        "model": {"path": str(path)},
        "batch": {"global": 1, "micro": 1, "seq_len": 16},
        "device": "cpu",
        "compile": False,
        "precision": "fp32",
    }
    config = from_dict(tree | changes)
    return make_trainer(config, start(config)).model


def test_frozen_fp8_has_the_bytes_of_the_files(fp8):
    """Of Linears and of experts, whose gate and up take turns; and products with what these mean."""
    targets = {"targets": ["o_proj", "down_proj", "experts.down_proj"]}
    stored = lora_on(fp8[0], lora=targets | {"base": "fp8"})
    file = load_file(fp8[0] / "model.safetensors")
    tensors = stored.state_dict()
    whole = [key for key in frozen_weights(stored) if ".experts." not in key and key in file]
    assert len(whole) > 15
    for key in whole:
        scale = file[key + "_scale_inv"].repeat_interleave(128, 0)[: len(file[key])]
        assert torch.equal(tensors[key], file[key].view(torch.uint8))
        assert torch.equal(tensors[key + "_scale_inv"], scale)
    prefix = "model.layers.1.mlp.experts"
    for expert in range(4):
        for i, name in enumerate(("gate_proj", "up_proj")):
            key = f"{prefix}.{expert}.{name}.weight"
            assert torch.equal(
                tensors[f"{prefix}.gate_up_proj"][expert, i::2], file[key].view(torch.uint8)
            )
    plain = lora_on(fp8[1], lora=targets)
    tokens = random_tokens(2, 24)
    torch.testing.assert_close(stored(tokens), plain(tokens), atol=1e-5, rtol=1e-5)


def test_frozen_fp8_is_multiplied_as_it_is(tmp_path):
    """By fp8.form=block: dequantized products of the file's numbers, forward and backward."""
    theirs = build("qwen3", hidden_size=256, intermediate_size=384, head_dim=64)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    tensors[key], tensors[key + "_scale_inv"], meant = to_fp8(tensors[key])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = empty_model(checkpoint_hf.read_config(tmp_path)).to_empty(device="cpu")
    model.requires_grad_(False)
    multiply_in_fp8(model.blocks, "none", form="block")
    freeze(model.blocks, "fp8")
    checkpoint_hf.load_weights(model, tmp_path)
    linear = model.get_submodule(key.removesuffix(".weight"))
    assert base_class(linear) is Fp8Linear and linear.weight.dtype == torch.uint8
    x, upstream = torch.randn(32, 256, requires_grad=True), torch.randn(32, 384)
    y = linear(x)
    y.backward(upstream)
    rounded = [
        dequantize(
            *quantize(each.detach(), torch.float8_e4m3fn, (1, 128)), torch.float32, (1, 128)
        )
        for each in (x, upstream)
    ]
    torch.testing.assert_close(y, rounded[0] @ meant.T, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(x.grad, rounded[1] @ meant, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lora": {"base": "fp8"}}, None),
        ({"lora": {}}, "stored as lora.base=bf16 (fp8 keeps them"),
        ({"task": "sft", "precision": "fp8", "fp8": {"form": "block"}}, "powers of two"),
        (
            {"task": "sft", "precision": "fp8", "fp8": {"form": "mx"}},
            "fp8.form=mx has other scales",
        ),
        ({"task": "sft"}, None),
    ],
    ids=str,
)
def test_a_run_says_what_is_not_multiplied_as_it_is_stored(changes, told, tmp_path):
    theirs = build("qwen3", hidden_size=256, intermediate_size=384, head_dim=64)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.up_proj.weight"
    tensors[key], tensors[key + "_scale_inv"], _ = to_fp8(tensors[key])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tree = {"task": "lora", "model": {"path": str(tmp_path)}, "precision": "bf16"} | changes
    tree["batch"] = {"global": 1, "micro": 1, "seq_len": 16}
    notes = fp8_note(from_dict(tree))
    assert told in notes[0] if told else notes == []


def test_mxfp4(mxfp4):
    quantised, plain = mxfp4
    assert_same_weights(load_pretrained(quantised), load_pretrained(plain))


def test_mxfp4_is_multiplied_as_it_is_in_blocks_of_32(mxfp4):
    """By fp8.form=mx: e4m3 holds all of e2m1's values, and blocks begin where the file's do."""
    for block in load_pretrained(mxfp4[0]).blocks:
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(block.mlp.experts, name).detach().float()
            rounded = quantize(weight, torch.float8_e4m3fn, (1, 32))
            assert torch.equal(dequantize(*rounded, torch.float32, (1, 32)), weight)


def test_mxfp4_by_the_table(mxfp4):
    """One value of one expert, by hand: OCP Microscaling Formats 1.0, tables 2 and 5.3.3."""
    tensors = load_file(mxfp4[0] / "model.safetensors")
    key = "model.layers.1.mlp.experts.down_proj"
    # expert 5, output 7, inputs 32 + 6 and 32 + 7
    byte = int(tensors[key + "_blocks"][5, 7, 1, 3])
    scale = 2.0 ** (int(tensors[key + "_scales"][5, 7, 1]) - 127)
    weight = load_pretrained(mxfp4[0]).model.layers["1"].mlp.experts.down_proj
    for value, nibble in ((weight[5, 7, 38], byte % 16), (weight[5, 7, 39], byte // 16)):
        sign, exponent, mantissa = nibble // 8, nibble // 2 % 4, nibble % 2
        size = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
        assert value.item() == (-1) ** sign * size * scale


# --------------------------------------------------------------------------------------------------------------- slices


class Spy:
    """A safetensors file that notes what is read: (name, number of values)."""

    def __init__(self, file, log):
        self.file, self.log = file, log

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        part, log = self.file.get_slice(name), self.log

        class Slice:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(self, slices):
                value = part[slices]
                log.append((name, value.numel()))
                return value

        return Slice()


@pytest.fixture
def log(monkeypatch):
    """What was read from files, in turn."""
    entries, original = [], checkpoint_hf.open_tensors
    monkeypatch.setattr(checkpoint_hf, "open_tensors", lambda file: Spy(original(file), entries))
    return entries


STACKED = ["qwen3-moe", "mixtral", "deepseek-v3"]
EXPERTS = [*MOE_CONFIGS, "fp8", "mxfp4", *(f"{family} stacked" for family in STACKED)]


@pytest.fixture
def folder(request, tmp_path):
    """A family's checkpoint as transformers writes it, or one that is quantised."""
    if request.param in ("fp8", "mxfp4"):
        return request.getfixturevalue(request.param)[0]
    family, *stacked = request.param.split()
    build(family).save_pretrained(tmp_path, save_original_format=not stacked)
    return tmp_path


@pytest.mark.parametrize("family", STACKED)
def test_stacks_as_transformers_holds_them(family, tmp_path):
    for name in ("alone", "stacked"):
        build(family).save_pretrained(tmp_path / name, save_original_format=name == "alone")
    assert any(
        key.endswith(".experts.gate_up_proj")
        for key in load_file(tmp_path / "stacked" / "model.safetensors")
    )
    assert_same_weights(
        load_pretrained(tmp_path / "stacked"), load_pretrained(tmp_path / "alone")
    )


def load_parts(folder, cut):
    """Fill the parts `cut(shape)` of all parameters and buffers. Returns them by name, with their slices."""
    model, parts = Decoder(read_config(folder)), []

    def owned(tensor):
        slices = cut(tensor.shape)
        parts.append((torch.full_like(tensor[slices], torch.nan), slices))
        return parts[-1]

    with mock.patch.object(checkpoint_hf, "local_shard", owned):
        load_weights(model, folder)
    return dict(zip(model.state_dict(), parts, strict=True))


def second_rank_of_experts(shape):
    """Experts 2 and 3 of stacks, as in expert parallelism, and of those the last rows; all of the rest."""
    return (
        (slice(2, 4), slice(shape[1] // 3, shape[1]))
        if len(shape) == 3
        else (slice(0, shape[0]),)
    )


def columns_and_rows(shape):
    """The parts of some rank under sharding in two dimensions; borders within blocks of 128 and within gate and up."""
    return tuple(slice(n // 5, n - n // 3) for n in shape)


@pytest.mark.parametrize("cut", [second_rank_of_experts, columns_and_rows])
@pytest.mark.parametrize("folder", [*CONFIGS, *HYBRID_CONFIGS, *EXPERTS], indirect=True)
def test_parts_equal_parts_of_the_whole(folder, cut):
    whole = load_pretrained(folder, dtype=torch.float32)
    for name, (part, slices) in load_parts(folder, all_dimensions(cut)).items():
        assert part.numel() > 0
        assert torch.equal(part, whole.state_dict()[name][slices]), name


def all_dimensions(cut):
    return lambda shape: (*cut(shape), *(slice(0, n) for n in shape[len(cut(shape)) :]))


@pytest.mark.parametrize("folder", EXPERTS, indirect=True)
def test_a_rank_reads_only_its_experts(folder, log):
    stacks = [
        p
        for name, p in Decoder(read_config(folder)).named_parameters()
        if ".experts." in name and p.ndim == 3
    ]
    log.clear()
    load_parts(folder, all_dimensions(second_rank_of_experts))
    not_weights = ("_scale_inv", "_scales", "_bias")
    read = sum(
        size for name, size in log if ".experts." in name and not name.endswith(not_weights)
    )
    owned = sum(p.numel() * 2 // len(p) for p in stacks)
    assert 0 < read <= owned
    assert not any(".experts.0." in name or ".experts.5." in name for name, _ in log)


@pytest.mark.parametrize("folder", EXPERTS, indirect=True)
def test_one_expert_at_a_time(folder, log):
    log.clear()
    model = load_pretrained(folder)
    largest = max(
        p.numel() // len(p) if ".experts." in name else p.numel()
        for name, p in model.named_parameters()
    )
    assert max(size for _, size in log) <= largest


# ------------------------------------------------------------------------------------------------------------ bad input


def test_bad_fp8(fp8):
    folder, _ = fp8
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    edit_weights(folder, **{key + "_scale_inv": None})
    call_refused(lambda: load_pretrained(folder), key + "_scale_inv", "[2, 2]", "missing")
    edit_weights(folder, **{key + "_scale_inv": torch.ones(2, 1)})
    call_refused(lambda: load_pretrained(folder), key + "_scale_inv", "[2, 1]", "[2, 2]")
    edit_weights(
        folder,
        **{key + "_scale_inv": torch.ones(2, 2), key: torch.zeros(136, 152, dtype=torch.int8)},
    )
    call_refused(lambda: load_pretrained(folder), key, "I8")
    edit_json(
        folder / "config.json",
        quantization_config=FP8_SETTINGS | dict(weight_block_size=[64, 64]),
    )
    call_refused(
        lambda: load_pretrained(folder), "config.json", "weight_block_size=[64, 64]", "[128, 128]"
    )
    edit_json(folder / "config.json", quantization_config=dict(quant_method="gptq"))
    call_refused(lambda: load_pretrained(folder), "config.json", "gptq", "fp8")


def test_bad_mxfp4(mxfp4):
    folder, _ = mxfp4
    key = "model.layers.0.mlp.experts.gate_up_proj_scales"
    edit_weights(folder, **{key: torch.zeros(8, 192, 3, dtype=torch.uint8)})
    call_refused(lambda: load_pretrained(folder), key, "[8, 192, 3]", "[8, 192, 2]")
    edit_weights(folder, **{key: None})
    call_refused(lambda: load_pretrained(folder), key, "missing")


@pytest.mark.parametrize(
    "key", ["model.layers.3.enorm.weight", "model.layers.1.mlp.experts.8.up_proj.weight"]
)
def test_tensors_without_a_place(key, tmp_path):
    build("qwen3-moe").save_pretrained(tmp_path)
    edit_weights(tmp_path, **{key: torch.ones(2)})
    call_refused(lambda: load_pretrained(tmp_path), key, "no place")


def test_a_missing_expert(tmp_path):
    build("mixtral").save_pretrained(tmp_path)
    key = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edit_weights(tmp_path, **{key: None})
    call_refused(lambda: load_pretrained(tmp_path), key, "[48, 80]", "missing")


@pytest.mark.parametrize(("family", "must_be"), [("qwen3-moe", False), ("gpt-oss", True)])
def test_a_null_says_false(family, must_be, tmp_path):
    build(family).save_pretrained(tmp_path)
    config, file = read_config(tmp_path), tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"attention_bias": None}))
    if must_be:
        call_refused(lambda: read_config(tmp_path), "attention_bias=None", "must be True")
    else:
        assert read_config(tmp_path) == config


def test_gpt_oss_has_biases_unless_it_says_otherwise(tmp_path):
    build("gpt-oss").save_pretrained(tmp_path)
    config = read_config(tmp_path)
    edit_json(tmp_path / "config.json", attention_bias=None)
    assert config.qkv_bias and read_config(tmp_path) == config
