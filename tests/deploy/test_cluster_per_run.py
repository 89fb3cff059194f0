"""deploy/cluster_per_run.py: a run asks KubeRay for a cluster, works on it, and has it taken down."""

import os
import runpy
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import SNAPSHOTS
from tests.deploy.kubernetes import Cluster, check, with_venv
from tests.ports import free_port
from tests.project import Project
from tests.test_cli import write_config

pytest.importorskip("dagster_ray.kuberay", reason="needs the extra ray")
REPO = Path(__file__).parents[2]
FILE = REPO / "deploy" / "cluster_per_run.py"


def test_kubernetes_knows_its_rights() -> None:
    check(*yaml.safe_load_all(FILE.with_suffix(".yaml").read_text()))


def test_without_ray_in_the_settings_it_says_so(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAMASK_CONFIG", str(write_config(project.settings, tmp_path / "datamask.toml")))
    with pytest.raises(ValueError, match=r"compute\.backend = 'local' .* set them to 'ray' and 'auto'"):
        runpy.run_path(str(FILE))


# a process of its own, as a run is: Ray reads its token's environment when it is loaded
_RUN = """
import runpy, sys
import dagster as dg
from dagster_ray.kuberay import KubeRayCluster

from dagster_datamask.partitions import cc_snapshot

file, port, snapshot = sys.argv[1:]
# in place of the cluster's DNS
KubeRayCluster.resolve_hostname = lambda self, service, namespace: "127.0.0.1"
defs = runpy.run_path(file)["build"](redis_port=int(port), timeout=1800.0)
job = defs.resolve_implicit_global_asset_job_def().get_subset(asset_selection={dg.AssetKey("raw_shards")})
with dg.DagsterInstance.ephemeral() as instance:
    instance.add_dynamic_partitions(cc_snapshot.name, [snapshot])
    print("run", job.execute_in_process(instance=instance, partition_key=snapshot).run_id)
"""


@pytest.mark.slow
def test_a_run_has_a_cluster_of_its_own(project: Project, tmp_path: Path) -> None:
    here = project.stage("raw_shards", SNAPSHOTS[0]).published
    other = project.with_settings(
        **{"compute.backend": "ray", "compute.ray_address": "auto", "storage.root": str(tmp_path / "other")}
    )
    environment = {
        "PATH": with_venv(),
        "RAY_AUTH_MODE": "token",
        # a loaded machine takes longer than Ray waits by itself for a client's own process, and the client for Ray
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "300",
        "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "300",
        "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "300",
        # nothing moves from the only node to another
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "DATAMASK_CONFIG": str(write_config(other.settings, tmp_path / "datamask.toml")),
    }
    cluster = Cluster(tmp_path, environment, runs=True, ray_client=(port := free_port()))
    with cluster.running():
        done = subprocess.run(
            [sys.executable, "-c", _RUN, FILE, str(port), SNAPSHOTS[0]],
            env={**os.environ, **environment, "KUBECONFIG": str(cluster.kubeconfig)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
        assert done.returncode == 0, f"{done.stderr[-5000:]}\n{cluster.logs()}"
        (made,) = cluster.rays
        assert cluster.deleted == [made["metadata"]["name"]]
    assert made["spec"]["authOptions"]["secretName"] == "datamask-ray-token"
    (run_id,) = (line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("run "))
    assert made["metadata"]["labels"]["dagster/run-id"] == run_id
    there = other.store.current("raw_shards", SNAPSHOTS[0])
    assert here is not None and there.fingerprint == here.fingerprint
    assert [there.record(s).sha256 for s in there.shards] == [here.record(s).sha256 for s in here.shards]
