"""Messages of a step: checked on decoding, and readable answers."""

from __future__ import annotations

import msgspec
import pytest

from tests.harness.builders.stores import IDS, contact, term
from tests.harness.stubs.exchange_context import GENESIS
from training.exchange.messages import (
    LocateOwnersAnswer,
    PullResult,
    Push,
    PushAnswer,
    PushResult,
    decode,
    encode,
)
from training.exchange.terms import MAX_SHARDS, OwnerInfo

PUSH = Push(GENESIS, IDS["x"], 1, 2, 1, 0.5, [0, 1])


def test_a_message_survives_the_wire() -> None:
    """As an array, without the names of its fields."""
    assert decode(encode(PUSH), Push) == PUSH
    assert msgspec.msgpack.decode(encode(PUSH))[:2] == [GENESIS, IDS["x"]]


@pytest.mark.parametrize(
    "changes",
    [{"node": b"short"}, {"step": -1}, {"weight": 0.0}, {"shards": [4096]}, {"shards": [0] * (MAX_SHARDS + 1)}],
)
def test_a_value_out_of_range_is_refused(changes: dict[str, object]) -> None:
    """Lengths, signs and the number of shards are checked before a handler runs."""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(msgspec.structs.replace(PUSH, **changes)), Push)


@pytest.mark.parametrize("kind", [LocateOwnersAnswer, PushAnswer])
def test_text_and_lists_that_msgspec_cannot_read_are_malformed(kind: type[msgspec.Struct]) -> None:
    """It raises other errors for text that is no UTF-8, and for lists in lists behind the last element that is known:
    they would end the task that reads an answer."""
    shown = PushAnswer([PushResult(0, "refused", reason="xy")]) if kind is PushAnswer else LocateOwnersAnswer([info()])
    payload = encode(shown)
    assert decode(payload, kind) == shown
    with pytest.raises(msgspec.DecodeError):
        decode(payload.replace(b"xy", b"\xff\xff").replace(b"10.0", b"\xff\xff\xff\xff"), kind)
    deep = (
        bytes([payload[0] + 3]) + payload[1:] + (b"\xc2" * 1 if kind is PushAnswer else b"") + b"\x91" * 5_000 + b"\1"
    )
    with pytest.raises(msgspec.DecodeError):
        decode(deep, kind)


def info() -> OwnerInfo:
    return OwnerInfo.of(0, term(1, "b"), contact("b"))


def test_a_reason_of_a_later_version_is_accepted() -> None:
    """A refusal is final whatever its reason."""
    result = decode(encode(PushResult(0, "refused", reason="from-the-future")), PushResult)

    assert (result.status, result.reason, result.denies_ownership) == ("refused", "from-the-future", False)


def test_only_a_redirect_or_an_unknown_owner_denies_ownership() -> None:
    """Any other retry is for the same owner."""
    info = OwnerInfo.of(0, term(1, "b"), contact("b"))

    assert PushResult(0, "redirect", owner_info=info).denies_ownership
    assert PushResult.retry(0, "owner_unknown").denies_ownership
    assert not PushResult.retry(0, "too_many_pending").denies_ownership
    assert not PushResult.refused(0, "late").denies_ownership
    assert PullResult(0, "retry").denies_ownership
    assert not PullResult(0, "same").denies_ownership


def test_a_value_ranks_by_its_own_term_unless_another_is_given() -> None:
    """The rank differs after a take-over that has added nothing."""
    assert PullResult(0, "value", *term(9, "a")).rank_term == term(9, "a")
    assert PullResult(0, "value", *term(9, "a"), 1, None, *term(4, "b")).rank_term == term(4, "b")
