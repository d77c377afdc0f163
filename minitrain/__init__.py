"""minitrain: the modern large-model training stack in plain PyTorch."""

import getpass
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from minitrain.errors import InputError

# for type checkers; at run time `__getattr__` imports them
if TYPE_CHECKING:
    from minitrain.data.chat.chat_tokenizer import load_tokenizer as load_tokenizer
    from minitrain.formats.hf import load_pretrained as load_pretrained
    from minitrain.formats.hf import save_pretrained as save_pretrained
    from minitrain.formats.peft import load_adapter as load_adapter
    from minitrain.models.lora import merge_adapters as merge_adapters
    from minitrain.rollout.engine import Sampler as Sampler
    from minitrain.rollout.sampling import Completion as Completion
    from minitrain.rollout.sampling import SamplingParams as SamplingParams

# public name -> the file that has it
_HOMES = {
    "load_pretrained": "formats.hf",
    "save_pretrained": "formats.hf",
    "load_tokenizer": "data.chat.chat_tokenizer",
    "load_adapter": "formats.peft",
    "merge_adapters": "models.lora",
    "Sampler": "rollout.engine",
    "Completion": "rollout.sampling",
    "SamplingParams": "rollout.sampling",
}
__all__ = ["InputError", "train", *_HOMES]

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError("minitrain runs on Linux and macOS: on Windows inside WSL (wsl --install)")

# before torch 2.13 the import of its compiler, which every model brings, fails for a user without a
# name: one whom a container's /etc/passwd does not have, as OpenShift makes up
try:
    getpass.getuser()
except (KeyError, OSError):
    os.environ["LOGNAME"] = f"uid{os.getuid()}"


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str):
    """Import a public name at first use.

    A command line that needs no torch should not wait seconds for it.
    """
    # a module that can be called
    if name == "train":
        return import_module("minitrain.train")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
