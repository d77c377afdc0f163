"""Train a model: python -m minitrain.train --help; see commands/train.py."""

from minitrain.commands.train import main
from minitrain.run.launch import cli

if __name__ == "__main__":
    cli.run(main)
