"""The key-value store in which ranks find each other, with nothing in it of ranks that are dead.

When torchrun restarts the ranks it gives them the store of their predecessors (torch 2.11 to 2.13, whose comments say
otherwise): with the addresses of processes that are gone, to which the new ones then try to connect, forever. So the
ranks agree on a prefix that no earlier attempt has used, by asking rank 0 under names that none has used either.
"""

import os
import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from minitrain.errors import InputError


def join_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """A store for this attempt's ranks alone, this rank and their number. Alone without torchrun, or the like.

    Raises InputError if the environment says only part of what torchrun would say.
    """
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore(), 0, 1
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise InputError(f"WORLD_SIZE is set without {', '.join(missing)} (start with torchrun, or unset WORLD_SIZE)")
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        prefix = answer(store, world, timeout) if rank == 0 else ask(store, rank)
        store = dist.PrefixStore(prefix, store)
    return store, rank, world


def ask(store: dist.Store, rank: int) -> str:
    """This attempt's prefix, from its rank 0."""
    name = secrets.token_hex(8)
    store.set(f"ask/{rank}", name)
    prefix = store.get(f"answer/{name}").decode()  # waits
    store.set(f"taken/{prefix}/{rank}", "")
    return prefix


def answer(store: dist.Store, world: int, timeout: timedelta) -> str:
    """Make a prefix, and give it to whoever asks until all ranks have it: a question may be a dead rank's."""
    prefix = secrets.token_hex(8)
    waiting, deadline = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while waiting:
        for rank in sorted(waiting):
            if store.check([f"ask/{rank}"]):
                store.set(f"answer/{store.get(f'ask/{rank}').decode()}", prefix)
            if store.check([f"taken/{prefix}/{rank}"]):
                waiting.remove(rank)
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(waiting)} have not started within {timeout}")
        time.sleep(0.01)
    return prefix
