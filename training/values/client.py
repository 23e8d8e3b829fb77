"""The store of named values of a swarm, as one node uses it (`training.values.store.ValueStore`).

A key belongs to the shard that its hash says. Reads and updates go to the owner of that shard, many in one request.
An update has an identity (node, incarnation, number in its shard), and is sent until its owner has a final answer, to
whoever owns the shard then: it is applied once. Of one node the updates of a key are applied in the order in which they
were made.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from overlay.peers import Contact
from overlay.transport import TransportError
from training.cooperative import VALUES_PER_UPDATE, LoopYielder
from training.encoding.frames import FrameReader, Part, blob_framed_bytes, blob_frames, sized
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S, OwnerDirectory
from training.exchange.messages import PushResult
from training.shards.value_batch import KeyUpdate
from training.shards.value_updates import wrong_timestamp
from training.values.encoding import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    InvalidKey,
    Key,
    ValueNotEncodable,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from training.values.owner import (
    MAX_ITEMS,
    ListKeys,
    ListKeysAnswer,
    ReadResult,
    ReadValues,
    ReadValuesAnswer,
    ShardUpdate,
    UpdateValues,
    UpdateValuesAnswer,
    ValueHandler,
)
from training.values.rounds import LATER
from training.values.shard_tasks import OwnerPump
from training.values.store import (
    EncodedPull,
    EncodedUpdate,
    EncodedValue,
    Stamped,
    StoreUnavailable,
    UpdateFailed,
    ValueUpdate,
)

#: A call gives up after this long: longer than it takes to replace a dead owner, and to wait for a script.
TIMEOUT_S = 30.0
#: Bytes of updates that wait for their answers; a call that brings more waits before it adds any.
MAX_OUTGOING_BYTES = 64 * 1024 * 1024
#: Of the updates in one request.
SENT_BYTES = 1024 * 1024


def shard_of(key: bytes, shards: int) -> int:
    """The shard that an encoded key belongs to."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) % shards


def _check(one: EncodedUpdate) -> None:
    """Raises `InvalidKey` or `ValueNotEncodable` for what no owner can take."""
    if not 1 < len(one.key) <= MAX_KEY_BYTES + 1:
        raise InvalidKey(f"an encoded key has 2 to {MAX_KEY_BYTES + 1} bytes, not {len(one.key)}")
    if not 0 < len(one.value) <= MAX_VALUE_BYTES:
        limit = f"at most {MAX_VALUE_BYTES:,} are allowed"
        raise ValueNotEncodable(decode_key(one.key), f"it takes {len(one.value):,} bytes, and {limit}")
    if wrong := wrong_timestamp(one.timestamp):
        raise ValueNotEncodable(decode_key(one.key), wrong)


class _SentUpdate:
    """An update until its final answer."""

    __slots__ = ("done", "size_bytes", "update")

    def __init__(self, update: KeyUpdate, done: asyncio.Future[UpdateFailed | None]) -> None:
        self.update = update
        self.done = done
        self.size_bytes = update.size_bytes


