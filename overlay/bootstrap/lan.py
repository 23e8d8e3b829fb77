"""Discovery in the local network (`swarm.discover = "lan"`): the nodes announced, and whether to found or join.

A node announces its run, its id, where it listens, and whether it is in a swarm; never a key. Announcements of others
are unauthenticated: they only give addresses to dial, and `hello` verifies the node there as any other. Of nodes that
start together, the one with the lowest id founds and the others wait for it. Multicast DNS is that of the package
`zeroconf` (extra `lan`, imported on first use).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Log
from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.kademlia.messages import PROTOCOL_VERSION
from p2pnode.overlay.local_node import LocalChange, LocalNode

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

PACKAGE = "zeroconf"
SERVICE = "_p2pnode._udp.local."
#: Multicast DNS answers within a second; a sleeping network takes longer.
SEARCH_S = 3.0
POLL_INTERVAL_S = 0.1
#: Longest wait to join through the node that should found.
LAN_JOIN_TIMEOUT_S = 15.0
#: Further announcements are ignored.
MAX_DISCOVERED = 64
#: Most addresses used of one announcement.
MAX_ADDRESSES = 4
#: Longest wait for the details of one announcement.
DETAILS_MS = 2000
#: Announcements whose details are queried at the same time.
MAX_CONCURRENT_QUERIES = 16
#: Longest wait for the withdrawal of the announcement.
STOP_TIMEOUT_S = 1.0

#: Joins through bootstraps and known addresses, with the genesis of the swarm if it is known.
Join = Callable[[Sequence[str], bytes | None], Awaitable[None]]
#: Called with name, properties, hosts and port of an announcement.
OnAnnouncement = Callable[[str, Mapping[str, str], Iterable[str], int], None]


def is_installed() -> bool:
    """Whether the package is installed; it is not imported."""
    return find_spec(PACKAGE) is not None


class Announcement(NamedTuple):
    """What a node announces of itself."""

    run: str
    node_id: bytes
    port: int
    joined: bool

    def properties(self) -> dict[str, str]:
        """The text record of the service (RFC 6763 section 6)."""
        return {
            "v": str(PROTOCOL_VERSION),
            "run": self.run,
            "id": self.node_id.hex(),
            "in": "1" if self.joined else "0",
        }


class DiscoveredNode(NamedTuple):
    """A node that was announced."""

    node_id: bytes
    joined: bool
    addresses: tuple[Address, ...]


def read(properties: Mapping[str, str], hosts: Iterable[str], port: int, own: Announcement) -> DiscoveredNode | None:
    """The node that an announcement describes; None if it is malformed, of another run or version, or of this node."""
    if properties.get("v") != str(PROTOCOL_VERSION) or properties.get("run") != own.run:
        return None
    try:
        node_id = bytes.fromhex(properties.get("id", ""))
    except ValueError:
        return None
    if len(node_id) != ID_BYTES or node_id == own.node_id:
        return None
    addresses = []
    for host in hosts:
        try:
            address = Address.checked(host, port)
        except ValueError:
            continue
        found = ipaddress.ip_address(address.host)
        # Only local addresses count: a forged announcement must not make this node dial other networks.
        if (found.is_private or found.is_link_local) and not found.is_unspecified and not found.is_multicast:
            addresses.append(address)
    if not addresses:
        return None
    return DiscoveredNode(node_id, properties.get("in") == "1", tuple(addresses[:MAX_ADDRESSES]))


class LanDiscovery:
    """What one node announces in its local network, and the nodes that were announced there."""

    def __init__(self, local: LocalNode, lan: ZeroconfLan | None, log: Log) -> None:
        """`lan`: None, to announce nothing and find no node."""
        self.own = Announcement(local.run, local.node_id, local.address.port, joined=False)
        self._local = local
        self._lan = lan
        self._log = log
        #: By the name of the announcement.
        self._discovered: dict[str, DiscoveredNode] = {}
        self._entered = asyncio.Event()
        local.on_change(self._on_change)

    def _on_change(self, change: LocalChange) -> None:
        if change == "swarm":
            self._entered.set()

    @property
    def is_there(self) -> bool:
        """Whether this node announces itself."""
        return self._lan is not None

    async def start(self) -> None:
        """Announce this node. A network without multicast is logged and otherwise ignored."""
        if self._lan is None:
            return
        bound = self._local.bound
        self.own = self.own._replace(port=bound.port)
        try:
            await self._lan.start(self.own, bound.host, self.on_announcement)
        except OSError as error:
            self._log.warning("lan_discovery_failed", reason=str(error))
            self._lan = None

    async def announce_when_joined(self) -> None:
        """Wait until this node has joined a swarm, then announce that."""
        if self._lan is not None:
            await self._entered.wait()
            self.own = self.own._replace(joined=True)
            await self._lan.announce(self.own)

    async def stop(self) -> None:
        """Withdraw the announcement."""
        if self._lan is not None:
            await self._lan.stop()

    # -- the nodes announced -------------------------------------------------------------------------------------

    def on_announcement(self, name: str, properties: Mapping[str, str], hosts: Iterable[str], port: int) -> None:
        """Take in a new or changed announcement, and ignore a malformed one."""
        node = read(properties, hosts, port, self.own)
        if node is not None and (len(self._discovered) < MAX_DISCOVERED or name in self._discovered):
            self._discovered[name] = node

    def addresses(self) -> list[Address]:
        """The announced addresses."""
        addresses = (address for node in self._discovered.values() for address in node.addresses)
        return list(dict.fromkeys(addresses))

    def _drop_lowest(self) -> None:
        """Remove the node that should have founded but did not; the one with the next id takes its place."""
        waiting = [(node.node_id, name) for name, node in self._discovered.items() if not node.joined]
        if waiting:
            del self._discovered[min(waiting)[1]]

    def is_any_joined(self) -> bool:
        """Whether any announced node is in a swarm."""
        return any(node.joined for node in self._discovered.values())

    def should_found(self) -> bool:
        """Whether this node founds: no announced node is in a swarm or has a lower id."""
        lowest = min((node.node_id for node in self._discovered.values()), default=self.own.node_id)
        return not self.is_any_joined() and self.own.node_id <= lowest

    async def has_local_peer(self) -> bool:
        """Whether there is, or soon will be, a node to join; takes `SEARCH_S` while none is in a swarm."""
        if self._lan is None:
            return False
        for _ in range(round(SEARCH_S / POLL_INTERVAL_S)):
            if self.is_any_joined():
                return True
            await asyncio.sleep(POLL_INTERVAL_S)
        return not self.should_found()

    async def join(self, join: Join, failures: Mapping[str, str]) -> bool:
        """Join through an announced node; False if this node should found the swarm. Retries until cancelled while a
        node that does not answer announces that it is in a swarm."""
        while await self.has_local_peer():
            try:
                async with asyncio.timeout(LAN_JOIN_TIMEOUT_S):
                    await join([], self._local.genesis)
                    return True
            except TimeoutError:
                self._log.warning("neighbours_do_not_answer", attempts=dict(failures))
                self._drop_lowest()
        return False


class ZeroconfLan:
    """Sends and receives the announcements of the local network."""

    def __init__(self) -> None:
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._info: AsyncServiceInfo | None = None
        self._hosts: list[str] = []
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._on_announcement: OnAnnouncement | None = None

    async def start(self, own: Announcement, host: str, on_announcement: OnAnnouncement) -> None:
        """Announce this node, and call `on_announcement` for others. Raises `OSError`."""
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
        """Change what is announced."""
        if self._zeroconf is not None and self._info is not None:
            name = self._info.name
            self._info = self._service(own)
            self._info.name = name
            await self._zeroconf.async_update_service(self._info)

    async def stop(self) -> None:
        """Withdraw the announcement, and stop listening."""
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
