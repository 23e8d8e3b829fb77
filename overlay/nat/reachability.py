"""Finds out by dial-back (as AutoNAT in libp2p) whether peers can open streams to this node, so that it may own shards.

The node counts as reached when two peers connected to it (one, where there is only one), or when it founds a swarm. A
`client_only` node never does. Eligible peers are asked first. A peer that is not eligible and cannot be asked is behind
a NAT or gone, and lowers the number needed. Peers next to this node (`overlay.addresses.site_of`) reach it even where
nobody else does: they are asked only where no other answers, and where none has ever failed to connect. The check is
repeated soon after a failure and rarely after a success. It is repeated at once when two peers report that their
streams to this node fail, and when one of another site appears after neighbours have confirmed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from p2pnode.overlay.addresses import Address, site_of, usable_host
from p2pnode.overlay.bootstrap.hello import HelloContext, HelloRejected, say_hello
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.messages import StreamsFailing
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact, Heartbeat, Peer, PeerChange, PeerTable
from p2pnode.overlay.requests import RequestService
from p2pnode.overlay.transport import Buffer, Response, Transport, TransportError

DIAL_BACK = "dialback"
CONFIRMATIONS = 2
#: Most peers asked in one check: some may be dead or busy.
MAX_ASKED = 5
DIAL_TIMEOUT_S = 2.0
MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 2.0, 60.0
RECHECK_INTERVAL_S = 300.0
#: Reports of two different peers within this time cause a check.
REPORT_WINDOW_S = 60.0
#: Without peers there is nothing to check; the node looks for them this often.
POLL_INTERVAL_S = 1.0


class DialBackAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Whether the peer could connect to the asking node, and otherwise why not."""

    reached: bool
    reason: str


