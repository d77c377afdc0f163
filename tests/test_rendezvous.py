"""What connections between nodes need: open files, and the interface that leads to the others."""

import os
import re
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from minitrain.errors import InputError
from minitrain.run import rendezvous

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads interfaces as Linux has them")


def test_a_node_whose_gpus_are_not_found():
    store = dist.HashStore()
    for rank in range(2):
        rendezvous.check_device_type(store, rank, "cuda")
    with pytest.raises(InputError, match="rank 2 on .* has device=cpu, and rank 0 device=cuda "):
        rendezvous.check_device_type(store, 2, "cpu")


def test_ranks_agree_on_a_prefix_whatever_dead_ones_have_asked():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))
    store.set("ask/1", "dead")
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(rendezvous.ask, store, rank) for rank in (1, 2)]
        prefix = rendezvous.answer(store, 3, timedelta(seconds=30))
        assert [each.result() for each in asked] == [prefix] * 2


def test_ranks_that_do_not_start_are_named():
    store = Mock(check=Mock(side_effect=[False] * 8))
    with pytest.raises(TimeoutError, match=r"^ranks \[1, 2\] have not started within 0:00:00$"):
        rendezvous.answer(store, 3, timedelta(0))


def test_the_interface_that_leads_to_a_host():
    assert rendezvous.interface_towards("127.0.0.1") == "lo"
    file = Path("/proc/net/if_inet6")
    has_ipv6 = file.exists() and " lo\n" in file.read_text()
    assert rendezvous.interface_towards("::1") == ("lo" if has_ipv6 else None)
    assert rendezvous.interface_towards("no-such-host.invalid") is None


def test_of_a_host_with_both_kinds_of_addresses_ipv4_counts(monkeypatch):
    """For it is what gloo takes of an interface that has both, and need not lead to the host where IPv6 does."""
    found = [socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0] for host in ("::1", "127.0.0.1")]
    loopback = {socket.AF_INET6: ("eth6", b"\0" * 15 + b"\1"), socket.AF_INET: ("eth4", b"\x7f\0\0\1")}
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(rendezvous, "addresses", lambda family: [loopback[family]])
    assert rendezvous.interface_towards("node0") == "eth4"


@pytest.mark.parametrize(("environment", "ways", "chosen"), [
    ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"node0": "ib0", "192.0.2.1": "eth0"}, "ib0"),
    ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"node0": "lo", "192.0.2.1": "eth0"}, "eth0"),
    ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"node0": "lo", "2001:db8::1": "eth1"}, "eth1"),
    ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"node0": "lo", "192.0.2.1": None}, None),
    ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GLOO_SOCKET_IFNAME": "bond0"}, {"node0": "ib0"}, "bond0"),
    ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, {"node0": "ib0"}, None),  # all on one node
    ({"WORLD_SIZE": "2"}, {"node0": "ib0"}, "ib0"),  # without torchrun nobody says how many are here
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, {"localhost": "lo", "192.0.2.1": "eth0"}, None),
    ({"WORLD_SIZE": "1"}, {"node0": "ib0"}, None),
    ({}, {"node0": "ib0"}, None),
])  # fmt: skip
def test_gloo_listens_where_other_nodes_are(monkeypatch, environment, ways, chosen):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "to be put back")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, value in ({"MASTER_ADDR": "node0"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "interface_towards", ways.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "bond0")])
    rendezvous.prepare_connections()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == chosen


@pytest.mark.parametrize(("names", "wrong"), [("^lo,docker", "^lo"), ("lo,none", "none")])
def test_interfaces_that_are_not_there(monkeypatch, names, wrong):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    problem = re.escape(f"GLOO_SOCKET_IFNAME names the network interface {wrong!r}, which is not there")
    with pytest.raises(InputError, match=rf"^{problem} \(.* has .*lo"):
        rendezvous.prepare_connections()


def test_a_rank_that_meets_nobody_is_told_where(monkeypatch):
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        met = f"cannot meet the others at localhost:{port}: The"
        with pytest.raises(InputError, match=f"^rank 0 {met} server .*address already in use"):
            rendezvous.join_store(timedelta(seconds=5))
    monkeypatch.setenv("RANK", "1")  # and rank 0 is not there
    with pytest.raises(InputError, match=f"^rank 1 {met} client .*timed out"):
        rendezvous.join_store(timedelta(seconds=2))


def test_as_many_open_files_as_the_system_allows():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, limits[1]), limits[1]))
        rendezvous.prepare_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
