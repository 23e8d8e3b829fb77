"""Hosts that decide together: one node of the swarm is the global server, and a leader is common to all.

The global server is the first of the nodes that are closest to a key of the swarm, so each node finds it by itself.
When it dies, the next one takes the role over. Its counts come with the requests (`training.devices.global_cycles`), so
nothing has to be handed over. Where there are two servers for a moment, each counts the nodes that ask it. A node that
reaches none takes its own share of the cycle.

The leader of the swarm is that of the node with the lowest running loss. The others ask that node for its values at the
end of their step, beside the exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple, TypeVar

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import key_id, short
from p2pnode.overlay.peers import Contact, PeerChange
from p2pnode.overlay.transport import Buffer, RequestRejected, Response, TransportError
from p2pnode.training.devices.global_cycles import Genesis, GlobalCycles, LeaseSteps, StepsLeased
from p2pnode.training.devices.positions import Positions, is_finite
from p2pnode.training.devices.turn import CycleRun
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.frames import BadFrame, FrameReader, Part, framed_bytes, frames, read_encoded, sized
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.interface import Vector

LEASE, LEADER = "lease_steps", "leader_values"
#: An answer has a hundred bytes and needs no work: a trainer waits for it.
LEASE_TIMEOUT_S = 2.0
#: Silence in the transfer of a leader's values.
LEADER_TIMEOUT_S = 10.0
#: A node that did not answer, or does not serve the request, is not asked for so long.
AVOID_S = 5.0
#: The nodes closest to the key are looked up so often.
LOOKUP_S = 1.0
#: A node takes at most so many times its own share of a cycle: beyond that the server's answer is not true.
MOST_SHARES = 16
#: So many nodes are asked for a lease before this one takes its own share.
ASKED = 2


class LeaderWanted(msgspec.Struct, frozen=True, array_like=True):
    """Asks for the values of this node's leader."""

    genesis: Genesis


Asked = TypeVar("Asked", LeaseSteps, LeaderWanted)


class _Need(NamedTuple):
    cycle: int
    trainers: int
    wants: int


