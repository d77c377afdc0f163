"""bench.py --versus: the other library takes the same steps, in the same types and memory."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from minitrain.bench import versus as rivals
from minitrain.bench.breakdown import working_memory
from minitrain.bench.versus import RIVALS
from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.run.config.load import from_dict
from minitrain.run.launch.start import start
from minitrain.training.loop import Trainer

VIDEOS = {
    "model": "wan2.1-1.3b-tiny",
    "task": "diffusion",
    "data": {"size": [4, 16, 16], "text_tokens": 8},
}


def rival_memory(library, recompute):
    tree = {
        "model": "llama3-8b-tiny",
        "batch": {"global": 2, "micro": 2, "seq_len": 256},
        "recompute": recompute,
    }
    more = {"peft": {"lora": {"rank": 4}}, "diffusers": VIDEOS}.get(library, {})
    config = from_dict(tree | {"device": "cpu"} | more)
    ours = Trainer(config, start(config))
    rival = RIVALS[library](ours)
    return working_memory(lambda: rival.step(open_dataset(config)[0], 0), torch.device("cpu"))


@pytest.mark.parametrize("library", ["transformers", "peft", "diffusers"])
def test_the_other_library_recomputes_as_we_do(pool, library):
    none, full = (pool.run(1, rival_memory, library, setting)[0] for setting in ("none", "full"))
    assert full < none / 2


def rival_steps(library, clip):
    """How far two steps move each parameter of ours, and how far apart they leave it and the other library's."""
    tree = {
        "model": "llama3-8b-tiny",
        "batch": {"global": 4, "micro": 2, "seq_len": 16},
        "device": "cpu",
    }
    tree |= {"optim": {"name": "sgd", "lr": 0.1, "clip": clip}} | (
        {"lora": {"rank": 4}} if library == "peft" else {}
    )
    config = from_dict(tree)
    ours = Trainer(config, start(config))
    rival, data = RIVALS[library](ours), open_dataset(config)[0]
    theirs = {peft_name(name): parameter for name, parameter in rival.model.named_parameters()}
    before = {
        name: parameter.detach().clone() for name, parameter in ours.model.named_parameters()
    }
    assert theirs.keys() == before.keys()
    for name, parameter in theirs.items():
        parameter.data.copy_(before[name])
    for step in range(2):
        for trainer in (ours, rival):
            trainer.step(data, step)
    now = dict(ours.model.named_parameters())
    return {
        name: ((now[name] - p).norm().item(), (theirs[name] - now[name]).norm().item())
        for name, p in before.items()
    }


def peft_name(name: str) -> str:
    """Ours, of a parameter that transformers or peft calls `name`."""
    name = name.removeprefix("base_model.model.").replace(".base_layer", "")
    return name.replace("lora_A.default.weight", "lora_A").replace(
        "lora_B.default.weight", "lora_B"
    )


@pytest.mark.parametrize("library", ["transformers", "peft"])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_the_other_library_takes_the_same_steps(pool, library, clip):
    """In micro-batches, of which a step's loss is the mean; gradients are clipped, and gone after the step."""
    (norms,) = pool.run(1, rival_steps, library, clip)
    assert all(apart <= 1e-4 * moved for moved, apart in norms.values())
    assert sum(moved > 0 for moved, _ in norms.values()) >= len(norms) // 3


def rival_losses(model, documents):
    """Of transformers: of packed documents, and of each alone."""
    tree = {"model": model, "batch": {"global": 1, "micro": 1, "seq_len": 32}, "device": "cpu"}
    config = from_dict(tree)
    rival = RIVALS["transformers"](Trainer(config, start(config)))
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    tokens, places = (
        torch.randint(512, (len(numbers),)),
        torch.cat([torch.arange(n) for n in documents]),
    )
    packed = {
        "tokens": tokens,
        "labels": tokens.roll(-1),
        "positions": places,
        "document_ids": numbers,
    }
    each = zip(*(packed[name].split(documents) for name in ("tokens", "labels")), strict=True)
    alone = [rival.loss({"tokens": x[None], "labels": y[None]}, 1) for x, y in each]
    return rival.loss({name: x[None] for name, x in packed.items()}, 1).item(), sum(alone).item()


