"""The envelope of a request: what is sent, what is understood of earlier and later versions, and what is new in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

import msgspec
import pytest

from p2pnode.overlay import envelope as module
from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.envelope import (
    MAX_VERSION_CHARACTERS,
    REPEATED_S,
    Envelope,
    HeardPeer,
    decoded_envelope,
    encoded_envelope,
    remember,
)
from tests.harness.builders.peers import heartbeat

TAG, TO = b"t" * 8, b"o" * 20
SOURCE = Address("10.0.0.1", 40_000)


def local(capacity: int = 0, version: str = "") -> Any:
    line = SimpleNamespace(capacity=capacity)
    return SimpleNamespace(tag=TAG, heartbeat=heartbeat(), line=line, version=version)


def envelope(**changes: Any) -> Envelope:
    return msgspec.structs.replace(Envelope(TAG, heartbeat(), TO, b"payload", 3, "0.1.0"), **changes)


@pytest.mark.parametrize(
    ("capacity", "version", "elements"), [(0, "", 4), (3, "", 5), (3, "0.1.0", 6), (0, "0.1.0", 6)]
)
def test_elements_at_the_end_that_say_nothing_are_not_sent(capacity: int, version: str, elements: int) -> None:
    """Whatever is left out has its default at the receiver."""
    head = encoded_envelope(local(capacity, version), TO, b"payload")
    assert len(msgspec.msgpack.decode(head)) == elements
    assert decoded_envelope(head) == Envelope(TAG, heartbeat(), TO, b"payload", capacity, version)


def test_a_later_version_may_send_more_elements() -> None:
    """They are ignored, as are those of this version by earlier ones."""
    later = msgspec.msgpack.encode([*msgspec.msgpack.decode(msgspec.msgpack.encode(envelope())), "more", 7])
    assert decoded_envelope(later) == envelope()


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(envelope())[:-1],
        msgspec.msgpack.encode(envelope(tag=TAG + b"t")),
        msgspec.msgpack.encode(envelope(to=TO + b"o")),
        msgspec.msgpack.encode(envelope(capacity=256)),
        msgspec.msgpack.encode(envelope(version="v" * (MAX_VERSION_CHARACTERS + 1))),
        b"\x91" * 5000,
    ],
    ids=["empty", "no msgpack", "cut", "tag", "node id", "capacity", "version", "nested"],
)
def test_anything_else_is_no_envelope(head: bytes) -> None:
    """It is a value, not an exception: strangers send it."""
    assert decoded_envelope(head) is None


def test_what_a_peer_announces_again_is_the_same() -> None:
    """Not with another heartbeat, capacity or version, nor from another host; the port of a connection is any."""
    heard = HeardPeer(envelope(), SOURCE)
    assert heard.is_same(envelope(payload=b"other", to=b""), SOURCE)
    assert heard.is_same(envelope(), Address(SOURCE.host, 40_001))
    for changes in ({"heartbeat": heartbeat(step=9)}, {"capacity": 4}, {"version": "0.2.0"}):
        assert not heard.is_same(envelope(**changes), SOURCE)
    assert not heard.is_same(envelope(), Address("10.0.0.2", SOURCE.port))
    assert not heard.is_same(envelope(), NodeAddress.of(SOURCE, b"p" * 20)), "another id was proven"


@pytest.mark.parametrize(("host", "reached"), [("", "10.0.0.1"), ("192.0.2.5", "192.0.2.5"), ("nonsense", "10.0.0.1")])
def test_a_peer_is_reached_at_the_host_that_it_announces(host: str, reached: str) -> None:
    """If that is an address; otherwise where its request came from, at the port that it listens on."""
    contact = HeardPeer(envelope(heartbeat=heartbeat(host=host, port=9000)), SOURCE).contact
    assert contact.address == Address(reached, 9000)


def test_a_stream_is_used_only_while_it_exists() -> None:
    """The announcement holds no connection; a new one is due at once."""

    class Stream:
        pass

    heard, stream = HeardPeer(envelope(), SOURCE), Stream()
    used: Any = stream
    assert not heard.uses(used)
    heard.stream = ref(used)
    assert heard.uses(used)
    other: Any = Stream()
    assert not heard.uses(other)
    assert 0.0 - heard.heard_s >= REPEATED_S


def test_the_oldest_announcement_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is renewed becomes the newest."""
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)
    known: dict[bytes, HeardPeer] = {}
    a, b, c = (HeardPeer(envelope(heartbeat=heartbeat(node_id=name * 20)), SOURCE) for name in (b"a", b"b", b"c"))
    for one in (a, b, a, c):
        assert remember(known, one) is one
    assert list(known) == [b"a" * 20, b"c" * 20]
