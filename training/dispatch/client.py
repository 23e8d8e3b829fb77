"""Asks the master, whoever serves now: finds it, repeats what was not answered, and follows it to another node.

A request that was answered, and whose answer got lost, is sent again as it was: the master answers it as before. Only
one thing ends the attempts, and that is an answer. `trouble` says since when there is none, for `/status`. Needs no
trainer and no torch: other engines draw tasks through it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.messages import unpack_contact
from p2pnode.overlay.transport import TransportError, gathered, in_parts
from p2pnode.training.dispatch.directory import MasterDirectory
from p2pnode.training.dispatch.messages import (
    DISPATCH,
    MAX_MESSAGE_BYTES,
    A,
    DispatchAnswer,
    DispatchRequest,
    MasterRecord,
    TryAgain,
    decode_answer,
    encode,
)
from p2pnode.training.swarm import Swarm

#: A master answers at once, or after its store has synced: this much silence means that it does not serve.
ANSWER_S = 5.0
#: Waits between two attempts; the first one is short, because a failover takes about as long.
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 2.0
#: Trouble that lasts longer is logged and shown.
TROUBLE_S = 5.0

#: Answers requests of this node itself, where it is the master.
LocalMaster = Callable[[DispatchRequest], Awaitable[DispatchAnswer]]


class Trouble(NamedTuple):
    """The master has not answered since `since` (monotonic seconds), and why."""

    since: float
    reason: str


class MasterClient:
    """One node's requests to the master of its run."""

    def __init__(
        self, swarm: Swarm, directory: MasterDirectory, environment: Environment, local: LocalMaster | None = None
    ) -> None:
        self.trouble: Trouble | None = None
        #: Who answered last.
        self.master: bytes | None = None
        self._swarm = swarm
        self._directory = directory
        self._clock = environment.clock
        self._random = environment.entropy.random
        self._log = environment.log
        self._local = local
        self._has_told = False
        self._news = asyncio.Event()
        directory.on_record(lambda _: self._news.set())

    async def ask(self, genesis: bytes, request: DispatchRequest, kind: type[A]) -> A:
        """The master's answer, however long that takes; cancel it to give up."""
        wait_s = FIRST_RETRY_S
        while True:
            self._news.clear()
            answer = await self._attempt(genesis, request)
            if isinstance(answer, kind):
                self._note_success()
                return answer
            reason = answer.reason if isinstance(answer, TryAgain) else f"answered with {type(answer).__name__}"
            self._note_trouble(reason)
            try:
                async with asyncio.timeout(wait_s * self._random.uniform(0.5, 1.0)):
                    await self._news.wait()
            except TimeoutError:
                wait_s = min(MAX_RETRY_S, 2.0 * wait_s)
            else:
                wait_s = FIRST_RETRY_S

    async def _attempt(self, genesis: bytes, request: DispatchRequest) -> DispatchAnswer:
        record = await self._directory.find(genesis)
        if record is None:
            return TryAgain("no node of this run says that it is the master")
        contact = unpack_contact(record.contact)
        assert contact is not None  # the directory has checked it
        if contact.node_id == self._swarm.node_id:
            if self._local is None:
                self._directory.forget(record)
                return TryAgain("this node was the master before its restart")
            answer = await self._local(request)
        else:
            try:
                body = in_parts(encode(request))
                async with self._swarm.request(contact, DISPATCH, b"", body, timeout_s=ANSWER_S) as response:
                    answer = decode_answer(await gathered(response.body, MAX_MESSAGE_BYTES))
            except (TransportError, ValueError, RecursionError) as error:
                # A node that is the master again sends its record again.
                self._directory.forget(record)
                return TryAgain(f"the master {short(contact.node_id)} did not answer: {error}")
        if isinstance(answer, TryAgain):
            self._follow(record, answer.record)
        else:
            self.master = contact.node_id
        return answer

    def _follow(self, asked: MasterRecord, told: MasterRecord | None) -> None:
        """The node that was asked does not serve, or not yet; it may know who does."""
        if told is not None and told.epoch > asked.epoch and self._directory.may_serve(told):
            self._directory.note(told)

    # -- what people see -----------------------------------------------------------------------------------------

    def _note_success(self) -> None:
        if self.trouble is not None and self._has_told:
            self._log.info("dispatch_master_found", node=short(self.master or b""), after_s=round(self._since_s(), 3))
        self.trouble, self._has_told = None, False

    def _note_trouble(self, reason: str) -> None:
        now = self._clock.monotonic()
        self.trouble = Trouble(now if self.trouble is None else self.trouble.since, reason)
        if not self._has_told and self._since_s() >= TROUBLE_S:
            self._has_told = True
            self._log.warning("dispatch_master_missing", reason=reason, since_s=round(self._since_s(), 3))

    def _since_s(self) -> float:
        return 0.0 if self.trouble is None else self._clock.monotonic() - self.trouble.since
