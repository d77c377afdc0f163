"""Start the server that forks one process for each rank that the simulator traces.

The server imports torch, which takes seconds, once for all of them. The command line starts the
server before it imports torch itself, so that both imports run at the same time: this file must not
import torch.
"""

import multiprocessing
from multiprocessing import forkserver

CONTEXT = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the server, so that its imports are done when the first process is needed.

    They include the parts of torch.compile, which every process would import by itself otherwise.
    """
    CONTEXT.set_forkserver_preload(
        ["minitrain.simulator.fake_world", "torch._inductor.compile_fx"]
    )
    forkserver.ensure_running()
