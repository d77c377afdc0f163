"""Train a model: python -m minitrain.train --help, in Python minitrain.train(FILE, steps=10).

So `minitrain.train` is this module and a function: importing it would hide a function of its name.
See commands/train.py.
"""

import sys
from types import ModuleType

from minitrain.commands.train import main, train
from minitrain.run.launch import cli


class CallableModule(ModuleType):
    """A module that trains when it is called, as well as when it is run."""

    __call__ = staticmethod(train)


# what Python's reference offers for attributes of modules
sys.modules[__name__].__class__ = CallableModule

if __name__ == "__main__":
    cli.run(main)
