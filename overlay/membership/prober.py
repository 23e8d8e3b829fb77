"""Carries out what the failure detector decides: timers, probes direct and through others, news sent at once.

Also answers the procedures that need nothing but the table: `ping`, `find_node`, `probe`, `news`. Dials the dead now
and then, so that the two sides of a healed partition find each other. Runs on timers, not on tasks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

from overlay.addresses import Address
from overlay.environment import Clock
from overlay.kademlia.messages import (
    FindNode,
    Gossip,
    Nodes,
    Ping,
    PingResult,
    Pong,
    Result,
    pack_contact,
    pack_nodes,
    unpack_contact,
)
from overlay.kademlia.messages import GossipOnly as TellCall
from overlay.kademlia.messages import PingRequest as ProbeCall
from overlay.kademlia.protocol import SwarmProtocol
from overlay.membership.failure_detector import (
    Action,
    Broadcast,
    FailureDetector,
    SendNow,
    SendPing,
    SendPingRequest,
    StateChanged,
)
from overlay.membership.members import MemberList
from overlay.peers import Contact, Heartbeat
from overlay.settings import LivenessSettings

#: A death, or a change of our own activity, is told to this many at once; the others hear it later.
TELL_AT_ONCE = 20
#: Contacts in one answer: more than k, because some of them may be dead. With a fifth of 200 nodes just dead, 20 gave a
#: recall of 0.994 and 26 of 1.0.
ANSWER_CONTACTS = 26
#: One of the dead is dialled this often.
REDIAL_DEAD_S = 5.0
#: Probes on behalf of others under way: whoever asks for more, for whatever addresses, is not answered.
MOST_FOR_OTHERS = 256
#: A helper's answer may take this much longer than its own probe.
HELPER_SHARE = 1.2

_PONG = Pong()


class Prober:
    """The hands of the detector."""

    def __init__(
        self,
        protocol: SwarmProtocol,
        membership: MemberList,
        detector: FailureDetector,
        settings: LivenessSettings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._protocol = protocol
        self._membership = membership
        self._detector = detector
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._inquiries: dict[bytes, int] = {}
        self._for_others = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_redial = 0.0
        protocol.serve(Ping, self._ping)
        protocol.serve(FindNode, self._find_node)
        protocol.serve(ProbeCall, self._probe_for_another)
        protocol.serve(TellCall, self._told)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next_redial = self._clock.monotonic() + REDIAL_DEAD_S * (0.5 + self._rng.random())
        self._schedule()

    def stop(self) -> None:
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, self._detector.next_deadline() - self._clock.monotonic())
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        try:
            self.perform(self._detector.tick(now))
            if now >= self._next_redial:
                self._next_redial = now + REDIAL_DEAD_S
                self._redial_one_of_the_dead()
        finally:
            self._schedule()  # a subscriber that raises must not end the probing

    def _redial_one_of_the_dead(self) -> None:
        if self._membership.lost:
            contact = self._rng.choice(list(self._membership.lost.values()))
            self._protocol.call(contact, Ping(), _ignore, blame=False)

    # -- the detector's actions ----------------------------------------------------------------------------------

    def perform(self, actions: Sequence[Action]) -> None:
        """Carry out actions in their order."""
        suspects = self._detector.suspects
        for action in actions:
            match action:
                case SendPing(node_id):
                    contact = self._contact(node_id)
                    if contact is not None:
                        self._protocol.call(contact, Ping(), _ignore)
                case SendPingRequest(node_id, via):
                    self._probe_through(node_id, via)
                case SendNow(to, news):
                    contact = self._contact(to)
                    if contact is not None:
                        self._protocol.tell(contact, [news])
                case Broadcast(news, at_once):
                    self._protocol.queue.put(news, len(self._membership.peers))
                    if at_once:
                        self.tell_some([news])
                case StateChanged():
                    self._membership.judged(action)
        if self._detector.suspects > suspects:
            self._schedule()  # a suspicion may end before the next round

    def _contact(self, node_id: bytes) -> Contact | None:
        return self._membership.contact(node_id) or self._membership.lost.get(node_id)

    def tell_some(self, news: Sequence[Gossip]) -> None:
        """Send news, and with them our beat, to `TELL_AT_ONCE` peers now: in a small swarm, to all."""
        contacts = [peer.contact for peer in self._membership.peers]
        if len(contacts) > TELL_AT_ONCE:
            contacts = self._rng.sample(contacts, TELL_AT_ONCE)
        for contact in contacts:
            self._protocol.tell(contact, news)

    def _probe_through(self, node_id: bytes, via: tuple[bytes, ...]) -> None:
        target = self._membership.contact(node_id)
        helpers = [contact for contact in map(self._membership.contact, via) if contact is not None]
        if target is None or node_id in self._inquiries:
            return
        if not helpers:
            self._conclude(node_id)
            return
        self._inquiries[node_id] = len(helpers)

        def on_result(result: Result | None) -> None:
            if node_id not in self._inquiries:
                return
            if isinstance(result, PingResult) and result.answered:
                del self._inquiries[node_id]  # alive: only our own way to it is bad
                return
            self._inquiries[node_id] -= 1
            if self._inquiries[node_id] == 0:
                del self._inquiries[node_id]
                self._conclude(node_id)

        body = ProbeCall(pack_contact(target))
        limit_s = self._settings.probe_timeout_s * HELPER_SHARE * self._detector.stretch
        for helper in helpers:
            self._protocol.call(helper, body, on_result, limit_s=limit_s, blame=False)

    def _conclude(self, node_id: bytes) -> None:
        if self._loop is None:
            return  # stopped: what was still under way proves nothing
        now = self._clock.monotonic()
        self.perform(self._detector.unreachable(node_id, now, "neither we nor others reach it"))

    # -- procedures ----------------------------------------------------------------------------------------------

    def _ping(self, _body: Ping, _beat: Heartbeat, _source: Address, _message_id: bytes) -> Result:
        return _PONG

    def _find_node(self, body: FindNode, beat: Heartbeat, _source: Address, _message_id: bytes) -> Nodes:
        closest = self._protocol.router.closest(body.target, ANSWER_CONTACTS, skip=beat.node_id)
        return pack_nodes([entry.packed for entry in closest])

    def _probe_for_another(
        self,
        body: ProbeCall,
        _beat: Heartbeat,
        source: Address,
        message_id: bytes,
    ) -> Result | None:
        contact = unpack_contact(body.contact)
        if contact is None:
            self._protocol.counters["malformed_contacts"] += 1
            return None
        if self._for_others >= MOST_FOR_OTHERS:
            self._protocol.counters["probes_not_made"] += 1
            return None
        self._for_others += 1
        # Behind a NAT it has another address for each of us, or has another one since a moment ago.
        known = self._membership.contact(contact.node_id) or contact
        asked = [contact] if known == contact else [contact, known]
        waiting, answered = len(asked), False

        def on_result(result: Result | None) -> None:
            nonlocal waiting, answered
            waiting -= 1
            if waiting == 0:
                self._for_others -= 1
            if not answered and (result is not None or waiting == 0):
                answered = True
                self._protocol.respond(message_id, source, PingResult(result is not None))

        # Without blame: our own finding would start our own inquiry, and so on through the swarm.
        for each in asked:
            self._protocol.call(each, Ping(), on_result, blame=False)
        return None

    def _told(self, _body: TellCall, _beat: Heartbeat, _source: Address, _message_id: bytes) -> None:
        """The news of the datagram were heard before it was dispatched."""


def _ignore(_: Result | None) -> None:
    """The listener has seen the answer, or the silence."""
