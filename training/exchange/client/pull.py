"""Pulls changed shards from all owners at once and writes them into the replica.

The shards that were updated longest ago come first, so that on a link too slow for the whole vector all are updated in
turn. A pull continues where the previous one was cut off. It waits as long as something moves. Shards that are still
missing when all of them have been silent for its limit are reported: the step continues with their older copy.

A joiner waits for the whole vector. What the owners do not serve comes from other members
(`training.exchange.client.joiner_relief`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from overlay.peers import Contact
from overlay.transport import TransportError
from training.cooperative import VALUES_PER_TURN, light
from training.encoding import codecs
from training.encoding.frames import BadFrame, FrameReader, Part, ReusedMemory, read_encoded
from training.encoding.pull_codecs import follows_chains, whole_codec
from training.exchange.client.follower import ChainFollower
from training.exchange.client.joiner_relief import JoinerRelief
from training.exchange.client.outbox import FIRST_RETRY_S, MAX_RETRY_S
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Pull, PullAnswer, PullResult, Wanted
from training.exchange.owner.final_values import FinalValues
from training.exchange.owner.publishing import Publisher
from training.exchange.owner.validation import ShardInspector
from training.exchange.step_wait import Obstacles, StepWait, together
from training.exchange.store.replica import NO_POSITION, Position
from training.exchange.terms import MAX_BELIEVED, ZERO_TERM, Term
from training.shards.delta_range import MAX_STATE_LENGTH, has_length

#: Wanted instead of what this node has: whatever the owner has is new.
_NONE = (ZERO_TERM, 0)

#: Of float32.
VALUE_BYTES = 4
#: Own values copied at once: half a millisecond.
VALUES_PER_COPY = 2 * VALUES_PER_TURN


@dataclass(frozen=True, slots=True)
class PullReport:
    """Shards that changed, that were up to date, and that did not arrive in time."""

    changed: int
    unchanged: list[int]
    missing: list[int]


@dataclass(slots=True)
class Job:
    """One pull: the shards it waits for, and how many have changed so far."""

    step: int
    waiting: dict[int, None]
    is_joiners: bool
    wait: StepWait
    is_final: bool = False
    changed: int = 0
    unchanged: list[int] = field(default_factory=list)
    #: Monotonic seconds.
    began: float = 0.0
    #: How many answers are being received.
    receiving: int = 0

    @contextmanager
    def receives(self) -> Iterator[None]:
        """An answer has begun, and is being received within the context."""
        self.receiving += 1
        try:
            yield
        finally:
            self.receiving -= 1


class PullClient:
    """Keeps this node's replica of the vector."""

    def __init__(
        self,
        context: ExchangeContext,
        directory: OwnerDirectory,
        final_values: FinalValues,
        publisher: Publisher,
        inspector: ShardInspector,
    ) -> None:
        self._context = context
        self._inspector = inspector
        self._publisher = publisher
        self._final_values = final_values
        self._swarm = context.swarm
        self._store = context.store
        self._replica = context.replica
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._counters = context.counters
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._directory = directory
        #: Why shards do not arrive.
        self.obstacles = Obstacles()
        self._follower = ChainFollower(context.store, context.replica, context.counters, context.environment)
        #: The number of the last update of each shard, counted over all shards.
        self._updates: dict[int, int] = {}
        self._update_count = 0
        self._download: Job | None = None

    @property
    def download(self) -> tuple[int, int, float] | None:
        """A joiner's pull that is under way: bytes of the vector that are there, all of them, and the seconds since it
        began; None without one."""
        if self._download is None:
            return None
        bounds = self._store.bounds
        missing = sum(bounds[shard][1] - bounds[shard][0] for shard in self._download.waiting)
        values = bounds[-1][1] if bounds else 0
        return VALUE_BYTES * (values - missing), VALUE_BYTES * values, self._clock.monotonic() - self._download.began

    async def pull(self, step: int, *, deadline_s: float | None, is_final: bool = False) -> PullReport:
        """Fetch every shard that changed, as of a node that has passed the barrier of `step`.

        A final pull fetches every shard, as float32, in bits that every other node gets too.

        `deadline_s` bounds silence: the pull ends when nothing of any missing shard has moved for so long, and never
        while one moves. With None it waits until all are there: a joiner cannot train on half a vector. Its frames
        carry checksums, because all its training builds on them.
        """
        self._run.pass_barrier(step)
        # Promise 3.
        if deadline_s is not None and not (is_final or self._context.synchronous) and self._directory.is_apart():
            return PullReport(0, [], list(range(len(self._store))))
        if not is_final:
            for shard, published in self._publisher.take_handed_on().items():
                await self._follower.enter(shard, published)
        waiting = dict.fromkeys(range(len(self._store)))
        wait = StepWait(deadline_s)
        began = self._clock.monotonic()
        job = Job(step, waiting, is_joiners=deadline_s is None, is_final=is_final, wait=wait, began=began)
        self._download = job if job.is_joiners else None
        work = asyncio.ensure_future(self._fetch_for_joiner(job) if job.is_joiners else self._fetch_all(job))
        try:
            if not await wait.until(work):
                self._log.warning("pull_unfinished", step=step, shards=len(waiting))
        finally:
            self._download = None
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        if not work.cancelled():
            work.result()
        missing = list(waiting)
        unexplained = [shard for shard in missing if shard not in self.obstacles]
        for owner, shards in self._directory.by_owner(unexplained)[0]:
            self.obstacles.note(shards, owner, "has not answered yet", began)
        return PullReport(job.changed, job.unchanged, missing)

    async def _fetch_for_joiner(self, job: Job) -> None:
        """Fetch everything from the owners, and what they do not serve from others too; the first answer counts."""

        async def copies(donor: Contact, shards: list[int]) -> None:
            await self._fetch(donor, shards, job, takes_copies=True)

        shards = list(job.waiting)
        owners, _ = self._directory.by_owner(shards)
        # Promise 2.
        relief = JoinerRelief(
            swarm=self._swarm,
            store=self._store,
            view=self._view,
            directory=self._directory,
            environment=self._context.environment,
            waiting=job.waiting,
            is_receiving=lambda: job.receiving > 0,
            fetch=copies,
        )
        works = [
            asyncio.ensure_future(self._fetch_parts(shards, job)),
            asyncio.ensure_future(relief.run([theirs for _, theirs in owners])),
        ]
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _fetch_all(self, job: Job) -> None:
        """Fetch from all owners at once; those first that were updated longest ago."""
        await self._fetch_parts(sorted(job.waiting, key=lambda shard: self._updates.get(shard, 0)), job)

    async def _fetch_parts(self, shards: list[int], job: Job) -> None:
        groups, unknown = self._directory.by_owner(shards)
        parts = [theirs for _, theirs in groups] + ([unknown] if unknown else [])
        await together(self._fetch_some(part, job) for part in parts)

    async def _fetch_some(self, shards: list[int], job: Job) -> None:
        """Fetch the shards of one owner, and again from whoever owns them then; no other owner is waited for."""
        pause_s = FIRST_RETRY_S
        while left := [shard for shard in shards if shard in job.waiting]:
            groups, unknown = self._directory.by_owner(left)
            unexplained = [shard for shard in unknown if shard not in self.obstacles]
            self.obstacles.note(unexplained, None, "no owner is known", self._clock.monotonic())
            if len(groups) + bool(unknown) > 1:
                await self._fetch_parts(left, job)
                return
            for owner, theirs in groups:
                await self._fetch(owner, theirs, job)
            after = [shard for shard in left if shard in job.waiting]
            if len(after) < len(left):
                pause_s = FIRST_RETRY_S
            pause_s = await self._pause(after, pause_s)

    async def _pause(self, shards: list[int], pause_s: float) -> float:
        """Before another attempt: wait, and look for other owners; returns the next pause."""
        if not shards:
            return pause_s
        await asyncio.sleep(pause_s * self._context.jitter())
        await self._directory.refresh(shards)
        return min(2 * pause_s, MAX_RETRY_S)

    def _settle(self, shard: int, job: Job, *, changed: bool) -> None:
        """A shard is up to date; this stays so if the pull is cut off later."""
        self.obstacles.clear(shard)
        if shard in job.waiting:
            del job.waiting[shard]
            if changed:
                job.changed += 1
            else:
                job.unchanged.append(shard)
        self._update_count += 1
        self._updates[shard] = self._update_count

    async def _fetch(self, owner: Contact, shards: list[int], job: Job, *, takes_copies: bool = False) -> None:
        if owner.node_id == self._swarm.node_id:
            await self._copy_own(shards, job)
            return
        # The same term and version as another node's copy do not make it the same bits.
        message, asked_s = self._message(shards, job, takes_copies=takes_copies), self._clock.monotonic()
        try:
            async with self._rpc.request("pull", owner, message) as answer, AsyncExitStack() as stack:
                results = self._rpc.decoded(owner, answer.head, PullAnswer).results
                stack.enter_context(job.receives())
                asked = dict.fromkeys(shards)
                reader = FrameReader(answer.body)
                memory = ReusedMemory()
                coming = tuple(result.shard for result in results if result.status in ("value", "copy", "changes"))
                key = owner.node_id, coming
                stack.enter_context(job.wait.watching(key, _received_since(answer.body)))
                for result in results:
                    if result.shard not in asked:
                        raise BadFrame(f"shard {result.shard} was not asked for")
                    # Promise 7.
                    plausible = self._store.ownership.is_plausible
                    if not (plausible(result.term) and plausible(result.rank_term)):
                        raise BadFrame(f"shard {result.shard} under term {result.term.number}")
                    if max(result.version, result.published) >= MAX_BELIEVED:
                        raise BadFrame(f"shard {result.shard} in version {result.version}")
                    self._directory.answered(owner, [result])
                    if result.status in ("later", "retry"):
                        self.obstacles.note([result.shard], owner, f"answers {result.status!r}", asked_s)
                    if result.status == "same" and self._follower.is_same(result):
                        self._settle(result.shard, job, changed=False)
                    if result.status == "changes" or (result.status == "value" and result.chain):
                        await self._follow(owner, reader, memory, result, job)
                        if result.shard not in job.waiting:
                            job.wait.note()
                    if result.status not in ("value", "copy") or result.chain:
                        continue
                    size = self._store.size(result.shard)
                    encoded, codec = await read_encoded(
                        reader, result.shard, Part.VALUE, size, memory, has_checksum=job.is_joiners
                    )
                    self._counters.bytes_received += len(encoded)
                    await self._context.turns.take(light(size))
                    # Promise 7.
                    if codec not in ("float32", "bfloat16") or not codecs.is_within(encoded, codec, MAX_STATE_LENGTH):
                        raise BadFrame(f"shard {result.shard} has values out of range")
                    term = result.term
                    if term < self._store.ownership.fence(result.shard):
                        continue  # promise 1: this owner was replaced; the next round asks for the higher term
                    is_copy = result.status == "copy"
                    if is_copy and result.shard not in job.waiting:
                        continue  # the owner was faster
                    with self._replica.writing(result.shard) as values:
                        codecs.decode(encoded, codec, values)
                        # A copy's version does not show which deltas it has: with 0 the next pull fetches the shard.
                        self._replica.set_version(result.shard, result.rank_term, 0 if is_copy else result.version)
                    if not is_copy:
                        self._store.note_owner(result.shard, term, owner)
                    self._settle(result.shard, job, changed=True)
                    job.wait.note()
        except TransportError as error:
            self._note_obstacle(owner, shards, error.detail, job, asked_s, is_copy=takes_copies)
            self._directory.failed(owner, error)
        except BadFrame as error:
            self._note_obstacle(owner, shards, f"bad answer: {error}", job, asked_s, is_copy=takes_copies)
            self._view.score.nonsense(owner.node_id, "value")
            self._log.warning("bad_pull_answer", owner=owner.node_id.hex()[:8], reason=str(error))

    def _note_obstacle(
        self, owner: Contact, shards: list[int], reason: str, job: Job, asked_s: float, *, is_copy: bool
    ) -> None:
        if not is_copy:
            self.obstacles.note([shard for shard in shards if shard in job.waiting], owner, reason, asked_s)

    def _message(self, shards: list[int], job: Job, *, takes_copies: bool) -> Pull:
        settings, pushed, wanted = self._context.settings, self._context.codec.codec, []
        follows = follows_chains(settings, pushed) and not job.is_final
        for shard in shards:
            # The same term and version as another node's copy do not make it the same bits.
            term, version = _NONE if job.is_final else self._replica.version_of(shard)
            # A joiner builds everything on what it is sent: it takes the whole.
            position = self._replica.position_of(shard) if follows and not job.is_joiners else NO_POSITION
            wanted.append(_wanted(shard, term, version, position))
        return Pull(
            job.step,
            "bfloat16" if not job.is_final and whole_codec(settings, pushed) == "bfloat16" else "float32",
            wanted,
            self._store.ownership.stale_fences(shards),
            job.is_joiners,
            takes_copies,
            job.is_final,
            follows,
        )

    async def _follow(
        self, owner: Contact, reader: FrameReader, memory: ReusedMemory, result: PullResult, job: Job
    ) -> None:
        """Take the published value of a shard, or its changes; what does not fit is asked for again."""
        arrays, payload_bytes = await self._follower.read(reader, result, memory, has_checksum=job.is_joiners)
        self._counters.bytes_received += payload_bytes
        if result.term < self._store.ownership.fence(result.shard):
            return  # promise 1: this owner was replaced; the next round asks for the higher term
        if await self._follower.take(result, arrays):
            self._store.note_owner(result.shard, result.term, owner)
            self._settle(result.shard, job, changed=True)

    async def _copy_own(self, shards: list[int], job: Job) -> None:
        """Copy the shards owned here into the replica, and yield to the event loop every half a millisecond.

        What is added to a shard during the copy has another version, and comes with the next pull.
        """
        # Promise 11.
        if job.is_final:
            await self._final_values.prepare(shards, job.step)
        turns, store, replica = self._context.turns, self._store, self._replica
        versions, synchronous = replica.shard_versions, self._context.synchronous
        for shard in shards:
            owned = store.owned.get(shard)
            if owned is None or (job.is_final and not self._final_values.is_final(shard)):
                continue
            if synchronous:
                store.fold(shard, job.step)
            value, mark = owned.state.value, (owned.rank_term, owned.state.version)
            is_new, is_good = job.is_final or versions[shard] != mark, True
            if is_new:
                with replica.writing(shard) as values:
                    if values.size > VALUES_PER_COPY:
                        replica.doubt(shard)  # a pull that is cut off leaves a part of it
                    for first in range(0, values.size, VALUES_PER_COPY):
                        part = slice(first, min(first + VALUES_PER_COPY, values.size))
                        await turns.take(light(part.stop - first))
                        if not has_length(value[part], MAX_STATE_LENGTH):
                            is_good = False  # the trainer never sees such values
                            break
                        values[part] = value[part]
                    else:
                        replica.set_version(shard, *mark)
            # Promise 7.
            if not is_good:
                self._inspector.resign(shard)
                continue
            self._settle(shard, job, changed=is_new)


def _wanted(shard: int, term: Term, version: int, position: Position) -> Wanted:
    return Wanted(shard, term, version, position.chain, position.published)


def _received_since(body: Any) -> Callable[[], int]:
    """The bytes of a body that have arrived since now; always 0 for one that does not count them."""
    before = getattr(body, "received_bytes", 0)
    return lambda: getattr(body, "received_bytes", before) - before
