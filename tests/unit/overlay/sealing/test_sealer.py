"""Sealers of two nodes without network or clock: handshakes, sessions, replays, false identities, rotation."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from p2pnode.overlay.addresses import Address, NodeAddress
from p2pnode.overlay.identity import identity_from_seed
from p2pnode.overlay.sealing.handshake import CLOCK_BOUND_S, INIT, RESPONSE, SEALED, make_response
from p2pnode.overlay.sealing.sealer import (
    INIT_DELAY_S,
    MAX_QUEUED,
    MAX_SEALED_BYTES,
    REKEY_AFTER_S,
    SESSION_IDLE_S,
    UNANSWERED_TIMEOUT_S,
    Sealer,
)
from p2pnode.overlay.sealing.session import SEAL_BYTES, WINDOW
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.transport import MAX_DATAGRAM_BYTES

KEY, NEXT_KEY, OTHER_KEY = (SwarmKey(bytes([n]) * 32) for n in (1, 2, 3))
RING = KeyRing((KEY,))
WALL = 1_767_225_600.0


@dataclass
class Time:
    """Seconds since the start of a test."""

    now: float = 1.0


@dataclass
class End:
    """One node: its sealer, its address, and what it has opened."""

    name: str
    time: Time
    keys: KeyRing = RING
    run: str = "tests"
    skew_s: float = 0.0
    start: int = 1
    delivered: list[tuple[bytes, bytes]] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(f"{self.name}/{self.start}")
        self.identity = identity_from_seed(random.Random(self.name).randbytes(32))
        self.address = Address(f"10.0.0.{ord(self.name[0])}", 8468)
        self.sealer = Sealer(
            self.identity,
            self.keys,
            self.run,
            rng.randbytes,
            now=self.time.now,
            wall=self.wall,
            clock_differs=lambda _node, ahead_s: self.clocks.append(ahead_s),
        )

    @property
    def wall(self) -> float:
        return WALL + self.time.now + self.skew_s

    @property
    def home(self) -> NodeAddress:
        return NodeAddress.of(self.address, self.identity.node_id)

    def seal(self, to: End, datagram: bytes) -> list[bytes]:
        return [sealed for _, sealed in self.sealer.seal(to.home, datagram, self.time.now, self.wall)]

    def open(self, sealed: bytes, source: End) -> list[bytes]:
        """Open a datagram and return what is sent because of it; its contents are kept with the proven id."""
        opened = self.sealer.open(sealed, source.address, self.time.now, self.wall)
        if opened.datagram:
            assert opened.source is not None
            self.delivered.append((opened.datagram, opened.source.node_id))
        return [out for _, out in opened.send]

    def dropped(self) -> dict[str, int]:
        return {
            name.removeprefix("dropped_"): count
            for name, count in self.sealer.counters.items()
            if name.startswith("dropped_")
        }


def exchange(sender: End, receiver: End, datagram: bytes, recorded: list[tuple[str, bytes]] | None = None) -> None:
    """Send one datagram and deliver everything that follows, in both directions."""
    sender.time.now += 0.001
    carry([(sender, receiver, sealed) for sealed in sender.seal(receiver, datagram)], recorded)


def carry(queue: list[tuple[End, End, bytes]], recorded: list[tuple[str, bytes]] | None = None) -> None:
    """Deliver these (from, to, datagram) and everything that follows, in order."""
    while queue:
        source, target, sealed = queue.pop(0)
        if recorded is not None:
            recorded.append((source.name, sealed))
        source.time.now += 0.001
        queue += [(target, source, answer) for answer in target.open(sealed, source)]


@pytest.fixture
def ends() -> tuple[End, End]:
    time = Time()
    made = End("a", time), End("b", time)
    time.now += 0.001  # an init must be newer than the start of its recipient
    return made


def test_a_handshake_and_later_datagrams(ends: tuple[End, End]) -> None:
    """After one init and one response, every datagram arrives unchanged, with its sender's id."""
    a, b = ends
    for number in range(5):
        exchange(a, b, b"to b %d" % number)
        exchange(b, a, b"to a %d" % number)

    assert b.delivered == [(b"to b %d" % number, a.identity.node_id) for number in range(5)]
    assert a.delivered == [(b"to a %d" % number, b.identity.node_id) for number in range(5)]
    assert (a.sealer.counters["offers_made"], b.sealer.counters["offers_made"]) == (1, 0)
    assert (a.dropped(), b.dropped()) == ({}, {})


