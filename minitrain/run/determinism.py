"""The same run again, to the bit (`deterministic: true`): on the same machine, layout and versions.

Data, initial weights, dropout and samples are functions of the seed anyway. What is left are
kernels that add up in whatever order their threads come, mostly on GPUs. torch then takes others:
for attention FlashAttention's deterministic backward pass, and never cuDNN's (FlexAttention's adds
up in a fixed order). An operation that has no such form raises an error, in one line (failures.py).
What this costs has not been measured on a GPU.
"""

import os

import torch


def be_deterministic() -> None:
    """To call before CUDA, NCCL or the compiler are used; what the user has set in the environment
    stays.
    """
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # without it cuBLAS may pick other algorithms each time
    # sums inside a switch come in no fixed order; names match whole
    os.environ.setdefault("NCCL_ALGO", "^NVLS,NVLSTree,CollnetDirect,CollnetChain")
    torch.use_deterministic_algorithms(
        True
    )  # of the compiler too, which would choose kernels by the clock
    torch.backends.cudnn.benchmark = False  # likewise
