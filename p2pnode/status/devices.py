"""What `/status`, `/metrics` and `health` say of the trainers of a node with several devices."""

from __future__ import annotations

import math

from p2pnode.status.prometheus import Family
from p2pnode.status.schema import CoordinationStatus, DeviceStatus, Finding
from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.trainer_link.interface import Trainer


def device_status(trainer: Trainer) -> list[DeviceStatus]:
    """One entry per trainer; none where there is a single one."""
    if not isinstance(trainer, HostTrainer):
        return []
    return [
        DeviceStatus(
            index=one.index,
            device=one.name,
            state=one.state,
            pid=one.pid,
            failures=one.failures,
            optimizer_steps=one.optimizer_steps,
            samples=one.samples,
            loss=one.last.loss if one.last is not None and math.isfinite(one.last.loss) else None,
            step_seconds=one.last.seconds if one.last is not None else 0.0,
            leads=one.leads,
        )
        for one in trainer.devices()
    ]


def coordination_status(trainer: Trainer) -> CoordinationStatus | None:
    """None where each node decides for itself."""
    found = trainer.coordination if isinstance(trainer, HostTrainer) else None
    if found is None:
        return None
    return CoordinationStatus(
        server=found.server.hex() or None,
        serves=found.serves,
        trainers=found.trainers,
        leader=found.leader.hex() or None,
    )


def device_metrics(devices: list[DeviceStatus]) -> list[Family]:
    """The same for Prometheus; nothing where there is a single trainer."""
    labels = [{"index": str(one.index), "device": one.device} for one in devices]
    return [
        Family(
            "p2pnode_device_up",
            "gauge",
            "1 for a trainer of this node that runs, 0 for one that does not.",
            [(label, int(one.state == "running")) for label, one in zip(labels, devices, strict=True)],
        ),
        Family(
            "p2pnode_device_failures_total",
            "counter",
            "Times this trainer of the node failed.",
            [(label, one.failures) for label, one in zip(labels, devices, strict=True)],
        ),
        Family(
            "p2pnode_device_samples_total",
            "counter",
            "Samples that this trainer of the node trained on.",
            [(label, one.samples) for label, one in zip(labels, devices, strict=True)],
        ),
        Family(
            "p2pnode_device_optimizer_steps_total",
            "counter",
            "Optimiser steps of this trainer of the node.",
            [(label, one.optimizer_steps) for label, one in zip(labels, devices, strict=True)],
        ),
    ]


def device_findings(devices: list[DeviceStatus]) -> list[Finding]:
    """Trainers that do not train while others of the node do."""
    found = []
    for one in devices:
        if one.state in ("failed", "crashed", "hung"):
            what = {
                "failed": "has failed and is given up",
                "crashed": "has failed and is restarted",
                "hung": "makes no progress",
            }[one.state]
            log = "trainer.log" if one.index == 0 else f"devices/{one.index}/trainer.log"
            found.append(
                Finding(
                    level="warning",
                    what=f"the trainer on device {one.index} ({one.device}) {what}; the others of this node go on",
                    do=f"see device_dropped and device_given_up in the log, and {log} in the state directory",
                )
            )
    return found
