"""A config of a tiny policy, made-up responses for it, and a reward."""

import torch

from minitrain.grpo.responses import Response

MODEL = {"name": "llama3-8b-tiny", "vocab_size": 258, "num_layers": 2, "initializer_range": 0.05}

TREE = {
    "model": MODEL,
    "task": "grpo",
    "data": {"template": "plain"},
    "batch": {"global": 8, "micro": 1, "seq_len": 32},
    "grpo": {
        "prompts": 4,
        "group": 4,
        # a hundred problems
        "mock_digits": 2,
        "clip_low": 0.05,
        "clip_high": 0.1,
        "kl": 0.1,
        "importance": "truncate",
        "importance_high": 1.1,
    },
    "rollout": {"max_tokens": 8},
    "optim": {"name": "sgd", "lr": 1.0, "weight_decay": 0.0},
    "device": "cpu",
}


def made_up_groups():
    """Return groups of responses of very different lengths, with random log-probabilities."""
    generator = torch.Generator().manual_seed(0)

    def response(group, number):
        size = 1 + (3 * group + 5 * number) % 8
        tokens = torch.randint(258, (4 + size,), generator=generator).tolist()
        log_probs = (-5.5 + 0.2 * torch.randn(size, generator=generator)).tolist()
        reward = float(number % 3 == group % 3)
        return Response(group, tokens[:4], tokens[4:], log_probs, False, reward, reward, "", "")

    return [[response(group, number) for number in range(4)] for group in range(4)]


def oddness(response, answer, row):
    """Return a reward that differs between the samples of an untrained model."""
    return sum(ord(character) % 2 for character in response) / 8
