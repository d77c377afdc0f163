"""The product's path on CUDA against the same on CPU: kernels, FSDP2 on NCCL, compiled blocks (`pytest -m gpu`)."""

import copy
import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from minitrain import Sampler, SamplingParams
from minitrain.data.datasets import open_dataset
from minitrain.grpo.offload import Memory
from minitrain.models.attention import Mask, attention
from minitrain.models.fp8 import to_fp8
from minitrain.models.frozen import freeze
from minitrain.models.grouped_mm import has_fast_kernel
from minitrain.models.layers import GatedMLP, project
from minitrain.models.moe import Experts
from minitrain.models.quantize import E4M3, E5M2, dequantize, quantize
from minitrain.models.wan import Wan
from minitrain.models.zoo import model_config
from minitrain.parallel import activation_offload
from minitrain.parallel.shards import full_tensor, local_shard
from minitrain.parallel.tensor import along_sequence
from minitrain.rollout import engine
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.settings import Rollout
from minitrain.training.loop import Trainer
from minitrain.training.loss import linear_cross_entropy
from tests.helpers.families import families
from tests.helpers.sampling import compiling_batch, make, prompts_of, trainer_logprobs, uncached

pytestmark = pytest.mark.gpu
has_fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="needs FP8 units",
)

TREE = {
    "model": {"name": "llama3.1-8b-tiny", "head_dim": 32, "vocab_size": 512},
    "batch": {"global": 4, "micro": 2, "seq_len": 128},
    # decay would outweigh small gradients
    "optim": {"name": "sgd", "lr": 0.1, "clip": None, "weight_decay": 0.0},
}
PLAIN = {"precision": "fp32", "compile": False, "recompute": "none"}
FAMILIES = [name.removesuffix("-tiny") for name in families()]


def family(name: str, **changes) -> dict:
    """A twin with heads wide enough for the kernels."""
    config = model_config(f"{name}-tiny")
    heads = {} if config.kv_lora_rank else {"head_dim": 32}
    if config.family == "gpt2":
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    return {"name": f"{name}-tiny", "vocab_size": 512, **heads, **changes}


class Documents:
    """Random rows whose documents are 50 tokens long."""

    def row(self, n: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(512, (129,), generator=torch.Generator().manual_seed(n))
        place = torch.arange(128)
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "positions": place % 50,
            "document_ids": place // 50,
        }


@pytest.fixture(autouse=True)
def few_compilations():
    yield
    torch.compiler.reset()  # all tests' blocks together would go over the limit of recompilations


def updates(device: str, steps: int = 2, **changes) -> dict[str, torch.Tensor]:
    """By how much training on `device` changes each weight, from values drawn on the CPU (adapters' B too)."""
    cpu = from_dict(TREE | changes | PLAIN | {"device": "cpu"})
    config = from_dict(TREE | {"device": device} | changes)
    model = Trainer(cpu, start(cpu)).model
    drawn = {name: full_tensor(p).clone() for name, p in model.state_dict().items()}
    for name, value in drawn.items():
        if name.endswith("lora_B"):  # of zeros, A would have no gradient
            value.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    dist.destroy_process_group()
    trainer = Trainer(config, start(config))
    for name, parameter in trainer.model.state_dict().items():
        local_shard(parameter)[0].copy_(drawn[name])
    for step in range(steps):
        trainer.step(Documents(), step)
    state = trainer.model.state_dict()
    trained = [
        name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    ]
    changes = {name: full_tensor(state[name]).cpu().float() - drawn[name] for name in trained}
    dist.destroy_process_group()
    return changes


