"""Which partitions of which epochs are trained, as far as a node knows. It only grows, and merges in any order.

The partitions of an epoch are numbered from 0 and kept in *sections* of 1024: (epoch, lap) with one bit each. Sections
before `first` are complete and forgotten. At most `MAX_OPEN` are kept: what lies further behind is given up. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from p2pnode.training.trainer_link.data_messages import UNKNOWN, DataState, SectionMask

Section = tuple[int, int]
#: (epoch, partition)
Place = tuple[int, int]

LAP = 1024
ALL = (1 << LAP) - 1
#: Open sections kept. A node that is further behind continues where the others are.
MAX_OPEN = 64


def section_of(place: Place) -> Section:
    return place[0], place[1] // LAP


def bit_of(place: Place) -> int:
    return 1 << place[1] % LAP


def bits(mask: int) -> Iterator[int]:
    """The numbers of the bits that are set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def packed(masks: dict[Section, int]) -> list[SectionMask]:
    """Masks for the wire, in order of sections."""
    return [
        SectionMask(epoch, lap, mask.to_bytes((mask.bit_length() + 7) // 8, "little"))
        for (epoch, lap), mask in sorted(masks.items())
        if mask
    ]


def unpacked(masks: Iterable[SectionMask]) -> dict[Section, int]:
    return {(one.epoch, one.lap): int.from_bytes(one.mask, "little") for one in masks}


class Ledger:
    """The trained partitions. `partitions` is their number in an epoch, `UNKNOWN` for a stream whose end is unseen."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.first: Section = (0, 0)
        self.trained: dict[Section, int] = {}
        self.offsets: dict[Place, int] = {}
        #: Sections that were given up because they lay too far behind.
        self.given_up = 0

    # -- what is known -------------------------------------------------------------------------------------------

    def all_of(self, section: Section) -> int:
        """The mask of all partitions of a section; 0 beyond the end of the epoch."""
        if self.partitions == UNKNOWN:
            return ALL
        return (1 << min(LAP, max(0, self.partitions - section[1] * LAP))) - 1

    def untrained(self, section: Section) -> int:
        """The mask of a section's partitions that are not known to be trained."""
        if section < self.first:
            return 0
        return self.all_of(section) & ~self.trained.get(section, 0)

    def is_trained(self, place: Place) -> bool:
        return not self.untrained(section_of(place)) & bit_of(place)

    def trained_share(self) -> float | None:
        """The share of the first open epoch that is known to be trained; None for a stream whose end is unseen."""
        if self.partitions == UNKNOWN:
            return None
        epoch, laps_before = self.first
        known = sum(mask.bit_count() for (one, _), mask in self.trained.items() if one == epoch)
        return round((laps_before * LAP + known) / self.partitions, 4)

    def laps(self) -> int:
        """Sections of an epoch; only for a known number of partitions."""
        return max(1, -(-self.partitions // LAP))

    def after(self, section: Section) -> Section:
        epoch, lap = section
        if self.partitions != UNKNOWN and (lap + 1) * LAP >= self.partitions:
            return epoch + 1, 0
        return epoch, lap + 1

    # -- what is learnt ------------------------------------------------------------------------------------------

    def note(self, place: Place, offset: int, *, finished: bool) -> None:
        """The first `offset` samples of a partition are trained, or all."""
        if section_of(place) < self.first:
            return
        if finished:
            section = section_of(place)
            self.trained[section] = self.trained.get(section, 0) | bit_of(place)
            self.offsets.pop(place, None)
        elif not self.is_trained(place):
            self.offsets[place] = max(offset, self.offsets.get(place, 0))
        self._forget_complete()

    def learn_partitions(self, partitions: int) -> None:
        """The end of the stream was seen."""
        if self.partitions == UNKNOWN and partitions != UNKNOWN:
            self.partitions = partitions
            self._forget_complete()

    def merge(
        self, partitions: int, first: Section, trained: Iterable[SectionMask], offsets: Iterable[tuple[int, int, int]]
    ) -> None:
        """Take over what another node knows, or a saved state."""
        self.learn_partitions(partitions)
        self.first = max(self.first, first)
        for section, mask in unpacked(trained).items():
            self.trained[section] = self.trained.get(section, 0) | mask
        for epoch, partition, offset in offsets:
            if not self.is_trained((epoch, partition)):
                self.offsets[epoch, partition] = max(offset, self.offsets.get((epoch, partition), 0))
        self._forget_complete()

    def state(self, epoch: int) -> DataState:
        """What to save; `epoch` is the one that this node iterates over."""
        return DataState(epoch, self.partitions, self.first, packed(self.trained), self.packed_offsets())

    def packed_offsets(self) -> list[tuple[int, int, int]]:
        return [(epoch, partition, offset) for (epoch, partition), offset in sorted(self.offsets.items())]

    # -- forgetting ----------------------------------------------------------------------------------------------

    def _forget_complete(self) -> None:
        before = self.first
        self._give_up()
        while not self.untrained(self.first):
            self.first = self.after(self.first)
        if self.first != before or any(section < before for section in self.trained):
            self.trained = {section: mask for section, mask in self.trained.items() if section >= self.first}
        for place in [place for place in self.offsets if self.is_trained(place)]:
            del self.offsets[place]

    def _give_up(self) -> None:
        """Keep the distance from the first open section to the last one with anything trained within `MAX_OPEN`."""
        laps = 1 << 48 if self.partitions == UNKNOWN else self.laps()
        front = max(self.trained, default=self.first)
        oldest = front[0] * laps + front[1] - MAX_OPEN + 1
        behind = oldest - (self.first[0] * laps + self.first[1])
        if behind > 0:
            self.given_up += behind
            self.first = divmod(oldest, laps)
