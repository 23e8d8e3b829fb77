"""Counts what is drawn, trained and reported of the claims that a trainer has. Pure.

A loader draws ahead of the training: batches wait in queues and workers. So a sample is trained when `swarm.step` has
counted it, in the order of drawing, and it is reported with the delta of its turn. What was drawn and not trained when
an iteration ends is drawn again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from p2pnode.training.trainer_link.data_messages import Claim, PartitionTrained


@dataclass(slots=True)
class ClaimProgress:
    """A claim at work. The first `drawn`, `trained` and `reported` of its `size` samples are so; `told`: all are."""

    claim: Claim
    size: int
    drawn: int
    trained: int
    reported: int
    told: bool = False

    @classmethod
    def of(cls, claim: Claim, size: int) -> ClaimProgress:
        return cls(claim, size, claim.offset, claim.offset, claim.offset)

    def as_claim(self) -> Claim:
        """The claim of what is not trained yet."""
        return Claim(self.claim.epoch, self.claim.partition, self.trained, self.claim.counted)

    @property
    def order(self) -> tuple[int, int]:
        """Where a stream has it: by block, and then by epoch."""
        return self.claim.partition, self.claim.epoch

    @property
    def is_news(self) -> bool:
        return self.trained > self.reported or (self.trained == self.size and not self.told)

    def report(self) -> PartitionTrained:
        self.reported, self.told = self.trained, self.trained == self.size
        return PartitionTrained(self.claim.epoch, self.claim.partition, self.trained, self.told)


class Draws:
    """The claims that are drawn in one iteration, in the order of drawing."""

    def __init__(self) -> None:
        self._parts: deque[ClaimProgress] = deque()

    def add(self, part: ClaimProgress) -> None:
        """This part is drawn next."""
        self._parts.append(part)

    def count(self, samples: int) -> int:
        """So many more samples were trained; returns how many of them were never drawn."""
        for part in self._parts:
            many = min(samples, part.drawn - part.trained)
            part.trained += many
            samples -= many
            if not samples:
                break
        return samples

    def finish(self) -> None:
        """All that was drawn is trained."""
        for part in self._parts:
            part.trained = part.drawn

    def restart(self) -> list[ClaimProgress]:
        """The iteration is over; returns what is not wholly trained, to be drawn again from where training stands."""
        unfinished = [part for part in self._parts if part.trained < part.size]
        for part in unfinished:
            part.drawn = part.trained
        self._parts = deque(part for part in self._parts if part.trained == part.size)
        return unfinished

    def report(self) -> list[PartitionTrained]:
        """What has been trained since the last report."""
        reports = [part.report() for part in self._parts if part.is_news and part.claim.counted]
        while self._parts and self._parts[0].trained == self._parts[0].size:
            self._parts.popleft()
        return reports
