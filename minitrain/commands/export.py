"""Write a checkpoint of a run, finished or not, as a model: minitrain export --run DIR --out DIR.

The result is in Hugging Face layout, or adapters in PEFT's, with the tokenizer. One process reads
the weights alone, whatever the layout of the run, on the CPU, and changes nothing in its folder.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minitrain.errors import InputError
from minitrain.run.launch import cli

if TYPE_CHECKING:
    from torch.nn import Module


def step_or_best(text: str) -> int | str:
    """Parse a step's number, or best, as an argparse type."""
    return text if text == "best" else cli.positive(int)(text)


OPTIONS = {
    "--run": (cli.home_path, ..., "a run's out_dir"),
    "--step": (
        step_or_best,
        None,
        "of a checkpoint, or best, by validation; default: the newest",
    ),
    "--out": (cli.home_path, ..., "a new folder"),
    "--fp8": (bool, False, "matrices in FP8 with a scale for each 128 x 128"),
}
# one process, beside a GPU that may be training; the weights are the same. What depends on the layout
# goes with it
ALONE = """device=cpu compile=false parallel={} metrics={} profile={} fp8.keep_transposed=false fp8.experts=false
grpo.generation_ranks=0 grpo.in_flight=false rollout.tp=1 rollout.ep=1"""


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain export", description=__doc__)
    options = parser.parse_args(arguments)
    from minitrain.run.checkpoint.checkpoint_files import read_description
    from minitrain.run.config.load import load
    from minitrain.run.launch.start import start
    from minitrain.run.monitor.progress import next_command
    from minitrain.run.tasks.exports import export
    from minitrain.run.tasks.initial_weights import make_trainer

    cli.check_new(options.out)
    number, folder = find_checkpoint(Path(options.run), options.step)
    config = load(Path(options.run, "config.yaml"), ALONE.split())
    if options.fp8 and config.lora:
        raise InputError("--fp8 is for models, and this run trained adapters (leave it out)")
    description = read_description(folder)
    trainer = make_trainer(config, start(config))
    read_weights(trainer.model, folder, description["files"])
    # the generation prompt that the run's replies follow
    asks = description["extra"].get("asks")
    with cli.new_folder(options.out) as out:
        export(trainer, config, out, asks, options.fp8)
    print(f"{options.out} holds step {number} of {options.run}")
    print(f"next: {next_command(replace(config, out_dir=options.run), options.out)}")


def find_checkpoint(run: Path, step: int | str | None) -> tuple[int, Path]:
    """Return the number and the folder of a run's checkpoint.

    step: a number; best, by validation; None: the newest. Raises InputError if there is none, or
    it is damaged.
    """
    from minitrain.run.checkpoint.checkpoint_files import find_damage
    from minitrain.run.checkpoint.checkpoint_folders import complete_steps

    checkpoints = run / "checkpoints"
    steps = complete_steps(checkpoints)
    if not steps:
        raise InputError(f"{checkpoints} holds no checkpoint (--run is a run's out_dir)")
    number = best_step(run / "metrics.jsonl") if step == "best" else step or steps[-1]
    if number not in steps:
        kept = " (checkpoint.best=true keeps the best)" if step == "best" else ""
        raise InputError(f"{checkpoints} holds steps {steps}, not {number}{kept}")
    folder = checkpoints / f"step-{number:08d}"
    if problem := find_damage(folder, 0, 1):
        raise InputError(f"checkpoint {folder} is damaged: {problem}")
    return number, folder


def read_weights(model: "Module", folder: Path, files: dict) -> None:
    """Read a checkpoint's weights into a model, or their averages where the run has optim.ema."""
    import torch.distributed.checkpoint as dcp

    from minitrain.run.checkpoint.checkpoint_index import IndexedReader
    from minitrain.run.checkpoint.checkpoint_state import changing, check_weights

    weights = changing(model)
    reader = IndexedReader(folder, files)
    stored = reader.index.state_dict_metadata
    check_weights(folder, stored, weights, set(weights))
    dcp.load(weights, storage_reader=reader)
    averages = {
        f"{name}/ema": tensor.float()
        for name, tensor in weights.items()
        if f"{name}/ema" in stored
    }
    dcp.load(averages, storage_reader=reader)
    for entry, average in averages.items():
        weights[entry.removesuffix("/ema")].copy_(average)


def best_step(file: Path) -> int:
    """Return the step of a run's best validation. Raises InputError if it has none."""
    from minitrain.run.monitor.metrics_file import no_steps, read_lines
    from minitrain.run.monitor.progress import goodness, validation

    lines, strange = read_lines(file)
    if strange:
        print(f"note: {file}: {no_steps(strange)}", file=sys.stderr)
    tested = [line for line in lines if validation(line)]
    if not tested:
        raise InputError(f"{file} has no validation (--step N names a step)")
    return max(tested, key=goodness)["step"]
