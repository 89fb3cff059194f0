"""Devices as plain values, resolved on this machine as it is."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from dagster_datamask.accelerator import Accelerator, AcceleratorUnavailable, MemoryPlanError, of_workers, resolve

CUDA = torch.cuda.is_available()


def test_the_cpu_is_always_there() -> None:
    assert resolve("cpu") == Accelerator("cpu", "float32", None, "CPU") == Accelerator()
    assert resolve("cpu", "bfloat16", 4.0).describe() == {
        "device": "cpu",
        "device_name": "CPU",
        "dtype": "bfloat16",
        "memory_limit_gb": 4.0,
    }
    assert not resolve("cpu").is_cuda


def test_auto_takes_what_there_is() -> None:
    found = resolve()
    assert (found.device, found.dtype) == (("cuda:0", "bfloat16") if CUDA else ("cpu", "float32"))
    assert found.is_cuda == CUDA


@pytest.mark.parametrize("device", ["cuda:99", "cuda", "gpu", "tpu"])
def test_what_is_not_there_names_what_is(device: str) -> None:
    with pytest.raises(AcceleratorUnavailable, match=rf"accelerator '{device}' is not on this machine; there are: cpu"):
        resolve(device)


def test_an_unknown_dtype_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"compute\.dtype 'int8' is none of: auto, float32, bfloat16, float16"):
        resolve("cpu", "int8")


def test_the_value_alone_needs_no_torch() -> None:
    code = "import sys; from dagster_datamask.accelerator import Accelerator; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_plan_above_the_limit_is_refused_before_any_work() -> None:
    limited = Accelerator(memory_limit_gb=1.5)
    limited.plan("a split of 10 documents", 1_500_000_000, "lower select.split")
    with pytest.raises(MemoryPlanError, match=r"a split of 10 documents needs about 1\.60 GB .* lower select\.split"):
        limited.plan("a split of 10 documents", 1_600_000_000, "lower select.split")
    Accelerator().plan("anything", 10**18, "no limit is set")


@pytest.mark.parametrize(("before", "limit", "share"), [(1.0, 20.0, 0.25), (0.2, 20.0, 0.2), (0.5, 200.0, 0.5)])
def test_a_process_that_an_accelerator_is_sent_to_keeps_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, before: float, limit: float, share: float
) -> None:
    """Of 80 GB, and of the share that a cluster gave it, the lower."""
    kept = {"cuda:0": before}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: kept[device])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: kept.update({device: part}))
    sent = of_workers(1.0, "auto", "auto", limit)
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert kept == {"cuda:0": share}
    for other in (Accelerator(), of_workers(1.0), of_workers(0.0, memory_limit_gb=1.0)):
        assert pickle.loads(pickle.dumps(other)) == other
    assert kept == {"cuda:0": share}


def test_an_accelerator_of_a_cluster_passes_through_where_there_is_none() -> None:
    if CUDA:
        pytest.skip("this machine has one")
    sent = of_workers(1.0, "auto", "auto", 20.0)
    assert pickle.loads(pickle.dumps(sent)) == sent


@pytest.mark.parametrize(
    ("gpus", "device", "found"),
    [
        (None, "auto", ("cpu", "float32")),
        (0.0, "auto", ("cpu", "float32")),
        (0.0, "cuda:3", ("cpu", "float32")),
        (None, "cpu", ("cpu", "float32")),
        (None, "cuda:3", ("cuda:0", "bfloat16")),
        (0.5, "auto", ("cuda:0", "bfloat16")),
        (2.0, "cuda:3", ("cuda:0", "bfloat16")),
    ],
)
def test_the_device_of_workers_is_what_they_are_asked_to_have(
    gpus: float | None, device: str, found: tuple[str, str]
) -> None:
    """Whatever this machine has: a worker's device is the first of those that it was given."""
    of = of_workers(gpus, device)
    assert (of.device, of.dtype) == found
    assert of_workers(gpus, device, "float16", 4.0).describe() | {"device_name": ""} == {
        "device": found[0],
        "device_name": "",
        "dtype": "float16",
        "memory_limit_gb": 4.0,
    }


def test_workers_on_the_cpu_have_no_use_for_accelerators() -> None:
    with pytest.raises(ValueError, match=r"^compute\.device is 'cpu', and compute\.requests asks for gpus = 0\.5; set"):
        of_workers(0.5, "cpu")
    with pytest.raises(ValueError, match=r"compute\.dtype 'int8' is none of"):
        of_workers(None, "auto", "int8")
