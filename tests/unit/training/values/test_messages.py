"""Messages of a run without a model: who denies that it owns a shard, and lists that are too long."""

from __future__ import annotations

import msgspec
import pytest

from tests.harness.builders.value_updates import update
from training.exchange.terms import Term
from training.values.owner import MAX_ITEMS, KeysResult, ReadResult, ShardUpdate, decode_updates


@pytest.mark.parametrize(
    ("status", "is_unknown", "denies"),
    [
        ("redirect", False, True),
        ("retry", True, True),
        ("retry", False, False),
    ],
)
def test_a_redirect_and_an_unknown_shard_deny_ownership(status: str, is_unknown: bool, denies: bool) -> None:
    """Of reads and of lists alike; a shard that moves is still owned."""
    for kind, answered in ((ReadResult, "value"), (KeysResult, "keys")):
        assert kind(3, status, is_unknown=is_unknown).denies_ownership is denies  # type: ignore[arg-type]
        assert not kind(3, answered).denies_ownership  # type: ignore[arg-type]
        assert kind(3, answered, 5, b"n").term == Term(5, b"n")  # type: ignore[arg-type]


def test_updates_of_a_body_come_back_and_too_many_are_refused() -> None:
    """None, the most, and one more; and bytes that are none."""
    one = ShardUpdate(2, update(1))
    assert decode_updates(msgspec.msgpack.encode([])) == []
    assert decode_updates(msgspec.msgpack.encode([one] * MAX_ITEMS)) == [one] * MAX_ITEMS
    for raw in (msgspec.msgpack.encode([one] * (MAX_ITEMS + 1)), b"", b"\xff"):
        with pytest.raises(msgspec.DecodeError):
            decode_updates(raw)
