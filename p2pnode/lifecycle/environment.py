"""What a node gets from its composition root: the environment of the overlay, a transport and a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlay.bootstrap.local_network import Lan
from overlay.environment import Clock, Disk, Entropy, Executor, Log
from overlay.nat.port_mapping import Gateway
from overlay.transport import Transport
from training.trainer_link.interface import Trainer


@dataclass(slots=True)
class NodeEnvironment:
    """Everything a node touches the world through. `state_path` is where the trainer may write its own state."""

    transport: Transport
    clock: Clock
    entropy: Entropy
    disk: Disk
    workers: Executor
    log: Log
    #: (node id, callback for the trainer's state) → trainer
    make_trainer: Callable[[bytes, Callable[[str], None]], Trainer]
    state_path: Path | None = None
    #: Bytes this process may still take; None where nobody can tell.
    available_memory: Callable[[], int | None] = lambda: None
    #: The router in front of us, where it shall be asked to let others in.
    gateway: Gateway | None = None
    #: Announcements in the local network, where they are wanted.
    lan: Lan | None = None
