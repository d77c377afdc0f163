"""Muon against the published one, in one process and under every layout, through checkpoints too."""

import pytest
import torch

from minitrain.data.datasets import open_dataset
from minitrain.run.checkpoint.checkpointer import Checkpointer
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import fill_weights
from minitrain.settings import Optim
from minitrain.training.loop import Trainer
from minitrain.training.optim import make_optimizer, update_weights
from tests.helpers.oracle import (
    Batches,
    check_close,
    copies,
    initial_weights,
    packed_batch,
    plain_step,
)

TREE = {
    "model": {"name": "llama3-8b-tiny", "vocab_size": 128, "num_layers": 2},
    "batch": {"global": 8, "micro": 2, "seq_len": 16},
    "optim": {"name": "muon", "lr": 0.01, "clip": None, "newton_schulz": "fp32"},
    "device": "cpu",
}


def train(tree, until, folder=None):
    """Train to step `until`, from the checkpoint in `folder` if there is one; return weights and states after it."""
    config = configs.from_dict(tree | {"steps": until})
    trainer = Trainer(config, start(config), fill=fill_weights)
    checkpointer = Checkpointer(folder, keep=1) if folder else None
    saved = checkpointer.load(trainer.model, trainer.optimizer) if folder else None
    batches = Batches(config, until, packed_batch)
    for step in range(saved["step"] if saved else 0, until):
        trainer.step(batches, step)
    if folder:
        checkpointer.save(until, trainer.model, trainer.optimizer, {"step": until})
    named = dict(trainer.model.state_dict())
    for name, p in trainer.model.named_parameters():
        named |= {
            f"{name}/{key}": value
            for key, value in trainer.optimizer.state[p].items()
            if key != "step"
        }
    return copies(named.items())


