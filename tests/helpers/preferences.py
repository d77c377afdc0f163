"""Pairs of replies, and runs that learn from them."""

import numpy as np
import pytest
import torch

from minitrain.data.chat.preferences import Pairs, scored_sample
from minitrain.data.sample import Sample
from minitrain.errors import InputError
from minitrain.grpo.batches import reply_example
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.run.tasks.initial_weights import make_trainer
from tests.helpers.oracle import check_close, copies
from tests.helpers.training import logged

TREE = {
    "model": {
        "name": "llama3-8b-tiny",
        "vocab_size": 258,
        "num_layers": 2,
        "initializer_range": 0.05,
    },
    "task": "dpo",
    "data": {"kind": "jsonl", "path": "x.jsonl", "template": "plain"},
    "batch": {"global": 8, "micro": 1, "seq_len": 64},
    "optim": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip": None},
    "device": "cpu",
}


def made_up_pairs(count: int, vocab: int = 96) -> list[dict]:
    """As TRL's collator takes them, of very different lengths."""
    generator = torch.Generator().manual_seed(0)

    def tokens(size):
        return torch.randint(vocab, (size,), generator=generator).tolist()

    return [
        {
            "prompt_ids": tokens(2 + n % 4),
            "chosen_ids": tokens(1 + 3 * n % 8),
            "rejected_ids": tokens(1 + 5 * n % 7),
        }
        for n in range(count)
    ]


def as_samples(pairs: list[dict], scored: bool = False) -> list[list[Sample]]:
    """scored: for a reward model, see tests/training/test_reward.py."""

    def sample(prompt: list[int], reply: list[int]) -> Sample:
        if scored:
            return scored_sample(np.array(prompt + reply), np.array([True]))
        return Sample(**reply_example(prompt, reply))

    sides = ("chosen_ids", "rejected_ids")
    return [[sample(pair["prompt_ids"], pair[key]) for key in sides] for pair in pairs]


def learn(tree: dict) -> tuple:
    """The reference of the weights at the start, then two steps and the held-out loss from others."""
    config = configs.from_dict(tree)
    trainer = make_trainer(config, start(config))
    data = Pairs(as_samples(made_up_pairs(43, 258), config.task == "reward"), config)
    trainer.prepare(data, 100)
    for parameter in trainer.model.parameters():  # so that the policy is not its own reference
        parameter.data.mul_(1.2)
    before = copies(trainer.model.named_parameters())
    losses = [trainer.step(data, step)["loss"].item() for step in range(2)]
    after = copies(trainer.model.named_parameters())
    losses.append(trainer.evaluate(data))
    return before, after, losses, logged(trainer.objective, trainer.total), data.reference


def compare(pool, expected: tuple, tree: dict) -> None:
    ranks = 1
    for name in ("dp_replicate", "dp_shard", "tp", "pp"):
        ranks *= tree["parallel"].get(name, 1)
    before, after, losses, numbers, reference = expected
    results = pool.run(ranks, learn, tree)
    check_close([result[0] for result in results], before, 1e-6, "weights")
    changes = {name: after[name] - before[name] for name in after}
    found = [
        {name: result[1][name] - result[0][name] for name in result[1]} for result in results
    ]
    check_close(found, changes, 5e-5, "changes of two steps")
    for _, _, their_losses, their_numbers, their_reference in results:
        assert their_losses == pytest.approx(losses, rel=1e-5)
        assert their_numbers == pytest.approx(numbers, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(their_reference, reference, rtol=1e-5, atol=1e-5)
    assert (
        0 < numbers["reward_accuracy"] < 1
        and numbers["reward_chosen"] != numbers["reward_rejected"]
    )


def refuse_cp(tree: dict) -> str:
    config = configs.from_dict(tree)
    try:
        make_trainer(config, start(config))
    except InputError as error:
        return str(error)
