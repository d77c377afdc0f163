"""Run the cases of bench.py: time them, simulate them, or try their layouts."""

import gc
from argparse import Namespace
from functools import partial

from minitrain.bench.rows import load_row
from minitrain.bench.tables import calibration_line, table
from minitrain.commands.bench_cases import Case
from minitrain.commands.bench_results import append, tell, write_result
from minitrain.errors import InputError
from minitrain.run.config.environment import rank, world_size
from minitrain.run.config.layout_checks import check_layout
from minitrain.settings import Config


def run_all(cases: list[Case], options: Namespace) -> None:
    """Run every case, with a line for each that fails, and one table of all results."""
    results = []
    failed = []
    try:
        for case in cases:
            try:
                results += run_case(case, options)
            except Exception as error:
                # the other ranks may not have failed, and would wait for this one
                if len(cases) == 1 or (world_size() > 1 and not isinstance(error, InputError)):
                    raise
                failed.append(case.row)
                tell(case.row, error, options.debug)
    finally:
        # also where SIGTERM or Ctrl-C ends it
        if len(results) > 1 and rank() == 0:
            from minitrain.simulator.sweep import growth

            print(growth(results) if options.sweep else table(results, options.wide), flush=True)
    if failed:
        raise InputError(f"{len(failed)} of {len(cases)} configs failed: {', '.join(failed)}")


def run_case(case: Case, options: Namespace) -> list[dict]:
    """Return the results of a case, each written out at once.

    Those are none of a dry run; of two proxies, also what they say of the whole.
    """
    results = []
    for config, added in case.runs:
        if options.dry_run:
            from minitrain.simulator.dry_run import dry_run

            found = dry_run(config)
            if rank() == 0:
                print(f"{case.row}: {found}", flush=True)
            continue
        release_memory()
        result = run(case.row, config, options) | added
        results.append(result)
        try:
            # the sampler's and the other library's take turns from the start
            if options.versus and not options.generate:
                release_memory()
                result |= run_beside(case.row, config, options)
        finally:
            # ours is not lost where the other library fails, as where it needs more memory
            write_result(result, options.json, options.wide)
    if options.proxy and len(results) == 2:
        from minitrain.bench.proxy import extrapolate

        results.append(extrapolate(case.config, *results))
        write_result(results[-1], options.json, options.wide)
    return results


def release_memory() -> None:
    """Free earlier models, which are full of cycles, so that this one's peak is its own."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(row: str, config: Config, options: Namespace) -> dict:
    """Return the result of one config in the mode that the options ask for."""
    if options.simulate:
        return run_simulated(row, config, options)
    if options.shrink:
        from minitrain.bench.shrink import run_shrunk

        return run_shrunk(config, row, options.steps, options.warmup)
    check_layout(config, world_size())
    if options.generate:
        from minitrain.bench.measure_sampling import measure_sampling

        versus = options.versus is not None
        length = options.steps, options.warmup
        return measure_sampling(config, row, *length, versus, options.profile, options.trace)
    return run_measured(row, config, options)


def run_measured(row: str, config: Config, options: Namespace) -> dict:
    """Time training steps, or those of GRPO."""
    from minitrain.bench.figures import placed
    from minitrain.bench.measure import measure
    from minitrain.bench.measure_policy import measure_policy
    from minitrain.run.launch.start import pick_device, start
    from minitrain.run.monitor.hardware import describe
    from minitrain.simulator.dry_run import announce_memory

    length = options.steps, options.warmup
    config = placed(config, world_size(), describe(pick_device(config.device))["device"])
    if config.task == "grpo":
        return measure_policy(config, row, *length)
    estimate = announce_memory(row, config) if config.task == "diffusion" else {}
    return measure(config, row, start(config), *length, options.profile, options.trace) | estimate


def run_beside(row: str, config: Config, options: Namespace) -> dict:
    """Time training steps in turns with those of another library."""
    from minitrain.bench.versus import versus
    from minitrain.run.launch.start import start

    return versus(config, start(config), row, options.steps, options.warmup, options.versus)


def show_calibration(config: Config, file: str | None) -> None:
    """Measure every rank's device, and show the first one's figures."""
    from minitrain.run.launch.start import pick_device
    from minitrain.simulator.calibrate import calibrate

    outcome = calibrate(pick_device(config.device))
    if rank() == 0:
        print(calibration_line(outcome), flush=True)
        append(outcome, file)


def run_simulated(row: str, config: Config, options: Namespace) -> dict:
    """Predict a step of one config."""
    from minitrain.simulator.calibrate import chosen_system
    from minitrain.simulator.chrome import write_trace
    from minitrain.simulator.predict import predict

    simulation, outcome = predict(config, row, chosen_system(config, options.system))
    if options.trace:
        write_trace(simulation, options.trace)
    return outcome


def rank_combinations(file: str, overrides: list[str], options: Namespace) -> None:
    """Predict all combinations of --sweep, and print them from the fastest to the slowest."""
    from minitrain.simulator.calibrate import chosen_system
    from minitrain.simulator.sweep import rank_layouts

    system = chosen_system(load_row(file, overrides)[1], options.system)
    rank_layouts(file, overrides, options.sweep, system, partial(append, file=options.json))
