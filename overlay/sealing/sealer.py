"""Seals every datagram that a node of a closed swarm sends, and opens every datagram that it receives.

The first datagram to a node starts a handshake (`overlay.sealing.handshake`) and is queued until it is done; later ones
use its session (`overlay.sealing.session`). A peer that cannot prove membership gets no answer; it changes nothing but
one counter. An init gets one response, only from the node it names, and only if it is fresh
(`overlay.sealing.handshake`). So recorded traffic opens nothing.

Pure. Time (`now` monotonic, `wall` since 1970) and randomness come in; datagrams to send and to deliver go out. There
are no timers: a lost init is sent again when the caller sends its next datagram.
"""

from __future__ import annotations

import hmac
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from p2pnode.overlay.addresses import Address, NodeAddress, id_behind
from p2pnode.overlay.errors import Refused
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.sealing.handshake import (
    BOOT_NONCE_BYTES,
    INDEX_BYTES,
    INIT,
    INIT_BYTES,
    NONCE_BYTES,
    PUBLIC_KEY_BYTES,
    RESPONSE,
    RESPONSE_BYTES,
    SEALED,
    Epoch,
    HandshakeInit,
    HandshakeResponse,
    InitFilter,
    make_init,
    make_response,
    microseconds,
    session_keys,
)
from p2pnode.overlay.sealing.session import MAX_DATAGRAMS, SEAL_BYTES, Session, index_of
from p2pnode.overlay.sealing.swarm_key import KeyRing
from p2pnode.overlay.transport import MAX_DATAGRAM_BYTES

#: Shortest time between two inits to one contact; the layer above repeats its datagrams.
INIT_DELAY_S = 0.2
#: Inits to one contact whose responses are still accepted, so that a slow path can complete a handshake.
MAX_PENDING_INITS = 3
INIT_LIFETIME_S = 5.0
#: Datagrams queued per contact until there is a session, and for how long. More or older ones are dropped.
MAX_QUEUED = 8
QUEUE_TIMEOUT_S = 3.0
#: If two requests of a session stay unanswered for this long, the peer may have restarted. Then each datagram is also
#: queued for a new session, with at most one init per delay.
UNANSWERED_TIMEOUT_S = 0.4
REKEY_DELAY_S = 1.0
#: A session is replaced after this time. The responder waits longer, so that both rarely start a handshake at once.
REKEY_AFTER_S, REKEY_AFTER_RESPONDER_S = 1800.0, 2000.0
#: After this idle time the peer may have dropped the session, so a handshake comes first. It is dropped here later.
SESSION_IDLE_S, SESSION_EXPIRY_S = 600.0, 900.0
PRUNE_INTERVAL_S = 30.0
#: Bounds on memory: contacts, and sessions that a peer began and has not used yet.
MAX_ROUTES = 16384
MAX_UNCONFIRMED = 1024
UNCONFIRMED_EXPIRY_S = 10.0

#: Longest sealed datagram on the wire: in an Ethernet frame with IPv6 and UDP headers 1,452 bytes fit.
MAX_SEALED_BYTES = MAX_DATAGRAM_BYTES + SEAL_BYTES

_Key = tuple[bytes, str, int]


@dataclass(slots=True)
class _PendingInit:
    """An init of this node that may still get a response."""

    init: HandshakeInit
    epoch: Epoch
    ephemeral: bytes
    made_at: float


@dataclass(slots=True)
class _Route:
    """One contact: a node at an address."""

    session: Session | None = None
    pending: list[_PendingInit] = field(default_factory=list)
    last_init: float = float("-inf")
    queued: deque[tuple[float, bytes]] = field(default_factory=lambda: deque(maxlen=MAX_QUEUED))


@dataclass(slots=True)
class Opened:
    """The result of one datagram: what to deliver, its source, and what to send because of it."""

    datagram: bytes = b""
    source: NodeAddress | None = None
    send: Sequence[tuple[Address, bytes]] = ()


_NOTHING = Opened()