@pytest.mark.parametrize(
    "model, documents",
    [("llama3-8b-tiny", [7, 20, 5]), ("gpt-oss-20b-tiny", [32]), ("gpt3-175b-tiny", [7, 20, 5])],
)
def test_the_other_library_keeps_packed_documents_apart(pool, model, documents):
    """And has every family: GPT-OSS, of which it has no scaled_dot_product_attention, and GPT-3 as its GPT-2."""
    ((packed, alone),) = pool.run(1, rival_losses, model, documents)
    assert packed == pytest.approx(alone, rel=1e-5)


def test_steps_to_warm_up_count_for_nothing(monkeypatch):
    seconds = iter([9.0, 1.0, 2.0, 4.0, 2.0, 8.0, 4.0, 4.0])  # ours and theirs in turns
    monkeypatch.setattr(rivals, "timed", lambda *_: next(seconds))
    monkeypatch.setattr(
        rivals,
        "make_trainer",
        lambda *_: SimpleNamespace(device="cpu", step=print, prepare=print),
    )
    monkeypatch.setattr(rivals, "progress", lambda steps, text: range(steps))
    monkeypatch.setitem(RIVALS, "transformers", lambda ours: ours)
    assert rivals.versus(
        from_dict({}), None, "row", steps=3, warmup=1, library="transformers"
    ) == {
        "versus": "transformers",
        "versus_ratio": 2.0,
        "versus_ratio_range": [1.0, 4.0],
        "versus_step_time_s": [2.0, 4.0],
    }


def rival_types(tree):
    """Of its parameters, and how much less of a mean over two micro-batches one of them is than of one over itself."""
    config = from_dict(
        {"batch": {"global": 1, "micro": 1, "seq_len": 256}, "device": "cpu"} | tree
    )
    ours = Trainer(config, start(config))
    rival = RIVALS["diffusers" if config.task == "diffusion" else "transformers"](ours)
    (batch,) = ours.micro_batches(open_dataset(config)[0], 0)
    one, half = (rival.loss(batch, count).item() for count in (1, 2))
    return {p.dtype for p in rival.model.parameters()}, one / half


@pytest.mark.parametrize(
    "tree", [{"model": "llama3-8b-tiny"}, VIDEOS], ids=["transformers", "diffusers"]
)
def test_the_other_library_has_weights_in_our_type_and_shares_of_a_mean(pool, tree):
    for precision, dtype in (("bf16-pure", torch.bfloat16), ("bf16", torch.float32)):
        ((types, ratio),) = pool.run(1, rival_types, tree | {"precision": precision})
        assert types == {dtype} and ratio == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure"])
def test_the_other_library_casts_where_we_do(precision):
    model, seen = torch.nn.Linear(2, 2), []
    ours = SimpleNamespace(
        config=from_dict({"precision": precision}),
        device=torch.device("cpu"),
        micro_batches=lambda dataset, step: [{}, {}],
        objective=SimpleNamespace(count=lambda batch: 1),
    )

    def loss(batch, count):
        seen.append((count, torch.is_autocast_enabled("cpu")))
        return model.weight.sum()

    block = Mock()
    rivals.Rival(ours, model, [block], loss).step(None, 0)
    assert seen == [(2, precision == "bf16")] * 2 and not block.compile.called
    ours.config.compile = True
    rivals.Rival(ours, model, [block], loss)
    block.compile.assert_called_once_with(dynamic=False)


def test_what_is_said_of_other_libraries_is_not_said_of_ours():
    config = from_dict({"lora": {}, "recompute": "selective"})
    rivals.check_versus(config, "full")
    with pytest.raises(InputError, match="peft has no recompute=selective"):
        rivals.check_versus(config, "peft")
    mtp = {"model": {"name": "llama3-8b-tiny", "num_nextn_predict_layers": 1}}
    for tree in ({"task": "dpo"}, mtp):
        with pytest.raises(InputError, match="transformers: it learns next tokens alone"):
            rivals.check_versus(from_dict(tree), "transformers")
    rivals.check_versus(from_dict(mtp | {"mtp_weight": 0.0}), "transformers")


def test_what_is_frozen_has_no_gradient(monkeypatch):
    """Ten numbers that are trained, with a gradient and a state of 20; five that are not; nothing besides."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(10)), torch.zeros(5)])
    model[1].requires_grad_(False)
    optimizer = SimpleNamespace(state={model[0]: {"sum": torch.zeros(20)}})
    monkeypatch.setattr(rivals, "activation_bytes", lambda *_: 0)
    trainer = SimpleNamespace(model=model, optimizer=optimizer, config=from_dict({}))
    assert rivals.training_bytes(trainer) == 4 * (2 * 10 + 5 + 20)