class Deadlines:
    """A wait that has no result after `seconds` raises `TimeoutError`. All are of one length, so one timer serves them
    all: `asyncio.timeout` costs each small call a timer and five calls more."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: What waits, and until when; the oldest first.
        self._waiting: dict[asyncio.Future[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, wait: asyncio.Future[Any]) -> None:
        """This has so much time from now on; `end` follows."""
        loop = wait.get_loop()
        at_s = self._waiting[wait] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(at_s, self._on_time)

    def end(self, wait: asyncio.Future[Any]) -> None:
        """It waits no more."""
        self._waiting.pop(wait, None)

    def _on_time(self) -> None:
        self._timer = None
        while self._waiting:
            wait, at_s = next(iter(self._waiting.items()))
            loop = wait.get_loop()
            if at_s > loop.time():
                self._timer = loop.call_at(at_s, self._on_time)
                return
            del self._waiting[wait]
            if not wait.done():
                wait.set_exception(TimeoutError())
                wait.exception()  # who waits may have been cancelled at the same moment

    def stop(self) -> None:
        """End nothing any more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SwarmValues:
    """Reads and updates named values at their owners."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, handler: ValueHandler) -> None:
        self._context = context
        self._store = context.store
        self._directory = directory
        self._handler = handler
        self._me = context.swarm.node_id
        self._updates: dict[int, deque[_SentUpdate]] = {}
        self._numbers: dict[int, int] = {}
        self._outgoing_bytes = 0
        self._has_room = asyncio.Event()
        self._deadlines = Deadlines(TIMEOUT_S)
        self._reads: dict[int, dict[bytes, list[asyncio.Future[EncodedValue | None]]]] = {}
        self._update_pump = OwnerPump(context, directory, lambda: self._updates, self._send_updates)
        self._read_pump = OwnerPump(context, directory, lambda: self._reads, self._send_reads)

    def on_pull(self, pull: EncodedPull | None) -> None:
        """Apply updates of keys owned here by this function of the attached script; None: there is no script."""
        self._handler.rounds.on_pull(pull)

    # -- decoded ------------------------------------------------------------------------------------------------

    async def get(self, key: Key) -> Stamped | None:
        """See `ValueStore.get`."""
        return (await self.get_many([key])).get(key)

    async def get_many(self, keys: Sequence[Key]) -> dict[Key, Stamped]:
        """See `ValueStore.get_many`."""
        found = await self.get_encoded([encode_key(key) for key in keys])
        return {
            key: Stamped(decode_value(value[0]), value[1])
            for key, value in zip(keys, found, strict=True)
            if value is not None
        }

    async def set(self, key: Key, value: object, timestamp: int = 0) -> None:
        """See `ValueStore.set`."""
        await self.set_encoded(encode_key(key), encode_value(key, value), timestamp)

    async def update(self, updates: Sequence[ValueUpdate]) -> None:
        """See `ValueStore.update`."""
        encoded = [
            EncodedUpdate(encode_key(one.key), encode_value(one.key, one.value), one.timestamp, one.reducer)
            for one in updates
        ]
        await self.update_encoded(encoded)

    async def keys(self) -> list[Key]:
        """See `ValueStore.keys`."""
        return [decode_key(key) for key in await self.list_keys()]

    # -- reads --------------------------------------------------------------------------------------------------

    async def get_encoded(self, keys: Sequence[bytes]) -> list[EncodedValue | None]:
        """The encoded values of encoded keys, and their timestamps; None for a key that was never set. Raises
        `StoreUnavailable`."""
        loop, count = asyncio.get_running_loop(), len(self._store)
        futures: list[asyncio.Future[EncodedValue | None]] = []
        for key in keys:
            future: asyncio.Future[EncodedValue | None] = loop.create_future()
            self._reads.setdefault(shard_of(key, count), {}).setdefault(key, []).append(future)
            futures.append(future)
        self._read_pump.wake()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return [await future for future in futures]
        except TimeoutError:
            unanswered = [key for key, one in zip(keys, futures, strict=True) if one.cancelled() or not one.done()]
            raise self._unavailable(unanswered) from None
        finally:
            for future in futures:
                future.cancel()
            self._forget_reads(keys)

    def _forget_reads(self, keys: Sequence[bytes]) -> None:
        """Drop the reads that nobody waits for any more."""
        if not self._reads:
            return
        for key in keys:
            shard = shard_of(key, len(self._store))
            waiting = self._reads.get(shard, {})
            if all(future.done() for future in waiting.get(key, ())):
                waiting.pop(key, None)
                if not waiting:
                    self._reads.pop(shard, None)

    async def _send_reads(self, owner: Contact, shards: list[int]) -> list[int]:
        asked = [(shard, key) for shard in shards for key in self._reads.get(shard, ())][:MAX_ITEMS]
        if not asked:
            return []
        # Who asks from now on is answered by the next request: this one may have been answered before.
        taken = {(shard, key): self._reads[shard].pop(key) for shard, key in asked}
        results: list[ReadResult] = []
        try:
            if owner.node_id == self._me:
                results = self._handler.read(asked)
            else:
                message = ReadValues(asked, self._store.ownership.stale_fences(shards))
                async with self._context.rpc.question(owner, "read_values", message, PARTNER_TIMEOUT_S) as answer:
                    reader = FrameReader(answer.body)
                    results = (await self._context.rpc.record(owner, reader, 0, ReadValuesAnswer)).results
        finally:
            again = self._settle_reads(asked, taken, results)
        self._directory.answered(owner, results)
        return again

    def _settle_reads(
        self,
        asked: list[tuple[int, bytes]],
        taken: dict[tuple[int, bytes], list[asyncio.Future[EncodedValue | None]]],
        results: list[ReadResult],
    ) -> list[int]:
        """Give out the answers; what has none waits again. Returns the shards that were not answered."""
        again: dict[int, None] = {}
        answered = dict(zip(asked, results, strict=False))
        for (shard, key), futures in taken.items():
            result = answered.get((shard, key))
            is_old = result is not None and result.term < self._store.ownership.fence(shard)
            if result is None or result.status in ("redirect", "retry") or is_old:
                self._reads.setdefault(shard, {}).setdefault(key, []).extend(futures)
                if result is None or result.status != "retry" or result.denies_ownership or not result.term_number:
                    again[shard] = None
                continue
            value = (result.value, result.timestamp) if result.status == "value" else None
            for future in futures:
                if not future.done():
                    future.set_result(value)
        for shard in dict.fromkeys(shard for shard, _ in asked):
            if not self._reads.get(shard, True):
                del self._reads[shard]
        return list(again)

    # -- updates ------------------------------------------------------------------------------------------------

    async def set_encoded(self, key: bytes, value: bytes, timestamp: int = 0) -> None:
        """Replace a value. Raises `UpdateFailed` and `StoreUnavailable`."""
        given = EncodedUpdate(key, value, timestamp, "replace")
        if self._outgoing_bytes > MAX_OUTGOING_BYTES:
            await self.update_encoded([given])
            return
        _check(given)
        done: asyncio.Future[UpdateFailed | None] = asyncio.get_running_loop().create_future()
        shard, one = self._add(shard_of(key, len(self._store)), given, done)
        self._deadlines.begin(done)
        try:
            failure = await done
        except TimeoutError:
            self._remove(shard, one)
            raise self._unavailable([key]) from None
        except asyncio.CancelledError:
            self._remove(shard, one)
            raise
        finally:
            self._deadlines.end(done)
        if failure is not None:
            raise failure

    async def update_encoded(self, updates: Sequence[EncodedUpdate]) -> None:
        """Apply updates, each once; returns when all are stored and replicated. Raises `UpdateFailed` for the first
        that was refused, when all have their answers, and `StoreUnavailable`; `ValueNotEncodable` and `InvalidKey`
        before any is sent."""
        for given in updates:
            _check(given)
        loop, count = asyncio.get_running_loop(), len(self._store)
        started: list[tuple[int, _SentUpdate]] = []
        try:
            async with asyncio.timeout(TIMEOUT_S):
                turn = LoopYielder()
                for given in updates:
                    if turn.is_due(VALUES_PER_UPDATE // 4):
                        await asyncio.sleep(0)
                    while self._outgoing_bytes > MAX_OUTGOING_BYTES:
                        self._has_room.clear()
                        await self._has_room.wait()
                    started.append(self._add(shard_of(given.key, count), given, loop.create_future()))
                self._update_pump.wake()
                failed = [failure for _, one in started if (failure := await one.done) is not None]
        except TimeoutError:
            unanswered = [one.update.key for _, one in started if one.done.cancelled() or not one.done.done()]
            raise self._unavailable(unanswered) from None
        finally:
            for shard, one in started:
                if one.done.cancelled() or not one.done.done():
                    one.done.cancel()
                    self._remove(shard, one)
        if failed:
            raise failed[0]

    def _add(
        self, shard: int, one: EncodedUpdate, done: asyncio.Future[UpdateFailed | None]
    ) -> tuple[int, _SentUpdate]:
        self._numbers[shard] = number = self._numbers.get(shard, 0) + 1
        update = KeyUpdate(
            self._me, self._context.run.incarnation, number, one.key, one.reducer, one.value, one.timestamp
        )
        outgoing = _SentUpdate(update, done)
        self._updates.setdefault(shard, deque()).append(outgoing)
        self._outgoing_bytes += outgoing.size_bytes
        self._update_pump.wake()
        return shard, outgoing

    def _remove(self, shard: int, one: _SentUpdate) -> None:
        queue = self._updates.get(shard)
        if queue is None:
            return
        if queue[0] is one:  # nearly always
            queue.popleft()
        elif one in queue:
            queue.remove(one)
        else:
            return
        if not queue:
            del self._updates[shard]
        is_full = self._outgoing_bytes > MAX_OUTGOING_BYTES
        self._outgoing_bytes -= one.size_bytes
        if is_full:
            self._has_room.set()

    async def _send_updates(self, owner: Contact, shards: list[int]) -> list[int]:
        sent: list[tuple[int, _SentUpdate]] = []
        left_bytes = SENT_BYTES
        for shard in shards:
            for one in self._updates.get(shard, ()):
                if len(sent) >= MAX_ITEMS or left_bytes <= 0:
                    break
                left_bytes -= one.size_bytes
                sent.append((shard, one))
        if not sent:
            return []
        updates = [ShardUpdate(shard, one.update) for shard, one in sent]
        if owner.node_id == self._me:
            results = await self._handler.accept(self._me, updates)
        else:
            results = await self._request(owner, shards, updates)
        if news := [result for result in results if result.status != "ok"]:
            self._directory.answered(owner, news)
        again: dict[int, None] = {}
        turn = LoopYielder()
        for (shard, one), result in zip(sent, results, strict=False):
            if turn.is_due(VALUES_PER_UPDATE // 4):
                await asyncio.sleep(0)
            if result.status == "ok":
                self._finish(shard, one, None)
            elif result.status == "refused":
                failure = UpdateFailed(decode_key(one.update.key), owner.node_id.hex()[:8], result.reason)
                self._finish(shard, one, failure)
            elif result.reason != LATER:  # its owner waits with the answer: it is asked again at once
                again[shard] = None
        return list(again)

    async def _request(self, owner: Contact, shards: list[int], updates: list[ShardUpdate]) -> list[PushResult]:
        encoded = msgspec.msgpack.encode(updates)
        self._context.counters.bytes_sent += len(encoded)
        message = UpdateValues(self._store.ownership.stale_fences(shards))
        body = sized(blob_frames(0, encoded, Part.UPDATES), blob_framed_bytes(len(encoded)))
        rpc = self._context.rpc
        answer = await rpc.ask(owner, "update_values", message, UpdateValuesAnswer, PARTNER_TIMEOUT_S, body)
        return answer.results

    def _finish(self, shard: int, one: _SentUpdate, failure: UpdateFailed | None) -> None:
        self._remove(shard, one)
        if not one.done.done():
            one.done.set_result(failure)

    # -- keys ---------------------------------------------------------------------------------------------------

    async def list_keys(self) -> list[bytes]:
        """All encoded keys, text first. Raises `StoreUnavailable`."""
        found: list[bytes] = []
        left: dict[int, bytes] = dict.fromkeys(range(len(self._store)), b"")
        pause_s = 0.05
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while left:
                    before = dict(left)
                    groups, unknown = self._directory.by_owner(left)
                    asked = [
                        (owner, [(shard, left[shard]) for shard in shards[:MAX_ITEMS]]) for owner, shards in groups
                    ]
                    for keys in await asyncio.gather(*(self._list(owner, wanted, left) for owner, wanted in asked)):
                        found += keys
                    if left == before or unknown:
                        await asyncio.sleep(pause_s * self._context.jitter())
                        pause_s = min(2 * pause_s, 0.5)
                        await self._directory.refresh(list(left))
        except TimeoutError:
            raise StoreUnavailable(
                f"the keys of {len(left)} of {len(self._store)} shards have no owner that answers"
            ) from None
        return sorted(found, key=lambda key: (key[:1] == b"b", key))

    async def _list(self, owner: Contact, wanted: list[tuple[int, bytes]], left: dict[int, bytes]) -> list[bytes]:
        """The keys that an owner lists; takes the shards that are whole out of `left`."""
        try:
            if owner.node_id == self._me:
                results = await self._handler.list_keys(wanted)
            else:
                fences = self._store.ownership.stale_fences([shard for shard, _ in wanted])
                message = ListKeys(wanted, fences)
                answer = await self._context.rpc.ask(owner, "list_keys", message, ListKeysAnswer, PARTNER_TIMEOUT_S)
                results = answer.results
        except TransportError as error:
            self._directory.failed(owner, error)
            return []
        self._directory.answered(owner, results)
        found: list[bytes] = []
        for result in results:
            is_old = result.term < self._store.ownership.fence(result.shard)
            if result.status == "keys" and result.shard in left and not is_old:
                found += result.keys
                if result.is_whole:
                    del left[result.shard]
                elif result.keys:
                    left[result.shard] = result.keys[-1]
        return found

    # -- the end ------------------------------------------------------------------------------------------------

    def waiting(self) -> int:
        """How many updates have no final answer."""
        return sum(len(queue) for queue in self._updates.values())

    async def finish(self, timeout_s: float) -> int:
        """Wait until every update has its final answer; returns how many lack it after `timeout_s`."""
        futures = [one.done for queue in self._updates.values() for one in queue]
        if futures:
            await asyncio.wait(futures, timeout=timeout_s)
        return self.waiting()

    async def stop(self) -> None:
        """Cancel all requests and rounds; calls under way raise `StoreUnavailable`."""
        await asyncio.gather(self._update_pump.stop(), self._read_pump.stop(), self._handler.rounds.stop())
        self._deadlines.stop()
        gone = StoreUnavailable("the node has left its swarm")
        waiting: list[asyncio.Future[Any]] = [one.done for queue in self._updates.values() for one in queue]
        waiting += [future for keys in self._reads.values() for futures in keys.values() for future in futures]
        for future in waiting:
            if not future.done():
                future.set_exception(gone)
                future.exception()

    def _unavailable(self, keys: Sequence[bytes]) -> StoreUnavailable:
        named = ", ".join(repr(decode_key(key)) for key in keys[:3])
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        return StoreUnavailable(f"no owner has answered for {named}{more} within {TIMEOUT_S:g} s")
