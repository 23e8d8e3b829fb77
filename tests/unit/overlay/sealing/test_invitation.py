"""Invitations: their text form, and the reasons why other text is refused."""

from __future__ import annotations

import pytest

from p2pnode.overlay.sealing.invitation import MAX_ADDRESSES, PREFIX, BadInvitation, Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey

ONE = SwarmKey(bytes(range(32)))
TWO = SwarmKey(bytes(range(32, 64)))
RING = KeyRing((ONE, TWO))
LINE = Invitation.of("digits", ["10.0.0.5:8468"], KeyRing((ONE,))).line


def test_golden_form() -> None:
    """The line of fixed contents never changes: invitations outlive versions."""
    assert LINE == "p2pnode1:k6ZkaWdpdHORrTEwLjAuMC41Ojg0NjiRxCAAAQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eH8BsHZBQYQ"


def test_round_trip() -> None:
    """An invitation is read back as it was written."""
    invitation = Invitation.of("digits", ["10.0.0.5:8468", "[2001:db8::1]:8468", "node.example:1"], RING)

    assert Invitation.parse(invitation.line) == invitation
    assert invitation.keys == RING


def test_addresses_are_bounded() -> None:
    """Of more addresses than fit, the first ones are kept."""
    addresses = [f"10.0.0.{number}:1" for number in range(MAX_ADDRESSES + 3)]

    assert Invitation.of("digits", addresses, RING).addresses == addresses[:MAX_ADDRESSES]


def test_white_space_of_a_terminal() -> None:
    """A line that a terminal has wrapped, or that is quoted, is parsed."""
    assert Invitation.parse(f"'{LINE[:30]}\n   {LINE[30:]}'\n").run == "digits"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "empty"),
        (LINE[:-1], "torn or changed"),
        (LINE[:-20], "torn or changed"),
        (LINE[:40] + ("A" if LINE[40] != "A" else "B") + LINE[41:], "torn or changed"),
        (LINE.replace(":", ":!", 1), "torn or changed"),
        (PREFIX, "torn or changed"),
        ("p2pnode2:" + LINE[len(PREFIX) :], "version 2"),
        ("https://example.org/join", "begins with"),
        (ONE.text, "a swarm key, not an invitation"),
        ("x" * 5000, "5000 characters"),
    ],
)
def test_bad_invitations(line: str, message: str) -> None:
    """Damaged lines, other text and newer versions have different messages, which do not contain the key."""
    with pytest.raises(BadInvitation, match=message) as caught:
        Invitation.parse(line)
    assert LINE[30:60] not in str(caught.value)


def test_no_text_of_an_invitation_contains_a_key() -> None:
    """`repr` and `str` show fingerprints at most."""
    invitation = Invitation.of("digits", [], RING)
    for text in (repr(invitation), str(invitation)):
        assert ONE.fingerprint in text
        assert ONE.text not in text
        assert ONE.secret.hex() not in text
        assert repr(ONE.secret)[2:20] not in text
