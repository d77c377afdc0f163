"""What the training loop does besides steps: evaluation, trial steps, and pictures that one rank writes."""

from contextlib import suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from minitrain.data.text.text_rows import Mock
from minitrain.models.router import Router
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.draw_videos import draw_world
from minitrain.run.tasks.task import is_due
from minitrain.training.build import build_model
from minitrain.training.language_modeling import LanguageModeling
from minitrain.training.loop import Trainer, set_token_counts, to_device, training_steps
from minitrain.training.loss import IGNORE
from minitrain.training.packing import rows
from tests.helpers.commands import ROOT
from tests.helpers.oracle import copies

TREE = {
    "model": {"name": "llama3-8b-tiny", "num_layers": 1, "vocab_size": 128},
    "batch": {"global": 4, "micro": 2, "seq_len": 16},
    "device": "cpu",
}


class Few(Mock):
    """Mock data with so few rows that they come round again. The first n + 1 labels of row n count."""

    size = 3

    def __len__(self):
        return self.size

    def row(self, n):
        row = super().row(n % self.size)
        return row | {
            "labels": torch.where(
                torch.arange(self.seq_len) <= n % self.size, row["labels"], IGNORE
            )
        }


def test_an_evaluation_counts_no_row_twice():
    config = configs.from_dict(TREE)
    trainer, data = Trainer(config, start(config)), Few(16, 128, seed=0, split=1)
    with torch.no_grad():
        expected = LanguageModeling().loss(trainer.model, rows(data, range(3))) / (1 + 2 + 3)
    torch.testing.assert_close(trainer.evaluate(data), expected.item(), atol=0, rtol=1e-6)


@pytest.mark.parametrize(("batches", "size"), [(2, 100), (3, 11)])
def test_an_evaluation_reads_full_batches_a_step_at_a_time(batches, size):
    config = configs.from_dict(TREE | {"validation": {"batches": batches}})
    trainer, data = Trainer(config, start(config)), Few(16, 128, seed=0, split=1)
    data.size, events = size, []

    def loss(*_):
        # with these elements are dropped
        events.append("loss and gradients" if torch.is_grad_enabled() else "loss")
        return torch.ones(())

    with (
        mock.patch.object(
            data, "row", side_effect=lambda n: events.append(n) or Few.row(data, n)
        ),
        mock.patch.object(trainer.objective, "loss", side_effect=loss),
    ):
        trainer.evaluate(data)
    assert events == [0, 1, 2, 3, "loss", "loss", 4, 5, 6, 7, "loss", "loss"]


def test_a_step_with_nothing_to_predict_is_one_of_zeros():
    """Neither a division by zero nor, for that, a step that is skipped; nor does an evaluation fail."""
    config = configs.from_dict(TREE | {"batch": {"global": 2, "micro": 1, "seq_len": 16}})
    trainer, data = Trainer(config, start(config)), Few(16, 128, seed=0, split=0)
    row = {"labels": torch.full((16,), IGNORE)}
    with mock.patch.object(data, "row", side_effect=lambda n: Mock.row(data, n) | row):
        numbers = trainer.step(data, 0)
        assert trainer.evaluate(data) == 0
    assert {key: value.item() for key, value in numbers.items()} == {"loss": 0, "grad_norm": 0}


def test_routers_are_told_of_all_tokens_but_padding():
    model = {"name": "mixtral-8x7b-tiny", "num_layers": 1, "router_aux_loss_coef": 0.1}
    config = configs.from_dict(TREE | {"model": model})
    trainer, tokens = Trainer(config, start(config)), torch.zeros(1, 4, dtype=torch.int64)
    batches = [
        {"tokens": tokens, "document_ids": torch.tensor([[0, 0, 1, -1]])},
        {"tokens": tokens},
    ]
    set_token_counts(trainer.model, batches, trainer.meshes, trainer.device)
    assert [
        module.tokens_per_step for module in trainer.model.modules() if isinstance(module, Router)
    ] == [3 + 4]


def test_all_of_a_batch_goes_to_the_device():
    tensor = torch.zeros(2)
    moved = to_device({"tokens": tensor, "labels": tensor}, torch.device("meta"))
    assert all(each.is_meta for each in moved.values())


def test_what_happens_between_steps_is_none_of_their_time(monkeypatch):
    """As a validation, or a checkpoint."""
    clock = [0.0]

    def step(dataset, number):
        clock[0] += 2
        return {"loss": torch.tensor(1.0), "grad_norm": torch.tensor(1.0)}

    monkeypatch.setattr(
        "minitrain.training.stopwatch.time", SimpleNamespace(perf_counter=lambda: clock[0])
    )
    trainer = SimpleNamespace(
        config=configs.from_dict(TREE | {"steps": 3}),
        step=step,
        optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}]),
        objective=None,
        device=torch.device("cpu"),
        runs_ahead=False,
    )
    found = []
    for numbers in training_steps(trainer, None, start=1, seen=4 * 16):
        clock[0] += 100
        found.append(
            [numbers[name] for name in ("step", "tokens", "step_time_s", "tokens_per_sec")]
        )
    assert found == [[2, 2 * 4 * 16, 2, 4 * 16 / 2], [3, 3 * 4 * 16, 2, 4 * 16 / 2]]


