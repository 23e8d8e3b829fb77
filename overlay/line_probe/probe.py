"""Measures this node's upload as it joins: a short probe to one member, and to a second one if the first shows a full
line, which may be the receiver's.

Until it ends, some seconds at most, the node is not eligible. A founder, a node that may own nothing, and one whose
capacity is known do not probe; nor is a member on the same machine asked. A member receives one probe at a time. What
is found is told to some members before the node is eligible, since placement depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from overlay.capacity import UNKNOWN
from overlay.environment import Environment
from overlay.ids import short
from overlay.line_probe.estimate import PROBE_BYTES, Estimate, Reading, announced, better, estimate, full_rate
from overlay.local_node import LocalNode
from overlay.peer_table import PeerTable
from overlay.peers import Contact, Peer
from overlay.rate_limits import RateLimit, RateLimiter
from overlay.requests import RequestService
from overlay.transport import Buffer, RequestRejected, Response, SizedBody, Transport, TransportError

PROBE = "probe"
#: Of one probe. After the second time no other one is begun, and after the third all end.
MAX_PROBE_S, MAX_WAIT_S, MAX_ALL_S = 2.0, 5.0, 9.0
#: Receivers whose estimates count.
MAX_ESTIMATES = 2
#: Small requests before a probe; the fastest one is the round trip. The first may open the connection.
ROUND_TRIPS = 2
REQUEST_TIMEOUT_S = 2.0
#: The node looks for receivers that are free this often.
RETRY_S = 0.25
#: Counters are read this often at first, and then in steps of this part of the time passed.
READING_S, READING_PART = 0.001, 0.02
#: A reading that is so much too late says nothing about the line.
LATE_S = 0.02
#: Members who are told the capacity before the node is eligible; the others see it in every later request.
MAX_TOLD = 8
#: Probes that one member may send here.
RATE = RateLimit(0.2, 3)

_PIECE = bytes(1 << 17)


class ProbeRequest(msgspec.Struct, frozen=True, array_like=True):
    """A probe with a body of so many bytes; 0: only an answer is wanted. Later versions may append fields."""

    size_bytes: int = 0


class ProbeAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Whether the receiver has room for a probe now."""

    is_free: bool = True


