"""A step as a pod of Kubernetes: its executor, and what the pod of a stage asks the cluster for.

Only with compute.executor = "k8s_job". Otherwise a run is one process, in whose pod the run launcher decides, and no
asset carries a tag of Kubernetes. What a stage takes stands in compute.requests alone, for Ray's workers as for pods.
"""

import math
from typing import Any

import dagster as dg

from dagster_datamask.settings import Settings, SettingsError
from dagster_datamask.stages.base import Stage

# as dagster-k8s and NVIDIA's device plugin name them
CONFIG, GPU = "dagster-k8s/config", "nvidia.com/gpu"


def executor(settings: Settings) -> dg.ExecutorDefinition:
    """What carries out a run's steps. Raises SettingsError naming the extra where dagster-k8s is missing."""
    if settings.compute.executor == "in_process":
        # models and libraries load once, and a step costs no process start
        return dg.in_process_executor
    try:
        from dagster_k8s import k8s_job_executor
    except ImportError:
        raise SettingsError(
            "compute.executor = 'k8s_job' needs dagster-k8s: pip install 'dagster-datamask[k8s]'"
        ) from None
    return k8s_job_executor


def op_tags(stage: Stage, settings: Settings) -> dict[str, Any] | None:
    """What the pod of this stage's step asks for; None where steps are no pods, or nothing is asked for it.

    A share of a GPU is a whole one: pods cannot share. With compute.backend = "ray" the pod only drives, and what is
    asked for is what Ray's workers take.
    """
    compute = settings.compute
    asked = compute.requests.get(stage.name)
    if compute.executor != "k8s_job" or compute.backend == "ray" or asked is None:
        return None
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if asked.cpus is not None:
        requests["cpu"] = f"{asked.cpus:g}"
    if asked.memory_gb is not None:
        # the limit as well: what takes more than its share is killed, and not its neighbours
        requests["memory"] = limits["memory"] = f"{math.ceil(1000 * asked.memory_gb)}M"
    gpus = math.ceil(asked.gpus if asked.gpus is not None else stage.on_accelerator)
    config: dict[str, Any] = {"container_config": {"resources": {"requests": requests, "limits": limits}}}
    if gpus:
        limits[GPU] = str(gpus)
        # nodes with GPUs are kept free of all else by this taint where they are kept free at all
        config["pod_spec_config"] = {
            "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}],
            "node_selector": dict(compute.gpu_nodes),
        }
    return {CONFIG: config}
