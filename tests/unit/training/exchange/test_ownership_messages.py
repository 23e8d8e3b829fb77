"""Messages that move a shard: bounded on decoding, with terms as `Term`."""

from __future__ import annotations

import msgspec
import pytest

from p2pnode.training.exchange.messages import decode, encode
from p2pnode.training.exchange.ownership_messages import (
    MAX_FETCHED,
    CopyStatus,
    Fetch,
    FindDeltas,
    LoggedDelta,
    OwnedHistory,
    StateHead,
)
from tests.harness.builders.stores import IDS, term


def test_a_copy_has_a_term_and_a_fence() -> None:
    """The fence may be above the copy's own term."""
    status = decode(encode(CopyStatus(0, "backup", term(3, "a"), 7, term(5, "c"), 9)), CopyStatus)

    assert (status.term, status.fence, status.is_stored) == (term(3, "a"), term(5, "c"), False)


def test_an_unknown_role_is_refused() -> None:
    """A role decides how a copy ranks."""
    status = CopyStatus(0, "king", term(3, "a"), 7, term(5, "c"), 9)  # type: ignore[arg-type]

    with pytest.raises(msgspec.ValidationError):
        decode(encode(status), CopyStatus)


def test_a_fetch_names_few_shards() -> None:
    """The receiver copies each state for its answer."""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(Fetch([0] * (MAX_FETCHED + 1))), Fetch)


def test_the_rows_of_identities_are_bounded() -> None:
    """A row has at most 64 ranges, twice as many as a set of applied identities."""
    rows = [(IDS["x"], 1, [(2 * step, 2 * step) for step in range(64)])]
    assert decode(encode(FindDeltas(0, rows)), FindDeltas).identities == rows

    with pytest.raises(msgspec.ValidationError):
        decode(encode(FindDeltas(0, [(IDS["x"], 1, [*rows[0][2], (999, 999)])])), FindDeltas)


def test_a_repaired_delta_had_at_least_one_worker() -> None:
    """Reconciliation scales its weight by that number."""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(LoggedDelta(0, IDS["x"], 1, 1, 1.0, 0.5)), LoggedDelta)


def test_the_terms_of_states_and_histories_survive_the_wire() -> None:
    """As number and node."""
    head = StateHead(0, term(4, "a"), 1, 0.0, 0, 0, False, [], [])
    assert decode(encode(head), StateHead).term == term(4, "a")
    assert decode(encode(OwnedHistory(0, "owner", term(6, "b"))), OwnedHistory).term == term(6, "b")
