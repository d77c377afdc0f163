"""Print what `.ci/gpu` runs on, and what it runs: python .ci/gpu_machine.py

The first line is the GPU's name and its gigabytes, the second the versions and a digest of the package's
source files. A copy of the tree that came without .git has no commit to tell: the same command prints the
same digest in the checkout that it was copied from. Without a GPU the name is cpu.
"""

import hashlib
import json
import platform
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from minitrain.run.launch.same_run import code_digests


def digest_of_sources() -> str:
    files = {name: digest for name, digest in code_digests().items() if name != "torch"}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def main() -> None:
    name, gigabytes = "cpu", 0
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        name = gpu.name.removeprefix("NVIDIA ").replace(" ", "-").lower()
        gigabytes = gpu.total_memory // 10**9
    print(name, gigabytes)
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    print(f"{versions}, sources {digest_of_sources()}")


if __name__ == "__main__":
    main()
