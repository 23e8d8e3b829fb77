"""What this machine says of its NVIDIA devices, without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

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


def count_gpus() -> int:
    """How many GPUs a trainer would see."""
    return len(visible_gpus())


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
