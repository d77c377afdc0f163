"""python -m tests.gpu_emulator CONFIG [--proxy N] [--ranks N] [--generate] [key=value ...]: see README.md."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ.get("GPU_EMULATOR", Path.home() / ".cache" / "gpu-emulator"))
PACKAGES = [
    "torch===2.11.0",
    "nvidia-cuda-crt==13.0.88",
    "safetensors",
    "numpy",
    "tqdm",
    "pyyaml",
]
CALLED_BY_NVCC = {
    f"__cuda{name}" for name in ("RegisterFatBinary", "RegisterFatBinaryEnd", "RegisterVar")
}


def build() -> Path:
    """Make the environment and the library, once. Returns the environment's Python."""
    python, library = HOME / "venv/bin/python", HOME / "libcuda.so.1"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    source = Path(__file__).with_name("cuda.cpp")
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        (include,) = {
            path.parent
            for path in HOME.glob("venv/lib/python*/site-packages/nvidia/*/include/cuda.h")
        }
        text = "".join((include / name).read_text() for name in ("cuda.h", "cuda_runtime_api.h"))
        names = {
            *re.findall(r"\b(cu[A-Z]\w+|cuda[A-Z]\w+)\(", text),
            *re.findall(r"\b(cu[A-Z]\w+_v\d)\b", text),
        }
        stubs = [
            f"__attribute__((weak)) int {name}() {{ return 0; }}\n"
            for name in sorted(names | CALLED_BY_NVCC)
        ]
        (HOME / "stubs.c").write_text("".join(stubs))
        subprocess.run(
            ["gcc", "-w", "-c", "-fPIC", HOME / "stubs.c", "-o", HOME / "stubs.o"], check=True
        )
        sources = [source, HOME / "stubs.o"]
        subprocess.run(
            ["g++", "-O1", "-shared", "-fPIC", f"-I{include}", *sources, "-o", library],
            check=True,
        )
    return python


def emulate(arguments: argparse.Namespace) -> None:
    """Run two steps of the config, in the emulator's own process."""
    from tests.gpu_emulator.operators import install, log
    from tests.gpu_emulator.steps import fake_world, make_step, read_config

    install()
    config = read_config(arguments.config, arguments.overrides, arguments.proxy)
    with fake_world(arguments.ranks):
        step = make_step(config, "cuda", arguments.generate)
        for number in range(2):
            log("MARK", "step")
            step(number)
        log("MARK", "end")
        os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_emulator")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--proxy", type=int, help="so many layers, and one rank's share")
    parser.add_argument("--ranks", type=int, default=1, help="run the first one of so many")
    parser.add_argument(
        "--generate", action="store_true", help="decode, and show the captured step"
    )
    arguments = parser.parse_intermixed_args()
    if "EMULATOR_CUDA" in os.environ:
        emulate(arguments)
    python, log = build(), HOME / "log.tsv"
    log.unlink(missing_ok=True)
    environment = os.environ | {
        "EMULATOR_CUDA": str(HOME / "libcuda.so.1"),
        "LD_PRELOAD": str(HOME / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(HOME),
        "TRITON_LIBCUDA_PATH": str(HOME),
        "FAKE_LOG": str(log),
        "TORCHINDUCTOR_CACHE_DIR": str(HOME / "compiled"),
        "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
        "TRITON_CACHE_DIR": str(HOME / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, "-m", "tests.gpu_emulator", *sys.argv[1:]]
    if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode:
        sys.exit(1)
    from tests.gpu_emulator.roofline import summarize

    begin, end = (
        ("CAPTURE\tbegin", "CAPTURE\tend") if arguments.generate else ("MARK\tstep", "MARK\tend")
    )
    lines = log.read_text().rpartition(begin)[2].partition(end)[0].splitlines()[1:]
    print(summarize(lines))


if __name__ == "__main__":
    main()
