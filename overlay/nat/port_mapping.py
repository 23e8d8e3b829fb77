"""Keeps a port mapped in the router (`node.nat = "auto"`): opens the mapping, renews it, removes it on leaving.

The outside address replaces the inside one in the heartbeat; peers dial it back before this node counts as reachable. A
router that refuses, is missing, or loses the mapping is logged and shown in `/status`, and the node continues as one
behind a NAT. `overlay.nat.upnp` implements the protocol.
"""

from __future__ import annotations

import asyncio
import ipaddress
from typing import NamedTuple, Protocol

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.local_node import LocalNode

#: Lease asked of the router: short enough that the mapping of a killed node expires soon.
LEASE_S = 3600.0
#: A mapping is renewed when this share of its lease is over. This also restores it after a restart of the router.
RENEW_SHARE = 0.5
MIN_RENEWAL_S = 10.0
MIN_RETRY_DELAY_S, MAX_RETRY_DELAY_S = 10.0, 600.0
#: Longest wait for the router when the node leaves.
REMOVE_TIMEOUT_S = 1.0


class Mapped(NamedTuple):
    """The outside address of a mapping. `lease_s`: for how long; 0: until it is removed."""

    address: Address
    lease_s: float


class GatewayFailed(OverlayError):
    """No router was found, or it did not map the port; the text says why."""


class Gateway(Protocol):
    """A router that forwards ports."""

    async def open(self, internal: Address, lease_s: float) -> Mapped:
        """Forward UDP and TCP of one outside port to this node; call it again to renew. Raises `GatewayFailed`."""
        ...

    async def close(self) -> None:
        """Remove the mapping, if there is one. Raises `GatewayFailed`."""
        ...


class PortMapper:
    """Maintains the mapping of one node. `reason` says why there is none (empty: there is one, or none was tried
    yet)."""

    def __init__(
        self,
        local: LocalNode,
        gateway: Gateway,
        environment: Environment,
    ) -> None:
        self.address: Address | None = None
        self.reason = ""
        self._local = local
        self._gateway = gateway
        self._rng = environment.entropy.random
        self._log = environment.log

    async def run(self) -> None:
        """Open and renew the mapping until cancelled."""
        retry_s = MIN_RETRY_DELAY_S
        while True:
            try:
                mapped = await self._gateway.open(self._local.bound, LEASE_S)
                self._check(mapped.address)
            except GatewayFailed as error:
                self._failed(str(error))
                await asyncio.sleep(retry_s * (0.75 + 0.5 * self._rng.random()))
                retry_s = min(2 * retry_s, MAX_RETRY_DELAY_S)
                continue
            self._opened(mapped.address)
            retry_s = MIN_RETRY_DELAY_S
            await asyncio.sleep(max(MIN_RENEWAL_S, RENEW_SHARE * (mapped.lease_s or LEASE_S)))

    async def remove(self) -> None:
        """Remove the mapping. If the router does not answer, the lease ends by itself."""
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                await self._gateway.close()
        except (GatewayFailed, TimeoutError) as error:
            self._log.warning("port_mapping_not_removed", reason=str(error) or "the router does not answer")
        else:
            if self.address is not None:
                self._log.info("port_mapping_removed", address=str(self.address))
        self.address = None

    def _check(self, address: Address) -> None:
        """Refuse an outside address that is not public: that router is behind another NAT."""
        host = ipaddress.ip_address(address.host)
        if not host.is_global:
            raise GatewayFailed(f"the router's outside address {host} is not a public one: it is behind another NAT")

    def _opened(self, address: Address) -> None:
        self.reason = ""
        if address != self.address:
            self._log.info("port_mapped", address=str(address))
            self.address = address
            self._local.mapped_to(address)

    def _failed(self, reason: str) -> None:
        if self.address is not None:
            self._log.warning("port_mapping_lost", address=str(self.address), reason=reason)
            self.address = None
            self._local.mapped_to(None)
        elif reason != self.reason:
            self._log.warning("port_not_mapped", reason=reason)
        self.reason = reason
