"""Connects the member list to the network: sends for it, directly or through other members, and runs its timer.

Owns no task: the timer runs the failure detector's rounds and deadlines, and calls a dead member now and then, which is
how the two sides of a healed partition find each other. Changes of peers go to the log and to the subscribers.

Each failure to connect a stream asks the failure detector for a probe. A peer whose streams fail twice within half a
minute, although it answers probes, is notified, and is no candidate for shards for as long. A peer at a port that a NAT
chose accepts no streams at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.calls import PROBE_TIMEOUT_S, OnResult, answer
from p2pnode.overlay.kademlia.messages import (
    DuplicateIdentity,
    Gossip,
    Ping,
    PingRequest,
    PingResult,
    Pong,
    Result,
    StreamsFailing,
    pack_contact,
)
from p2pnode.overlay.kademlia.protocol import SwarmProtocol
from p2pnode.overlay.membership.failure_detector import FRESH_SHARE, PROBE_INTERVAL_S
from p2pnode.overlay.membership.members import MemberList
from p2pnode.overlay.peers import Contact, Heartbeat, PeerChange, heartbeat_of
from p2pnode.overlay.rate_limits import RateLimit, TokenBucket

#: A death, or a change of this node's activity, is sent to this many at once; the others receive it as gossip.
BROADCAST_MAX_PEERS = 20
#: So many deaths are sent at once. When many nodes die at one moment, every other one finds most of the dead itself.
#: To tell 20 others of each would be most of what it sends; the rest rides on other datagrams.
DEATHS_AT_ONCE = RateLimit(8.0, 16.0)
#: A helper's answer may take this much longer than its own probe.
HELPER_SHARE = 1.2
#: One dead member is called this often.
REDIAL_DEAD_S = 5.0
#: One contact is verified at most once in this time.
VERIFY_PAUSE_S = 1.0
#: Contacts that are verified in that time: a flood of invented senders takes no more of the calls.
MAX_PAUSED = 1024
#: This many failed streams within the time make a peer unreachable for as long.
STREAM_FAILURES = 2
STREAM_FAILURE_S = 30.0
#: Peers whose failures are counted; beyond it the longest untouched are forgotten.
MAX_COUNTED = 1024


class Membership:
    """The member list of one node at work. Implements `overlay.membership.network.Network`."""

    def __init__(
        self,
        own: Heartbeat,
        k: int,
        protocol: SwarmProtocol,
        environment: Environment,
    ) -> None:
        self.members = MemberList(own, protocol.router, k, environment, self)
        self._protocol = protocol
        self._clock = environment.clock
        self._rng = environment.entropy.random
        self._log = environment.log
        self._deaths = TokenBucket(DEATHS_AT_ONCE, environment.clock.monotonic())
        #: When each contact may be verified again, the earliest first.
        self._verify_again: dict[Contact, float] = {}
        #: The helpers that an inquiry waits for, by the member that it is about.
        self._inquiries: dict[bytes, set[bytes]] = {}
        #: How many streams to each peer have failed, and when the last one did.
        self._failures: dict[bytes, tuple[int, float]] = {}
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_redial = 0.0
        self._callbacks: list[Callable[[PeerChange], None]] = []
        protocol.subscribe(self.members)

    def start(self) -> None:
        """Begin to probe."""
        self._next_redial = self._clock.monotonic() + REDIAL_DEAD_S * (0.5 + self._rng.random())
        self._schedule()

    def close(self) -> None:
        """Probe no more; probes that are still under way prove nothing from now on."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._closed:
            return
        # The detector measures the lag of this loop from the deadline that it gave last: each one is armed.
        delay_s = max(0.0, self.members.detector.next_deadline() - self._clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        try:
            self.members.detector.tick(now)
            if now >= self._next_redial:
                self._next_redial = now + REDIAL_DEAD_S
                if self.members.dead_contacts:
                    contact = self._rng.choice(list(self.members.dead_contacts.values()))
                    self._protocol.call(contact, Ping(), ignore_result, counts_as_failure=False)
        finally:
            self._schedule()  # a subscriber that raises must not end the probing

    def on_change(self, callback: Callable[[PeerChange], None]) -> None:
        """Call `callback` synchronously with every change of a peer."""
        self._callbacks.append(callback)

    # -- questions -----------------------------------------------------------------------------------------------

    def ask(self, contact: Contact, on_result: OnResult) -> None:
        """Ask a member for its heartbeat: by way of another one, if it did not answer this node last."""
        helper = self.members.helper(contact.node_id)
        if helper is None:
            self._protocol.call(contact, Ping(), on_result)
        else:
            self._ask_through(helper, contact, on_result)

    async def ping(self, contact: Contact) -> Heartbeat | None:
        """The heartbeat of one node; None when it does not answer, or another node does."""
        answered = await answer(partial(self._protocol.call, contact, Ping()))
        peer = self.members.peer(contact.node_id)
        return heartbeat_of(peer) if isinstance(answered, Pong) and peer is not None else None

    async def query_steps(self, node_ids: Sequence[bytes]) -> None:
        """Ask all of these that are known, at once; the peer table takes their heartbeats."""
        contacts = [peer.contact for node_id in node_ids if (peer := self.members.peer(node_id)) is not None]
        if not contacts:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = len(contacts)

        def on_result(_: Result | None) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not waiting.done():
                waiting.set_result(None)

        for contact in contacts:
            self.ask(contact, on_result)
        await waiting

    def heard_lately(self, node_id: bytes) -> Heartbeat | None:
        """The heartbeat of a member from which a message has just come; None for others."""
        since = self._clock.monotonic() - FRESH_SHARE * PROBE_INTERVAL_S
        peer = self.members.heard_directly(node_id, since)
        return None if peer is None else heartbeat_of(peer)

    def request_probe(self, node_id: bytes, reason: str) -> None:
        """Probe a member now, for there is reason to doubt it."""
        if self.members.detector.request_probe(node_id, self._clock.monotonic()):
            self._log.debug("peer_doubted", peer=short(node_id), reason=reason)

    # -- streams -------------------------------------------------------------------------------------------------

    def on_stream_response(self, heartbeat: Heartbeat, address: Address) -> None:
        """The node at this address answered a request over a stream."""
        self._failures.pop(heartbeat.node_id, None)
        self.members.on_stream_response(heartbeat, address)

    def on_stream_failure(self, to: Contact, reason: str) -> None:
        """No stream to this peer could be opened, or it broke."""
        now = self._clock.monotonic()
        count, last = self._failures.pop(to.node_id, (0, now))
        count = count + 1 if now - last <= STREAM_FAILURE_S else 1
        self._failures[to.node_id] = (count, now)
        if len(self._failures) > MAX_COUNTED:
            del self._failures[next(iter(self._failures))]
        if count == STREAM_FAILURES and to.node_id in self.members.peers:
            self._protocol.send_gossip(to, [], StreamsFailing())
        self.request_probe(to.node_id, reason)

    def is_reachable(self, node_id: bytes) -> bool:
        """False for a while after its streams failed repeatedly, for a peer behind a NAT, and for an unverified one."""
        if not self.members.takes_streams(node_id) or not self.members.is_verified(node_id):
            return False
        count, last = self._failures.get(node_id, (0, 0.0))
        return count < STREAM_FAILURES or self._clock.monotonic() - last > STREAM_FAILURE_S

    # -- what the rules do (`Network`) ---------------------------------------------------------------------------

    def probe(self, node_id: bytes) -> None:
        """Probe a member. One that did not answer last is asked through its helper too, and only that counts."""
        contact = self._contact(node_id)
        if contact is None:
            return
        self.members.movement.mark(node_id)
        helper = self.members.helper(node_id)
        if helper is None:
            self._protocol.call(contact, Ping(), ignore_result)
            return
        self._ask_through(helper, contact, ignore_result)
        self._protocol.call(contact, Ping(), ignore_result, counts_as_failure=False, require_proof=True)

    def tell(self, node_id: bytes, news: Gossip) -> None:
        """See `Network`."""
        contact = self._contact(node_id)
        if contact is not None:
            self._protocol.send_gossip(contact, [news])

    def broadcast(self, news: Gossip, *, at_once: bool = False) -> None:
        """See `Network`."""
        self._protocol.queue.put(news, len(self.members.peers))
        if at_once and not self._deaths.take(self._clock.monotonic()):
            self.send_to_some([news])

    def report_duplicate(self, to: Contact, report: DuplicateIdentity) -> None:
        """See `Network`."""
        self._protocol.send_gossip(to, [], report)

    def notify(self, change: PeerChange) -> None:
        """See `Network`."""
        level = self._log.info if change.kind in ("dead", "left", "restarted", "moved") else self._log.debug
        event = "up" if change.kind == "returned" else change.kind
        level(f"peer_{event}", peer=short(change.node_id), reason=change.reason)
        if change.kind == "suspect" and self._timer is not None:  # it may end before the next probe round
            self._timer.cancel()
            self._schedule()
        if change.kind in ("up", "returned", "restarted", "moved"):
            self._failures.pop(change.node_id, None)  # from before: they do not count against its streams now
        for callback in list(self._callbacks):
            callback(change)

    def _contact(self, node_id: bytes) -> Contact | None:
        return self.members.contact(node_id) or self.members.dead_contacts.get(node_id)

    def send_to_some(self, news: Sequence[Gossip]) -> None:
        """Send gossip, and with it the heartbeat, to `BROADCAST_MAX_PEERS` peers now: in a small swarm, to all."""
        node_ids = list(self.members.peers.ids())
        if len(node_ids) > BROADCAST_MAX_PEERS:
            node_ids = self._rng.sample(node_ids, BROADCAST_MAX_PEERS)
        for contact in map(self.members.contact, node_ids):
            if contact is not None:
                self._protocol.send_gossip(contact, news)

    def verify(self, contact: Contact, *, named_by: Contact | None = None, counts_as_failure: bool = True) -> None:
        """See `Network`. If a node does not answer, the member that has named it is asked for it."""

        def on_verified(result: Result | None) -> None:
            # A response has arrived as an event already.
            if result is None and named_by is not None:
                self._ask_through(named_by, contact, ignore_result)

        if named_by is not None and self.members.negative.is_silent(contact, self._clock.monotonic()):
            on_verified(None)
        # A node that was just asked, and asks in return before its answer has come, proves its id with that answer.
        elif self._protocol.awaits_proof(contact):
            self.members.counters["verifications_spared"] += 1
        elif self._begins_verification(contact):
            self._protocol.call(contact, Ping(), on_verified, counts_as_failure=counts_as_failure, require_proof=True)

    def _begins_verification(self, contact: Contact) -> bool:
        """Whether it was not verified just now. The pauses are all of one length, so the oldest ends first."""
        now, paused = self._clock.monotonic(), self._verify_again
        while paused and paused[oldest := next(iter(paused))] <= now:
            del paused[oldest]
        if contact in paused or len(paused) >= MAX_PAUSED:
            return False
        paused[contact] = now + VERIFY_PAUSE_S
        return True

    def check_address(self, contact: Contact, otherwise: Callable[[], None]) -> None:
        """See `Network`."""

        def on_result(result: Result | None) -> None:
            if result is None:
                otherwise()

        self._protocol.call(contact, Ping(), on_result, counts_as_failure=False)

    def _ask_through(self, helper: Contact, contact: Contact, on_result: OnResult, *, is_retry: bool = False) -> None:
        """Ask a node through one that hears it. Its heartbeat is an event; `on_result` gets None without one."""

        def on_answer(result: Result | None) -> None:
            if result is None and not is_retry:
                self._ask_through(helper, contact, on_result, is_retry=True)
            elif self._take_relayed(result, contact, helper):
                on_result(result)
            else:
                if not self._closed:
                    self.members.on_timeout(contact)
                on_result(None)

        limit_s = self._helper_limit_s()
        if not is_retry:  # a lost request is repeated as soon as one to the helper itself would be given up
            known = self.members.peer(helper.node_id)
            limit_s = min(limit_s, sum(self._protocol.round_trips.waits(known, self.members.stretch())))
        body = PingRequest(pack_contact(contact))
        self._protocol.call(helper, body, on_answer, limit_s=limit_s, counts_as_failure=False)

    def _helper_limit_s(self) -> float:
        return PROBE_TIMEOUT_S * HELPER_SHARE * self.members.stretch()

    def _take_relayed(self, result: Result | None, contact: Contact, helper: Contact) -> bool:
        """Whether the helper has reached it; then it is known by what it has told the helper."""
        if not isinstance(result, PingResult) or not result.answered:
            return False
        if result.heartbeat is not None:
            self.members.on_relayed(result.heartbeat, contact, helper.node_id)
        return True

    def probe_through(self, node_id: bytes, via: Sequence[bytes]) -> None:
        """See `Network`. Nobody reaches it: it is suspected."""
        target = self.members.contact(node_id)
        helpers = [contact for contact in map(self.members.contact, via) if contact is not None]
        if target is None or node_id in self._inquiries:
            return
        began = self._clock.monotonic()
        if not helpers:
            self._conclude(node_id, began)
            return
        waiting = self._inquiries[node_id] = {helper.node_id for helper in helpers}

        def on_result(helper: Contact, result: Result | None) -> None:
            if self._inquiries.get(node_id) is not waiting:
                return  # it has ended; another one may have begun
            if self._take_relayed(result, target, helper):
                del self._inquiries[node_id]  # alive: only the path from this node to it fails
                return
            waiting.discard(helper.node_id)
            if not waiting:
                del self._inquiries[node_id]
                self._conclude(node_id, began)

        body, limit_s = PingRequest(pack_contact(target)), self._helper_limit_s()
        for helper in helpers:
            on_answer = partial(on_result, helper)
            self._protocol.call(helper, body, on_answer, limit_s=limit_s, counts_as_failure=False)

    def _conclude(self, node_id: bytes, began: float) -> None:
        """Nobody has reached it since an inquiry began. If it has sent something itself meanwhile, it is there."""
        peer = self.members.peer(node_id)
        if not self._closed and peer is not None and peer.last_heard <= began:
            self.members.on_unreachable(node_id)


def ignore_result(_: Result | None) -> None:
    """The events report the response, or the time-out."""
