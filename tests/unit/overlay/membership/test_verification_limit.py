"""The bounds of verification pings."""

from __future__ import annotations

from collections import Counter

import pytest

from p2pnode.overlay.membership import service
from p2pnode.overlay.membership.service import VERIFY_PAUSE_S, VerificationLimit
from tests.harness.builders.peers import contact, ids


def test_a_contact_is_verified_once_per_pause() -> None:
    """By id and address: the same id at another port is another contact."""
    limit = VerificationLimit(Counter())
    node_id = ids(1)[0]

    assert limit.begin(contact(node_id), 0.0)
    assert not limit.begin(contact(node_id), VERIFY_PAUSE_S - 0.1)
    assert limit.begin(contact(node_id, port=2), 0.0)
    assert limit.begin(contact(node_id), VERIFY_PAUSE_S)


def test_only_so_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit they are refused and counted, until one has ended."""
    monkeypatch.setattr(service, "MAX_CONCURRENT_VERIFICATIONS", 2)
    counters: Counter[str] = Counter()
    limit = VerificationLimit(counters)

    assert [limit.begin(contact(node_id), 0.0) for node_id in ids(4)] == [True, True, False, False]
    assert counters == {"strangers_not_asked": 2}
    limit.end()
    assert limit.begin(contact(ids(5)[4]), 0.0)


def test_the_remembered_contacts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten."""
    monkeypatch.setattr(service, "MAX_PAUSED", 2)
    limit = VerificationLimit(Counter())
    for node_id in ids(3):
        limit.begin(contact(node_id), 0.0)

    assert len(limit) == 2
    assert limit.begin(contact(ids(1)[0]), 0.1), "it was forgotten"


def test_a_pause_that_is_over_is_forgotten() -> None:
    """What is remembered is bounded by the verifications of one pause, not by the nodes met."""
    limit = VerificationLimit(Counter())
    for second, node_id in enumerate(ids(50)):
        limit.begin(contact(node_id), second * 1.1 * VERIFY_PAUSE_S)

    assert len(limit) == 1


def test_pauses_end_without_another_verification() -> None:
    """A node that has met everybody verifies nobody for minutes: what it remembers then is nothing."""
    limit = VerificationLimit(Counter())
    for node_id in ids(50):
        limit.begin(contact(node_id), 0.0)
    limit.expire(0.5 * VERIFY_PAUSE_S)
    assert len(limit) == 50
    limit.expire(VERIFY_PAUSE_S)
    assert len(limit) == 0
