"""The first start of all trainers of a node: at once, with one vector, and of one model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2pnode.training.devices.device import Device
from p2pnode.training.trainer_link.interface import (
    SAME_VALUES,
    Restored,
    Resume,
    TrainerFailed,
    TrainerHello,
    TrainerLeft,
    Vector,
)

_FLOAT32_BYTES = 4
#: `float32[total]` that a node of several trainers has beside what they share: its delta, four of `NodeBase` and three
#: of its positions (`training.devices.positions`).
OWN_VECTORS = 8


def device_file(path: str, index: int) -> str:
    """Where trainer number `index` keeps the state that belongs to the state file of the first."""
    return path if not path or not index else f"{path}.{index}"


async def start_all(devices: Sequence[Device], resume: Resume | None) -> tuple[list[TrainerHello], str]:
    """Start every trainer; the first fills the vector. Returns what they say of themselves, and the state file that the
    first was restored from. Raises `TrainerFailed` with the device's name if one cannot start."""
    restored: asyncio.Future[Restored] = asyncio.get_running_loop().create_future()

    async def resume_first(hello: TrainerHello, vector: Vector) -> Restored:
        found = Restored() if resume is None else await resume(hello, vector)
        restored.set_result(found)
        return found

    def resume_other(index: int) -> Resume:
        async def found(_hello: TrainerHello, _vector: Vector) -> Restored:
            return Restored(has_vector=True, file=device_file((await restored).file, index))

        return found

    starting = [
        asyncio.create_task(
            device.trainer.start(resume=resume_other(device.index) if device.index else resume_first),
            name=f"start-device-{device.index}",
        )
        for device in devices
    ]
    try:
        hellos = await asyncio.gather(*starting)
    except BaseException as error:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        failed = [one for one in starting if not one.cancelled() and one.exception() is error]
        if failed and isinstance(error, TrainerFailed) and not isinstance(error, TrainerLeft):
            name = devices[starting.index(failed[0])].name
            raise TrainerFailed(f"device {name}: {error.reason}", error.hint, fatal=error.fatal) from error
        raise
    file = restored.result().file if restored.done() else ""
    return hellos, file


def joint_hello(devices: Sequence[Device], hellos: Sequence[TrainerHello], *, positions: int = 0) -> TrainerHello:
    """The trainers as one; the node keeps so many `positions` of them. Raises `TrainerFailed` where they do not train
    one model."""
    first = hellos[0]
    if first.engine is not None:
        raise TrainerFailed(
            "a script with an engine of named values is one process, and training.device names several",
            "leave training.device out, or set it to one device",
            fatal=True,
        )
    for device, hello in zip(devices, hellos, strict=True):
        device.pid = hello.pid
        if hello.layout != first.layout:
            raise TrainerFailed(
                f"the trainer on {device.name} built another model than the one on {devices[0].name}",
                "build the same model on every device: it may not depend on swarm.device_index",
                fatal=True,
            )
        if name := first.differing(hello):
            raise TrainerFailed(
                f"the tensor {name}, which is not exchanged, is another on {device.name} than on {devices[0].name}",
                SAME_VALUES,
                fatal=True,
            )
    return TrainerHello(
        layout=first.layout,
        task=first.task,
        task_version=first.task_version,
        frozen_digest=first.frozen_digest,
        device=",".join(hello.device for hello in hellos),
        pid=first.pid,
        host_bytes=sum(hello.host_bytes for hello in hellos)
        + (OWN_VECTORS + positions) * _FLOAT32_BYTES * first.layout.total,
        device_bytes=sum(hello.device_bytes for hello in hellos),
        gpus={name: identity for hello in hellos for name, identity in hello.gpus.items()},
        frozen=first.frozen,
    )
