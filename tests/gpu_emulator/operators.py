"""Matrix products and attention on the emulated GPU: each logs its shapes and returns a tensor that nobody filled.

Where the real kernels ask for an alignment, it is asked for here.
"""

import ctypes
import os
import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

LIBRARY = torch.library.Library("aten", "IMPL")
CUDA = ctypes.CDLL(os.environ["EMULATOR_CUDA"])


def log(kind: str, text: str) -> None:
    CUDA.fake_log(kind.encode(), text.encode(), 0, 0, 0, 0)


def log_operator(name: str, *tensors: torch.Tensor) -> None:
    log("G", " ".join([name, *(f"{list(t.shape)}{t.dtype}".replace(" ", "") for t in tensors)]))


def product(name: str, first: int):
    """Emulate a product of the arguments `first` and `first` + 1; what comes before them is added."""

    def run(*args, out=None, out_dtype=None, **options):
        a, b = args[first : first + 2]
        dtype = next((x for x in args if isinstance(x, torch.dtype)), out_dtype or a.dtype)
        if name == "_scaled_mm":
            check_scaled(a, b, *args[2:4], scales=options)
            dtype = dtype if dtype != a.dtype else torch.bfloat16
        log_operator(name, a, b, *args[:first])
        return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=dtype) if out is None else out

    return run


def check_scaled(a: torch.Tensor, b: torch.Tensor, *scales: torch.Tensor, **_) -> None:
    """Raise ValueError for what cuBLAS refuses: sizes, strides and addresses, those of scales too, by 16."""
    if a.stride(1) != 1 or b.stride(0) != 1 or any(size % 16 for size in (*a.shape, *b.shape)):
        raise ValueError(f"_scaled_mm: {a.shape}, strides {a.stride()}, by {b.shape}, strides {b.stride()}")
    if any(x.data_ptr() % 16 for x in (a, b, *scales)):
        raise ValueError("_scaled_mm: a factor or a scale does not begin at a multiple of 16 bytes")


def grouped_mm(a, b, offs=None, bias=None, out_dtype=None):
    for x in (a, b):
        if x.data_ptr() % 16 or sorted(x.stride())[1] * x.element_size() % 16:
            raise ValueError(f"_grouped_mm: {x.shape}, strides {x.stride()}")
    log_operator("_grouped_mm", a, b, offs)
    rows = b.shape[-1] + -b.shape[-1] % 8
    if b.ndim == 3:
        return a.new_empty(a.shape[0], rows)[:, : b.shape[-1]]
    return a.new_empty(len(offs), a.shape[0], rows)[..., : b.shape[-1]]


def attention(name: str, results: int):
    def run(q, k, v, *args, **options):
        causal = options.get("is_causal", any(x is True for x in args[-2:]))
        log_operator(f"{name}{'_causal' * causal}", q, k, v)
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[3]).transpose(1, 2)
        lse = q.new_empty(batch, heads, length, dtype=torch.float32)
        seed = q.new_empty((), dtype=torch.int64)
        if results == 4:
            return out, lse, seed, seed
        return out, lse[..., None] if name == "cudnn" else lse, None, None, length, k.shape[2], seed, seed, None

    return run


def attention_backward(name: str):
    def run(grad, q, k, v, *args, **options):
        log_operator(f"{name}_backward{'_causal' * any(x is True for x in args)}", q, k, v)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    return run


def install() -> None:
    """Replace the operators, and NCCL by torch's group that sends nothing."""
    warnings.filterwarnings("ignore", ".*Overriding a previously.*")
    names = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}
    for name, first in names.items():
        for overload in ("", ".out", ".dtype", ".dtype_out"):
            if f"{name}{overload}" not in ("_scaled_mm.dtype", "_scaled_mm.dtype_out"):
                LIBRARY.impl(f"{name}{overload}", product(name, first), "CUDA")
    LIBRARY.impl("addmm_", lambda c, a, b, **_: (log_operator("addmm", a, b, c), c)[1], "CUDA")
    LIBRARY.impl("_grouped_mm", grouped_mm, "CUDA")
    for name, results in (("cudnn", 9), ("flash", 9), ("efficient", 4)):
        LIBRARY.impl(f"_scaled_dot_product_{name}_attention", attention(name, results), "CUDA")
    for name in ("cudnn", "flash"):
        LIBRARY.impl(f"_scaled_dot_product_{name}_attention_backward", attention_backward(name), "CUDA")
    own = dist.init_process_group
    dist.init_process_group = lambda backend=None, *a, **k: own("fake" if backend == "nccl" else backend, *a, **k)
