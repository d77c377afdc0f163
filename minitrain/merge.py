"""Add adapters to the weights that they belong to: python -m minitrain.merge --help; see commands/merge.py."""

from minitrain.commands.merge import main
from minitrain.run.launch import cli

if __name__ == "__main__":
    cli.run(main)
