"""Matrix products and attention on the emulated GPU: each logs its shapes and returns tensors that nobody filled.

Kernels of torch's compiler log the file that they come from, before each launch.
"""

import ctypes
import os
from functools import cache, partial

import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._pytree import tree_map_only

LIBRARY = torch.library.Library("aten", "IMPL")
# where an operator's factors are among its arguments, or queries, keys and values; then what is added, or offsets
ARGUMENTS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "_scaled_mm": (0, 1),
    "addmm": (1, 2, 0),
    "addmm_": (1, 2, 0),
    "baddbmm": (1, 2, 0),
    "_grouped_mm": (0, 1, 2),
}
for kernel in ("cudnn", "flash", "efficient"):
    ARGUMENTS[f"_scaled_dot_product_{kernel}_attention"] = 0, 1, 2
    ARGUMENTS[f"_scaled_dot_product_{kernel}_attention_backward"] = 1, 2, 3


@cache
def cuda() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["EMULATOR_CUDA"])


def log(kind: str, text: str) -> None:
    """Write a line to the log of launches."""
    cuda().fake_log(kind.encode(), text.encode(), 0, 0, 0, 0)


def run(name: str, operator, *args, out=None, **options):
    """Log an operator, and return what torch's own function for tensors without values does, on the device."""
    if name in ("_scaled_mm", "_grouped_mm"):
        for x in filter(torch.is_tensor, args):
            # where it begins, and its rows
            if x.data_ptr() % 16 or any(
                stride * x.itemsize % 16 for stride in x.stride() if stride > 1
            ):
                raise ValueError(
                    f"{name}: {x.shape}, strides {x.stride()}, does not lie at multiples of 16 bytes"
                )
    named = options | dict(
        zip((argument.name for argument in operator._schema.arguments), args, strict=False)
    )
    kind = name.removeprefix("_scaled_dot_product_").replace("_attention", "")
    kind += "_causal" * named.get("is_causal", False)
    tensors = [args[i] for i in ARGUMENTS[name] if i < len(args)]
    log("G", " ".join([kind, *(f"{list(t.shape)}{t.dtype}".replace(" ", "") for t in tensors)]))
    if out is not None or name == "addmm_":
        return args[0] if out is None else out
    args, options = tree_map_only(torch.Tensor, lambda x: x.to("meta"), (args, options))
    return tree_map_only(
        torch.Tensor, lambda x: torch.empty_like(x, device="cuda"), operator(*args, **options)
    )


def install() -> None:
    """Replace the operators, and log the sources of compiled kernels."""
    for name in ARGUMENTS:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            LIBRARY.impl(
                operator.name().removeprefix("aten::"), partial(run, name, operator), "CUDA"
            )
    launch = CachingAutotuner.run

    def log_and_launch(kernel: CachingAutotuner, *args, **options):
        log("SOURCE", kernel.filename or "")
        return launch(kernel, *args, **options)

    CachingAutotuner.run = log_and_launch
