"""Continue prompts: python -m minitrain.generate --help; see commands/generate.py."""

from minitrain.commands.generate import main
from minitrain.run.launch import cli

if __name__ == "__main__":
    cli.run(main)