def test_the_longest_datagram_fits_a_frame(ends: tuple[End, End]) -> None:
    """The longest sealed datagram has at most 1,452 bytes: an Ethernet frame without IPv6 and UDP headers."""
    a, b = ends
    recorded: list[tuple[str, bytes]] = []
    exchange(a, b, b"x" * MAX_DATAGRAM_BYTES, recorded)

    assert max(len(sealed) for _, sealed in recorded) == MAX_SEALED_BYTES == MAX_DATAGRAM_BYTES + SEAL_BYTES
    assert MAX_SEALED_BYTES <= 1452
    assert b.delivered == [(b"x" * MAX_DATAGRAM_BYTES, a.identity.node_id)]


@pytest.mark.parametrize(
    "outsider",
    [
        pytest.param({"keys": KeyRing((OTHER_KEY,))}, id="another key"),
        pytest.param({"run": "other"}, id="the key of another run"),
    ],
)
def test_without_the_key_there_is_no_answer(ends: tuple[End, End], outsider: dict[str, object]) -> None:
    """An init under another key, or the same key for another run, gets no answer and changes only a counter."""
    _, b = ends
    c = End("c", b.time, **outsider)  # type: ignore[arg-type]
    (init,) = c.seal(b, b"hello")

    assert b.open(init, c) == []
    assert (b.dropped(), b.sealer.sessions, b.delivered) == ({"stranger": 1}, 0, [])


def test_recorded_traffic_is_refused(ends: tuple[End, End]) -> None:
    """All datagrams of two nodes, replayed from their own addresses and from another one, get no answer."""
    a, b = ends
    recorded: list[tuple[str, bytes]] = []
    for number in range(3):
        exchange(a, b, b"to b %d" % number, recorded)
        exchange(b, a, b"to a %d" % number, recorded)
    sessions, delivered = (a.sealer.sessions, b.sealer.sessions), (list(a.delivered), list(b.delivered))
    outsider = End("z", a.time)
    for source in (a, b, outsider):
        for _, sealed in recorded:
            assert a.open(sealed, source) == []
            assert b.open(sealed, source) == []

    assert (a.sealer.sessions, b.sealer.sessions) == sessions
    assert (a.delivered, b.delivered) == delivered
    assert set(a.dropped()) | set(b.dropped()) == {"replayed", "no_pair", "unasked", "misdirected"}


def test_recorded_traffic_is_refused_at_a_third_node(ends: tuple[End, End]) -> None:
    """Replayed at another member, an init is refused, because it names its recipient."""
    a, b = ends
    recorded: list[tuple[str, bytes]] = []
    exchange(a, b, b"for b", recorded)
    c = End("c", a.time)
    for _, sealed in recorded:
        assert c.open(sealed, a) == []

    assert (c.sealer.sessions, c.delivered) == (0, [])
    assert c.dropped() == {"misdirected": 1, "unasked": 1, "no_pair": 1}


def test_recorded_traffic_is_refused_after_a_restart(ends: tuple[End, End]) -> None:
    """Datagrams from before a node's restart are refused after it, also within the clock bound."""
    a, b = ends
    recorded: list[tuple[str, bytes]] = []
    exchange(a, b, b"before", recorded)
    a.time.now += 1.0
    again = End("b", a.time, start=2)
    for _, sealed in recorded:
        assert again.open(sealed, a) == []

    assert (again.sealer.sessions, again.delivered) == (0, [])
    assert again.dropped()["before_start"] == 1


