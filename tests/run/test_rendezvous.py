"""How ranks find each other, and the open files that this needs."""

import os
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from minitrain.errors import InputError
from minitrain.run.config.load import from_dict
from minitrain.run.launch import rendezvous
from minitrain.run.launch import start as starting
from minitrain.run.launch.start import let_segments_grow

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="limits are raised on Linux alone"
)


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


def test_a_rank_that_meets_nobody_is_told_where(monkeypatch):
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        for name, value in {
            "WORLD_SIZE": 2,
            "RANK": 0,
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": port,
        }.items():
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
        rendezvous.allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_grow_unless_the_user_has_said_how(monkeypatch, name):
    for known in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(known, raising=False)
    if name:
        monkeypatch.setenv(name, "max_split_size_mb:512")
    let_segments_grow()
    found = {key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")}
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    expected = (
        {name: "max_split_size_mb:512"}
        if name
        else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    )
    assert found == expected


@pytest.mark.parametrize("wanted", [False, True])
def test_cudnn_attention_is_used_if_the_config_says_so(monkeypatch, wanted):
    """On a machine without a GPU, and without starting a process group."""
    monkeypatch.setattr(starting, "pick_device", lambda setting: torch.device("cuda"))
    for name in ("check_device", "let_segments_grow", "meshes_of"):
        monkeypatch.setattr(starting, name, Mock())
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    allowed = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(not wanted)
        starting.start(from_dict({"model": "llama3-8b-tiny", "cudnn_attention": wanted}))
        assert torch.backends.cuda.cudnn_sdp_enabled() == wanted
    finally:
        torch.backends.cuda.enable_cudnn_sdp(allowed)
