"""What may leave a node of a closed swarm, and what may come in: every datagram, sealed and opened.

Between two nodes that have met, an AEAD under the pair's own key (`overlay.sealing.session`); before, one signed offer
and its acceptance (`overlay.sealing.handshake`), while what is to be sent waits. Who cannot prove membership gets
silence: no answer, no state, one counter. An offer is answered once, only by the node it names, and only if it was made
after that node's start and within `CLOCK_BOUND_S` of its clock; so what was heard by another peer or before a restart
opens nothing.

Pure. The time (`now` monotonic, `wall` since 1970) and the randomness come in, datagrams to send and to deliver go out.
No timers: what is lost is offered again when the room above sends again.
"""

from __future__ import annotations

import hmac
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from overlay.addresses import Address, NodeAddress, id_behind
from overlay.identity import Identity
from overlay.sealing.handshake import (
    ACCEPTANCE,
    BOOT_BYTES,
    INDEX_BYTES,
    INIT_BYTES,
    NONCE_BYTES,
    OFFER,
    PUBLIC_KEY_BYTES,
    RESPONSE_BYTES,
    SEALED,
    Epoch,
    HandshakeInit,
    HandshakeResponse,
    make_init,
    make_response,
    session_keys,
)
from overlay.sealing.init_filter import InitFilter, microseconds
from overlay.sealing.refusal import Refused
from overlay.sealing.session import MOST_DATAGRAMS, SEAL_BYTES, Session, index_of
from overlay.sealing.swarm_key import KeyRing
from overlay.transport import MAX_DATAGRAM_BYTES

#: An offer is made again at the earliest after this: above it stands a room that repeats itself.
OFFER_PAUSE_S = 0.2
#: Offers of one contact that may still be accepted: a slow answer to the first is as good as a fast one to the third.
OFFERS_AT_ONCE = 3
OFFER_LIFE_S = 5.0
#: Datagrams that wait for a pair, per contact, and for how long; more and older ones are lost, as datagrams are.
WAITING_AT_ONCE = 8
WAITING_S = 3.0
#: A pair that we asked twice and that is silent for this long may belong to a process that has gone: beside what we
#: send goes a new offer, at most once in the pause.
SILENT_S = 0.4
SILENT_PAUSE_S = 1.0
#: A pair gets new keys after this long; who accepted waits a little longer, so that seldom both begin.
RENEW_S, RENEW_ACCEPTED_S = 1800.0, 2000.0
#: A pair that was not used for this long is not trusted to be known to the other side, and is forgotten later.
IDLE_S, FORGET_S = 600.0, 900.0
PRUNE_S = 30.0
#: Bounds, so that no flood grows memory: contacts, and pairs offered to us and not yet used.
MOST_ROUTES = 16384
MOST_UNCONFIRMED = 1024
UNCONFIRMED_S = 10.0

#: Longest sealed datagram on the wire: in an Ethernet frame with IPv6 and UDP headers 1,452 bytes fit.
MAX_SEALED_BYTES = MAX_DATAGRAM_BYTES + SEAL_BYTES

_Key = tuple[bytes, str, int]


@dataclass(slots=True)
class _Offered:
    """An offer of ours that may still be accepted."""

    offer: HandshakeInit
    epoch: Epoch
    ephemeral: bytes
    made: float


@dataclass(slots=True)
class _Route:
    """One contact: a node at an address."""

    pair: Session | None = None
    offered: list[_Offered] = field(default_factory=list)
    last_offer: float = float("-inf")
    waiting: deque[tuple[float, bytes]] = field(default_factory=lambda: deque(maxlen=WAITING_AT_ONCE))


@dataclass(slots=True)
class Opened:
    """What came of one datagram: what is to be delivered, from whom, and what is to be sent on its account."""

    datagram: bytes = b""
    source: NodeAddress | None = None
    send: Sequence[tuple[Address, bytes]] = ()


_NOTHING = Opened()


