"""`swarm.sampler(dataset)`: gives a `DataLoader` the samples that this node is to train."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

from p2pnode.training.dispatch.permutation import EpochOrder
from p2pnode.training.trainer.sampling.draws import ClaimProgress, Draws
from p2pnode.training.trainer.sampling.link import DataLink, LinkedReader
from p2pnode.training.trainer_link.data_messages import DataGranted, PartitionTrained

#: A request for claims asks for at least so many samples, or for those of a step: each request costs a round trip.
SAMPLES_ASKED = 64


class SwarmSampler(LinkedReader, Sampler[int]):
    """Indices of a data set that all nodes of the swarm share. One iteration is this node's part of an epoch, or, if
    `length` is set, so many samples of it and of the epochs behind it.

    Samples that other nodes train, or have trained, are not in it. When nodes join, leave or crash, the rest of the
    epoch is divided anew. Samples that a loader has fetched, but `swarm.step` has not counted when an iteration ends,
    are drawn again.
    """

    def __init__(self, link: DataLink, size: int, *, shuffle: bool, nodes: float) -> None:
        self.length = 0
        self._draws = Draws()
        #: Parts that this iteration has still to draw. A new iteration has a list of its own: the one before ends.
        self._left: list[ClaimProgress] = []
        self._link: DataLink = link
        self._size = size
        self._shuffle = shuffle
        self._nodes = nodes
        self._partitions = link.shape.partitions
        self._finished = False
        self._asked = SAMPLES_ASKED
        self._orders: dict[int, EpochOrder] = {}

    def is_of(self, size: int, *, shuffle: bool) -> bool:
        """Whether it was made for a data set of this size, in this order."""
        return (size, shuffle) == (self._size, self._shuffle)

    def __len__(self) -> int:
        """The expected number of samples of an iteration: the actual one is known only when the iteration has ended."""
        if self.length:
            return self.length
        return max(1, round(self._size / max(1.0, self._nodes) / self._link.ranks.count))

    def __iter__(self) -> Iterator[int]:
        # At once, not with the first sample: a loader that fetches ahead must not mix two iterations.
        left = self._left = [*self._draws.restart(), *self._left]
        finished, self._finished = self._finished, False
        return self._indices(left, finished=finished)

    def _indices(self, left: list[ClaimProgress], *, finished: bool) -> Iterator[int]:
        rank, ranks = self._link.ranks.rank, self._link.ranks.count
        waiting: list[tuple[ClaimProgress, int]] = []
        given, begins = 0, True
        granted = self._ask(begins=True, finished=finished)
        while granted is not None and left is self._left:
            self._left += [ClaimProgress.of(claim, self._samples_of(claim.partition)) for claim in granted.claims]
            if not self._left:
                if begins or not self.length:
                    self._finished = True
                    return
                begins, granted = True, self._ask(begins=True, finished=True)
                continue
            begins = False
            while left and left is self._left:
                part = left.pop(0)
                self._draws.add(part)
                waiting += [(part, sample) for sample in self._order_of(part)]
                # The ranks of a node take turns. All draw equally often: otherwise one would wait for another for ever.
                while len(waiting) >= ranks and left is self._left:
                    for drawn, _ in waiting[:ranks]:
                        drawn.drawn += 1
                    sample = waiting[rank][1]
                    del waiting[:ranks]
                    yield sample
                    given += 1
                    if given == self.length:
                        return
            if left is self._left:
                granted = self._ask(begins=False, finished=False)

    def _ask(self, *, begins: bool, finished: bool) -> DataGranted | None:
        count = -(-self._asked * self._partitions // self._size)
        has_claims = bool(self._left)
        return self._link.ask(begins=begins, finished=finished, position=0, count=count, has_claims=has_claims)

    # -- position ------------------------------------------------------------------------------------------------

    def count(self, samples: int) -> int:
        """Count samples of this node that `swarm.step` reports; returns how many of them were never drawn."""
        self._asked = max(self._asked, min(samples, self._size))
        return self._draws.count(samples)

    def take_trained(self) -> list[PartitionTrained]:
        """See `LinkedReader.take_trained`."""
        return self._draws.report()

    def _samples_of(self, partition: int) -> int:
        start, stop = self._bounds(partition)
        return stop - start

    def _bounds(self, partition: int) -> tuple[int, int]:
        return partition * self._size // self._partitions, (partition + 1) * self._size // self._partitions

    def _order_of(self, part: ClaimProgress) -> list[int]:
        epoch = part.claim.epoch
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known > epoch - 4}
            self._orders[epoch] = EpochOrder(self._size, self._link.shape.seed, epoch, shuffle=self._shuffle)
        start, stop = self._bounds(part.claim.partition)
        return self._orders[epoch].samples(start + part.trained, stop)
