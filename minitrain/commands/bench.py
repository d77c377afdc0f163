"""The throughput benchmark.

  python bench.py                                          the quickstart on whatever is here, CUDA or CPU
  torchrun --nproc_per_node 8 bench.py --config FILE ...   several configs in one process, each result flushed when done
  python bench.py --config FILE --versus transformers      the same step by transformers (or diffusers), in turns
  python bench.py --config LORA --versus peft              the same by peft; or "full": training the whole model instead
  python bench.py --config FILE ... --proxy 4,8            on one GPU, with so many layers; two counts: extrapolated
  python bench.py --config FILE ... --shrink               the same layouts at toy width on gloo processes of its own
  python bench.py --config FILE ... --profile              and where a step's seconds go, by kind of kernel; with
                                                           --trace FOLDER also a Chrome trace of each config
  python bench.py --config FILE --dry-run                  check the config and its layout; run nothing
  python bench.py --config FILE ... --simulate             what the config would do in its full world, without a GPU
  python bench.py --config FILE --simulate --sweep tp=1,2,4 pp=1,2      rank layouts by predicted tokens/s
  python bench.py --sweep batch.seq_len=256,512,1024       measure each, beside how the arithmetic grows
  python bench.py --generate --config FILE                 the sampler on mock prompts, not training
  python bench.py --calibrate --json FILE                  this machine's rates; --simulate --system FILE takes them
  python bench.py --list                                   the published rows
  python bench.py --report [FILE ...] --out FOLDER         what --json wrote beside what was published, as a page

Any setting can follow as key=value, such as batch.micro=1 model.num_layers=2.

Each result is printed and written at once, since machines are rented by the hour. A config that
fails is reported in one line and does not stop those after it; the exit code says so in the end.
"""

import gc
import json
import math
import sys
import traceback
from argparse import Namespace
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

from minitrain.bench.rows import list_rows, load_row
from minitrain.bench.tables import calibration_line, details, table
from minitrain.errors import InputError, as_input_error
from minitrain.run.config.environment import rank, world_size
from minitrain.run.config.layout_checks import check_layout
from minitrain.run.config.recipes import CONFIGS, config_path, own_folder, split_words
from minitrain.run.launch import cli
from minitrain.settings import Config
from minitrain.simulator import tracers

# torch, which takes seconds, is imported in functions: --help, --list and typos are answered before

RESULTS = own_folder("results")
UNSTEADY = "steps were not of one speed, or faster than the machine's matrix products: was it busy with other things?"

OPTIONS = {
    "--steps": (cli.positive(int), 10, "timed steps"),
    "--warmup": (cli.positive(int, zero=True), 3, "untimed steps before them"),
    "--profile": (bool, False, "and one step more: its seconds by kind of kernel"),
    "--dry-run": (bool, False, "validate and lay out, run nothing"),
    "--shrink": (bool, False, "toy width, two ranks per parallel dimension, on CPU"),
    "--simulate": (bool, False, "predict by running a rank of it on fake tensors"),
    "--calibrate": (bool, False, "measure this machine's rates"),
    "--wide": (bool, False, "tables with all columns, not 100 characters wide"),
    "--as-published": (bool, False, "rows in their published layout alone"),
    "--ours": (bool, False, "rows in our fastest layout alone, where they have one"),
    "--list": (bool, False, "print the published rows"),
    "--generate": (bool, False, "time the sampler on mock prompts, not training"),
    "--json": (cli.file_path, None, "append each result to it as a JSON line"),
    "--system": (
        cli.file_path,
        None,
        "simulate on this machine, such as a100, or on a file of --calibrate",
    ),
    "--trace": (cli.file_path, None, "write Chrome traces: see above"),
    "--out": (cli.home_path, "out/report", "of the report"),
    "--versus": (["transformers", "diffusers", "peft", "full"], None, "also time this one"),
}

