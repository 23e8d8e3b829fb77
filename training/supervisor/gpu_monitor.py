"""Reads what NVIDIA's driver says of the GPUs of this node's trainers: memory, load, temperature, and its own errors.

A thread asks, because a driver in trouble may not answer for minutes. Without `nvidia-ml-py`, or without a driver,
there are no readings.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: Between two readings.
PERIOD_S = 2.0

#: What the driver's numbers mean (https://docs.nvidia.com/deploy/xid-errors); others are given as numbers.
XIDS = {
    13: "a kernel raised an exception",
    31: "a kernel used memory that is not its own",
    43: "the GPU has ended a program",
    45: "a program was ended by the driver",
    48: "an uncorrectable error of the GPU's memory",
    63: "a row of the GPU's memory was replaced",
    64: "a row of the GPU's memory could not be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    94: "an uncorrectable error of memory ended a program",
    95: "an uncorrectable error of memory: the GPU must be reset",
    119: "the GPU's own processor does not answer",
}


class GpuReading(NamedTuple):
    """Of one GPU. `utilisation` is the part of the last second in which a kernel ran, `error` the last one that the
    driver reported since this node began; what the driver does not know is None."""

    name: str
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    utilisation: float | None = None
    temperature_celsius: float | None = None
    error: str | None = None


class GpuMonitor:
    """`gpus` has the identity that the driver knows ("GPU-…") by the name of each device. `on_error` is called in the
    thread with a name and what the driver has reported. `library` is `pynvml`; None: the installed one, if there is
    one."""

    def __init__(
        self, gpus: Mapping[str, str], on_error: Callable[[str, str], object] = lambda *_: None, library: Any = None
    ) -> None:
        self._gpus = gpus
        self._on_error = on_error
        self._library = library
        self._handles: dict[str, Any] = {}
        self._events: Any = None
        self._errors: dict[str, str] = {}
        #: The newest of each device that could be read, by name.
        self.readings: dict[str, GpuReading] = {}

    def errors(self) -> list[tuple[str, GpuReading]]:
        """The devices of which the driver has reported an error."""
        return [(name, one) for name, one in self.readings.items() if one.error is not None]

    def start(self) -> None:
        """Read again and again, until this process ends; nothing without a GPU or a driver that answers."""
        if self._gpus:
            threading.Thread(target=self._run, name="p2pnode-gpus", daemon=True).start()

    def _run(self) -> None:
        if not self.open():
            return
        while True:
            self.read()
            self.wait(PERIOD_S)

    def open(self) -> bool:
        """Whether the driver answers, and knows one of the GPUs."""
        try:
            nvml = self._library = self._library or importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # the package, or a driver's library, is missing or broken
            return False
        with contextlib.suppress(nvml.NVMLError):
            self._events = nvml.nvmlEventSetCreate()
        for name, identity in self._gpus.items():
            with contextlib.suppress(nvml.NVMLError):
                handle = self._handles[name] = nvml.nvmlDeviceGetHandleByUUID(identity)
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        return bool(self._handles)

    def read(self) -> None:
        """Take the readings of now."""
        self.readings = {name: self._reading(name, handle) for name, handle in self._handles.items()}

    def wait(self, seconds: float) -> None:
        """Wait for an error that the driver reports, so long."""
        began_s, nvml = time.monotonic(), self._library
        try:
            event = nvml.nvmlEventSetWait_v2(self._events, int(1000 * seconds))
        except nvml.NVMLError:  # none came, or this GPU reports none
            time.sleep(max(0.0, seconds - (time.monotonic() - began_s)))
            return
        with contextlib.suppress(nvml.NVMLError):
            identity = nvml.nvmlDeviceGetUUID(event.device)
            for name, known in self._gpus.items():
                if known == identity:
                    self._errors[name] = text = xid_text(int(event.eventData))
                    self._on_error(name, text)

    def _reading(self, name: str, handle: Any) -> GpuReading:
        nvml = self._library

        def ask(question: Callable[[], Any]) -> Any:
            try:
                return question()
            except nvml.NVMLError:  # not supported, or the GPU is lost
                return None

        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        rates = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        degrees = ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
        return GpuReading(
            name=str(ask(lambda: nvml.nvmlDeviceGetName(handle)) or "unknown"),
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            utilisation=None if rates is None else rates.gpu / 100,
            temperature_celsius=None if degrees is None else float(degrees),
            error=self._errors.get(name),
        )


def xid_text(number: int) -> str:
    """As "Xid 79: the GPU has fallen off the bus"."""
    return f"Xid {number}: {XIDS[number]}" if number in XIDS else f"Xid {number}"
