"""Pulls changed shards from all owners at once and writes them into the replica.

The shards that were updated longest ago come first, so that on a link too slow for the whole vector all are updated in
turn. A pull continues where the previous one was cut off. It ends when no byte of any missing shard has arrived for its
time limit. It reports the shards that are still missing then, and the step continues with their older copy.

A joiner waits for the whole vector. It asks other members for the missing shards in two cases: half of the owners have
sent all of theirs, and the rest take as long again; or no owner sends anything for a while. Shards without a known
owner are waited for: the swarm is being started again, and which copy it will continue with is not known yet. A copy
may lack the latest deltas; the joiner pulls the shard again from its owner after the first step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.cooperative import light
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codec_choice import CodecChoice
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import BadFrame, FrameReader, Part, ReusedMemory, read_encoded
from p2pnode.training.encoding.pull_codecs import follows_changes, whole_codec
from p2pnode.training.encoding.table import CODECS
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.messages import Pull, PullAnswer, PullResult, Wanted
from p2pnode.training.exchange.owner.final_values import FinalValues
from p2pnode.training.exchange.owner.publishing import Publisher
from p2pnode.training.exchange.owner.validation import ShardInspector
from p2pnode.training.exchange.published import Follower
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RunState, SwarmView
from p2pnode.training.exchange.store.replica import NO_POSITION, Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_BELIEVED, ZERO_TERM
from p2pnode.training.exchange.timeouts import Obstacles, StepWait
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.agreement import Agreement
from p2pnode.training.shards.delta_range import MAX_STATE_LENGTH
from p2pnode.training.swarm import Swarm

#: Of float32.
VALUE_BYTES = 4
#: Owners that are slow or silent have at least this long before a joiner asks others; it looks this often.
MIN_OWNERS_TIME_S = 2.0
LOOK_INTERVAL_S = 0.05
#: Members asked for one shard before the owners get their time again.
DONORS_ASKED = 4


@dataclass(frozen=True, slots=True)
class PullReport:
    """How many shards changed, which were up to date, and which did not arrive in time."""

    changed: int
    unchanged: list[int]
    missing: list[int]


@dataclass(slots=True)
class Job:
    """One pull: its missing shards in order, and how many have changed so far. `began`: in monotonic seconds."""

    step: int
    missing: dict[int, None]
    wait: StepWait
    began: float
    is_joiners: bool
    is_final: bool
    changed: int = 0
    unchanged: list[int] = field(default_factory=list)
    #: How many answers are being received.
    receiving: int = 0


@dataclass(eq=False)
class PullClient:
    """Keeps this node's replica of the vector up to date."""

    swarm: Swarm
    store: ShardStore
    replica: Replica
    run: RunState
    view: SwarmView
    rpc: ExchangeRpc
    directory: OwnerDirectory
    final_values: FinalValues
    inspector: ShardInspector
    environment: Environment
    settings: ExchangeSettings
    codec: CodecChoice
    publisher: Publisher

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._log = self.environment.log
        #: Why requests for shards are in vain.
        self.obstacles = Obstacles()
        #: How much this node's deltas agree with the others'.
        self.agreement = Agreement()
        self._follower = Follower(
            self.store, self.replica, self.run.counters, self.rpc.turns, self.agreement, self.environment
        )
        #: All shards, those first that were updated longest ago.
        self._order = dict.fromkeys(range(len(self.store)))
        self._joiners_job: Job | None = None

    @property
    def download(self) -> tuple[int, int, float] | None:
        """A joiner's pull in progress: bytes of the vector that have arrived, all of them, and the seconds since it
        began; None without one."""
        if self._joiners_job is None:
            return None
        bounds = self.store.bounds
        missing = sum(bounds[shard][1] - bounds[shard][0] for shard in self._joiners_job.missing)
        values = bounds[-1][1] if bounds else 0
        return VALUE_BYTES * (values - missing), VALUE_BYTES * values, self._clock.monotonic() - self._joiners_job.began

    async def pull(
        self, step: int, *, silence_s: float | None, is_final: bool = False, sent: Vector | None = None
    ) -> PullReport:
        """Fetch every shard that changed. Under bsp owners add the deltas up to `step` first: its barrier has passed.

        A final pull fetches every shard, as float32, in bits that every other node gets too.

        The pull ends when nothing of any missing shard has moved for `silence_s`, and never while one moves. None is
        for a joiner, which cannot train on half a vector: it waits until all are there.

        `sent`: this node's last delta, `float32[total]`, if what changes is to be compared with it (`agreement`).
        """
        self.run.pass_barrier(step)
        self.agreement.begin_step(sent)
        # Promise 3 (docs/faults.md): nobody waits for owners that are out of reach.
        if silence_s is not None and not (is_final or self.store.synchronous) and self.directory.is_apart():
            return PullReport(0, [], list(range(len(self.store))))
        for shard, published in self.publisher.take_left().items():
            if shard not in self.store.owned:
                await self._follower.enter(shard, published)
        began, is_joiners = self._clock.monotonic(), silence_s is None
        job = Job(step, dict.fromkeys(self._order), StepWait(silence_s), began, is_joiners, is_final)
        self._joiners_job = job if is_joiners else None
        fetching = self._fetch_for_joiner(job) if is_joiners else self._fetch_all(job)
        work = asyncio.ensure_future(fetching)
        try:
            if not await job.wait.until(work):
                self._log.warning("pull_unfinished", step=step, shards=len(job.missing))
        finally:
            self._joiners_job = None
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        if not work.cancelled():
            work.result()
        missing = sorted(job.missing)
        unexplained = [shard for shard in missing if shard not in self.obstacles]
        for owner, shards in self.directory.by_owner(unexplained)[0]:
            self.obstacles.note(shards, owner, "has not answered yet", began)
        return PullReport(job.changed, job.unchanged, missing)

    async def claim_initial_values(self, genesis: bytes) -> None:
        """Note that the replica has initial values: owners send a joiner only the changes, where they are the run's."""
        if follows_changes(self.settings, self.codec.codec):
            for shard in range(len(self.store)):
                await self._follower.claim(genesis, shard)

    async def _fetch_for_joiner(self, job: Job) -> None:
        """Fetch everything from the owners, and what they do not send from others too; the first answer counts."""
        owners, _ = self.directory.by_owner(job.missing)
        # Promise 2: a joiner gets the model from whoever has it.
        works = [
            asyncio.ensure_future(self._fetch_all(job)),
            asyncio.ensure_future(self._fetch_from_others(job, [theirs for _, theirs in owners])),
        ]
        try:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    async def _fetch_from_others(self, job: Job, shards_by_owner: Sequence[Sequence[int]]) -> None:
        """Ask others whenever the owners are late or silent, until every shard has arrived."""
        now = self._clock.monotonic
        began = active_at = now()
        half_done_at: float | None = None
        while job.missing:
            if job.receiving:
                active_at = now()
            done = sum(not any(shard in job.missing for shard in shards) for shards in shards_by_owner)
            if half_done_at is None and 2 * done >= len(shards_by_owner) > 0:
                half_done_at = now()
            is_late = half_done_at is not None and now() - half_done_at >= max(MIN_OWNERS_TIME_S, half_done_at - began)
            if is_late or now() - active_at >= MIN_OWNERS_TIME_S:
                await self._ask_others(job)
                active_at = now()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _ask_others(self, job: Job) -> None:
        """Ask members for the missing shards, the last first, because the owners send the first ones first. The
        candidates of a shard come before those that train: its backup is one of them and has every delta."""
        known, now_s = self.store.ownership.known_owners, self._clock.monotonic()
        owners = {shard: known[shard].owner.node_id for shard in reversed(list(job.missing)) if shard in known}
        candidates = await self.directory.candidates(list(owners))
        workers = [peer.contact for peer in self.swarm.members() if peer.is_worker(now_s)]
        self.environment.entropy.random.shuffle(workers)
        donors = {
            shard: self._reachable([*found, *workers], owner)
            for (shard, owner), found in zip(owners.items(), candidates, strict=True)
        }
        for place in range(DONORS_ASKED):
            asked: dict[bytes, tuple[Contact, list[int]]] = {}
            for shard in owners:
                if shard in job.missing and place < len(donors[shard]):
                    donor = donors[shard][place]
                    asked.setdefault(donor.node_id, (donor, []))[1].append(shard)
            for donor, shards in asked.values():
                slow = list(dict.fromkeys(owners[shard].hex()[:8] for shard in shards))
                self._log.info("donor_changed", slow=slow, donor=donor.node_id.hex()[:8], shards=len(shards))
                await self._fetch(donor, [shard for shard in shards if shard in job.missing], job, takes_copies=True)

    def _reachable(self, donors: Sequence[Contact], owner: bytes) -> list[Contact]:
        """Each of these once, without this node, the owner, and those that are suspected or gone."""
        found = {donor.node_id: donor for donor in donors if donor.node_id not in (self.swarm.node_id, owner)}
        return [one for node, one in found.items() if not (self.swarm.is_suspect(node) or self.view.is_gone(node))]

    async def _fetch_all(self, job: Job) -> None:
        """Fetch from all owners at once, in the order of the shards."""
        await self.directory.ask_owners(list(job.missing), job.missing, partial(self._fetch, job=job), self.obstacles)

    def _note_current(self, shard: int, job: Job, *, changed: bool) -> None:
        """A shard is up to date, also if the pull is cut off later; the next pull asks for it last."""
        self.obstacles.clear(shard)
        if shard in job.missing:
            del job.missing[shard]
            if changed:
                job.changed += 1
            else:
                job.unchanged.append(shard)
        self._order[shard] = self._order.pop(shard)

    # -- from another node ----------------------------------------------------------------------------------------

    async def _fetch(self, node: Contact, shards: list[int], job: Job, *, takes_copies: bool = False) -> None:
        """Ask a node for these shards once. With `takes_copies` it need not be their owner."""
        if node.node_id == self.swarm.node_id:
            await self._copy_own(shards, job)
            return
        message, asked_s = self._message(shards, job, takes_copies=takes_copies), self._clock.monotonic()
        try:
            async with self.rpc.request("pull", node, message) as answer:
                results = self.rpc.decoded(node, answer.head, PullAnswer).results
                job.receiving += 1
                try:
                    await self._receive(node, message, results, answer.body, job, asked_s)
                finally:
                    job.receiving -= 1
            return
        except TransportError as error:
            reason = error.detail
            self.directory.failed(node, error)
        except BadFrame as error:
            reason = f"bad answer: {error}"
            self.view.score.nonsense(node.node_id, "value")
            self._log.warning("bad_pull_answer", owner=node.node_id.hex()[:8], reason=str(error))
        if not takes_copies:
            self.obstacles.note([shard for shard in shards if shard in job.missing], node, reason, asked_s)

    def _message(self, shards: list[int], job: Job, *, takes_copies: bool) -> Pull:
        settings, pushed, wanted = self.settings, self.codec.codec, []
        follows = follows_changes(settings, pushed) and not job.is_final
        for shard in shards:
            # A final pull asks for all: a copy of the same term and version may have other bits.
            term, version = (ZERO_TERM, 0) if job.is_final else self.replica.version_of(shard)
            # A joiner takes changes only to initial values that it has made itself, otherwise the whole value.
            is_claimed = self.replica.pulled_version(shard) is None
            is_known = follows and (is_claimed or not job.is_joiners)
            position = self.replica.position_of(shard) if is_known else NO_POSITION
            wanted.append(Wanted(shard, term, version, *position))
        return Pull(
            job.step,
            "float32" if job.is_final else whole_codec(settings, pushed),
            wanted,
            self.store.ownership.stale_fences(shards),
            takes_copies,
            job.is_final,
            follows,
        )

    async def _receive(
        self, node: Contact, pull: Pull, results: list[PullResult], body: Any, job: Job, asked_s: float
    ) -> None:
        """Take the answer of a node into the replica, shard by shard."""
        asked = dict.fromkeys(wanted.shard for wanted in pull.shards)
        reader, memory = FrameReader(body), ReusedMemory()
        coming = tuple(result.shard for result in results if result.status in ("value", "copy", "changes"))
        with job.wait.watching((node.node_id, coming), _received_since(body)):
            for result in results:
                if result.shard not in asked:
                    raise BadFrame(f"shard {result.shard} was not asked for")
                # Promise 7: an absurd term or version changes nothing.
                plausible = self.store.ownership.is_plausible
                if not (plausible(result.term) and plausible(result.rank_term)):
                    raise BadFrame(f"shard {result.shard} under term {result.term.number}")
                if max(result.version, result.published) >= MAX_BELIEVED:
                    raise BadFrame(f"shard {result.shard} in version {result.version}")
                self.directory.answered(node, [result])
                if result.status in ("later", "retry"):
                    self.obstacles.note([result.shard], node, f"answers {result.status!r}", asked_s)
                if result.status == "same" and self._follower.is_same(result):
                    self._note_current(result.shard, job, changed=False)
                if result.shard in coming and await self._take(node, result, reader, memory, job):
                    self._note_current(result.shard, job, changed=True)
                    job.wait.note()

    async def _take(
        self, node: Contact, result: PullResult, reader: FrameReader, memory: ReusedMemory, job: Job
    ) -> bool:
        """Take the value of a shard, or its changes; False if the replica cannot use them."""
        shard, is_copy = result.shard, result.status == "copy"
        if result.publication:
            arrays, payload_bytes = await self._follower.read(reader, result, memory)
            self.run.counters.bytes_received += payload_bytes
        else:
            size = self.store.size(shard)
            encoded, codec = await read_encoded(reader, shard, Part.VALUE, size, memory)
            self.run.counters.bytes_received += len(encoded)
            await self.rpc.turns.take(light(size))
            # Promise 7: values out of range change nothing.
            if not CODECS[codec].is_whole or not codecs.arithmetic(codec).is_within(encoded, size, MAX_STATE_LENGTH):
                raise BadFrame(f"shard {shard} has values out of range")
        if result.term < self.store.ownership.fence(shard):
            return False  # promise 1: this owner was replaced; the next round asks for the higher term
        if is_copy and shard not in job.missing:
            return False  # the owner was faster
        if result.publication:
            if not await self._follower.take(result, arrays):
                return False
        else:
            with self.replica.writing(shard) as values:
                codecs.decode(encoded, codec, values)
                # A copy's version does not show which deltas it has: with 0 the next pull fetches the shard.
                self.replica.set_version(shard, result.rank_term, 0 if is_copy else result.version)
        if not is_copy:
            self.store.note_owner(shard, result.term, node)
        return True

    # -- own shards -----------------------------------------------------------------------------------------------

    async def _copy_own(self, shards: list[int], job: Job) -> None:
        """Copy the shards owned here into the replica. What is added to a shard during the copy has another version,
        and comes with the next pull."""
        # Promise 11: the final value is one that the backup has to the bit.
        if job.is_final:
            await self.final_values.prepare(shards, job.step)
        for shard in shards:
            owned = self.store.owned.get(shard)
            if owned is None or (job.is_final and not self.final_values.is_final(shard)):
                continue
            self.store.fold(shard, job.step)
            mark = owned.rank_term, owned.state.version
            is_new = job.is_final or self.replica.version_of(shard) != mark
            if is_new and not await self._follower.write(shard, owned.state.value, mark):
                self.inspector.resign(shard)
            else:
                self._note_current(shard, job, changed=is_new)


def _received_since(body: Any) -> Callable[[], int]:
    """A function that tells the bytes of a body that arrived after this call; always 0 for one without a count."""
    before = getattr(body, "received_bytes", 0)
    return lambda: getattr(body, "received_bytes", before) - before
