"""What the overlay reports about itself, for `/status` and `/metrics`: sizes, counters, reachability and sampling."""

from __future__ import annotations

from typing import Any

import msgspec


class ReachabilityReport(msgspec.Struct, frozen=True):
    """Whether peers can open streams to this node. `confirmed_by`: short ids of the peers that did."""

    reached: bool
    reason: str
    confirmed_by: list[str]


class PortMappingReport(msgspec.Struct, frozen=True):
    """The port mapping in the router: the outside address, or the reason why there is none."""

    address: str
    reason: str


class LookupReport(msgspec.Struct, frozen=True):
    """Medians over the last lookups."""

    ms: float
    rounds: float
    queries: float


class SamplingReport(msgspec.Struct, frozen=True):
    """The pool that samples of peers are drawn from: its peers, its balls, and the age of the oldest."""

    pool: int
    balls: int
    oldest_seconds: float | None


class OverlayReport(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the overlay. `counters` of datagrams and requests exist once they have been counted."""

    counters: dict[str, int]
    #: Counters of the transport.
    socket: dict[str, int]
    peers: int
    calls_waiting: int
    #: Contacts in the routing table.
    contacts: int
    suspects: int
    #: Contacts of dead peers that are still tried now and then.
    lost: int
    sampling: SamplingReport
    lookup: LookupReport | None
    local_health: int
    round_trip_ms: float | None
    reachable: ReachabilityReport
    mapping: PortMappingReport | None

    def flat(self) -> dict[str, Any]:
        """As `/status` shows it: the counters stand beside the other fields."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "counters"}
        return {**self.counters, **fields}
