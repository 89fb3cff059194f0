"""Projects whose shards are worked on elsewhere, as on a cluster, by processes of this machine."""

from dataclasses import replace

from dagster_datamask.compute.base import Compute
from dagster_datamask.compute.local import Processes
from dagster_datamask.settings import Settings
from dagster_datamask.stages.base import Run
from tests.project import Project


class Elsewhere:
    """Processes that a stage cannot tell to be of this machine, so that every stage hands all its shards to them."""

    def __init__(self, processes: Processes) -> None:
        self.each, self.session, self.close = processes.each, processes.session, processes.close
        self.workers = processes.workers


class Placed(Project):
    """A project that computes at a place."""

    def __init__(self, settings: Settings, place: Compute) -> None:
        super().__init__(settings)
        self.place = place

    def run(self) -> Run:
        return replace(super().run(), compute=self.place)

    def with_settings(self, **values: object) -> "Placed":
        return Placed(self.settings.replace(values), self.place)
