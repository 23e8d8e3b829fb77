"""The loop of a worker: asks the server for a task, runs the program's `push`, and reports until its update counts.

A worker repeats every report of which it does not know the end, at whichever server serves. While `push` runs,
another poll goes out again and again: the lease lasts, and the server knows that the worker lives.
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server import messages
from p2pnode.training.engines.server.acceptance import ServerOptions
from p2pnode.training.engines.server.host import ScriptHost, stored_record
from p2pnode.training.engines.server.messages import Computed, HeldLease, NoServer, Poll, TaskGiven, Told
from p2pnode.training.engines.server.program import ServerContext, ServerVerbs, raise_end
from p2pnode.training.engines.server.tasks import MAX_KEYS, Name
from p2pnode.training.trainer_link.engine_messages import NotAnswered
from p2pnode.training.values.encoding import Key, ValueNotEncodable, decode_key, decode_value
from p2pnode.training.values.store import StoreUnavailable

#: Between two attempts to reach a server.
RETRY_S = 0.2
#: No server answers for so long: there is none.
NO_SERVER_S = 120.0
#: A lease is renewed so often.
RENEW_S = 1.0


async def run_worker(verbs: ServerVerbs, host: ScriptHost, options: ServerOptions, run: int = 1) -> int:
    """Work until the run is over; the number of tasks that this worker completed. Raises `VerbFailed` for the error
    that ended the run, wherever it was, `UpdatesLost`, and `NoServer`."""
    return await _Worker(verbs, host, options, run).work()


class _Worker:
    def __init__(self, verbs: ServerVerbs, host: ScriptHost, options: ServerOptions, run: int) -> None:
        self._verbs = verbs
        self._host = host
        self._settings = options.text()
        self._run = run
        self._epoch = 0
        self._server = b""
        #: Who answered last, and the version of the values then.
        self._last = b""
        self._version = 0
        #: The highest version of which a server said that the values have it.
        self._made = 0
        self._tried: dict[bytes, None] = {}
        self._reports: dict[Name, Computed] = {}
        self._completed = 0
        self._workers = 0

    async def work(self) -> int:
        while not self._host.is_stopping:
            told = await self._ask(self._poll())
            if told.refused:
                raise NoServer(f"the server {told.server.hex()[:8]} refuses this node: {told.refused}")
            self._note(told)
            if told.ended:
                raise_end(told.failure, told.lost, told.version)
                return self._completed
            if told.task is not None:
                await self._compute(told.task)
        await self._leave()
        return self._completed

    # -- what the server tells

    def _note(self, told: Told) -> None:
        self._workers = told.workers
        for task, attempt, outcome in told.outcomes:
            if outcome != "waits":
                self._reports.pop((task, attempt), None)
            self._completed += outcome == "counted"

    def _poll(self, holds: HeldLease | None = None) -> Poll:
        return Poll(self._run, self._epoch, self._settings, list(self._reports.values()), holds, made=self._made)

    # -- tasks

    async def _compute(self, given: TaskGiven) -> None:
        held = given.held
        params = [(decode_key(key), None if value is None else decode_value(value)) for key, value in given.values]
        ctx = ServerContext(self._host.surroundings, held.step, given.version, workers=self._workers)
        await self._host.announce(held.step - 1)
        async with self._host.beside(lambda: self._renew(held), RENEW_S):
            self._reports[held.task, held.attempt] = await self._host.run(lambda: self._computed(ctx, given, params))

    def _computed(self, ctx: ServerContext, given: TaskGiven, params: list[tuple[Key, Any]]) -> Computed:
        try:
            updates = self._verbs.pushed(ctx, params)
            encoded = messages.encoded_updates([(one.key, one.value) for one in updates])
        except VerbFailed as error:
            return Computed(given.held, given.version, failure=error.cause)
        except ValueNotEncodable as error:
            return Computed(given.held, given.version, failure=f"ValueNotEncodable: {error}")
        if wrong := messages.too_large(given.held.work, encoded):
            return Computed(given.held, given.version, failure=f"the {len(encoded):,} updates of push: {wrong}")
        if len(encoded) > MAX_KEYS:
            wrong = f"push returned {len(encoded):,} updates, and at most {MAX_KEYS:,} are allowed: make smaller tasks"
            return Computed(given.held, given.version, failure=wrong)
        return Computed(given.held, given.version, encoded)

    async def _renew(self, held: HeldLease) -> None:
        """Tell the server that serves now that this worker lives and is at work."""
        await self._ask_once(self._poll(held))

    # -- servers

    async def _ask(self, poll: Poll) -> Told:
        """The answer of the server that serves. Raises `NoServer` when none answers for long."""
        host = self._host
        deadline = host.clock() + NO_SERVER_S
        while not host.is_stopping:
            told = await self._ask_once(poll)
            is_new = self._run == 1 and not self._epoch and host.clock() < deadline - NO_SERVER_S + messages.LATE_S
            if told is None and not self._server and not is_new:
                told = await self._ended()
            if told is not None:
                return told
            if host.clock() >= deadline:
                raise NoServer(
                    f"no server has answered for {NO_SERVER_S:g} s: start a node with `--set node.role=server` in this "
                    f"swarm{self._lost()}"
                )
            await host.sleep(RETRY_S)
        return Told(epoch=self._epoch, server=self._server, ended="leaving")

    def _lost(self) -> str:
        """What there was, for people; nothing where no server has ever answered."""
        if not self._epoch:
            return ""
        return (
            f". The last one, {self._last.hex()[:8]}, had version {self._version} of the values; if no other server had"
            " them, they are lost, unless it starts again with its state directory"
        )

    async def _ended(self) -> Told | None:
        """What the servers' record says, if their run is over: nobody serves any more then."""
        try:
            record = await stored_record(self._host)
        except StoreUnavailable:
            return None
        if not record.ended or record.run < self._run:
            return None
        return messages.told_of_end(record)

    async def _ask_once(self, poll: Poll) -> Told | None:
        """Ask the server that is taken for the serving one; None if it is not."""
        host = self._host
        server = self._server or next((one for one in (await host.members()).servers if one not in self._tried), b"")
        if not server:
            self._tried.clear()
            return None
        try:
            told = messages.decode_told(await host.call(server, messages.encode(poll)))
        except (NotAnswered, messages.BadPoll):
            self._server = b""
            self._tried[server] = None
            return None
        self._tried.clear()
        if told.epoch:
            self._server, self._epoch = server, told.epoch
            self._last, self._version = server, told.version
            if not told.refused:  # it may serve another run
                self._made = max(self._made, told.made)
            return told
        self._server = b"" if told.server == server else told.server
        return None

    async def _leave(self) -> None:
        if self._server:
            poll = msgspec.structs.replace(self._poll(), leaves=True)
            try:
                await self._host.call(self._server, messages.encode(poll))
            except NotAnswered:
                return
