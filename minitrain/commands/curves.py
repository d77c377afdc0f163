"""Draw training curves, of one run or several in one picture: minitrain curves RUN... [--out FILE].

Reads metrics.jsonl in each run's out_dir, also while it is being written. Without --out, curves.svg
goes into the first run's folder.
"""

import sys
from pathlib import Path

from minitrain.errors import InputError, as_input_error
from minitrain.run.launch import cli
from minitrain.run.monitor.draw_curves import curves
from minitrain.run.monitor.metrics_file import no_steps, read_lines

OPTIONS = {"--out": (cli.file_path, None, "an .svg file; default: see above")}


def main(arguments: list[str]) -> None:
    parser = cli.Parser(OPTIONS, prog="minitrain curves", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=cli.home_path, help="an out_dir")
    options = parser.parse_args(arguments)
    runs = {}
    # the file in a run's folder stands for it
    names = [str(Path(run).parent) if run.endswith(".jsonl") else run for run in options.runs]
    for run in names:
        runs[run], strange = read_lines(Path(run, "metrics.jsonl"))
        if strange:
            print(f"note: {run}/metrics.jsonl: {no_steps(strange)}", file=sys.stderr)
        if not runs[run]:
            raise InputError(f"{run} has no metrics.jsonl with steps (give a run's out_dir)")
    file = Path(options.out or Path(names[0], "curves.svg"))
    with as_input_error(f"{file} cannot be written"):
        file.write_text(curves(runs), encoding="utf-8")
    print(f"{file}: open it in a browser")
