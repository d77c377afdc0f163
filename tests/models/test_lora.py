"""Adapters against the weights that they stand for, counted FLOPs and graphs; a run from training to a merged model."""

import json
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition

from minitrain import generate, load_pretrained, merge, save_pretrained
from minitrain.bench.versus import peft_rival, versus
from minitrain.data.tokenizer import load_tokenizer
from minitrain.errors import InputError
from minitrain.formats.peft import adapter_shapes, save_adapter
from minitrain.models.decoder import Decoder
from minitrain.models.layers import project
from minitrain.models.lora import (
    LoraLinear,
    adaptable_weights,
    add_adapters,
    check_targets,
    dropout,
    find_targets,
    initialize_adapter,
    is_adapter,
    low_rank_update,
    merge_adapters,
    merged_weight,
)
from minitrain.models.variants import set_variant
from minitrain.models.wan import Wan
from minitrain.models.zoo import empty_model, model_config
from minitrain.parallel.parallelize import apply_techniques
from minitrain.parallel.recompute import recompute
from minitrain.run.checkpoint.checkpoint_index import read_index
from minitrain.run.config.load import from_dict, to_dict
from minitrain.run.launch.start import start
from minitrain.run.monitor.flops import clean, count_work, lora_weights
from minitrain.run.tasks.initial_weights import make_trainer
from minitrain.run.tasks.train_model import train
from minitrain.settings import TARGETS, Lora
from minitrain.training.build import initialize, make_model
from tests.helpers.oracle import count_flops, plain_model, ragged_batch

TREE = {
    "model": {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 3},
    "batch": {"global": 2, "micro": 2, "seq_len": 16},
}
EXPERTS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]


def adapted(lora=None, **changes):
    """A model on random weights, the adapters' too."""
    config = from_dict(TREE | {"lora": {"rank": 8, "alpha": 4.0} | (lora or {})} | changes)
    model = plain_model(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model, ragged_batch(config, 0)["tokens"]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama3-8b-tiny", None),
        ("qwen3-30b-a3b-tiny", EXPERTS),
        ("gpt-oss-20b-tiny", EXPERTS),
        ("nemotron3-nano-30b-a3b-tiny", ["in_proj", "experts.up_proj"]),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_merged_weights(name, targets):
    """y = x (W + s B A)^T, so that with G the gradient of the sum, that of A is s B^T G and that of B is s G A^T."""
    model, tokens = adapted({"targets": targets} if targets else {}, model=name)
    values = {
        name: p.detach().clone() for name, p in model.named_parameters() if is_adapter(name)
    }
    logits = model(tokens)
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    logits.backward(cotangent)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == values.keys()
    merge_adapters(model)
    merged = model(tokens)
    torch.testing.assert_close(merged, logits, atol=2e-5, rtol=0)
    merged.backward(cotangent)
    for name, gradient in found.items():
        stem, letter = name[:-1], name[-1]
        path = name[: -len("_lora_A")]
        g = model.get_parameter(path if "experts." in path else path + ".weight").grad
        a, b = values[stem + "A"], values[stem + "B"]
        expected = 0.5 * (b.mT @ g if letter == "A" else g @ a.mT)
        assert (gradient - expected).norm() <= 2e-5 * expected.norm()


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], EXPERTS], ids=str)
def test_the_gradients_of_frozen_weights_are_never_computed(targets):
    """Counted: a frozen weight costs two products, not three, and an adapter's three."""
    name = "mixtral-8x7b-tiny" if targets == EXPERTS else "llama3-8b-tiny"
    model, tokens = adapted({"targets": targets}, model=name)
    counts = count_flops(lambda: model(tokens).sum().backward())
    work = count_work(model.config, lora_weights(model.config, 8, targets))
    assert tokens.numel() * clean(work, 0) == sum(counts.values()) - counts["aten.bmm"]
    assert all((p.grad is not None) == is_adapter(name) for name, p in model.named_parameters())