def check_updates(tolerance: float, steps: int = 2, **changes) -> None:
    """Those on CUDA against plain ones on the CPU, each relative to its own size."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ours, expected = updates("cuda", steps, **changes), updates("cpu", steps, **changes | PLAIN)
    # What cancels to nothing, as the gradients of key biases do, is rounding alone.
    least = 0.01 * tolerance * max(change.norm() for change in expected.values())
    for name, change in expected.items():
        error = (ours[name] - change).norm() / change.norm().clamp(min=least)
        assert error < tolerance, f"the update of {name} is off by {error:.1e}"


@pytest.mark.parametrize(
    "changes, tolerance",
    [
        ({}, 1e-4),  # on the CPU alone, sums in another order move an update by 4e-5
        ({"compile": True}, 1e-4),
        ({"recompute": "full"}, 1e-4),
        ({"precision": "bf16"}, 4e-2),
        ({"precision": "bf16", "compile": True, "recompute": "full"}, 4e-2),
        ({"precision": "bf16", "compile": True, "lora": {"rank": 4}}, 4e-2),
    ],
    ids=str,
)
def test_training_equals_that_on_the_cpu(changes, tolerance):
    check_updates(tolerance, **changes)


@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16", "compile": True}, {"lora": {"rank": 4}}], ids=str
)
def test_offload_changes_no_bit(monkeypatch, changes):
    """Of activations with SGD, and of AdamW's states with its update on the CPU, which may round otherwise."""
    monkeypatch.setattr(activation_offload, "MIN_BYTES", 1 << 10)
    for way in ("offload", "full-offload"):
        moved = updates("cuda", deterministic=True, recompute=way, **changes)
        alike = "none" if way == "offload" else "full"
        right = updates("cuda", deterministic=True, recompute=alike, **changes)
        assert all(torch.equal(moved[name], right[name]) for name in right)
    one, other = (
        updates("cuda", deterministic=True, optim={"lr": 0.01, "offload": on}, **changes)
        for on in (True, False)
    )
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("compiled", [False, True])
def test_families_train_as_on_the_cpu(name, compiled):
    """Every mask, router, grouped product and scan, in fp32."""
    check_updates(1e-3, steps=1, model=family(name), compile=compiled)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("recompute", ["none", "attention", "selective"])
def test_families_train_in_bf16(name, recompute):
    """As their table rows do: compiled, with grouped products in bf16, and experts that rounding cannot change."""
    settings = {"model": family(name, fake_balanced_gate=True), "precision": "bf16"}
    check_updates(6e-2, steps=1, compile=True, recompute=recompute, **settings)


DIFFUSION = {
    "task": "diffusion",
    "model": {"name": "wan2.1-1.3b-tiny", "attention_head_dim": 64},
    "data": {"kind": "mock", "size": [4, 16, 8], "text_tokens": 40},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": family("llama3.1-8b")},
        {"model": family("qwen3-30b-a3b")},
        DIFFUSION,
        # one video: odd strides
        DIFFUSION | {"batch": {"global": 4, "micro": 1, "seq_len": 128}, "recompute": "full"},
    ],
    ids=["dense", "experts", "wan", "wan, one at a time"],
)
def test_a_step_never_waits_for_the_device_nor_compiles_again(changes):
    config = from_dict(TREE | {"device": "cuda", "precision": "bf16", "compile": True} | changes)
    trainer = Trainer(config, start(config))
    data = open_dataset(config)[0] if config.task == "diffusion" else Documents()
    batches = [
        [
            {k: v.pin_memory() for k, v in batch.items()}
            for batch in trainer.micro_batches(data, 0)
        ]
        for _ in range(4)
    ]
    for step, batch in enumerate(batches):
        if step == 2:
            graphs = counters["stats"]["unique_graphs"]
        with never_waiting() if step >= 2 else nullcontext():
            trainer.update(batch, step)
    assert counters["stats"]["unique_graphs"] == graphs > 0


@contextmanager
def never_waiting():
    """What waits for the device here is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@has_fp8
@pytest.mark.parametrize("changes", [{}, {"compile": True}, {"recompute": "full"}], ids=str)
def test_fp8_training_is_as_exact_as_on_the_cpu(changes):
    """Against fp32. To each other they are no nearer: one bf16 rounding in another place moves updates by 10 %, and the
    CPU's own error by up to 30 %."""
    exact, on_cpu = updates("cpu", **PLAIN), updates("cpu", **PLAIN | {"precision": "fp8"})
    ours = updates("cuda", **changes | {"precision": "fp8"})
    for name, update in exact.items():
        error, usual = ((each[name] - update).norm() / update.norm() for each in (ours, on_cpu))
        assert error < 1.5 * usual < 0.3, (
            f"the update of {name} is off by {error:.1e}, on the CPU by {usual:.1e}"
        )
        # rounding is nearly orthogonal, a wrong scale not
        length = (ours[name] * update).sum() / update.square().sum()
        assert abs(length - 1) < 0.1, f"the update of {name} is {length:.2f} times as long"


