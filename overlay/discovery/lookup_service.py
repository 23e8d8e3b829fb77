"""Runs Kademlia lookups: sends the queries of `overlay.kademlia.lookup` over the protocol, with callbacks instead of
tasks."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from p2pnode.overlay.environment import Clock
from p2pnode.overlay.kademlia.calls import answer
from p2pnode.overlay.kademlia.lookup import Lookup
from p2pnode.overlay.kademlia.messages import FindNode, Nodes, Result, unpack_nodes
from p2pnode.overlay.kademlia.protocol import SwarmProtocol
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.members import MemberList
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.report import LookupReport
from p2pnode.overlay.settings import OverlaySettings

#: A lookup ends with what it has after this long. Two nodes in sequence that do not answer cost two full time-outs.
DEADLINE_S = 5.0

#: Number of recent lookups that the medians cover.
RECENT = 32


class Finished(NamedTuple):
    """The cost of one lookup. `rounds`: sequential responses on the longest path to a node of the result."""

    target: bytes
    rounds: int
    queries: int
    seconds: float


class LookupService:
    """The lookups of one node."""

    def __init__(
        self,
        local: LocalNode,
        protocol: SwarmProtocol,
        membership: MemberList,
        settings: OverlaySettings,
        clock: Clock,
    ) -> None:
        #: The last `RECENT` lookups, the newest last.
        self.recent: deque[Finished] = deque(maxlen=RECENT)
        self._local = local
        self._protocol = protocol
        self._membership = membership
        self._clock = clock
        self._k = settings.k
        self._alpha = settings.alpha

    async def find(self, target: bytes, seeds: Iterable[Contact] = ()) -> list[Contact]:
        """The k nodes closest to `target` that answered, closest first; this node included where it belongs."""
        known = self._protocol.router.closest(target, 2 * self._k)

        def usable(contacts: Iterable[Contact]) -> list[Contact]:
            return self._usable(contacts, target)

        lookup = Lookup(target, self._local.contact, self._k, self._alpha, usable([*known, *seeds]))
        run = _LookupRun(lookup, self._protocol, usable, ipv6=self._local.sends_ipv6)
        self._protocol.counters["lookups"] += 1
        started = self._clock.monotonic()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await run.finished()
        except TimeoutError:
            self._protocol.counters["lookups_cut_off"] += 1
        finally:
            run.stop()
        seconds = self._clock.monotonic() - started
        self._protocol.counters["lookup_queries"] += lookup.queries
        self._protocol.counters["lookup_rounds"] += lookup.rounds
        self._protocol.counters["lookup_ms"] += round(1000 * seconds)
        self.recent.append(Finished(target, lookup.rounds, lookup.queries, seconds))
        return lookup.result()

    def most_asked(self, target: bytes) -> int | None:
        """The most nodes that a recent lookup of this target has asked; None: none of them has ended."""
        return max((finished.queries for finished in self.recent if finished.target == target), default=None)

    def medians(self) -> LookupReport | None:
        """Median cost of the recent lookups; None before the first."""
        if not (recent := self.recent):
            return None
        return LookupReport(
            ms=1000 * statistics.median(finished.seconds for finished in recent),
            rounds=statistics.median(finished.rounds for finished in recent),
            queries=statistics.median(finished.queries for finished in recent),
        )

    async def ask(self, contact: Contact, target: bytes) -> list[Contact]:
        """The contacts that one node knows close to `target`, those that did not answer this one included; empty when
        it does not answer."""
        nodes = await answer(partial(self._protocol.call, contact, FindNode(target)))
        if not isinstance(nodes, Nodes):
            return []
        contacts, malformed = unpack_nodes(nodes, self._protocol.own_id, ipv6=self._local.sends_ipv6)
        self._protocol.counters["malformed_contacts"] += malformed
        return contacts

    def _usable(self, contacts: Iterable[Contact], wanted: bytes = b"") -> list[Contact]:
        """Remove addresses that did not answer lately; what others report does not bring them back. The node that is
        looked for stays: one request in six hundred is lost together with its retry, at a loss of 2 %."""
        now = self._clock.monotonic()
        negative = self._membership.negative
        if not len(negative):
            return list(contacts)
        return [contact for contact in contacts if contact.node_id == wanted or not negative.is_silent(contact, now)]


class _LookupRun:
    """A lookup in progress."""

    def __init__(
        self,
        lookup: Lookup,
        protocol: SwarmProtocol,
        usable: Callable[[Iterable[Contact]], list[Contact]],
        *,
        ipv6: bool,
    ) -> None:
        self._ended = False
        self._lookup = lookup
        self._protocol = protocol
        self._usable = usable
        self._ipv6 = ipv6
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body = FindNode(lookup.target)
        self._pumping = False

    def stop(self) -> None:
        """Ignore the responses that are still missing."""
        self._ended = True

    async def finished(self) -> None:
        self._pump()
        await self._done

    def _pump(self) -> None:
        if self._pumping or self._ended:
            return
        # A closed protocol answers inside `call`: one loop instead of recursion.
        self._pumping = True
        while contacts := self._lookup.next_queries():
            for contact in contacts:
                self._ask(contact)
        self._pumping = False
        if self._lookup.done and not self._done.done():
            self._done.set_result(None)

    def _ask(self, contact: Contact) -> None:
        query = _Query(self, contact.node_id)
        self._protocol.call(contact, self._body, query.on_result, on_slow=query.on_slow)

    def on_result(self, node_id: bytes, result: Result | None) -> None:
        """The node answered, or the waits are over."""
        if self._ended:
            return
        if isinstance(result, Nodes):
            contacts, malformed = unpack_nodes(result, self._protocol.own_id, ipv6=self._ipv6)
            if malformed:
                self._protocol.counters["malformed_contacts"] += malformed
            self._lookup.on_response(node_id, self._usable(self._lookup.unknown(contacts)))
        else:
            self._lookup.on_failure(node_id)
        self._pump()

    def on_slow(self, node_id: bytes) -> None:
        """The retry goes out."""
        if not self._ended:
            self._lookup.on_slow(node_id)
            self._pump()


class _Query:
    """One node that is asked. Not closures: hundreds of these wait while many nodes join."""

    __slots__ = ("_node_id", "_run")

    def __init__(self, run: _LookupRun, node_id: bytes) -> None:
        self._run = run
        self._node_id = node_id

    def on_result(self, result: Result | None) -> None:
        self._run.on_result(self._node_id, result)

    def on_slow(self) -> None:
        self._run.on_slow(self._node_id)
