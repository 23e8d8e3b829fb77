"""Statements about shared data on the wire: what is decoded, and what is refused before anybody looks at it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pnode.training.sharing.messages import MAX_BEGUN, MAX_MEMBERS, MAX_SECTIONS, ShareData, Statement
from p2pnode.training.trainer_link.data_messages import DataShape, SectionMask

ONE, TWO = b"a" * 20, b"b" * 20
STATEMENT = Statement(
    node=ONE,
    incarnation=2,
    number=7,
    shape=DataShape("samples", 100, 5),
    joining=False,
    left=False,
    view=[(ONE, 2), (TWO, 1)],
    partitions=3,
    first=(0, 1),
    trained=[],
    offsets=[(0, 1, 4)],
    begun=[(0, 1)],
    released=[],
    front=0,
)


def over_the_wire(message: ShareData) -> ShareData:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ShareData)


def test_a_member_is_included_by_its_present_start_alone() -> None:
    """What a node left to a former start of a member it does not leave to the next one."""
    assert STATEMENT.includes(TWO, 1)
    assert not STATEMENT.includes(TWO, 2)
    assert not STATEMENT.includes(b"c" * 20, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"node": b"short"},
        {"incarnation": -1},
        {"number": 1 << 48},
        {"view": [(ONE, 1)] * (MAX_MEMBERS + 1)},
        {"partitions": -2},
        {"first": (-1, 0)},
        {"offsets": [(0, 0, 0)] * (MAX_BEGUN + 1)},
        {"begun": [(0, 0)] * (MAX_BEGUN + 1)},
        {"front": -2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_statement_out_of_range_is_not_decoded(changes: dict[str, Any]) -> None:
    """A member that sends one is refused by the decoder; the largest that fits is accepted."""
    with pytest.raises(msgspec.ValidationError):
        over_the_wire(ShareData([msgspec.structs.replace(STATEMENT, **changes)]))


def test_the_largest_statement_is_decoded() -> None:
    """The bounds themselves are allowed, -1 for nothing included."""
    largest = msgspec.structs.replace(
        STATEMENT, view=[(ONE, 1)] * MAX_MEMBERS, begun=[(0, 0)] * MAX_BEGUN, partitions=-1, front=-1
    )
    assert over_the_wire(ShareData([largest])).statements == [largest]


@pytest.mark.parametrize("name", ["trained", "released"])
def test_sections_are_bounded(name: str) -> None:
    """At most so many of each kind; one more is refused."""
    section = SectionMask(0, 0, b"\x01")
    fits = msgspec.structs.replace(STATEMENT, **{name: [section] * MAX_SECTIONS})
    assert over_the_wire(ShareData([fits])).statements == [fits]
    with pytest.raises(msgspec.ValidationError):
        over_the_wire(ShareData([msgspec.structs.replace(fits, **{name: [section] * (MAX_SECTIONS + 1)})]))


def test_a_message_names_a_bounded_number_of_members() -> None:
    """In each of its three lists."""
    too_many = MAX_MEMBERS + 1
    for message in (
        ShareData([STATEMENT] * too_many),
        ShareData([], [(ONE, 1, 1)] * too_many),
        ShareData([], [], [ONE] * too_many),
    ):
        with pytest.raises(msgspec.ValidationError):
            over_the_wire(message)