# problem -> options given together, and those that any of contradicts them; a circumstance is named
# as in `check_options`. The first that applies is reported.
CONTRADICTIONS = {
    "--shrink starts its own processes: use neither torchrun nor --versus, --simulate or --generate with it": (
        {"--shrink"},
        {"--versus", "--simulate", "--generate", "torchrun"},
    ),
    "--proxy runs on one process, without --shrink, --generate or --sweep": (
        {"--proxy"},
        {"--shrink", "--generate", "--sweep", "torchrun"},
    ),
    "--simulate is for training, on one process: without --generate, --versus or --calibrate": (
        {"--simulate"},
        {"--generate", "--versus", "--calibrate", "torchrun"},
    ),
    "--calibrate measures this machine: without --shrink or --dry-run": (
        {"--calibrate"},
        {"--shrink", "--dry-run"},
    ),
    "--calibrate alone measures rates: with --sweep, --proxy, --generate, --versus or --profile add --config": (
        {"--calibrate", "no config"},
        {"--sweep", "--proxy", "--generate", "--versus", "--profile"},
    ),
    "--generate --versus: only transformers samples the same (use transformers)": (
        {"--generate"},
        {"other library"},
    ),
    "--versus runs in one process, without torchrun": ({"--versus"}, {"torchrun"}),
    "--trace needs --simulate or --profile": ({"--trace"}, {"no timeline"}),
    "--system needs --simulate": ({"--system"}, {"no --simulate"}),
    "--profile is for measured steps of training or sampling, not for --simulate, --shrink or task=grpo, "
    "which prints its phases": ({"--profile"}, {"--simulate", "--shrink", "GRPO steps"}),
    "--simulate --sweep says itself which combinations cannot run: leave --dry-run out": (
        {"--sweep", "--simulate"},
        {"--dry-run"},
    ),
    "--dry-run runs nothing: leave --simulate out": ({"--simulate"}, {"--dry-run"}),
    "--trace shows one layout, not those of --sweep": ({"--sweep", "--simulate"}, {"--trace"}),
    "--trace takes one config at a time": ({"--simulate", "--trace"}, {"several configs"}),
}


def parser() -> cli.Parser:
    parser = cli.Parser(OPTIONS, settings=True, prog="bench.py", description=__doc__)
    add = parser.add_argument
    text = "a file, or a row as --list names it; default: quickstart"
    add("--config", nargs="+", action="extend", default=[], type=config_path, help=text)
    add("--proxy", metavar="N[,N]", help="one rank and so many layers in the config's place")
    add("--sweep", nargs="+", default=[], metavar="KEY=V,V", help="all combinations")
    add("--report", nargs="*", metavar="FILE", help="merge these results with those in results/")
    add("overrides", nargs="*", default=[], metavar="key=value")
    return parser


@dataclass
class Case:
    """A config, and runs of it or of its proxies, each with the keys to add to its result."""

    row: str
    config: Config
    runs: list[tuple[Config, dict]]


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.list:
        print(list_rows())
    elif options.report is not None:
        from minitrain.bench.report_html import write_report

        write_report([*sorted(map(str, RESULTS.rglob("*.jsonl"))), *options.report], options.out)
    else:
        bench(options)


def bench(options: Namespace) -> None:
    """Run what the options ask for. Raises InputError, at the end if other files could be run."""
    # both before torch is there
    if options.simulate:
        tracers.start_server()
    if options.generate:
        cli.use_huge_pages()
    # --config swallows the words behind it
    files, overrides = split_words(options.config + options.overrides)
    files = files or [CONFIGS / "quickstart.yaml"]
    if options.sweep and len(files) > 1:
        raise InputError("--sweep takes one config at a time")
    only_rates = options.calibrate and not options.config
    cases = [] if only_rates else make_cases(files, overrides, options)
    check_options(cases, options)
    show_unread(cases, options)
    if not options.dry_run:
        cli.check_writable("json", options.json)
    if options.simulate:
        cli.check_writable("trace", options.trace)
    compared = len(cases) > 1 and not (options.sweep or options.simulate or options.shrink)
    if options.calibrate or (compared and not options.dry_run):
        show_calibration(load_row(files[0], overrides)[1], options.json)
    if options.sweep and options.simulate:
        rank_combinations(files[0], overrides, options)
    elif not only_rates:
        run_all(cases, options)
    tell_next(options)


# --- what is to be run


def make_cases(files: list, overrides: list[str], options: Namespace) -> list[Case]:
    """Return every file's cases, all checked before the first runs; tell whose a mistake is."""
    cases = []
    for file in files:
        try:
            if options.sweep and not options.simulate:
                from minitrain.simulator.sweep import combinations

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


def make_case(row: str, config: Config, options: Namespace) -> Case:
    if options.generate:
        from minitrain.bench.measure_sampling import check_sampling

        check_sampling(config, options.versus)
    elif options.versus:
        from minitrain.bench.versus import check_versus

        check_versus(config, options.versus)
    if config.task == "diffusion" and config.data.kind != "mock" and not options.dry_run:
        raise InputError(
            f"bench.py times mock videos, all of one size: data.kind={config.data.kind} has sizes and prompts of its "
            f"own (use data.kind=mock and data.size)"
        )
    if options.shrink:
        from minitrain.bench.shrink import shrink

        return Case(row, config, [(shrink(config), {})])
    if options.proxy is not None:
        from minitrain.bench.proxy import make_proxy, note, parse_counts

        counts = parse_counts(options.proxy)
        return Case(row, config, [(make_proxy(config, n), note(config, n)) for n in counts])
    return Case(row, config, [(config, {})])


