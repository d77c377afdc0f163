"""Print the machine that `.ci/gpu` runs on, and the version of the code: python .ci/gpu_machine.py

The first line is the GPU's name (or cpu) and its gigabytes; the second, the versions and a digest of the package's
source files. The digest identifies the code in copies without .git: this command prints the same digest in the
checkout that was copied.
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
    """Return a digest of all of the package's files."""
    files = {name: digest for name, digest in code_digests().items() if name != "torch"}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def main() -> None:
    name = "cpu"
    gigabytes = 0
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        name = gpu.name.removeprefix("NVIDIA ").replace(" ", "-").lower()
        gigabytes = gpu.total_memory // 10**9
    print(name, gigabytes)
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    print(f"{versions}, sources {digest_of_sources()}")


if __name__ == "__main__":
    main()
