"""Makes the trainer of a node: one process, or one for each of `training.device`. Several share their memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.training.devices.gpus import resolved_devices, threads_each
from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.devices.node_step import DeviceGroups, backend_of
from p2pnode.training.settings import DevicesSettings, TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.supervisor.silence import HANG_S
from p2pnode.training.trainer_link.interface import Trainer
from p2pnode.training.trainer_link.shared_memory import NodeMemory

#: Sockets and output of all trainers but the first, below the state directory.
FURTHER = "devices"
#: A merge is given up after this share of `HANG_S`, before those that wait for a member count as hung too.
PATIENCE = 0.75
#: The beginning of the names of files by which groups of trainers meet, there.
GROUP = "group"


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
    hang_s: float = HANG_S,
    merges_by_gloo: bool = False,
) -> Trainer:
    """The trainer of this node. `command` is the user's own, or None for the task class of the settings.

    Tests give a shorter `HANG_S`, and `merges_by_gloo` shows on processors what NCCL does on GPUs.
    """
    names = resolved_devices(training.device)
    is_alone = len(names) == 1 and devices.coordination == "none"
    leaders = 0 if is_alone or devices.step == "average" else 1 if devices.coordination == "none" else 2
    memory = NodeMemory(len(names), leaders)
    threads = threads_each(training.threads, len(names), os.cpu_count() or 1)
    trainers = [
        ProcessTrainer(
            msgspec.structs.replace(training, device=name, threads=threads),
            command=command,
            node=node._replace(device=index, devices=len(names)),
            state_dir=state_dir / FURTHER / str(index) if index else state_dir,
            log=environment.log,
            clock=environment.clock,
            memory=memory,
            on_state=on_state if is_alone else None,
            on_output=on_output,
            hang_s=hang_s,
        )
        for index, name in enumerate(names)
    ]
    if is_alone:
        return trainers[0]
    groups = _groups(devices, names, state_dir, hang_s, gloo=merges_by_gloo)
    return HostTrainer(names, trainers, lambda: memory.leaders, groups, devices, training, environment, on_state)


def _groups(
    devices: DevicesSettings, names: list[str], state_dir: Path, hang_s: float, *, gloo: bool
) -> DeviceGroups | None:
    backend = backend_of(names, gloo=gloo)
    if backend is None or devices.step == "leader":
        return None
    folder = state_dir / FURTHER
    # Files of groups of an earlier process, whose numbers come again.
    for old in folder.glob(f"{GROUP}.*"):
        old.unlink(missing_ok=True)
    return DeviceGroups(backend, str((folder / GROUP).absolute()), max(1.0, PATIENCE * hang_s))
