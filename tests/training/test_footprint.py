"""Memory that a run will need, and has not."""

import os
import re
import subprocess
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._inductor.exc import InvalidCxxCompiler

from minitrain.data.datasets import open_dataset
from minitrain.errors import InputError
from minitrain.models.zoo import empty_model
from minitrain.parallel.shards import to_local
from minitrain.run.config import load as configs
from minitrain.run.launch.failures import explain
from minitrain.run.launch.start import start
from minitrain.training import build, footprint
from minitrain.training.loop import Trainer
from tests.helpers.commands import command
from tests.helpers.training import BYTES

BATCH = {"global": 4, "micro": 1, "seq_len": 8}
CPU = torch.device("cpu")


def footprints(tree: dict) -> tuple[dict[str, int], dict[str, int]]:
    """What is reckoned, and what a rank's trained tensors take after a step."""
    config = configs.from_dict(tree | {"batch": BATCH, "device": "cpu"})
    trainer = Trainer(config, start(config))
    reckoned = footprint.footprint(trainer.model, config)
    batches = trainer.micro_batches(open_dataset(config)[0], 0)
    gradients = []
    step = trainer.optimizer.step

    def note(*args):
        gradients.append(total(p.grad for p in trainer.model.parameters() if p.grad is not None))
        return step(*args)

    trainer.optimizer.step = note
    trainer.update(batches, 0)
    states = trainer.optimizer.state.values()
    taken = {
        "weights": total(trainer.model.state_dict().values()),
        "gradients": gradients[0],
        "optimizer states": total(
            x for state in states for key, x in state.items() if key != "step"
        ),
    }
    return reckoned, taken


def total(tensors) -> int:
    return sum(to_local(tensor).nbytes for tensor in tensors)


TINY = {"name": "llama3-8b-tiny", "num_layers": 2, "vocab_size": 128}


@pytest.mark.parametrize(
    "tree",
    [
        *(
            {"precision": precision, "optim": {"states": states}}
            for precision, states, _ in BYTES
        ),
        {"optim": {"name": "sgd"}},
        {"optim": {"name": "muon", "ema": 0.9}},
        {"optim": {"ema": 0.9}},
        {"lora": {"rank": 4}},
        {"lora": {"rank": 4}, "precision": "bf16"},
        {"parallel": {"tp": 2}},
        {"parallel": {"pp": 2}},
        {"parallel": {"dp_replicate": 2}},
        {"model": "qwen3-30b-a3b-tiny", "parallel": {"ep": 2}},
    ],
    ids=str,
)
def test_what_is_reckoned_is_what_is_taken(pool, tree):
    for reckoned, taken in pool.run(2, footprints, {"model": TINY} | tree):
        assert reckoned == taken


