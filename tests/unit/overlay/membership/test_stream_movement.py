"""Movement of streams: it counts from the last mark, and the kernel is not asked for each request."""

from __future__ import annotations

from p2pnode.overlay.membership.stream_movement import LARGE_BYTES, StreamMovement

PEER, OTHER = b"p" * 20, b"o" * 20


class _Stream:
    """A stream on which `moved` bytes have moved, and how often it was asked."""

    def __init__(self, moved: int) -> None:
        self.moved = moved
        self.asked = 0

    def moved_bytes(self) -> int:
        self.asked += 1
        return self.moved


def test_what_moved_before_a_stream_was_added_is_of_the_past() -> None:
    """Also before the last mark; another peer's streams do not count."""
    movement, stream = StreamMovement(), _Stream(100)
    movement.add(PEER, stream)
    assert not movement.has_moved(PEER)
    stream.moved = 101
    assert movement.has_moved(PEER)
    assert not movement.has_moved(OTHER)
    movement.mark(PEER)
    assert not movement.has_moved(PEER)


def test_a_stream_that_is_known_is_not_asked_again() -> None:
    """A second request on a connection asks the kernel nothing, and leaves the mark where it is."""
    movement, stream = StreamMovement(), _Stream(100)
    movement.add(PEER, stream)
    stream.moved = 200
    movement.add(PEER, stream)
    assert stream.asked == 1
    assert movement.has_moved(PEER)


def test_a_request_counts_as_long_as_it_is_under_way() -> None:
    """A mark and a sample have it; two of one peer end one by one."""
    movement, first, second = StreamMovement(), _Stream(0), _Stream(0)
    for request in (first, second):
        movement.begin(PEER, request)
    assert first.asked == 0
    first.moved = 4
    movement.mark(PEER)
    assert not movement.has_moved(PEER)
    first.moved = 5
    assert movement.has_moved(PEER)
    movement.mark(PEER)
    assert not movement.has_moved(PEER)
    before = movement.sample(PEER)
    first.moved = 6
    assert movement.has_moved(PEER, before)
    movement.end(PEER, first)
    assert not movement.has_moved(PEER, before)
    movement.end(PEER, second)
    movement.end(PEER, second)  # the peer was forgotten meanwhile
    assert movement.sample(PEER) == {}


def test_what_a_kernel_takes_of_new_requests_is_no_movement() -> None:
    """A request is acknowledged between two marks, or is on its way at one: neither counts. One that has begun to move
    at a mark, and moves on, is carried by a line."""
    movement = StreamMovement()
    movement.mark(PEER)
    before = movement.sample(PEER)
    for moved_at_mark in (500, 0, 500, 0):
        request = _Stream(moved_at_mark)
        movement.begin(PEER, request)
        assert not movement.has_moved(PEER)
        assert not movement.has_moved(PEER, before)
        movement.mark(PEER)
        before = movement.sample(PEER)
        request.moved = 500
        assert not movement.has_moved(PEER)
        assert not movement.has_moved(PEER, before)
        movement.end(PEER, request)
    carried = _Stream(1)
    movement.begin(PEER, carried)
    movement.mark(PEER)
    before = movement.sample(PEER)
    carried.moved = 2
    assert movement.has_moved(PEER)
    assert movement.has_moved(PEER, before)


def test_a_large_request_counts_from_its_begin() -> None:
    """It may be what fills the line behind which the pong waits."""
    movement, request = StreamMovement(), _Stream(0)
    before = movement.sample(PEER)
    movement.begin(PEER, request)
    request.moved = LARGE_BYTES - 1
    assert not movement.has_moved(PEER)
    assert not movement.has_moved(PEER, before)
    request.moved = LARGE_BYTES
    assert movement.has_moved(PEER)
    assert movement.has_moved(PEER, before)


def test_a_stream_of_the_peer_that_is_newer_than_a_sample_counts_from_its_begin() -> None:
    """The peer opened it meanwhile, so that its process lives."""
    movement, stream = StreamMovement(), _Stream(10)
    before = movement.sample(PEER)
    movement.add(PEER, stream)
    assert not movement.has_moved(PEER, before)
    stream.moved = 11
    assert movement.has_moved(PEER, before)


def test_a_stream_that_nobody_uses_any_more_is_forgotten() -> None:
    """The streams of a peer are kept by those who use them alone."""
    movement = StreamMovement()
    stream = _Stream(100)
    movement.add(PEER, stream)
    assert len(movement.sample(PEER)) == 1
    del stream
    assert movement.sample(PEER) == {}
    movement.forget(PEER)
    assert not movement.has_moved(PEER)


def test_a_peer_whose_streams_have_all_ended_takes_no_memory() -> None:
    """It is dropped with what has ended; one with an open stream stays, without those that have ended."""
    movement, stream, kept, other = StreamMovement(), _Stream(1), _Stream(2), _Stream(3)
    movement.add(PEER, stream)
    movement.add(OTHER, kept)
    movement.add(OTHER, other)
    del stream, other
    movement.drop_ended()
    assert list(movement._streams) == [OTHER]
    assert len(movement._streams[OTHER]) == 1
    kept.moved = 9
    assert movement.has_moved(OTHER)


def test_a_peer_that_connects_again_and_again_has_no_more_entries() -> None:
    """What has ended goes when the next stream of the same peer comes."""
    movement = StreamMovement()
    for _ in range(5):
        stream = _Stream(1)
        movement.add(PEER, stream)
    assert len(movement._streams[PEER]) <= 2
