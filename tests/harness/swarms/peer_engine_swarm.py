"""Nodes of the peer-to-peer engine on the simulated network: the real overlay, barriers and engine loop, and one store
in memory whose owners are living nodes. Time is virtual: `get` of the values takes `step_s` of it, as a step would."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Activity
from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.engines.participation import Participation
from p2pnode.training.engines.peer import run_peer
from p2pnode.training.engines.program import Context, Program, Pulling, VerbFailed, Verbs
from p2pnode.training.progress import Progress
from p2pnode.training.settings import BarrierSettings, TrainingSettings
from p2pnode.training.trainer_link.engine_messages import (
    AbandonRun,
    BeginRun,
    Counted,
    CountStep,
    Done,
    FinishRun,
    Question,
    Reply,
    WaitAtBarrier,
)
from p2pnode.training.values.encoding import Key
from p2pnode.training.values.store import NewValue, PullFailed, Stamped, ValueUpdate
from tests.harness.environment.simulated import VirtualClock
from tests.harness.swarms.memory_values import MemoryValues
from tests.harness.swarms.overlay_swarm import OverlayWorld


class PeerNode:
    """One node: what its loop asks, and the surroundings of its verbs. Requests to the store take time."""

    def __init__(self, world: PeerWorld, overlay: Overlay, number: int, program: Program, step_s: float) -> None:
        clock = VirtualClock()
        self.number = number
        self.verbs = Verbs()
        self.verbs.use(program)
        self.ctx = Context(self, 0)
        self.progress = Progress()
        self.barrier = make_barrier(world.barrier)
        waiter = BarrierWaiter(overlay, self.barrier, world.barrier, clock)
        self.part = Participation(overlay, waiter, world.training, self.progress, clock)
        self.step_s = step_s
        self.clock = clock.monotonic
        self.rng = random.Random(f"{world.seed}/{number}")
        self.node_id = overlay.node_id.hex()
        self.is_stopping = False
        self._world = world

    @property
    def is_synchronous(self) -> bool:
        return self.barrier.synchronous

    async def run(self) -> int:
        return await run_peer(self.verbs, self, self.ctx)  # type: ignore[arg-type]

    # -- what the loop asks

    async def ask(self, question: Question) -> Reply:
        match question:
            case BeginRun():
                return Counted(await self.part.begin())
            case CountStep(count, seconds):
                self.part.count(count, seconds)
            case WaitAtBarrier(count):
                await self.part.wait(count)
            case FinishRun():
                await self.part.finish()
            case AbandonRun():
                self.part.abandon()
        return Done()

    async def pause(self) -> None:
        await asyncio.sleep(self.part.pause_s)

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Stamped]:
        """Takes the time of a step."""
        await asyncio.sleep(self.step_s)
        return await self._world.store.get_many(keys)

    async def update(self, updates: Sequence[ValueUpdate]) -> None:
        await asyncio.sleep(0.002)
        await self._world.store.update(updates)

    # -- surroundings: what needs no other node

    def get(self, key: Key) -> Stamped | None:
        raise RuntimeError(f"{key!r} is not in the batch, and this thread cannot wait for it")

    def set(self, key: Key, value: object, timestamp: int) -> None:
        raise RuntimeError("this thread cannot wait")

    def keys(self) -> list[Key]:
        raise RuntimeError("this thread cannot wait")

    def peers(self, count: int | None) -> dict[str, int]:
        return {node.hex(): step for node, step in self.part.peers(count or 0).items()}

    def worker_num(self) -> int:
        return self.part.workers()


class PeerWorld(OverlayWorld):
    """Nodes by number; `start` one after the other, node 0 first."""

    def __init__(self, seed: int, method: str = "bsp", *, min_nodes: int = 1, staleness: int = 4) -> None:
        super().__init__(seed)
        self.barrier = BarrierSettings(method=method, staleness=staleness)
        self.training = TrainingSettings(min_nodes=min_nodes)
        self.peers: dict[int, PeerNode] = {}
        self.runs: dict[int, asyncio.Task[int]] = {}
        self.store = MemoryValues(self._pull)
        self.batches = 0

    async def start(self, number: int, program: Program, step_s: float = 0.1) -> PeerNode:
        overlay = await (self.join(number) if number else self.found(number))
        overlay.announce(activity=Activity.PAUSED, step_seconds=0.0)
        peer = self.peers[number] = PeerNode(self, overlay, number, program, step_s)
        self.runs[number] = asyncio.create_task(peer.run(), name=f"peer-{number}")
        return peer

    async def lose(self, number: int) -> None:
        """Kill a node: nothing of it is heard any more."""
        run = self.runs.pop(number)
        run.cancel()
        self.network.crash(self.nodes[number].address)
        del self.peers[number]
        await asyncio.gather(run, return_exceptions=True)

    async def _pull(self, updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> Sequence[NewValue]:
        """Any living node is as good an owner as another."""
        self.batches += 1
        owners = sorted(self.peers)
        owner = self.peers[owners[self.batches % len(owners)]]
        try:
            return owner.verbs.pulled(
                Context(Pulling(present, owner, [one.key for one in updates]), owner.ctx.step), updates
            )
        except VerbFailed as error:
            raise PullFailed(updates[0].key, str(error)) from error
