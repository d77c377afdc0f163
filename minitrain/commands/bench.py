"""Run bench.py's work once its arguments are read: measure, simulate, shrink or check each config,
one after the other.

Each result is printed and written as soon as it is there, since machines are rented by the hour. A
config that fails is reported in one line and does not stop those after it; the exit code says so in
the end.
"""

import gc
import json
import math
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from minitrain.bench.figures import placed
from minitrain.bench.measure import measure
from minitrain.bench.measure_policy import measure_policy
from minitrain.bench.measure_sampling import check_sampling, measure_sampling
from minitrain.bench.proxy import extrapolate, make_proxy, note, parse_counts
from minitrain.bench.report import calibration_line, details, table
from minitrain.bench.rows import load_row
from minitrain.bench.shrink import run_shrunk, shrink
from minitrain.bench.versus import check_installed, check_versus, versus
from minitrain.errors import InputError, refused
from minitrain.run.config.environment import world_size
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.launch.cli import check_writable, in_one_line
from minitrain.run.launch.failures import rank
from minitrain.run.launch.start import pick_device, start
from minitrain.run.monitor.hardware import describe
from minitrain.settings import Config
from minitrain.simulator.calibrate import calibrate, find_system
from minitrain.simulator.chrome import write_trace
from minitrain.simulator.fake_world import dry_run, estimate_memory
from minitrain.simulator.recipe import as_published
from minitrain.simulator.simulate_policy import predicted_row
from minitrain.simulator.sweep import combinations, growth, ranking, sweep
from minitrain.simulator.timeline import System, load_system

UNSTEADY = "steps were not of one speed, or faster than the machine's matrix products: was it busy with other things?"


@dataclass
class Case:
    """A config, and runs of it or of its proxies, each with the keys to add to its result."""

    row: str
    config: Config
    runs: list[tuple[Config, dict]]


def bench(files: list, overrides: list[str], options) -> None:
    """Run what the options ask for. Raises InputError, at the end if other files could be run."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is done is shown at the end
    if options.sweep and len(files) > 1:
        raise InputError("--sweep takes one config at a time")
    alone = options.calibrate and not options.config
    cases = [] if alone else make_cases(files, overrides, options)
    check_options(cases, options)
    if not options.dry_run:
        check_writable("json", options.json)
    if options.simulate:
        check_writable("trace", options.trace)
    compared = len(cases) > 1 and not (options.sweep or options.simulate or options.shrink)
    if options.calibrate or (compared and not options.dry_run):
        show_calibration(load_row(files[0], overrides)[1], options.json)
    if options.sweep and options.simulate:
        simulate_combinations(files[0], overrides, options)
    elif not alone:
        run_all(cases, options)
    tell_next(options)


def make_cases(files: list, overrides: list[str], options) -> list[Case]:
    """Return every file's cases, all checked before the first runs; tell whose a mistake is."""
    cases = []
    for file in files:
        try:
            if options.sweep and not options.simulate:
                # the config need not be possible by itself
                for name, words in combinations(options.sweep):
                    config = load_row(file, [*overrides, *words])[1]
                    cases.append(make_case(name, config, options))
            else:
                for words in layouts(file, overrides, options):
                    cases.append(make_case(*load_row(file, words), options))
        except InputError as error:
            named = len(files) == 1 or str(file) in str(error)
            raise InputError(str(error) if named else f"{file}: {error}") from error
    return cases


def make_case(row: str, config: Config, options) -> Case:
    if options.generate:
        check_sampling(config, options.versus)
    elif options.versus:
        check_versus(config, options.versus)
    if config.task == "diffusion" and config.data.kind != "mock" and not options.dry_run:
        raise InputError(
            f"bench.py times mock videos, all of one size: data.kind={config.data.kind} has sizes and prompts of its "
            f"own (use data.kind=mock and data.size)"
        )
    if options.shrink:
        return Case(row, config, [(shrink(config), {})])
    if options.proxy is not None:
        counts = parse_counts(options.proxy)
        return Case(row, config, [(make_proxy(config, n), note(config, n)) for n in counts])
    return Case(row, config, [(config, {})])


def layouts(file: str, overrides: list[str], options) -> list[list[str]]:
    """Return the overrides of the row's published layout, of ours (`reference.ours`), or of both
    where it is simulated.
    """
    ours = load_row(file, overrides)[1].reference.get("ours")
    if not ours or options.as_published:
        return [overrides]
    fastest = [*ours, "reference.layout=ours", *overrides]
    if options.ours:
        return [fastest]
    return [overrides, fastest] if options.simulate and not options.trace else [overrides]