def test_changed_bits_are_refused(ends: tuple[End, End]) -> None:
    """With any one bit changed, no datagram gets an answer, is delivered, or makes a session."""
    a, b = ends
    (init,) = a.seal(b, b"hello")
    rng = random.Random(4)
    print("seed 4")
    for bit in sorted(rng.sample(range(8 * len(init)), 200)):
        assert b.open(_flipped(init, bit), a) == []
    assert b.sealer.sessions == 0
    (response,) = b.open(init, a)
    for bit in sorted(rng.sample(range(8 * len(response)), 200)):
        assert a.open(_flipped(response, bit), b) == []
    (sealed,) = a.open(response, b)
    for bit in range(8 * len(sealed)):
        assert b.open(_flipped(sealed, bit), a) == []
    assert b.delivered == []
    b.open(sealed, a)

    assert b.delivered == [(b"hello", a.identity.node_id)]
    assert (init[0], response[0], sealed[0]) == (INIT, RESPONSE, SEALED)


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_a_response_of_another_member_is_refused(ends: tuple[End, End]) -> None:
    """A response from a member other than the recipient of the init is refused."""
    a, b = ends
    c = End("c", a.time)
    # c has b's address and has received the init; its response carries its own id.
    a.seal(b, b"hello")
    made = next(iter(a.sealer._pending_inits.values()))[1]
    response = make_response(c.identity, made.epoch, made.init, b"c" * 8, b"i" * 8, b"e" * 32)
    sealed = made.epoch.seal(RESPONSE, response.content, b"n" * 12)

    assert a.open(sealed, b) == []
    assert a.dropped() == {"impostor": 1}
    # With b's public key in it, the signature is invalid.
    pretended = make_response(c.identity, made.epoch, made.init, b"c" * 8, b"i" * 8, b"e" * 32).content
    pretended = pretended[:8] + b.identity.public_key + pretended[40:]
    assert a.open(made.epoch.seal(RESPONSE, pretended, b"m" * 12), b) == []
    assert a.dropped() == {"impostor": 1, "unsigned": 1}
    assert a.sealer.sessions == 0


@pytest.mark.parametrize("skew_s", [CLOCK_BOUND_S + 1, -CLOCK_BOUND_S - 1])
def test_clocks_that_differ_too_much(skew_s: float) -> None:
    """Beyond the bound an init gets no answer, and the difference is reported once."""
    time = Time(100.0)
    a, b = End("a", time, skew_s=skew_s), End("b", Time(1.0))
    b.time = time
    for _ in range(3):
        time.now += 1.0
        for init in a.seal(b, b"hello"):
            assert b.open(init, a) == []

    assert b.dropped() == {"clock": 3}
    assert b.clocks == [pytest.approx(skew_s, abs=0.1)]


@pytest.mark.parametrize("skew_s", [CLOCK_BOUND_S - 1, 1 - CLOCK_BOUND_S])
def test_clocks_within_the_bound(skew_s: float) -> None:
    """Within the bound a handshake succeeds, at the latest when the bound has passed since the recipient's start."""
    time = Time(1.0)
    b = End("b", time)
    a = End("a", time, skew_s=skew_s)
    time.now += CLOCK_BOUND_S
    exchange(a, b, b"hello")

    assert b.delivered == [(b"hello", a.identity.node_id)]


def test_a_lost_init_is_repeated(ends: tuple[End, End]) -> None:
    """Another init is sent after the delay only; queued datagrams arrive once, and repetitions are dropped."""
    a, b = ends
    a.seal(b, b"one")
    assert a.seal(b, b"one") == []
    a.time.now += INIT_DELAY_S
    exchange(a, b, b"two")

    assert [datagram for datagram, _ in b.delivered] == [b"one", b"two"]


