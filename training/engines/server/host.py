"""What the loops of server and worker need of their node: it asks the daemon over the link, and never suspends. Tests
have hosts of the same methods on a virtual clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from p2pnode.training.engines.link import EngineLink, NoNode
from p2pnode.training.engines.server.record import RECORD_KEY, ServerRecord, decode_record
from p2pnode.training.engines.values_link import Script, immediate
from p2pnode.training.trainer_link.engine_messages import (
    CallAnswered,
    Called,
    CallNode,
    CallReceived,
    CountStep,
    ListMembers,
    MembersFound,
    TaskCounts,
)

Result = TypeVar("Result")
#: Between two messages about tasks that are under way.
SHOW_S = 0.25


class ScriptHost:
    """One node: a server, which alone receives requests and shows tasks, or a worker."""

    def __init__(self, link: EngineLink, node_id: bytes, script: Script) -> None:
        self.node_id = node_id
        self.store = self.surroundings = script
        self._link = link
        self._announced = (-1, 0.0)
        self._shown: TaskCounts | None = None
        self._shown_s = -SHOW_S

    @property
    def is_stopping(self) -> bool:
        """Whether the node leaves."""
        return self._link.is_stopping

    def clock(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - nothing else runs in this thread

    async def members(self, nodes: Sequence[bytes] = ()) -> MembersFound:
        """The servers, in the order of their ids, this node included if it is one; and which of `nodes` are gone."""
        found = self._link.ask(ListMembers(list(nodes)))
        assert isinstance(found, MembersFound)
        return found

    async def announce(self, step: int) -> None:
        """Show the completed steps in the node's heartbeat."""
        before, at = self._announced
        if step > before:
            now = self.clock()
            self._announced = step, now
            self._link.ask(CountStep(step, now - at if before >= 0 else 0.0))

    async def call(self, node: bytes, payload: bytes) -> bytes:
        """Ask a server. Raises `NotAnswered`."""
        found = self._link.ask(CallNode(node, payload))
        assert isinstance(found, Called)
        return found.payload

    async def show(self, step: int, counts: TaskCounts) -> None:
        """As `announce`, with what has become of the tasks in the node's status."""
        await self.announce(step)
        now = self.clock()
        is_due = now - self._shown_s >= SHOW_S or not counts.held + counts.waiting
        if counts != self._shown and is_due:
            self._shown, self._shown_s = counts, now
            self._link.ask(counts)

    async def receive(self, timeout_s: float) -> CallReceived | None:
        """The next request; None after so many seconds."""
        return self._link.next_call(timeout_s)

    async def answer(self, call: CallReceived, payload: bytes) -> None:
        """Answer a request."""
        self._link.answer(CallAnswered(call.number, payload))

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a function of the program, which takes as long as it takes."""
        return work()

    @asynccontextmanager
    async def beside(self, work: Callable[[], Coroutine[Any, Any, None]], every_s: float) -> AsyncIterator[None]:
        """Run `work` every so many seconds beside what the block does; at its end the last one has ended too."""
        over = threading.Event()

        def repeat() -> None:
            while not over.wait(every_s):
                try:
                    immediate(work())
                except NoNode:
                    return

        thread = threading.Thread(target=repeat, name="p2pnode-alive", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


async def stored_record(host: ScriptHost) -> ServerRecord:
    """The servers' record as it is in the values. Raises `StoreUnavailable`."""
    return decode_record((await host.store.get_many([RECORD_KEY])).get(RECORD_KEY))
