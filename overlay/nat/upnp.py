"""Maps ports by UPnP, through the package `async-upnp-client` (extra `nat`, imported on first use).

Any machine in the local network can answer the search, so responses are untrusted. They are limited in bytes, requests
and time, and are fetched only from the address that answered. Every error is a `GatewayFailed`. NAT-PMP is not
implemented, because no package for it is maintained.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.nat.port_mapping import GatewayFailed, Mapped

if TYPE_CHECKING:
    from collections.abc import Callable

    from async_upnp_client.client import UpnpService

PACKAGE = "async_upnp_client"
DEVICES = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{version}" for version in (1, 2))
SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
SSDP = ("239.255.255.250", 1900)
#: Longest wait for answers to a search.
SEARCH_TIMEOUT_S = 3.0
#: Longest wait for one response of a router, and for a whole attempt.
REQUEST_TIMEOUT_S, TOTAL_TIMEOUT_S = 5.0, 20.0
#: A router's descriptions have some 30 KB in about ten files.
MAX_RESPONSE_BYTES, MAX_REQUESTS = 262144, 64
#: Most devices of one search that are tried.
MAX_DEVICES = 4
#: Other outside ports tried where the node's own is in use.
MAX_PORT_ATTEMPTS = 4
DESCRIPTION = "p2pnode"
#: Error codes of UPnP (WANIPConnection:1 section 2.4.16).
NO_SUCH_ENTRY, CONFLICT, PERMANENT_ONLY = 714, 718, 725


def is_installed() -> bool:
    """Whether the package is installed; it is not imported."""
    return find_spec(PACKAGE) is not None


class UpnpGateway:
    """Implements `overlay.nat.port_mapping.Gateway`.

    `draw_port` gives another outside port to try; `search_at` is the address that the search is sent to.
    """

    def __init__(
        self,
        draw_port: Callable[[], int],
        *,
        search_at: tuple[str, int] = SSDP,
        search_s: float = SEARCH_TIMEOUT_S,
        source: str = "",
    ) -> None:
        self._draw_port = draw_port
        self._search_at = search_at
        self._search_s = search_s
        self._source = source
        self._service: UpnpService | None = None
        self._router = ""
        self._port = 0
        self._made: list[str] = []

    async def open(self, internal: Address, lease_s: float) -> Mapped:
        """See `Gateway.open`."""
        try:
            async with asyncio.timeout(TOTAL_TIMEOUT_S):
                if self._service is not None:
                    try:
                        return await self._map(internal, lease_s)
                    except GatewayFailed:
                        self._service = None  # restarted or replaced: search again
                return await self._find_and_map(internal, lease_s)
        except TimeoutError:
            raise GatewayFailed(f"the router did not map the port within {TOTAL_TIMEOUT_S:g} s") from None

    async def close(self) -> None:
        """See `Gateway.close`."""
        service, made = self._service, self._made
        self._service, self._made = None, []
        if service is None:
            return
        for protocol in made:
            await self._delete(service, self._port, protocol)

    # -- search --------------------------------------------------------------------------------------------------

    async def _find_and_map(self, internal: Address, lease_s: float) -> Mapped:
        locations = await self._search()
        if not locations:
            raise GatewayFailed("no router in the local network answers to UPnP")
        failures = []
        for location in locations[:MAX_DEVICES]:
            try:
                self._service = await _connection(location)
                self._router = urlsplit(location).hostname or ""
                return await self._map(internal, lease_s)
            except GatewayFailed as error:
                self._service = None
                failures.append(f"{urlsplit(location).netloc} {error}")
        raise GatewayFailed("; ".join(failures))

    async def _search(self) -> list[str]:
        """The description URLs of the routers that answered, each on the host that sent the answer."""
        from async_upnp_client.search import SsdpSearchListener

        found: dict[str, None] = {}

        def on_response(headers: Any) -> None:
            location, host = str(headers.get("location", "")), str(headers.get("_host", ""))
            try:
                parts = urlsplit(location)
                if parts.scheme == "http" and parts.port and parts.hostname == host and len(location) < 512:
                    found.setdefault(location)
            except ValueError:
                pass

        source = None if not self._source else (self._source, 0)
        listener = SsdpSearchListener(
            callback=on_response, source=source, target=self._search_at, timeout=max(1, int(self._search_s))
        )
        try:
            await listener.async_start()
            await asyncio.sleep(0)  # the endpoint gets its socket in the next iteration of the loop
            for device in DEVICES:
                listener.search_target = device
                listener.async_search()
            waited_s = 0.0
            while waited_s < self._search_s and not found:
                await asyncio.sleep(0.1)
                waited_s += 0.1
            await asyncio.sleep(0.1)
        except OSError as error:
            raise GatewayFailed(f"the search for a router could not be sent: {error}") from error
        finally:
            listener.async_stop()
        return list(found)

    # -- mapping -------------------------------------------------------------------------------------------------

    async def _map(self, internal: Address, lease_s: float) -> Mapped:
        service = self._service
        assert service is not None
        answer = await self._call(service, "GetExternalIPAddress")
        try:
            outside = ipaddress.IPv4Address(str(answer.get("NewExternalIPAddress", "")))
        except ValueError:
            raise GatewayFailed("has no outside address") from None
        client = _own_host(internal.host, self._router)
        # A renewal keeps the port. The first attempt asks for the node's own port, then for others.
        ports = [self._port] if self._made else [internal.port, *(self._draw_port() for _ in range(MAX_PORT_ATTEMPTS))]
        for port in ports:
            granted_s = await self._map_port(service, port, Address(client, internal.port), lease_s)
            if granted_s is not None:
                return Mapped(Address(str(outside), port), granted_s)
        raise GatewayFailed(f"has port {internal.port} and {MAX_PORT_ATTEMPTS} others in use for other machines")

    async def _map_port(self, service: UpnpService, port: int, to: Address, lease_s: float) -> float | None:
        """The lease granted for both protocols; None where another machine has the port."""
        made_before = list(self._made)
        for protocol in ("UDP", "TCP"):
            try:
                lease_s = await self._add(service, port, protocol, to, lease_s)
            except _Refused as error:
                for half in self._made if not made_before else ():  # one protocol alone is useless
                    await self._delete(service, port, half)
                if not made_before:
                    self._made = []
                    if error.code == CONFLICT:
                        return None
                raise GatewayFailed(str(error)) from None
            self._port = port
            if protocol not in self._made:
                self._made.append(protocol)
        return lease_s

    async def _delete(self, service: UpnpService, port: int, protocol: str) -> None:
        try:
            await self._call(service, "DeletePortMapping", NewExternalPort=port, NewProtocol=protocol)
        except _Refused as error:
            if error.code != NO_SUCH_ENTRY:
                raise

    async def _add(self, service: UpnpService, port: int, protocol: str, to: Address, lease_s: float) -> float:
        asked = {
            "NewExternalPort": port,
            "NewProtocol": protocol,
            "NewInternalPort": to.port,
            "NewInternalClient": to.host,
            "NewEnabled": True,
            "NewPortMappingDescription": DESCRIPTION,
        }
        try:
            await self._call(service, "AddPortMapping", **asked, NewLeaseDuration=int(lease_s))
        except _Refused as error:
            if error.code != PERMANENT_ONLY:
                raise
            await self._call(service, "AddPortMapping", **asked, NewLeaseDuration=0)
            return 0.0
        return lease_s

    async def _call(self, service: UpnpService, action: str, **arguments: Any) -> dict[str, Any]:
        from async_upnp_client.exceptions import UpnpActionError

        # An empty host means any; the package's own profile requires one.
        if action != "GetExternalIPAddress":
            arguments["NewRemoteHost"] = ""
        try:
            if not service.has_action(action):
                raise GatewayFailed(f"does not know {action}")
            return dict(await service.action(action).async_call(**arguments))
        except UpnpActionError as error:
            raise _Refused(action, error.error_code, error.error_desc) from None
        except (GatewayFailed, TimeoutError):
            raise
        except Exception as error:  # untrusted XML, through a package that does not validate it
            raise GatewayFailed(f"gave an invalid response to {action} ({type(error).__name__})") from None


class _Refused(GatewayFailed):
    """The router answered with a UPnP error."""

    def __init__(self, action: str, code: int | None, text: str | None) -> None:
        super().__init__(f"refused {action}: {code} {(text or '')[:80]!r}")
        self.code = code


async def _connection(location: str) -> UpnpService:
    """The service of a router that maps ports. Raises `GatewayFailed`."""
    from async_upnp_client.client_factory import UpnpFactory

    try:
        device = await UpnpFactory(_requester(urlsplit(location).hostname or "")).async_create_device(location)
        for kind in SERVICES:
            service = device.find_service(kind)
            if service is not None and service.has_action("AddPortMapping"):
                return service
    except (GatewayFailed, TimeoutError):
        raise
    except Exception as error:  # untrusted XML, through a package that does not validate it
        raise GatewayFailed(f"has an invalid description ({type(error).__name__})") from None
    raise GatewayFailed("is not a router that maps ports")


def _requester(host: str) -> Any:
    """HTTP for the package: only to this host, bounded in bytes and in number."""
    import aiohttp  # its import takes a tenth of a second, which the start must not wait for
    from async_upnp_client.client import UpnpRequester
    from async_upnp_client.const import HttpRequest, HttpResponse

    class Requester(UpnpRequester):
        made = 0

        async def async_http_request(self, http_request: HttpRequest) -> HttpResponse:
            if http_request.method == "GET":  # descriptions; this module bounds the actions
                self.made += 1
            if urlsplit(http_request.url).hostname != host or self.made > MAX_REQUESTS:
                raise GatewayFailed("refers to another host, or to too many files")
            timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
            try:
                async with (
                    aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
                    session.request(
                        http_request.method,
                        http_request.url,
                        headers=dict(http_request.headers),
                        data=http_request.body,
                        allow_redirects=False,
                    ) as answer,
                ):
                    body = bytearray()
                    async for chunk in answer.content.iter_chunked(16384):
                        body += chunk
                        if len(body) > MAX_RESPONSE_BYTES:
                            raise GatewayFailed(f"sends more than {MAX_RESPONSE_BYTES} bytes")
            except (aiohttp.ClientError, OSError) as error:
                raise GatewayFailed(f"does not answer: {str(error) or type(error).__name__}") from None
            return HttpResponse(answer.status, dict(answer.headers), body.decode("utf-8", "replace"))

    return Requester()


def _own_host(host: str, router: str) -> str:
    """The address for the router to forward to: the bound one or, if bound to every interface, that of the route to
    it."""
    own = ipaddress.ip_address(host)
    if own.version == 6 and not own.is_unspecified:
        raise GatewayFailed("forwards to IPv4 only, and this node listens on an IPv6 address")
    if not own.is_unspecified:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((router, 9))  # sends nothing
        except OSError as error:
            raise GatewayFailed(f"cannot be routed to: {error}") from None
        return str(probe.getsockname()[0])
