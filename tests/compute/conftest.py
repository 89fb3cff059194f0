"""A Ray cluster of two nodes on this machine, for all tests that need one: a process can be connected to one alone."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ports import free_port

NODE = {"object_store_memory": 80 * 2**20}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes of one core each; `client_address` is for who is on none of them."""
    utils = pytest.importorskip("ray.cluster_utils", reason="the extra ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    port = free_port()
    cluster = utils.Cluster(
        initialize_head=True,
        connect=False,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": port, **NODE},
    )
    cluster.client_address = f"ray://127.0.0.1:{port}"
    cluster.add_node(num_cpus=1, **NODE)
    yield cluster
    cluster.shutdown()
