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

import sys
from argparse import Namespace

from minitrain.bench.rows import list_rows, load_row
from minitrain.commands.bench_cases import check_options, make_cases, show_unread
from minitrain.commands.bench_runs import rank_combinations, run_all, show_calibration
from minitrain.errors import InputError
from minitrain.run.config.environment import rank
from minitrain.run.config.recipes import CONFIGS, config_path, own_folder, split_words
from minitrain.run.launch import cli
from minitrain.simulator import tracers

# torch, which takes seconds, is imported in functions: --help, --list and typos are answered before

RESULTS = own_folder("results")

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
