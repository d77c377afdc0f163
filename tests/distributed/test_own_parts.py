"""Techniques taken home one by one: an MoE, an attention and MLPs of one's own, against one process."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from minitrain.parallel.context import context_parallel, local_tokens
from minitrain.parallel.expert import expert_parallel
from minitrain.parallel.pipeline import Pipeline
from minitrain.training.muon import Muon

WIDTH, RANKS = 8, 2
# which files come along with each; errors.py comes with the package itself
CLOSURES = {
    "parallel.expert": ["collectives", "parts"],
    "parallel.context": ["collectives", "mesh"],
    "parallel.pipeline": [
        "agreement",
        "pipeline_moves",
        "pipeline_split",
        "pipeline_stage",
        "shards",
    ],
    "training.muon": ["activation_offload", "adamw", "hashing", "shards", "variants"],
}
IMPORTS = """
import os, sys, torch.distributed.pipelining, torch.distributed.tensor
for name in sys.argv[1:]:
    if os.fork():
        os.wait()
    else:
        __import__(name)
        found = (m.__name__ for k, m in sys.modules.items() if k.startswith("minitrain") and not hasattr(m, "__path__"))
        print(name, *sorted(found), flush=True)
        os._exit(0)
"""


def test_what_comes_along():
    names = [f"minitrain.{name}" for name in CLOSURES]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *names], capture_output=True, text=True, check=True
    )
    for line, (name, others) in zip(done.stdout.splitlines(), CLOSURES.items(), strict=True):
        asked, *found = line.split()
        assert asked == f"minitrain.{name}"
        assert {module.split(".")[-1] for module in found} == {
            "errors",
            name.split(".")[1],
            *others,
        }


def mesh() -> dist.DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def made(kind: type) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


# --- an MoE

EXPERTS, TOP_K = 4, 2


class Experts(nn.Module):
    """A matrix for each expert. Of several ranks each has some, but knows the number of all."""

    num_experts = EXPERTS

    def __init__(self):
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        parts = rows.split(counts.tolist())
        outputs = [F.gelu(part @ matrix) for part, matrix in zip(parts, self.stack, strict=True)]
        return torch.cat(outputs) * weights[:, None].to(rows.dtype)


def dispatch(x: Tensor, indices: Tensor, weights: Tensor, experts: Experts):
    """On one rank."""
    tokens = torch.arange(len(x)).repeat_interleave(TOP_K)
    order = indices.flatten().argsort(stable=True)
    counts = indices.flatten().bincount(minlength=EXPERTS)
    outputs = experts(x[tokens[order]], weights.flatten()[order], counts)
    return lambda: torch.zeros_like(x).index_add(0, tokens[order], outputs)


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        # the exchange point, which expert parallelism sets
        self.dispatch = dispatch
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        # in a wider type than the tokens, as routers have in bf16 models
        weights, indices = self.router(x).double().softmax(-1).topk(TOP_K)
        return self.dispatch(x, indices, weights, self.experts)()


class SparseModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MoE() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum()


def train_experts():
    model = made(SparseModel)
    expert_parallel(model, mesh())
    x = vectors(12, WIDTH).chunk(RANKS)[dist.get_rank()]
    model(x).backward()
    for name, p in model.named_parameters():
        # each rank has other tokens; a rank's experts have seen those of all
        if "experts" not in name:
            dist.all_reduce(p.grad)
    return {
        name: g.full_tensor() if "experts" in name else g for name, g in gradients(model).items()
    }


def test_expert_parallelism_of_an_moe_of_ones_own(pool):
    model = made(SparseModel)
    model(vectors(12, WIDTH)).backward()
    for found in pool.run(RANKS, train_experts):
        torch.testing.assert_close(found, gradients(model))


# --- an attention

HEADS, LENGTH = 2, 8


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: None = None) -> Tensor:
    """q: [batch, heads, queries, channels]; k, v: of all keys; mask: bool [queries, keys]."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ v


def make_mask(length: int, device, document_ids=None, q_positions: Tensor | None = None):
    """q_positions: where the queries are among the keys, if they are not all of them."""
    keys = torch.arange(length)
    queries = keys if q_positions is None else q_positions
    return keys <= queries[:, None]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        # an exchange point of context parallelism
        self.attend = attend
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        return self.attend(*heads, mask).transpose(1, 2).flatten(2)