def fp8_passes(
    device: str,
    fast: str,
    dtype: torch.dtype,
    compiled: bool,
    form: str = "tensor",
    rows: tuple[int, int] = (4, 250),
) -> list[torch.Tensor]:
    """Outputs and gradients of an MLP's FP8 Linears, two with one input, one with another: the same on all devices but
    for the order of sums."""
    generator = torch.Generator().manual_seed(0)
    x, z, *grads = (
        torch.randn(*rows, size, generator=generator) for size in (256, 128, 128, 128, 256)
    )
    mlp = GatedMLP(256, 128)
    for weight in mlp.parameters():
        torch.nn.init.normal_(weight, generator=generator)
    to_fp8([mlp.to(device)], fast, form=form)
    x, z = (each.to(device, dtype).requires_grad_() for each in (x, z))

    def products(x, z):
        return *project(x, mlp.gate_proj, mlp.up_proj), mlp.down_proj(z)

    if compiled:
        products = torch.compile(products, fullgraph=True, dynamic=False)
    outputs = products(x, z)
    grads = [grad.to(device, dtype) for grad in grads]
    gradients = torch.autograd.grad(outputs, [x, z, *mlp.parameters()], grads)
    return [each.detach().cpu().float() for each in (*outputs, *gradients)]


@has_fp8
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fast", ["none", "forward", "all"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
def test_fp8_products_equal_those_on_cpu(dtype, tolerance, fast, compiled):
    """Of products, Hopper adds up some 14 bits (DeepSeek-V3, section 3.5.2); fast sums keep no more themselves."""
    expected = fp8_passes("cpu", "none", dtype, False)
    for ours, right in zip(fp8_passes("cuda", fast, dtype, compiled), expected, strict=True):
        assert (ours - right).norm() < max(
            tolerance, 5e-3 if fast != "none" else 0
        ) * right.norm()


@has_fp8
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-2), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("form", ["row", "block", "mx"])
def test_products_of_each_form_equal_those_on_cpu(form, dtype, tolerance, compiled):
    """On units that have it, or of dequantized factors: both return bf16. Of an odd number of tokens."""
    given = "none", dtype
    expected = fp8_passes("cpu", *given, False, form, (1, 1001))
    for ours, right in zip(
        fp8_passes("cuda", *given, compiled, form, (1, 1001)), expected, strict=True
    ):
        assert (ours - right).norm() < tolerance * right.norm()


@has_fp8
@pytest.mark.parametrize("form", ["row", "block", "mx"])
def test_training_in_each_form_is_as_exact_as_on_the_cpu(form):
    wide = {
        "precision": "fp8",
        "fp8": {"form": form},
        "model": TREE["model"] | {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512},
    }
    exact = updates("cpu", **wide | PLAIN)
    on_cpu = updates("cpu", **wide | PLAIN | {"precision": "fp8"})
    ours = updates("cuda", **wide | {"compile": True})
    for name, update in exact.items():
        error, usual = ((each[name] - update).norm() / update.norm() for each in (ours, on_cpu))
        assert error < 1.5 * usual < 0.3, f"{name}: {error:.1e}, on the CPU {usual:.1e}"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("store", ["fp8", "nf4"])
def test_products_with_frozen_weights_equal_those_on_cpu(store, compiled):
    """Of the same bytes: in fp32 only the order of sums differs."""
    if store == "fp8" and torch.cuda.get_device_capability() < (8, 9) and compiled:
        pytest.skip("the compiler has no e4m3 there")

    def passes(device):
        generator = torch.Generator().manual_seed(0)
        linear = torch.nn.Linear(256, 384, bias=False).requires_grad_(False)
        torch.nn.init.normal_(linear.weight, generator=generator)
        freeze([torch.nn.ModuleList([linear])], store)
        linear.to(device)
        x, upstream = (torch.randn(100, n, generator=generator).to(device) for n in (256, 384))
        run = torch.compile(linear, fullgraph=True) if compiled and device == "cuda" else linear
        y = run(x.requires_grad_())
        return [*linear.parameters(), y.detach(), torch.autograd.grad(y, x, upstream)[0]]

    for ours, right in zip(passes("cuda"), passes("cpu"), strict=True):
        if ours.dtype == torch.uint8:
            assert torch.equal(ours.cpu(), right)
        else:
            assert (ours.cpu() - right).norm() < 1e-3 * right.norm()


