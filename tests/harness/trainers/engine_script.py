"""A script with the peer-to-peer engine, in nodes of the simulated network: the real loop, and the real messages to the
real daemon code, on virtual time. `work` takes `step_s` of it, between get and push."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from p2pnode.training.engines.link import error_of
from p2pnode.training.engines.peer import run_peer
from p2pnode.training.engines.program import Context, Program, Pulling, Verbs
from p2pnode.training.engines.values_link import answer_pull, stamped
from p2pnode.training.layout import Layout
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.engine_messages import (
    ApplyUpdates,
    AskKeys,
    EngineAnswered,
    EngineAsked,
    EngineOpened,
    EngineReady,
    EngineSaid,
    GetValues,
    KeysFound,
    ListPeers,
    PeerSteps,
    PullAsked,
    Question,
    QuestionRefused,
    Reply,
    ValuesFound,
)
from p2pnode.training.trainer_link.interface import Resume, TrainerEnd, TrainerFailed, TrainerHello, TrainerLeft
from p2pnode.training.values.encoding import Key, decode_key, encode_key, encode_value
from p2pnode.training.values.store import NewValue, Stamped, ValueUpdate
from tests.harness.environment.simulated import VirtualClock
from tests.harness.trainers.stub_trainer import StubTrainer

#: Runs at the end of a script, with its store.
Ending = Callable[["EngineScript"], Awaitable[Any]]


class EngineScript(StubTrainer):
    """Implements `Trainer`. `result` is the number of steps, or the program's error; then `ending` runs."""

    def __init__(
        self, name: str, program: Program, *, step_s: float = 0.1, barrier: str = "", ending: Ending | None = None
    ) -> None:
        super().__init__(name, layout=Layout(()))
        self.is_script = True
        self.verbs = Verbs()
        self.verbs.use(program)
        self.work_s = step_s
        self.ctx = Context(self, 0)
        self.rng = random.Random(name)
        self.clock = VirtualClock().monotonic
        self.node_id = ""
        self.is_synchronous = False
        self.is_stopping = False
        self.result: int | Exception | None = None
        self.after: Any = None
        self._opened = EngineOpened("p2p", 1, barrier)
        self._ending = ending
        self._ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Reply]] = {}
        self._handler: Callable[[EngineSaid], None] | None = None
        self._pause_s = 0.02
        self.task: asyncio.Task[None] | None = None
        self.batches = 0

    # -- the trainer

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        self._set_state("running")
        self.task = asyncio.create_task(self._run(), name=f"script-{self.name}")
        return TrainerHello(self.layout, "engine p2p", "1", "", "cpu", pid=1, engine=self._opened)

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        self._handler = handler

    def send_data(self, message: Any) -> None:
        """Through the encoding, as over the socket."""
        (message,) = messages.Decoder().from_daemon(messages.encode(message))
        match message:
            case EngineReady(node_id, _, is_synchronous, pause_s):
                self.node_id, self.is_synchronous, self._pause_s = node_id.hex(), is_synchronous, pause_s
                self._ready.set_result(message)
            case EngineAnswered(number, reply) if number in self._open:
                self._open[number].set_result(reply)
            case PullAsked():
                self.batches += 1
                self._tell(answer_pull(message, self._pull))

    async def ended(self) -> TrainerFailed:
        await self._over.wait()
        return TrainerLeft("the script has returned")

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        self.is_stopping = True
        if self.task is not None:
            await asyncio.wait([self.task], timeout=stop_s)
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        self._set_state("stopped")
        return TrainerEnd()

    def _tell(self, message: EngineSaid) -> None:
        assert self._handler is not None
        (decoded,) = messages.Decoder().from_trainer(messages.encode(message))
        assert isinstance(decoded, EngineSaid)
        self._handler(decoded)

    # -- the script

    async def _run(self) -> None:
        await self._ready
        try:
            self.result = await run_peer(self.verbs, self, self.ctx)
        except Exception as error:
            self.result = error
        if self._ending is not None:
            self.after = await self._ending(self)
        self._over.set()

    def _pull(self, updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> Sequence[NewValue]:
        return self.verbs.pulled(Context(Pulling(present, self, [one.key for one in updates]), self.ctx.step), updates)

    async def ask(self, question: Question) -> Reply:
        number = next(self._numbers)
        self._open[number] = asyncio.get_running_loop().create_future()
        self._tell(EngineAsked(number, question))
        try:
            reply = await self._open[number]
        finally:
            del self._open[number]
        if isinstance(reply, QuestionRefused):
            raise error_of(reply)
        return reply

    async def pause(self) -> None:
        await asyncio.sleep(self._pause_s)

    # -- its store

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Stamped]:
        await asyncio.sleep(self.work_s)
        found: list[Any] = []
        while len(found) < len(keys):
            reply = await self.ask(GetValues([encode_key(key) for key in keys[len(found) :]]))
            assert isinstance(reply, ValuesFound)
            found += reply.values
        return {key: stamped(one) for key, one in zip(keys, found, strict=True) if one is not None}

    async def get(self, key: Key) -> Stamped | None:
        return (await self.get_many([key])).get(key)

    async def set(self, key: Key, value: object, timestamp: int = 0) -> None:
        await self.update([ValueUpdate(key, value, timestamp, "replace")])

    async def update(self, updates: Sequence[ValueUpdate]) -> None:
        await self.ask(
            ApplyUpdates(
                [(encode_key(one.key), encode_value(one.key, one.value), one.timestamp, one.reducer) for one in updates]
            )
        )

    async def list_keys(self) -> list[Key]:
        reply = await self.ask(AskKeys())
        assert isinstance(reply, KeysFound)
        return [decode_key(key) for key in reply.keys]

    async def keys(self) -> list[Key]:
        return await self.list_keys()

    # -- the surroundings of its verbs: only what is answered at once

    def peers(self, count: int | None) -> dict[str, int]:
        return {node.hex(): step for node, step in self._asked_at_once(count).steps.items()}

    def worker_num(self) -> int:
        return self._asked_at_once(None).workers

    def _asked_at_once(self, count: int | None) -> PeerSteps:
        number = next(self._numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        self._tell(EngineAsked(number, ListPeers(count or 0)))
        reply = future.result()
        del self._open[number]
        assert isinstance(reply, PeerSteps)
        return reply
