"""A Ray cluster for each run, as a resource of dagster-ray brings it up and deletes it again; of the extra ray.

Nothing else of the package imports this. Clusters that stay need no resource but an address (`compute`).
"""

from typing import Self

import dagster as dg
from dagster_ray import RayResource

from dagster_datamask.resources.compute import ComputeResource
from dagster_datamask.settings import Settings, SettingsError


class RayOfTheRun(ComputeResource):
    """Ray where `cluster` has it: KubeRayInteractiveJob, KubeRayCluster or LocalRay of dagster-ray, which is up, and
    this process connected to it, before the first stage, and gone after the last."""

    cluster: dg.ResourceDependency[RayResource]

    @classmethod
    def of(cls, settings: Settings, cluster: RayResource) -> Self:
        """Raises SettingsError where the settings compute on this machine, or name a cluster that stays."""
        asked = settings.compute
        if asked.backend != "ray" or asked.ray_address not in ("", "auto"):
            raise SettingsError(
                f"compute.backend = {asked.backend!r} and compute.ray_address = {asked.ray_address!r}, but a cluster "
                "is brought up for each run; set them to 'ray' and 'auto'"
            )
        return cls(**ComputeResource.from_settings(settings).model_dump(), cluster=cluster)
