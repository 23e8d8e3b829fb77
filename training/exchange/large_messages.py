"""Decodes the large messages of other nodes in pieces, and bounds the processor time that each node may take by them.

Small messages are decoded where they arrive (`training.exchange.messages.decode`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from overlay.environment import Clock
from overlay.rate_limits import RateLimit, RateLimiter
from training.exchange.cooperative import VALUES_PER_TURN, LoopTurns
from training.exchange.piecewise import PIECE_BYTES, SCANNED_PER_DECODED, decode_in_pieces

S = TypeVar("S", bound=msgspec.Struct)

#: Longer messages are decoded in pieces: this many bytes take 3 ms at most.
LARGE_MESSAGE_BYTES = 1 << 16
#: Processor time of one byte of a large message, decoded (50 ns at most) and looked through: identities are put in
#: order in a set, which takes twice as long. Estimated from the size, so that a busy machine refuses no more.
SECONDS_PER_BYTE = 150e-9
#: What the shards themselves explain of any message: a pull names each of them in a few dozen bytes, at every step.
BYTES_PER_SHARD = 128
#: Processor time for the large requests of one member: 330 KB a second, and 10 MB at once after a rest. States of
#: 65,536 rows, the most that an owner sends together, have 2.4 MB.
REQUEST_RATE = RateLimit(0.05, 1.5)
#: The same for its answers: this node has asked for them.
ANSWER_RATE = RateLimit(0.1, 4.0)
#: A request beyond the rate is refused after this delay, as in `overlay.requests`.
REFUSED_AFTER_S = 1.0


#: Why a large message of this sender is not to be decoded, from its outline; empty where it is.
Unexpected = Callable[[bytes, bytes], str]


class UnwantedMessage(Exception):
    """A large message is not decoded; the text says why."""


class LargeMessages:
    """Those of all members, one of each member at a time."""

    def __init__(self, turns: LoopTurns, clock: Clock, shards: int = 0) -> None:
        """`shards` of the layout."""
        self._turns = turns
        self._clock = clock
        self._explained_bytes = BYTES_PER_SHARD * shards
        self._requests: RateLimiter[bytes] = RateLimiter(REQUEST_RATE)
        self._answers: RateLimiter[bytes] = RateLimiter(ANSWER_RATE)
        #: Of each member with a message in decoding: the others wait for it, in turn.
        self._locks: dict[bytes, asyncio.Lock] = {}
        self._waiting: dict[bytes, int] = {}

    async def request(self, node: bytes, payload: bytes, kind: type[S], unexpected: Unexpected | None = None) -> S:
        """A large request of a member. Raises `msgspec.DecodeError`; `UnwantedMessage` after a delay, in which the
        request occupies one of its member's places."""
        try:
            self._charge(self._requests, node, len(payload))
            if unexpected is not None:
                await self._pause(len(payload) // SCANNED_PER_DECODED)
                if reason := unexpected(node, payload):
                    raise UnwantedMessage(reason)
        except UnwantedMessage:
            await asyncio.sleep(REFUSED_AFTER_S)
            raise
        return await self._decode(node, payload, kind)

    async def answer(self, node: bytes, payload: bytes, kind: type[S]) -> S:
        """A large answer of a member. Raises `msgspec.DecodeError` and `UnwantedMessage`."""
        self._charge(self._answers, node, len(payload))
        return await self._decode(node, payload, kind)

    def _charge(self, shares: RateLimiter[bytes], node: bytes, size_bytes: int) -> None:
        work_s = SECONDS_PER_BYTE * max(0, size_bytes - self._explained_bytes)
        if work_s and (wait_s := shares.take(node, self._clock.monotonic(), work_s)):
            raise UnwantedMessage(
                f"large messages of yours take more processor time than a member has; try again in {wait_s:.0f} s"
            )

    async def _decode(self, node: bytes, payload: bytes, kind: type[S]) -> S:
        async with self._turn_of(node):
            return await decode_in_pieces(payload, kind, self._pause)

    async def _pause(self, size_bytes: int) -> None:
        await self._turns.take(VALUES_PER_TURN * size_bytes // PIECE_BYTES)

    @asynccontextmanager
    async def _turn_of(self, node: bytes) -> AsyncIterator[None]:
        lock = self._locks.setdefault(node, asyncio.Lock())
        self._waiting[node] = self._waiting.get(node, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._waiting[node] -= 1
            if not self._waiting[node]:
                del self._waiting[node], self._locks[node]
