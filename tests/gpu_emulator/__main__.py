"""python -m tests.gpu_emulator CONFIG [--proxy N] [--generate] [key=value ...]: see README.md."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(os.environ.get("GPU_EMULATOR", Path.home() / ".cache" / "gpu-emulator"))
PACKAGES = ["torch===2.11.0", "nvidia-cuda-crt==13.0.88", "safetensors", "numpy", "tqdm", "pyyaml"]
# functions of CUDA's runtime and driver that only say that all went well
STUBS = """
    cudaSetDevice cudaGetLastError cudaPeekAtLastError cudaFreeHost cudaHostRegister cudaHostUnregister
    cudaStreamDestroy cudaStreamQuery cudaStreamWaitEvent cudaGraphExecDestroy cudaGraphDestroy
    cudaThreadExchangeStreamCaptureMode cudaEventDestroy cudaEventRecord cudaEventRecordWithFlags cudaEventQuery
    cudaDeviceEnablePeerAccess cudaDeviceGetDefaultMemPool cudaMemPoolTrimTo cudaMemPoolSetAttribute
    cudaMemPoolGetAttribute cudaMemPoolSetAccess cudaProfilerStart cudaProfilerStop cudaFuncSetAttribute cuInit
    cuCtxSetCurrent cuCtxPushCurrent_v2 cuModuleUnload cuFuncSetAttribute cuFuncSetCacheConfig cuLaunchHostFunc
    cuCtxSetLimit cuCtxGetLimit cuGetErrorName cuLinkCreate_v2 cuLinkAddData_v2 cuLinkComplete
    cuTensorMapEncodeTiled cuTensorMapEncodeIm2col cuStreamWriteValue32_v2 cuMemGetAddressRange_v2
    cuLaunchCooperativeKernel cuOccupancyMaxPotentialBlockSize
"""


def build() -> Path:
    """Make the environment and the library, once. Returns the environment's Python."""
    python, library = HOME / "venv/bin/python", HOME / "libcuda.so.1"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
    source = Path(__file__).with_name("cuda.cpp")
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        (include,) = {path.parent for path in HOME.glob("venv/lib/python*/site-packages/nvidia/*/include/cuda.h")}
        stubs = HOME / "stubs.c"
        stubs.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in STUBS.split()))
        subprocess.run(["gcc", "-c", "-fPIC", stubs, "-o", HOME / "stubs.o"], check=True)
        sources = [source, HOME / "stubs.o"]
        subprocess.run(["g++", "-O1", "-shared", "-fPIC", f"-I{include}", *sources, "-o", library], check=True)
    return python


def emulate(arguments: argparse.Namespace) -> None:
    """Run two steps of the config, in the emulator's own process."""
    from tests.gpu_emulator.operators import install, log

    install()
    from minitrain.bench.measure import load_row
    from minitrain.bench.proxy import make_proxy

    _, config = load_row(arguments.config, arguments.overrides)
    if arguments.proxy:
        config = make_proxy(config, arguments.proxy)
    step = sampling(config) if arguments.generate else training(config)
    for number in range(2):
        log("MARK", "step")
        step(number)
    log("MARK", "end")
    os._exit(0)


def training(config):
    from minitrain.bench.measure import Trainer, open_dataset
    from minitrain.bench.measure_sampling import start

    trainer, (data, _) = Trainer(config, start(config)), open_dataset(config)
    return lambda number: trainer.step(data, number)


def sampling(config):
    import dataclasses

    from minitrain.bench.measure_sampling import Sampler, build_model, make_prompts, sample, start

    config = dataclasses.replace(config, precision="bf16-pure")
    samples, longest = config.batch.global_ * config.grpo.group, config.batch.seq_len
    sampler = Sampler(build_model(config, start(config)), settings=config.rollout, samples=samples, longest=longest)
    length = longest - config.rollout.max_tokens
    return lambda number: sample(sampler, config, make_prompts(config, length, number))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_emulator")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--proxy", type=int, help="so many layers")
    parser.add_argument("--generate", action="store_true", help="decode, and show the captured step")
    parser.add_argument("--top", type=int, default=20, help="kernels to list")
    arguments = parser.parse_intermixed_args()
    if "EMULATOR_CUDA" in os.environ:
        emulate(arguments)
    python, log, compiled = build(), HOME / "log.tsv", HOME / "compiled"
    log.unlink(missing_ok=True)
    # kernels of other runs have the same names
    shutil.rmtree(compiled, ignore_errors=True)
    environment = os.environ | {
        "EMULATOR_CUDA": str(HOME / "libcuda.so.1"), "LD_PRELOAD": str(HOME / "libcuda.so.1"),
        "LD_LIBRARY_PATH": str(HOME), "TRITON_LIBCUDA_PATH": str(HOME), "FAKE_LOG": str(log),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled), "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
        "TRITON_CACHE_DIR": str(HOME / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [python, "-m", "tests.gpu_emulator", *sys.argv[1:]]
    if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode:
        sys.exit(1)
    from tests.gpu_emulator.roofline import summarize

    if arguments.generate:
        text = log.read_text().split("CAPTURE\tbegin")[-1].split("CAPTURE\tend")[0]
        log.write_text(f"MARK\tstep\t\n{text}")
    print(summarize(log, compiled, "step", arguments.top))


if __name__ == "__main__":
    main()