class Sealer:
    """The seal of one start of one node."""

    def __init__(
        self,
        identity: Identity,
        keys: KeyRing,
        run: str,
        token: Callable[[int], bytes],
        *,
        now: float,
        wall: float,
        clock_differs: Callable[[bytes, float], None] = lambda _node_id, _seconds: None,
    ) -> None:
        """`token(n)`: n unpredictable bytes. `clock_differs(node, seconds)`: a member's clock is ahead by more than
        the bound (behind, where negative)."""
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._run = run
        self._token = token
        self._boot = token(BOOT_BYTES)
        self._epochs: list[Epoch] = []
        self._routes: OrderedDict[_Key, _Route] = OrderedDict()
        self._pairs: dict[bytes, Session] = {}
        self._unconfirmed: deque[tuple[float, bytes]] = deque()
        self._offers: dict[bytes, tuple[_Key, _Offered]] = {}
        self._filter = InitFilter(now, wall, clock_differs)
        self._last_offer_us = 0
        self._pruned = now
        self.use(keys)

    def use(self, keys: KeyRing) -> None:
        """These keys are valid from now on. Pairs made under another end; they are made anew when needed."""
        self._epochs = [Epoch(key, self._run) for key in keys]
        valid = set(keys.fingerprints)
        for pair in [pair for pair in self._pairs.values() if pair.epoch not in valid]:
            del self._pairs[pair.index]
        for index in [index for index, (_, made) in self._offers.items() if made.epoch.fingerprint not in valid]:
            del self._offers[index]
        for route in self._routes.values():
            if route.pair is not None and route.pair.epoch not in valid:
                route.pair = None
            route.offered = [made for made in route.offered if made.offer.index in self._offers]

    @property
    def pairs(self) -> int:
        """Nodes' starts that we share keys with, those that have not used them yet included."""
        return len(self._pairs)

    # -- out -----------------------------------------------------------------------------------------------------

    def seal(self, to: Address, datagram: bytes, now: float, wall: float) -> list[tuple[Address, bytes]]:
        """What to put on the wire so that `datagram` reaches the node at `to`; it may have to wait for a pair."""
        node_id = id_behind(to)
        if not node_id:
            self.counters["not_sent_no_recipient"] += 1
            return []
        if now - self._pruned > PRUNE_S:
            self._prune(now)
        key = (node_id, to.host, to.port)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = _Route()
            if len(self._routes) > MOST_ROUTES:
                self._forget_route(next(iter(self._routes)))
        else:
            self._routes.move_to_end(key)
        pair = route.pair
        if pair is None or pair.index not in self._pairs or now - pair.used > IDLE_S or pair.sent >= MOST_DATAGRAMS:
            self._put_aside(route, datagram, now)
            return list(self._offer(key, route, now, wall, OFFER_PAUSE_S))
        silent = pair.silent_since is not None and now - pair.silent_since > SILENT_S
        out: list[tuple[Address, bytes]] = [(to, pair.seal(datagram, now))]
        self.counters["sealed"] += 1
        if silent:
            # Sent under both keys: whichever process lives there reads one of them.
            self._put_aside(route, datagram, now)
            out.extend(self._offer(key, route, now, wall, SILENT_PAUSE_S))
        elif pair.epoch != self._epochs[0].fingerprint or now - pair.born > _life_s(pair):
            out.extend(self._offer(key, route, now, wall, SILENT_PAUSE_S))
        return out

    def _put_aside(self, route: _Route, datagram: bytes, now: float) -> None:
        if any(datagram == other for _, other in route.waiting):  # a repetition
            return
        if len(route.waiting) == WAITING_AT_ONCE:
            self.counters["not_sent_waiting"] += 1
        route.waiting.append((now, datagram))

    def _offer(
        self, key: _Key, route: _Route, now: float, wall: float, pause_s: float
    ) -> Iterator[tuple[Address, bytes]]:
        if now - route.last_offer < pause_s:
            return
        route.last_offer = now
        # Rises even where the clock is set back: the receiver takes each moment of ours once.
        self._last_offer_us = max(microseconds(wall), self._last_offer_us + 1)
        epoch = self._epochs[0]
        ephemeral = self._token(PUBLIC_KEY_BYTES)
        offer = make_init(self._identity, epoch, key[0], self._boot, self._last_offer_us, self._new_index(), ephemeral)
        made = _Offered(offer, epoch, ephemeral, now)
        route.offered.append(made)
        self._offers[offer.index] = (key, made)
        while len(route.offered) > OFFERS_AT_ONCE:
            self._offers.pop(route.offered.pop(0).offer.index, None)
        self.counters["offers_made"] += 1
        yield Address(key[1], key[2]), epoch.enclose(OFFER, offer.content, self._token(NONCE_BYTES))

    def _new_index(self) -> bytes:
        while True:
            index = self._token(INDEX_BYTES)
            if index not in self._pairs and index not in self._offers:
                return index

    # -- in ------------------------------------------------------------------------------------------------------

    def open(self, sealed: bytes, source: Address, now: float, wall: float) -> Opened:
        """Judge one datagram from the wire. Never raises; what is refused is counted by its reason."""
        try:
            if not sealed:
                raise Refused("stranger")
            kind = sealed[0]
            if kind == SEALED:
                return self._open_sealed(sealed, source, now)
            if kind == OFFER and len(sealed) == INIT_BYTES:
                return self._open_offer(sealed, source, now, wall)
            if kind == ACCEPTANCE and len(sealed) == RESPONSE_BYTES:
                return self._open_acceptance(sealed, now)
            raise Refused("stranger")
        except Refused as reason:
            self.counters[f"dropped_{reason}"] += 1
            return _NOTHING

    def _open_sealed(self, sealed: bytes, source: Address, now: float) -> Opened:
        pair = self._pairs.get(index_of(sealed))
        if pair is None or len(sealed) < SEAL_BYTES:
            raise Refused("no_pair")
        datagram, newest = pair.open(sealed, now)
        self.counters["opened"] += 1
        send: Sequence[tuple[Address, bytes]] = ()
        if newest:
            send = self._settle((pair.node_id, source.host, source.port), pair, now)
        return Opened(datagram, NodeAddress.of(source, pair.node_id), send)

    def _settle(self, key: _Key, pair: Session, now: float) -> Sequence[tuple[Address, bytes]]:
        """This pair is used from this address: what goes there goes under it, and what waits goes now."""
        route = self._routes.get(key)
        if route is not None and route.pair is pair and not route.waiting:
            return ()
        if route is None:
            route = self._routes[key] = _Route()
            if len(self._routes) > MOST_ROUTES:
                self._forget_route(next(iter(self._routes)))
        if not pair.confirmed or route.pair is None or route.pair.born <= pair.born:
            route.pair = pair
        pair.confirm()
        return self._flush(Address(key[1], key[2]), route, now)

    def _flush(self, to: Address, route: _Route, now: float) -> list[tuple[Address, bytes]]:
        out = []
        while route.waiting and route.pair is not None:
            since, datagram = route.waiting.popleft()
            if now - since > WAITING_S:
                self.counters["not_sent_waiting"] += 1
                continue
            out.append((to, route.pair.seal(datagram, now)))
            self.counters["sealed"] += 1
        return out

    def _open_offer(self, sealed: bytes, source: Address, now: float, wall: float) -> Opened:
        epoch, content = self._disclose(sealed)
        offer = HandshakeInit.read(content)
        if offer is None:
            raise Refused("stranger")
        if not hmac.compare_digest(offer.recipient, self._identity.node_id):
            raise Refused("misdirected")
        node_id = offer.node_id
        if node_id == self._identity.node_id and offer.boot == self._boot:
            raise Refused("own_echo")
        self._filter.check(offer, epoch, now, wall)
        ephemeral = self._token(PUBLIC_KEY_BYTES)
        acceptance = make_response(self._identity, epoch, offer, self._boot, self._new_index(), ephemeral)
        keys = session_keys(epoch, offer, acceptance, ephemeral, offer.ephemeral)
        if keys is None:
            raise Refused("unsigned")
        to_us, from_us = keys
        pair = Session(node_id, epoch.fingerprint, acceptance.index, offer.index, to_us, from_us, now, offered=False)
        self._pairs[pair.index] = pair
        self._unconfirmed.append((now, pair.index))
        if len(self._unconfirmed) > MOST_UNCONFIRMED:
            self._drop_unconfirmed()
        self.counters["offers_accepted"] += 1
        return Opened(send=[(source, epoch.enclose(ACCEPTANCE, acceptance.content, self._token(NONCE_BYTES)))])

    def _open_acceptance(self, sealed: bytes, now: float) -> Opened:
        epoch, content = self._disclose(sealed)
        acceptance = HandshakeResponse.read(content)
        found = None if acceptance is None else self._offers.get(acceptance.offered)
        if acceptance is None or found is None or found[1].epoch is not epoch:
            raise Refused("unasked")
        key, made = found
        if acceptance.node_id != key[0]:
            raise Refused("impostor")
        if not acceptance.is_signed(epoch, made.offer):
            raise Refused("unsigned")
        keys = session_keys(epoch, made.offer, acceptance, made.ephemeral, acceptance.ephemeral)
        if keys is None:
            raise Refused("unsigned")
        from_us, to_us = keys
        pair = Session(key[0], epoch.fingerprint, made.offer.index, acceptance.index, to_us, from_us, now, offered=True)
        self._pairs[pair.index] = pair
        route = self._routes[key]
        self._withdraw(route)
        route.pair = pair
        to = Address(key[1], key[2])
        self.counters["offers_taken"] += 1
        # Something must go out under the new keys, or the other side never uses them.
        return Opened(send=self._flush(to, route, now) or [(to, pair.seal(b"", now))])

    def _disclose(self, sealed: bytes) -> tuple[Epoch, bytes]:
        for epoch in self._epochs:
            content = epoch.disclose(sealed)
            if content is not None:
                return epoch, content
        raise Refused("stranger")

    # -- forgetting ----------------------------------------------------------------------------------------------

    def _drop_unconfirmed(self) -> None:
        _, index = self._unconfirmed.popleft()
        pair = self._pairs.get(index)
        if pair is not None and not pair.confirmed:
            del self._pairs[index]

    def _prune(self, now: float) -> None:
        self._pruned = now
        while self._unconfirmed and now - self._unconfirmed[0][0] > UNCONFIRMED_S:
            self._drop_unconfirmed()
        for pair in [pair for pair in self._pairs.values() if now - pair.heard > FORGET_S]:
            del self._pairs[pair.index]
        for index in [index for index, (_, made) in self._offers.items() if now - made.made > OFFER_LIFE_S]:
            del self._offers[index]
        for key, route in list(self._routes.items()):
            route.offered = [made for made in route.offered if made.offer.index in self._offers]
            lives = route.pair is not None and route.pair.index in self._pairs
            if not lives:
                route.pair = None
                if not route.offered:
                    del self._routes[key]

    def _forget_route(self, key: _Key) -> None:
        self._withdraw(self._routes.pop(key))

    def _withdraw(self, route: _Route) -> None:
        for made in route.offered:
            self._offers.pop(made.offer.index, None)
        route.offered.clear()


def _life_s(pair: Session) -> float:
    return RENEW_S if pair.offered else RENEW_ACCEPTED_S
