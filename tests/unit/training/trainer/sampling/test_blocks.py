"""Blocks of a stream are dealt to its passes: what counts as drawn and trained with one worker and several."""

from __future__ import annotations

from collections import deque

import pytest

from p2pnode.training.trainer.sampling.blocks import BlockDealer
from p2pnode.training.trainer_link.data_messages import UNKNOWN, Claim, DataGranted, PartitionTrained

SIZE = 10


class Daemon:
    """Grants claims of blocks in the order of `blocks`, two at a time; `asked` has every request."""

    def __init__(self, *blocks: int) -> None:
        self.blocks = deque(blocks)
        self.asked: list[tuple[bool, bool, int, bool]] = []
        self.is_gone = False

    def ask(self, begins: bool, finished: bool, position: int, has_claims: bool) -> DataGranted | None:
        self.asked.append((begins, finished, position, has_claims))
        if self.is_gone:
            return None
        taken = [self.blocks.popleft() for _ in range(min(2, len(self.blocks)))]
        return DataGranted(1, 0, [Claim(0, block, 0) for block in taken])


def dealer_of(daemon: Daemon) -> tuple[BlockDealer, list[int]]:
    learnt: list[int] = []
    return BlockDealer(SIZE, daemon.ask, learnt.append), learnt


def drawn(dealer: BlockDealer, this_pass: tuple[int, int], worker: int, position: int, samples: int = SIZE) -> int:
    """Draw so much of the next block; returns its number."""
    part = dealer.next_block(this_pass, worker, position)
    assert part is not None
    dealer.drew(part, samples)
    return part.claim.partition


def test_blocks_come_in_the_order_of_the_stream_from_a_position_on() -> None:
    """One behind the reader is kept for a later pass; the daemon is asked when none is left."""
    daemon = Daemon(5, 2, 7)
    dealer, _ = dealer_of(daemon)
    dealer.begin((1, 1), 1)

    assert drawn(dealer, (1, 1), 0, 0) == 2
    assert drawn(dealer, (1, 1), 0, 3) == 5
    assert drawn(dealer, (1, 1), 0, 6) == 7
    assert dealer.next_block((1, 1), 0, 8) is None
    assert dealer.next_block((1, 1), 0, 8) is None
    assert daemon.asked == [(True, False, 0, False), (False, False, 6, False), (False, False, 8, False)]


def test_a_pass_of_before_gets_nothing() -> None:
    """Its worker has outlived it; nor does its end count."""
    dealer, learnt = dealer_of(Daemon(0))
    dealer.begin((1, 1), 1)
    dealer.begin((1, 2), 1)

    assert dealer.next_block((1, 1), 0, 0) is None
    dealer.end((1, 1), 0, None, 4)
    assert learnt == []


def test_without_a_daemon_the_pass_ends() -> None:
    """It is not asked again in this pass."""
    daemon = Daemon(0)
    daemon.is_gone = True
    dealer, _ = dealer_of(daemon)
    dealer.begin((1, 1), 1)

    assert dealer.next_block((1, 1), 0, 0) is None
    assert dealer.next_block((1, 1), 0, 0) is None
    assert len(daemon.asked) == 1


def test_one_worker_has_trained_what_was_counted_in_the_order_of_drawing() -> None:
    """A report is made once; more than was drawn is said."""
    dealer, _ = dealer_of(Daemon(0, 1))
    assert dealer.count(3) == 3
    dealer.begin((1, 1), 1)
    drawn(dealer, (1, 1), 0, 0)
    drawn(dealer, (1, 1), 0, 1, samples=4)

    assert dealer.count(12) == 0
    assert dealer.report() == [PartitionTrained(0, 0, SIZE, True), PartitionTrained(0, 1, 2, False)]
    assert dealer.report() == []
    assert dealer.count(5) == 3