@has_fp8
@pytest.mark.parametrize("compiled", [False, True])
def test_what_tensor_parallelism_gathers_in_fp8(compiled):
    """On one rank: what FP8 products make of the input, and of the output's gradient, to the bit."""
    all_gather, reduce_scatter = along_sequence(start(from_dict(TREE | {"device": "cuda"})).tp)
    generator = torch.Generator("cuda").manual_seed(0)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(2, 128, 256, **options).requires_grad_()
    grad = torch.randn(2, 128, 256, **options)

    def there_and_back(x):
        gathered = all_gather(x, True)
        return gathered, reduce_scatter(x, True)

    if compiled:
        there_and_back = torch.compile(there_and_back, fullgraph=True)
    gathered, scattered = there_and_back(x)
    scattered.backward(grad)
    assert torch.equal(gathered, dequantize(*quantize(x, E4M3), x.dtype))
    assert torch.equal(scattered, x)
    assert torch.equal(x.grad, dequantize(*quantize(grad, E5M2), x.dtype))


def fp8_expert_passes(device: str, rows: list[int], form: str = "tensor") -> list[torch.Tensor]:
    """Output and gradients of experts' products, with so many rows for each."""
    generator = torch.Generator().manual_seed(0)
    sizes = (sum(rows), 256), (sum(rows), 128), (len(rows), 128, 256)
    x, grad, weights = (torch.randn(size, generator=generator) for size in sizes)
    experts = Experts(len(rows), 256, 128, "relu2", bias=False)
    experts.up_proj.data = weights
    to_fp8([torch.nn.ModuleList([experts])], "none", experts=True, form=form)
    x = x.to(device, torch.bfloat16).requires_grad_()
    offsets = torch.tensor(rows).cumsum(0, dtype=torch.int32)
    y = experts.to(device)._product("up_proj", x, offsets.to(device))
    gradients = torch.autograd.grad(y, [x, experts.up_proj], grad.to(device, torch.bfloat16))
    return [each.detach().cpu().float() for each in (y, *gradients)]