CONTRADICTIONS = (  # what may not be given together with one of those behind it, and what to say
    (
        "shrink",
        "versus simulate generate torchrun",
        "--shrink starts its own processes: use neither torchrun nor --versus, --simulate or --generate with it",
    ),
    (
        "proxy",
        "shrink generate sweep torchrun",
        "--proxy runs on one process, without --shrink, --generate or --sweep",
    ),
    (
        "simulate",
        "generate versus calibrate torchrun",
        "--simulate is for training, on one process: without --generate, --versus or --calibrate",
    ),
    (
        "calibrate",
        "shrink dry_run",
        "--calibrate measures this machine: without --shrink or --dry-run",
    ),
    (
        "calibrate without_config",
        "sweep proxy generate versus profile",
        "--calibrate alone measures rates: with --sweep, --proxy, --generate, --versus or --profile add --config",
    ),
    (
        "generate",
        "another_library",
        "--generate --versus: only transformers samples the same (use transformers)",
    ),
    ("versus", "torchrun", "--versus runs in one process, without torchrun"),
    ("trace", "untraced", "--trace needs --simulate or --profile"),
    ("system", "measured", "--system needs --simulate"),
    (
        "profile",
        "simulate shrink policy",
        "--profile is for measured steps of training or sampling, not for --simulate, --shrink or task=grpo, which "
        "prints its phases",
    ),
    (
        "sweep simulate",
        "dry_run",
        "--simulate --sweep says itself which combinations cannot run: leave --dry-run out",
    ),
    ("simulate", "dry_run", "--dry-run runs nothing: leave --simulate out"),
    ("sweep simulate", "trace", "--trace shows one layout, not those of --sweep"),
    ("simulate trace", "several", "--trace takes one config at a time"),
)


def check_options(cases: list[Case], options) -> None:
    """Raise InputError for options that contradict each other."""
    circumstances = {
        "torchrun": world_size() > 1,
        "without_config": not cases,
        "several": sum(len(case.runs) for case in cases) > 1,
        "another_library": options.versus != "transformers" and options.versus,
        "policy": not options.generate and any(case.config.task == "grpo" for case in cases),
        "measured": not options.simulate,
        "untraced": not (options.simulate or options.profile),
    }
    given = {name for name, value in (vars(options) | circumstances).items() if value}
    for together, others, line in CONTRADICTIONS:
        if given.issuperset(together.split()) and not given.isdisjoint(others.split()):
            raise InputError(line)
    if options.versus:
        check_installed(options.versus)


def run_all(cases: list[Case], options) -> None:
    """Run every case, with a line for each that fails, and one table of all results."""
    results = []
    failed = []
    try:
        for case in cases:
            try:
                results += run_case(case, options)
            except Exception as error:
                if len(cases) == 1 or (world_size() > 1 and not isinstance(error, InputError)):
                    raise  # the other ranks may not have failed, and would wait for this one
                failed.append(case.row)
                tell(case.row, error, options.debug)
    finally:  # also where SIGTERM or Ctrl-C ends it
        if len(results) > 1 and rank() == 0:
            print(growth(results) if options.sweep else table(results, options.wide), flush=True)
    if failed:
        raise InputError(f"{len(failed)} of {len(cases)} configs failed: {', '.join(failed)}")


def simulate_combinations(file: str, overrides: list[str], options) -> None:
    """Rank the combinations of `--sweep` that can run, and say why the others cannot."""
    system = chosen_system(load_row(file, overrides)[1], options)
    results = []
    try:
        for result in sweep(file, overrides, options.sweep, system):
            results.append(result)
            told = result.get("error") or f"{result['tokens_per_sec_per_gpu']:,.0f} tokens/s/GPU"
            print(f"{result['settings']}: {told}", flush=True)
            if "error" not in result:
                append(result, options.json)
    finally:  # also where SIGTERM or Ctrl-C ends it
        print(ranking(results), flush=True)
    if all("error" in result for result in results):
        raise InputError(f"--sweep: none of {len(results)} combination(s) can run")


def run_case(case: Case, options) -> list[dict]:
    """Return the results of a case, each written out at once.

    Those are none of a dry run; of two proxies, also what they say of the whole.
    """
    results = []
    for config, added in case.runs:
        if options.dry_run:
            found = dry_run(config)
            if rank() == 0:
                print(f"{case.row}: {found}", flush=True)
            continue
        release_memory()
        result = run(case.row, config, options) | added
        results.append(result)
        try:
            if options.versus and not options.generate:  # where both take turns from the start
                release_memory()
                length = options.steps, options.warmup
                result |= versus(config, start(config), case.row, *length, options.versus)
        finally:  # ours is not lost where the other library fails, as where it needs more memory
            write_result(result, options.json, options.wide)
    if options.proxy and len(results) == 2:
        results.append(extrapolate(case.config, *results))
        write_result(results[-1], options.json, options.wide)
    return results


