"""The GPU resource: which device heavy stages compute on, at which precision and within which memory."""

import dagster as dg

from dagster_datamask.accelerator import Accelerator, resolve
from dagster_datamask.settings import Settings


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
