"""Makes the trainer of a node: one process, or one for each of `training.devices`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from overlay.environment import Environment
from training.devices.host import HostParts, HostTrainer
from training.devices.names import resolved_devices, threads_each
from training.devices.process import DeviceProcess, HostMemory
from training.settings import DevicesSettings, TrainingSettings
from training.supervisor.node_start import NodeStart
from training.supervisor.process_trainer import ProcessTrainer
from training.trainer_link.interface import Trainer

#: Sockets and output of all trainers but the first, below the state directory.
FURTHER = "devices"
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
    host = HostTrainer(HostParts(names, trainers, memory.leaders), devices, training, environment, on_state)
    for trainer in trainers:
        trainer.watch_state(host.trainer_state_changed)
    return host


def count_gpus() -> int:
    """How many GPUs a trainer would see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    try:
        return sum(1 for _ in NVIDIA_GPUS.iterdir())
    except OSError:
        return 0
