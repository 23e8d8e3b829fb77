"""Servers and workers of a parameter server on a virtual clock: the real loops, a store in memory, and faults.

A node is a task; `kill` cancels it wherever it is, between two keys of a commit too. Others learn of it `DETECTION_S`
later. An answer may be lost on its way: the asker gets `NotAnswered`, though the server has acted.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from p2pnode.training.engines.program import Surroundings
from p2pnode.training.engines.server.acceptance import ServerOptions
from p2pnode.training.engines.server.engine import run_server
from p2pnode.training.engines.server.program import ServerPull, ServerVerbs
from p2pnode.training.engines.server.record import RECORD_KEY, decode_record
from p2pnode.training.engines.server.worker import run_worker
from p2pnode.training.engines.values_link import immediate
from p2pnode.training.trainer_link.engine_messages import MembersFound, NotAnswered, TaskCounts
from p2pnode.training.values.encoding import Key
from p2pnode.training.values.store import NewValue, ScriptGone, Stamped, StoreUnavailable, ValueUpdate
from tests.harness.swarms.memory_values import MemoryValues

Result = TypeVar("Result")
DETECTION_S = 2.0
#: An update of one key takes so long: a node often dies between two keys of a commit.
KEY_S = 0.03


class World:
    """All nodes of one run. `verbs_of(node)` makes the program of each; `push_s(node)` says how long its `push`
    takes."""

    def __init__(
        self,
        options: ServerOptions,
        verbs_of: Callable[[str], ServerVerbs],
        seed: int = 1,
        *,
        lost: float = 0.0,
        push_s: Callable[[str], float] = lambda _: 0.1,
    ) -> None:
        self.options = options
        self.verbs_of = verbs_of
        self.random = random.Random(seed)
        self.lost = lost
        self.push_s = push_s
        self.nodes: dict[bytes, WorldNode] = {}
        self.died_at: dict[bytes, float] = {}
        self.store = MemoryValues(self._pull)
        self.unavailable_until = 0.0
        self._count = 0

    def clock(self) -> float:
        return asyncio.get_running_loop().time()

    def add(self, *, server: bool, run: int = 1) -> WorldNode:
        """Start a node; servers have the lower ids."""
        self._count += 1
        node_id = bytes([1 if server else 2]) + self._count.to_bytes(19, "big")
        node = self.nodes[node_id] = WorldNode(self, node_id, is_server=server)
        node.start(run)
        return node

    def kill(self, node: WorldNode) -> None:
        self.died_at[node.node_id] = self.clock()
        node.die()

    def begin_anew(self, node: WorldNode) -> WorldNode:
        """Its process dies and starts again at once, under the same id: nobody notices, and it has forgotten all."""
        node.die()
        again = self.nodes[node.node_id] = WorldNode(self, node.node_id, is_server=node.is_server)
        again.start(1)
        return again

    def live(self, *, server: bool) -> list[WorldNode]:
        return [
            node
            for node in self.nodes.values()
            if node.is_server == server and node.node_id not in self.died_at and not node.task.done()
        ]

    async def ends(self) -> dict[str, int]:
        """What the loops of all living nodes return."""
        living = {node.name: node.task for node in self.nodes.values() if node.node_id not in self.died_at}
        await asyncio.gather(*living.values())
        return {name: task.result() for name, task in living.items()}

    async def record(self):
        return decode_record(await self.store.get(RECORD_KEY))

    async def _pull(self, updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> Sequence[NewValue]:
        servers = self.live(server=True)
        if not servers:
            raise ScriptGone("no server lives")
        owner = servers[hash_of(updates[0].key) % len(servers)]
        return ServerPull(owner.verbs, owner.surroundings).apply(updates, present)


class WorldNode:
    """The host of one node, its store and its surroundings."""

    def __init__(self, world: World, node_id: bytes, *, is_server: bool) -> None:
        self.world = world
        self.node_id = node_id
        self.is_server = is_server
        self.is_stopping = False
        #: Nobody reaches it, and after a while the others take it for dead.
        self.is_cut_off = False
        self.name = f"{'server' if is_server else 'worker'}-{int.from_bytes(node_id[1:], 'big')}"
        self.rng = random.Random(world.random.getrandbits(32))
        self.verbs = world.verbs_of(self.name)
        self.store = NodeStore(world, self)
        self.surroundings: Surroundings = WorldSurroundings(self)
        self.task: asyncio.Task[int]
        self.step = 0
        self.counts: TaskCounts | None = None
        self._inbox: asyncio.Queue[WorldAsked] = asyncio.Queue()

    def start(self, run: int) -> None:
        loop = run_server if self.is_server else run_worker
        work = loop(self.verbs, self, self.world.options, run)
        self.task = asyncio.create_task(work, name=self.name)

    def again(self, run: int) -> None:
        """Call `start` once more, with the program that the world has now."""
        self.verbs = self.world.verbs_of(self.name)
        self.start(run)

    def die(self) -> None:
        self.task.cancel()
        while not self._inbox.empty():
            self._inbox.get_nowait().fail()

    def clock(self) -> float:
        return self.world.clock()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def announce(self, step: int) -> None:
        self.step = step

    async def show(self, step: int, counts: TaskCounts) -> None:
        await self.announce(step)
        self.counts = counts

    async def members(self, nodes: Sequence[bytes] = ()) -> MembersFound:
        def is_gone(node: WorldNode) -> bool:
            return (node.is_cut_off and node is not self) or self.clock() >= self.world.died_at.get(
                node.node_id, 1e9
            ) + DETECTION_S

        servers = sorted(node.node_id for node in self.world.nodes.values() if node.is_server and not is_gone(node))
        return MembersFound(servers, [node for node in nodes if is_gone(self.world.nodes[node])])

    async def receive(self, timeout_s: float) -> WorldAsked | None:
        if timeout_s <= 0.0:
            return None if self._inbox.empty() else self._inbox.get_nowait()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._inbox.get()
        except TimeoutError:
            return None

    async def answer(self, asked: WorldAsked, payload: bytes) -> None:
        if not asked.answered.done():
            asked.answered.set_result(payload)

    async def call(self, node: bytes, payload: bytes) -> bytes:
        await asyncio.sleep(0.002 + 0.004 * self.world.random.random())
        target = self.world.nodes[node]
        if node in self.world.died_at or target.task.done() or not target.is_server or target.is_cut_off:
            raise NotAnswered(f"{target.name} does not answer")
        asked = WorldAsked(self.node_id, payload)
        target._inbox.put_nowait(asked)
        dead = asyncio.create_task(target.ended())
        try:
            await asyncio.wait([asked.answered, dead], return_when=asyncio.FIRST_COMPLETED, timeout=30.0)
        finally:
            dead.cancel()
        if not asked.answered.done() or asked.answered.result() is None:
            raise NotAnswered(f"{target.name} does not answer any more")
        await asyncio.sleep(0.002)
        if self.world.random.random() < self.world.lost:
            raise NotAnswered("the answer was lost")
        return asked.answered.result()

    async def ended(self) -> None:
        await asyncio.wait([self.task])

    async def run(self, work: Callable[[], Result]) -> Result:
        await asyncio.sleep(self.world.push_s(self.name))
        return work()

    @asynccontextmanager
    async def beside(self, work: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
        async def repeat() -> None:
            while True:
                await asyncio.sleep(every_s)
                await work()

        task = asyncio.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class WorldAsked:
    def __init__(self, sender: bytes, payload: bytes) -> None:
        self.sender = sender
        self.payload = payload
        self.answered: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()

    def fail(self) -> None:
        if not self.answered.done():
            self.answered.set_result(None)


class NodeStore:
    """The store of the run as one node uses it: every key takes a moment, in which the node may die."""

    def __init__(self, world: World, node: WorldNode) -> None:
        self._world = world
        self._node = node

    async def get(self, key: Key) -> Stamped | None:
        return (await self.get_many([key])).get(key)

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Stamped]:
        await asyncio.sleep(0.001)
        return await self._world.store.get_many(keys)

    async def set(self, key: Key, value: object, timestamp: int = 0) -> None:
        await self._world.store.set(key, value, timestamp)

    async def update(self, updates: Sequence[ValueUpdate]) -> None:
        for key in dict.fromkeys(one.key for one in updates):
            await asyncio.sleep(KEY_S)
            if self._world.clock() < self._world.unavailable_until:
                raise StoreUnavailable("no owner answers")
            await self._world.store.update([one for one in updates if one.key == key])

    async def keys(self) -> list[Key]:
        return await self._world.store.keys()


class WorldSurroundings:
    """For the contexts of the verbs; the store in memory never suspends."""

    def __init__(self, node: WorldNode) -> None:
        self._node = node
        self.node_id = node.node_id.hex()
        self.rng = node.rng

    def clock(self) -> float:
        return self._node.clock()

    def get(self, key: Key) -> Stamped | None:
        return immediate(self._node.world.store.get(key))

    def set(self, key: Key, value: object, timestamp: int) -> None:
        immediate(self._node.world.store.set(key, value, timestamp))

    def keys(self) -> list[Key]:
        return immediate(self._node.world.store.keys())

    def peers(self, count: int | None) -> dict[str, int]:
        return {node.node_id.hex(): node.step for node in self._node.world.nodes.values() if node is not self._node}

    def worker_num(self) -> int:
        return len(self._node.world.live(server=False))


def hash_of(key: Key) -> int:
    return sum(key.encode() if isinstance(key, str) else key)


class TableSurroundings:
    """Surroundings of a context without a node: values in a table."""

    def __init__(self, values: Mapping[Key, object]) -> None:
        self._values = {key: Stamped(value, 0) for key, value in values.items()}
        self.node_id = "0" * 40
        self.rng = random.Random(1)

    def clock(self) -> float:
        return 0.0

    def get(self, key: Key) -> Stamped | None:
        return self._values.get(key)

    def set(self, key: Key, value: object, timestamp: int) -> None:
        self._values[key] = Stamped(value, timestamp)

    def keys(self) -> list[Key]:
        return list(self._values)

    def peers(self, count: int | None) -> dict[str, int]:
        return {}

    def worker_num(self) -> int:
        return 1
