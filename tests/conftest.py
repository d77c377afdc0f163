"""Settings and fixtures of all tests."""

import os
from contextlib import suppress

# torch reads it once, when it is imported, here and in the worker processes.
os.environ["OMP_NUM_THREADS"] = "1"
# cuBLAS reads it once, at the first matrix product on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.distributed as dist

from tests.helpers.pool import Pool
from tests.helpers.processes import end_started

torch.set_num_threads(1)
with suppress(ModuleNotFoundError):  # the gpu tests, and most others, do without it
    from hypothesis import HealthCheck, settings

    # the same cases each time, and no limits by the clock: a shared machine may pause anywhere
    settings.register_profile(
        "steady", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("steady")


def pytest_make_parametrize_id(val, argname):
    """Name a bytes parameter by its argument.

    The bytes of an archive hold a time, and all processes of xdist need the same ids.
    """
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def same_draws():
    """Random numbers of a test do not depend on which tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_group():
    """A test of this process leaves no process group to the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def own_processes():
    """A test leaves no process behind, failing or not."""
    yield
    end_started()


@pytest.fixture(scope="session")
def pool():
    """Worker processes that last for the whole session: `pool.run(world_size, function, *args)`."""
    pool = Pool()
    yield pool
    pool.close()
