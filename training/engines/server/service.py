"""The loop of a server: hears the workers, commits their updates, asks the program's `schedule`, and gives tasks.

A server that takes over from a dead one hears the workers of the commit that was under way, makes that again if it has
to (`takeover`), and goes on.

One thing at a time: while the values change no values are read, so a task and its values are of one version. A worker
that asks waits until there is something to tell, or `LONGEST_WAIT_S`.
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
from p2pnode.training.engines.server.core import (
    RECORD_KEY,
    Failure,
    Name,
    Outcome,
    ServerCore,
    ServerRecord,
    ServerReplaced,
    Work,
    encode_record,
)
from p2pnode.training.engines.server.host import ScriptAsked, ScriptHost, stored_record
from p2pnode.training.engines.server.messages import HeldLease, Poll, TaskGiven, Told
from p2pnode.training.engines.server.program import RunFailed, ServerContext, ServerVerbs, raise_end
from p2pnode.training.engines.server.takeover import Takeover
from p2pnode.training.engines.server.tasks import LeasedTask
from p2pnode.training.values.encoding import BadValue, Key, decode_key, encode_key, encode_value
from p2pnode.training.values.store import StoreUnavailable, UpdateFailed, ValueUpdate

#: A worker is answered after so long even if there is nothing to tell: it shows that the server lives.
LONGEST_WAIT_S = 1.0
#: Nobody asked for so long: the worker is gone, whatever its node says. It asks at least every `LONGEST_WAIT_S`.
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
#: Outcomes of reports that are not committed yet.
OPEN: tuple[Outcome, ...] = ("waits", "kept")


@dataclass(slots=True)
class ParkedPoll:
    """A worker that waits for an answer, and what its reports had come to when it asked."""

    asked: ScriptAsked
    poll: Poll
    outcomes: list[tuple[int, int, Outcome]]
    since: float

    def has_news(self, core: ServerCore, worker: bytes) -> bool:
        """Whether it can be answered without a task."""
        return not self.poll.wants or any(outcome not in OPEN for *_, outcome in self.fates(core, worker))

    def names(self, lease: LeasedTask[Work]) -> bool:
        """Whether the worker says that it is at work on this task."""
        held = self.poll.holds
        return held is not None and (held.task, held.attempt) == (lease.task, lease.attempt)

    def fates(self, core: ServerCore, worker: bytes) -> list[tuple[int, int, Outcome]]:
        """What has become of its reports by now."""
        found: list[tuple[int, int, Outcome]] = []
        for task, attempt, outcome in self.outcomes:
            now = core.repeated(worker, (task, attempt)) if outcome in OPEN else outcome
            found.append((task, attempt, outcome if now == "unknown" else now))
        return found


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
        options, host = self._options, self._host
        core = ServerCore(
            options.make_barrier(),
            self._policy,
            options.rules(),
            random.Random(host.surroundings.rng.getrandbits(64)),
            record,
            server=host.node_id,
            sample=options.sample,
            max_report_count=options.max_report_count,
        )
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
                except RunFailed as failed:
                    await self._end("failed", failed.failure)
                except VerbFailed as error:
                    keys = [encode_key(key) for key in error.keys]
                    await self._end("failed", Failure(error.verb, keys, error.node, error.step, error.cause))
        except ServerReplaced as replaced:
            for parked in self._parked.values():
                await parked.asked.answer(messages.encode(Told(epoch=0, server=replaced.record.server)))
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

    async def _turn(self) -> None:
        now = self._host.clock()
        if now >= self._next_look:
            self._next_look = now + MEMBERS_S
            await self._look()
        if not self._is_settled and not await self._settle():
            return
        self.core.leases.expire(now)
        self._give_up()
        while (commit := self.core.due()) is not None:
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

    def _give_up(self) -> None:
        for lease, reason in self.core.leases.given_up:
            keys = [key for key, _ in lease.work]
            raise RunFailed(Failure("push", keys, lease.worker.hex(), lease.step, reason))

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

    async def _hear(self, asked: ScriptAsked) -> None:
        try:
            poll = messages.decode_poll(asked.payload)
            contributions = [messages.contribution_of(one, asked.sender) for one in poll.reports if not one.failure]
        except (messages.BadPoll, BadValue) as error:
            await asked.answer(messages.encode(self._told(None, refused=str(error))))
            return
        if self._over is not None and 0 < poll.epoch <= self._over.epoch:
            await asked.answer(messages.encode(messages.told_of_end(self._over)))
            return
        refused = self._refusal(poll)
        if refused or poll.is_standby or poll.leaves:
            if poll.leaves:
                self._leave(asked.sender)
            await asked.answer(messages.encode(self._told(None, refused=refused)))
            return
        now = self._host.clock()
        self._heard[asked.sender] = now
        await self._replace_parked(asked.sender)
        if unknown := self._unknown(asked.sender, poll):
            parked = ParkedPoll(asked, poll, [(*name, "unknown") for name in unknown], now)
            await asked.answer(messages.encode(self._told(parked)))
            return
        if not self._is_settled:
            self._takeover.heard(asked.sender, contributions, poll.made)
            outcomes: list[tuple[int, int, Outcome]] = [(*one.name, "waits") for one in contributions]
            self._parked[asked.sender] = ParkedPoll(asked, poll, outcomes, now)
            return
        self._parked[asked.sender] = ParkedPoll(asked, poll, self._note(asked.sender, poll, contributions, now), now)

    async def _replace_parked(self, worker: bytes) -> None:
        """A worker asks again before it was answered: it waits for the newer answer."""
        parked = self._parked.pop(worker, None)
        if parked is not None:
            await parked.asked.answer(messages.encode(self._told(parked)))

    def _unknown(self, worker: bytes, poll: Poll) -> list[Name]:
        """The reports that came by name and are not here: of another epoch, or of a worker that counted as gone."""
        is_other = poll.epoch != self.core.epoch or not self._is_settled
        return [name for name in poll.kept if is_other or self.core.repeated(worker, name) == "unknown"]

    def _refusal(self, poll: Poll) -> str:
        if poll.run != self.core.run:
            return f"start number {self.core.run} of the program is under way here, not number {poll.run}"
        if poll.settings != self._options.text():
            return f"the server was started with {self._options.text()}, this node with {poll.settings}"
        return ""

    def _note(
        self, worker: bytes, poll: Poll, contributions: Sequence[Contribution], now: float
    ) -> list[tuple[int, int, Outcome]]:
        """What becomes of a worker's reports."""
        core = self.core
        core.join(worker)
        self._has_enough = self._has_enough or len(core.workers) >= self._options.min_workers
        for held in [*(one.held for one in poll.reports), *([] if poll.holds is None else [poll.holds])]:
            core.claim(messages.lease_of(held, worker, now), now)
        found: dict[Name, Outcome] = {one.name: core.report(one, now) for one in contributions}
        found |= {name: core.repeated(worker, name) for name in poll.kept}
        for computed in poll.reports:
            if computed.failure:
                core.leases.fail(worker, computed.held.task, computed.held.attempt, computed.failure)
                found[computed.name] = "failed"
        core.told(worker, [*found, *([] if poll.holds is None else [(poll.holds.task, poll.holds.attempt)])])
        if poll.holds is not None:
            held = poll.holds
            if not core.leases.renew(worker, held.task, held.attempt, now):
                found[held.task, held.attempt] = "superseded"
        return [(*name, outcome) for name, outcome in found.items()]

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
        """Bring a commit into the values. Raises `RunFailed` for what a `pull` refuses."""
        try:
            updates = updates_of(commit)
            await self._update(updates)
        except NotWeighable as error:
            step = commit.contributions[0].step
            raise RunFailed(Failure("push", [encode_key(error.key)], error.worker.hex(), step, str(error))) from error
        except UpdateFailed as error:
            failure = Failure("pull", [encode_key(error.key)], error.node, commit.contributions[0].step, error.reason)
            raise RunFailed(failure) from error

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
            if lease is not None and parked.poll.wants and not parked.names(lease):
                tasks[worker] = messages.held_by(lease)
        values = await self._values(tasks)
        for worker, task in tasks.items():
            if wrong := messages.task_too_large(task, values):
                raise RunFailed(Failure("schedule", [key for key, _ in task.work], worker.hex(), task.step, wrong))
        for worker, parked in list(self._parked.items()):
            given = tasks.get(worker)
            if given is not None or parked.has_news(self.core, worker) or now - parked.since >= LONGEST_WAIT_S:
                del self._parked[worker]
                await parked.asked.answer(messages.encode(self._told(parked, worker, given, values)))

    async def _values(self, tasks: dict[bytes, HeldLease]) -> dict[Key, bytes]:
        wanted = dict.fromkeys(decode_key(key) for task in tasks.values() for key, own in task.work if own is None)
        if not wanted:
            return {}
        found = await self._host.store.get_many(list(wanted))
        return {key: encode_value(key, one.value, 1 << 31) for key, one in found.items()}

    def _told(
        self,
        parked: ParkedPoll | None,
        worker: bytes = b"",
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
            outcomes=[] if parked is None else parked.fates(self.core, worker),
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
            await parked.asked.answer(messages.encode(self._told(parked, worker)))
            missing.pop(worker, None)
        self._parked.clear()
        deadline = host.clock() + STAY_S
        while missing and (left_s := deadline - host.clock()) > 0 and self._ended:
            asked = await host.receive(min(left_s, MEMBERS_S))
            if asked is not None:
                await asked.answer(messages.encode(self._told(None)))
                missing.pop(asked.sender, None)
            else:
                for gone in (await host.members(list(missing))).gone:
                    missing.pop(gone, None)
