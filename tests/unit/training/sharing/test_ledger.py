"""What is known to be trained."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.sharing.ledger import LAP, MAX_OPEN, Ledger, bits, packed, unpacked
from p2pnode.training.sharing.ranking import first_in_rank, mask_of, weights
from p2pnode.training.trainer_link.data_messages import UNKNOWN

Note = tuple[int, int, int]
NOTES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 19), st.integers(0, 4)), max_size=60)


def noted(notes: list[Note], partitions: int = 20) -> Ledger:
    """A ledger of these notes; offset 4 is the whole partition."""
    ledger = Ledger(partitions)
    for epoch, partition, offset in notes:
        ledger.note((epoch, partition), offset, finished=offset == 4)
    return ledger


def contents(ledger: Ledger) -> tuple[object, ...]:
    return ledger.partitions, ledger.first, ledger.trained, ledger.offsets


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(NOTES, NOTES, st.randoms())
def test_knowledge_merges_in_any_order(mine: list[Note], theirs: list[Note], generator: random.Random) -> None:
    """Merging what another node knows gives what one node that heard all would know, in any order and repeatedly."""
    together = [*mine, *theirs]
    generator.shuffle(together)
    first, second = noted(mine), noted(theirs)
    first.merge(second.partitions, second.first, packed(second.trained), second.packed_offsets())
    second.merge(first.partitions, first.first, packed(first.trained), first.packed_offsets())
    first.merge(second.partitions, second.first, packed(second.trained), second.packed_offsets())

    assert contents(first) == contents(second) == contents(noted(together))


def test_a_complete_epoch_is_forgotten() -> None:
    """When the last partition is trained the next epoch is the first open one, and nothing of the old one is kept."""
    ledger = Ledger(3)
    ledger.note((0, 1), 5, finished=False)
    for partition in (0, 2, 1):
        ledger.note((0, partition), 9, finished=True)

    assert ledger.first == (1, 0)
    assert ledger.is_trained((0, 1))
    assert not ledger.is_trained((1, 1))
    assert (ledger.trained, ledger.offsets) == ({}, {})


def test_an_epoch_of_a_stream_has_as_many_sections_as_its_blocks_need() -> None:
    """Before the end is seen an epoch goes on for ever; afterwards the next epoch follows the last block."""
    ledger = Ledger(UNKNOWN)
    for block in range(LAP + 2):
        ledger.note((0, block), 1, finished=True)
    assert ledger.first == (0, 1)

    ledger.learn_partitions(LAP + 2)

    assert ledger.first == (1, 0)
    assert ledger.after((1, 0)) == (1, 1)
    assert ledger.after((1, 1)) == (2, 0)
    assert ledger.all_of((1, 1)) == 0b11


def test_the_share_of_the_open_epoch() -> None:
    """What is trained of the first incomplete epoch; unknown while a stream's end is."""
    ledger = Ledger(10)
    ledger.note((0, 4), 1, finished=True)
    ledger.note((1, 4), 1, finished=True)

    assert ledger.trained_share() == 0.1
    assert Ledger(UNKNOWN).trained_share() is None


def test_what_lies_far_behind_is_given_up() -> None:
    """A node that misses what others trained long ago continues near them, and counts what it gave up."""
    ledger = Ledger(4)
    ledger.note((MAX_OPEN + 4, 0), 1, finished=True)

    assert ledger.first == (5, 0)
    assert ledger.given_up == 5
    assert ledger.is_trained((4, 3))


def test_a_claim_of_an_absurd_epoch_costs_nothing() -> None:
    """A message that names epoch 2⁴⁸ is digested at once."""
    ledger = Ledger(4)
    ledger.note((1 << 48, 0), 1, finished=True)

    assert ledger.first == ((1 << 48) - MAX_OPEN + 1, 0)


def test_masks_survive_the_wire() -> None:
    """What is packed is unpacked; an empty mask is left out."""
    masks = {(0, 0): 0b1011, (2, 1): 1 << 1023, (3, 0): 0}

    assert unpacked(packed(masks)) == {(0, 0): 0b1011, (2, 1): 1 << 1023}
    assert list(bits(0b1011)) == [0, 1, 3]


# -- rendezvous ranking of partitions among members


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