@pytest.mark.parametrize("setting", ["none", "full"])
def test_blocks_compile_once(setting):
    """The first one too, whose input is an embedding that nothing trains; and one graph more without gradients."""
    torch.compiler.reset()
    model, tokens = adapted({"dropout": 0.1})
    recompute(model.blocks, setting, random=True)
    counter = CompileCounterWithBackend("aot_eager")
    with mock.patch("torch.compile", partial(torch.compile, backend=counter)):
        for block in model.blocks:
            block.compile(fullgraph=True, dynamic=False)
        for _ in range(3):
            model(tokens).sum().backward()
        assert counter.frame_count == 1
        with torch.no_grad():
            model(tokens)
        assert counter.frame_count == 2
    torch.compiler.reset()


@pytest.mark.parametrize(
    "setting, backend",
    [("full", None), ("full", "aot_eager"), ("selective", None), ("selective", "aot_eager")],
)
def test_recomputation_drops_the_same(setting, backend):
    def gradients(setting):
        torch.compiler.reset()
        model, tokens = adapted({"dropout": 0.5})
        tree = TREE | {"lora": {"dropout": 0.5}, "recompute": setting, "device": "cpu"}
        config = from_dict(tree | {"compile": backend is not None})
        with mock.patch("torch.compile", partial(torch.compile, backend=backend)):
            apply_techniques(model, config, start(config))
        torch.manual_seed(1)
        model(tokens).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, found = gradients("none"), gradients(setting)
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-6 * gradient.abs().max().item(), rtol=1e-5
        )
    torch.compiler.reset()


def project_all(module, x):
    """The Linears of a module that have the same input."""
    return project(x, *(getattr(module, name) for name in module.same_input))


def adapted_down_projection(stack, lora):
    """A function, as it computes without adapters, and the weight, A and B that it has; of experts, the last one's."""
    if not stack:
        linear = adapted({"targets": ["down_proj"]} | lora)[0].blocks[0].mlp.down_proj
        return linear, lambda x: F.linear(x, linear.weight), linear.lora_A, linear.lora_B
    model, _ = adapted({"targets": ["experts.down_proj"]} | lora, model="mixtral-8x7b-tiny")
    experts = model.blocks[0].mlp.experts
    a, b = experts.down_proj_lora_A[-1], experts.down_proj_lora_B[-1]

    def product(x):
        offsets = torch.tensor([0] * (experts.num_experts - 1) + [len(x)], dtype=torch.int32)
        return experts._linear("down_proj", x, torch.ones(len(x), 1), offsets)

    return product, lambda x: F.linear(x, experts.down_proj[-1]), a, b


@pytest.mark.parametrize("stack", [False, True], ids=["linear", "experts"])
@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_is_where_it_is_said_and_off_without_gradients(position, stack):
    settings = {"dropout": 0.5, "dropout_position": position, "alpha": 8.0}
    product, base, a, b = adapted_down_projection(stack, settings)
    x = torch.rand(4000, a.shape[-1])
    update = product(x) - base(x)
    full = x @ a.T @ b.T
    kept = update != 0
    if position == "post":  # each element is dropped by itself, and what is kept is doubled
        assert kept.float().mean().item() == pytest.approx(0.5, abs=0.01)
        torch.testing.assert_close(update, 2 * full * kept, atol=1e-6, rtol=1e-4)
    else:
        assert kept.all() and (update - full).norm() > 0.1 * full.norm()
    torch.testing.assert_close(
        update.mean(0), full.mean(0), atol=0.05 * full.mean(0).abs().max().item(), rtol=0
    )
    with torch.no_grad():
        torch.testing.assert_close(product(x), base(x) + full)


