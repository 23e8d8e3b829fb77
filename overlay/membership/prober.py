"""The timers of the failure detector: its probe rounds and deadlines, and now and then a call to a dead member.

The call to a dead member is how the two sides of a healed partition find each other. Runs on timers, not on tasks.
"""

from __future__ import annotations

import asyncio

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.kademlia.messages import Ping
from p2pnode.overlay.kademlia.protocol import SwarmProtocol
from p2pnode.overlay.membership.service import Membership, ignore_result
from p2pnode.overlay.peers import PeerChange

#: One dead member is called this often.
REDIAL_DEAD_S = 5.0


class Prober:
    """Calls `Membership.tick` whenever the failure detector has something to do."""

    def __init__(self, membership: Membership, protocol: SwarmProtocol, environment: Environment) -> None:
        self._membership = membership
        self._members = membership.members
        self._protocol = protocol
        self._clock = environment.clock
        self._rng = environment.entropy.random
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_redial = 0.0
        membership.on_change(self._on_change)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._next_redial = self._clock.monotonic() + REDIAL_DEAD_S * (0.5 + self._rng.random())
        self._schedule()

    def stop(self) -> None:
        self._loop = None
        self._membership.close()
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        if self._loop is None:
            return
        # The detector measures the lag of this loop from the deadline that it gave last: each one is armed.
        delay_s = max(0.0, self._members.detector.next_deadline() - self._clock.monotonic())
        self._timer = self._loop.call_later(delay_s, self._tick)

    def _on_change(self, change: PeerChange) -> None:
        """A suspicion may end before the next probe round."""
        if change.kind == "suspect" and self._timer is not None:
            self._timer.cancel()
            self._schedule()

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        try:
            self._membership.tick(now)
            if now >= self._next_redial:
                self._next_redial = now + REDIAL_DEAD_S
                self._call_one_of_the_dead()
        finally:
            self._schedule()  # a subscriber that raises must not end the probing

    def _call_one_of_the_dead(self) -> None:
        if self._members.dead_contacts:
            contact = self._rng.choice(list(self._members.dead_contacts.values()))
            self._protocol.call(contact, Ping(), ignore_result, counts_as_failure=False)
