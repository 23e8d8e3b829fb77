"""What passes between servers and workers."""

import msgspec
import numpy as np
import pytest

from p2pnode.training.engines.server.messages import (
    BadPoll,
    Computed,
    HeldLease,
    Poll,
    Told,
    contribution_of,
    decode_poll,
    decode_told,
    encode,
    encoded_updates,
    held_by,
    lease_of,
)
from p2pnode.training.values.encoding import ValueNotEncodable


def test_a_report_comes_back_as_it_was():
    """Task, attempt, version and updates survive the wire."""
    held = HeldLease(7, 2, 5, [(b"sw", None), (b"sx", b"\x01")])
    poll = Poll(1, 3, "{}", True, [Computed(held, 9, encoded_updates([("w", np.float32([1, 2]))]))], held)
    found = decode_poll(encode(poll))
    assert found == poll
    one = contribution_of(found.reports[0], b"me")
    assert (one.worker, one.name, one.step, one.version, one.updates[0][0]) == (b"me", (7, 2), 5, 9, "w")
    assert one.updates[0][1].tolist() == [1.0, 2.0]
    assert held_by(lease_of(held, b"me", 1.0)) == held


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", encode(Told(1, b""))])
def test_other_bytes_are_refused(data):
    """What is no poll is a `BadPoll`."""
    with pytest.raises(BadPoll):
        decode_poll(data)


def test_newer_fields_are_ignored():
    """A message of a later version with more fields is understood."""
    fields = msgspec.msgpack.decode(encode(Told(4, b"s", 2)))
    assert decode_told(msgspec.msgpack.encode([*fields, "new"])).epoch == 4


def test_a_value_that_cannot_be_sent_is_named():
    """The error has the key."""
    with pytest.raises(ValueNotEncodable, match="'w'"):
        encoded_updates([("w", object())])