def test_data_that_others_train_too_is_in_no_report() -> None:
    """As where there are more nodes than partitions."""
    copy = DataGranted(1, 0, [Claim(0, 3, 0, counted=False)])
    dealer = BlockDealer(SIZE, lambda *_: copy, lambda _: None)
    dealer.begin((1, 1), 1)
    drawn(dealer, (1, 1), 0, 0)

    assert dealer.count(SIZE) == 0
    assert dealer.report() == []


def test_what_was_not_trained_is_drawn_again_in_the_next_pass() -> None:
    """From where its training stood; the daemon is told that there are claims left."""
    daemon = Daemon(0)
    dealer, _ = dealer_of(daemon)
    dealer.begin((1, 1), 1)
    drawn(dealer, (1, 1), 0, 0)
    dealer.count(4)
    dealer.begin((1, 2), 1)
    part = dealer.next_block((1, 2), 0, 0)

    assert part is not None
    assert (part.claim.partition, part.drawn, part.trained) == (0, 4, 4)
    assert daemon.asked[-1] == (True, False, 0, True)


def test_the_end_of_the_stream_is_learnt_and_what_is_behind_it_dropped() -> None:
    """The last block has as many samples as there were; the next pass says that this one went to its end."""
    daemon = Daemon(0, 9)
    dealer, learnt = dealer_of(daemon)
    dealer.begin((1, 1), 1)
    part = dealer.next_block((1, 1), 0, 0)
    assert part is not None
    dealer.drew(part, 3)
    dealer.end((1, 1), 0, part, 1)
    dealer.count(3)

    assert learnt == [1]
    assert dealer.report() == [PartitionTrained(0, 0, 3, True)]
    dealer.begin((1, 2), 1)
    assert dealer.next_block((1, 2), 0, 0) is None
    assert daemon.asked[-1] == (True, True, 0, False)


def test_of_several_workers_only_what_each_has_surely_delivered_counts() -> None:
    """Batches of four from two workers in turn: of twelve samples each has delivered two at least."""
    dealer, _ = dealer_of(Daemon(0, 1))
    for _ in range(2):
        dealer.begin((1, 1), 2)
    drawn(dealer, (1, 1), 0, 0)
    drawn(dealer, (1, 1), 1, 1)
    for _ in range(3):
        assert dealer.count(4) == 0

    assert dealer.report() == [PartitionTrained(0, 0, 2, False), PartitionTrained(0, 1, 2, False)]


def test_all_counts_when_all_workers_have_ended_and_everything_was_trained() -> None:
    """Not before the last worker has ended, nor before the last sample."""
    dealer, _ = dealer_of(Daemon(0, 1))
    dealer.begin((1, 1), 2)
    drawn(dealer, (1, 1), 0, 0)
    drawn(dealer, (1, 1), 1, 1)
    dealer.end((1, 1), 0, None, UNKNOWN)
    dealer.count(2 * SIZE - 1)
    dealer.end((1, 1), 1, None, UNKNOWN)
    assert not any(one.finished for one in dealer.report())
    dealer.count(1)

    assert dealer.report() == [PartitionTrained(0, 0, SIZE, True), PartitionTrained(0, 1, SIZE, True)]


@pytest.mark.parametrize(("ended", "finished"), [(1, False), (2, True)])
def test_what_a_loader_dropped_of_its_last_batches_counts_when_the_next_pass_begins(ended: int, finished: bool) -> None:
    """Of a pass that went to its end; otherwise it comes again."""
    dealer, _ = dealer_of(Daemon(0, 1))
    dealer.begin((1, 1), 2)
    for worker in range(2):
        drawn(dealer, (1, 1), worker, worker)
    for worker in range(ended):
        dealer.end((1, 1), worker, None, UNKNOWN)
    dealer.count(6)
    dealer.begin((1, 2), 2)

    assert {one.finished for one in dealer.report()} == ({True} if finished else set())
    assert (dealer.next_block((1, 2), 0, 0) is None) == finished