class Counting(LanguageModeling):
    """Language modeling that also tells how many tokens each step had."""

    def loss(self, model, batch):
        self.tokens = getattr(self, "tokens", 0) + batch["tokens"].numel()
        return super().loss(model, batch)

    def sums(self):
        sums = torch.tensor([[self.tokens, 2.0**-70]])
        self.tokens = 0
        return sums

    def metrics(self, sums):
        return {"counted": sums[0][0], "small": sums[0][1]}


def steps_and_weights(ahead: bool, stays=lambda step: True, broken: int = -1):
    """What happens, in order; the numbers of each step, without times; the weights where these stay."""
    config = configs.from_dict(TREE | {"steps": 6, "optim": {"lr": 0.1, "warmup": 3}})
    trainer, data = Trainer(config, start(config), Counting()), Mock(16, 128, seed=0, split=0)
    events, numbers, weights, step = [], [], {}, trainer.step

    def launch(dataset, number):
        events.append(f"launch {number + 1}")
        if number + 1 == broken:
            raise ValueError("broken")
        return step(dataset, number)

    asynchronous = mock.patch.object(Trainer, "runs_ahead", ahead)
    with asynchronous, mock.patch.object(trainer, "step", launch), suppress(ValueError):
        for line in training_steps(trainer, data, 0, 0, stays):
            events.append(f"read {line['step']}")
            numbers.append(
                {key: x for key, x in line.items() if not key.endswith(("_s", "_sec"))}
            )
            if stays(line["step"]):
                weights[line["step"]] = copies(trainer.model.named_parameters())
    return events, numbers, weights


def test_a_device_has_its_next_step_before_the_host_reads_the_numbers_of_this_one():
    """Where somebody needs the weights as after a step, nothing is launched before."""
    stays = (3, 6).__contains__
    events, numbers, weights = steps_and_weights(True, stays)
    assert events == [
        *("launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"),
        *("launch 4", "launch 5", "read 4", "launch 6", "read 5", "read 6"),
    ]
    plain, expected, after = steps_and_weights(False)
    assert plain == [f"{what} {n}" for n in range(1, 7) for what in ("launch", "read")]
    assert numbers == expected and len(numbers) == 6
    assert {line["small"] for line in numbers} == {2.0**-70} and numbers[1]["counted"] == 64
    for step, tensors in weights.items():
        assert tensors.keys() == after[step].keys()
        assert all(torch.equal(tensors[name], after[step][name]) for name in tensors)
    events, numbers, _ = steps_and_weights(True, lambda step: False)
    assert events[-2:] == ["read 5", "read 6"] and numbers == expected


def test_a_step_that_cannot_be_launched_loses_no_numbers_of_the_one_before():
    events, numbers, _ = steps_and_weights(True, lambda step: False, broken=4)
    assert events[-3:] == ["read 2", "launch 4", "read 3"] and len(numbers) == 3


def test_what_is_due_now_and_then_is_always_due_at_the_end():
    assert [n for n in range(1, 11) if is_due(n, 3, last=10)] == [3, 6, 9, 10]
    assert [n for n in range(1, 11) if is_due(n, 0, last=10)] == [10]


def draws(parallel):
    """The first random number of steps 0, 1 and 0 again, drawn where the forward pass would draw; and of another run's
    step 0."""
    seen = []

    def forward_backward(*_):
        seen.append(torch.rand(()).item())
        return torch.zeros(())

    config = configs.from_dict(TREE | {"lora": {"dropout": 0.1}, "parallel": parallel})
    trainer = Trainer(config, start(config))
    with mock.patch("minitrain.training.loop.forward_backward", forward_backward):
        for step in (0, 1, 0):
            trainer.update([], step)
        config.seed += 1
        trainer.update([], 0)
    return seen


@pytest.mark.parametrize(
    "parallel, same",
    [
        ({"dp_shard": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"pp": 2, "tp": 2}, [0, 0, 1, 1]),
        ({"dp_shard": 2, "cp": 2}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_steps_and_ranks_drop_elements_of_their_own_but_tensor_parallel_ranks_the_same(
    pool, parallel, same
):
    """same: equal numbers for ranks that must draw the same."""
    ranks = pool.run(4, draws, parallel)
    assert all(
        first == again and len({first, second, other}) == 3
        for first, second, again, other in ranks
    )
    first = [rank[0] for rank in ranks]
    assert [first.index(number) for number in first] == [same.index(group) for group in same]


def draw(folder):
    """What two ranks say of the same drawing, and which of them has written it."""
    config = configs.load(
        ROOT / "configs/train/shapes.yaml", ["model.num_layers=1", "batch.micro=16", "device=cpu"]
    )
    model, path = build_model(config, start(config)), folder / f"rank-{dist.get_rank()}.png"
    said = draw_world(model, "shapes", path, steps=1, guidance=1.0, write=dist.get_rank() == 0)
    return said.split(":")[1], path.exists()


def test_all_ranks_draw_and_one_writes(pool, tmp_path):
    (said, first), (same, second) = pool.run(2, draw, tmp_path)
    assert said == same and (first, second) == (True, False)
