"""Movement of streams: it counts from the last mark, and the kernel is not asked for each request."""

from __future__ import annotations

from overlay.membership.stream_movement import StreamMovement

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
