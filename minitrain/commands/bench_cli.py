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
"""

from pathlib import Path

from minitrain.bench.page import write_report
from minitrain.bench.rows import list_one_gpu, list_rows
from minitrain.run.launch import cli
from minitrain.simulator import tracers

RESULTS = Path(__file__).parents[1] / "results"


def main(arguments: list[str]) -> None:
    options = parser().parse_args(arguments)
    if options.list:
        print(list_rows(), list_one_gpu(), sep="\n\n")
    elif options.report is not None:
        write_report([*sorted(map(str, RESULTS.rglob("*.jsonl"))), *options.report], options.out)
    else:
        if options.simulate:
            tracers.start_server()
        if options.generate:
            cli.use_huge_pages()
        from minitrain.commands.bench import bench  # brings torch, which takes seconds

        words = options.config + options.overrides  # --config swallows the words behind it
        overrides = [word for word in words if "=" in word]
        bench(
            [word for word in words if "=" not in word] or [cli.CONFIGS / "quickstart.yaml"],
            overrides,
            options,
        )


FLAGS = {
    "--profile": "and one step more: its seconds by kind of kernel",
    "--dry-run": "validate and lay out, run nothing",
    "--shrink": "toy width, two ranks per parallel dimension, on CPU",
    "--simulate": "predict by running a rank of it on fake tensors",
    "--calibrate": "measure this machine's rates",
    "--wide": "tables with all columns, not 100 characters wide",
    "--as-published": "rows in their published layout alone",
    "--ours": "rows in our fastest layout alone, where they have one",
    "--list": "print the published rows",
    "--generate": "time the sampler on mock prompts, not training",
}
FILES = {
    "--json": "append each result to it as a JSON line",
    "--system": "simulate on this machine, such as a100, or on a file of --calibrate",
    "--trace": "write Chrome traces: see above",
}


def parser() -> cli.Parser:
    parser = cli.Parser(prog="bench.py", description=__doc__)
    add = parser.add_argument
    text = "a file, or a row as --list names it; default: quickstart"
    add("--config", nargs="+", action="extend", default=[], type=cli.config_path, help=text)
    add("--steps", type=cli.positive(int), default=10, help="timed steps")
    warmup = cli.positive(int, zero=True)
    add("--warmup", type=warmup, default=3, help="untimed steps before them")
    for name, text in FLAGS.items():
        add(name, action="store_true", help=text)
    for name, text in FILES.items():
        add(name, metavar="FILE", type=cli.home_path, help=text)
    add("--proxy", metavar="N[,N]", help="one rank and so many layers in the config's place")
    add("--sweep", nargs="+", default=[], metavar="KEY=V,V", help="all combinations")
    add("--report", nargs="*", metavar="FILE", help="merge these results with those in results/")
    add("--out", type=cli.home_path, default="out/report", help="of the report")
    add(
        "--versus",
        choices=("transformers", "diffusers", "peft", "full"),
        help="also time this one",
    )
    add("overrides", nargs="*", default=[], metavar="key=value")
    return parser