def zeropower(g):
    """Keller Jordan's zeropower_via_newtonschulz5 as torch.optim.Muon has it, but in the type of g."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def reference(tree, steps):
    """Train in one process by plain autograd, torch's AdamW, and Muon as Moonlight's examples/toy_train.py has it."""
    config = configs.from_dict(tree)
    optim = config.optim
    weights = {name: torch.nn.Parameter(w) for name, w in initial_weights(config).items()}
    kinds = ("proj.weight", "mqa.weight", "up_proj", "down_proj")  # the last two: experts
    hidden = [name for name in weights if name.endswith(kinds)]
    rest = [name for name in weights if name not in hidden]
    assert len(hidden) + len(rest) == len(weights) and hidden
    groups = [
        {"params": [weights[n]], "weight_decay": optim.weight_decay * (weights[n].ndim > 1)}
        for n in rest
        if not n.endswith("bias")
    ]
    groups += [{"params": [weights[n]], "weight_decay": 0.0} for n in rest if n.endswith("bias")]
    adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps)
    momenta = {name: torch.zeros_like(weights[name]) for name in hidden}
    for step in range(steps):
        _, gradients = plain_step(config, dict(weights), packed_batch(config, step))
        for name, gradient in gradients.items():
            weights[name].grad = gradient
        adamw.step()
        with torch.no_grad():
            for name in hidden:
                momenta[name] = 0.95 * momenta[name] + 0.05 * gradients[name]
                update = 0.05 * gradients[name] + 0.95 * momenta[name]
                weights[name] *= 1 - optim.lr * optim.weight_decay
                rows = 2 if name.endswith("gate_up_proj") else 1  # gate's and up's, in turn
                stack = (
                    (weights[name], update)
                    if update.ndim == 3
                    else (weights[name][None], update[None])
                )
                for weight, matrix in zip(*stack, strict=True):
                    for part in range(rows):
                        own = matrix[part::rows]
                        weight[part::rows] -= (
                            optim.lr * 0.2 * max(own.shape) ** 0.5 * zeropower(own)
                        )
    states = {f"{name}/momentum_buffer": momentum for name, momentum in momenta.items()}
    for name in rest:
        states |= {
            f"{name}/{key}": adamw.state[weights[name]][key] for key in ("exp_avg", "exp_avg_sq")
        }
    return {name: w.detach() for name, w in weights.items()} | states


MOE = {"model": {"name": "deepseek-v3-tiny", "num_layers": 2}}
# ranks without an expert
FEW = {"model": {"name": "mixtral-8x7b-tiny", "num_layers": 2, "num_experts": 3}}
ONE = {"model": FEW["model"] | {"num_experts": 1, "num_experts_per_tok": 1}}
MTP = {"num_nextn_predict_layers": 1}
HYBRID = {"model": {"name": "nemotron3-super-120b-a12b-tiny"}}


@pytest.mark.parametrize(
    ("ranks", "tree"),
    [
        (1, {}),
        (2, {"parallel": {"tp": 2}}),
        (4, {"parallel": {"dp_shard": 4}}),
        (4, {"parallel": {"dp_replicate": 2, "tp": 2}}),
        (4, {"parallel": {"dp_shard": 2, "tp": 2}}),
        (4, {"parallel": {"dp_shard": 2, "pp": 2}}),
        (4, {"parallel": {"cp": 2, "reshard_after_forward": False}}),
        (3, {"batch": {"global": 6, "micro": 2, "seq_len": 16}}),  # shards of unequal sizes
        (4, MOE | {"parallel": {"ep": 2}}),
        (4, MOE | {"parallel": {"ep": 2, "tp": 2, "dp_replicate": 2}}),
        (4, MOE | {"parallel": {"dp_shard": 2, "tp": 2}}),
        (4, FEW | {"parallel": {"dp_shard": 4}}),
        (4, ONE | {"parallel": {"dp_shard": 2, "tp": 2}}),
        (4, {"parallel": {"tp": 2, "pp": 2}, "model": TREE["model"] | MTP}),
        (4, HYBRID | {"parallel": {"tp": 2}}),
        (4, HYBRID | {"parallel": {"ep": 2}}),
    ],
    ids=str,
)
def test_layouts(pool, ranks, tree):
    tree = TREE | tree
    results = pool.run(ranks, train, tree, 3)
    expected = reference(tree, 3)
    names = {name for result in results for name in result}
    buffers = names - expected.keys()
    assert expected.keys() <= names and all(
        "bias" in name or "buffer" in name for name in buffers
    )
    results = [{name: t for name, t in result.items() if name in expected} for result in results]
    weights = [{name: t for name, t in result.items() if "/" not in name} for result in results]
    check_close(
        weights, {name: t for name, t in expected.items() if "/" not in name}, 1e-5, "weights"
    )
    check_close(results, expected, 1e-4, "weights and states")


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, {"dp_shard": 2, "tp": 2}), (2, {"pp": 2})), ((1, {}), (4, {"dp_replicate": 2}))],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(pool, tmp_path, before, after):
    pool.run(before[0], train, TREE | {"parallel": before[1]}, 2, tmp_path)
    resumed = pool.run(after[0], train, TREE | {"parallel": after[1]}, 3, tmp_path)
    check_close(resumed, reference(TREE, 3), 1e-4, "weights and states")
    assert {
        name
        for result in resumed
        for name in result
        if name.endswith("q_proj.weight/momentum_buffer")
    }


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (64, 64)], ids=str)
def test_in_bf16_it_is_torchs(shape):
    model = torch.nn.ModuleDict(
        {"layers": torch.nn.ModuleList([torch.nn.Linear(*shape[::-1], bias=False)])}
    )
    (ours,) = model.parameters()
    theirs = torch.nn.Parameter(ours.detach().clone())
    optimizer = make_optimizer(model, Optim(name="muon", lr=0.01, weight_decay=0.3))
    expected = torch.optim.Muon(
        [theirs], lr=0.01, weight_decay=0.3, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        expected.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    # an update that is left out changes nothing, even if its gradient is not finite
    before = [ours.detach().clone(), optimizer.state[ours]["momentum_buffer"].clone()]
    ours.grad.fill_(float("nan"))
    update_weights(optimizer, torch.tensor(False))
    assert torch.equal(ours, before[0]) and torch.equal(
        optimizer.state[ours]["momentum_buffer"], before[1]
    )


def one_step(tree):
    """Weights before a step, the gradients that the optimizer sees, and weights after."""
    config = configs.from_dict(tree)
    trainer = Trainer(config, start(config))
    before = copies(trainer.model.named_parameters())
    gradients, update = {}, trainer.optimizer.step

    def step():
        gradients.update(copies((name, p.grad) for name, p in trainer.model.named_parameters()))
        update()

    trainer.optimizer.step = step
    trainer.step(open_dataset(config)[0], 0)
    return before, gradients, copies(trainer.model.named_parameters())


WAN = {
    "model": "wan2.1-1.3b-tiny",
    "task": "diffusion",
    "data": {"size": [4, 16, 16], "text_tokens": 32},
    "batch": {"global": 4, "micro": 1, "seq_len": 256},
}


@pytest.mark.parametrize(
    ("ranks", "tree"),
    [
        (1, WAN),
        (4, WAN | {"parallel": {"dp_shard": 2, "tp": 2}}),
        (2, WAN | {"parallel": {"cp": 2}}),
        (1, {"precision": "fp8"}),
        (2, {"precision": "fp8"}),
        (1, {"precision": "bf16"}),
    ],
    ids=str,
)
def test_updates_are_those_of_torch(pool, ranks, tree):
    """Given the gradients that there were, of videos and of products in FP8 too."""
    tree = TREE | tree
    tree["optim"] = tree["optim"] | {"newton_schulz": "bf16"}
    results = pool.run(ranks, one_step, tree)
    before, gradients, _ = results[0]
    weights = {name: torch.nn.Parameter(weight.clone()) for name, weight in before.items()}
    for name, weight in weights.items():
        weight.grad = gradients[name].to(weight.dtype)
    optim = Optim(**tree["optim"])
    hidden = [
        w
        for name, w in weights.items()
        if "bias" not in name and "block" in name + "blocks" * ("layers" in name) and w.ndim == 2
    ]
    others = [
        [
            w
            for name, w in weights.items()
            if all(w is not m for m in hidden)
            and (w.ndim > 1) == matrix
            and "scale_shift" not in name
        ]
        for matrix in (True, False)
    ]
    others[1] += [w for name, w in weights.items() if "scale_shift" in name]
    torch.optim.Muon(
        hidden, lr=optim.lr, weight_decay=optim.weight_decay, adjust_lr_fn="match_rms_adamw"
    ).step()
    decays = (optim.weight_decay, 0.0)
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in zip(others, decays, strict=True)
    ]
    torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps).step()
    changes = {name: (w - before[name]).detach() for name, w in weights.items()}
    found = [{name: after[name] - before[name] for name in after} for _, _, after in results]
    check_close(found, changes, 1e-4, "changes")
