"""Products of FP8 numbers on CPU, of what they stand for, as torch computes them on most CPUs.

On some with AMX it leaves them to oneDNN, whose own take 1,000 times as long (uxlfoundation/oneDNN #3349).
"""

import warnings

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, _, __, dtype: torch.dtype, *___) -> Tensor:
    return (a.float() @ b.float() * (a_inverse * b_inverse)).to(dtype)


with warnings.catch_warnings(action="ignore"):  # of the kernel that is overridden
    torch.library.impl("aten::_scaled_mm", "CPU", multiply)
