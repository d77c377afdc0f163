"""Run bench.py with the compiler's combo kernels, which join small ones: python .ci/joined_kernels.py ARGUMENTS

As of torch 2.13, no environment variable turns them on.
"""

import runpy
import sys
from pathlib import Path

import torch._inductor.config

ROOT = Path(__file__).parent.parent

if __name__ == "__main__":
    torch._inductor.config.combo_kernels = True
    sys.path.insert(0, str(ROOT))
    runpy.run_path(str(ROOT / "bench.py"), run_name="__main__")
