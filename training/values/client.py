"""The named values of a swarm, as one node uses them: encoded keys and values, which it passes on for its script.

A key belongs to the shard that its hash says. Reads and updates go to the owner of that shard, many in one request.
An update has an identity (node, incarnation, number in its shard), and is sent until its owner has a final answer, to
whoever owns the shard then: it is applied once. Of one node the updates of a key are applied in the order in which they
were made.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.cooperative import VALUES_PER_UPDATE, LoopYielder
from p2pnode.training.encoding.frames import FrameReader, Part, blob_framed_bytes, blob_frames, sized
from p2pnode.training.exchange.directory import PARTNER_TIMEOUT_S, OwnerDirectory
from p2pnode.training.exchange.messages import PushResult
from p2pnode.training.exchange.owner.replication import DeltaReplicator
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import KeyUpdate
from p2pnode.training.shards.value_updates import wrong_timestamp
from p2pnode.training.values.encoding import MAX_KEY_BYTES, MAX_VALUE_BYTES, InvalidKey, ValueNotEncodable, decode_key
from p2pnode.training.values.owner import (
    MAX_ITEMS,
    ReadResult,
    ReadValues,
    ReadValuesAnswer,
    UpdateValues,
    UpdateValuesAnswer,
    ValueHandler,
)
from p2pnode.training.values.rounds import LATER, ValueRounds
from p2pnode.training.values.shard_tasks import ShardTasks
from p2pnode.training.values.store import EncodedPull, EncodedUpdate, EncodedValue, StoreUnavailable, UpdateFailed

#: A call gives up after this long: longer than it takes to replace a dead owner, and to wait for a script.
TIMEOUT_S = 30.0
#: Bytes of updates in one request.
SENT_BYTES = 1024 * 1024
#: A shard that was not answered rests so long, twice as long each time.
FIRST_RETRY_S, MAX_RETRY_S = 0.02, 0.5


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


Item = TypeVar("Item")
Result = TypeVar("Result", bound=PushResult)
#: A final answer, and the owner that gave it.
Answered = tuple[Contact, Result]


class OwnerCalls(ShardTasks, Generic[Item, Result]):
    """Calls of one kind, each about one shard, until each has the final answer of its owner.

    `ask` sends calls to an owner, and returns one result for each. Raises `TransportError`.
    """

    def __init__(
        self,
        directory: OwnerDirectory,
        environment: Environment,
        ask: Callable[[Contact, list[tuple[int, Item]]], Awaitable[Sequence[Result]]],
        size_of: Callable[[Item], int] = lambda _: 0,
    ) -> None:
        super().__init__("owner-request", environment)
        self._directory = directory
        self._ask = ask
        self._size_of = size_of
        #: The calls of each shard, in order.
        self._waiting: dict[int, dict[asyncio.Future[Answered[Result]], Item]] = {}
        #: How long each shard that was not answered rests next time.
        self._pauses: dict[int, float] = {}

    def call(self, shard: int, item: Item) -> asyncio.Future[Answered[Result]]:
        """Begin a call. It waits until it has its answer, or until `forget`."""
        answer: asyncio.Future[Answered[Result]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(shard, {})[answer] = item
        self.wake()
        return answer

    def forget(self, shard: int, answer: asyncio.Future[Answered[Result]]) -> None:
        """Nobody waits for this call any more."""
        calls = self._waiting.get(shard)
        if calls is not None:
            calls.pop(answer, None)
            if not calls:
                del self._waiting[shard]

    def waiting(self) -> list[asyncio.Future[Answered[Result]]]:
        """The calls without a final answer."""
        return [answer for calls in self._waiting.values() for answer in calls]

    def begin(self) -> None:
        shards = [shard for shard in self._waiting if shard not in self.busy]
        groups, unknown = self._directory.by_owner(shards)
        for owner, theirs in groups:
            self.start(theirs, partial(self._request, owner, theirs), owner.node_id)
        if unknown:
            self.start(unknown, partial(self._rest, unknown))

    async def _request(self, owner: Contact, shards: list[int]) -> None:
        try:
            again = await self._send(owner, shards)
        except TransportError as error:
            again = dict.fromkeys(shards)
            self._directory.failed(owner, error)
        for shard in shards:
            if shard not in again:
                self._pauses.pop(shard, None)
        if again:
            self.start(list(again), partial(self._rest, list(again)))

    async def _send(self, owner: Contact, shards: list[int]) -> dict[int, None]:
        """Send what waits for shards of an owner; returns those that are to rest."""
        sent: list[tuple[int, asyncio.Future[Answered[Result]], Item]] = []
        left_bytes = SENT_BYTES
        for shard in shards:
            for answer, item in self._waiting.get(shard, {}).items():
                if len(sent) >= MAX_ITEMS or left_bytes <= 0:
                    break
                left_bytes -= self._size_of(item)
                sent.append((shard, answer, item))
        again: dict[int, None] = {}
        if not sent:
            return again
        results = await self._ask(owner, [(shard, item) for shard, _, item in sent])
        if len(results) != len(sent):
            raise TransportError("foreign", owner.address, f"gave {len(results)} answers to {len(sent)} calls")
        if news := [result for result in results if result.status != "ok"]:
            self._directory.answered(owner, news)
        turn = LoopYielder()
        for (shard, answer, _), result in zip(sent, results, strict=True):
            if turn.is_due(VALUES_PER_UPDATE // 4):
                await asyncio.sleep(0)
            if result.status in ("ok", "refused"):
                self.forget(shard, answer)
                if not answer.done():
                    answer.set_result((owner, result))
            elif result.reason != LATER:  # its owner has it: it is asked again at once
                again[shard] = None
        return again

    async def _rest(self, shards: list[int]) -> None:
        """Let shards wait, and look for their owners."""
        pause_s = max(self._pauses.get(shard, FIRST_RETRY_S) for shard in shards)
        self._pauses |= dict.fromkeys(shards, min(2 * pause_s, MAX_RETRY_S))
        await self._directory.refresh(shards, after_s=pause_s)

    async def stop(self) -> None:
        await super().stop()
        for answer in self.waiting():
            if not answer.done():
                answer.set_exception(StoreUnavailable("the node has left its swarm"))
                answer.exception()


class SwarmValues:
    """The named values of one node: reads and updates them at their owners, and is the owner of some (`handler`)."""

    def __init__(
        self,
        *,
        node_id: bytes,
        run: RunState,
        store: ShardStore,
        view: SwarmView,
        rpc: ExchangeRpc,
        rebalance: RebalanceRequests,
        replicator: DeltaReplicator,
        in_flight: dict[tuple[int, DeltaId], asyncio.Future[None]],
        directory: OwnerDirectory,
        limit_bytes: int,
        environment: Environment,
    ) -> None:
        """`in_flight`: what a hand-over waits for, of `DeltaHandler`."""
        self._me = node_id
        self._run = run
        self._store = store
        self._rpc = rpc
        rounds = ValueRounds(
            node_id=node_id,
            run=run,
            store=store,
            replicator=replicator,
            in_flight=in_flight,
            limit_bytes=limit_bytes,
            environment=environment,
        )
        self.handler = handler = ValueHandler(
            rpc=rpc, store=store, run=run, view=view, rebalance=rebalance, rounds=rounds
        )
        #: How many updates of each shard were made here.
        self._numbers: dict[int, int] = {}
        self._updates = OwnerCalls(directory, environment, self._ask_updates, lambda update: update.size_bytes)
        self._reads = OwnerCalls(directory, environment, partial(self._ask, "read_values", handler.read))
        self._lists = OwnerCalls(directory, environment, partial(self._ask, "list_keys", handler.list_keys))

    def on_pull(self, pull: EncodedPull | None) -> None:
        """Apply updates of keys owned here by this function of the attached script; None: there is no script."""
        self.handler.rounds.on_pull(pull)

    async def get_encoded(self, keys: Sequence[bytes]) -> list[EncodedValue | None]:
        """The encoded values of encoded keys, and their timestamps; None for a key that was never set. Raises
        `StoreUnavailable`."""
        count = len(self._store)
        answers = await self._answers(self._reads, keys, ((shard_of(key, count), key) for key in keys))
        return [None if one.value is None else (one.value, one.timestamp) for _, one in answers]

    async def update_encoded(self, updates: Sequence[EncodedUpdate]) -> None:
        """Apply updates, each once; returns when all are stored and replicated. Raises `UpdateFailed` for the first
        that was refused, when all have their answers, and `StoreUnavailable`; `ValueNotEncodable` and `InvalidKey`
        before any is sent."""
        for one in updates:
            _check(one)
        answers = await self._answers(self._updates, [one.key for one in updates], map(self._numbered, updates))
        for one, (owner, result) in zip(updates, answers, strict=True):
            if result.status == "refused":
                raise UpdateFailed(decode_key(one.key), owner.node_id.hex()[:8], result.reason)

    def _numbered(self, one: EncodedUpdate) -> tuple[int, KeyUpdate]:
        shard = shard_of(one.key, len(self._store))
        self._numbers[shard] = number = self._numbers.get(shard, 0) + 1
        start = self._run.incarnation
        return shard, KeyUpdate(self._me, start, number, one.key, one.reducer, one.value, one.timestamp)

    async def list_keys(self) -> list[bytes]:
        """All encoded keys, text first. Raises `StoreUnavailable`."""
        found: list[bytes] = []
        left = dict.fromkeys(range(len(self._store)), b"")
        while left:
            for shard, (_, one) in zip(list(left), await self._answers(self._lists, [], left.items()), strict=True):
                found += one.keys
                left[shard] = one.keys[-1] if one.keys else b""
                if one.is_whole or not one.keys:
                    del left[shard]
        return sorted(found, key=key_order)

    async def _answers(
        self, calls: OwnerCalls[Item, Result], keys: Sequence[bytes], asked: Iterable[tuple[int, Item]]
    ) -> list[Answered[Result]]:
        """The final answers to calls. Raises `StoreUnavailable`, which names the keys without one."""
        started: list[tuple[int, asyncio.Future[Answered[Result]]]] = []
        turn = LoopYielder()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for shard, item in asked:
                    if turn.is_due(VALUES_PER_UPDATE // 4):
                        await asyncio.sleep(0)
                    started.append((shard, calls.call(shard, item)))
                return [await answer for _, answer in started]
        except TimeoutError:
            left = [place for place, (_, answer) in enumerate(started) if answer.cancelled() or not answer.done()]
            named = ", ".join(repr(decode_key(keys[place])) for place in left[:3]) if keys else "the keys of shards"
            more = f" and {len(left) - 3} more" if keys and len(left) > 3 else ""
            raise StoreUnavailable(f"no owner has answered for {named}{more} within {TIMEOUT_S:g} s") from None
        finally:
            for shard, answer in started:
                if answer.cancelled() or not answer.done():
                    answer.cancel()
                    calls.forget(shard, answer)

    async def _ask_updates(self, owner: Contact, updates: list[tuple[int, KeyUpdate]]) -> Sequence[PushResult]:
        if owner.node_id == self._me:
            return await self.handler.accept(self._me, updates)
        encoded = msgspec.msgpack.encode(updates)
        self._run.counters.bytes_sent += len(encoded)
        shards = list(dict.fromkeys(shard for shard, _ in updates))
        message = UpdateValues(self._store.ownership.stale_fences(shards))
        body = sized(blob_frames(0, encoded, Part.UPDATES), blob_framed_bytes(len(encoded)))
        answer = await self._rpc.ask(owner, "update_values", message, UpdateValuesAnswer, PARTNER_TIMEOUT_S, body)
        return answer.results

    async def _ask(
        self,
        name: str,
        own: Callable[[Sequence[tuple[int, bytes]]], Awaitable[list[ReadResult]]],
        owner: Contact,
        asked: list[tuple[int, bytes]],
    ) -> Sequence[ReadResult]:
        """Ask for the values of keys, or for the keys of shards. An answer below the fence of its shard is none."""
        ownership = self._store.ownership
        if owner.node_id == self._me:
            results = await own(asked)
        else:
            fences = ownership.stale_fences(list(dict.fromkeys(shard for shard, _ in asked)))
            message = ReadValues(asked, fences)
            async with self._rpc.question(owner, name, message, PARTNER_TIMEOUT_S) as answer:
                results = (await self._rpc.record(owner, FrameReader(answer.body), 0, ReadValuesAnswer)).results
        return [
            ReadResult(one.shard, "retry") if one.status == "ok" and one.term < ownership.fence(one.shard) else one
            for one in results
        ]

    def waiting(self) -> int:
        """How many updates have no final answer."""
        return len(self._updates.waiting())

    async def finish(self, timeout_s: float) -> int:
        """Wait until every update has its final answer; returns how many lack it after `timeout_s`."""
        if answers := self._updates.waiting():
            await asyncio.wait(answers, timeout=timeout_s)
        return self.waiting()

    def tasks(self) -> tuple[ShardTasks, ...]:
        """What sends requests, and the rounds."""
        return self._updates, self._reads, self._lists, self.handler.rounds

    async def stop(self) -> None:
        """Cancel all requests and rounds; calls under way raise `StoreUnavailable`."""
        await asyncio.gather(*(one.stop() for one in self.tasks()))


def key_order(key: bytes) -> tuple[bool, bytes]:
    """Encoded keys are listed in this order: text first."""
    return key[:1] == b"b", key
