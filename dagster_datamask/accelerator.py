"""The device that heavy stages compute on, as a plain value.

`resources/accelerator.py` builds one from settings and hands it to the assets; scoring and selection take it as an
argument. No Dagster here, and torch is imported only when a device has to be looked at.
"""

from dataclasses import dataclass
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


class AcceleratorUnavailable(RuntimeError):
    """The device that was asked for is not there."""


class MemoryPlanError(ValueError):
    """A stage would need more memory than it may use."""


@dataclass(frozen=True)
class Accelerator:
    """A resolved device: `device` is "cpu" or "cuda:i"; `dtype` is the forward pass's precision;
    `memory_limit_gb` caps what a stage may plan to use (None: what the device has), and what PyTorch takes of a CUDA
    device in the process that resolved it and in each that it is sent to."""

    device: str = "cpu"
    dtype: str = "float32"
    memory_limit_gb: float | None = None
    name: str = "CPU"

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.device, self.dtype, self.memory_limit_gb, self.name)

    def plan(self, what: str, needed_bytes: int, remedy: str) -> None:
        """Raise MemoryPlanError, before any work, where `needed_bytes` exceed the memory limit."""
        if self.memory_limit_gb is not None and needed_bytes > self.memory_limit_gb * 1e9:
            raise MemoryPlanError(
                f"{what} needs about {needed_bytes / 1e9:.2f} GB and compute.memory_limit_gb is "
                f"{self.memory_limit_gb:g}; {remedy}, or raise the limit"
            )

    def describe(self) -> dict[str, str | float | None]:
        """What metadata records of the device."""
        return {
            "device": self.device,
            "device_name": self.name,
            "dtype": self.dtype,
            "memory_limit_gb": self.memory_limit_gb,
        }


def resolve(device: str = "auto", dtype: str = "auto", memory_limit_gb: float | None = None) -> Accelerator:
    """`auto` takes the first CUDA device or else the CPU; dtype `auto` is bfloat16 on CUDA and float32 on the CPU.

    Raises AcceleratorUnavailable naming the devices there are.
    """
    import torch

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        there = ["cpu", *(f"cuda:{i}" for i in range(count))]
        if device not in there:
            raise AcceleratorUnavailable(
                f"accelerator {device!r} is not on this machine; there are: {', '.join(there)}. "
                "Set compute.device to one of them, or to 'auto'."
            )
    dtype = _precision(dtype, device)
    name = "CPU"
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        if memory_limit_gb is not None:
            torch.cuda.set_per_process_memory_fraction(_share(device, memory_limit_gb), device)
    return Accelerator(device, dtype, memory_limit_gb, name)


def _arrived(device: str, dtype: str, memory_limit_gb: float | None, name: str) -> Accelerator:
    """An accelerator in a process that it was sent to, which keeps to its limit, and to a lower one that it has."""
    found = Accelerator(device, dtype, memory_limit_gb, name)
    if found.is_cuda and memory_limit_gb is not None:
        import torch

        # not where it is only on its way, as in a process of a machine without one
        if torch.cuda.is_available():
            share = min(_share(device, memory_limit_gb), torch.cuda.get_per_process_memory_fraction(device))
            torch.cuda.set_per_process_memory_fraction(share, device)
    return found


def _share(device: str, gb: float) -> float:
    import torch

    return min(1.0, gb * 1e9 / torch.cuda.get_device_properties(device).total_memory)


def of_workers(
    gpus: float | None, device: str = "auto", dtype: str = "auto", memory_limit_gb: float | None = None
) -> Accelerator:
    """The device of a cluster's workers, each of which has `gpus` (None: as `device` has it, `auto` being the CPU).

    What is asked for alone decides: this process may have no such device, and a cluster that grows none yet, which must
    not show in a fingerprint. Ray shows a worker what it was given, so that its device is the first.
    """
    if device == "cpu" and gpus:
        raise ValueError(
            f"compute.device is 'cpu', and compute.requests asks for gpus = {gpus:g}; set compute.device = 'auto', or "
            "ask for none"
        )
    on_cuda = device not in ("auto", "cpu") if gpus is None else gpus > 0
    first = "cuda:0" if on_cuda else "cpu"
    return Accelerator(first, _precision(dtype, first), memory_limit_gb, "of the cluster" if on_cuda else "CPU")


def _precision(dtype: str, device: str) -> str:
    if dtype == "auto":
        return "bfloat16" if device != "cpu" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"compute.dtype {dtype!r} is none of: auto, {', '.join(DTYPES)}")
    return dtype