def expert_passes(
    device: str, dtype: torch.dtype, mlp: str, compiled: bool
) -> list[torch.Tensor]:
    """Output and gradients of experts that have 3, 0, 21 and 8 rows, of values that bf16 can hold."""
    generator, counts = torch.Generator().manual_seed(0), torch.tensor([3, 0, 21, 8])
    experts = Experts(4, 64, 48, mlp, bias=True)
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator).bfloat16() * 0.2)
    x, grad = (torch.randn(32, 64, generator=generator).bfloat16() for _ in range(2))
    weights = torch.rand(32, generator=generator).bfloat16()
    x, weights, grad = (each.to(device, dtype) for each in (x, weights, grad))
    experts.to(device, dtype)
    if compiled:
        experts.compile(fullgraph=True, dynamic=False)
    y = experts(x.requires_grad_(), weights.requires_grad_(), counts.to(device))
    gradients = torch.autograd.grad(y, [x, weights, *experts.parameters()], grad)
    return [each.detach().cpu().float() for each in (y, *gradients)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mlp", ["swiglu", "clamped_swiglu", "relu2"])
def test_experts_with_any_numbers_of_rows_in_bf16(mlp, compiled):
    """As routers give them: kernels want addresses of 16 bytes, and where they copy must still find them."""
    expected = expert_passes("cpu", torch.float32, mlp, compiled=False)
    for ours, right in zip(
        expert_passes("cuda", torch.bfloat16, mlp, compiled), expected, strict=True
    ):
        assert (ours - right).norm() <= 2e-2 * right.norm()


@has_fp8
@pytest.mark.parametrize("rows", [[1000], [0]], ids=str)
def test_fp8_products_of_experts_equal_those_on_cpu(rows):
    for ours, right in zip(
        fp8_expert_passes("cuda", rows), fp8_expert_passes("cpu", rows), strict=True
    ):
        assert (ours - right).norm() <= 1e-2 * right.norm()


@has_fp8
@pytest.mark.parametrize("form", ["row", "block", "mx"])
@pytest.mark.parametrize("rows", [[300, 0, 683, 17], [0, 0, 0, 5], [1000]], ids=str)
def test_grouped_products_of_each_form_equal_those_on_cpu(form, rows):
    for ours, right in zip(
        fp8_expert_passes("cuda", rows, form), fp8_expert_passes("cpu", rows, form), strict=True
    ):
        assert (ours - right).norm() <= 1e-2 * right.norm()


def test_plain_causal_attention_runs_on_cudnn():
    config = from_dict(
        TREE | {"device": "cuda", "precision": "bf16-pure", "data": {"kind": "mock"}}
    )
    trainer = Trainer(config, start(config))
    tokens = torch.randint(512, (2, 128), device="cuda")
    with torch.profiler.profile() as profile:
        trainer.model(tokens, labels=tokens, head=linear_cross_entropy).backward()
        torch.cuda.synchronize()
    assert any("cudnn" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("width, of_values", [(64, 64), (128, 128), (192, 192), (192, 128)])
def test_attention_of_all_widths(width, of_values, kv_heads):
    """Nemotron-4 340B has heads of 192 channels, DeepSeek-V3 keys of 192 with values of 128; others have 64 or 128."""
    shapes = (8, width), (kv_heads, width), (kv_heads, of_values)
    inputs = [
        torch.randn(2, heads, 384, dim, dtype=torch.bfloat16, device="cuda")
        for heads, dim in shapes
    ]
    upstream = torch.randn(2, 8, 384, of_values, dtype=torch.bfloat16, device="cuda")
    results = []
    for dtype, context in (
        (torch.bfloat16, nullcontext()),
        (torch.float32, sdpa_kernel(SDPBackend.MATH)),
    ):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        with context:
            out = attention(*leaves, Mask(causal=True))
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() / expected.norm() < 0.02


def test_attention_in_fp32_keeps_no_scores():
    """Where heads share keys; a matrix of scores would take 256 MB."""
    q = torch.randn(1, 4, 4096, 64, device="cuda", requires_grad=True)
    k = torch.randn(1, 2, 4096, 64, device="cuda", requires_grad=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(q, k, k, Mask(causal=True)).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 200 << 20


@pytest.mark.parametrize("name", ["qwen3-32b", "gpt-oss-20b", "deepseek-v3"])
def test_prompts_of_any_length_take_kernels_that_need_no_plan(name):
    """Whether they begin with other's pages or not, see a window or not: cuDNN would plan anew for each length."""
    model = make(name, head_dim=24 if name == "deepseek-v3" else 16).to("cuda", torch.bfloat16)
    sampler = Sampler(model, settings=Rollout(page_size=128, pages=20, chunk=200))
    prompt = prompts_of((700,))[0]
    with torch.profiler.profile() as profile:
        sampler.generate([prompt[:150], prompt, prompt[:400]], SamplingParams(max_tokens=1))
    names = {event.key for event in profile.key_averages()}
    assert not any("cudnn" in name for name in names)
    assert any("fmha" in name or "flash" in name for name in names)


def test_wan_on_cuda_equals_cpu():
    """In bf16 against fp32 on the CPU."""
    torch.manual_seed(0)
    model = Wan(model_config("wan2.1-1.3b-tiny", attention_head_dim=64))
    videos = torch.randn(2, 16, 3, 16, 8)
    timestep, text = torch.tensor([900.0, 200.0]), torch.randn(2, 40, 64)
    expected = model(videos, timestep, text)
    model.to("cuda", torch.bfloat16)
    found = model(videos.cuda(), timestep.cuda(), text.cuda())
    for one, other in zip(found, expected, strict=True):
        assert (one.cpu() - other).norm() / other.norm() < 0.03


@pytest.mark.parametrize(
    "name", ["qwen3-32b", "gpt-oss-20b", "deepseek-v3", "nemotron3-nano-30b-a3b", "gpt3-175b"]
)
def test_sampling_on_cuda_equals_cpu(name):
    """Paged kernels in replayed graphs against full forward passes; graphs must not outlive the weights."""
    torch.backends.cuda.matmul.allow_tf32 = False
    # three share one: no power of two
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
    if name in ("deepseek-v3", "gpt3-175b"):
        heads = {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 24 if name == "deepseek-v3" else 16,
        }
    model, prompts = make(name, **heads), prompts_of((1, 60, 127, 140))
    sampler = Sampler(
        model.cuda(), settings=Rollout(slots=4, page_size=128, pages=10, chunk=100, steps=4)
    )
    for factor in (1.0, 1.1):
        model.cpu()
        for parameter in model.parameters():
            parameter.mul_(factor)
        expected = [uncached(model, prompt, 12) for prompt in prompts]
        model.cuda()
        sampler.free()  # moving a model gives its weights new addresses
        found = sampler.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        assert [each.tokens for each in found] == expected
        # whose products in fp32 wait for the device
        assert bool(graphs_of(sampler)) == (not model.config.num_experts)
    # in place, as a weight sync does: the second time, the graphs of the first go on
    for factor in (0.9, 1.1):
        for parameter in model.parameters():
            parameter.mul_(factor)
        sampler.refresh()
        found = sampler.generate(prompts, SamplingParams(temperature=0.8, max_tokens=12, n=2))
        on_cpu = copy.deepcopy(model).cpu()
        for number, each in enumerate(found):
            theirs = trainer_logprobs(on_cpu, prompts[number // 2], each.tokens, 0.8)
            torch.testing.assert_close(torch.tensor(each.logprobs), theirs, atol=1e-3, rtol=0)


def graphs_of(sampler: Sampler) -> list:
    return [graph for batch in sampler.batches.values() for graph in batch.captured.values()]


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "nemotron3-super-120b-a12b"])
def test_steps_with_experts_are_graphs_in_bf16(name):
    """The CPU may choose other experts where two are nearly alike: hence the mean, and one pass for all tokens."""
    if not has_fast_kernel(torch.empty(0, dtype=torch.bfloat16, device="cuda")):
        pytest.skip("grouped products wait for the device except on compute capability 9 and 10")
    model, prompts = make(name, head_dim=16).to("cuda", torch.bfloat16), prompts_of((1, 60, 140))
    sampler = Sampler(model, settings=Rollout(slots=4, page_size=128, pages=10, steps=4))
    found = sampler.generate(prompts, SamplingParams(max_tokens=12))
    assert graphs_of(sampler)
    model.cpu()
    for prompt, each in zip(prompts, found, strict=True):
        theirs = trainer_logprobs(model, prompt, each.tokens)
        assert (torch.tensor(each.logprobs) - theirs).abs().mean() < 0.1


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "nemotron3-nano-30b-a3b", "gpt-oss-20b"])
def test_prompts_never_wait_for_the_device(name):
    """So the host prepares one piece of prompts while the device computes another."""
    sampler = Sampler(
        make(name, head_dim=16).to("cuda", torch.bfloat16),
        settings=Rollout(page_size=128, pages=10),
    )
    sampler.generate(prompts_of((60, 140)), SamplingParams(max_tokens=2))  # compiles
    samples = [
        sampler.submit(prompt, SamplingParams(max_tokens=2))[0]
        for prompt in prompts_of((60, 140), seed=1)
    ]
    with never_waiting():
        assert sampler.step() == []
    assert [prefill.cached for prefill in sampler.scheduler.resident] == [59, 139]
    sampler.cancel(*samples)


@pytest.mark.parametrize("heads", [4, 128])
def test_latents_of_the_published_width(heads):
    """576 channels, and all heads of DeepSeek-V3 on one GPU: the kernel's usual tiles would not fit."""
    torch.backends.cuda.matmul.allow_tf32 = False
    counts = {"num_attention_heads": heads, "num_key_value_heads": heads}
    model = make("deepseek-v3", kv_lora_rank=512, qk_rope_head_dim=64, head_dim=80, **counts)
    prompts = prompts_of((3, 200))
    expected = [uncached(model, prompt, 8) for prompt in prompts]
    # all that fit would be half of the GPU's memory
    sampler = Sampler(model.cuda(), settings=Rollout(pages=8))
    found = sampler.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
    assert [each.tokens for each in found] == expected


def test_long_samples_and_no_compilation_after_the_first():
    """Samples of very different lengths, whose pages several blocks share; and a pool that was freed and comes back."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make("qwen3-32b", head_dim=16, max_position_embeddings=2048)
    prompts = prompts_of((5, 1900, 700))
    expected = [uncached(model, prompt, 6) for prompt in prompts]
    sampler, graphs = Sampler(model.cuda(), settings=Rollout(slots=4)), []
    for _ in range(2):
        found = sampler.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
        assert [each.tokens for each in found] == expected
        graphs.append(counters["stats"]["unique_graphs"])
        pool = weakref.ref(sampler.caches[0].pools[0])
        sampler.free()
        assert pool() is None
    assert graphs[0] == graphs[1] > 0


def test_training_and_sampling_leave_each_other_their_memory():
    gc.collect()  # what earlier tests have left is not to go in between
    states, sampler = ([torch.randn(1 << 20, device="cuda") for _ in range(3)] for _ in range(2))
    values, size = [state.cpu() for state in states], sum(state.nbytes for state in states)
    both = torch.cuda.memory_allocated()
    memory = Memory({"training": lambda: states}, {"generation": lambda: sampler})
    memory.hold("training")
    for _ in range(2):
        assert torch.cuda.memory_allocated() == both - size
        memory.hold("generation")
        assert torch.cuda.memory_allocated() == both - size
        for weights in sampler:
            weights.fill_(1)  # in what states may have left
        memory.hold("training")
    assert all(
        torch.equal(state.cpu(), value) for state, value in zip(states, values, strict=True)
    )


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    "name", ["qwen3-32b", "gpt-oss-20b", "deepseek-v3", "nemotron3-nano-30b-a3b"]
)
def test_drafts_give_the_same_tokens(name, compile):
    """Verified by CUDA graphs where steps are captured; tokens of a row lie in two pages."""
    torch.backends.cuda.matmul.allow_tf32 = False
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    if name == "deepseek-v3":
        heads |= {"num_key_value_heads": 4, "head_dim": 24, "num_nextn_predict_layers": 1}
    model, prompts = make(name, **heads), prompts_of((1, 60, 126))
    expected = [uncached(model, prompt, 12) for prompt in prompts]
    own = bool(model.config.num_nextn_predict_layers)
    draft = None if own else make("qwen3-32b", **heads).cuda()
    settings = Rollout(slots=4, page_size=128, pages=10, steps=4, compile=compile)
    settings.draft = "mtp" if own else ""
    sampler = Sampler(model.cuda(), settings=settings, draft=draft)
    for some in ([0, 1, 2], [2]):
        found = sampler.generate(
            [prompts[i] for i in some], SamplingParams(temperature=0, max_tokens=12)
        )
        assert [each.tokens for each in found] == [expected[i] for i in some]
    assert sampler.drafter.counts["drafted"] > 0


@pytest.mark.parametrize(
    "name", ["qwen3-32b", "gpt-oss-20b", "deepseek-v3", "nemotron3-nano-30b-a3b", "gpt3-175b"]
)
def test_compiled_steps_give_the_same_tokens(name, monkeypatch):
    """With four rows, two and one; weights that change in place make nothing compile again."""
    torch.backends.cuda.matmul.allow_tf32 = False
    # experts in fp32 wait for the device, and would not compile
    monkeypatch.setattr(engine, "DecodingBatch", compiling_batch)
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 24 if name == "deepseek-v3" else 16,
    }
    model, prompts, graphs = make(name, **heads).cuda(), prompts_of((1, 60, 140)), []
    sampler = Sampler(
        model, settings=Rollout(slots=4, page_size=128, pages=10, steps=4, compile=True)
    )
    for factor in (1.0, 1.1):
        for parameter in model.parameters():
            parameter.mul_(factor)
        sampler.refresh()
        on_cpu = copy.deepcopy(model).cpu()
        expected = [uncached(on_cpu, prompt, 12) for prompt in prompts]
        for some in ([0, 1, 2], [0, 1], [2]):
            found = sampler.generate(
                [prompts[i] for i in some], SamplingParams(temperature=0, max_tokens=12)
            )
            assert [each.tokens for each in found] == [expected[i] for i in some]
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
