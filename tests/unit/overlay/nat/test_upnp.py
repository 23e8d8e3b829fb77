"""UPnP without a router: which ports are asked for, what is undone, and what each refusal means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.nat import upnp
from p2pnode.overlay.nat.port_mapping import GatewayFailed, Mapped
from p2pnode.overlay.nat.upnp import (
    CONFLICT,
    MAX_DEVICES,
    MAX_PORT_ATTEMPTS,
    NO_SUCH_ENTRY,
    PERMANENT_ONLY,
    UpnpGateway,
)
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

exceptions = pytest.importorskip("async_upnp_client.exceptions")

INSIDE = Address("192.168.1.7", 8468)
OUTSIDE = "8.8.8.8"
LEASE_S = 3600.0


class Router:
    """A service that maps ports. `refuse` gives the error code for an action and its arguments, or None."""

    def __init__(self, refuse: Callable[[str, dict[str, Any]], int | None] = lambda _action, _given: None) -> None:
        self.refuse = refuse
        self.outside = OUTSIDE
        self.missing: tuple[str, ...] = ()
        self.mapped: dict[tuple[int, str], dict[str, Any]] = {}
        self.added: list[tuple[int, str, int]] = []

    def has_action(self, action: str) -> bool:
        return action not in self.missing

    def action(self, name: str) -> Any:
        router = self

        class Action:
            async def async_call(self, **given: Any) -> dict[str, Any]:
                return router.call(name, given)

        return Action()

    def call(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        if (code := self.refuse(name, given)) is not None:
            raise exceptions.UpnpActionError(error_code=code, error_desc="no")
        if name == "GetExternalIPAddress":
            return {"NewExternalIPAddress": self.outside}
        assert given["NewRemoteHost"] == ""
        key = (given["NewExternalPort"], given["NewProtocol"])
        if name == "AddPortMapping":
            self.mapped[key] = given
            self.added.append((*key, given["NewLeaseDuration"]))
        else:
            del self.mapped[key]
        return {}


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Callable[..., UpnpGateway]:
    """A gateway that finds these routers, in this order; their descriptions are at 192.168.1.1, 192.168.1.2, …"""

    def made(*routers: Router | GatewayFailed, ports: Iterable[int] = range(60000, 60099)) -> UpnpGateway:
        by_location = {f"http://192.168.1.{n}:5000/d.xml": router for n, router in enumerate(routers, 1)}

        async def connection(location: str) -> Any:
            found = by_location[location]
            if isinstance(found, GatewayFailed):
                raise found
            return found

        async def search(_self: UpnpGateway) -> list[str]:
            return list(by_location)

        monkeypatch.setattr(upnp, "_connection", connection)
        monkeypatch.setattr(UpnpGateway, "_search", search)
        left = iter(ports)
        return UpnpGateway(lambda: next(left))

    return made


@run_by(run)
async def test_both_protocols_are_mapped_and_a_renewal_keeps_the_port(gateway: Callable[..., UpnpGateway]) -> None:
    """Closing removes both; one that the router has lost already is no error."""
    router = Router()
    opened = gateway(router)
    assert await opened.open(INSIDE, LEASE_S) == Mapped(Address(OUTSIDE, 8468), LEASE_S)
    assert set(router.mapped) == {(8468, "UDP"), (8468, "TCP")}
    assert {given["NewInternalClient"] for given in router.mapped.values()} == {"192.168.1.7"}
    assert await opened.open(INSIDE, LEASE_S) == Mapped(Address(OUTSIDE, 8468), LEASE_S)
    assert [port for port, _, _ in router.added] == [8468] * 4

    router.refuse = lambda action, given: (
        NO_SUCH_ENTRY if action == "DeletePortMapping" and given["NewProtocol"] == "UDP" else None
    )
    await opened.close()
    assert set(router.mapped) == {(8468, "UDP")}
    await opened.close()


@run_by(run)
async def test_a_port_in_use_is_replaced_by_others(gateway: Callable[..., UpnpGateway]) -> None:
    """Half a mapping is removed again; after a few ports the router counts as failed."""
    router = Router(
        lambda action, given: (
            CONFLICT
            if action == "AddPortMapping" and given["NewExternalPort"] != 40001 and given["NewProtocol"] == "TCP"
            else None
        )
    )
    opened = gateway(router, ports=[40000, 40001, 40002, 40003])
    assert (await opened.open(INSIDE, LEASE_S)).address == Address(OUTSIDE, 40001)
    assert set(router.mapped) == {(40001, "UDP"), (40001, "TCP")}
    router.added.clear()
    assert (await opened.open(INSIDE, LEASE_S)).address == Address(OUTSIDE, 40001)
    assert {port for port, _, _ in router.added} == {40001}

    full = Router(lambda action, _given: CONFLICT if action == "AddPortMapping" else None)
    with pytest.raises(GatewayFailed, match=f"has port 8468 and {MAX_PORT_ATTEMPTS} others in use"):
        await gateway(full, ports=range(50000, 50009)).open(INSIDE, LEASE_S)


@run_by(run)
async def test_a_router_with_permanent_mappings_only_is_asked_for_one(gateway: Callable[..., UpnpGateway]) -> None:
    """The lease is then 0: until it is removed."""
    router = Router(
        lambda action, given: PERMANENT_ONLY if action == "AddPortMapping" and given["NewLeaseDuration"] else None
    )
    assert (await gateway(router).open(INSIDE, LEASE_S)).lease_s == 0.0
    assert {lease for _, _, lease in router.added} == {0}


@run_by(run)
async def test_the_next_device_is_tried_and_every_failure_is_named(gateway: Callable[..., UpnpGateway]) -> None:
    """At most a few devices; without any, the message says that none answered."""
    behind_another, lacking = Router(), Router()
    behind_another.outside = "none"
    lacking.missing = ("AddPortMapping",)
    works = Router()
    assert (await gateway(GatewayFailed("does not answer"), works).open(INSIDE, LEASE_S)).address.port == 8468

    with pytest.raises(GatewayFailed) as caught:
        await gateway(behind_another, lacking).open(INSIDE, LEASE_S)
    assert str(caught.value) == (
        "192.168.1.1:5000 has no outside address; 192.168.1.2:5000 does not know AddPortMapping"
    )
    with pytest.raises(GatewayFailed) as caught:
        await gateway(*[GatewayFailed("does not answer")] * MAX_DEVICES, works).open(INSIDE, LEASE_S)
    assert str(caught.value).count("does not answer") == MAX_DEVICES
    with pytest.raises(GatewayFailed, match="no router in the local network answers to UPnP"):
        await gateway().open(INSIDE, LEASE_S)


@run_by(run)
async def test_a_router_that_fails_later_is_searched_for_again(gateway: Callable[..., UpnpGateway]) -> None:
    """It may have restarted at another address; a refusal keeps its code and text."""
    router = Router()
    opened = gateway(router)
    await opened.open(INSIDE, LEASE_S)
    failures = iter([501])
    router.refuse = lambda action, _given: next(failures, None) if action == "AddPortMapping" else None
    assert (await opened.open(INSIDE, LEASE_S)).address == Address(OUTSIDE, 8468)

    router.refuse = lambda action, _given: 606 if action == "AddPortMapping" else None
    with pytest.raises(GatewayFailed, match="refused AddPortMapping: 606 'no'"):
        await gateway(router).open(INSIDE, LEASE_S)


def test_only_an_ipv4_address_can_be_forwarded_to() -> None:
    """A node bound to one IPv4 address names that one."""
    assert upnp._own_host("192.168.1.7", "192.168.1.1") == "192.168.1.7"
    with pytest.raises(GatewayFailed, match="IPv6"):
        upnp._own_host("2001:db8::7", "192.168.1.1")
