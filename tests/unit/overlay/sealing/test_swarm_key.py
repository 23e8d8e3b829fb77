"""The swarm key and the invitation: their text forms, what is derived, what is refused, and that nothing shows them."""

from __future__ import annotations

import pytest

from overlay.sealing.invitation import PREFIX, BadInvitation, Invitation
from overlay.sealing.swarm_key import BadKey, KeyRing, SwarmKey

ONE = SwarmKey(bytes(range(32)))
TWO = SwarmKey(bytes(range(32, 64)))
RING = KeyRing((ONE, TWO))


def test_golden_forms() -> None:
    """Text, fingerprint and derived keys never change: files, invitations and swarms outlive versions."""
    assert ONE.text == "p2pkey1-aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dyp3ncwh"
    assert ONE.fingerprint == "6a74f893"
    assert ONE.derive("digits", "admission").hex()[:16] == "5e8b27d47a9f10d5"


def test_text_round_trip() -> None:
    """A key, a ring and an invitation are read back as they were written."""
    assert SwarmKey.parse(f"  {ONE.text}\n") == ONE
    assert KeyRing.parse(RING.text) == RING
    invitation = Invitation.of("digits", ["10.0.0.5:8468", "[2001:db8::1]:8468", "node.example:1"], RING)
    assert Invitation.parse(invitation.line) == invitation
    assert invitation.keys == RING


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no swarm key in it"),
        ("# nothing\n", "no swarm key in it"),
        ("hello", "begins with"),
        (ONE.text[:-1], "a part is missing"),
        (ONE.text + "a", "too much"),
        (ONE.text[:-1] + "1", "characters that no swarm key has"),
        (ONE.text[:20] + ("b" if ONE.text[20] != "b" else "c") + ONE.text[21:], "changed on the way"),
        (ONE.text + "\n" + ONE.text, "twice"),
        ("\n".join(SwarmKey(bytes([n]) * 32).text for n in range(3)), "at most 2"),
    ],
)
def test_bad_key_files(text: str, says: str) -> None:
    """Each way to spoil a key file has its sentence, which does not repeat the key."""
    with pytest.raises(BadKey, match=says) as caught:
        KeyRing.parse(text)
    assert ONE.text[12:40] not in str(caught.value)


def test_one_purpose_one_run_one_key() -> None:
    """What is derived for another purpose, run or key is different."""
    derived = [key.derive(run, purpose) for key in (ONE, TWO) for run in ("a", "b") for purpose in ("admission", "x")]
    assert len(set(derived)) == len(derived)


def test_rotation() -> None:
    """Prepare, switch and finish lead from one key to the next; no step can be taken out of turn."""
    start = KeyRing((ONE,))
    prepared = start.prepared(TWO)
    switched = prepared.switched()
    assert (prepared.primary, switched.primary, switched.finished()) == (ONE, TWO, KeyRing((TWO,)))
    for step in (start.switched, start.finished, lambda: prepared.prepared(SwarmKey(b"x" * 32))):
        with pytest.raises(BadKey):
            step()


LINE = Invitation.of("digits", ["10.0.0.5:8468"], KeyRing((ONE,))).line


def test_white_space_of_a_terminal() -> None:
    """A line that a terminal wrapped, or that was quoted, is read all the same."""
    assert Invitation.parse(f"'{LINE[:30]}\n   {LINE[30:]}'\n").run == "digits"


@pytest.mark.parametrize(
    ("line", "says"),
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
def test_bad_invitations(line: str, says: str) -> None:
    """Torn, foreign and newer lines are told apart, and no message repeats the key."""
    with pytest.raises(BadInvitation, match=says) as caught:
        Invitation.parse(line)
    assert LINE[30:60] not in str(caught.value)


def test_nothing_shows_a_key() -> None:
    """`repr` and `str` of everything that holds a key show fingerprints at most."""
    for thing in (ONE, RING, Invitation.of("digits", [], RING)):
        for text in (repr(thing), str(thing)):
            assert ONE.text not in text
            assert ONE.secret.hex() not in text
            assert repr(ONE.secret)[2:20] not in text
