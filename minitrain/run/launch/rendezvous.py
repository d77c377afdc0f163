"""Meet in a key-value store that holds nothing of ranks that are dead.

When torchrun restarts the ranks it gives them the store of their predecessors (torch 2.11 to 2.13,
whose comments say otherwise): with the addresses of processes that are gone, to which the new ones
then try to connect, forever. So the ranks agree on a prefix that no earlier attempt has used, by
asking rank 0 under names that none has used either.

Between nodes gloo listens at the address of the host's name, or on the network interface that
GLOO_SOCKET_IFNAME names.
"""

import os
import secrets
import socket
import sys
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from minitrain.errors import InputError
from minitrain.run.config.environment import env_int

# neither has a public name: the store that all ranks of the process group share, and a function
# that returns the groups that this process is in
default_store = _get_default_store


def all_groups() -> list[dist.ProcessGroup]:
    return list(_world.pg_map)


def join_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return a store for this attempt's ranks alone, this rank, and their number.

    Raises InputError if the environment says only part of what torchrun would say, or what cannot
    be; or if this rank meets nobody, as where a port is another run's.
    """
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        said = f"WORLD_SIZE is set without {', '.join(missing)}"
        raise InputError(f"{said} (start with torchrun, or unset WORLD_SIZE)")
    # Kubernetes sets it, too, for a service called master: to tcp://ADDRESS:PORT
    env_int("MASTER_PORT")
    # nobody would answer a rank beyond
    if not 0 <= env_int("RANK") < env_int("WORLD_SIZE"):
        said = f"RANK={env_int('RANK')} is not one of WORLD_SIZE={env_int('WORLD_SIZE')}"
        raise InputError(f"{said}, which count from 0 (start with torchrun, or unset WORLD_SIZE)")
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            prefix = answer(store, world, timeout) if rank == 0 else ask(store, rank)
            store = dist.PrefixStore(prefix, store)
    except dist.DistError as error:
        where = f"rank {env_int('RANK')} cannot meet the others at {os.environ['MASTER_ADDR']}:{env_int('MASTER_PORT')}"
        # its further lines are C++
        raise InputError(f"{where}: {str(error).splitlines()[0]}") from error
    return store, rank, world


def check_device_type(store: dist.Store, rank: int, device_type: str) -> None:
    """Raise InputError if rank 0 has another: with device=auto, as where one node's driver fails.

    It would be a group on gloo that waits for ranks on NCCL, and they for it.
    """
    if rank == 0:
        store.set("minitrain/device", device_type)
    elif (first := store.get("minitrain/device").decode()) != device_type:
        raise InputError(
            f"rank {rank} on {socket.gethostname()} has device={device_type}, and rank 0 device={first} (does torch "
            f"find the GPUs of both?)"
        )


def allow_open_files() -> None:
    """Allow as many open files as the system does: gloo connects each rank to every other."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def ask(store: dist.Store, rank: int) -> str:
    """Return the prefix of this attempt, from its rank 0."""
    name = secrets.token_hex(8)
    store.set(f"ask/{rank}", name)
    # waits
    prefix = store.get(f"answer/{name}").decode()
    store.set(f"taken/{prefix}/{rank}", "")
    return prefix


def answer(store: dist.Store, world: int, timeout: timedelta) -> str:
    """Make a prefix, and give it to those who ask until all ranks have it: some may be dead."""
    prefix = secrets.token_hex(8)
    waiting = set(range(1, world))
    deadline = time.monotonic() + timeout.total_seconds()
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