class Sealer:
    """The sessions of one process of one node."""

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
        """`token(n)`: n unpredictable bytes. `clock_differs`: see `InitFilter`."""
        self.counters: Counter[str] = Counter()
        self._identity = identity
        self._run = run
        self._token = token
        self._boot_nonce = token(BOOT_NONCE_BYTES)
        self._epochs: list[Epoch] = []
        self._routes: OrderedDict[_Key, _Route] = OrderedDict()
        self._sessions: dict[bytes, Session] = {}
        self._unconfirmed: deque[tuple[float, bytes]] = deque()
        self._pending_inits: dict[bytes, tuple[_Key, _PendingInit]] = {}
        self._filter = InitFilter(wall, clock_differs)
        self._last_init_us = 0
        self._pruned_at = now
        self.use(keys)

    def use(self, keys: KeyRing) -> None:
        """Replace the valid keys. Sessions of other epochs end; the next datagram starts a new handshake."""
        self._epochs = [Epoch(key, self._run) for key in keys]
        valid = set(keys.fingerprints)
        for session in list(self._sessions.values()):
            if session.epoch_fingerprint not in valid:
                del self._sessions[session.index]
        for index, (_, pending) in list(self._pending_inits.items()):
            if pending.epoch.fingerprint not in valid:
                del self._pending_inits[index]
        for route in self._routes.values():
            if route.session is not None and route.session.epoch_fingerprint not in valid:
                route.session = None
            route.pending = [each for each in route.pending if each.init.index in self._pending_inits]

    @property
    def sessions(self) -> int:
        """Number of sessions, including those that the peer has not used yet."""
        return len(self._sessions)

    # --- out ------------------------------------------------------------------------------------------------------

    def seal(self, to: Address, datagram: bytes, now: float, wall: float) -> list[tuple[Address, bytes]]:
        """What to send so that `datagram` reaches the node at `to`; it is queued if there is no session yet."""
        node_id = id_behind(to)
        if not node_id:
            self.counters["not_sent_no_recipient"] += 1
            return []
        if now - self._pruned_at > PRUNE_INTERVAL_S:
            self._prune(now)
        key = (node_id, to.host, to.port)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = _Route()
            if len(self._routes) > MAX_ROUTES:
                self._forget_route(next(iter(self._routes)))
        else:
            self._routes.move_to_end(key)
        session = route.session
        if session is None or not self._is_usable(session, now):
            self._queue(route, datagram, now)
            return list(self._initiate(key, route, now, wall, INIT_DELAY_S))
        is_silent = session.unanswered_since is not None and now - session.unanswered_since > UNANSWERED_TIMEOUT_S
        out: list[tuple[Address, bytes]] = [(to, session.seal(datagram, now))]
        self.counters["sealed"] += 1
        if is_silent:
            # Sent under both keys: the process now at this address can open one of them.
            self._queue(route, datagram, now)
            out.extend(self._initiate(key, route, now, wall, REKEY_DELAY_S))
        elif self._needs_rekey(session, now):
            out.extend(self._initiate(key, route, now, wall, REKEY_DELAY_S))
        return out

    def _is_usable(self, session: Session, now: float) -> bool:
        is_idle = now - session.last_used > SESSION_IDLE_S
        return session.index in self._sessions and not is_idle and session.sent < MAX_DATAGRAMS

    def _needs_rekey(self, session: Session, now: float) -> bool:
        lifetime_s = REKEY_AFTER_S if session.is_initiator else REKEY_AFTER_RESPONDER_S
        return session.epoch_fingerprint != self._epochs[0].fingerprint or now - session.created_at > lifetime_s

    def _queue(self, route: _Route, datagram: bytes, now: float) -> None:
        if any(datagram == other for _, other in route.queued):
            return
        if len(route.queued) == MAX_QUEUED:
            self.counters["not_sent_waiting"] += 1
        route.queued.append((now, datagram))

    def _initiate(
        self, key: _Key, route: _Route, now: float, wall: float, delay_s: float
    ) -> Iterator[tuple[Address, bytes]]:
        if now - route.last_init < delay_s:
            return
        route.last_init = now
        # Increases even if the clock is set back: the receiver accepts each time once.
        self._last_init_us = max(microseconds(wall), self._last_init_us + 1)
        epoch = self._epochs[0]
        ephemeral = self._token(PUBLIC_KEY_BYTES)
        init = make_init(
            self._identity, epoch, key[0], self._boot_nonce, self._last_init_us, self._new_index(), ephemeral
        )
        pending = _PendingInit(init, epoch, ephemeral, now)
        route.pending.append(pending)
        self._pending_inits[init.index] = (key, pending)
        while len(route.pending) > MAX_PENDING_INITS:
            self._pending_inits.pop(route.pending.pop(0).init.index, None)
        self.counters["offers_made"] += 1
        yield Address(key[1], key[2]), epoch.seal(INIT, init.content, self._token(NONCE_BYTES))

    def _new_index(self) -> bytes:
        while True:
            index = self._token(INDEX_BYTES)
            if index not in self._sessions and index not in self._pending_inits:
                return index

    # --- in -------------------------------------------------------------------------------------------------------

    def open(self, sealed: bytes, source: Address, now: float, wall: float) -> Opened:
        """Open one received datagram. Never raises; a refused datagram is counted by its reason."""
        try:
            if not sealed:
                raise Refused("stranger")
            kind = sealed[0]
            if kind == SEALED:
                return self._open_sealed(sealed, source, now)
            if kind == INIT and len(sealed) == INIT_BYTES:
                return self._open_init(sealed, source, now, wall)
            if kind == RESPONSE and len(sealed) == RESPONSE_BYTES:
                return self._open_response(sealed, now)
            raise Refused("stranger")
        except Refused as reason:
            self.counters[f"dropped_{reason}"] += 1
            return _NOTHING

    def _open_sealed(self, sealed: bytes, source: Address, now: float) -> Opened:
        session = self._sessions.get(index_of(sealed))
        if session is None or len(sealed) < SEAL_BYTES:
            raise Refused("no_pair")
        datagram, newest = session.open(sealed, now)
        self.counters["opened"] += 1
        send: Sequence[tuple[Address, bytes]] = ()
        if newest:
            send = self._confirm((session.node_id, source.host, source.port), session, now)
        return Opened(datagram, NodeAddress.of(source, session.node_id), send)

    def _confirm(self, key: _Key, session: Session, now: float) -> Sequence[tuple[Address, bytes]]:
        """The peer uses this session from this address: use it too, and send what is queued."""
        route = self._routes.get(key)
        if route is not None and route.session is session and not route.queued:
            return ()
        if route is None:
            route = self._routes[key] = _Route()
            if len(self._routes) > MAX_ROUTES:
                self._forget_route(next(iter(self._routes)))
        if not session.confirmed or route.session is None or route.session.created_at <= session.created_at:
            route.session = session
        session.confirm()
        return self._flush(Address(key[1], key[2]), route, now)

    def _flush(self, to: Address, route: _Route, now: float) -> list[tuple[Address, bytes]]:
        out = []
        while route.queued and route.session is not None:
            since, datagram = route.queued.popleft()
            if now - since > QUEUE_TIMEOUT_S:
                self.counters["not_sent_waiting"] += 1
                continue
            out.append((to, route.session.seal(datagram, now)))
            self.counters["sealed"] += 1
        return out

    def _open_init(self, sealed: bytes, source: Address, now: float, wall: float) -> Opened:
        epoch, content = self._open_handshake(sealed)
        init = HandshakeInit.read(content)
        if init is None:
            raise Refused("stranger")
        if not hmac.compare_digest(init.recipient, self._identity.node_id):
            raise Refused("misdirected")
        node_id = init.node_id
        if node_id == self._identity.node_id and init.boot_nonce == self._boot_nonce:
            raise Refused("own_echo")
        self._filter.check(init, epoch, wall)
        ephemeral = self._token(PUBLIC_KEY_BYTES)
        response = make_response(self._identity, epoch, init, self._boot_nonce, self._new_index(), ephemeral)
        keys = session_keys(epoch, init, response, ephemeral, init.ephemeral)
        if keys is None:
            raise Refused("unsigned")
        to_us, from_us = keys
        session = Session(
            node_id, epoch.fingerprint, response.index, init.index, to_us, from_us, now, is_initiator=False
        )
        self._sessions[session.index] = session
        self._unconfirmed.append((now, session.index))
        if len(self._unconfirmed) > MAX_UNCONFIRMED:
            self._drop_oldest_unconfirmed()
        self.counters["offers_accepted"] += 1
        return Opened(send=[(source, epoch.seal(RESPONSE, response.content, self._token(NONCE_BYTES)))])

    def _open_response(self, sealed: bytes, now: float) -> Opened:
        epoch, content = self._open_handshake(sealed)
        response = HandshakeResponse.read(content)
        found = None if response is None else self._pending_inits.get(response.init_index)
        if response is None or found is None or found[1].epoch is not epoch:
            raise Refused("unasked")
        key, pending = found
        if response.node_id != key[0]:
            raise Refused("impostor")
        if not response.is_signed(epoch, pending.init):
            raise Refused("unsigned")
        keys = session_keys(epoch, pending.init, response, pending.ephemeral, response.ephemeral)
        if keys is None:
            raise Refused("unsigned")
        from_us, to_us = keys
        session = Session(
            key[0], epoch.fingerprint, pending.init.index, response.index, to_us, from_us, now, is_initiator=True
        )
        self._sessions[session.index] = session
        route = self._routes[key]
        self._forget_inits(route)
        route.session = session
        to = Address(key[1], key[2])
        self.counters["offers_taken"] += 1
        # Send something under the new keys even if nothing is queued: it confirms the session to the responder.
        return Opened(send=self._flush(to, route, now) or [(to, session.seal(b"", now))])

    def _open_handshake(self, sealed: bytes) -> tuple[Epoch, bytes]:
        for epoch in self._epochs:
            content = epoch.open(sealed)
            if content is not None:
                return epoch, content
        raise Refused("stranger")

    # --- expiry ---------------------------------------------------------------------------------------------------

    def _drop_oldest_unconfirmed(self) -> None:
        _, index = self._unconfirmed.popleft()
        session = self._sessions.get(index)
        if session is not None and not session.confirmed:
            del self._sessions[index]

    def _prune(self, now: float) -> None:
        self._pruned_at = now
        while self._unconfirmed and now - self._unconfirmed[0][0] > UNCONFIRMED_EXPIRY_S:
            self._drop_oldest_unconfirmed()
        for session in list(self._sessions.values()):
            if now - session.last_received > SESSION_EXPIRY_S:
                del self._sessions[session.index]
        for index, (_, pending) in list(self._pending_inits.items()):
            if now - pending.made_at > INIT_LIFETIME_S:
                del self._pending_inits[index]
        for key, route in list(self._routes.items()):
            route.pending = [each for each in route.pending if each.init.index in self._pending_inits]
            if route.session is None or route.session.index not in self._sessions:
                route.session = None
                if not route.pending:
                    del self._routes[key]

    def _forget_route(self, key: _Key) -> None:
        self._forget_inits(self._routes.pop(key))

    def _forget_inits(self, route: _Route) -> None:
        for pending in route.pending:
            self._pending_inits.pop(pending.init.index, None)
        route.pending.clear()