class LineProbe:
    """Probes this node's upload once, and receives the probes of others."""

    def __init__(
        self,
        local: LocalNode,
        transport: Transport,
        requests: RequestService,
        peers: PeerTable,
        environment: Environment,
        *,
        may_own: bool,
    ) -> None:
        """`may_own`: the settings allow that this node owns."""
        self._local = local
        self._transport = transport
        self._requests = requests
        self._peers = peers
        self._clock = environment.clock
        self._rng = environment.entropy.random
        self._log = environment.log
        self._is_due = may_own
        self._is_receiving = False
        self._rates: RateLimiter[bytes] = RateLimiter(RATE)
        requests.register(PROBE, self._receive)

    # -- this node's line --------------------------------------------------------------------------------------

    def skip(self) -> None:
        """This node founds: it owns everything at once, and what joiners fetch measures its line."""
        self._is_due = False

    def begin(self) -> bool:
        """This node has arrived in its swarm. Returns whether `run` is to be called now; until it ends the node is not
        eligible."""
        is_due, self._is_due = self._is_due, False
        if not is_due or self._local.line.capacity != UNKNOWN or not self._receivers([]):
            return False
        self._local.set_measuring(True)
        return True

    async def run(self) -> None:
        """Probe, announce and tell what was found. Whatever happens, the node may be eligible afterwards."""
        found: list[Estimate] = []
        try:
            try:
                async with asyncio.timeout(MAX_ALL_S):
                    await self._probe_receivers(found)
            except TimeoutError:
                pass
            await self._announce(found)
        finally:
            self._local.set_measuring(False)

    def _receivers(self, asked: list[bytes]) -> list[Peer]:
        """Members on other machines that were not asked yet, in the order of asking: those that streams reach, and of
        them a random one first."""
        own_host = self._local.address.host
        found = [
            peer
            for peer in self._peers
            if peer.node_id not in asked and peer.address.host != own_host and self._transport.has_line_to(peer.address)
        ]
        self._rng.shuffle(found)
        found.sort(key=lambda peer: not peer.eligible)
        return found

    async def _probe_receivers(self, found: list[Estimate]) -> None:
        """Until one shows a line that is not full, or enough show a full one."""
        asked: list[bytes] = []
        began_s = self._clock.monotonic()
        while len(found) < MAX_ESTIMATES and self._clock.monotonic() - began_s < MAX_WAIT_S:
            for peer in self._receivers(asked):
                try:
                    round_trip_s = await self._round_trip(peer.contact)
                    if round_trip_s is None:  # it receives the probe of another node
                        continue
                    one = await self._probe(peer.contact, round_trip_s)
                except TransportError as error:
                    # One that refuses has begun to receive the probe of another node meanwhile, and is asked again.
                    if error.kind != "rejected" or error.is_not_served:
                        asked.append(peer.node_id)
                    self._log.debug("upload_not_probed", peer=short(peer.node_id), reason=str(error))
                    continue
                asked.append(peer.node_id)
                if one is not None:
                    found.append(one)
                    break
            else:
                await asyncio.sleep(RETRY_S)
            if found and not found[-1].is_exact:
                return

    async def _round_trip(self, to: Contact) -> float | None:
        """Seconds of a small request to a receiver; None where it is not free. Raises `TransportError`."""
        shortest_s = REQUEST_TIMEOUT_S
        for _ in range(ROUND_TRIPS):
            began_s = self._clock.monotonic()
            if not await self._ask(to):
                return None
            shortest_s = min(shortest_s, self._clock.monotonic() - began_s)
        return shortest_s

    async def _probe(self, to: Contact, round_trip_s: float) -> Estimate | None:
        """What one receiver shows. Raises `TransportError`."""
        body = SizedBody(iter([_PIECE] * (PROBE_BYTES // len(_PIECE))), PROBE_BYTES)
        sending = asyncio.create_task(self._send(to, body), name="probe")
        try:
            return await self._watch(sending, body, round_trip_s)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _watch(self, sending: asyncio.Task[None], body: SizedBody, round_trip_s: float) -> Estimate | None:
        began_s = self._clock.monotonic()
        readings = [Reading(0.0, 0)]
        while True:
            wait_s = max(READING_S, READING_PART * readings[-1].at_s)
            await asyncio.wait([sending], timeout=wait_s)
            at_s = self._clock.monotonic() - began_s
            late_s = at_s - readings[-1].at_s - wait_s
            is_done = sending.done()
            if is_done:
                sending.result()
            moved_bytes = PROBE_BYTES if is_done else body.moved_bytes()
            readings.append(Reading(at_s, moved_bytes, late_s if late_s > LATE_S else 0.0))
            if (full := full_rate(readings, round_trip_s)) is not None:
                return full
            if is_done or at_s >= MAX_PROBE_S:
                return estimate(readings, round_trip_s)

    async def _ask(self, to: Contact) -> bool:
        """A small request, which also tells this node's capacity; whether the receiver is free."""
        head = msgspec.msgpack.encode(ProbeRequest())
        async with self._requests.request(to, PROBE, head, timeout_s=REQUEST_TIMEOUT_S) as answer:
            try:
                return msgspec.msgpack.decode(answer.head, type=ProbeAnswer).is_free
            except (msgspec.MsgspecError, ValueError) as error:
                raise TransportError("foreign", to.address, "gave no answer to a probe") from error

    async def _send(self, to: Contact, body: SizedBody) -> None:
        head = msgspec.msgpack.encode(ProbeRequest(PROBE_BYTES))
        async with self._requests.request(to, PROBE, head, body, timeout_s=MAX_PROBE_S):
            pass

    async def _announce(self, found: list[Estimate]) -> None:
        best = found[0] if found else None
        for one in found[1:]:
            best = better(best, one)
        # One receiver alone may be the slow one, as long as what is sent to it alone counts as no full line either.
        if best is not None and best.is_exact and len(found) < MAX_ESTIMATES:
            best = None
        capacity = announced(best, [peer.capacity for peer in self._peers])
        if not self._local.line.begin(capacity, "probe") or best is None:
            self._log.info("upload_not_known", receivers=len(found))
            return
        self._log.info(
            "upload_probed",
            bytes_per_s=round(best.bytes_per_s),
            is_exact=best.is_exact,
            capacity=capacity,
            receivers=len(found),
        )
        told = self._receivers([])[:MAX_TOLD]
        asking = [asyncio.create_task(self._ask(peer.contact), name="tell capacity") for peer in told]
        try:
            if asking:
                await asyncio.wait(asking, timeout=REQUEST_TIMEOUT_S)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    # -- the probes of others ----------------------------------------------------------------------------------

    async def _receive(self, peer: Contact, payload: bytes, body: AsyncIterator[Buffer]) -> Response:
        """Read a probe and drop it. Raises `RequestRejected`."""
        try:
            size_bytes = msgspec.msgpack.decode(payload, type=ProbeRequest).size_bytes
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise RequestRejected("this is not a probe; does the sender run another version of p2pnode?") from None
        if size_bytes:
            await self._receive_body(peer, size_bytes, body)
        return Response(msgspec.msgpack.encode(ProbeAnswer(not self._is_receiving)))

    async def _receive_body(self, peer: Contact, size_bytes: int, body: AsyncIterator[Buffer]) -> None:
        if not 0 < size_bytes <= PROBE_BYTES:
            raise RequestRejected(f"a probe has at most {PROBE_BYTES} bytes, not {size_bytes}")
        if self._is_receiving:
            raise RequestRejected("another node sends a probe here; ask another member")
        if wait_s := self._rates.take(peer.node_id, self._clock.monotonic()):
            raise RequestRejected(f"you have sent probes here a moment ago; try again in {wait_s:.0f} s")
        self._is_receiving = True
        try:
            async with asyncio.timeout(2 * MAX_PROBE_S):
                async for piece in body:
                    size_bytes -= len(piece)
                    if size_bytes < 0:
                        raise RequestRejected("this probe is longer than it says")
        except TimeoutError:
            raise RequestRejected(f"this probe has taken longer than {2 * MAX_PROBE_S:g} s") from None
        finally:
            self._is_receiving = False
