"""Choose what bench.py runs: each config in the layouts, proxies or combinations that are asked for.

All are checked before the first runs, and options that contradict each other are refused.
"""

import sys
from argparse import Namespace
from dataclasses import dataclass

from minitrain.bench.rows import load_row
from minitrain.errors import InputError
from minitrain.run.config.environment import rank, world_size
from minitrain.settings import Config

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


@dataclass
class Case:
    """A config, and runs of it or of its proxies, each with the keys to add to its result."""

    row: str
    config: Config
    runs: list[tuple[Config, dict]]


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
