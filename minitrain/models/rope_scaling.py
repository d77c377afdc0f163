"""Context extension of rotary embeddings: which frequencies each kind keeps, and which it slows down."""

import math

import torch
from torch import Tensor


def linear_keep(frequencies: Tensor, theta: float, scaling: dict) -> Tensor:
    """Return 0, [dim / 2]: every frequency is divided by `factor` (Chen et al. 2023; Gemma 3)."""
    return torch.zeros_like(frequencies)


def llama3_keep(frequencies: Tensor, theta: float, scaling: dict) -> Tensor:
    """Return how much of each frequency Llama 3.1's context extension keeps, [dim / 2].

    1: fast rotations stay; 0: slow ones are divided by `factor`; between them it is linear.
    Source: Llama 3 paper, section 3.4; transformers, modeling_rope_utils.py.
    """
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    # full turns within the original context
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    return ((turns - low) / (high - low)).clamp(0, 1)


def yarn_keep(frequencies: Tensor, theta: float, scaling: dict) -> Tensor:
    """Return how much of each frequency YaRN's context extension keeps, [dim / 2].

    1: pairs that turn more than beta_fast times within the original context stay; 0: those below
    beta_slow turns are divided by `factor`; between them it is linear in the pair's index.
    Source: Peng et al. 2023, section 3.2; DeepSeek-V3, GPT-OSS.
    """
    dim = 2 * len(frequencies)
    original = scaling["original_max_position_embeddings"]

    # the index of the pair that turns this number of times within the original context
    def find_correction_dim(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = find_correction_dim(scaling.get("beta_fast", 32.0))
    high = find_correction_dim(scaling.get("beta_slow", 1.0))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    index = torch.arange(dim // 2, device=frequencies.device, dtype=torch.float32)
    # 0.001 as in transformers, where both ends are the same
    return 1 - ((index - low) / (high - low or 0.001)).clamp(0, 1)


KEEPS = {"linear": linear_keep, "llama3": llama3_keep, "yarn": yarn_keep}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's mscale, whose square multiplies attention scores (Peng et al. 2023, 3.3)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
