"""Large messages are decoded in pieces: the same messages, the same refusals, and no piece that takes long."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from tests.harness.attacks.lies import KINDS
from tests.harness.attacks.typed_values import Typed
from tests.harness.environment.virtual_loop import run
from training.exchange import piecewise
from training.exchange.messages import decode, encode
from training.exchange.ownership_messages import FindDeltas, OwnedHistories, OwnedHistory, StateHead, StateTransfer
from training.exchange.piecewise import PIECE_BYTES, decode_in_pieces

GENESIS = b"g" * 16
ALL_KINDS = sorted({kind for kinds in KINDS.values() for kind in kinds}, key=lambda kind: kind.__name__)
#: Of each kind: a fault in one field showed within five.
MESSAGES, FLIPS = 12, 12


def in_pieces(payload: bytes, kind: Any) -> tuple[Any, list[int]]:
    """The message, and the sizes that were announced before each piece."""
    announced: list[int] = []

    async def pause(size_bytes: int) -> None:
        announced.append(size_bytes)
        await asyncio.sleep(0)

    async def decoded() -> Any:
        return await decode_in_pieces(payload, kind, pause)

    return run(decoded()), announced


def rows_of(count: int, ranges: int = 1) -> list[tuple[bytes, int, list[tuple[int, int]]]]:
    listed = [(2 * step, 2 * step) for step in range(ranges)]
    return [(number.to_bytes(20, "big"), 1, listed) for number in range(count)]


def outcome(payload: bytes, kind: Any) -> bytes:
    """What decoding it as a whole gives, as bytes; nothing for a refusal."""
    try:
        return encode(decode(payload, kind))
    except msgspec.DecodeError:
        return b""


def pieces_outcome(payload: bytes, kind: Any) -> bytes:
    try:
        return encode(in_pieces(payload, kind)[0])
    except msgspec.DecodeError:
        return b""


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.__name__)
def test_a_message_in_pieces_is_the_same_message(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random values of each message of the exchange, and of each with a few bytes changed or cut off, are accepted or
    refused as when they are decoded at once, with pieces of 8 bytes."""
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 8)
    chance = random.Random(f"pieces of {kind.__name__}")
    typed, refused = Typed(chance, [GENESIS]), 0
    for _ in range(MESSAGES):
        payload = encode(typed.value(kind))
        assert pieces_outcome(payload, kind) == outcome(payload, kind) != b""
        for _ in range(FLIPS):
            broken = bytearray(payload)
            broken[chance.randrange(len(broken))] = chance.choice(
                (0x00, 0x7F, 0x80, 0x90, 0x93, 0xC0, 0xC4, 0xDD, 0xFF)
            )
            del broken[chance.choice((len(broken), chance.randrange(len(broken)) + 1)) :]
            whole = outcome(bytes(broken), kind)
            assert pieces_outcome(bytes(broken), kind) == whole, bytes(broken).hex()
            refused += not whole
    assert refused


def test_no_piece_of_a_large_message_takes_long() -> None:
    """Whatever a list has, other tasks have a turn before each 16 KB that are decoded, and each 16 times as many that
    are only looked through."""
    pending = [(bytes(20), 1, step, 1.0, False) for step in range(30_000)]
    head = StateHead(0, 1, bytes(20), 5, 0.0, 0, 0, False, rows_of(30_000), pending)
    message = StateTransfer(GENESIS, [head, *[msgspec.structs.replace(head, shard=1, applied=rows_of(4))] * 2])
    payload = encode(message)
    assert len(payload) > 2_000_000

    found, announced = in_pieces(payload, StateTransfer)

    assert found == message
    decoded = [size for size in announced if size <= 2 * PIECE_BYTES]
    assert len(payload) <= sum(announced) < 1.6 * len(payload)
    assert len(decoded) > 0.9 * len(payload) / PIECE_BYTES
    assert max(announced) <= len(payload) / piecewise.SCANNED_PER_DECODED


def test_optional_parts_and_missing_ones_have_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier version sends fewer elements; a later one sends more."""
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 8)
    short = msgspec.msgpack.encode([[[3, "not_owner"]]])
    assert in_pieces(short, OwnedHistories)[0] == OwnedHistories([OwnedHistory(3, "not_owner")])
    longer = msgspec.msgpack.encode([GENESIS, 7, rows_of(40), {"more": [1, 2]}])
    assert in_pieces(longer, FindDeltas)[0] == FindDeltas(GENESIS, 7, rows_of(40))


def test_more_elements_than_any_message_needs_are_refused() -> None:
    """Ranges of three bytes each would fill the memory with small objects, and the collection of garbage looks at all
    of them."""
    rows = rows_of(9_000, 64)
    with pytest.raises(msgspec.DecodeError, match="more than 524288 elements"):
        in_pieces(encode(FindDeltas(GENESIS, 0, rows)), FindDeltas)
    assert in_pieces(encode(FindDeltas(GENESIS, 0, rows[:6_000])), FindDeltas)[0].identities == rows[:6_000]


@pytest.mark.parametrize("kind", [FindDeltas, StateTransfer])
def test_lists_in_lists_without_end_are_malformed(kind: Any) -> None:
    """Also behind the last element that is known, where nothing of them is decoded."""
    deep = b"\x91" * 5_000 + b"\x01"
    whole = encode(FindDeltas(GENESIS, 0, [])) if kind is FindDeltas else encode(StateTransfer(GENESIS, []))
    payload = bytes([whole[0] + 1]) + whole[1:] + deep
    with pytest.raises(msgspec.DecodeError):
        decode(payload, kind)
    with pytest.raises(msgspec.DecodeError):
        in_pieces(payload, kind)
