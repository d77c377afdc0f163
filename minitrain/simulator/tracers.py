"""The server of the processes in which the simulator traces ranks, side by side.

They are forked from one that has imported torch. That takes seconds, during which the command line
can do the same, if it starts the server first; so this file imports nothing that does.
"""

import multiprocessing
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")


def start() -> None:
    """Start it, at once. Without it, the first process waits for the imports.

    It imports what torch.compile brings in too, which every process would do for itself.
    """
    CONTEXT.set_forkserver_preload(["minitrain.simulator.fake_world", "torch._inductor.compile_fx"])
    forkserver.ensure_running()
