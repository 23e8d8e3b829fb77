"""Members of the failure detector as rows: what one leaves behind, the next does not inherit."""

from __future__ import annotations

import pytest

from p2pnode.overlay.kademlia.messages import MemberState
from p2pnode.overlay.membership.member_rows import NOTHING_REPORTED, MemberRows
from p2pnode.overlay.peer_table import PeerTable
from p2pnode.overlay.row_index import RESTING_ROWS
from tests.harness.builders.peers import heartbeat, ids


def test_a_member_begins_with_nothing_of_the_one_whose_row_it_takes() -> None:
    """Every field of a removed member is in the copy, and none of them in the row when another member takes it."""
    one, two, *others = ids(2 + RESTING_ROWS)
    members = MemberRows()
    members.add(one, 3, 1.0)
    member = members[one]
    member.state, member.refutation, member.missed, member.reported_dead = MemberState.SUSPECT, 4, 2, True
    member.since, member.deadline, member.probed, member.unconfirmed_update = 5.0, 8.0, 6.0, (3, 5, 0)
    row = members.index.rows[one]
    gone = members.remove(one)
    assert members.troubles == {}
    for other in others:
        members.add(other, 9, 8.0)
        members.remove(other)
    members.add(two, 1, 9.0)
    fresh = members[two]

    assert gone is not None
    assert (gone.rank(), gone.missed, gone.reported_dead) == ((3, 4, 1), 2, True)
    assert (gone.since, gone.deadline, gone.probed, gone.unconfirmed_update) == (5.0, 8.0, 6.0, (3, 5, 0))
    assert (fresh.state, fresh.rank(), fresh.missed, fresh.reported_dead) == (MemberState.ALIVE, (1, 0, 0), 0, False)
    assert (fresh.heard, fresh.since, fresh.deadline, fresh.probed) == (9.0, 0.0, 0.0, float("-inf"))
    assert fresh.unconfirmed_update == NOTHING_REPORTED
    assert members.index.rows[two] == row, "the row is used again"
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


def test_members_and_peers_share_rows_and_nothing_else() -> None:
    """A row is of both tables: what one removes the other still has, and a row is free when neither has it."""
    one, two, three = ids(3)
    members = MemberRows()
    peers = PeerTable(members.index)
    peers.observe(heartbeat(one), "10.0.0.1", 1.0)
    assert (len(members), list(members), members.get(one), one in members) == (0, [], None, False)
    members.add(one, 1, 1.0)
    members.add(two, 1, 2.0)
    assert (len(peers), peers.ids(), peers.get(two), two in peers, next(iter(peers)).node_id) == (
        1,
        [one],
        None,
        False,
        one,
    )
    assert (peers.remove(two), peers.at(peers.get(one).address)) == (None, one)  # type: ignore[union-attr]
    assert not peers.observe_again(heartbeat(two), peers.get(one).address, 3.0)  # type: ignore[union-attr]

    members.remove(one)
    assert (list(members), peers.ids()) == ([two], [one])
    peers.observe(heartbeat(three), "10.0.0.3", 4.0)
    assert len({members.index.rows[each] for each in (one, two, three)}) == 3, "the row is held still"
    peers.remove(one)
    assert list(members.index.rows) == [two, three]
    with pytest.raises(KeyError):
        members[one]


def test_an_incarnation_above_four_bytes_is_kept() -> None:
    """A counter that needs more than four bytes does not change those of others."""
    one, two = ids(2)
    members = MemberRows()
    members.add(one, 3, 1.0)
    members.add(two, 1, 1.0)
    members[two].incarnation = 1 << 40
    assert (members[one].incarnation, members[two].incarnation) == (3, 1 << 40)
    assert members.heard_again(two, 1 << 40, 2.0)
