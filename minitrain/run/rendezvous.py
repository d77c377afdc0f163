"""The key-value store in which ranks find each other, with nothing in it of ranks that are dead.

When torchrun restarts the ranks it gives them the store of their predecessors (torch 2.11 to 2.13,
whose comments say otherwise): with the addresses of processes that are gone, to which the new ones
then try to connect, forever. So the ranks agree on a prefix that no earlier attempt has used, by
asking rank 0 under names that none has used either.

And what connections between nodes need: enough open files, and for gloo the network interface that
leads to the others.
"""

import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from minitrain.errors import InputError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def join_store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """A store for this attempt's ranks alone, this rank and their number. Alone without torchrun,
    or the like.

    Raises InputError if the environment says only part of what torchrun would say, or what cannot
    be; or if this rank meets nobody, as where a port is another run's.
    """
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore(), 0, 1
    if missing := [
        name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]:
        raise InputError(
            f"WORLD_SIZE is set without {', '.join(missing)} (start with torchrun, or unset WORLD_SIZE)"
        )
    number(
        "MASTER_PORT"
    )  # which Kubernetes also makes of a service called master, as tcp://ADDRESS:PORT
    if not 0 <= number("RANK") < number("WORLD_SIZE"):  # nobody would answer it
        said = f"RANK={number('RANK')} is not one of WORLD_SIZE={number('WORLD_SIZE')}"
        raise InputError(f"{said}, which count from 0 (start with torchrun, or unset WORLD_SIZE)")
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        if "TORCHELASTIC_RUN_ID" in os.environ:
            prefix = answer(store, world, timeout) if rank == 0 else ask(store, rank)
            store = dist.PrefixStore(prefix, store)
    except dist.DistError as error:  # whose further lines are C++
        where = f"rank {number('RANK')} cannot meet the others at {os.environ['MASTER_ADDR']}:{number('MASTER_PORT')}"
        raise InputError(f"{where}: {str(error).splitlines()[0]}") from error
    return store, rank, world


def number(name: str, otherwise: int = 0) -> int:
    """What the environment says of this process; InputError if it is no whole number."""
    try:
        return int(os.environ.get(name, otherwise))
    except ValueError:
        said = f"{name}={os.environ[name]!r} is not a number"
        raise InputError(f"{said} (start with torchrun, or unset WORLD_SIZE)") from None


def check_device_type(store: dist.Store, rank: int, device_type: str) -> None:
    """Raises InputError if rank 0 has another: with device=auto, as where one node's driver fails.

    It would be a group on gloo that waits for ranks on NCCL, and they for it.
    """
    if rank == 0:
        store.set("minitrain/device", device_type)
    elif (first := store.get("minitrain/device").decode()) != device_type:
        raise InputError(
            f"rank {rank} on {socket.gethostname()} has device={device_type}, and rank 0 device={first} (does torch "
            f"find the GPUs of both?)"
        )


def prepare_connections() -> None:
    """To call before a process group starts. gloo connects every rank to every other, with a file
    for each.

    It listens where this host's name leads, which on many is 127.0.1.1, and then no other node gets
    through. Raises InputError if GLOO_SOCKET_IFNAME names an interface that is not there, as by
    NCCL's ^.
    """
    if sys.platform != "linux":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name.partition(":")[0] not in interfaces:  # what follows is a name of an address
            here = f"{socket.gethostname()} has {', '.join(interfaces)}"
            raise InputError(
                f"GLOO_SOCKET_IFNAME names the network interface {name!r}, which is not there ({here})"
            )
    master = os.environ.get("MASTER_ADDR", "localhost")
    elsewhere = number("LOCAL_WORLD_SIZE", 1) < number("WORLD_SIZE", 1) and master != "localhost"
    if (
        elsewhere and "GLOO_SOCKET_IFNAME" not in os.environ
    ):  # as it seems without torchrun, which tells both numbers
        # rank 0's node may know itself by 127.0.1.1, too: then the interface by which packets leave
        # for anywhere
        hosts = (master, "192.0.2.1", "2001:db8::1")
        found = (interface_towards(host) for host in hosts)
        name = next((name for name in found if name not in (None, "lo")), None)
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def interface_towards(host: str) -> str | None:
    """The network interface that packets to `host` leave by, such as eth0; None if there is no way
    there.
    """
    try:
        targets = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    targets.sort(
        key=lambda target: target[0]
    )  # IPv4 first, which is also what gloo takes of an interface with both
    for family, *_, target in targets:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            own = socket.inet_pton(family, probe.getsockname()[0].partition("%")[0])
            if name := next((name for name, address in addresses(family) if address == own), None):
                return name
    return None


def addresses(family: int) -> Iterator[tuple[str, bytes]]:
    """The names of this host's network interfaces, with the address or addresses of each."""
    import fcntl

    if family == socket.AF_INET6:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            yield name, bytes.fromhex(address)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # has no address
                yield (
                    name,
                    fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24],
                )


def ask(store: dist.Store, rank: int) -> str:
    """This attempt's prefix, from its rank 0."""
    name = secrets.token_hex(8)
    store.set(f"ask/{rank}", name)
    prefix = store.get(f"answer/{name}").decode()  # waits
    store.set(f"taken/{prefix}/{rank}", "")
    return prefix


def answer(store: dist.Store, world: int, timeout: timedelta) -> str:
    """Make a prefix, and give it to whoever asks until all ranks have it: a question may be a dead
    rank's.
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


def world_size() -> int:
    """The number of processes that torchrun started; 1 without torchrun. Known before any group
    starts.
    """
    return number("WORLD_SIZE", 1)
