"""This node as its peers see it: id, address, heartbeat, and the swarm it has entered.

The one owner of this state. Services read it when they need it; those that must act on a change subscribe with
`on_change`. A node is eligible to own shards when peers have reached it, the upper layers are willing, and its
line is not on trial.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from p2pnode.overlay.addresses import Address, usable_host
from p2pnode.overlay.kademlia.messages import GENESIS_BYTES, swarm_tag
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.peers import Activity, Contact, Heartbeat, shown_version

#: What changed. `role`: activity or eligibility, which samples and placement depend on. `heartbeat`: anything else that
#: can wait for the next message.
LocalChange = Literal["heartbeat", "role", "address", "swarm"]


class LocalNode:
    """The state of this node that its messages carry."""

    def __init__(
        self,
        node_id: bytes,
        incarnation: int,
        boot_id: int,
        run: str,
        address: Address,
        line: MeasuredLine | None = None,
        version: str = "",
    ) -> None:
        """`address`: where the node is to listen; `listens_at` replaces it by the bound one. `line`: its line, as the
        transport measures it. `version`: what peers show as its version; empty: they show none."""
        self.version = shown_version(version)
        self.line = line or MeasuredLine()
        self.node_id = node_id
        self.run = run
        self.bound = address
        self.address = address
        self.heartbeat = Heartbeat(node_id, incarnation, boot_id, address.port)
        self.genesis: bytes | None = None
        #: Another node of the run has been told the genesis, and may have entered through this one.
        self.has_admitted = False
        self.tag: bytes | None = None
        self.reached = False
        self._willing = True
        self._on_trial = False
        self._callbacks: list[Callable[[LocalChange], None]] = []

    def on_change(self, callback: Callable[[LocalChange], None]) -> None:
        """Call `callback` synchronously after every change."""
        self._callbacks.append(callback)

    # -- state -------------------------------------------------------------------------------------------------

    @property
    def contact(self) -> Contact:
        return Contact(self.node_id, self.address)

    @property
    def activity(self) -> Activity:
        return Activity(self.heartbeat.activity)

    @property
    def is_training(self) -> bool:
        return self.heartbeat.activity == Activity.TRAINING

    @property
    def may_own(self) -> bool:
        """Whether this node is a candidate for shards itself."""
        return self.heartbeat.eligible and self.heartbeat.activity != Activity.LEAVING

    @property
    def sends_ipv6(self) -> bool:
        """Whether its socket can send to IPv6 addresses."""
        return ":" in self.bound.host

    # -- changes -------------------------------------------------------------------------------------------------

    def enter(self, genesis: bytes) -> None:
        """Belong to the swarm with this genesis from now on."""
        if len(genesis) != GENESIS_BYTES:
            raise ValueError(f"a genesis has {GENESIS_BYTES} bytes, not {len(genesis)}")
        self.genesis = genesis
        self.tag = swarm_tag(self.run, genesis)
        self._notify("swarm")

    def announce(
        self,
        *,
        activity: Activity | None = None,
        step: int | None = None,
        step_seconds: float | None = None,
        samples: int | None = None,
    ) -> None:
        """Change the heartbeat; every later message carries it."""
        changes: dict[str, Any] = {
            "activity": None if activity is None else int(activity),
            "step": step,
            "step_seconds": step_seconds,
            "samples": samples,
        }
        self._change({name: value for name, value in changes.items() if value is not None})

    def set_willing(self, willing: bool) -> None:
        """Whether the upper layers are ready to own shards."""
        self._willing = willing
        self._decide_eligible()

    def set_reached(self, reached: bool) -> None:
        """Whether peers can open streams to this node."""
        self.reached = reached
        self._decide_eligible()

    def set_on_trial(self, on_trial: bool) -> None:
        """Whether it is still to be seen how much this node may own (`overlay.line.trial`)."""
        self._on_trial = on_trial
        self._decide_eligible()

    def _decide_eligible(self) -> None:
        self._change({"eligible": self.reached and self._willing and not self._on_trial})

    def listens_at(self, bound: Address, advertised: tuple[str, int] | None) -> None:
        """The transport is bound. Without an advertised host, peers take the source address of its datagrams."""
        self.bound = bound
        host, port = advertised or ("", 0)
        self.address = Address(host or bound.host, port or bound.port)
        self._change({"host": host, "port": self.address.port}, "address")

    def mapped_to(self, address: Address | None) -> None:
        """A router forwards this outside address to this node; None: no longer."""
        self.address = address or self.bound
        self._change({"host": "" if address is None else address.host, "port": self.address.port}, "address")

    def seen_as(self, host: str) -> None:
        """A peer received a request of this node from this host: the own address of a node bound to every interface."""
        if usable_host(self.address.host) is None and usable_host(host) is not None:
            self.address = Address(host, self.address.port)

    def _change(self, fields: dict[str, Any], change: LocalChange = "heartbeat") -> None:
        before = self.heartbeat
        self.heartbeat = msgspec.structs.replace(before, **fields)
        if (before.activity, before.eligible) != (self.heartbeat.activity, self.heartbeat.eligible):
            change = "role"
        self._notify(change)

    def _notify(self, change: LocalChange) -> None:
        for callback in self._callbacks:
            callback(change)
