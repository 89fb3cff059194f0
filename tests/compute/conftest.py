"""A Ray cluster of two nodes on this machine, for all tests that need one: a process can be connected to one alone."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest

from tests.ports import free_port

NODE = {"object_store_memory": 80 * 2**20}
# what Ray says where a node needs more than 30 s to start, as one of a busy machine may
_GAVE_UP = "timed out during startup"
_TRIES = 6
Made = TypeVar("Made")


def until_ray_starts(run: Callable[[], subprocess.CompletedProcess[str]]) -> subprocess.CompletedProcess[str]:
    """What a program that starts Ray came to, tried again where Ray gave up."""
    for _ in range(_TRIES - 1):
        done = run()
        if _GAVE_UP not in done.stdout + done.stderr:
            return done
    return run()


def _patiently(make: Callable[[], Made]) -> Made:
    """Nodes started in this process: Ray's seconds for their start are twenty times as long."""
    from ray._private import node

    slow = SimpleNamespace(time=time.time, sleep=time.sleep, monotonic=lambda: time.monotonic() / 20)
    with mock.patch.object(node, "time", slow):
        return make()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each; `client_address` is for who is on none of them."""
    utils = pytest.importorskip("ray.cluster_utils", reason="the extra ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    port = free_port()
    head = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port, **NODE}
    cluster = _patiently(lambda: utils.Cluster(initialize_head=True, connect=False, head_node_args=head))
    cluster.client_address = f"ray://127.0.0.1:{port}"
    add = cluster.add_node
    cluster.add_node = lambda **options: _patiently(lambda: add(**options))
    cluster.add_node(num_cpus=1, **NODE)
    yield cluster
    cluster.shutdown()
