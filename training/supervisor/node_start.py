"""What a trainer is told at its start: the settings, its seeds, and where its records come from. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.record_messages import RecordSource


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
