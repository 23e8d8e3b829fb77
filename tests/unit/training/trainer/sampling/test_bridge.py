"""The socket between the workers of a loader and the main process: blocks, what was drawn of them, and strangers."""

from __future__ import annotations

import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from p2pnode.training.trainer.sampling.blocks import BlockDealer
from p2pnode.training.trainer.sampling.bridge import Bridge, BridgeClient
from p2pnode.training.trainer.sampling.link import Granted
from p2pnode.training.trainer_link.data_messages import UNKNOWN, Claim

PASS = (1, 1)
LIMIT_S = 10.0


class Dealer(BlockDealer):
    """Blocks 0 to 3 of ten samples; `ended` is set when a worker has ended its pass."""

    def __init__(self) -> None:
        self.learnt: list[int] = []
        self.parts = [0, 0]
        self.given = False
        super().__init__(10, self._grant, self.learnt.append)

    def _grant(self, begins: bool, finished: bool, position: int, has_claims: bool) -> Granted:
        claims = [] if self.given else [Claim(0, block, 0) for block in range(4)]
        self.given = True
        return Granted(0, claims)


@pytest.fixture
def bridge() -> Bridge:
    return Bridge(Dealer())


def dealer_of(bridge: Bridge) -> Dealer:
    assert isinstance(bridge._dealer, Dealer)
    return bridge._dealer


def test_a_worker_gets_blocks_until_there_is_none(bridge: Bridge) -> None:
    """Whole blocks count as drawn until the worker says otherwise."""
    client = BridgeClient(bridge.address, PASS, 0, 1)
    found = [client.next_block(position) for position in range(5)]
    client.drew()

    assert [None if claim is None else claim.partition for claim in found] == [0, 1, 2, 3, None]
    assert dealer_of(bridge)._drawn == 40
    client.close()


def test_what_was_drawn_of_the_last_block_is_corrected_at_the_end(bridge: Bridge) -> None:
    """The end of the stream is learnt too; the answer comes when both are known."""
    client = BridgeClient(bridge.address, PASS, 0, 1)
    client.next_block(0)
    client.end(3, 1)

    dealer = dealer_of(bridge)
    assert (dealer._drawn, dealer.learnt) == (3, [1])
    assert dealer.count(4) == 1
    client.close()


def test_a_pass_that_breaks_off_within_a_block_leaves_it_whole(bridge: Bridge) -> None:
    """Batches of it may be on their way."""
    client = BridgeClient(bridge.address, PASS, 0, 1)
    client.next_block(0)
    client.end(None, UNKNOWN)

    assert (dealer_of(bridge)._drawn, dealer_of(bridge).learnt) == (10, [])
    client.close()


def test_two_workers_are_served_at_once_and_one_that_goes_disturbs_nobody(bridge: Bridge) -> None:
    """Each gets blocks of its own."""
    first, second = (BridgeClient(bridge.address, PASS, worker, 2) for worker in range(2))
    blocks = [client.next_block(0) for client in (first, second)]
    first.close()
    more = second.next_block(0)

    assert [claim.partition for claim in (*blocks, more) if claim is not None] == [0, 1, 2]
    second.close()


def test_a_stranger_is_refused_and_the_next_worker_served(bridge: Bridge) -> None:
    """Another process does not know the key."""
    refused: list[BaseException] = []

    def intrude() -> None:
        try:
            Client(bridge.address, family="AF_UNIX", authkey=b"wrong")
        except BaseException as error:
            refused.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join(LIMIT_S)

    assert isinstance(refused[0], AuthenticationError)
    client = BridgeClient(bridge.address, PASS, 0, 1)
    assert client.next_block(0) is not None
    client.close()
