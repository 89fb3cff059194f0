"""The GPU resource: which device heavy stages compute on, at which precision and within which memory."""

import dagster as dg

from dagster_datamask.accelerator import Accelerator, of_workers, resolve
from dagster_datamask.settings import Settings
from dagster_datamask.stages.base import Stage


class AcceleratorResource(dg.ConfigurableResource):
    """`device` auto | cpu | cuda:i; `dtype` auto | float32 | bfloat16 | float16; `memory_limit_gb` or null."""

    device: str = "auto"
    dtype: str = "auto"
    memory_limit_gb: float | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> "AcceleratorResource":
        compute = settings.compute
        return cls(device=compute.device, dtype=compute.dtype, memory_limit_gb=compute.memory_limit_gb)

    def accelerator(self) -> Accelerator:
        """The device, looked at now. Raises AcceleratorUnavailable naming the devices there are."""
        return resolve(self.device, self.dtype, self.memory_limit_gb)

    def of(self, stage: Stage, settings: Settings) -> Accelerator:
        """The device that a stage computes on: this process's, or that of its workers, where a cluster has those.

        Raises AcceleratorUnavailable naming the devices there are.
        """
        compute = settings.compute
        asked = compute.requests.get(stage.name)
        gpus = None if asked is None else asked.gpus
        if compute.backend != "ray" or not stage.device_in_workers:
            return self.accelerator()
        if not compute.ray_address and gpus is None and self.device != "cpu":
            # workers of this machine, which has one or not
            gpus = float(self.accelerator().is_cuda)
        return of_workers(gpus, self.device, self.dtype, self.memory_limit_gb)
