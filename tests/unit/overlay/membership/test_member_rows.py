"""Members of the failure detector as rows: what one leaves behind, the next does not inherit."""

from __future__ import annotations

from overlay.kademlia.messages import MemberState
from overlay.membership.member_rows import NOTHING_REPORTED, MemberRows
from tests.harness.builders.peers import ids


def test_a_member_begins_with_nothing_of_the_one_whose_row_it_takes() -> None:
    """Every field of a removed member is in the copy, and none of them in the row when another member takes it."""
    one, two = ids(2)
    members = MemberRows()
    members.add(one, 3, 1.0)
    member = members[one]
    member.state, member.refutation, member.missed, member.reported_dead = MemberState.SUSPECT, 4, 2, True
    member.since, member.deadline, member.probed, member.unconfirmed_update = 5.0, 8.0, 6.0, (3, 5, 0)
    gone = members.remove(one)
    assert members.troubles == {}
    members.add(two, 1, 9.0)
    fresh = members[two]

    assert gone is not None
    assert (gone.rank(), gone.missed, gone.reported_dead) == ((3, 4, 1), 2, True)
    assert (gone.since, gone.deadline, gone.probed, gone.unconfirmed_update) == (5.0, 8.0, 6.0, (3, 5, 0))
    assert (fresh.state, fresh.rank(), fresh.missed, fresh.reported_dead) == (MemberState.ALIVE, (1, 0, 0), 0, False)
    assert (fresh.heard, fresh.since, fresh.deadline, fresh.probed) == (9.0, 0.0, 0.0, float("-inf"))
    assert fresh.unconfirmed_update == NOTHING_REPORTED
    assert len(members.heard) == 1, "the row is used again"
    assert (members.get(one), members.remove(one)) == (None, None)
    assert list(members) == [two]


def test_trouble_that_is_over_leaves_nothing() -> None:
    """A member that was suspected and reported dead is as any other when it is alive; its refutation count stays."""
    (one,) = ids(1)
    members = MemberRows()
    members.add(one, 3, 1.0)
    member = members[one]
    member.state, member.since, member.deadline, member.reported_dead = MemberState.SUSPECT, 5.0, 8.0, True
    assert not members.heard_again(one, 3, 6.0), "a message of a suspect ends the suspicion"
    member.state, member.reported_dead = MemberState.ALIVE, False
    assert (members.troubles, member.since, member.deadline) == ({}, 0.0, 0.0)
    member.missed = 1000
    assert member.missed == 255
    assert members.heard_again(one, 3, 7.0)
    assert (member.heard, member.missed) == (7.0, 0)
    assert not members.heard_again(one, 4, 8.0), "another start"
    member.refutation = 2
    member.state = MemberState.SUSPECT
    member.state = MemberState.ALIVE
    assert member.rank() == (3, 2, 0)
    assert not members.heard_again(one, 3, 8.0), "others may have reported a refutation"
