"""Draw training curves: python results/pictures/curves.py RUN... [--out FILE.svg].

Reads metrics.jsonl in each run's out_dir. Without --out, curves.svg goes into the first run's folder.
"""

from pathlib import Path

import svg

from minitrain.errors import InputError, refused
from minitrain.run import cli
from minitrain.run.metrics_file import read_lines


def main(arguments: list[str]) -> None:
    parser = cli.Parser(prog="python results/pictures/curves.py", description=__doc__)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=cli.home_path, help="a run's out_dir"
    )
    parser.add_argument("--out", metavar="FILE", type=cli.home_path)
    options = parser.parse_args(arguments)
    runs = {run: read_lines(Path(run, "metrics.jsonl"))[0] for run in options.runs}
    for run, lines in runs.items():
        if not lines:
            raise InputError(f"{run} has no metrics.jsonl with steps (give a run's out_dir)")
    file = Path(options.out or Path(options.runs[0], "curves.svg"))
    with refused(f"{file} cannot be written"):
        file.write_text(svg.curves(runs), encoding="utf-8")
    print(f"{file}: open it in a browser")


if __name__ == "__main__":
    cli.run(main)
