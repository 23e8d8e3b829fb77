"""Overlays without a daemon, on one simulated network, for the simulated tests of the overlay."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from contextvars import copy_context
from typing import Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.identity import load_identity, next_incarnation
from p2pnode.overlay.nat.port_mapping import Gateway
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Activity, PeerChange
from p2pnode.overlay.sealing.sealed_transport import SealedTransport
from p2pnode.overlay.sealing.sealer import MAX_SEALED_BYTES
from p2pnode.overlay.sealing.swarm_key import KeyRing
from p2pnode.overlay.settings import NodeSettings, OverlaySettings, SwarmSettings
from p2pnode.overlay.transport import Transport
from tests.harness.environment.simulated import (
    ListLog,
    MemoryDisk,
    NoLog,
    SeededEntropy,
    VirtualClock,
    make_environment,
)
from tests.harness.environment.virtual_loop import OWNER, VirtualLoop
from tests.harness.network.network import Network
from tests.harness.swarms.simulated_swarm import SimulatedSwarm

GENESIS = b"genesis of tests"
PORT = 8468
#: Keys of worlds that name none; a test sets it to play the other tests' stories in a closed swarm.
SEALED_BY_DEFAULT: KeyRing | None = None


class OverlayWorld(SimulatedSwarm):
    """Nodes by number; node 0 founds. Any exception in a datagram handler fails the test."""

    look_s = 0.02

    def __init__(
        self,
        seed: int,
        *,
        delay: tuple[float, float] = (0.001, 0.01),
        loss: float = 0.0,
        run: str = "tests",
        recording: bool = True,
        keys: KeyRing | None = None,
    ) -> None:
        """Without `recording` neither log nor changes are kept: an hour of many nodes would fill the memory. `keys`: a
        closed swarm, its datagrams sealed."""
        if recording:
            print(f"seed {seed}")
        self.recording = recording
        self.keys = keys or SEALED_BY_DEFAULT
        self.seals: dict[int, SealedTransport] = {}
        super().__init__(seed)
        self.run = run
        self.network = Network(asyncio.get_running_loop(), seed, delay=delay, loss=loss)
        self.clocks: dict[int, VirtualClock] = {}
        self.disks: dict[int, MemoryDisk] = {}
        self.nodes: dict[int, Overlay] = {}
        self.changes: dict[int, list[tuple[float, PeerChange]]] = {}
        self._starts: dict[int, int] = {}

    def make(
        self,
        number: int,
        *,
        host: str | None = None,
        run: str | None = None,
        keys: KeyRing | None = None,
        gateway: Gateway | None = None,
        **node: object,
    ) -> Overlay:
        """A node that is not started yet, on its own disk (the old one, if it ran before)."""
        disk = self.disks.setdefault(number, MemoryDisk())
        self._starts[number] = self._starts.get(number, 0) + 1
        entropy = SeededEntropy(f"{self.seed}/{number}/{self._starts[number]}")
        host = host or address_of(number)
        identity = load_identity(disk, entropy)
        clock = self.clocks.setdefault(number, VirtualClock())
        log = ListLog(self.records, f"n{number}", self.clock) if self.recording else NoLog()
        memory_transport = self.network.transport(host, PORT)
        transport: Transport = memory_transport
        keys = keys or self.keys
        if keys is not None:
            memory_transport.longest_datagram_bytes = MAX_SEALED_BYTES
            transport = self.seals[number] = SealedTransport(
                memory_transport, identity, keys, run or self.run, clock=clock, entropy=entropy, log=log
            )
        settings = NodeSettings(host=host, port=PORT, **node)
        overlay = Overlay(
            identity=identity,
            incarnation=next_incarnation(disk, 0.0),
            boot_id=int.from_bytes(entropy.token(8), "big"),
            settings=OverlaySettings(settings, SwarmSettings(run=run or self.run)),
            transport=transport,
            environment=make_environment(clock=clock, entropy=entropy, disk=disk, log=log),
            gateway=gateway,
        )
        overlay._protocol.raise_handler_errors = True
        self.nodes[number] = overlay
        if self.recording:
            seen = self.changes[number] = []
            overlay.on_change(lambda change: seen.append((self.clock.monotonic(), change)))
        return overlay

    async def found(self, number: int = 0, **node: Any) -> Overlay:
        overlay = self.make(number, **node)
        await self._as(number, overlay.start())
        overlay.found(GENESIS)
        overlay.announce(activity=Activity.TRAINING, step_seconds=60.0)
        return overlay

    async def join(self, number: int, *, through: Iterable[int] = (0,), **node: Any) -> Overlay:
        overlay = self.make(number, **node)
        await self._as(number, overlay.start())
        await self._as(number, overlay.join([f"{address_of(other)}:{PORT}" for other in through], genesis=None))
        overlay.announce(activity=Activity.TRAINING, step_seconds=60.0)
        return overlay

    @staticmethod
    async def _as(number: int, work: Coroutine[Any, Any, None]) -> None:
        """Run as this node, so that `stall` finds all that comes of it."""
        context = copy_context()
        context.run(OWNER.set, number)
        await asyncio.get_running_loop().create_task(work, context=context)

    def stall(self, number: int, seconds: float) -> None:
        """The node's loop is busy: it receives, sends and counts nothing until then, and the other nodes continue."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stall(number, seconds)

    async def raise_swarm(self, count: int, *, at_once: bool = True, bootstraps: int = 1) -> list[Overlay]:
        """Nodes 0 … count-1, all joined through node 0, or through the first few, which join first."""
        await self.found(0)
        first = range(1, bootstraps)
        await asyncio.gather(*(self.join(number) for number in first))
        rest = range(bootstraps, count)
        if at_once:
            await asyncio.gather(*(self.join(number, through=range(bootstraps)) for number in rest))
        else:
            for number in rest:
                await self.join(number, through=range(bootstraps))
        return [self.nodes[number] for number in range(count)]

    async def kill(self, number: int, *, refused: bool = False) -> None:
        """SIGKILL: the node sends nothing more, and its tasks are gone."""
        overlay = self.nodes.pop(number)
        self.network.crash(overlay.address, refused=refused)
        disk = self.disks[number]
        files = dict(disk.files)
        await overlay.stop()
        disk.files.clear()
        disk.files.update(files)

    async def stop(self) -> None:
        for overlay in self.nodes.values():
            await overlay.stop()


def address_of(number: int) -> str:
    return f"10.0.{number // 200}.{number % 200 + 1}"


def endpoint(number: int) -> Address:
    return Address(address_of(number), PORT)
