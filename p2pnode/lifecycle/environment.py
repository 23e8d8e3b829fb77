"""What a node works with, built by its composition root: the environment, a transport and a trainer; and its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from p2pnode.config.directory_record import Given
from p2pnode.config.settings import Config
from p2pnode.overlay.bootstrap.lan import ZeroconfLan
from p2pnode.overlay.environment import Clock, Environment, Log
from p2pnode.overlay.nat.port_mapping import Gateway
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.transport import Transport
from p2pnode.training.dispatch.chunks import LocalDataset, RecordFilesMissing
from p2pnode.training.dispatch.store import Store, StoreLost
from p2pnode.training.progress import Progress
from p2pnode.training.trainer_link.interface import Trainer

#: What a node goes through, as `/status` shows it.
State = Literal[
    "joining",
    "waiting_for_nodes",
    "training",
    "waiting",
    "paused",
    "stalled",
    "serving",
    "finished",
    "leaving",
    "failed",
]


def _no_dataset() -> LocalDataset:
    raise RecordFilesMissing("this node was started without record files", "set dispatch.records")


def _no_store() -> Store:
    raise StoreLost("this node was started without a store")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment(Environment):
    """`Environment` with the transport and trainer of one node. `state_path`: folder for the trainer's state files."""

    transport: Transport
    #: (node id, callback for the trainer's state) → trainer
    make_trainer: Callable[[bytes, int, Callable[[str], None]], Trainer]
    state_path: Path | None = None
    #: Bytes of memory that this process may still allocate; None if unknown.
    available_memory: Callable[[], int | None] = lambda: None
    #: Bytes of this process's resident memory that are neither shared nor a file's; None if unknown.
    private_memory: Callable[[], int | None] = lambda: None
    #: The router, if it is to be asked for a port mapping.
    gateway: Gateway | None = None
    #: Announcements in the local network, if they are enabled.
    lan: ZeroconfLan | None = None
    #: The settings chosen for this start, which the state directory keeps once the node is in its swarm.
    given: Mapping[str, Given] = field(default_factory=dict)
    #: The store of a master, not opened yet.
    make_store: Callable[[], Store] = _no_store
    #: The record files of this machine. Blocks.
    read_dataset: Callable[[], LocalDataset] = _no_dataset
    #: Open the swarm again from this node's state if nobody answers, although another node founded it.
    reopens: bool = False


@dataclass(eq=False)
class NodePart:
    """A part of one node, with what all of them work with."""

    config: Config
    environment: NodeEnvironment
    overlay: Overlay
    trainer: Trainer
    progress: Progress

    @property
    def log(self) -> Log:
        return self.environment.log

    @property
    def clock(self) -> Clock:
        return self.environment.clock
