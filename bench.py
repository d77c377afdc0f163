"""The throughput benchmark.

  python bench.py                                          the quickstart on whatever is here, CUDA or CPU
  torchrun --nproc_per_node 8 bench.py --config FILE ...   several configs in one process, each result flushed when done
  python bench.py --config FILE --versus transformers      the same step by transformers (or diffusers), in turns
  python bench.py --config LORA --versus peft              the same by peft; or "full": training the whole model instead
  python bench.py --config FILE ... --shrink               the same layouts at toy width on gloo processes of its own
  python bench.py --config FILE --dry-run                  check the config and its layout; run nothing

Any setting can follow as key=value, such as batch.micro=1 model.num_layers=2.
"""

import json
from pathlib import Path

import torch.distributed as dist

from minitrain import cli
from minitrain.bench.layout import dry_run
from minitrain.bench.measure import measure, row_name
from minitrain.bench.report import table
from minitrain.bench.shrink import run_shrunk, shrink
from minitrain.bench.versus import versus_transformers
from minitrain.bench.versus_diffusers import versus_diffusers
from minitrain.bench.versus_lora import versus_full, versus_peft
from minitrain.config import load
from minitrain.config_checks import check_layout
from minitrain.errors import InputError
from minitrain.parallel.mesh import start, world_size

VERSUS = {
    "transformers": versus_transformers, "diffusers": versus_diffusers, "peft": versus_peft, "full": versus_full,
}  # fmt: skip
QUICKSTART = Path(__file__).parent / "configs" / "quickstart.yaml"


def main(arguments: list[str]) -> None:
    parser = cli.Parser(prog="bench.py", description=__doc__)
    parser.add_argument("--config", nargs="+", action="extend", default=[], metavar="FILE", help="default: quickstart")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--warmup", type=int, default=3, help="untimed steps before them (default 3)")
    parser.add_argument("--json", metavar="FILE", help="append each result to FILE as one JSON line")
    parser.add_argument("--dry-run", action="store_true", help="validate and lay out, run nothing")
    parser.add_argument("--shrink", action="store_true", help="toy width, two ranks per parallel dimension, on CPU")
    parser.add_argument("--versus", choices=VERSUS, help="also time this library on the same shape")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.warmup < 0:
        raise InputError(f"--steps={options.steps} must be at least 1 and --warmup={options.warmup} at least 0")

    words = options.config + options.overrides  # --config swallows the words behind it
    overrides = [word for word in words if "=" in word]
    files = [word for word in words if "=" not in word] or [QUICKSTART]
    configs = [(row_name(file), load(file, overrides)) for file in files]
    if options.shrink:
        if options.versus or world_size() > 1:
            raise InputError("--shrink starts its own processes: use neither torchrun nor --versus with it")
        configs = [(row, shrink(config)) for row, config in configs]
    if options.dry_run:
        for row, config in configs:
            print(f"{row}: {dry_run(config)}")
        return
    if not options.shrink:
        for _, config in configs:
            check_layout(config, world_size())
    results = [run(row, config, options) for row, config in configs]
    if len(results) > 1 and is_first_rank():
        print(table(results))


def run(row: str, config, options) -> dict:
    """Measure one config, and write its result out at once."""
    if options.shrink:
        outcome = run_shrunk(config, row, options.steps, options.warmup)
    else:
        meshes = start(config)
        outcome = measure(config, row, meshes, options.steps, options.warmup)
        if options.versus:
            outcome |= VERSUS[options.versus](config, meshes, row, options.steps, options.warmup)
    if is_first_rank():
        print(table([outcome]), flush=True)
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                file.write(json.dumps(outcome) + "\n")
    return outcome


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


if __name__ == "__main__":
    cli.run(main)
