"""Sessions: sealing and opening datagrams, replays, the window, and requests without a response."""

from __future__ import annotations

import pytest

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.sealing.session import REQUEST_PREFIX, SEAL_BYTES, WINDOW, Session, index_of


def two_ends() -> tuple[Session, Session]:
    """Initiator and responder of one session."""
    there, back = b"t" * 32, b"b" * 32
    initiator = Session(b"r" * 20, "epoch", b"index--i", b"index--r", back, there, 0.0, is_initiator=True)
    responder = Session(b"i" * 20, "epoch", b"index--r", b"index--i", there, back, 0.0, is_initiator=False)
    return initiator, responder


def refusal(session: Session, sealed: bytes) -> str:
    with pytest.raises(Refused) as caught:
        session.open(sealed, 1.0)
    return str(caught.value)


def test_both_directions() -> None:
    """What one end seals the other opens, and sealing adds `SEAL_BYTES`."""
    initiator, responder = two_ends()
    for sender, receiver in ((initiator, responder), (responder, initiator)):
        sealed = sender.seal(b"datagram", 1.0)

        assert index_of(sealed) == receiver.index
        assert len(sealed) == len(b"datagram") + SEAL_BYTES
        assert receiver.open(sealed, 1.0) == (b"datagram", True)


def test_only_the_initiator_starts_confirmed() -> None:
    """The responder's session is confirmed by a call, because its init could be a recording."""
    initiator, responder = two_ends()

    assert (initiator.confirmed, responder.confirmed) == (True, False)
    responder.confirm()
    assert responder.confirmed


def test_replays_and_reordering() -> None:
    """Within the window each datagram opens once in any order; behind it none opens."""
    initiator, responder = two_ends()
    sealed = [initiator.seal(b"%d" % number, 1.0) for number in range(WINDOW + 2)]

    assert responder.open(sealed[2], 1.0) == (b"2", True)
    assert responder.open(sealed[1], 1.0) == (b"1", False)
    assert refusal(responder, sealed[1]) == "replayed"
    assert responder.open(sealed[-1], 1.0) == (b"%d" % (WINDOW + 1), True)
    assert refusal(responder, sealed[0]) == "replayed"
    assert responder.open(sealed[3], 1.0) == (b"3", False)
    assert refusal(responder, sealed[2]) == "replayed"


def test_a_forged_datagram_changes_nothing() -> None:
    """A changed bit is refused as `forged`, and the intact datagram still opens afterwards."""
    initiator, responder = two_ends()
    sealed = initiator.seal(b"datagram", 1.0)
    changed = sealed[:-1] + bytes([sealed[-1] ^ 1])
    far_ahead = sealed[:9] + (1 << 40).to_bytes(8, "big") + sealed[17:]

    assert refusal(responder, changed) == "forged"
    assert refusal(responder, far_ahead) == "forged"
    assert responder.open(sealed, 1.0) == (b"datagram", True)


def test_a_datagram_cannot_be_reflected() -> None:
    """Each direction has its own key: an end does not open what it has sealed itself."""
    initiator, _ = two_ends()

    assert refusal(initiator, initiator.seal(b"datagram", 1.0)) == "forged"


def test_unanswered_requests() -> None:
    """The time of the second request without any received datagram is kept, and the next received one resets it."""
    initiator, responder = two_ends()
    request = REQUEST_PREFIX + b"request"
    initiator.seal(request, 1.0)
    initiator.seal(b"\1no request", 2.0)
    assert initiator.unanswered_since is None
    initiator.seal(request, 3.0)
    initiator.seal(request, 4.0)
    assert initiator.unanswered_since == 3.0
    initiator.open(responder.seal(b"\1response", 5.0), 5.0)

    assert initiator.unanswered_since is None
    assert initiator.last_received == 5.0
