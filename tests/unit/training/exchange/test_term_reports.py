"""How high the terms are that others know, and when they contradict what one member has claimed."""

from __future__ import annotations

import pytest

from tests.harness.builders.stores import contact
from training.exchange.term_reports import MAX_MEMBERS, TermReports
from training.exchange.terms import GENERATION, MAX_GENERATIONS_AHEAD, OwnerInfo, Term


def info(generation: int) -> OwnerInfo:
    return OwnerInfo.of(0, Term(generation * GENERATION + 7, contact("a").node_id), contact("a"))


def reports(*generations: int) -> TermReports:
    found = TermReports()
    for number, generation in enumerate(generations):
        assert found.note(bytes([number]), [info(0), info(generation)])
    return found


FAR = 2 + MAX_GENERATIONS_AHEAD + 1


@pytest.mark.parametrize(
    ("generations", "is_contradicted"),
    [
        ((), False),
        ((1,), False),
        ((1, FAR), False),
        ((1, 2), True),
        ((1, 2, FAR), True),
        ((1, 2, FAR, FAR), False),
        ((3, 3, 3), False),
    ],
)
def test_two_members_contradict_a_term_and_most_of_those_asked(
    generations: tuple[int, ...], is_contradicted: bool
) -> None:
    """One against one decides nothing, nor do as many as believe it; a term that their history explains is none."""
    limit = reports(*generations).highest_explained(FAR * GENERATION + 9)
    assert (limit is not None) is is_contradicted
    if limit is not None:
        assert max(generation for generation in generations if generation < FAR) * GENERATION < limit
        assert limit < FAR * GENERATION


def test_a_member_that_knows_no_owner_reports_nothing() -> None:
    """One that has just started cannot say how high the terms are."""
    found = TermReports()
    assert not found.note(b"a", [])
    assert found.highest_explained(FAR * GENERATION) is None


def test_of_each_member_the_last_report_counts_and_they_take_bounded_memory() -> None:
    """However many there are."""
    found = reports(1, 1)
    found.note(b"\0", [info(FAR)])
    assert found.highest_explained(FAR * GENERATION) is None
    for number in range(3 * MAX_MEMBERS):
        found.note(number.to_bytes(4), [info(1)])
    assert len(found._highest) == MAX_MEMBERS
