"""The status of a copy that a survey reports, for every role."""

from __future__ import annotations

from tests.harness.builders.stores import IDS, contact, delta, store_of, term, zeros
from training.exchange.ownership_messages import CopyStatus
from training.exchange.store.copies import copy_status
from training.exchange.terms import ZERO_TERM


def test_the_status_of_every_role() -> None:
    """Owner, backup, learner, replica, none; a learner without its state offers its replica."""
    store = store_of("b")
    mark = (term(1, "d"), 9)
    fence = (0, b"")
    assert copy_status(store, 0, None, 5) == CopyStatus(0, "none", *ZERO_TERM, 0, *fence, 5)
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "replica", 1, IDS["d"], 9, *fence, 5)

    store.begin_catch_up(0, term(2, "a"), contact("a"))
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "replica", 1, IDS["d"], 9, 2, IDS["a"], 5)

    store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    learner = copy_status(store, 0, mark, 5)
    assert (learner.role, learner.term, learner.version) == ("learner", term(2, "a"), 0)

    store.accept_forward(0, term(3, "a"), delta(1), 0, IDS["a"])
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "backup", 3, IDS["a"], 1, 3, IDS["a"], 5)

    state = store.backed[0].state
    assert state is not None
    store.own(0, state, term(4, "b"), contact("b"), 0.0, by_handover=False)
    store.ownership.raise_fence(0, term(6, "c"))
    status = copy_status(store, 0, mark, 5)
    assert status == CopyStatus(0, "owner", 4, IDS["b"], 1, 6, IDS["c"], 5)
    assert (status.term, status.fence) == (term(4, "b"), term(6, "c"))