def release_memory() -> None:
    """Free earlier models, which are full of cycles, so that this one's peak is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(row: str, config: Config, options) -> dict:
    """Simulate or measure one config."""
    length = options.steps, options.warmup
    profile = options.profile, options.trace
    if options.simulate:
        return simulate(row, config, options)
    if options.shrink:
        return run_shrunk(config, row, *length)
    check_layout(config, world_size())
    if options.generate:
        return measure_sampling(config, row, *length, options.versus is not None, *profile)
    config = placed(config, world_size(), describe(pick_device(config.device))["device"])
    if config.task == "grpo":
        return measure_policy(config, row, *length)
    estimate = announce_memory(row, config) if config.task == "diffusion" else {}
    return measure(config, row, start(config), *length, *profile) | estimate


def simulate(row: str, config: Config, options) -> dict:
    system = chosen_system(config, options)
    simulation, outcome = predicted_row(config, row, system)
    is_published = "recipe" in config.reference and "layout" not in config.reference
    if is_published and system.name == system_of(config) and outcome["ratio"] is not None:
        outcome["as_published"] = as_published(config, row, system, simulation)
    if options.trace:
        write_trace(simulation, options.trace)
    return outcome


def chosen_system(config: Config, options) -> System:
    """Return --system, or what the config's published row ran on. Raises InputError."""
    if options.system is not None:
        return find_system(options.system)
    return load_system(system_of(config), "reference.system")


def system_of(config: Config) -> str:
    return config.reference.get("system", "dgx-h100").lower()


def announce_memory(row: str, config: Config) -> dict[str, float]:
    """Print, before anything is allocated, how much memory a rank will need.

    Returns that for the config's result. Under torchrun for the first config alone, whose process
    group stays up.
    """
    if rank() != 0:
        return {}
    if dist.is_initialized():  # by an earlier config, but the estimate has a group of its own
        if "WORLD_SIZE" in os.environ:
            return {}
        dist.destroy_process_group()
    kinds = estimate_memory(config, world_size())
    parts = ", ".join(f"{kind} {size:.3g}" for kind, size in kinds.items())
    print(f"{row}: estimated peak memory {sum(kinds.values()):.3g} GiB ({parts})", flush=True)
    working = kinds["activations"] + kinds["gathered"]
    return {"estimated_memory_gib": sum(kinds.values()), "estimated_activations_gib": working}


def show_calibration(config: Config, file: str | None) -> None:
    """Measure every rank's device, and show the first one's figures."""
    outcome = calibrate(pick_device(config.device))
    if rank() == 0:
        print(calibration_line(outcome), flush=True)
        append(outcome, file)


def write_result(outcome: dict, file: str | None, wide: bool = False) -> None:
    """Print a result and append it to the file of results, at once: what comes later may fail.

    Either is done though the other cannot be, as where whoever read the output has gone, or a disk
    is full.
    """
    if rank() != 0:
        return
    try:
        print(table([outcome], wide), flush=True)
        if "breakdown_s" in outcome:
            print(details(outcome), flush=True)
        if outcome["mode"] == "extrapolated":
            print(f"without {outcome['left_out']}", flush=True)
        slowed = outcome["step_time_s"] > 1.5 * outcome.get("step_time_min_s", math.inf)
        if outcome["mode"] == "measured" and (slowed or outcome["mfu"] > 1):
            print(f"warning: {outcome['row']}: {UNSTEADY}", file=sys.stderr, flush=True)
    finally:
        append(outcome, file)


def append(outcome: dict, file: str | None) -> None:
    """Append a line of JSON to a file, apart from one that a kill has cut short before it."""
    if not file:
        return
    note = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    line = json.dumps(outcome | note) + "\n"
    with refused(f"--json={file} cannot be written"):
        if Path(file).is_file() and Path(file).read_bytes()[-1:] not in (b"", b"\n"):
            line = "\n" + line
        with open(file, "a", encoding="utf-8") as results:
            results.write(line)


def tell(row: str, error: Exception, debug: bool) -> None:
    """Report the error in one line, as the command line reports its own."""
    if debug:
        traceback.print_exception(error)
    if rank() == 0:
        line = in_one_line(error) or f"{error!r:.200}"
        print(f"error: {row}: {line}", file=sys.stderr, flush=True)


def tell_next(options) -> None:
    """Say on stderr what was written, and what to do next."""
    if options.dry_run:
        line = "nothing was run: leave --dry-run out, or predict speed and memory with --simulate"
    elif not options.json:
        line = "--json FILE keeps results, and --report FILE shows them beside the published ones"
    elif options.calibrate:
        line = (
            f"wrote {options.json}: simulate this machine with --simulate --system {options.json}"
        )
    else:
        line = f"wrote {options.json}: python bench.py --report {options.json} makes a page of it"
    if rank() == 0:
        if options.trace:
            print(f"wrote {options.trace}: see it at https://ui.perfetto.dev", file=sys.stderr)
        print(line, file=sys.stderr)