def layouts(file: str, overrides: list[str], options: Namespace) -> list[list[str]]:
    """Return the overrides of the published layout, of ours (`reference.ours`), or of both.

    Both are simulated; one is measured.
    """
    ours = load_row(file, overrides)[1].reference.get("ours")
    if not ours or options.as_published:
        return [overrides]
    fastest = [*ours, "reference.layout=ours", *overrides]
    if options.ours:
        return [fastest]
    return [overrides, fastest] if options.simulate and not options.trace else [overrides]


def check_options(cases: list[Case], options: Namespace) -> None:
    """Raise InputError for options that contradict each other."""
    given = {f"--{name.replace('_', '-')}" for name, value in vars(options).items() if value}
    grpo = any(case.config.task == "grpo" for case in cases)
    circumstances = {
        "torchrun": world_size() > 1,
        "no config": not cases,
        "several configs": sum(len(case.runs) for case in cases) > 1,
        "GRPO steps": grpo and not options.generate,
        "other library": options.versus not in (None, "transformers"),
        "no --simulate": not options.simulate,
        "no timeline": not (options.simulate or options.profile),
    }
    given |= {name for name, holds in circumstances.items() if holds}
    for problem, (together, excluded) in CONTRADICTIONS.items():
        if together <= given and excluded & given:
            raise InputError(problem)
    if options.versus:
        from minitrain.bench.versus import check_installed

        check_installed(options.versus)


def show_unread(cases: list[Case], options: Namespace) -> None:
    """Print a note for each setting that no case reads, once for all cases that give it."""
    from minitrain.run.config.unread import unread

    also_read = ("rollout", "grpo") if options.generate else ()
    notes = [note for case in cases for note in unread(case.config, also_read)]
    if rank() == 0:
        for note in dict.fromkeys(notes):
            print(note, file=sys.stderr, flush=True)


# --- running


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


# --- simulating


def run_simulated(row: str, config: Config, options: Namespace) -> dict:
    from minitrain.simulator.calibrate import chosen_system
    from minitrain.simulator.chrome import write_trace
    from minitrain.simulator.predict import predict

    simulation, outcome = predict(config, row, chosen_system(config, options.system))
    if options.trace:
        write_trace(simulation, options.trace)
    return outcome


def rank_combinations(file: str, overrides: list[str], options: Namespace) -> None:
    from minitrain.simulator.calibrate import chosen_system
    from minitrain.simulator.sweep import rank_layouts

    system = chosen_system(load_row(file, overrides)[1], options.system)
    rank_layouts(file, overrides, options.sweep, system, partial(append, file=options.json))


# --- what is printed and written


def write_result(outcome: dict, file: str | None, wide: bool = False) -> None:
    """Print a result and append it to the file of results, at once: what comes later may fail.

    Either is done though the other cannot be: the reader may have gone, or the disk be full.
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
        if outcome["mfu"] > 1:
            fault = f"{outcome['matmul_tflops']:.4g} TFLOP/s, is at fault, or a rate above it is"
            line = f"MFU of {outcome['mfu']:.1%}: the matmul rate of {outcome['device']}, {fault}"
            print(f"warning: {outcome['row']}: {line}", file=sys.stderr, flush=True)
    finally:
        append(outcome, file)


def append(outcome: dict, file: str | None) -> None:
    """Append a line of JSON to a file, apart from one that a kill has cut short before it."""
    if not file:
        return
    note = {"date": date.today().isoformat(), "command": " ".join(["python", *sys.argv])}
    line = json.dumps(outcome | note) + "\n"
    with as_input_error(f"--json={file} cannot be written"):
        if Path(file).is_file() and Path(file).read_bytes()[-1:] not in (b"", b"\n"):
            line = "\n" + line
        with open(file, "a", encoding="utf-8") as results:
            results.write(line)


def tell(row: str, error: Exception, debug: bool) -> None:
    """Report the error in one line, as the command line reports its own."""
    if debug:
        traceback.print_exception(error)
    if rank() == 0:
        line = cli.in_one_line(error) or f"{error!r:.200}"
        print(f"error: {row}: {line}", file=sys.stderr, flush=True)


def tell_next(options: Namespace) -> None:
    """Say on stderr what was written, and what to do next."""
    file = options.json
    if options.dry_run:
        line = "nothing was run: leave --dry-run out, or predict speed and memory with --simulate"
    elif not file:
        line = "--json FILE keeps results, and --report FILE shows them beside the published ones"
    elif options.calibrate:
        line = f"wrote {file}: simulate this machine with --simulate --system {file}"
    else:
        line = f"wrote {file}: python bench.py --report {file} makes a page of it"
    if rank() == 0:
        if options.trace and not options.dry_run:
            print(f"wrote {options.trace}: see it at https://ui.perfetto.dev", file=sys.stderr)
        print(line, file=sys.stderr)
