"""The puller's side: bring the replica up to date, from several owners at once, changed shards only.

Values land in the replica as they arrive. What could not be had within the deadline is reported, never hidden: the
step goes on with the older copy of those shards and says so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from overlay.peers import Contact
from overlay.transport import TransportError
from training import codecs
from training.exchange.core import Core
from training.exchange.finding import Finding
from training.exchange.messages import Pull, PullAnswer, Term, Wanted
from training.exchange.pushing import RETRY_FIRST_S, RETRY_MOST_S
from training.frames import BadFrame, FrameReader, Part, WarmRoom, read_encoded


@dataclass(frozen=True, slots=True)
class PullReport:
    """Shards that changed, that were up to date, and that could not be had in time."""

    changed: int
    unchanged: int
    missing: list[int]


class Pulling:
    """Keeps this node's replica of the vector."""

    def __init__(self, core: Core, finding: Finding) -> None:
        self._core = core
        self._finding = finding

    async def pull(self, step: int, *, deadline_s: float | None) -> PullReport:
        """Fetch every shard that changed, as of a node that has passed the barrier of `step`.

        With `deadline_s` None it waits until all are there: a joiner cannot begin with half a vector.
        """
        self._core.passed_step = max(self._core.passed_step, step)
        waiting = dict.fromkeys(range(len(self._core.store)))
        changed = 0
        pause_s = RETRY_FIRST_S
        try:
            async with asyncio.timeout(deadline_s):
                while waiting:
                    before = len(waiting)
                    groups, _ = self._finding.by_owner(list(waiting))
                    jobs = [self._fetch(owner, shards, step) for owner, shards in groups]
                    for fresh, settled in await asyncio.gather(*jobs):
                        changed += fresh
                        for shard in settled:
                            waiting.pop(shard, None)
                    if not waiting:
                        break
                    if len(waiting) < before:
                        pause_s = RETRY_FIRST_S
                    await asyncio.sleep(pause_s * self._core.jitter())
                    pause_s = min(2 * pause_s, RETRY_MOST_S)
                    await self._finding.refresh(list(waiting))
        except TimeoutError:
            self._core.log.warning("pull_unfinished", step=step, shards=len(waiting))
        missing = list(waiting)
        return PullReport(changed, len(self._core.store) - changed - len(missing), missing)

    async def _fetch(self, owner: Contact, shards: list[int], step: int) -> tuple[int, list[int]]:
        """Returns how many shards changed, and which are settled."""
        if owner.node_id == self._core.overlay.node_id:
            return self._copy_own(shards, step)
        marks = self._core.marks
        wanted = [Wanted(shard, *marks[shard][0], marks[shard][1]) for shard in shards]
        fences = self._core.store.doubts(shards)
        message = Pull(self._core.genesis, step, self._core.settings.pull_codec, wanted, fences)
        settled: list[int] = []
        changed = 0
        try:
            async with self._core.request("pull", owner, message) as answer:
                results = self._core.decoded(owner, answer.head, PullAnswer).results
                asked = dict.fromkeys(shards)
                reader = FrameReader(answer.body)
                room = WarmRoom()
                for result in results:
                    if result.shard not in asked:
                        raise BadFrame(f"shard {result.shard} was not asked for")
                    self._finding.answered(owner, [result])
                    if result.status == "same":
                        settled.append(result.shard)
                    if result.status != "value":
                        continue
                    size = self._core.store.size(result.shard)
                    encoded, codec = await read_encoded(reader, result.shard, Part.VALUE, size, room)
                    self._core.counters.bytes_received += len(encoded)
                    term = Term(result.term_number, result.term_node)
                    if term < self._core.store.fence(result.shard):
                        continue  # an owner that does not know yet that it is none: ask where the higher term lives
                    start, stop = self._core.store.bounds[result.shard]
                    codecs.decode(encoded, codec, self._core.replica[start:stop])
                    marks[result.shard] = (term, result.version)
                    self._core.store.note_owner(result.shard, term, owner)
                    settled.append(result.shard)
                    changed += 1
        except TransportError as error:
            self._finding.failed(owner, error)
        except BadFrame as error:
            self._core.log.warning("bad_pull_answer", owner=owner.node_id.hex()[:8], reason=str(error))
        return changed, settled

    def _copy_own(self, shards: list[int], step: int) -> tuple[int, list[int]]:
        changed = 0
        settled = []
        for shard in shards:
            owned = self._core.store.owned.get(shard)
            if owned is None:
                continue
            if self._core.synchronous:
                self._core.store.fold(shard, step)
            elif owned.state.pending:
                self._core.store.close_complete(shard, self._core.worker_count())
            mark = (owned.term, owned.state.version)
            if self._core.marks[shard] != mark:
                start, stop = self._core.store.bounds[shard]
                self._core.replica[start:stop] = owned.state.value
                self._core.marks[shard] = mark
                changed += 1
            settled.append(shard)
        return changed, settled