class Reachability:
    """Finds out whether peers reach this node (`LocalNode.reached`); `reason` says why (empty: not checked yet)."""

    def __init__(
        self,
        local: LocalNode,
        context: HelloContext,
        transport: Transport,
        requests: RequestService,
        peers: PeerTable,
        environment: Environment,
        *,
        client_only: bool,
    ) -> None:
        self.reason = "client_only is set" if client_only else ""
        self.client_only = client_only
        self.confirmed_by: list[bytes] = []
        self._local = local
        self._context = context
        self._transport = transport
        self._requests = requests
        self._clock = environment.clock
        self._rng = environment.entropy.random
        self._log = environment.log
        self._peers = peers
        self._unreachable_reports: dict[bytes, float] = {}
        #: Peers of another site could not connect when they were asked last; and whether neighbours alone have.
        self._failed_outside = self._reached_by_neighbours = False
        self._wake = asyncio.Event()
        requests.register(DIAL_BACK, self._dial_back, waits=True)

    def assume_reached(self) -> None:
        """This node founds: without peers it is the only one that can own."""
        if not self.client_only:
            self._decide(True, "founder, no peer to confirm it")

    def check_now(self) -> None:
        """Check without waiting for the interval to end."""
        self._wake.set()

    def on_unreachable_report(
        self, _body: StreamsFailing, heartbeat: Heartbeat, source: Address, _message_id: bytes
    ) -> None:
        """A peer reports that its streams to this node fail. Only reports of known peers, from their own address,
        count."""
        sender = heartbeat.node_id
        peer = self._peers.get(sender)
        if peer is None or peer.address.host != (heartbeat.host or source.host):
            return
        now = self._clock.monotonic()
        self._unreachable_reports = {
            who: at for who, at in self._unreachable_reports.items() if now - at <= REPORT_WINDOW_S
        }
        self._unreachable_reports[sender] = now
        if len(self._unreachable_reports) >= CONFIRMATIONS:
            self._unreachable_reports.clear()
            self.check_now()

    def on_change(self, change: PeerChange) -> None:
        """A peer has appeared: one of another site knows more than neighbours do."""
        peer = self._peers.get(change.node_id) if change.kind in ("up", "returned") else None
        if self._reached_by_neighbours and peer is not None and not self._is_neighbour(peer):
            self.check_now()

    def _is_neighbour(self, peer: Peer) -> bool:
        own = usable_host(self._local.address.host)
        return own is not None and site_of(own) == site_of(peer.address.host)

    async def run(self) -> None:
        """Check repeatedly until cancelled."""
        if self.client_only:
            return
        retry_s = MIN_RETRY_DELAY_S
        while True:
            if not len(self._peers):
                pause_s = POLL_INTERVAL_S
            elif await self.check():
                pause_s, retry_s = RECHECK_INTERVAL_S, MIN_RETRY_DELAY_S
            else:
                pause_s = retry_s * (0.75 + 0.5 * self._rng.random())
                retry_s = min(2 * retry_s, MAX_RETRY_DELAY_S)
            self._wake.clear()
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def check(self) -> bool:
        """Ask peers to dial this node until enough have connected or too few are left; true when enough have."""
        others = self._known(neighbours=False)
        if (is_reached := await self._ask_some(others)) is not None:
            self._failed_outside, self._reached_by_neighbours = not is_reached, False
        elif not self._failed_outside and not any(eligible for _, eligible in others):
            is_reached = await self._ask_some(self._known(neighbours=True))
            self._reached_by_neighbours = bool(is_reached)
        return bool(is_reached)

    def _known(self, *, neighbours: bool) -> list[tuple[Contact, bool]]:
        """The present peers, and whether each is eligible. A peer must not be read after a wait: it may be gone."""
        return [(peer.contact, peer.eligible) for peer in self._peers if self._is_neighbour(peer) is neighbours]

    async def _ask_some(self, peers: list[tuple[Contact, bool]]) -> bool | None:
        """Whether enough of these peers have connected; None if they have not decided it."""
        self._rng.shuffle(peers)
        peers.sort(key=lambda peer: not peer[1])
        needed = min(CONFIRMATIONS, len(peers))
        asked = peers[:MAX_ASKED]
        reached: list[bytes] = []
        not_asked: list[str] = []
        refused: list[str] = []
        left = len(asked)  # peers that have confirmed or still may
        for contact, eligible in asked:
            try:
                answer = await self._ask(contact)
            except TransportError as error:
                not_asked.append(f"could not ask {short(contact.node_id)}: {error.detail}")
                left -= 1
                if not eligible:
                    needed = max(1, min(needed, left))
            else:
                if answer.reached:
                    reached.append(contact.node_id)
                else:
                    refused.append(f"{short(contact.node_id)} could not connect: {answer.reason}")
                    left -= 1
            if len(reached) >= needed or left < needed:
                break
        if not reached and not refused:
            return None
        self.confirmed_by = reached
        if needed and len(reached) >= needed:
            self._decide(True, f"{len(reached)} {'peer' if len(reached) == 1 else 'peers'} connected to this node")
            return True
        self._decide(False, next(iter(refused + not_asked), "too few peers to confirm it"))
        return False

    async def _ask(self, contact: Contact) -> DialBackAnswer:
        timeout_s = 2 * DIAL_TIMEOUT_S
        # The next check comes in minutes: of hundreds that join at one moment none keeps streams to those it asked.
        async with self._requests.request(contact, DIAL_BACK, b"", timeout_s=timeout_s, keep=False) as answer:
            try:
                return msgspec.msgpack.decode(answer.head, type=DialBackAnswer)
            except (msgspec.MsgspecError, ValueError) as error:
                raise TransportError("foreign", contact.address, "gave no dial-back answer") from error

    async def _dial_back(self, peer: Contact, _payload: bytes, _body: AsyncIterator[Buffer]) -> Response:
        """Open a stream to the address that the asking peer claims, and check which node answers."""
        try:
            result = await say_hello(
                self._transport,
                peer.address,
                context=self._context,
                genesis=None,
                timeout_s=DIAL_TIMEOUT_S,
            )
        except HelloRejected as error:
            answer = DialBackAnswer(False, f"{peer.address} {error.reason}")
        else:
            same = result.contact.node_id == peer.node_id
            answer = DialBackAnswer(same, "" if same else f"{peer.address} is another node")
        return Response(msgspec.msgpack.encode(answer))

    def _decide(self, eligible: bool, reason: str) -> None:
        self.reason = reason
        if eligible != self._local.reached:
            self._log.info("reachable" if eligible else "not_reachable", reason=reason)
            self._local.set_reached(eligible)
