"""What is read of GPUs through NVIDIA's library, and what is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.training.supervisor.gpu_monitor import GpuMonitor, GpuReading, xid_text

HERE = {"cuda:0": "GPU-a", "cuda:1": "GPU-b"}


class NVMLError(Exception):
    pass


class Library:
    """As `pynvml`, over two GPUs: the second one says only its name."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815 - NVIDIA's name

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver
        self.events: list[Any] = []
        self.registered: list[str] = []

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise NVMLError("the library is not found")

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceGetHandleByUUID(self, identity: str) -> str:
        if identity not in HERE.values():
            raise NVMLError("not found")
        return identity

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, _events: str) -> None:
        assert kinds == 8
        if handle == "GPU-b":
            raise NVMLError("not supported")
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        assert (events, milliseconds) == ("set", 10)
        if not self.events:
            raise NVMLError("timeout")
        return self.events.pop()

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"H100 {handle}"

    def _known(self, handle: str, value: Any) -> Any:
        if handle == "GPU-b":
            raise NVMLError("lost")
        return value

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._known(handle, SimpleNamespace(used=3, total=8))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._known(handle, SimpleNamespace(gpu=93, memory=7))

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> Any:
        return self._known(handle, 61 + sensor)


def test_each_gpu_is_read_as_far_as_it_answers() -> None:
    """By the identity that its trainer has told, which no setting of the visible devices changes."""
    library = Library()
    monitor = GpuMonitor({**HERE, "cuda:2": "GPU-of-another-machine"}, library=library)

    assert monitor.open()
    monitor.read()

    assert monitor.readings == {
        "cuda:0": GpuReading("H100 GPU-a", 3, 8, 0.93, 61.0),
        "cuda:1": GpuReading("H100 GPU-b"),
    }
    assert library.registered == ["GPU-a"]


def test_an_error_that_the_driver_reports_is_told_and_kept() -> None:
    """Under the name of the device that it is of; one of a GPU of another program is not ours."""
    library = Library()
    told: list[tuple[str, str]] = []
    monitor = GpuMonitor(HERE, lambda *error: told.append(error), library)
    monitor.open()
    library.events = [
        SimpleNamespace(device="GPU-a", eventData=79),
        SimpleNamespace(device="GPU-of-another", eventData=31),
    ]

    for _ in range(3):
        monitor.wait(0.01)
    monitor.read()

    assert told == [("cuda:0", "Xid 79: the GPU has fallen off the bus")]
    assert [one.error for one in monitor.readings.values()] == [told[0][1], None]
    assert xid_text(999) == "Xid 999"


def test_without_a_driver_or_its_library_there_are_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """And without a GPU nobody asks."""
    assert not GpuMonitor(HERE, library=Library(has_driver=False)).open()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert not GpuMonitor(HERE).open()
    monitor = GpuMonitor({})
    monitor.start()
    assert monitor.readings == {}


@pytest.mark.cuda
def test_a_gpu_of_this_machine_is_read() -> None:
    """By the identity that torch gives it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("pynvml")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monitor = GpuMonitor({"cuda:0": f"GPU-{torch.cuda.get_device_properties(0).uuid}"})

    assert monitor.open()
    monitor.read()

    reading = monitor.readings["cuda:0"]
    assert reading.name == torch.cuda.get_device_name(0)
    assert reading.memory_total_bytes > 1 << 30
    assert 0 < reading.temperature_celsius < 120
