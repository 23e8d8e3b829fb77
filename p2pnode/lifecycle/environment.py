"""What a node gets from its composition root: the environment of the overlay, a transport and a trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlay.bootstrap.local_network import Lan
from overlay.environment import Environment
from overlay.nat.port_mapping import Gateway
from overlay.transport import Transport
from training.trainer_link.interface import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment(Environment):
    """`Environment`, and the transport and trainer of one node. `state_path`: where the trainer may keep its state."""

    transport: Transport
    #: (node id, callback for the trainer's state) → trainer
    make_trainer: Callable[[bytes, Callable[[str], None]], Trainer]
    state_path: Path | None = None
    #: Bytes this process may still take; None where nobody can tell.
    available_memory: Callable[[], int | None] = lambda: None
    #: The router in front of us, where it shall be asked to let others in.
    gateway: Gateway | None = None
    #: Announcements in the local network, where they are wanted.
    lan: Lan | None = None