def test_free_memory(monkeypatch, tmp_path):
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory / 100 < footprint.free_memory(CPU) < memory
    monkeypatch.setattr(footprint, "LINUX_MEMORY", tmp_path / "meminfo")  # macOS has no such file
    assert footprint.free_memory(CPU) == memory
    footprint.LINUX_MEMORY.write_text(
        "MemTotal:  24 kB\nMemFree:   2 kB\nMemAvailable:   16 kB\n"
    )
    assert footprint.free_memory(CPU) == 16 * 1024
    monkeypatch.setattr(footprint, "OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(footprint, "CONTROL_GROUPS", tmp_path)
    (tmp_path / "slurm/job/step").mkdir(parents=True)
    (tmp_path / "memory").mkdir()
    (tmp_path / "slurm/job/step/memory.max").write_text("max\n")
    (tmp_path / "slurm/job/memory.max").write_text("8192\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("4096\n")
    footprint.OWN_GROUPS.write_text("0::/slurm/job/step\n")
    assert footprint.free_memory(CPU) == 8192
    # used, but for file caches, of which some are anonymous
    (tmp_path / "slurm/job/memory.current").write_text("5000\n")
    assert footprint.free_memory(CPU) == 3192
    stat = "anon 3000\ninactive_file 1500\nactive_file 500\nfile 4000\n"
    (tmp_path / "slurm/job/memory.stat").write_text(stat)
    assert footprint.free_memory(CPU) == 8192 - 3000
    # the step's own limit is lower, but less of it is used
    (tmp_path / "slurm/job/step/memory.max").write_text("7000\n")
    (tmp_path / "slurm/job/step/memory.current").write_text("1000\n")
    assert footprint.free_memory(CPU) == 8192 - 3000
    footprint.OWN_GROUPS.write_text("4:memory:/docker/not-seen-from-within\n")
    assert footprint.free_memory(CPU) == 4096
    (tmp_path / "memory/memory.usage_in_bytes").write_text("4000\n")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 700\ntotal_active_file 300\n"
    (tmp_path / "memory/memory.stat").write_text(stat)
    assert footprint.free_memory(CPU) == 1096
    (tmp_path / "memory/memory.usage_in_bytes").write_text("9000\n")
    assert footprint.free_memory(CPU) == 0


def test_what_cannot_fit_is_refused_before_it_is_allocated(monkeypatch):
    """8.03e9 parameters x 16 bytes; in 80 GiB bf16 and adapters would do, and two ranks."""
    monkeypatch.setattr(build, "initialize", None)
    monkeypatch.setattr(footprint, "free_memory", lambda device: 80 << 30)
    config = configs.from_dict({"model": "llama3-8b", "device": "cpu"})
    with pytest.raises(InputError) as caught:
        build.build_model(config, start(config))
    assert str(caught.value) == (
        "119.7 GiB (weights 29.9, gradients 29.9, optimizer states 59.8) are needed on a rank, and 80.0 are free on "
        "its CPU (use precision=bf16-pure optim.states=bf16 (59.8), lora.rank=16 precision=bf16 (15.0), 2 hosts that "
        "share them, or a smaller model)"
    )


def built_beside_others(folder, room) -> str:
    """What a rank is told that builds beside another one, and comes to it when that one is done if it can be."""

    def free(device):
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return room - sum(int(file.read_text()) for file in folder.glob("rank-*"))

    def allocate(model, config, device):
        size = sum(to_local(p).nbytes for p in model.parameters())
        (folder / f"rank-{dist.get_rank()}").write_text(str(16 * size // 4))
        raise InputError(f"{size} bytes are taken")

    config = configs.from_dict(
        {"model": TINY, "batch": BATCH, "device": "cpu", "parallel": {"pp": 2}}
    )
    with (
        mock.patch.object(footprint, "free_memory", free),
        mock.patch.object(build, "allocate", allocate),
    ):
        try:
            build.build_model(config, start(config))
        except InputError as error:
            return str(error)


def test_ranks_of_a_host_share_its_memory(pool, tmp_path):
    """Stages of other sizes: what both take is free, or one byte less is, whoever looks last."""
    config = configs.from_dict({"model": TINY, "batch": BATCH})
    need = 16 * sum(p.numel() for p in empty_model(config.model.config).parameters())
    model = empty_model(config.model.config)
    need += footprint.least_activations(model, config, "none")
    enough, short = tmp_path / "enough", tmp_path / "short"
    enough.mkdir()
    short.mkdir()
    said = pool.run(2, built_beside_others, enough, need)
    assert all("bytes are taken" in text for text in said) and said[0] != said[1]
    said = pool.run(2, built_beside_others, short, need - 1)
    assert all("are free on its CPU, which 2 ranks share (use" in text for text in said)


def test_train_says_first_what_it_is_about_to_do(tmp_path):
    words = ["model=llama3.1-405b", "device=cpu", f"out_dir={tmp_path / 'out'}"]
    result = command("-m", "minitrain.train", "--config", "configs/quickstart.yaml", *words)
    assert result.stdout.startswith(
        "llama3.1-405b with random weights, 405,853.4M parameters: pretrain in fp32"
    )
    assert re.fullmatch(
        r"error: .* GiB .* needed on a rank, and .* are free on its CPU \(use .*\)\n",
        result.stderr,
    )
    assert result.returncode == 2


def test_a_dry_run_says_the_same_sum():
    result = command(
        "bench.py",
        "--dry-run",
        "--config",
        "configs/quickstart.yaml",
        "model=llama3-8b",
        "device=cpu",
    )
    assert (
        "119.7 GiB (weights 29.9, gradients 29.9, optimizer states 59.8) and activations"
        in result.stdout
    )


def test_out_of_memory_is_one_line():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    asked = (
        r"rank 0 is out of memory \(you tried to allocate 36028797018963968 bytes\): use recompute=full "
        "or offload, a smaller"
    )
    assert re.match(asked, explain(caught.value))
    gpu = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which"
    assert "out of memory (Tried to allocate 2.00 GiB): use" in explain(
        torch.OutOfMemoryError(gpu)
    )
    assert "out of memory: use" in explain(MemoryError())


@pytest.mark.parametrize("name", ["CXX", "CC"])
@pytest.mark.parametrize("kind", ["empty", "folder", "text"])
def test_a_compiler_that_cannot_be_run_is_one_line(tmp_path, monkeypatch, name, kind):
    """As a shell's `CXX=` leaves it, and what torch asks for its version."""
    text = tmp_path / "text"
    text.write_text("no program")
    text.chmod(0o755)
    value = {"empty": "", "folder": str(tmp_path), "text": str(text)}[kind]
    monkeypatch.setenv(name, value)
    with pytest.raises(OSError) as caught:
        subprocess.check_output([value, "--version"])
    wrapped = RuntimeError(f"{type(caught.value).__name__}: {caught.value}")
    for error in (caught.value, wrapped):
        assert "needs a C++ compiler" in explain(error)
    assert explain(FileNotFoundError(2, "No such file", "other")) is None


def test_a_compiler_that_is_missing_is_one_line():
    """On the CPU and on a GPU."""
    expected = "compile=true needs a C++ compiler, and torch finds none (install g++, set CXX, or use compile=false)"
    assert explain(InvalidCxxCompiler()) == expected
    assert (
        explain(
            RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
        )
        == expected
    )


class Lion(torch.optim.Optimizer):
    """Of one's own (Chen et al. 2023): one state as the parameter, a scalar, and a word."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 1e-4})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state |= {
                        "momentum": torch.zeros_like(parameter),
                        "step": torch.zeros(()),
                        "kind": "lion",
                    }
                state["momentum"].lerp_(parameter.grad, 0.01)


def test_an_optimizer_of_ones_own_is_asked_for_its_states(monkeypatch):
    config = configs.from_dict({"model": "llama3.1-8b"})
    model = empty_model(config.model.config)
    numbers = sum(p.numel() for p in model.parameters())
    assert footprint.footprint(model, config)["optimizer states"] == 8 * numbers
    monkeypatch.setattr(footprint, "make_optimizer", lambda model, optim: Lion(model))
    sizes = footprint.footprint(model, config)
    assert sizes["optimizer states"] == sizes["weights"] == 4 * numbers
    # 29.9 GiB
    assert sizes["optimizer states"] // 2**20 == 30633