class Coordination:
    """One node's part: a client of the global server, and the server itself when the role is this node's."""

    def __init__(
        self, swarm: Swarm, genesis: bytes, cycles: CycleRun, positions: Positions, environment: Environment
    ) -> None:
        """`cycles` and `positions` are those of this node's trainers."""
        self._swarm = swarm
        self._genesis = genesis
        self._here = cycles
        self._positions = positions
        self._clock = environment.clock
        self._executor = environment.executor
        self._log = environment.log
        self._cycles = GlobalCycles()
        self._key = key_id(b"p2pnode/global-server/" + genesis)
        #: The server that answered last; empty: none did.
        self.server = b""
        #: The node of the swarm's leader; empty: there is none.
        self.leader = b""
        self._avoided: dict[bytes, float] = {}
        self._found: tuple[float, list[Contact]] | None = None
        self._need: _Need | None = None
        #: Of the present cycle: its number, what is allowed here, and what all nodes have.
        self._books = (0, 0, 0)
        self._leasing: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve requests."""
        self._swarm.register(LEASE, self._on_lease)
        self._swarm.register(LEADER, self._on_leader)
        self._swarm.on_change(self._on_change)

    async def stop(self) -> None:
        """Cancel what is under way; idempotent."""
        tasks = [task for task in (self._leasing, self._fetching) if task is not None]
        self._leasing = self._fetching = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def serves(self) -> bool:
        """Whether this node holds the role, as far as it knows."""
        return self.server == self._swarm.node_id

    @property
    def trainers(self) -> int:
        """Those that take part, as this node counts them where it serves."""
        return self._cycles.trainers if self.serves else 0

    # -- leases --------------------------------------------------------------------------------------------------

    def want(self, cycle: int, trainers: int, wants: int) -> None:
        """`wants` more local steps of a cycle are asked for here; `CycleRun.leased` has the answer."""
        self._need = _Need(cycle, trainers, wants)
        if self._leasing is None or self._leasing.done():
            self._leasing = asyncio.create_task(self._lease(), name="lease-steps")

    async def _lease(self) -> None:
        while self._need is not None:
            need, self._need = self._need, None
            cycle, taken, total = self._books
            if cycle != need.cycle:
                cycle, taken, total = need.cycle, 0, 0
            message = LeaseSteps(
                self._genesis,
                cycle,
                need.trainers,
                self._here.period,
                taken,
                total,
                need.wants,
                self._positions.leader_loss,
            )
            try:
                answer = await self._ask(message)
            except Exception as error:  # the trainers wait for a lease, so they get their own share
                self._log.error("service_failed", service="lease-steps", error=repr(error))
                answer = None
            share = need.trainers * self._here.period
            if answer is None or answer.cycle != cycle:
                allowed, is_closed = max(taken, share), True
            else:
                self.leader = answer.leader or b""
                total = max(total, answer.total)
                # Whatever it says, each trainer has a step of its own, and none is kept in a cycle for ever.
                allowed = min(max(taken, answer.allowed), MOST_SHARES * share)
                is_closed = answer.is_closed or allowed >= MOST_SHARES * share
                allowed = max(allowed, need.trainers) if is_closed else allowed
            self._books = cycle, allowed, total
            self._here.leased(cycle, allowed, is_closed=is_closed)

    async def _ask(self, message: LeaseSteps) -> StepsLeased | None:
        """The answer of the first server that gives one; None: no node does."""
        now = self._clock.monotonic()
        servers = [one for one in await self._servers() if self._avoided.get(one.node_id, now) <= now]
        for server in servers[:ASKED]:
            if server.node_id == self._swarm.node_id:
                answer: StepsLeased | None = self._cycles.lease(self._swarm.node_id, message, now)
            else:
                answer = await self._ask_other(server, message)
            if answer is not None:
                self._note_server(server.node_id)
                return answer
        self._note_server(b"")
        return None

    async def _ask_other(self, server: Contact, message: LeaseSteps) -> StepsLeased | None:
        try:
            async with self._swarm.request(
                server, LEASE, msgspec.msgpack.encode(message), timeout_s=LEASE_TIMEOUT_S
            ) as response:
                return msgspec.msgpack.decode(response.head, type=StepsLeased)
        except (TransportError, ValueError, RecursionError):
            self._avoided[server.node_id] = self._clock.monotonic() + AVOID_S
            return None

    async def _servers(self) -> list[Contact]:
        """The nodes that may hold the role, the one that does first."""
        now = self._clock.monotonic()
        if self._found is None or now - self._found[0] >= LOOKUP_S:
            try:
                async with asyncio.timeout(LEASE_TIMEOUT_S):
                    self._found = now, await self._swarm.candidates(self._key)
            except TimeoutError:
                self._found = now, [] if self._found is None else self._found[1]
        return self._found[1]

    def _note_server(self, server: bytes) -> None:
        if server == self.server:
            return
        self.server = server
        if server:
            self._log.info("coordination_server", node=short(server), here=self.serves)
        else:
            self._log.warning(
                "coordination_alone",
                reason="no global server answers, so this node takes its own share of the local steps",
                hint='set devices.coordination = "global" on all nodes, and see whether they can be reached',
            )

    # -- the server ----------------------------------------------------------------------------------------------

    async def _on_lease(self, sender: Contact, payload: bytes, _: AsyncIterator[Buffer]) -> Response:
        message = self._checked(payload, LeaseSteps)
        answer = self._cycles.lease(sender.node_id, message, self._clock.monotonic())
        return Response(msgspec.msgpack.encode(answer))

    def _checked(self, payload: bytes, kind: type[Asked]) -> Asked:
        try:
            message = msgspec.msgpack.decode(payload, type=kind)
        except (ValueError, RecursionError) as error:
            raise RequestRejected(f"malformed {kind.__name__}: {error}") from error
        if message.genesis != self._genesis:
            raise RequestRejected("another swarm: the genesis differs")
        return message

    def _on_change(self, change: PeerChange) -> None:
        if change.kind in ("dead", "left"):
            self._cycles.lost(change.node_id)
        self._found = None

    # -- the leader of the swarm ---------------------------------------------------------------------------------

    def step_trained(self) -> None:
        """This node has trained a step: see where the swarm's leader is now."""
        if (
            self.leader
            and self._positions.leader_loss is not None
            and (self._fetching is None or self._fetching.done())
        ):
            self._fetching = asyncio.create_task(self._fetch(self.leader), name="fetch-leader")

    async def _fetch(self, leader: bytes) -> None:
        run = self._executor.run
        values: Vector | None = None  # this node's own leader is the swarm's
        if leader != self._swarm.node_id:
            contact, own = self._swarm.contact(leader), self._positions.leading
            if contact is None or own is None:
                return
            request = msgspec.msgpack.encode(LeaderWanted(self._genesis))
            try:
                async with self._swarm.request(contact, LEADER, request, timeout_s=LEADER_TIMEOUT_S) as response:
                    encoded, codec = await read_encoded(FrameReader(response.body), 0, Part.VALUE, own.size)
                values = await run(codecs.decoded, encoded, codec, own.size)
            except (TransportError, BadFrame, ValueError) as error:
                self._log.debug("leader_not_fetched", node=short(leader), reason=str(error))
                return
            if not await run(is_finite, values):
                self._log.warning("leader_not_finite", node=short(leader))
                return
        await run(self._positions.follow, values)

    async def _on_leader(self, _sender: Contact, payload: bytes, _: AsyncIterator[Buffer]) -> Response:
        self._checked(payload, LeaderWanted)
        values = self._positions.leading
        if values is None:
            raise RequestRejected("no trainer leads here yet")
        # They are sent as they are: a position that changes meanwhile is as good as either.
        body = sized(frames(0, values, "bfloat16", Part.VALUE), framed_bytes("bfloat16", values.size))
        return Response(b"", body)
