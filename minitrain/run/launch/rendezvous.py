"""Meet the other ranks in a key-value store that has no keys of dead ranks.

When torchrun restarts ranks, it gives them the store of the previous attempt (torch 2.11 to 2.13, in
contrast to torch's comments). It still holds the addresses of processes that are gone, to which the
new ones would try to connect forever. So the ranks of an attempt agree on a new prefix for all keys.
Each rank asks rank 0 for it under a key that no earlier attempt has used.

Between nodes, gloo listens at the address of the host's name, or on the network interface in
GLOO_SOCKET_IFNAME.
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

# returns the store that all ranks of the process group share; no public name
default_store = _get_default_store


def all_groups() -> list[dist.ProcessGroup]:
    """Return the process groups that this process is in."""
    return list(_world.pg_map)


def join_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return a store for only this attempt's ranks, this rank, and the number of ranks.

    Raises InputError if torchrun's environment variables are incomplete or wrong, or if this rank
    meets no other, for example because another run uses the port.
    """
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise InputError(
            f"WORLD_SIZE is set without {', '.join(missing)} (start with torchrun, or unset WORLD_SIZE)"
        )
    # Kubernetes also sets it, to tcp://ADDRESS:PORT, for a service called master: refuse that
    env_int("MASTER_PORT")
    # rank 0 would not answer such a rank
    if not 0 <= env_int("RANK") < env_int("WORLD_SIZE"):
        raise InputError(
            f"RANK={env_int('RANK')} is not one of WORLD_SIZE={env_int('WORLD_SIZE')}, which count from 0 (start with "
            f"torchrun, or unset WORLD_SIZE)"
        )
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            prefix = answer(store, world, timeout) if rank == 0 else ask(store, rank)
            store = dist.PrefixStore(prefix, store)
    except dist.DistError as error:
        where = f"rank {env_int('RANK')} cannot meet the others at {os.environ['MASTER_ADDR']}:{env_int('MASTER_PORT')}"
        # further lines of the message are a C++ traceback
        raise InputError(f"{where}: {str(error).splitlines()[0]}") from error
    return store, rank, world


def check_device_type(store: dist.Store, rank: int, device_type: str) -> None:
    """Raise InputError if rank 0 has another type of device.

    This happens with device=auto if one node's driver fails. Ranks on gloo and ranks on NCCL would
    wait for each other.
    """
    if rank == 0:
        store.set("minitrain/device", device_type)
    elif (first := store.get("minitrain/device").decode()) != device_type:
        raise InputError(
            f"rank {rank} on {socket.gethostname()} has device={device_type}, and rank 0 device={first} (does torch "
            f"find the GPUs of both?)"
        )


def allow_open_files() -> None:
    """Raise the limit of open files to the system's, because gloo connects every pair of ranks."""
    if sys.platform == "linux":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def ask(store: dist.Store, rank: int) -> str:
    """Return the prefix of this attempt, as rank 0 answers it."""
    name = secrets.token_hex(8)
    store.set(f"ask/{rank}", name)
    # waits until rank 0 has set it
    prefix = store.get(f"answer/{name}").decode()
    store.set(f"taken/{prefix}/{rank}", "")
    return prefix


def answer(store: dist.Store, world: int, timeout: timedelta) -> str:
    """Make a prefix, and answer with it until all ranks have confirmed it; return it.

    A rank's key may hold the question of an earlier attempt, so questions are answered repeatedly.
    Raises TimeoutError.
    """
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
