"""A router on the loopback with SSDP and UPnP IGD, which follows the protocol or breaks it as a test asks."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import web

SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
DEVICE = "urn:schemas-upnp-org:device:{}:1"


def _action(name: str, inside: tuple[str, ...] = (), outside: tuple[str, ...] = ()) -> str:
    def argument(each: str, direction: str) -> str:
        related = each.removeprefix("New")
        return (
            f"<argument><name>{each}</name><direction>{direction}</direction>"
            f"<relatedStateVariable>{related}</relatedStateVariable></argument>"
        )

    arguments = "".join(argument(each, "in") for each in inside) + "".join(argument(each, "out") for each in outside)
    return f"<action><name>{name}</name><argumentList>{arguments}</argumentList></action>"


MAPPED = ("NewRemoteHost", "NewExternalPort", "NewProtocol")
ADDED = (
    *MAPPED,
    "NewInternalPort",
    "NewInternalClient",
    "NewEnabled",
    "NewPortMappingDescription",
    "NewLeaseDuration",
)
TYPES = {
    "RemoteHost": "string",
    "ExternalPort": "ui2",
    "Protocol": "string",
    "InternalPort": "ui2",
    "InternalClient": "string",
    "Enabled": "boolean",
    "PortMappingDescription": "string",
    "LeaseDuration": "ui4",
    "ExternalIPAddress": "string",
}
SCPD = (
    '<?xml version="1.0"?><scpd xmlns="urn:schemas-upnp-org:service-1-0"><specVersion><major>1</major><minor>0</minor>'
    "</specVersion><actionList>"
    + _action("AddPortMapping", ADDED)
    + _action("DeletePortMapping", MAPPED)
    + _action("GetExternalIPAddress", (), ("NewExternalIPAddress",))
    + "</actionList><serviceStateTable>"
    + "".join(
        f'<stateVariable sendEvents="no"><name>{name}</name><dataType>{kind}</dataType></stateVariable>'
        for name, kind in TYPES.items()
    )
    + "</serviceStateTable></scpd>"
)


def _device(kind: str, content: str) -> str:
    return (
        f"<device><deviceType>{DEVICE.format(kind)}</deviceType><friendlyName>fake</friendlyName>"
        f"<manufacturer>tests</manufacturer><modelName>fake</modelName><UDN>uuid:{kind}</UDN>{content}</device>"
    )


DESCRIPTION = (
    '<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><specVersion><major>1</major><minor>0</minor>'
    "</specVersion>"
    + _device(
        "InternetGatewayDevice",
        "<deviceList>"
        + _device(
            "WANDevice",
            "<deviceList>"
            + _device(
                "WANConnectionDevice",
                f"<serviceList><service><serviceType>{SERVICE}</serviceType><serviceId>urn:upnp-org:serviceId:WANIPConn1"
                "</serviceId><SCPDURL>/scpd.xml</SCPDURL><controlURL>/control</controlURL><eventSubURL>/event"
                "</eventSubURL></service></serviceList>",
            )
            + "</deviceList>",
        )
        + "</deviceList>",
    )
    + "</root>"
)


class FakeGateway:
    """`mappings`: (outside port, protocol) → (inside host, inside port, lease). Change its attributes to spoil it."""

    def __init__(self, outside: str = "93.184.216.34") -> None:
        self.outside = outside
        self.mappings: dict[tuple[int, str], tuple[str, int, int]] = {}
        self.taken: set[tuple[int, str]] = set()
        self.permanent_only = False
        #: UPnP error code for every AddPortMapping; 0: none.
        self.refuse = 0
        #: Answers every search with this in the place of the true location, "" for the true one.
        self.location = ""
        #: Answers by path in the place of the true ones.
        self.pages: dict[str, web.Response] = {}
        self.searches = 0
        self.asked: list[str] = []
        self._runner: web.AppRunner | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self.search_at = ("127.0.0.1", 0)
        self.http = ("127.0.0.1", 0)

    async def __aenter__(self) -> FakeGateway:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.http = self._runner.addresses[0]
        loop = asyncio.get_running_loop()
        gateway = self

        class Ssdp(asyncio.DatagramProtocol):
            def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
                gateway.heard(data, addr)

        self._transport, _ = await loop.create_datagram_endpoint(Ssdp, local_addr=("127.0.0.1", 0))
        self.search_at = self._transport.get_extra_info("sockname")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        assert self._transport is not None
        self._transport.close()
        await self._runner.cleanup()

    def heard(self, data: bytes, source: tuple[str, int]) -> None:
        if not data.startswith(b"M-SEARCH"):
            return
        self.searches += 1
        wanted = re.search(rb"(?im)^ST: *(.*?)\r$", data)
        assert wanted is not None
        location = self.location or f"http://{self.http[0]}:{self.http[1]}/description.xml"
        kind = wanted.group(1).decode()
        answer = f"HTTP/1.1 200 OK\r\nST: {kind}\r\nUSN: uuid:x::{kind}\r\nLOCATION: {location}\r\nEXT:\r\n\r\n"
        assert self._transport is not None
        self._transport.sendto(b"\xff\x00 junk \r\n", source)
        self._transport.sendto(answer.encode(), source)

    async def _serve(self, request: web.Request) -> web.Response:
        if request.path in self.pages:
            return self.pages[request.path]
        if request.path == "/description.xml":
            return web.Response(text=DESCRIPTION, content_type="text/xml")
        if request.path == "/scpd.xml":
            return web.Response(text=SCPD, content_type="text/xml")
        if request.path != "/control":
            return web.Response(status=404)
        action = request.headers["SOAPAction"].strip('"').rpartition("#")[2]
        self.asked.append(action)
        text = await request.text()
        given = dict(re.findall(r"<(New\w+)>([^<]*)</New", text))
        return self._answer(action, given)

    def _answer(self, action: str, given: dict[str, str]) -> web.Response:
        if action == "GetExternalIPAddress":
            return _soap(action, f"<NewExternalIPAddress>{self.outside}</NewExternalIPAddress>")
        key = (int(given["NewExternalPort"]), given["NewProtocol"])
        assert given.get("NewRemoteHost", "") == ""
        if action == "DeletePortMapping":
            return _soap(action) if self.mappings.pop(key, None) else _fault(714, "NoSuchEntryInArray")
        lease = int(given["NewLeaseDuration"])
        if self.refuse:
            return _fault(self.refuse, "ActionNotAuthorized")
        if key in self.taken:
            return _fault(718, "ConflictInMappingEntry")
        if lease and self.permanent_only:
            return _fault(725, "OnlyPermanentLeasesSupported")
        self.mappings[key] = (given["NewInternalClient"], int(given["NewInternalPort"]), lease)
        return _soap(action)


def _envelope(content: str) -> str:
    return (
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" '
        f's:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{content}</s:Body></s:Envelope>'
    )


def _soap(action: str, content: str = "") -> web.Response:
    body = f'<u:{action}Response xmlns:u="{SERVICE}">{content}</u:{action}Response>'
    return web.Response(text=_envelope(body), content_type="text/xml")


def _fault(code: int, text: str) -> web.Response:
    body = (
        "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
        f'<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{code}</errorCode>'
        f"<errorDescription>{text}</errorDescription></UPnPError></detail></s:Fault>"
    )
    return web.Response(status=500, text=_envelope(body), content_type="text/xml")


def junk_pages() -> list[Any]:
    """(name, pages) of routers that answer nonsense."""
    bomb = (
        '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
        "<root>&b;</root>"
    )
    elsewhere = DESCRIPTION.replace("/control", "http://127.0.0.2:1/control")
    many = DESCRIPTION.replace("</serviceList>", _services(100) + "</serviceList>")
    return [
        ("not XML", {"/description.xml": lambda: web.Response(body=b"\x00\xff\xfe<<<")}),
        ("nothing", {"/description.xml": lambda: web.Response(text="")}),
        ("another device", {"/description.xml": lambda: web.Response(text=DESCRIPTION.replace("WANIPConn", "Radio"))}),
        ("an entity bomb", {"/description.xml": lambda: web.Response(text=bomb)}),
        ("endless", {"/description.xml": lambda: web.Response(text="<root>" + "x" * 1_000_000)}),
        ("not found", {"/description.xml": lambda: web.Response(status=404)}),
        (
            "elsewhere",
            {"/description.xml": lambda: web.Response(status=302, headers={"Location": "http://127.0.0.2:1/"})},
        ),
        ("a control elsewhere", {"/description.xml": lambda: web.Response(text=elsewhere, content_type="text/xml")}),
        ("many files", {"/description.xml": lambda: web.Response(text=many, content_type="text/xml")}),
        ("no service text", {"/scpd.xml": lambda: web.Response(text="<scpd/>")}),
        ("an answer of nothing", {"/control": lambda: web.Response(text="")}),
        ("an answer of junk", {"/control": lambda: web.Response(text="<a><b></a>")}),
        ("an answer of another action", {"/control": lambda: _soap("Reboot")}),
        ("a plain 500", {"/control": lambda: web.Response(status=500, text="no")}),
    ]


def _services(count: int) -> str:
    return "".join(
        f"<service><serviceType>urn:x:service:S{number}:1</serviceType><serviceId>urn:x:serviceId:S{number}</serviceId>"
        f"<SCPDURL>/scpd.xml?{number}</SCPDURL><controlURL>/control</controlURL><eventSubURL>/e</eventSubURL></service>"
        for number in range(count)
    )
