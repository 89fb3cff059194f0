"""The same definitions, but every run has a Ray cluster of its own, which KubeRay brings up and takes down with it.

In the place of the package's own: `dagsterApiGrpcArgs: ["-f", "/etc/datamask/cluster_per_run.py"]` in values.yaml, this
file and raycluster.yaml beside datamask.toml in the ConfigMap datamask-settings, and cluster_per_run.yaml for the right
to do so. compute.ray_address is "auto" then: the cluster that this process is connected to.
"""

import os
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from dagster_ray.kuberay import KubeRayCluster, cleanup_expired_kuberay_clusters, delete_kuberay_clusters
from dagster_ray.kuberay.configs import RayClusterConfig
from dagster_ray.kuberay.resources import KubeRayClusterClientResource

from dagster_datamask.definitions import build_definitions
from dagster_datamask.resources.ray_of_the_run import RayOfTheRun
from dagster_datamask.settings import load_settings

# where Kubernetes tells a pod its namespace
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# a cluster that a killed run left behind is removed at this age, by the sensor below; no run takes as long
_OLDEST_SECONDS = 14 * 24 * 3600


def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def build(**cluster: Any) -> dg.Definitions:
    """The definitions for the settings in force; `cluster` are further fields of KubeRayCluster.

    Raises SettingsError where the settings do not ask for Ray, or name a cluster that stays.
    """
    settings = load_settings()
    namespace = _NAMESPACE.read_text("utf-8").strip() if _NAMESPACE.exists() else "default"
    os.environ.setdefault("DAGSTER_RAY_NAMESPACES", namespace)
    os.environ.setdefault("DAGSTER_RAY_CLUSTER_EXPIRATION_SECONDS", str(_OLDEST_SECONDS))
    manifest = yaml.safe_load(Path(__file__).with_name("raycluster.yaml").read_text("utf-8"))
    spec = {_snake(key): value for key, value in manifest["spec"].items()}
    spec["auth_options"] = {_snake(key): value for key, value in spec["auth_options"].items()}
    # without a name, so that each run's has one of its own
    ray_cluster = RayClusterConfig(metadata={"namespace": namespace}, spec=spec)
    fields = {"ray_init_options": {"log_to_driver": False}, **cluster}
    compute = RayOfTheRun.of(settings, KubeRayCluster(ray_cluster=ray_cluster, **fields))
    return dg.Definitions.merge(
        build_definitions(settings, compute=compute),
        dg.Definitions(
            jobs=[delete_kuberay_clusters],
            sensors=[cleanup_expired_kuberay_clusters],
            resources={"raycluster_client": KubeRayClusterClientResource()},
        ),
    )


defs = build()
