"""Print the functions that a decoding step, a training step and `minitrain train` call: python -m tests.helpers.path

A function counts once, with its comprehensions and lambdas. Lines are those of the called functions, also as a share of
all lines of their files.
"""

import ast
import inspect
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

Called = dict[Path, set[str]]
# two steps of a dense Llama on mock data, with default settings
PLAIN = """
model: llama3-8b-tiny
steps: 2
batch: {global: 2, micro: 1, seq_len: 32}
device: cpu
"""
PACKAGE = Path(__file__).parents[2] / "minitrain"


def functions_of(run: Callable[[], object]) -> Called:
    """Return the package's functions that `run` calls by file, in this thread and in threads that it starts."""
    called: Called = {}

    def profile(frame, event, _):
        code = frame.f_code
        # bodies of modules and classes also have code objects
        is_function = code.co_flags & inspect.CO_OPTIMIZED
        if event == "call" and is_function and code.co_filename.startswith(str(PACKAGE)):
            outer = code.co_qualname.partition(".<locals>.<")[0]
            called.setdefault(Path(code.co_filename), set()).add(outer)

    before = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return called


def train_command() -> Called:
    """Return the functions that `minitrain train` calls, in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "called.json")
        words = [sys.executable, "-c", "from tests.helpers.path import *; train()", folder, found]
        subprocess.run(words, cwd=PACKAGE.parent, check=True, capture_output=True)
        return {Path(file): set(names) for file, names in json.loads(found.read_text()).items()}


def train() -> None:
    """Run `minitrain train` in the folder that the first argument names; write the called functions to the second."""
    folder, found = sys.argv[1:]
    config = Path(folder, "config.yaml")
    config.write_text(PLAIN)
    sys.argv = ["minitrain", "train", "--config", str(config), f"out_dir={folder}/run"]
    end = os._exit

    def leave(code: int) -> None:
        raise SystemExit(code)

    # commands whose ranks have met end by os._exit
    os._exit = leave

    def run() -> None:
        try:
            runpy.run_module("minitrain", run_name="__main__")
        except SystemExit as ended:
            assert not ended.code

    called = functions_of(run)
    text = json.dumps({str(file): sorted(names) for file, names in called.items()})
    Path(found).write_text(text)
    end(0)


def decoding_step() -> Called:
    """Return the functions that a decoding step of two running samples calls."""
    from minitrain import Sampler, SamplingParams
    from minitrain.models.decoder import Decoder
    from minitrain.models.zoo import model_config
    from minitrain.settings import Rollout

    sampler = Sampler(
        Decoder(model_config("llama3-8b-tiny")),
        settings=Rollout(page_size=4, pages=50, compile=False),
    )
    for prompt in ([1, 2, 3], [4, 5]):
        sampler.submit(prompt, SamplingParams(max_tokens=20))
    with sampler.weights.in_use():
        while not sampler.scheduler.running or sampler.scheduler.waiting:
            sampler.step()
        return functions_of(sampler.step)


def training_step() -> Called:
    """Return the functions that the second training step of a dense Llama calls, in one process."""
    import torch
    import yaml

    from minitrain.run.config.load import from_dict
    from minitrain.run.launch.start import start
    from minitrain.training.loop import Trainer

    config = from_dict(yaml.safe_load(PLAIN))
    trainer = Trainer(config, start(config))
    row = torch.arange(33)[None]
    batches = [{"tokens": row[:, :-1], "labels": row[:, 1:]}] * 2
    trainer.update(batches, 0)
    return functions_of(lambda: trainer.update(batches, 1))


def lines_on_path(called: Called) -> tuple[int, int]:
    """Return the number of lines of the called functions, and of their files."""
    on_path = total = 0
    for file, names in called.items():
        text = file.read_text(encoding="utf-8")
        lines = set()

        def visit(node: ast.AST, prefix: str, lines=lines, names=names) -> None:
            for child in ast.iter_child_nodes(node):
                name = prefix
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    name = f"{prefix}{child.name}."
                    if name[:-1] in names:
                        lines.update(range(child.lineno, child.end_lineno + 1))
                    if isinstance(child, ast.FunctionDef):
                        name += "<locals>."
                visit(child, name)

        visit(ast.parse(text), "")
        on_path += len(lines)
        total += len(text.splitlines())
    return on_path, total


def main() -> None:
    import torch

    torch.manual_seed(0)
    measured = {
        "a decoding step": decoding_step(),
        "a dense training step": training_step(),
        "minitrain train": train_command(),
    }
    for name, called in measured.items():
        on_path, total = lines_on_path(called)
        functions = sum(map(len, called.values()))
        share = f"{on_path} of their {total} lines ({on_path / total:.0%})"
        print(f"{name}: {functions} functions of {len(called)} files, {share}")
        for file, names in sorted(called.items()):
            lines, _ = lines_on_path({file: names})
            print(f"    {file.relative_to(PACKAGE)}, {lines}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
