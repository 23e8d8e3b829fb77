"""Which members answer this node only by way of another member, and which not at all. Pure.

A firewall, a clock that is off or another network can separate two members that others reach. SWIM asks a helper to
ping the silent one before it suspects it (Das et al. 2002); the exchange asks a helper to pass its requests on. This
module records the members whose requests failed, decides when to look for a way to them, and remembers the relay that
was found. `training.exchange.indirect` sends the requests, `training.exchange.recovery.route_finder` looks.

A look asks the member directly too. While a relay is in use there is a look every `CONFIRM_S`: direct requests are
resumed soon, and a dead owner is not held for alive because it was reached once.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlay.addresses import Address

#: A member that was killed is suspected by then (`overlay.membership.failure_detector`), and nobody looks for it.
FIRST_LOOK_S = 1.0
#: A suspect, or one that was declared dead, may be alive behind the hole. Otherwise others have its shards by then.
DOUBTED_LOOK_S = 10.0
CONFIRM_S = 5.0
#: Without an answer for so long a member is no candidate.
UNREACHED_S = 5.0
#: Between two looks that found no relay; each is twice as far away as the one before.
SEARCH_S, LONGEST_SEARCH_S = 2.0, 60.0
#: Members remembered; the one that failed first is forgotten first.
MAX_MEMBERS = 1024


@dataclass(slots=True)
class Route:
    """The way to one member that does not answer directly; times in monotonic seconds. `reason` is that of the last
    direct failure. `relay`: the member that passes requests on; empty while none is known."""

    address: Address
    reason: str
    since_s: float
    look_s: float
    relay: bytes = b""
    search_pause_s: float = SEARCH_S
    #: When a look ended last.
    looked_s: float = float("-inf")


class MemberRoutes:
    """The members that one node does not reach directly."""

    def __init__(self) -> None:
        self._routes: dict[bytes, Route] = {}

    def __bool__(self) -> bool:
        return bool(self._routes)

    def rows(self) -> dict[bytes, Route]:
        """The members that do not answer directly, for `/status`."""
        return dict(self._routes)

    def relay(self, node: bytes) -> bytes:
        """The member by way of which this one answers; empty: it is asked directly."""
        route = self._routes.get(node) if self._routes else None
        return b"" if route is None else route.relay

    def is_unreached(self, node: bytes, now_s: float) -> bool:
        """Whether direct requests to a member have failed for so long, without an answer between, that it is no queue
        on a slow line: an owner whose candidates come and go sends whole shards to each."""
        route = self._routes.get(node) if self._routes else None
        return route is not None and (bool(route.relay) or now_s - route.since_s >= UNREACHED_S)

    def failed(self, node: bytes, address: Address, reason: str, now_s: float, relay: bytes = b"") -> None:
        """A request to a member had no answer: a direct one, or one by way of `relay`."""
        route = self._routes.get(node)
        if relay:
            if route is not None and route.relay == relay:
                route.relay, route.look_s = b"", now_s
        elif route is None:
            self._routes[node] = Route(address, reason, now_s, now_s + FIRST_LOOK_S)
            if len(self._routes) > MAX_MEMBERS:
                del self._routes[next(iter(self._routes))]
        else:
            route.address, route.reason = address, reason

    def reached(self, node: bytes) -> bool:
        """A member has answered a direct request. True if it was asked by way of another until now."""
        route = self._routes.pop(node, None)
        return route is not None and bool(route.relay)

    def died(self, node: bytes) -> None:
        """The failure detector has declared a member dead: what it relays, and itself, is to be looked for anew."""
        for other, route in self._routes.items():
            if node in (other, route.relay):
                route.relay, route.look_s = b"", 0.0

    def is_due(self, node: bytes, now_s: float, *, is_doubted: bool) -> bool:
        """Whether to look for a way to a member now. `is_doubted`: the failure detector suspects it, or holds it for
        dead."""
        route = self._routes.get(node)
        if route is None or now_s < route.look_s:
            return False
        return bool(route.relay) or not is_doubted or now_s - route.since_s >= DOUBTED_LOOK_S

    def was_looked_for(self, node: bytes, now_s: float) -> bool:
        """Whether a look has ended in the last `DOUBTED_LOOK_S`: take-overs are not held up by another one."""
        route = self._routes.get(node)
        return route is not None and now_s - route.looked_s < DOUBTED_LOOK_S

    def found(self, node: bytes, relay: bytes, now_s: float) -> bool:
        """A look has ended: this member relays, or none does where that is empty. True if it is another than before."""
        route = self._routes.get(node)
        if route is None:
            return False
        route.looked_s = now_s
        if relay:
            route.look_s, route.search_pause_s = now_s + CONFIRM_S, SEARCH_S
        else:
            route.look_s = now_s + route.search_pause_s
            route.search_pause_s = min(2 * route.search_pause_s, LONGEST_SEARCH_S)
        is_new, route.relay = bool(relay) and relay != route.relay, relay
        return is_new
