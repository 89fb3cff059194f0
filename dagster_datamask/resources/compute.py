"""Where shards are worked on: this process, processes of this machine, or a Ray cluster."""

import os
from collections.abc import Callable
from pathlib import Path

import dagster as dg
from pydantic import PrivateAttr

from dagster_datamask.compute.base import INLINE, Compute, use_threads
from dagster_datamask.compute.local import Processes
from dagster_datamask.settings import Settings
from dagster_datamask.stages.base import check_requests


class ComputeResource(dg.ConfigurableResource):
    """`backend` local | ray; `processes` of this machine, 0: one per core; `threads` of PyTorch and BLAS, 0: by cores;
    `ray_address` of a cluster, empty: one on this machine.

    A place is opened by the first stage that asks for it and closed with the run.
    """

    backend: str = "local"
    processes: int = 0
    threads: int = 0
    ray_address: str = ""

    _place: Compute | None = PrivateAttr(default=None)
    # no function as default: pydantic would make a method of it, which hides what is set
    _log: Callable[[str], None] | None = PrivateAttr(default=None)

    @classmethod
    def from_settings(cls, settings: Settings) -> "ComputeResource":
        """Raises SettingsError for a request of an asset that there is not, naming the nearest."""
        check_requests(settings)
        asked = settings.compute
        return cls(
            backend=asked.backend, processes=asked.processes, threads=asked.threads, ray_address=asked.ray_address
        )

    def compute(self, log: Callable[[str], None], root: str) -> Compute:
        """The place, which tells `log` what it loses until it is asked for again.

        root: where results go; if that is a folder, the workers of a cluster have to see it.
        """
        self._log = log
        if self.threads:
            use_threads(self.threads)
        if self._place is None:
            self._place = self._opened(root)
        return self._place

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        self.close()

    def close(self) -> None:
        """End what the place started."""
        place, self._place = self._place, None
        if place is not None:
            place.close()

    def _opened(self, root: str) -> Compute:
        count = self.processes or len(os.sched_getaffinity(0))

        def log(message: str) -> None:
            if self._log is not None:
                self._log(message)

        if self.backend == "ray":
            from dagster_datamask.compute.cluster import RayCluster

            folder = root.removeprefix("file://")
            shared = None if "://" in folder else Path(folder)
            return RayCluster(self.ray_address, self.threads, processes=self.processes, shared=shared, log=log)
        return INLINE if count == 1 else Processes(count, self.threads, log=log)
