"""The record of a node's own deltas: what an owner may have, over restarts."""

from __future__ import annotations

import pytest

from training.exchange.store.push_record import BadRecord, PushRecord
from training.shards.applied import DeltaId

NODE, GENESIS = b"n" * 20, b"g" * 16


def test_what_an_owner_may_have_is_in_the_record_and_what_it_refused_is_not() -> None:
    """A delta counts from the moment that it is pushed; one that no owner took counts no more."""
    record = PushRecord()
    for step in (1, 2):
        record.begin(DeltaId(NODE, 3, step), 7)
        record.end(DeltaId(NODE, 3, step), is_added=step == 1)
    assert record.deltas().rows() == [(NODE, 3, [(1, 1)])]
    record.begin(DeltaId(NODE, 3, 4), 8)
    assert record.deltas().rows() == [(NODE, 3, [(1, 1), (4, 4)])]


def test_a_later_start_reads_it() -> None:
    """With the generation of the last push; the deltas of both starts are in it from then on."""
    first, second = PushRecord(), PushRecord()
    first.begin(DeltaId(NODE, 3, 1), 7)
    second.load(first.encode(GENESIS), GENESIS)
    assert second.generation == 7
    second.begin(DeltaId(NODE, 4, 2), 8)
    assert second.deltas().rows() == [(NODE, 3, [(1, 1)]), (NODE, 4, [(2, 2)])]


@pytest.mark.parametrize("raw", [b"", b"\x93", b"\x93\xc4\x01a\x01\x90"])
def test_a_damaged_file_or_that_of_another_swarm_is_refused(raw: bytes) -> None:
    """It is named as the reason, and nothing is taken from it."""
    record = PushRecord()
    with pytest.raises(BadRecord):
        record.load(raw, GENESIS)
    assert not record.deltas().count()


def test_a_delta_that_is_a_part_of_a_later_one_is_recorded_no_more() -> None:
    """No owner gets it, so none has lost it."""
    record = PushRecord()
    for step in (1, 2, 3):
        record.begin(DeltaId(NODE, 3, step), 7)
        record.end(DeltaId(NODE, 3, step), is_added=True)
    record.leave_out(DeltaId(NODE, 3, 2))
    record.begin(DeltaId(NODE, 3, 4), 7)
    assert record.acknowledged().rows() == [(NODE, 3, [(1, 1), (3, 3)])]
    assert record.deltas().rows() == [(NODE, 3, [(1, 1), (3, 4)])]
