"""Keeps a joiner from owning until its own pushes have shown its line.

A node that joins a swarm in training is not eligible until what it has sent shows its rate, or that its line keeps up
(`overlay.line.rate`), or two minutes have passed. The others would wait for each delta of the shards of a slow line.
Where fewer than two others train and may own, as in a swarm of one or of nodes that are all new, the joiner may own at
once: every shard needs an owner and a backup.
"""

from __future__ import annotations

import asyncio

from p2pnode.overlay.environment import Clock
from p2pnode.overlay.line.capacity import UNKNOWN
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Activity, PeerTable
from p2pnode.overlay.transport import Transport

#: An owner and a backup.
MIN_OTHERS = 2
#: A joiner has heard its members after this long.
HEARD_S = 2.0
#: The longest trial.
TRIAL_S = 120.0
LOOK_S = 0.25


class LineTrial:
    """The trial of this node's line, once."""

    def __init__(self, local: LocalNode, transport: Transport, peers: PeerTable, clock: Clock) -> None:
        self._local = local
        self._transport = transport
        self._peers = peers
        self._clock = clock
        self._is_due = True

    def skip(self) -> None:
        """This node founds: it owns everything at once."""
        self._is_due = False

    def begin(self) -> bool:
        """This node has joined. Returns whether `run` is to be called now: its line is not known yet, and leads to a
        member."""
        is_due, self._is_due = self._is_due, False
        own_host = self._local.address.host
        addresses = [peer.address for peer in self._peers if peer.address.host != own_host]
        if not is_due or not any(map(self._transport.has_line_to, addresses)) or not self._local.line.begin_trial():
            return False
        self._local.set_on_trial(True)
        return True

    async def run(self) -> None:
        """Wait for the end of the trial. Whatever happens, the node may be eligible afterwards."""
        began_s, known_step = self._clock.monotonic(), 0
        try:
            while self._local.line.is_on_trial or self._is_untold(known_step):
                if self._local.line.is_on_trial:
                    known_step = self._local.heartbeat.step
                passed_s = self._clock.monotonic() - began_s
                if passed_s >= TRIAL_S or (passed_s >= HEARD_S and self._others() < MIN_OTHERS):
                    return
                await asyncio.sleep(LOOK_S)
        finally:
            # Where all nodes are new each sends and receives at once: what waits then waits for others' lines, too.
            self._local.line.end_trial()
            self._local.set_on_trial(False)

    def _is_untold(self, known_step: int) -> bool:
        """Whether owners may not have heard the class that was found: the pushes of the next step tell it."""
        return self._local.line.capacity != UNKNOWN and self._local.heartbeat.step < known_step + 2

    def _others(self) -> int:
        return sum(peer.eligible and peer.activity is Activity.TRAINING for peer in self._peers)
