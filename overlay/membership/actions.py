"""The actions that the rules of membership return: records that `overlay.membership.service` performs in their order.

The failure detector knows nodes by id and returns the first five; the member list applies its `StateChanged` to the
table and adds the others. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.messages import DuplicateIdentity, Gossip
from p2pnode.overlay.peers import Contact, Heartbeat, PeerChange


@dataclass(frozen=True, slots=True)
class SendPing:
    """Ping the member itself."""

    node_id: bytes


@dataclass(frozen=True, slots=True)
class SendPingRequest:
    """Ask others to ping it."""

    node_id: bytes
    via: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SendNow:
    """Send this gossip to one node now."""

    to: bytes
    news: Gossip


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Piggyback this gossip on datagrams; `at_once` also sends it to known contacts now."""

    news: Gossip
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The state of a member changed."""

    node_id: bytes
    kind: Literal["suspect", "refuted", "dead", "left"]
    reason: str


DetectorAction = SendPing | SendPingRequest | SendNow | Broadcast | StateChanged


@dataclass(frozen=True, slots=True)
class Notify:
    """Log a change of a peer and pass it to the subscribers."""

    change: PeerChange


@dataclass(frozen=True, slots=True)
class Verify:
    """Ping a contact, which must prove its id; the response is an event like any other."""

    contact: Contact
    counts_as_failure: bool = True


@dataclass(frozen=True, slots=True)
class AddressClaim:
    """A peer's heartbeat, and the address where it answered; `known`: whether the member list had it by then."""

    heartbeat: Heartbeat
    address: Address
    rtt_s: float | None
    known: bool


@dataclass(frozen=True, slots=True)
class CheckAddress:
    """Ping a contact; when it does not answer, pass `otherwise` to `MemberList.on_unanswered_check`."""

    contact: Contact
    otherwise: AddressClaim


@dataclass(frozen=True, slots=True)
class SendDuplicateIdentity:
    """Report to one of two processes with the same id where the other is."""

    to: Contact
    report: DuplicateIdentity


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Log something that is no change of a peer."""

    level: Literal["warning", "error"]
    event: str
    fields: Mapping[str, object]


Action = DetectorAction | Notify | Verify | CheckAddress | SendDuplicateIdentity | LogEvent
