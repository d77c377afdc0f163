"""The throughput benchmark: `python bench.py --help`. Its program is minitrain/benchmark_cli.py, which installs with
the package, as `minitrain bench`."""

from minitrain.benchmark_cli import main, parser
from minitrain.run import cli

__all__ = ["main", "parser"]

if __name__ == "__main__":
    cli.run(main)
