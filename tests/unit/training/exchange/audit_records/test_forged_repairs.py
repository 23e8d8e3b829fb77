"""Who offers deltas that two nodes deny is not heard for a while, and not blamed."""

from __future__ import annotations

from training.exchange.audit_records.forged_repairs import IGNORED_S, MAX_NOTED, WINDOW_S, ForgedRepairs


def test_a_member_that_two_nodes_contradict_is_not_heard_for_a_while() -> None:
    """One that contradicts others is no reason, however often: it may be the one that lies. Each time takes two."""
    forged = ForgedRepairs()
    assert not any(forged.note(b"m", b"x", float(at_s)) for at_s in range(100))
    assert not forged.is_ignored(b"m", 100.0)
    assert not forged.note(b"n", b"y", 100.0)
    assert forged.note(b"m", b"y", 100.0)
    assert forged.is_ignored(b"m", 99.9 + IGNORED_S)
    assert not forged.is_ignored(b"m", 100.0 + IGNORED_S)
    assert not forged.is_ignored(b"n", 100.0)
    assert not forged.note(b"m", b"z", 200.0)
    assert forged.note(b"m", b"x", 201.0)


def test_what_was_said_long_ago_does_not_count() -> None:
    forged = ForgedRepairs()
    forged.note(b"m", b"x", 0.0)
    assert not forged.note(b"m", b"y", WINDOW_S)
    assert forged.note(b"m", b"z", WINDOW_S + 1.0)


def test_their_number_is_bounded() -> None:
    """The pair that was noted longest ago is forgotten."""
    forged = ForgedRepairs()
    for number in range(MAX_NOTED + 1):
        forged.note(number.to_bytes(4, "big"), b"x", 1.0)
    assert len(forged._denied) == MAX_NOTED
    assert not forged.note(bytes(4), b"y", 1.0)
    assert forged.note((9).to_bytes(4, "big"), b"y", 1.0)
