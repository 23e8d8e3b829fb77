"""The daemon's side of a script that uses an engine: answers its questions, and asks for its `pull`.

The script decides what is computed (`training.engines`), this node takes part for it (`Participation`), and the values
are those of the swarm. Questions are answered in any order, each when its answer is there. When the node leaves, all
waiting ends at once.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from p2pnode.overlay.environment import Log
from p2pnode.training.engines.calls import ScriptCalls
from p2pnode.training.engines.participation import Participation
from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link.engine_messages import (
    MESSAGE_VALUES_BYTES,
    AbandonRun,
    ApplyUpdates,
    AskKeys,
    BeginRun,
    CallAnswered,
    Called,
    CallNode,
    Counted,
    CountStep,
    Done,
    Encoded,
    EngineAnswered,
    EngineAsked,
    EngineSaid,
    FinishRun,
    GetValues,
    KeysFound,
    ListMembers,
    ListPeers,
    NotAnswered,
    PeerSteps,
    PullAsked,
    PullDone,
    Question,
    QuestionRefused,
    Reply,
    TaskCounts,
    UpdateParts,
    ValuesFound,
    WaitAtBarrier,
)
from p2pnode.training.trainer_link.interface import Trainer
from p2pnode.training.values.client import SwarmValues, key_order
from p2pnode.training.values.encoding import decode_key, encode_key
from p2pnode.training.values.store import (
    EncodedResult,
    EncodedUpdate,
    EncodedValue,
    PullFailed,
    ScriptGone,
    UpdateFailed,
)

#: Keys of which the values are looked up for one message.
KEYS_IN_A_PART = 4096
#: Keys that are listed in one message: with the longest ones it has 52 MB, and the link takes 64 MiB.
KEYS_OF_A_PAGE = 200_000


@dataclass(eq=False)
class EngineService:
    """Belongs to one node whose script uses an engine."""

    trainer: Trainer
    participation: Participation
    values: SwarmValues
    log: Log
    calls: ScriptCalls
    #: What the parameter server has done, as its script says; None at a node that does not serve.
    tasks: TaskCounts | None = None
    _under_way: dict[asyncio.Task[None], None] = field(default_factory=dict)
    _waits: dict[asyncio.Task[None], EngineAsked] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _batches: dict[int, asyncio.Future[PullDone]] = field(default_factory=dict)
    _is_leaving: bool = False
    _is_gone: bool = False

    def __post_init__(self) -> None:
        self.trainer.on_engine(self._on_script)
        self.values.on_pull(self.pull)

    # -- the life of the service

    def release(self) -> None:
        """The node leaves: nothing waits any more, so that the script can end."""
        self._is_leaving = True
        for task, asked in list(self._waits.items()):
            task.cancel()
            self._reply(asked, self._at_once(asked.question))

    def script_gone(self) -> None:
        """The script has ended: batches that wait for its `pull` are not answered."""
        self._is_gone = True
        self.values.on_pull(None)
        self.calls.end()
        for batch in self._batches.values():
            if not batch.done():
                batch.set_exception(ScriptGone("the script of this node has ended"))

    async def stop(self) -> None:
        """End what is under way; idempotent."""
        self.script_gone()
        for task in self._under_way:
            task.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)

    # -- questions

    def _on_script(self, message: EngineSaid) -> None:
        if isinstance(message, CallAnswered):
            self.calls.on_answer(message)
            return
        if isinstance(message, PullDone):
            batch = self._batches.get(message.number)
            if batch is not None and not batch.done():
                batch.set_result(message)
            return
        question = message.question
        waits = isinstance(question, BeginRun | WaitAtBarrier | FinishRun | CallNode)
        if isinstance(question, CountStep | AbandonRun | ListPeers | ListMembers | TaskCounts) or (
            waits and self._is_leaving
        ):
            self._reply(message, self._at_once(question))
        else:
            task = asyncio.create_task(self._answer(message), name=f"engine-{type(question).__name__}")
            self._under_way[task] = None
            task.add_done_callback(self._forget)
            if waits:
                self._waits[task] = message

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        self._waits.pop(task, None)

    def _at_once(self, question: Question) -> Reply:
        """The answer to a question that needs no other node, or that must not wait."""
        match question:
            case CountStep(count, seconds):
                self.participation.count(count, seconds)
            case AbandonRun():
                self.participation.abandon()
            case TaskCounts(lost=lost):
                if lost > (0 if self.tasks is None else self.tasks.lost):
                    self.log.error("updates_lost", count=lost, version=question.version)
                self.tasks = question
            case ListPeers(sample):
                return PeerSteps(self.participation.peers(sample), self.participation.workers())
            case ListMembers(nodes):
                return self.calls.members(nodes)
            case BeginRun():
                return Counted(self.participation.step)
            case CallNode():
                return QuestionRefused("unanswered", "this node leaves")
            case _:
                pass
        return Done()

    async def _answer(self, asked: EngineAsked) -> None:
        try:
            self._reply(asked, await self._answered(asked.question))
        except UpdateFailed as error:
            self._reply(asked, QuestionRefused("update", error.reason, encode_key(error.key), error.node))
        except NotAnswered as error:
            self._reply(asked, QuestionRefused("unanswered", str(error)))
        except TrainingError as error:
            self._reply(asked, QuestionRefused("unavailable", str(error)))
        except Exception as error:
            self.log.error("engine_question_failed", question=type(asked.question).__name__, reason=repr(error))
            self._reply(asked, QuestionRefused("unavailable", f"the node failed: {error!r}"))

    def _reply(self, asked: EngineAsked, reply: Reply) -> None:
        self.trainer.send_data(EngineAnswered(asked.number, reply))

    async def _answered(self, question: Question) -> Reply:
        match question:
            case BeginRun():
                return Counted(await self.participation.begin())
            case WaitAtBarrier(count):
                await self.participation.wait(count)
            case FinishRun():
                await self.participation.finish()
            case CallNode(node, payload):
                return Called(await self.calls.call(node, payload))
            case GetValues(keys):
                return await self._get(keys)
            case AskKeys(after):
                keys = await self.values.list_keys()
                first = bisect(keys, key_order(after), key=key_order) if after else 0
                page = keys[first : first + KEYS_OF_A_PAGE]
                return KeysFound(page, is_last=first + len(page) == len(keys))
            case ApplyUpdates(updates):
                await self.values.update_encoded([EncodedUpdate(*one) for one in updates])
            case _:
                raise TypeError(f"no answer to {type(question).__name__}")
        return Done()

    async def _get(self, keys: Sequence[bytes]) -> ValuesFound:
        """The values of the first keys, as many as fit into a message; at least one."""
        values: list[Encoded | None] = []
        size_bytes = 0
        for one in await self.values.get_encoded(keys[:KEYS_IN_A_PART]):
            size_bytes += 0 if one is None else len(one[0])
            if values and size_bytes > MESSAGE_VALUES_BYTES:
                break
            values.append(one)
        return ValuesFound(values)

    # -- pull

    async def pull(
        self, updates: Sequence[EncodedUpdate], present: Mapping[bytes, EncodedValue]
    ) -> Sequence[EncodedResult]:
        """Ask the script for the new values of a batch. Raises `PullFailed`, `ScriptGone`."""
        if self._is_gone:
            raise ScriptGone("the script of this node has ended")
        number = next(self._numbers)
        batch = self._batches[number] = asyncio.get_running_loop().create_future()
        try:
            asked: list[UpdateParts] = [(one.key, one.value, one.timestamp, one.reducer) for one in updates]
            self.trainer.send_data(PullAsked(number, asked, dict(present)))
            done = await batch
        finally:
            del self._batches[number]
        if done.failure:
            if len(updates) == 1:  # otherwise the owner asks again, for each by itself
                self.log.warning("pull_failed", key=repr(decode_key(updates[0].key)), reason=done.failure)
            raise PullFailed(done.failed or None, done.failure)
        return [(key, value, timestamp) for key, (value, timestamp) in done.values.items()]
