"""What a decoding step and a training step run: `python -m tests.helpers.path` prints both figures.

A function counts once, with its comprehensions and lambdas; lines are those of the functions that ran, with what
they hold, as a share of all lines of their files.
"""

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from minitrain import Sampler, SamplingParams
from minitrain.models.decoder import Decoder
from minitrain.models.zoo import model_config
from minitrain.run.config import load as configs
from minitrain.run.launch.start import start
from minitrain.settings import Rollout
from minitrain.training.loop import Trainer

PACKAGE = Path(__file__).parents[2] / "minitrain"


def functions_of(run: Callable[[], object]) -> dict[Path, set[str]]:
    """Return the package's functions that `run` calls, in this thread, by file."""
    called: dict[Path, set[str]] = {}

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            outer = code.co_qualname.partition(".<locals>.<")[0]
            called.setdefault(Path(code.co_filename), set()).add(outer)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(before)
    return called


def decoding_step() -> dict[Path, set[str]]:
    """Of a Llama whose two samples have been decoded before, as in the midst of `generate`."""
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


def training_step() -> dict[Path, set[str]]:
    """Of a dense Llama's second step, on this process alone."""
    batch = {"global": 2, "micro": 1, "seq_len": 32}
    config = configs.from_dict(
        {"model": {"name": "llama3-8b-tiny"}, "batch": batch, "device": "cpu"}
    )
    trainer = Trainer(config, start(config))
    row = torch.arange(33)[None]
    batches = [{"tokens": row[:, :-1], "labels": row[:, 1:]}] * 2
    trainer.update(batches, 0)
    return functions_of(lambda: trainer.update(batches, 1))


def lines_on_path(called: dict[Path, set[str]]) -> tuple[int, int]:
    """Return how many lines the called functions have, and how many their files."""
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
    torch.manual_seed(0)
    decoding = decoding_step()
    print(
        f"a decoding step: {sum(map(len, decoding.values()))} functions of {len(decoding)} files"
    )
    for file, names in sorted(decoding.items()):
        print(f"    {file.relative_to(PACKAGE)}: {', '.join(sorted(names))}")
    training = training_step()
    on_path, total = lines_on_path(training)
    print(
        f"a dense training step: {len(training)} files, {on_path} of their {total} lines ({on_path / total:.0%})"
    )
    for file, names in sorted(training.items()):
        print(f"    {file.relative_to(PACKAGE)}: {', '.join(sorted(names))}")


if __name__ == "__main__":
    main()
