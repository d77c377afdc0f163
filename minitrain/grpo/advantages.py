"""Advantages: how much better a sample is than the others of its prompt.

GRPO (Shao et al. 2024) samples a group of completions per prompt. It compares each one's reward
with a baseline, the group's own mean, so that no value network is needed. Leaving the sample itself
out of the mean (RLOO, Ahmadian et al. 2024) makes the baseline independent of it and the gradient
unbiased; it only scales by G / (G - 1). Dividing by the standard deviation makes hard and easy
prompts count alike, which Dr. GRPO (Liu et al. 2025) leaves out as a bias.
"""

import torch
from torch import Tensor


def advantages(rewards: Tensor, baseline: str, std_scaling: bool) -> Tensor:
    """Return reward minus baseline, divided by the group's standard deviation if `std_scaling`.

    rewards: [groups, samples], with at least 2 samples; baseline: `group` or `leave_one_out`.
    Returns fp64 of the same shape. A group whose rewards are all the same gets zeros.
    """
    rewards = rewards.double()
    size = rewards.shape[1]
    # [groups, 1]
    mean = rewards.mean(1, keepdim=True)
    if baseline == "leave_one_out":
        # [groups, samples]: each sample has a mean of its own
        mean = (size * mean - rewards) / (size - 1)
    result = rewards - mean
    if std_scaling:
        result = result / (rewards.std(1, keepdim=True) + 1e-6)
    # exactly 0: the mean of equal rewards may be rounded
    return torch.where(has_signal(rewards)[:, None], result, 0.0)


def has_signal(rewards: Tensor) -> Tensor:
    """Return whether the rewards [groups, samples] of each group differ, bool [groups]."""
    return (rewards != rewards[:, :1]).any(1)
