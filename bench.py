"""The throughput benchmark.

  python bench.py                                          the quickstart on whatever is here, CUDA or CPU
  torchrun --nproc_per_node 8 bench.py --config FILE ...   several configs in one process, each result flushed when done
  python bench.py --config FILE --versus transformers      the same step by transformers (or diffusers), in turns
  python bench.py --config LORA --versus peft              the same by peft; or "full": training the whole model instead
  python bench.py --config FILE ... --shrink               the same layouts at toy width on gloo processes of its own
  python bench.py --config FILE --dry-run                  check the config and its layout; run nothing
  python bench.py --config FILE ... --simulate             what the config would do in its full world, without a GPU
  python bench.py --config FILE --simulate --sweep tp=1,2,4 pp=1,2      rank layouts by predicted tokens/s
  python bench.py --generate --config FILE                 the sampler on mock prompts, not training
  python bench.py --list                                   the published rows

Any setting can follow as key=value, such as batch.micro=1 model.num_layers=2.
"""

import json
import os
from pathlib import Path

import torch.distributed as dist
from tqdm import tqdm

from minitrain import cli
from minitrain.bench.chrome import write_trace
from minitrain.bench.layout import dry_run
from minitrain.bench.measure import measure, row_name
from minitrain.bench.measure_policy import measure_policy
from minitrain.bench.measure_sampling import measure_sampling
from minitrain.bench.memory import estimate_memory
from minitrain.bench.report import table
from minitrain.bench.rows import list_rows
from minitrain.bench.shrink import run_shrunk, shrink
from minitrain.bench.simulate import simulated_row
from minitrain.bench.sweep import ranking, sweep
from minitrain.bench.timeline import load_system
from minitrain.bench.versus import versus_transformers
from minitrain.bench.versus_diffusers import versus_diffusers
from minitrain.bench.versus_lora import check_adapters, versus_full, versus_peft
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
    parser.add_argument("--simulate", action="store_true", help="predict by running a rank of it on fake tensors")
    parser.add_argument("--system", help="simulate on this machine (default: the row's own, else dgx-h100)")
    parser.add_argument("--trace", metavar="FILE", help="with --simulate: write a Chrome trace")
    parser.add_argument("--sweep", nargs="+", default=[], metavar="KEY=V,V", help="with --simulate: all combinations")
    parser.add_argument("--list", action="store_true", help="print the published rows")
    parser.add_argument("--generate", action="store_true", help="time the sampler on mock prompts, not training")
    parser.add_argument("--versus", choices=VERSUS, help="also time this library on the same shape")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.warmup < 0:
        raise InputError(f"--steps={options.steps} must be at least 1 and --warmup={options.warmup} at least 0")

    if options.list:
        print(list_rows())
        return
    words = options.config + options.overrides  # --config swallows the words behind it
    overrides = [word for word in words if "=" in word]
    files = [word for word in words if "=" not in word] or [QUICKSTART]
    configs = [(row_name(file), load(file, overrides)) for file in files]
    if options.shrink:
        if options.versus or world_size() > 1:
            raise InputError("--shrink starts its own processes: use neither torchrun nor --versus with it")
        configs = [(row, shrink(config)) for row, config in configs]
    if options.generate and options.versus not in (None, "transformers"):
        raise InputError(f"--generate --versus {options.versus}: only transformers samples the same (use transformers)")
    if options.versus in ("peft", "full"):
        for _, config in configs:
            check_adapters(config, options.versus)
    if options.dry_run:
        for row, config in configs:
            print(f"{row}: {dry_run(config)}")
        return
    if options.simulate:
        simulate(configs, files, overrides, options)
        return
    if not options.shrink:
        for _, config in configs:
            check_layout(config, world_size())
    tight = [] if options.shrink else [(row, config) for row, config in configs if config.task == "diffusion"]
    estimates = {row: announce_memory(row, config) for row, config in tight}
    results = [run(row, config, options, estimates.get(row, {})) for row, config in configs]
    if len(results) > 1 and is_first_rank():
        print(table(results))


def announce_memory(row: str, config) -> dict[str, float]:
    """Say, before anything is allocated, what memory a rank will need; returns that for the config's result."""
    if os.environ.get("RANK", "0") != "0":
        return {}
    kinds = estimate_memory(config, world_size())
    parts = ", ".join(f"{kind} {size:.3g}" for kind, size in kinds.items())
    print(f"{row}: estimated peak memory {sum(kinds.values()):.3g} GiB ({parts})", flush=True)
    working = kinds["activations"] + kinds["gathered"]
    return {"estimated_memory_gib": sum(kinds.values()), "estimated_activations_gib": working}


def run(row: str, config, options, estimate: dict[str, float]) -> dict:
    """Measure one config, and write its result out at once."""
    if options.shrink:
        outcome = run_shrunk(config, row, options.steps, options.warmup)
    elif options.generate:
        outcome = measure_sampling(config, row, options.steps, options.warmup, options.versus is not None)
    elif config.task == "grpo":
        outcome = measure_policy(config, row, options.steps, options.warmup)
    else:
        meshes = start(config)
        outcome = measure(config, row, meshes, options.steps, options.warmup) | estimate
        if options.versus:
            outcome |= VERSUS[options.versus](config, meshes, row, options.steps, options.warmup)
    write_result(outcome, options.json)
    return outcome


def write_result(outcome: dict, file: str | None) -> None:
    """Print it and append it to the file of results, at once: what comes later may fail."""
    if not is_first_rank():
        return
    print(table([outcome]), flush=True)
    if file:
        with open(file, "a", encoding="utf-8") as results:
            results.write(json.dumps(outcome) + "\n")


def simulate(configs: list, files: list, overrides: list[str], options) -> None:
    """Predict each config, or all layouts of one."""
    if (options.sweep or options.trace) and len(configs) > 1:
        raise InputError("--sweep and --trace take one config at a time")
    results = []
    for row, config in configs:
        system = load_system(options.system or config.reference.get("system", "dgx-h100").lower())
        if options.sweep:
            print(ranking(list(tqdm(sweep(files[0], overrides, options.sweep, system), leave=False))))
            return
        simulation, outcome = simulated_row(config, row, system)
        if options.trace:
            write_trace(simulation, options.trace)
        write_result(outcome, options.json)
        results.append(outcome)
    if len(results) > 1:
        print(table(results))


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


if __name__ == "__main__":
    cli.run(main)
