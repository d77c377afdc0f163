"""The throughput benchmark: `python bench.py --help`.

Its program is minitrain/commands/bench.py, which installs with the package, as `minitrain bench`.
"""

from minitrain.commands.bench import main, parser
from minitrain.run.launch import cli

__all__ = ["main", "parser"]

if __name__ == "__main__":
    cli.run(main)
