"""The accelerator as a replaceable resource."""

import dagster as dg
import pytest

from dagster_datamask.accelerator import Accelerator, AcceleratorUnavailable
from dagster_datamask.resources.accelerator import AcceleratorResource
from dagster_datamask.settings import load_settings
from dagster_datamask.stages.base import STAGES
from tests.assets.conftest import execute, failure, materialised
from tests.conftest import SNAPSHOTS
from tests.project import Project


def test_a_device_that_is_not_there_is_one_clear_failure(project: Project) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(
            project.settings, instance, "score", SNAPSHOTS[0], accelerator=AcceleratorResource(device="cuda:9")
        )
        assert not result.success
        assert materialised(result) == set()
    message = failure(result, "raw_shards")
    assert "'cuda:9' is not on this machine; there are: cpu" in message
    assert "\n" not in message


def test_the_resource_given_is_the_one_recorded(project: Project) -> None:
    """A memory limit that the settings do not have shows in the metadata of what was computed."""
    with dg.DagsterInstance.ephemeral() as instance:
        result = execute(
            project.settings,
            instance,
            "score",
            SNAPSHOTS[0],
            accelerator=AcceleratorResource(device="cpu", memory_limit_gb=3.5),
        )
    assert result.success
    (edu,) = result.asset_materializations_for_node("edu_scores")
    assert edu.metadata["accelerator"].value == "cpu (CPU), float32, at most 3.5 GB"


def test_settings_become_the_resource() -> None:
    settings = load_settings(
        None, ["compute.device=cpu", "compute.dtype=bfloat16", "compute.memory_limit_gb=2"], env={}
    )
    device = AcceleratorResource.from_settings(settings).accelerator()
    assert device.describe() == {
        "device": "cpu",
        "device_name": "CPU",
        "dtype": "bfloat16",
        "memory_limit_gb": 2.0,
    }


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "cuda", ""])
def test_unknown_devices_are_named(device: str) -> None:
    with pytest.raises(AcceleratorUnavailable, match="there are: cpu"):
        AcceleratorResource(device=device).accelerator()


def test_an_unknown_precision_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'int8' is none of: auto, float32, bfloat16, float16"):
        AcceleratorResource(device="cpu", dtype="int8").accelerator()


def test_workers_of_a_cluster_have_a_device_of_their_own(project: Project) -> None:
    """Which the run's process need not have; stages that compute in that process have its."""
    ray = project.settings.replace(
        {
            "compute.backend": "ray",
            "compute.ray_address": "auto",
            "compute.requests": {"e5_embeddings": {"gpus": 0.5}, "datamask_masks": {"gpus": 1}},
        }
    )
    here = AcceleratorResource.from_settings(project.settings)
    assert here.of(STAGES["e5_embeddings"], ray).describe() == {
        "device": "cuda:0",
        "device_name": "of the cluster",
        "dtype": "bfloat16",
        "memory_limit_gb": None,
    }
    assert here.of(STAGES["edu_scores"], ray) == Accelerator()
    assert here.of(STAGES["datamask_masks"], ray) == here.accelerator()
    # a Ray of this machine has what this machine has
    at_home = project.settings.replace({"compute.backend": "ray"})
    assert here.of(STAGES["e5_embeddings"], at_home).is_cuda == here.accelerator().is_cuda
    # what is asked of a cluster says nothing about processes of this machine
    local = ray.replace({"compute.backend": "local"})
    assert here.of(STAGES["e5_embeddings"], local) == here.accelerator()