def test_a_slow_response_to_the_first_init_is_accepted(ends: tuple[End, End]) -> None:
    """On a path slower than the delay, the response to the first of several inits makes the session."""
    a, b = ends
    (first,) = a.seal(b, b"one")
    a.time.now += INIT_DELAY_S
    a.seal(b, b"two")
    (response,) = b.open(first, a)
    for sealed in a.open(response, b):
        b.open(sealed, a)

    assert [datagram for datagram, _ in b.delivered] == [b"one", b"two"]


def test_the_queue_is_bounded(ends: tuple[End, End]) -> None:
    """Of many queued datagrams the last few arrive; the others are counted."""
    a, b = ends
    (init,) = a.seal(b, b"0")
    for number in range(1, 20):
        a.seal(b, b"%d" % number)
    (response,) = b.open(init, a)
    for sealed in a.open(response, b):
        b.open(sealed, a)

    assert len(b.delivered) == MAX_QUEUED
    assert a.sealer.counters["not_sent_waiting"] == 20 - MAX_QUEUED


def test_two_handshakes_at_once(ends: tuple[End, End]) -> None:
    """If both nodes send an init at the same time, all datagrams arrive without a third handshake."""
    a, b = ends
    (from_a,), (from_b,) = a.seal(b, b"to b"), b.seal(a, b"to a")
    carry([(a, b, from_a), (b, a, from_b)])
    exchange(a, b, b"again")
    exchange(b, a, b"again")

    assert [datagram for datagram, _ in b.delivered] == [b"to b", b"again"]
    assert [datagram for datagram, _ in a.delivered] == [b"to a", b"again"]
    assert (a.sealer.counters["offers_made"], b.sealer.counters["offers_made"]) == (1, 1)


def test_an_init_alone_does_not_replace_a_session(ends: tuple[End, End]) -> None:
    """The responder uses a session only after the initiator has used it, because the init may be a recording."""
    a, b = ends
    exchange(a, b, b"hello")
    b.time.now += 1.0
    a.sealer.use(KeyRing((OTHER_KEY,)))  # ends the session
    a.sealer.use(KeyRing((KEY,)))
    (init,) = a.seal(b, b"again")
    b.open(init, a)
    before = b.sealer.sessions
    (sealed,) = b.seal(a, b"under the old session")

    assert sealed[0] == SEALED
    assert before == 2
    # a has dropped the old session and cannot open it.
    assert a.open(sealed, b) == []
    assert a.dropped() == {"no_pair": 1}


def test_a_restarted_peer_is_reached_after_two_unanswered_requests(ends: tuple[End, End]) -> None:
    """After two unanswered requests and a short time, the next request to a restarted peer starts a handshake and
    arrives."""
    a, b = ends
    exchange(a, b, b"\0before")
    exchange(b, a, b"\1answer")
    a.time.now += 5.0
    again = End("b", a.time, start=2)
    exchange(a, again, b"\0lost")
    exchange(a, again, b"\0lost")
    assert again.delivered == []
    a.time.now += UNANSWERED_TIMEOUT_S + 0.01
    exchange(a, again, b"\0arrives")

    assert again.delivered == [(b"\0arrives", a.identity.node_id)]


def test_responses_and_one_way_datagrams_start_no_handshake(ends: tuple[End, End]) -> None:
    """A node that sends responses, or datagrams without a response, does not take the peer for restarted."""
    a, b = ends
    for _ in range(10):
        for _ in range(3):
            exchange(a, b, b"\0question")
        for _ in range(3):
            exchange(b, a, b"\1answer")
        a.time.now += 2.0
        exchange(b, a, b"\0news")
        a.time.now += 2.0

    assert (a.sealer.counters["offers_made"], b.sealer.counters["offers_made"]) == (1, 0)


def test_sessions_are_replaced(ends: tuple[End, End]) -> None:
    """An old session, and one that was idle for long, are replaced without losing a datagram."""
    a, b = ends
    exchange(a, b, b"1")
    for elapsed in [REKEY_AFTER_S / 8] * 9:
        a.time.now += elapsed
        exchange(a, b, b"x")
        exchange(b, a, b"y")
    assert a.sealer.counters["offers_made"] == 2
    a.time.now += SESSION_IDLE_S + 1
    exchange(a, b, b"2")

    assert [datagram for datagram, _ in b.delivered] == [b"1", *[b"x"] * 9, b"2"]
    assert a.sealer.counters["offers_made"] == 3


