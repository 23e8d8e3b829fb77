"""How a trainer process is started: its command and environment variables, and what it is told first: the settings, its
seeds, and where its records come from.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import p2pnode
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.record_messages import RecordSource

#: Settings for glibc's malloc. By default it returns the gradients' pages to the kernel at each optimiser step and
#: requests them again at the next, which halved the speed of small models on the CPU.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 1024 * 1024), "MALLOC_TRIM_THRESHOLD_": str(4 * 1024**3)}


@dataclass(frozen=True, slots=True)
class Launch:
    """One start. `is_script`: it is the user's own, which may end when it likes. `is_proven`: an earlier process of
    this node has completed a turn, so that a failure of this one may pass."""

    command: list[str]
    environment: dict[str, str]
    state_dir: Path
    is_script: bool
    is_proven: bool
    #: Niceness above that of the daemon.
    nice: int = 0

    @classmethod
    def of(cls, settings: TrainingSettings, script: list[str] | None, state_dir: Path, *, is_proven: bool) -> Launch:
        """`script` is the user's own command, or None for the task class of the settings."""
        # -P keeps the working directory off the start of sys.path, where a folder could hide our own packages.
        command = script or [sys.executable, "-P", "-m", "p2pnode.training.trainer"]
        return cls(
            command, _environment(settings, script), state_dir, script is not None, is_proven, nice=settings.nice
        )


def add_checkout(environment: dict[str, str]) -> None:
    """Let another Python find a checkout that is not installed, whatever its working directory."""
    root = Path(p2pnode.__file__).resolve().parent.parent
    # These must not come before the standard library.
    if root.name not in ("site-packages", "dist-packages"):
        paths = (str(root), environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def _environment(settings: TrainingSettings, script: list[str] | None) -> dict[str, str]:
    environment = dict(os.environ)
    environment[messages.DAEMON_VARIABLE] = str(os.getpid())
    if settings.threads:
        environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(settings.threads)
    if script is None:
        add_checkout(environment)
    environment["PYTHONUNBUFFERED"] = "1"
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
        environment |= KEEP_MEMORY
    return environment


class NodeStart(NamedTuple):
    """One start of a node; `incarnation` counts them. `records`: where its trainer gets records from. The trainer is
    number `device` of the `devices` of the node."""

    node_id: bytes
    incarnation: int
    records: RecordSource | None = None
    device: int = 0
    devices: int = 1


def start_message(settings: TrainingSettings, node: NodeStart, starts: int) -> messages.Start:
    """The daemon's first message at the start number `starts` of this node's trainer."""
    assert isinstance(settings.device, str), "training.devices.start names one"
    source = messages.trainer_id(node.node_id, node.device)
    return messages.Start(
        task=settings.task,
        data_dir=str(Path(settings.data_dir).expanduser().absolute()) if settings.data_dir else "",
        options=settings.options,
        device=settings.device,
        threads=settings.threads,
        seed=settings.seed,
        node_seed=messages.derive_node_seed(settings.seed, source),
        local_steps=settings.local_steps,
        start_seed=messages.derive_start_seed(settings.seed, source, node.incarnation, starts),
        records=node.records,
        device_index=node.device,
        device_count=node.devices,
    )