class CausalModel(nn.Module):
    def __init__(self):
        super().__init__()
        # the other exchange point
        self.make_mask = make_mask
        self.embedding = nn.Embedding(16, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.place(positions)
        mask = self.make_mask(tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = x + block(x, mask)
        return x.square().sum()


def sequences() -> Tensor:
    return torch.randint(16, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def train_attention(form: str):
    model = made(CausalModel)
    context_parallel(model, mesh(), form)
    model(**local_tokens({"tokens": sequences()}, mesh(), form)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return gradients(model)


@pytest.mark.parametrize("form", ["allgather", "ulysses"])
def test_context_parallelism_of_an_attention_of_ones_own(pool, form):
    model = made(CausalModel)
    model(sequences(), torch.arange(LENGTH).expand(2, -1)).backward()
    for found in pool.run(RANKS, train_attention, form):
        torch.testing.assert_close(found, gradients(model))


# --- MLPs

LAYERS, STEPS = 4, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def layers() -> nn.Sequential:
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


SETTINGS = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


def train_by_muon():
    model = made(layers)
    fully_shard(model)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "newton_schulz": torch.float32},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, torch.float32, **SETTINGS)
    for step in range(STEPS):
        x = vectors(STEPS, RANKS, 4, WIDTH)[step, dist.get_rank()]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def orthogonal(x: Tensor) -> Tensor:
    """Jordan's five steps, of one matrix."""
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
    return wide.T if x.shape[0] > x.shape[1] else wide


def test_muon_of_an_mlp_of_ones_own(pool):
    model = made(layers)
    others = [p for p in model.parameters() if p.ndim != 2]
    adamw = torch.optim.AdamW(others, **SETTINGS, weight_decay=0.0)
    momenta = {p: torch.zeros_like(p) for p in model.parameters() if p.ndim == 2}
    for step in range(STEPS):
        model(vectors(STEPS, RANKS * 4, WIDTH)[step]).square().mean().backward()
        with torch.no_grad():
            for p, momentum in momenta.items():
                momentum.mul_(0.95).add_(0.05 * p.grad)
                update = orthogonal(0.05 * p.grad + 0.95 * momentum)
                p -= SETTINGS["lr"] * (0.1 * p + 0.2 * max(p.shape) ** 0.5 * update)
        adamw.step()
        model.zero_grad()
    for found in pool.run(RANKS, train_by_muon):
        torch.testing.assert_close(found, dict(model.named_parameters()), atol=1e-5, rtol=1e-4)


class LastLayers(nn.Module):
    """A pipeline's last stage: it returns the loss."""

    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


def train_pipeline(schedule: str, vp: int):
    model = made(layers)
    # which stages a rank has: 0, 2 and 1, 3, or the first and the last
    numbers = [dist.get_rank() + RANKS * i for i in range(vp)]
    if schedule == "ZBVZeroBubble":
        numbers = [dist.get_rank(), 2 * RANKS - 1 - dist.get_rank()]
    each = LAYERS // (RANKS * vp)
    parts = {n: model[n * each : (n + 1) * each] for n in numbers}
    stages = {n: LastLayers(part) if n == RANKS * vp - 1 else part for n, part in parts.items()}
    pipeline = Pipeline(stages, schedule, mesh(), lambda batch: batch["x"].shape, torch.float32)
    batches = [{"x": x} for x in vectors(4, 3, WIDTH)]
    loss = pipeline.forward_backward(
        lambda model, batch: model(batch["x"]), batches, torch.tensor(12.0)
    )
    # by number of the layer
    return loss, {
        n * each + i: gradients(layer)
        for n, part in parts.items()
        for i, layer in enumerate(part)
    }


@pytest.mark.parametrize(
    ("schedule", "vp"), [("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)]
)
def test_a_pipeline_of_an_mlp_of_ones_own(pool, schedule, vp):
    """Hidden states are vectors: [micro, width], without a sequence."""
    model = made(layers)
    expected = model(vectors(4, 3, WIDTH)).square().sum() / 12
    expected.backward()
    seen = {}
    for loss, found in pool.run(RANKS, train_pipeline, schedule, vp):
        torch.testing.assert_close(loss, expected.detach())
        seen |= found
    assert sorted(seen) == list(range(LAYERS))
    for number, found in seen.items():
        torch.testing.assert_close(found, gradients(model[number]))
