"""Which recorded deltas a state lacks after a restart, and which of two copies has more."""

from __future__ import annotations

import numpy as np

from training.exchange.ownership_messages import OwnedHistory
from training.exchange.store.losses import is_worth_more, named, only_here, spans, write_off
from training.exchange.store.repair_log import LogEntry, SupersededCopy
from training.exchange.terms import Term
from training.shards.applied import Applied, DeltaId
from training.shards.state import ShardState

NODE, OTHER = b"n" * 20, b"o" * 20


def state(last: int, other: int = 0, unlisted: int = 0) -> ShardState:
    """A state with the steps 1 to `last` of one node and 1 to `other` of another."""
    return ShardState(
        np.zeros(4, np.float32), 4, version=last + other + unlisted, applied=rows(last, other), unlisted=unlisted
    )


def rows(last: int, other: int = 0) -> Applied:
    return Applied.of_rows([(NODE, 1, [(1, last)]), (OTHER, 1, [(1, other)])])


def history(last: int, other: int = 0, *, unlogged: int, unlisted: int = 0) -> OwnedHistory:
    known = rows(last, other).rows()
    return OwnedHistory(0, "owner", 5, NODE, known=known, unlogged=unlogged, unlisted=unlisted, counts=True)


def worth(copy: ShardState, owned: OwnedHistory) -> bool:
    return is_worth_more(SupersededCopy(Term(3, NODE), copy), owned)


def test_what_a_state_lacks_is_reported_once() -> None:
    """Its later steps are written off; a second report of the same has nothing new, one of a later step has that."""
    found = state(10, 4)
    assert spans(write_off(found, rows(12, 4))) == [(NODE, 1, 11, 12)]
    assert not write_off(found, rows(12, 4)).count()
    assert spans(write_off(found, rows(13))) == [(NODE, 1, 13, 13)]
    assert found.written_off.count() == 3


def test_earlier_gaps_are_no_loss() -> None:
    """A step below the last one was refused, or travelled with the next: it is in no shard."""
    found = state(0)
    found.applied.merge(Applied.of_rows([(NODE, 1, [(1, 3), (6, 9)])]))
    assert not write_off(found, rows(9)).count()


def test_a_replica_has_the_oldest_of_the_recorded_deltas() -> None:
    """Its number of deltas is known: of 16 recorded ones it has 12, so the last two of each node are lost."""
    found = state(0, unlisted=12)
    assert spans(write_off(found, rows(8, 8))) == [(NODE, 1, 7, 8), (OTHER, 1, 7, 8)]
    assert (found.unlisted, found.applied.count()) == (0, 12)


def test_a_replica_with_more_than_is_recorded_has_lost_nothing() -> None:
    """The rest stays unlisted, and is what a node that comes late has recorded."""
    found = state(0, unlisted=12)
    assert not write_off(found, rows(8)).count()
    assert found.unlisted == 4
    assert not write_off(found, rows(8, 4)).count()
    assert (found.unlisted, found.written_off.count()) == (0, 0)


def test_the_copy_with_fewer_losses_is_worth_more() -> None:
    """What the owner has in its log is added to the copy, so only the rest counts against it; equal ones stay."""
    assert worth(state(10, 8), history(10, 2, unlogged=12))
    assert worth(state(10), history(9, 5, unlogged=9))
    assert not worth(state(10), history(9, 5, unlogged=14))
    assert not worth(state(10), history(9, 1, unlogged=10))
    assert not worth(state(10), history(10, 5, unlogged=10))


def test_an_owner_that_began_with_a_replica_yields_to_a_copy_with_as_many_deltas() -> None:
    """That one lists them. A copy with fewer is older than the replica."""
    assert worth(state(10), history(0, 3, unlogged=0, unlisted=10))
    assert not worth(state(9), history(0, 3, unlogged=0, unlisted=10))
    assert worth(state(12), history(0, 3, unlogged=1, unlisted=10))
    assert not worth(state(12), history(0, 3, unlogged=2, unlisted=10))


def test_only_here_counts_what_a_replica_may_have() -> None:
    """Of 10 deltas that the owner does not list its replica has 8: the last two are in the copy alone."""
    copy = SupersededCopy(Term(3, NODE), state(10))
    assert spans(only_here(copy, history(0, unlogged=0, unlisted=8))) == [(NODE, 1, 9, 10)]
    assert named(spans(only_here(copy, history(4, unlogged=4)))) == [f"{NODE.hex()[:8]}/1:5-10"]


def test_what_the_log_of_the_copy_has_is_no_reason_to_take_the_shard_back() -> None:
    """It is offered to the owner; but not where it is unknown which deltas the owner's replica has."""
    log = [LogEntry(DeltaId(NODE, 1, step), 1.0, b"", "float32", True, 1.0, 0.0) for step in (9, 10)]
    copy = SupersededCopy(Term(3, NODE), state(10))
    assert is_worth_more(copy, history(8, unlogged=8))
    assert not is_worth_more(copy, history(8, unlogged=8), log)
    assert is_worth_more(copy, history(0, unlogged=0, unlisted=8), log)


def test_a_replica_takes_no_shard_back_from_a_state_that_lists_its_deltas() -> None:
    """The owner's log cannot be added to it: which of those deltas it has is unknown."""
    assert not worth(state(3, unlisted=8), history(2, 6, unlogged=0))
