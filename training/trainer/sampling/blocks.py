"""Deals the blocks of a stream to the passes over it: one in the main process, or one in each worker of a loader.

A loader takes batches from its workers in turn. So after n samples each of W workers has delivered at least n / W less
one batch, and so much of what it drew counts as trained; all of it when all workers have ended their passes and as many
samples are trained as were drawn, or when the next pass begins. Its methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from p2pnode.training.trainer.sampling.draws import ClaimProgress, Draws
from p2pnode.training.trainer_link.data_messages import UNKNOWN, DataGranted, PartitionTrained

#: Blocks asked for at a time.
BLOCKS_ASKED = 2

#: (begins, finished, position, has_claims) → the daemon's answer
AskBlocks = Callable[[bool, bool, int, bool], DataGranted | None]
#: What is equal for all workers in one iteration of a loader.
PassId = tuple[int, int]


class BlockDealer:
    """The blocks of one node. `learn_blocks` is called with their number when a pass has reached the stream's end."""

    def __init__(self, size: int, ask: AskBlocks, learn_blocks: Callable[[int], None]) -> None:
        self._size = size
        self._ask = ask
        self._learn_blocks = learn_blocks
        self._lock = threading.RLock()
        self._pass: PassId | None = None
        self._workers = 1
        self._draws: dict[int, Draws] = {}
        self._counted: dict[int, int] = {}
        self._ended: set[int] = set()
        self._reached_end = False
        self._begins = True
        #: Blocks that are granted and that no worker draws.
        self._free: list[ClaimProgress] = []
        self._exhausted = False
        self._samples = 0
        self._drawn = 0
        self._largest_step = 0
        self._reports: list[PartitionTrained] = []

    # -- passes --------------------------------------------------------------------------------------------------

    def begin(self, this_pass: PassId, workers: int) -> None:
        """One of `workers` begins a pass; the first to do so ends the pass before."""
        with self._lock:
            if this_pass == self._pass:
                return
            self._reached_end = self._is_over()
            if self._reached_end and self._workers > 1:
                # What the loader dropped of the last batches is not known; it comes again in the next epoch.
                self._finish_all()
            for draws in self._draws.values():
                self._free += draws.restart()
                self._reports += draws.report()
            self._pass, self._workers = this_pass, workers
            self._draws = {worker: Draws() for worker in range(workers)}
            self._counted = dict.fromkeys(range(workers), 0)
            self._ended.clear()
            self._samples = self._drawn = 0
            self._begins, self._exhausted = True, False

    def next_block(self, this_pass: PassId, worker: int, position: int) -> ClaimProgress | None:
        """The first block at `position` or behind it; None: there is none in this pass."""
        with self._lock:
            if this_pass != self._pass:
                return None
            free = [part for part in self._free if part.claim.partition >= position]
            if self._begins or not (free or self._exhausted):
                granted = self._ask(self._begins, self._begins and self._reached_end, position, bool(self._free))
                self._begins = False
                claims = granted.claims if granted is not None else []
                self._exhausted = not claims
                self._free += [ClaimProgress.of(claim, self._size) for claim in claims]
                free = [part for part in self._free if part.claim.partition >= position]
            if not free:
                return None
            part = min(free, key=lambda one: one.order)
            self._free.remove(part)
            self._draws[worker].add(part)
            return part

    def drew(self, part: ClaimProgress, count: int) -> None:
        """So many samples of a block are about to be yielded."""
        with self._lock:
            part.drawn += count
            self._drawn += count

    def end(self, this_pass: PassId, worker: int, part: ClaimProgress | None, blocks: int) -> None:
        """A pass has ended, within `part` if the stream did; `blocks` is the number of its blocks, or `UNKNOWN`."""
        with self._lock:
            if this_pass != self._pass:
                return
            self._ended.add(worker)
            if part is not None:
                part.size = part.drawn
            if blocks != UNKNOWN:
                self._learn_blocks(blocks)
                self._free = [one for one in self._free if one.claim.partition < blocks]

    def _is_over(self) -> bool:
        return self._pass is not None and len(self._ended) == self._workers

    # -- training ------------------------------------------------------------------------------------------------

    def count(self, samples: int) -> int:
        """So many samples were trained; returns how many of them were never drawn, as far as that is known."""
        with self._lock:
            if self._workers == 1:
                return self._draws[0].count(samples) if self._draws else samples
            self._samples += samples
            self._largest_step = max(self._largest_step, samples)
            if self._is_over() and self._samples >= self._drawn:
                self._finish_all()
                return 0
            surely = max(0, self._samples // self._workers - self._largest_step)
            for worker, draws in self._draws.items():
                draws.count(surely - self._counted[worker])
                self._counted[worker] = surely
            return 0

    def _finish_all(self) -> None:
        for draws in self._draws.values():
            draws.finish()

    def report(self) -> list[PartitionTrained]:
        """What has been trained since the last report."""
        with self._lock:
            reports, self._reports = self._reports, []
            for draws in self._draws.values():
                reports += draws.report()
            return reports
