"""Makes the trainer of a node: one process, or one for each of `training.devices`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.training.devices.groups import DeviceGroups, backend_of
from p2pnode.training.devices.host import HostParts, HostTrainer
from p2pnode.training.devices.names import resolved_devices, threads_each
from p2pnode.training.devices.process import DeviceProcess, HostMemory
from p2pnode.training.settings import DevicesSettings, TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.trainer_link.interface import Trainer

#: Sockets and output of all trainers but the first, below the state directory.
FURTHER = "devices"
#: A merge is given up after this share of `training.hang_s`, before those that wait for a member count as hung too.
PATIENCE = 0.75
#: The beginning of the names of files by which groups of trainers meet, there.
GROUP = "group"
#: NVIDIA's driver has a folder for each GPU here.
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def make_trainer(
    training: TrainingSettings,
    devices: DevicesSettings,
    *,
    command: list[str] | None,
    node: NodeStart,
    state_dir: Path,
    environment: Environment,
    on_state: Callable[[str], None],
    on_output: Callable[[bytes], None] | None,
) -> Trainer:
    """The trainer of this node. `command` is the user's own, or None for the task class of the settings."""
    names = resolved_devices(training.devices, training.device, count_gpus)
    log, clock = environment.log, environment.clock
    is_alone = len(names) == 1 and devices.coordination == "none"
    if is_alone:
        return ProcessTrainer(
            msgspec.structs.replace(training, device=names[0]),
            command=command,
            node=node,
            state_dir=state_dir,
            log=log,
            clock=clock,
            on_state=on_state,
            on_output=on_output,
        )
    leaders = 0 if devices.step == "average" else 1 if devices.coordination == "none" else 2
    memory = HostMemory(len(names), leaders=leaders)
    threads = threads_each(training.threads, len(names), os.cpu_count() or 1)
    trainers = []
    for index, name in enumerate(names):
        trainer = DeviceProcess(
            msgspec.structs.replace(training, device=name, threads=threads),
            command=command,
            node=node._replace(device=index, devices=len(names)),
            state_dir=state_dir / FURTHER / str(index) if index else state_dir,
            log=log,
            clock=clock,
            on_output=on_output,
        )
        trainer.share(memory, index)
        trainers.append(trainer)
    parts = HostParts(names, trainers, memory.leaders, _groups(training, devices, names, state_dir))
    host = HostTrainer(parts, devices, training, environment, on_state)
    for trainer in trainers:
        trainer.watch_state(host.trainer_state_changed)
    return host


def _groups(
    training: TrainingSettings, devices: DevicesSettings, names: list[str], state_dir: Path
) -> DeviceGroups | None:
    backend = backend_of(devices.merge, names)
    if backend is None or devices.step == "leader":
        return None
    folder = state_dir / FURTHER
    # Files of groups of an earlier process, whose numbers come again.
    for old in folder.glob(f"{GROUP}.*"):
        old.unlink(missing_ok=True)
    return DeviceGroups(backend, str((folder / GROUP).absolute()), max(1.0, PATIENCE * training.hang_s))


def count_gpus() -> int:
    """How many GPUs a trainer would see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        return sum(1 for _ in NVIDIA_GPUS.iterdir())
    except OSError:
        return 0
