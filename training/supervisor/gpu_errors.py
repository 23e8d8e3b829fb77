"""Says what an error of a GPU means, and what to do about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from p2pnode.training.trainer_link.interface import TrainerFailed

LAUNCH = "the line that the traceback names may be a later one: run it once with CUDA_LAUNCH_BLOCKING=1, or on the CPU"


class _Kind(NamedTuple):
    pattern: re.Pattern[str]
    what: str
    do: str


def _kind(pattern: str, what: str, do: str) -> _Kind:
    return _Kind(re.compile(pattern, re.IGNORECASE), what, do)


#: The first that matches counts.
_KINDS = (
    _kind(
        r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
        "the GPU has too little memory",
        "lower the batch size or the length of the sequences and accumulate gradients; keep activations for fewer "
        "layers (checkpointing); where much is reserved and unused: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    ),
    _kind(
        r"device-side assert",
        "a kernel found an index or a value out of range (device-side assert)",
        f"look for labels or tokens beyond the size of their layer; {LAUNCH}",
    ),
    _kind(
        r"uncorrectable ECC error|\bXid\b.{0,40}: (?:48|63|64|94|95),",
        "the GPU's memory is faulty (ECC)",
        "see nvidia-smi -q -d ECC,PAGE_RETIREMENT; reset the GPU, and have it replaced if it comes again",
    ),
    _kind(
        r"illegal memory access|misaligned address|illegal instruction|unspecified launch failure",
        "a kernel read or wrote memory that is not its own",
        f"look at kernels of your own and of extensions, and at their versions; {LAUNCH}",
    ),
    _kind(
        r"devices? ?(?:\(s\))? (?:is/are|are|is) busy or unavailable",
        "another process holds the GPU for itself",
        "see nvidia-smi for its processes and compute mode; end that process, or name another device",
    ),
    _kind(
        r"no CUDA-capable device|Found no NVIDIA driver|GPU is lost|fallen off the bus|driver shutting down|"
        r"No CUDA GPUs are available|CUDA unknown error|CUDA driver error|driver version is insufficient|"
        r"is on cpu, and the one before was on|\bXid\b",
        "the GPU or its driver is gone",
        "see nvidia-smi and the kernel's log (dmesg | grep -i xid); reset the GPU, or start the machine again",
    ),
)


def explained(failure: TrainerFailed, printed: Sequence[str] = (), own_bytes: int = 0) -> TrainerFailed:
    """The failure with what it means before its reason, and what to do before its hint; as it is where it is none of a
    GPU. `printed`: the last lines of its process. `own_bytes`: what p2pnode itself has of the GPU's memory."""
    text = "\n".join((failure.reason, *printed))
    kind = next((kind for kind in _KINDS if kind.pattern.search(text)), None)
    if kind is None or not failure.cause:
        return failure
    what = kind.what
    if kind is _KINDS[0] and own_bytes:
        what += f", of which p2pnode has {own_bytes / 1e6:,.0f} MB for the base of the model"
    hint = f"{kind.do}; {failure.hint}" if failure.hint else kind.do
    return TrainerFailed(f"{what}: {failure.reason}", hint, fatal=failure.fatal, cause=kind.what)