@pytest.mark.parametrize(
    "targets", [["up_proj", "down_proj"], ["gate_proj", "up_proj", "down_proj"]], ids=str
)
@pytest.mark.parametrize("family", ["llama3-8b", "qwen2.5-7b"])
def test_products_add_to_updates_and_to_the_gradient_of_their_input(family, targets):
    """Compiled, and not by autograd: each frozen product adds its term to those before it. Qwen has biases."""
    torch.compiler.reset()
    targets = [*targets, "q_proj", "v_proj", "o_proj"]
    model, _ = adapted({"targets": targets}, model=f"{family}-tiny")
    attention, mlp = model.blocks[0].double().self_attn, model.blocks[0].mlp
    x = torch.randn(2, 30, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    graphs = []

    def keep(graph, inputs):
        graphs.append(
            [
                (str(node.target), getattr(node.meta.get("val"), "shape", None))
                for node in graph.graph.nodes
            ]
        )
        return boxed_nop(graph, inputs)

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    outputs = torch.compile(
        lambda x: [*project_all(attention, x), *project_all(mlp, x)],
        backend=backend,
        fullgraph=True,
    )(x)
    upstream = [torch.randn_like(part) for part in outputs]
    torch.autograd.backward(outputs, upstream)
    forward, backward = graphs
    linears = [getattr(attention, name) for name in attention.same_input] + [
        mlp.gate_proj,
        mlp.up_proj,
    ]
    adapters = sum(hasattr(linear, "lora_A") for linear in linears)
    assert [name for name, _ in forward].count("auto_functionalized_v2") == adapters
    assert "aten.add.Tensor" not in dict(forward)
    assert [name for name, _ in backward].count("auto_functionalized_v2") == 5
    # of the two projections
    assert [shape for name, shape in backward if name == "aten.add.Tensor"] == [x.shape]
    expected = 0
    for linear, y, grad in zip(linears, outputs, upstream, strict=True):
        a, b = (
            (linear.lora_A, linear.lora_B)
            if hasattr(linear, "lora_A")
            else (torch.zeros(1, 1).double(),) * 2
        )
        weight = linear.weight + 0.5 * b @ a
        torch.testing.assert_close(y, F.linear(x, weight, linear.bias))
        expected += grad @ weight
        full = (grad.mT @ x).sum(0)  # the gradient of the whole weight
        if hasattr(linear, "lora_A"):
            torch.testing.assert_close(a.grad, 0.5 * b.T @ full)
            torch.testing.assert_close(b.grad, 0.5 * full @ a.T)
    torch.testing.assert_close(x.grad, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_adapters_of_the_same_input_drop_its_elements_each_for_itself(compiled):
    torch.compiler.reset()
    mlp = adapted({"dropout": 0.5, "targets": ["gate_proj", "up_proj"]})[0].blocks[0].mlp
    gate, up, x = mlp.gate_proj, mlp.up_proj, torch.randn(50, mlp.gate_proj.in_features)
    up.load_state_dict(gate.state_dict())
    products = partial(project_all, mlp)
    outputs = (torch.compile(products, backend="aot_eager") if compiled else products)(x)
    updates = [y - F.linear(x, gate.weight) for y in outputs]
    full = gate.lora.scale * F.linear(F.linear(x, gate.lora_A), gate.lora_B)
    for one, other in ((updates[0], updates[1]), (updates[0], full), (updates[1], full)):
        assert (one - other).norm() > 0.1 * full.norm()
    torch.compiler.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_beside_adapters_can_learn_too(compiled):
    """If someone thaws them."""
    torch.compiler.reset()
    model, tokens = adapted()
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager")
    linear = model.blocks[0].mlp.up_proj
    linear.weight.requires_grad_(True)
    model(tokens).square().sum().backward()
    with torch.no_grad():
        linear.weight += 1e-2 * linear.weight.grad / linear.weight.grad.norm()
        rise = model(tokens).square().sum()
        linear.weight -= 2e-2 * linear.weight.grad / linear.weight.grad.norm()
        rise -= model(tokens).square().sum()
    assert rise.item() == pytest.approx(2e-2 * linear.weight.grad.norm().item(), rel=1e-2)


def test_hooks_of_adapted_linears_run():
    """Those of others too: such a Linear does not share the product of its neighbours."""
    model, tokens = adapted()
    expected, seen = model(tokens), []
    for linear in (model.blocks[0].self_attn.q_proj, model.blocks[1].mlp.up_proj):
        linear.register_forward_hook(lambda module, inputs, output: seen.append(module))
    torch.testing.assert_close(model(tokens), expected)
    assert len(seen) == 2


def test_backward_hooks_of_adapted_linears_run():
    model, tokens = adapted()
    seen, linear = [], model.blocks[1].mlp.up_proj
    linear.register_full_backward_pre_hook(lambda module, gradients: seen.append("pre"))
    linear.register_full_backward_hook(lambda module, *gradients: seen.append("post"))
    model(tokens).sum().backward()
    assert seen == ["pre", "post"]


@pytest.mark.parametrize(
    "backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.gpu)]
)
def test_compiled_backward_passes_drop_the_same(backend):
    """The compiler draws nothing again: it keeps a number per row and column, and multiplies them anew."""
    torch.compiler.reset()
    device = "cuda" if backend == "inductor" else "cpu"
    model, _ = adapted({"dropout": 0.3, "dropout_position": "post"})
    mlp = model.blocks[0].mlp.to(device, torch.float64)
    gate, up = mlp.gate_proj, mlp.up_proj
    shapes = (500, gate.in_features), (500, gate.out_features)
    x, upstream = (torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes)
    out = torch.compile(partial(project_all, mlp), backend=backend, fullgraph=True)(x)
    torch.autograd.backward(out, [upstream, 2 * upstream])
    for linear, y, grad in zip((gate, up), out, (upstream, 2 * upstream), strict=True):
        inner, update = F.linear(x, linear.lora_A), y - F.linear(x, linear.weight)
        full = linear.lora.scale / 0.7 * F.linear(inner, linear.lora_B)
        kept = update.abs() > full.abs() / 2
        assert kept.double().mean().item() == pytest.approx(0.7, abs=0.01)
        torch.testing.assert_close(update, full * kept)
        torch.testing.assert_close(
            linear.lora_B.grad, linear.lora.scale / 0.7 * (grad * kept).T @ inner
        )
    torch.compiler.reset()


def test_elements_are_dropped_independently():
    """The share, all pairs within rows and within columns, and corners of rectangles, which share rows and columns."""
    torch.manual_seed(0)
    lora, x = Lora(dropout=0.1, dropout_position="post"), torch.ones(2, 500, 800)
    dropped, others = (
        ((dropout(lora, x, "post").flatten(0, 1) == 0).float() - 0.1) / 0.3 for _ in range(2)
    )
    assert abs(dropped.mean()) < 5 / dropped.numel() ** 0.5
    for mask in (dropped, dropped.T):
        correlation = (mask @ mask.T / mask.shape[1] ** 0.5).fill_diagonal_(0)
        assert (
            correlation.std().item() == pytest.approx(1, abs=0.02)
            and correlation.abs().max() < 6.5
        )
    assert abs((dropped * others).mean()) < 5 / dropped.numel() ** 0.5
    (r, s), (c, d) = torch.randint(1000, (2, 10**6)), torch.randint(800, (2, 10**6))
    corners = (dropped[r, c] * dropped[r, d] * dropped[s, c] * dropped[s, d])[(r != s) & (c != d)]
    assert abs(corners.mean()) < 5 * corners.std() / 1000


@pytest.mark.parametrize("precision", ["bf16", "bf16-pure"])
def test_frozen_weights_are_kept_in_bf16(precision):
    config = from_dict(TREE | {"precision": precision, "lora": {}})
    types = {is_adapter(name): p.dtype for name, p in make_model(config).named_parameters()}
    assert types == {False: torch.bfloat16, True: torch.float32}
    config = from_dict(TREE | {"precision": precision, "lora": {"dtype": "bf16"}})
    assert {p.dtype for p in make_model(config).parameters()} == {torch.bfloat16}


def test_updates_are_rounded_once():
    """In bf16 beside adapters in fp32: the scaled B, which an identity in place of x A^T shows."""
    linear = nn.Linear(8, 6, bias=False).bfloat16()
    linear.lora = Lora(rank=4, alpha=5.0)
    linear.lora_A, linear.lora_B = (
        nn.Parameter(torch.randn(4, 8)),
        nn.Parameter(torch.randn(6, 4)),
    )
    assert torch.equal(
        low_rank_update(linear, torch.eye(4).bfloat16()).T,
        (1.25 * linear.lora_B.double()).bfloat16(),
    )
    set_variant(linear, LoraLinear.around(nn.Linear))
    assert linear(torch.ones(2, 8).bfloat16()).dtype == torch.bfloat16


def test_scale_and_initial_values():
    assert Lora(rank=16, alpha=32).scale == 2 and Lora(rank=16, alpha=32, rslora=True).scale == 8
    model = plain_model(from_dict(TREE | {"lora": {}}))
    linear = model.blocks[0].mlp.down_proj
    assert not linear.lora_B.any()
    stack = torch.empty(8, 16, 200)
    initialize_adapter("experts.down_proj_lora_A", stack, torch.Generator().manual_seed(0))
    again = torch.empty_like(stack)
    initialize_adapter("experts.down_proj_lora_A", again, torch.Generator().manual_seed(0))
    assert torch.equal(stack, again)
    for a in (linear.lora_A, stack):
        bound = a.shape[-1] ** -0.5
        assert a.abs().max() <= bound
        assert a.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_targets():
    def found(name, *targets):
        with torch.device("meta"):
            model = Decoder(model_config(name))
        add_adapters(model, Lora(rank=8, targets=list(targets)))
        return {
            name[: -len("_lora_A")].removeprefix("model.layers.")
            for name, p in model.named_parameters()
            if name.endswith("A") and p.requires_grad
        }

    assert found("llama3-8b-tiny", "1.self_attn.q_proj", "up_proj") >= {
        "1.self_attn.q_proj",
        "0.mlp.up_proj",
    }
    assert "0.self_attn.q_proj" not in found("llama3-8b-tiny", "1.self_attn.q_proj")
    assert found("mixtral-8x7b-tiny", "q_proj", "down_proj") == found(
        "mixtral-8x7b-tiny", "q_proj"
    )
    assert "0.mlp.experts.down_proj" in found("mixtral-8x7b-tiny", "experts.down_proj")
    assert "1.mlp.shared_experts.up_proj" in found("deepseek-v3-tiny", "up_proj")
    with torch.device("meta"):
        wan = Wan(model_config("wan2.1-1.3b-tiny"))
    told = r"the model has no q_proj, k_proj \(it has net.2, proj, to_k, to_out.0, to_q, to_v\)"
    with pytest.raises(InputError, match=told):
        check_targets(wan, ["q_proj", "k_proj"])  # else nothing at all would learn


def test_by_default_all_linears_of_attention_and_mlps_are_adapted():
    """Of routed experts none."""
    for name in ("llama3-8b-tiny", "mixtral-8x7b-tiny", "wan2.1-1.3b-tiny"):
        model = empty_model(model_config(name))
        check_targets(model, list(TARGETS))
        linears = {
            path
            for path, (module, _) in adaptable_weights(model).items()
            if isinstance(module, nn.Linear)
        }
        routers = {path for path in linears if path.endswith("gate")}
        assert find_targets(model, TARGETS).keys() == linears - routers


@pytest.mark.parametrize(
    ("lora", "line"),
    [
        ({"rank": 0}, "lora.rank=0 must be between 1 and 65,536"),
        ({"alpha": 2e9}, "lora.alpha=2000000000.0 must be above 0 and at most 1,000,000,000"),
        ({"dropout": 1.0}, "lora.dropout=1.0 must be at least 0 and below 1"),
        ({"alpha": 0}, "lora.alpha=0.0 must be above 0"),
        (
            {"targets": ["q_proj", "q_porj"]},
            r"the model has no q_porj \(it has down_proj, gate_proj, k_proj",
        ),
        ({"targets": ["lm_head"]}, "the model has no lm_head"),
        ({"targets": []}, "the model has no target"),
        ({"path": "nowhere"}, "nowhere/adapter_config.json"),
        ({"ranks": 8}, r"unknown key lora.ranks \(nearest: rank\)"),
    ],
    ids=str,
)
def test_mistakes(lora, line):
    with pytest.raises(InputError, match=line):
        from_dict(TREE | {"lora": lora})


def test_one_set_of_adapters_at_a_time():
    """A second set beside the first would be added to it, unseen."""
    model, tokens = adapted()
    with pytest.raises(InputError, match="has adapters already"):
        add_adapters(model, Lora())
    merge_adapters(model)
    assert {type(module) for module in model.modules()} == {
        type(module) for module in Decoder(model.config).modules()
    }
    assert not model.requires_grad_(False)(tokens).requires_grad
    expected = model(tokens)
    add_adapters(model, Lora(rank=4))
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.zeros_(parameter)
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize("name", ["llama3-8b-tiny", "mixtral-8x7b-tiny"])
def test_a_model_is_saved_when_its_adapters_are_merged(name, tmp_path):
    model, tokens = adapted(
        {"targets": ["q_proj", "experts.down_proj"][: 2 if "x" in name else 1]}, model=name
    )
    with pytest.raises(InputError, match="use merge_adapters first"):
        save_pretrained(model, tmp_path)
    merge_adapters(model)
    save_pretrained(model, tmp_path)
    assert torch.equal(load_pretrained(tmp_path)(tokens), model(tokens))


def test_merged_weights_are_rounded_once():
    weight, a, b = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    for dtype in (torch.float64, torch.bfloat16):
        found = merged_weight(weight.to(dtype), a.float(), b.float(), Lora(rank=4, alpha=4.0))
        exact = weight.to(dtype).double() + b.float().double() @ a.float().double()
        torch.testing.assert_close(
            found, exact.to(dtype), rtol=0 if dtype == torch.bfloat16 else 1e-12, atol=0
        )


def test_the_selection_bias_is_frozen_too():
    model = {"name": "deepseek-v3-tiny", "bias_update_speed": 0.1}
    with pytest.raises(InputError, match="bias_update_speed=0.1: lora freezes the model"):
        from_dict({"model": model, "batch": {"seq_len": 64}, "lora": {}})
    # moves it in no case
    from_dict({"model": model, "task": "grpo", "data": {"kind": "mock"}, "lora": {}})


def test_gpt3_is_refused():
    with pytest.raises(InputError, match="have no form in PEFT"):
        # which a config asks, and who writes adapters
        adapter_shapes(model_config("gpt3-175b-tiny"), Lora())


def compare_steps():
    config = from_dict(
        TREE | {"lora": {"rank": 4, "alpha": 4.0}, "precision": "bf16", "device": "cpu"}
    )
    meshes = start(config)
    theirs = peft_rival(make_trainer(config, meshes)).model
    trained = {p.dtype: 0 for p in theirs.parameters()}
    for p in theirs.parameters():
        trained[p.dtype] += p.numel() * p.requires_grad
    return trained, *(versus(config, meshes, "row", 1, 1, rival) for rival in ("peft", "full"))


def test_steps_are_compared_with_peft_and_with_training_all(pool):
    """peft trains as many weights, with the same types; and training all takes more memory."""
    ((trained, peft, full),) = pool.run(1, compare_steps)
    assert trained == {
        torch.bfloat16: 0,
        torch.float32: lora_weights(from_dict(TREE).model.config, 4),
    }
    assert peft["versus"] == "peft" and peft["versus_ratio"] > 0
    ours, all_of_it = full["versus_memory_gib"]
    weights = count_work(from_dict(TREE).model.config).parameters * 2**-30
    # in fp32: weights, gradients, two states
    assert ours < all_of_it and all_of_it > 16 * weights


# ----------------------------------------------------------------------------------------------------------- whole runs


def run(out, *changes):
    tree = TREE | {
        "out_dir": str(out),
        "device": "cpu",
        "optim": {"lr": 0.01},
        "lora": {"rank": 4, "dropout": 0.1},
    }
    for change in changes:
        tree = tree | change
    train(from_dict(tree))
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def train_export_and_resume(folder):
    """On a rank of the pool: `train` needs a process group of its own."""
    model = Decoder(model_config("llama3-8b-tiny", vocab_size=320, num_layers=2))
    initialize(model, seed=1)  # not what a run without them begins with
    save_pretrained(model, folder / "base")
    load_tokenizer("bytes").save(folder / "base")
    (folder / "base" / "generation_config.json").write_text('{"eos_token_id": [257, 10]}')
    base = {"model": {"path": str(folder / "base")}}
    losses = run(folder / "whole", base, {"steps": 4})
    run(folder / "parts", base, {"steps": 2})
    # masks too depend on the step alone
    assert run(folder / "parts", base, {"steps": 4}) == losses
    stored = load_file(folder / "whole" / "adapter_model.safetensors")
    assert stored.keys() == load_file(folder / "parts" / "adapter_model.safetensors").keys()
    assert not (folder / "whole" / "config.json").exists()
    index = read_index(folder / "whole/checkpoints/step-00000004/.metadata")
    assert all("lora_" in name for name in index.state_dict_metadata)
    again = run(folder / "again", base, {"steps": 1, "lora": {"path": str(folder / "whole")}})
    merge.main(
        [
            "--model",
            str(folder / "base"),
            "--adapter",
            str(folder / "whole"),
            "--out",
            str(folder / "out"),
        ]
    )
    assert json.loads((folder / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [257, 10]
    }
    merged = run(
        folder / "merged",
        {"model": {"path": str(folder / "out")}, "steps": 1, "lora": {"rank": 4}},
    )
    assert again == pytest.approx(merged, rel=1e-5) and again[0] != losses[0]
    settings = yaml.safe_load((folder / "again" / "config.yaml").read_text())
    assert settings["lora"]["rank"] == 4 and to_dict(from_dict(settings)) == settings
    with pytest.raises(InputError, match=r"lora.rank=8 cannot be changed: lora.path=.* has 4"):
        from_dict(TREE | base | {"lora": {"path": str(folder / "whole"), "rank": 8}})
    with pytest.raises(InputError, match="was trained over another base model"):
        run(
            folder / "whole",
            {"model": TREE["model"] | {"vocab_size": 320, "num_layers": 2}, "steps": 5},
        )


def test_the_settings_that_made_adapters_also_continue_them(tmp_path):
    """The file has experts behind other targets, and not what the model lacks."""
    model, targets = (
        model_config("qwen3-30b-a3b-tiny"),
        ["experts.down_proj", "v_proj", "q_proj", "gate_proj"],
    )
    lora = Lora(rank=4, targets=targets)
    save_adapter(
        ((name, torch.ones(x)) for name, x in adapter_shapes(model, lora).items()),
        model,
        lora,
        tmp_path,
    )
    tree = {
        "task": "lora",
        "model": "qwen3-30b-a3b-tiny",
        "lora": {"path": str(tmp_path), "targets": targets},
    }
    assert from_dict(tree).lora.targets == ["v_proj", "q_proj", "experts.down_proj"]
    tree["lora"]["targets"] = ["q_proj", "v_proj"]
    with pytest.raises(
        InputError,
        match=r"lora.targets=.* cannot be changed: lora.path=.* has .*experts.down_proj",
    ):
        from_dict(tree)


def test_from_training_to_a_merged_model(pool, tmp_path, capsys):
    pool.run(1, train_export_and_resume, tmp_path)
    folders = {name: str(tmp_path / name) for name in ("base", "whole", "out")}
    base, result = load_pretrained(tmp_path / "base"), load_pretrained(tmp_path / "out")
    stored = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    a, b = (stored[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    change = result.get_parameter(name + ".weight") - base.get_parameter(name + ".weight")
    assert change.norm() > 0
    torch.testing.assert_close(change, 32 / 4 * b @ a, atol=1e-6, rtol=0)
    words = ["--prompt", "ab", "--temperature", "0", "--max-tokens", "8", "--device", "cpu"]
    generate.main(["--model", folders["out"], *words])
    expected = capsys.readouterr().out
    generate.main(["--model", folders["base"], "--adapter", folders["whole"], *words])
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("out", ["model", "adapter"])
def test_merging_overwrites_nothing_that_it_reads(out):
    with pytest.raises(InputError, match=f"--out ./{out} is --{out}, which would be overwritten"):
        merge.main(["--model", "model", "--adapter", "adapter", "--out", f"./{out}"])
