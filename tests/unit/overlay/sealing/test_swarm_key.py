"""Swarm keys: their text form, derived keys, rotation, and the reasons why a key file is refused."""

from __future__ import annotations

import pytest

from p2pnode.overlay.sealing.swarm_key import BadKey, KeyRing, SwarmKey

ONE = SwarmKey(bytes(range(32)))
TWO = SwarmKey(bytes(range(32, 64)))
RING = KeyRing((ONE, TWO))


def test_golden_forms() -> None:
    """Text, fingerprint and derived keys never change: key files and swarms outlive versions."""
    assert ONE.text == "p2pkey1-aaaqeayeaudaocajbifqydiob4ibceqtcqkrmfyydenbwha5dyp3ncwh"
    assert ONE.fingerprint == "6a74f893"
    assert ONE.derive("digits", "admission").hex()[:16] == "5e8b27d47a9f10d5"


def test_text_round_trip() -> None:
    """A key and a ring are read back as they were written."""
    assert SwarmKey.parse(f"  {ONE.text}\n") == ONE
    assert KeyRing.parse(RING.text) == RING


@pytest.mark.parametrize(
    ("text", "message"),
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
def test_bad_key_files(text: str, message: str) -> None:
    """Each mistake in a key file has its message, which does not contain the key."""
    with pytest.raises(BadKey, match=message) as caught:
        KeyRing.parse(text)
    assert ONE.text[12:40] not in str(caught.value)


def test_derived_keys_are_independent() -> None:
    """Keys for another purpose, run or swarm key differ."""
    derived = [key.derive(run, purpose) for key in (ONE, TWO) for run in ("a", "b") for purpose in ("admission", "x")]
    assert len(set(derived)) == len(derived)


def test_rotation() -> None:
    """Prepare, switch and finish lead from one key to the next; any other order is refused."""
    start = KeyRing((ONE,))
    prepared = start.prepared(TWO)
    switched = prepared.switched()
    assert (prepared.primary, switched.primary, switched.finished()) == (ONE, TWO, KeyRing((TWO,)))
    for step in (start.switched, start.finished, lambda: prepared.prepared(SwarmKey(b"x" * 32))):
        with pytest.raises(BadKey):
            step()


def test_no_text_of_a_key_contains_it() -> None:
    """`repr` and `str` of a key and of a ring do not contain a key."""
    for thing in (ONE, RING):
        for text in (repr(thing), str(thing)):
            assert ONE.text not in text
            assert ONE.secret.hex() not in text
            assert repr(ONE.secret)[2:20] not in text
