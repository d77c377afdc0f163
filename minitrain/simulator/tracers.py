"""Start the server that forks the processes in which the simulator traces ranks, side by side.

The server imports torch once, which takes seconds. The command line imports it meanwhile, if it
starts the server first: so this file imports nothing that imports torch.
"""

import multiprocessing
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the server now; otherwise the first process would wait for its imports.

    It also imports what torch.compile needs, which every process would else import for itself.
    """
    CONTEXT.set_forkserver_preload(
        ["minitrain.simulator.fake_world", "torch._inductor.compile_fx"]
    )
    forkserver.ensure_running()
