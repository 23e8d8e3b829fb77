"""The loop of a server: hears the workers, commits their updates, asks the program's `schedule`, and gives tasks.

A server that takes over from a dead one hears the workers of the commit that was under way, makes that again if it has
to (`takeover`), and goes on.

One thing at a time: while the values change no values are read, so a task and its values are of one version. A worker
that asks waits until there is something to tell, or `LONGEST_WAIT_S`. Then it sends its reports again, whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from p2pnode.training.barriers.predicates import resample_after
from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server import messages
from p2pnode.training.engines.server.acceptance import Commit, Contribution, NotWeighable, ServerOptions, updates_of
from p2pnode.training.engines.server.core import Outcome, ServerCore
from p2pnode.training.engines.server.host import ScriptHost, stored_record
from p2pnode.training.engines.server.messages import HeldLease, Poll, TaskGiven, Told
from p2pnode.training.engines.server.program import ServerContext, ServerVerbs, raise_end
from p2pnode.training.engines.server.record import (
    RECORD_KEY,
    Failure,
    ServerRecord,
    ServerReplaced,
    Takeover,
    encode_record,
)
from p2pnode.training.engines.server.tasks import Name
from p2pnode.training.trainer_link.engine_messages import CallReceived
from p2pnode.training.values.encoding import BadValue, Key, decode_key, encode_key, encode_value
from p2pnode.training.values.store import StoreUnavailable, UpdateFailed, ValueUpdate

#: A worker is answered after so long even if there is nothing to tell: it shows by its next request that it lives.
LONGEST_WAIT_S = 10.0
#: A worker that was answered and has not asked for so long is gone, whatever its node says.
SILENT_S = 20.0
#: Between two looks at the members.
MEMBERS_S = 0.5
#: A server that has stored no record for so long looks whether another one has.
CHECK_S = 2.0
#: A schedule that has no task for anybody is asked again after so long.
NO_TASK_S = 0.05
#: How long a server whose run is over answers those that have not heard of it.
STAY_S = 5.0
#: An owner of keys that does not answer is tried again for so long: its backup takes over meanwhile.
STORE_S = 60.0
STORE_PAUSE_S = 0.2


@dataclass(slots=True)
class ParkedPoll:
    """A worker that waits for an answer, and what its reports have come to."""

    asked: CallReceived
    contributions: list[Contribution]
    outcomes: dict[Name, Outcome]
    since: float
    #: It has no task.
    wants: bool = True

    def judge(self, core: ServerCore, now: float) -> None:
        """Judge the reports that wait by the present version."""
        for one in self.contributions:
            if self.outcomes[one.name] == "waits":
                self.outcomes[one.name] = core.report(one, now)

    @property
    def has_news(self) -> bool:
        """Whether it can be answered without a task."""
        return not self.wants or any(outcome != "waits" for outcome in self.outcomes.values())


class Serving:
    """One server while it serves. `made`: the highest version that it knows the values to have, from when it stood
    by. `over`: the record of a run that an earlier process of this server has ended; workers of that run hear so."""

    def __init__(
        self,
        verbs: ServerVerbs,
        host: ScriptHost,
        options: ServerOptions,
        record: ServerRecord,
        run: int,
        made: int,
        over: ServerRecord | None = None,
    ) -> None:
        self._verbs = verbs
        self._host = host
        self._options = options
        self._over = over
        self._stored = record.stored
        if record.run != run:  # another program: only the epoch and the version go on
            record = ServerRecord(epoch=record.epoch, run=run, version=max(record.version, record.pending_version))
        self._before = record
        self._takeover = Takeover(record, made)
        self._policy = options.make_policy()
        self.core = self._core(self._takeover.settled())
        self._is_settled = False
        self._recorded: set[bytes] = set()
        self._parked: dict[bytes, ParkedPoll] = {}
        self._heard: dict[bytes, float] = dict.fromkeys((one.worker for one in record.workers), host.clock())
        self._next_look = self._next_schedule = self._next_check = 0.0
        self._has_enough = bool(record.workers)
        self._is_draining = False
        self._ended = ""
        self._failure: Failure | None = None

    def _core(self, record: ServerRecord) -> ServerCore:
        rng = random.Random(self._host.surroundings.rng.getrandbits(64))
        core = ServerCore(self._options, self._policy, rng, record, self._host.node_id)
        if self._verbs.barrier is not None:
            core.own_barrier = lambda _steps, idle: [
                bytes.fromhex(one) for one in self._verbs.allowed(self._context(), [worker.hex() for worker in idle])
            ]
        return core

    def _context(self) -> ServerContext:
        steps = {worker.hex(): step for worker, step in self.core.workers.items()}
        return ServerContext(self._host.surroundings, self.core.gate.lowest(), self.core.version, steps)

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Raises `ServerReplaced`, `VerbFailed` for the error that ended the run, and `UpdatesLost`."""
        try:
            await self._store_record(self._opening_record())
            while not self._ended and not self._host.is_stopping:
                await self._hear_all(self._pause_s())
                try:
                    await self._turn()
                except VerbFailed as error:
                    keys = [encode_key(key) for key in error.keys]
                    await self._end("failed", Failure(error.verb, keys, error.node, error.step, error.cause))
        except ServerReplaced as replaced:
            for parked in self._parked.values():
                await self._answer(parked.asked, Told(epoch=0, server=replaced.record.server))
            raise
        await self._say_farewell()
        if self._ended:
            raise_end(self._failure, self.core.lost, self.core.version)
        return self.core.version

    def _opening_record(self) -> ServerRecord:
        """The record of the server before, under this epoch: its commit is not settled yet."""
        core = self.core
        return msgspec.structs.replace(self._before, epoch=core.epoch, server=core.server, run=core.run)

    def _pause_s(self) -> float:
        """Until something may happen without a request: a look at the members, or a fresh sample for idle workers."""
        if self._is_draining or not self._is_settled:
            return MEMBERS_S
        look_s = self._next_look - self._host.clock()
        return max(0.0, min(look_s, resample_after(self.core.step_seconds)) if self.core.idle() else look_s)

    async def _hear_all(self, wait_s: float) -> None:
        asked = await self._host.receive(wait_s)
        while asked is not None:
            await self._hear(asked)
            asked = await self._host.receive(0.0)

    async def _answer(self, asked: CallReceived, told: Told) -> None:
        await self._host.answer(asked, messages.encode(told))

    async def _turn(self) -> None:
        now = self._host.clock()
        if now >= self._next_look:
            self._next_look = now + MEMBERS_S
            await self._look()
        if not self._is_settled and not await self._settle():
            return
        self.core.leases.expire(now)
        self._give_up()
        while (commit := self._due(now)) is not None:
            await self._store_record(self.core.record())
            await self._make(commit)
            self.core.committed(commit)
            self._next_schedule = 0.0
        await self._host.show(self.core.gate.lowest(), self.core.counts())
        if not self._recorded >= self.core.workers.keys():
            # The next server takes tasks over from workers of the record alone.
            await self._store_record(self.core.record())
        self.core.reassign(now)
        if not self._is_draining:
            self._schedule(now)
        elif not len(self.core.leases) and not self.core.unheard:
            self.core.end()
            await self._end("stopped")
            return
        await self._answer_parked()

    def _due(self, now: float) -> Commit | None:
        for parked in self._parked.values():
            parked.judge(self.core, now)
        return self.core.due()

    def _give_up(self) -> None:
        for lease, reason in self.core.leases.given_up:
            keys = [decode_key(key) for key, _ in lease.work]
            raise VerbFailed("push", keys, lease.worker.hex(), lease.step, reason)

    async def _look(self) -> None:
        """Take leave of workers whose node is gone, or that did not ask for long. Raises `ServerReplaced`."""
        if self._host.clock() >= self._next_check:
            # Without a worker it stores nothing, and would never be refused.
            await self._check_record()
        known = list(dict.fromkeys([*self.core.workers, *self._takeover.awaited]))
        gone = dict.fromkeys((await self._host.members(known)).gone)
        now = self._host.clock()
        for worker in known:
            if worker in gone or now - self._heard.get(worker, now) > SILENT_S:
                self._takeover.gone(worker)
                self._leave(worker)

    def _leave(self, worker: bytes) -> None:
        self.core.leave(worker)
        self._heard.pop(worker, None)
        self._parked.pop(worker, None)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _hear(self, asked: CallReceived) -> None:
        try:
            poll = messages.decode_poll(asked.payload)
            contributions = [messages.contribution_of(one, asked.sender) for one in poll.reports if not one.failure]
        except (messages.BadPoll, BadValue) as error:
            await self._answer(asked, self._told(None, refused=str(error)))
            return
        if self._over is not None and 0 < poll.epoch <= self._over.epoch:
            await self._answer(asked, messages.told_of_end(self._over))
            return
        refused = self._refusal(poll)
        if refused or poll.is_standby or poll.leaves:
            if poll.leaves:
                self._leave(asked.sender)
            await self._answer(asked, self._told(None, refused=refused))
            return
        now = self._host.clock()
        self._heard[asked.sender] = now
        former = self._parked.pop(asked.sender, None)
        if former is not None:  # it asks again before it was answered, and waits for the newer answer
            await self._answer(former.asked, self._told(former))
        if self._is_settled:
            outcomes = self._note(asked.sender, poll, contributions, now)
        else:
            self._takeover.heard(asked.sender, contributions, poll.made)
            outcomes = {one.name: "waits" for one in contributions}
        self._parked[asked.sender] = ParkedPoll(asked, contributions, outcomes, now, wants=poll.holds is None)

    def _refusal(self, poll: Poll) -> str:
        if poll.run != self.core.run:
            return f"start number {self.core.run} of the program is under way here, not number {poll.run}"
        if poll.settings != self._options.text():
            return f"the server was started with {self._options.text()}, this node with {poll.settings}"
        return ""

    def _note(
        self, worker: bytes, poll: Poll, contributions: Sequence[Contribution], now: float
    ) -> dict[Name, Outcome]:
        """What becomes of a worker's reports."""
        core, at_work = self.core, [] if poll.holds is None else [messages.lease_of(poll.holds, worker, now)]
        core.join(worker)
        self._has_enough = self._has_enough or len(core.workers) >= self._options.min_workers
        for lease in [*(messages.lease_of(one.held, worker, now) for one in poll.reports), *at_work]:
            core.claim(lease, now)
        found: dict[Name, Outcome] = {one.name: core.report(one, now) for one in contributions}
        for computed in poll.reports:
            if computed.failure:
                core.leases.fail(worker, computed.held.task, computed.held.attempt, computed.failure)
                found[computed.name] = "failed"
        core.told(worker, [*found, *(lease.name for lease in at_work)])
        for lease in at_work:
            core.leases.renew(worker, lease.task, lease.attempt, now)
        return found

    # -- the commit of the server before -------------------------------------------------------------------------------

    async def _settle(self) -> bool:
        """Whether the commit that the server before had under way is in the values; make it again if need be."""
        takeover = self._takeover
        if not takeover.is_settled:
            return False
        commit = takeover.commit(self._policy)
        if commit is not None:
            await self._make(commit)
        self.core = self._core(takeover.settled())
        self._is_settled = True
        await self._store_record(self.core.record())
        parked, self._parked = self._parked, {}
        for one in parked.values():
            await self._hear(one.asked)
        return True

    # -- values --------------------------------------------------------------------------------------------------------

    async def _make(self, commit: Commit) -> None:
        """Bring a commit into the values. Raises `VerbFailed` for what a `pull` refuses."""
        step = commit.contributions[0].step
        try:
            await self._update(updates_of(commit))
        except NotWeighable as error:
            raise VerbFailed("push", [error.key], error.worker.hex(), step, str(error)) from error
        except UpdateFailed as error:
            raise VerbFailed("pull", [error.key], error.node, step, error.reason) from error

    async def _update(self, updates: Sequence[ValueUpdate]) -> None:
        """Repeats what nobody has answered: every owner knows by the timestamp what it has."""
        deadline = self._host.clock() + STORE_S
        while True:
            try:
                await self._host.store.update(updates)
                return
            except StoreUnavailable:
                if self._host.clock() >= deadline or self._host.is_stopping:
                    raise
                await self._host.sleep(STORE_PAUSE_S)

    async def _check_record(self) -> None:
        self._next_check = self._host.clock() + CHECK_S
        try:
            found = await stored_record(self._host)
        except StoreUnavailable:
            return
        if (found.epoch, found.server) != (self.core.epoch, self.core.server):
            raise ServerReplaced(found)

    async def _store_record(self, record: ServerRecord) -> None:
        """Raises `ServerReplaced` where another server has stored one since, or one of a higher epoch."""
        stamp = max(record.version, record.pending_version)
        self._stored += 1
        record = msgspec.structs.replace(record, stored=self._stored)
        try:
            await self._update([ValueUpdate(RECORD_KEY, encode_record(record), stamp)])
            self._recorded = {one.worker for one in record.workers}
            self._next_check = self._host.clock() + CHECK_S
        except UpdateFailed:
            found = await stored_record(self._host)
            if (found.epoch, found.server) != (record.epoch, record.server):
                raise ServerReplaced(found) from None
            raise

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _schedule(self, now: float) -> None:
        if not self._has_enough or now < self._next_schedule or self.core.leases.orphans():
            return
        passed = self.core.passed(now)
        if not passed:
            return
        ctx = self._context()
        if self._verbs.stops(ctx):
            self._is_draining = True
            return
        given = self._verbs.assigned(ctx, [worker.hex() for worker in passed])
        for worker in passed:
            if (work := given.get(worker.hex())) is not None:
                self.core.give(worker, work, now)
            else:
                self.core.skip(worker)
        if not given:
            self._next_schedule = now + NO_TASK_S

    async def _answer_parked(self) -> None:
        """Answer all to whom there is something to tell."""
        now = self._host.clock()
        tasks: dict[bytes, HeldLease] = {}
        for worker, parked in self._parked.items():
            lease = self.core.leases.of(worker)
            if lease is not None and parked.wants:
                tasks[worker] = messages.held_by(lease)
        values = await self._values(tasks)
        for worker, task in tasks.items():
            if wrong := messages.task_too_large(task, values):
                raise VerbFailed("schedule", [decode_key(key) for key, _ in task.work], worker.hex(), task.step, wrong)
        for worker, parked in list(self._parked.items()):
            given = tasks.get(worker)
            if given is not None or parked.has_news or now - parked.since >= LONGEST_WAIT_S:
                del self._parked[worker]
                self._heard[worker] = now
                await self._answer(parked.asked, self._told(parked, given, values))

    async def _values(self, tasks: dict[bytes, HeldLease]) -> dict[Key, bytes]:
        wanted = dict.fromkeys(decode_key(key) for task in tasks.values() for key, own in task.work if own is None)
        if not wanted:
            return {}
        found = await self._host.store.get_many(list(wanted))
        return {key: encode_value(key, one.value, 1 << 31) for key, one in found.items()}

    def _told(
        self,
        parked: ParkedPoll | None,
        task: HeldLease | None = None,
        values: dict[Key, bytes] | None = None,
        refused: str = "",
    ) -> Told:
        given = None
        if task is not None:
            sent = [(key, (values or {}).get(decode_key(key)) if own is None else own) for key, own in task.work]
            given = TaskGiven(task, self.core.version, sent)
        return Told(
            epoch=self.core.epoch,
            server=self.core.server,
            version=self.core.version,
            outcomes=[] if parked is None else [(*name, outcome) for name, outcome in parked.outcomes.items()],
            task=given,
            ended=self._ended,
            failure=self._failure,
            refused=refused,
            workers=len(self.core.workers),
            made=self.core.made if self._is_settled else self._before.version,
            lost=self.core.lost if self._ended else 0,
        )

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _end(self, ended: str, failure: Failure | None = None) -> None:
        self._ended, self._failure = ended, failure
        record = self.core.record(ended, failure)
        await self._store_record(msgspec.structs.replace(record, pending=[], pending_version=0))

    async def _say_farewell(self) -> None:
        """Tell all of the end, while there is somebody to tell."""
        host = self._host
        servers = (await host.members()).servers
        missing = dict.fromkeys([*self.core.workers, *(one for one in servers if one != host.node_id)])
        for worker, parked in self._parked.items():
            await self._answer(parked.asked, self._told(parked))
            missing.pop(worker, None)
        self._parked.clear()
        deadline = host.clock() + STAY_S
        while missing and (left_s := deadline - host.clock()) > 0 and self._ended:
            asked = await host.receive(min(left_s, MEMBERS_S))
            if asked is not None:
                await self._answer(asked, self._told(None))
                missing.pop(asked.sender, None)
            else:
                for gone in (await host.members(list(missing))).gone:
                    missing.pop(gone, None)