def test_reordering_within_the_window(ends: tuple[End, End]) -> None:
    """Reordered datagrams arrive once each; one behind the window is refused."""
    a, b = ends
    exchange(a, b, b"first")
    late = a.seal(b, b"late")[0]
    many = [a.seal(b, b"%d" % number)[0] for number in range(WINDOW)]
    rng = random.Random(9)
    print("seed 9")
    rng.shuffle(shuffled := many[:50])
    for sealed in [*shuffled, *many[50:], *shuffled]:
        b.open(sealed, a)
    b.open(late, a)

    assert sorted(datagram for datagram, _ in b.delivered[1:]) == sorted(b"%d" % n for n in range(WINDOW))
    assert b.dropped() == {"replayed": 51}


def test_an_address_that_changed_is_followed(ends: tuple[End, End]) -> None:
    """If a NAT gives a node another port, its datagrams keep their id, and responses go to the new address."""
    a, b = ends
    exchange(a, b, b"from the old address")
    a.address = Address(a.address.host, 9999)
    exchange(a, b, b"from the new one")
    assert b.delivered[1][1] == a.identity.node_id
    exchange(b, a, b"answer")

    assert a.delivered == [(b"answer", b.identity.node_id)]
    assert b.sealer.counters["offers_made"] == 0


def test_two_processes_of_one_identity_have_two_sessions() -> None:
    """Two machines with one copied identity have a session each with a third node."""
    time = Time()
    first, second, third = End("a", time), End("a", time, start=2), End("c", time)
    second.address = Address("10.9.9.9", 8468)
    exchange(first, third, b"one")
    exchange(second, third, b"two")
    exchange(third, first, b"to the first")
    exchange(third, second, b"to the second")

    assert [datagram for datagram, _ in first.delivered] == [b"to the first"]
    assert [datagram for datagram, _ in second.delivered] == [b"to the second"]
    # They can also exchange datagrams with each other.
    exchange(first, second, b"who are you")
    assert second.delivered[-1] == (b"who are you", first.identity.node_id)


def test_no_recipient_no_datagram(ends: tuple[End, End]) -> None:
    """Without a recipient's id nothing is sent, and it is counted."""
    a, b = ends

    assert a.sealer.seal(b.address, b"x", 1.0, WALL) == []
    assert a.sealer.counters["not_sent_no_recipient"] == 1


def test_rotation_step_by_step() -> None:
    """At every step of a rotation datagrams arrive while two nodes share a key; afterwards the old key is refused."""
    steps = [KeyRing((KEY,)), KeyRing((KEY, NEXT_KEY)), KeyRing((NEXT_KEY, KEY)), KeyRing((NEXT_KEY,))]
    time = Time()
    a, b = End("a", time), End("b", time)
    exchange(a, b, b"before")
    sent = 1
    for mine, theirs in ((1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3)):
        a.sealer.use(steps[mine])
        b.sealer.use(steps[theirs])
        for sender, receiver in ((a, b), (b, a)):
            time.now += 2.0
            before = len(receiver.delivered)
            exchange(sender, receiver, b"%d/%d" % (mine, theirs))
            exchange(sender, receiver, b"%d/%d again" % (mine, theirs))
            assert len(receiver.delivered) == before + 2, (mine, theirs)
        sent += 2

    assert len(b.delivered) == sent
    assert {session.epoch_fingerprint for session in b.sealer._sessions.values()} == {NEXT_KEY.fingerprint}
    expelled = End("x", time, keys=KeyRing((KEY,)))
    (init,) = expelled.seal(b, b"still there?")
    assert b.open(init, expelled) == []
