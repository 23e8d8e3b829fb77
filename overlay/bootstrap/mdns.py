"""Announces this node by multicast DNS, through the package `zeroconf` (extra `lan`, imported on first use).

Announcements of others are passed on as text; `overlay.bootstrap.local_network` decides what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from p2pnode.overlay.bootstrap.local_network import MAX_DISCOVERED, SERVICE, Announcement

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

PACKAGE = "zeroconf"
#: Longest wait for the details of one announcement.
DETAILS_MS = 2000
#: Announcements whose details are queried at the same time.
MAX_CONCURRENT_QUERIES = 16
#: Longest wait for the withdrawal of the announcement.
STOP_TIMEOUT_S = 1.0

OnAnnouncement = Callable[[str, Mapping[str, str], Iterable[str], int], None]


def is_installed() -> bool:
    """Whether the package is installed; it is not imported."""
    return find_spec(PACKAGE) is not None


class ZeroconfLan:
    """Implements `overlay.bootstrap.local_network.Lan`."""

    def __init__(self) -> None:
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: AsyncServiceInfo | None = None
        self._hosts: list[str] = []
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._on_announcement: OnAnnouncement | None = None

    async def start(self, own: Announcement, host: str, on_announcement: OnAnnouncement) -> None:
        """See `Lan.start`."""
        from zeroconf import InterfaceChoice, IPVersion
        from zeroconf.asyncio import AsyncServiceBrowser, AsyncZeroconf

        self._on_announcement = on_announcement
        bound = ipaddress.ip_address(host)
        if bound.is_unspecified:
            self._hosts = _own_hosts(with_ipv6=bound.version == 6)
            self._zeroconf = AsyncZeroconf(interfaces=InterfaceChoice.Default, ip_version=IPVersion.V4Only)
        else:
            self._hosts = [host]
            version = IPVersion.V4Only if bound.version == 4 else IPVersion.V6Only
            self._zeroconf = AsyncZeroconf(interfaces=[host], ip_version=version)
        self._info = self._service(own)
        # The name contains the node id. A second node of that name has the same identity, which the overlay detects.
        await self._zeroconf.async_register_service(self._info, allow_name_change=True)
        self._browser = AsyncServiceBrowser(self._zeroconf.zeroconf, [SERVICE], handlers=[self._changed])

    async def announce(self, own: Announcement) -> None:
        """See `Lan.announce`."""
        if self._zeroconf is not None and self._info is not None:
            name = self._info.name
            self._info = self._service(own)
            self._info.name = name
            await self._zeroconf.async_update_service(self._info)

    async def stop(self) -> None:
        """See `Lan.stop`."""
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        self._asking.clear()
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                if self._browser is not None:
                    await self._browser.async_cancel()
                await zeroconf.async_unregister_all_services()
        await zeroconf.async_close()

    def _service(self, own: Announcement) -> AsyncServiceInfo:
        from zeroconf.asyncio import AsyncServiceInfo

        name = own.node_id.hex()[:16]
        return AsyncServiceInfo(
            SERVICE,
            f"{name}.{SERVICE}",
            port=own.port,
            properties=own.properties(),
            server=f"p2pnode-{name}.local.",
            parsed_addresses=self._hosts,
        )

    def _changed(self, zeroconf: Any, service_type: str, name: str, state_change: Any) -> None:
        """Query the details of a new or changed announcement. Dialling finds out which nodes are gone."""
        from zeroconf import ServiceStateChange

        if state_change is ServiceStateChange.Removed or len(name) > 255:
            return
        if name in self._asking or len(self._asking) >= min(MAX_CONCURRENT_QUERIES, MAX_DISCOVERED):
            return
        task = asyncio.get_running_loop().create_task(self._ask(zeroconf, service_type, name), name=f"lan {name[:32]}")
        self._asking[name] = task
        task.add_done_callback(lambda _: self._asking.pop(name, None))

    async def _ask(self, zeroconf: Any, service_type: str, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        try:
            info = AsyncServiceInfo(service_type, name)
            if not await info.async_request(zeroconf, DETAILS_MS):
                return
            properties = {str(key): str(value) for key, value in info.decoded_properties.items() if value is not None}
            hosts, port = info.parsed_addresses(), info.port or 0
        except Exception:  # an unauthenticated packet, through a package that does not validate it
            properties, hosts, port = {}, [], 0
        if self._on_announcement is not None:
            self._on_announcement(name, properties, hosts, port)


def _own_hosts(*, with_ipv6: bool) -> list[str]:
    """Addresses of this machine that other machines of the local network can dial."""
    import ifaddr

    found = []
    for adapter in ifaddr.get_adapters():
        for each in adapter.ips:
            host = each.ip if isinstance(each.ip, str) else each.ip[0]
            if not ipaddress.ip_address(host).is_loopback and (each.is_IPv4 or with_ipv6):
                found.append(host)
    return found
