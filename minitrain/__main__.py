"""Run a command of the package by one name, as `pip install` puts it beside python:

  minitrain tokenize      turns texts into token files
  minitrain encode-video  turns videos into latents
  minitrain train         as python -m minitrain.train
  minitrain curves        draws the curves of runs into one picture
  minitrain export        writes a checkpoint of a run as a model
  minitrain evaluate      measures a model on held-out texts or chats
  minitrain generate      as python -m minitrain.generate
  minitrain merge         as python -m minitrain.merge
  minitrain bench         as python bench.py in a clone
  minitrain --version     its version, and those of Python, torch and CUDA

Each tells its options with --help. On several GPUs: torchrun --nproc_per_node 8 -m minitrain train
...
"""

import platform
from importlib import import_module

from minitrain import __version__
from minitrain.errors import InputError
from minitrain.run.config.aliases import nearest
from minitrain.run.launch import cli

# each a file of commands/
COMMANDS = (
    "tokenize",
    "encode-video",
    "train",
    "curves",
    "export",
    "evaluate",
    "generate",
    "merge",
    "bench",
)


def main() -> None:
    cli.run(dispatch)


def dispatch(arguments: list[str]) -> None:
    """Run the command that the first word names; its file alone is imported."""
    name = " ".join(arguments[:1])
    if name in ("-h", "--help"):
        return print(__doc__)
    if name == "--version":
        import torch

        cuda = torch.version.cuda or "none: this torch is for the CPU"
        python = platform.python_version()
        line = f"minitrain {__version__}, Python {python}, torch {torch.__version__}, CUDA {cuda}"
        return print(line)
    if name not in COMMANDS:
        command = " ".join(["minitrain", *arguments[:1]])
        message = f"{command}: first comes one of {', '.join(COMMANDS)}"
        raise InputError(f"{message} {nearest(name, COMMANDS) or '(each has --help)'}")
    import_module(f"minitrain.commands.{name.replace('-', '_')}").main(arguments[1:])


if __name__ == "__main__":
    main()
