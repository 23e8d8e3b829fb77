"""A whole swarm in one process: real nodes (`p2pnode.lifecycle.node.Node`) in a simulated environment, with stub
trainers.

`Swarm` starts nodes, kills them without warning, restarts them on their old disk, and waits for conditions in virtual
time. Everything follows from one seed.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from p2pnode.config.settings import Config
from p2pnode.lifecycle.environment import NodeEnvironment
from p2pnode.lifecycle.node import Node
from p2pnode.overlay.peers import Activity
from p2pnode.training.dispatch.chunks import LocalDataset
from p2pnode.training.dispatch.store import Store
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.trainer_link.interface import Vector
from tests.harness.environment.memory_store import MemoryStore
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, SeededEntropy
from tests.harness.network.network import Network
from tests.harness.swarms.simulated_swarm import ExchangingSwarm
from tests.harness.trainers.stub_trainer import StubTrainer

PORT = 8468


@dataclass
class Host:
    """One machine of the world: its disk outlives its node."""

    name: str
    address: str
    port: int = PORT
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    starts: int = 0
    node: Node | None = None
    task: asyncio.Task[Any] | None = None
    trainer: StubTrainer | None = None

    @property
    def living(self) -> Node:
        assert self.node is not None, f"{self.name} does not run"
        return self.node

    @property
    def node_id(self) -> bytes:
        return self.living.identity.node_id

    @property
    def exchange(self) -> Exchange | None:
        """None before it has begun."""
        return self.living.exchange


class Swarm(ExchangingSwarm):
    """Hosts on one simulated network. `settings` are dotted keys of the configuration, the same for all nodes."""

    def __init__(
        self,
        *,
        seed: int,
        settings: dict[str, Any] | None = None,
        make_trainer: Callable[[str], StubTrainer],
        delay: tuple[float, float] = (0.001, 0.01),
        loss: float = 0.0,
    ) -> None:
        super().__init__(seed)
        self.settings = settings or {}
        self.network = Network(asyncio.get_running_loop(), seed, delay=delay, loss=loss)
        self.hosts: dict[str, Host] = {}
        self._make_trainer = make_trainer
        #: Where the trainers' own states are said to be; None: trainers save nothing.
        self.state_path: Path | None = None
        self.make_lan: Callable[[str], Any] = lambda _address: None
        #: The store of a master on this host, and the record files of every machine.
        self.make_store: Callable[[str], Store] = lambda _name: MemoryStore()
        self.read_dataset: Callable[[str], LocalDataset] | None = None
        #: Each start of a node is on another port, as that of a daemon with `node.port = 0`.
        self.new_ports = False
        #: The free memory that every machine reports; None where it reports none.
        self.available_memory: int | None = None

    def start(
        self,
        name: str,
        *,
        bootstrap: str | None = None,
        reopens: bool = False,
        address: str | None = None,
        **settings: Any,
    ) -> Host:
        """Start a node on a new machine, or again on its old one. `bootstrap` names a host, itself perhaps. `address`:
        of the new machine; None: the next one."""
        host = self.hosts.get(name)
        if host is None:
            number = len(self.hosts) + 1
            host = self.hosts[name] = Host(name, address or f"10.0.{number // 250}.{number % 250 + 1}")
        host.port = PORT + host.starts if self.new_ports else PORT
        host.starts += 1
        chosen = {"training.checkpoint_s": 0.0, "training.eval_steps": 0, **self.settings}
        chosen.update({key.replace("__", "."): value for key, value in settings.items()})
        chosen |= {"node.host": host.address, "node.port": host.port, "swarm.allow_open": True}
        if bootstrap is not None:
            chosen["swarm.bootstrap"] = [f"{self.hosts[bootstrap].address}:{self.hosts[bootstrap].port}"]
        host.trainer = self._make_trainer(name)
        trainer = host.trainer

        def make_trainer(_node_id: bytes, _incarnation: int, on_state: Callable[[str], None]) -> StubTrainer:
            trainer.on_state = on_state
            return trainer

        environment = NodeEnvironment(
            transport=self.network.transport(host.address, host.port),
            clock=self.clock,
            entropy=SeededEntropy(f"{self.seed}/{name}/{host.starts}"),
            disk=host.disk,
            executor=InlineExecutor(),
            log=ListLog(self.records, name, self.clock),
            make_trainer=make_trainer,
            state_path=self.state_path,
            available_memory=lambda: self.available_memory,
            lan=self.make_lan(host.address),
            reopens=reopens,
            make_store=lambda: self.make_store(name),
            **({} if (read := self.read_dataset) is None else {"read_dataset": lambda: read(name)}),
        )
        host.node = Node(configured(chosen), environment)
        host.task = asyncio.create_task(host.node.run(), name=f"node-{name}")
        return host

    def start_many(self, count: int, *, bootstrap: str = "n0", **settings: Any) -> list[Host]:
        """Hosts n0 … n{count-1}; the first one founds."""
        return [
            self.start(f"n{number}", bootstrap=None if number == 0 else bootstrap, **settings)
            for number in range(count)
        ]

    async def kill(self, name: str, *, refused: bool = True) -> None:
        """End a node as SIGKILL does: its traffic ends without a message. `refused`: its machine answers for it."""
        host = self.hosts[name]
        self.network.crash(host.living.overlay.address, refused=refused)
        host.disk = copy.deepcopy(host.disk)  # what the cancelled task still writes at its end is not on it
        host.task.cancel()
        await asyncio.gather(host.task, return_exceptions=True)
        host.node, host.task = None, None

    def running(self) -> list[Host]:
        """Hosts whose node runs."""
        return [host for host in self.hosts.values() if host.task is not None and not host.task.done()]

    def cut(self, source: str, target: str) -> None:
        """Nothing of `source` reaches `target`; what comes from there still does."""
        self.network.cut(self.hosts[source].living.overlay.address, self.hosts[target].living.overlay.address)

    def steps(self) -> list[int]:
        """The completed steps of the nodes that run."""
        return [host.living.progress.step for host in self.running()]

    async def settle(self) -> None:
        """Pause every node and wait until all that was trained is acknowledged and visible."""
        for host in self.running():
            host.living.pause()

        def is_quiet(host: Host) -> bool:
            # `paused` is reported at once, and announced when the current step is done.
            stands = host.living.overlay.heartbeat.activity == Activity.PAUSED
            return stands and not host.exchange.outbox.steps

        await self.until(lambda: all(map(is_quiet, self.running())), within_s=60, what="all stand still")
        await asyncio.sleep(1.0)  # hand-overs under way end within a round trip

    async def stop(self) -> None:
        """Cancel every node."""
        for host in self.running():
            host.task.cancel()
        tasks = [host.task for host in self.hosts.values() if host.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def model(self) -> Vector:
        """The model as its owners have it, float32[total]; `AssertionError` for a shard without one acting owner."""
        # Nodes that have left count: no other node could take what the last ones owned.
        hosts = [host for host in self.hosts.values() if host.node is not None and host.node.exchange is not None]
        stores = {host.name: host.exchange.store for host in hosts}
        bounds = next(iter(stores.values())).bounds
        value = np.zeros(bounds[-1][1], np.float32)
        running = [host.name for host in self.running()]
        for shard, (start, stop) in enumerate(bounds):
            owners = {name: store.owned[shard] for name, store in stores.items() if shard in store.owned}
            assert owners, f"shard {shard} has no owner (seed {self.seed})"
            acting = max(owners.values(), key=lambda owned: owned.term)
            # The answer to a hand-over may be on its way; no other node may act as the owner.
            others = [owned for name, owned in owners.items() if name in running and owned is not acting]
            assert all(owned.moving for owned in others), f"shard {shard} (seed {self.seed})"
            value[start:stop] = acting.state.value
        return value


def configured(settings: dict[str, Any]) -> Config:
    """A configuration from dotted keys."""
    tree: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, name = key.split(".", 1)
        tree.setdefault(section, {})[name] = value
    return msgspec.convert(tree, Config)
