"""Reads `training.device`, and what this machine says of its NVIDIA devices, without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

#: Each GPU of this machine.
ALL = "all"
#: More trainers than any host has devices are a slip.
MAX_DEVICES = 64

_ENTRY = re.compile(r"(?P<name>[a-z]+(:\d+)?)(\s*\*\s*(?P<count>\d+))?")

#: NVIDIA's driver has a folder for each GPU here.
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
#: Where containers and WSL have no such folder.
NVIDIA_NODES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"))
VISIBLE = "CUDA_VISIBLE_DEVICES"

_CUDA_OF = re.compile(r"^cuda\b.*=\s*(.+)$", re.MULTILINE)

GET_CUDA = "install a build of PyTorch for CUDA (https://pytorch.org), or set training.device = cpu"
SEE_DRIVER = "see nvidia-smi and the kernel's log (dmesg); a lost GPU needs a reset of it or of the machine"


def visible_gpus() -> list[str]:
    """The GPUs that a trainer would see, by the names that `CUDA_VISIBLE_DEVICES` takes."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return [name for part in visible.split(",") if (name := part.strip()) not in ("", "-1")]
    try:
        return [str(number) for number, _ in enumerate(NVIDIA_GPUS.iterdir())]
    except OSError:
        return []


def named_devices(setting: str | Sequence[str]) -> list[str]:
    """The devices in a setting as ["cuda:0", "cuda:1"], "cuda:0,cuda:1" or "cpu*4"; ["all"] for "all". Raises
    `ValueError` with what is wrong."""
    entries = setting.split(",") if isinstance(setting, str) else list(setting)
    found: list[str] = []
    for entry in entries:
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f'"{entry}" names no device')
        found += [match["name"]] * int(match["count"] or 1)
    if not found:
        raise ValueError("the list is empty, and without a device nothing is trained")
    if ALL in found and len(found) > 1:
        raise ValueError('"all" means each GPU of this machine, and stands alone')
    if len(found) > MAX_DEVICES:
        raise ValueError(f"{len(found)} devices; a node has at most {MAX_DEVICES} trainers")
    return found


def resolved_devices(setting: str | Sequence[str]) -> list[str]:
    """The device of each trainer: one, "auto", where "all" finds no GPU. Raises `ValueError`."""
    found = named_devices(setting)
    if found == [ALL]:
        found = [f"cuda:{number}" for number in range(min(len(visible_gpus()), MAX_DEVICES))]
    return found or ["auto"]


def threads_each(threads: int, trainers: int, cores: int) -> int:
    """Threads of each of several trainers that share `threads`, or the cores of the machine where that is 0."""
    if trainers == 1:
        return threads
    return max(1, (threads or cores) // trainers)


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA device that is not hidden from its programs."""
    is_hidden = VISIBLE in os.environ and not visible_gpus()
    return not is_hidden and (NVIDIA_GPUS.is_dir() or any(node.exists() for node in NVIDIA_NODES))


def torch_cuda() -> str | None:
    """The version of CUDA for which this Python's torch is built; empty: for none. None: that is not known."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    try:
        match = _CUDA_OF.search((Path(found.origin).parent / "version.py").read_text())
    except OSError:
        return None
    return None if match is None else match[1].strip("'\" ").replace("None", "")


def unused_gpu(device: str, cuda: str | None, *, is_available: bool) -> tuple[str, str] | None:
    """Why a trainer with this `training.device` does not use the GPU of this machine, and what to do. `cuda` is that of
    its torch, `is_available` what torch says. None where all is as it should be."""
    if device != "auto" or is_available or not has_gpu():
        return None
    if cuda == "":
        return "this machine has an NVIDIA GPU, and PyTorch is built without CUDA: training is on the CPU", GET_CUDA
    return "this machine has an NVIDIA GPU, and its driver does not answer: training is on the CPU", SEE_DRIVER
