"""The accelerator as a replaceable resource."""

import dagster as dg
import pytest

from dagster_datamask.accelerator import AcceleratorUnavailable
from dagster_datamask.resources.accelerator import AcceleratorResource
from dagster_datamask.settings import load_settings
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
