"""Rendezvous ranking of partitions among members."""

from __future__ import annotations

from collections import Counter

import numpy as np

from p2pnode.training.sharing.ledger import LAP
from p2pnode.training.sharing.ranking import first_in_rank, mask_of, weights

MEMBERS = [bytes([number]) * 20 for number in range(8)]


def owners(members: list[bytes], *, epoch: int = 0, released: list[int] | None = None) -> list[bytes]:
    table = weights(1, (epoch, 0), members, LAP)
    return [members[column] for column in first_in_rank(table, released or [0] * len(members))]


def test_the_members_have_equal_shares() -> None:
    """Of 1024 partitions each of eight members owns 128, within five deviations."""
    counts = Counter(owners(MEMBERS))

    assert all(abs(counts[member] - 128) < 5 * 10.6 for member in MEMBERS)


def test_a_member_that_goes_moves_only_its_own() -> None:
    """Partitions of the other members stay with them."""
    before, after = owners(MEMBERS), owners(MEMBERS[:3] + MEMBERS[4:])

    moved = [old for old, new in zip(before, after, strict=True) if old != new]

    assert set(moved) == {MEMBERS[3]}
    assert len(moved) == Counter(before)[MEMBERS[3]]


def test_every_epoch_is_ranked_anew() -> None:
    """Of two epochs a member owns the same partition by chance only."""
    same = sum(one == other for one, other in zip(owners(MEMBERS), owners(MEMBERS, epoch=1), strict=True))

    assert 80 < same < 180


def test_a_released_partition_goes_to_the_next_in_rank() -> None:
    """To the same one as if the member were gone; if all release it, the first has it again."""
    table = weights(1, (0, 0), MEMBERS, LAP)
    everything = (1 << LAP) - 1
    released = [everything if number == 2 else 0 for number in range(8)]

    assert owners(MEMBERS, released=released) == owners(MEMBERS[:2] + MEMBERS[3:])
    assert np.array_equal(first_in_rank(table, [everything] * 8), first_in_rank(table, [0] * 8))


def test_a_mask_has_the_bits_of_the_chosen() -> None:
    """Bit i is partition i."""
    assert mask_of(np.array([True, False, True, True])) == 0b1101
