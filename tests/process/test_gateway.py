"""Ports opened in a router: the real UPnP client against a fake router on the loopback, under asyncio and uvloop."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.nat.port_mapping import GatewayFailed, Mapped
from p2pnode.overlay.nat.upnp import MAX_REQUESTS, UpnpGateway, is_installed
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import run_by
from tests.process.harness.fake_gateway import FakeGateway, junk_pages
from tests.process.harness.sockets import run

__all__ = ["run"]

if not is_installed():
    pytest.skip("async-upnp-client is not installed (extra nat)", allow_module_level=True)

HOME = Address("127.0.0.1", 8468)
OUTSIDE = "93.184.216.34"


def client(fake: FakeGateway) -> UpnpGateway:
    ports = itertools.count(20001)
    return UpnpGateway(lambda: next(ports), search_at=fake.search_at, search_s=0.5, source="127.0.0.1")


@run_by("run")
async def test_a_port_is_opened_renewed_and_given_back() -> None:
    """UDP and TCP of the node's port; again without a search; and nothing is left on leaving."""
    async with FakeGateway() as fake:
        gateway = client(fake)
        both = {(8468, protocol): ("127.0.0.1", 8468, 3600) for protocol in ("UDP", "TCP")}
        assert await gateway.open(HOME, 3600.0) == Mapped(Address(OUTSIDE, 8468), 3600.0)
        assert fake.mappings == both
        searches = fake.searches
        fake.mappings.clear()  # the lease ran out, or the router restarted
        assert await gateway.open(HOME, 3600.0) == Mapped(Address(OUTSIDE, 8468), 3600.0)
        assert (fake.mappings, fake.searches) == (both, searches)
        await gateway.close()
        assert fake.mappings == {}
        await gateway.close()


@run_by("run")
async def test_a_router_that_knows_permanent_leases_alone() -> None:
    """Error 725: asked again without an end, and given back all the same."""
    async with FakeGateway() as fake:
        fake.permanent_only = True
        gateway = client(fake)
        assert await gateway.open(HOME, 3600.0) == Mapped(Address(OUTSIDE, 8468), 0.0)
        assert {lease for _, _, lease in fake.mappings.values()} == {0}
        await gateway.close()
        assert fake.mappings == {}


@run_by("run")
async def test_a_port_that_is_taken_gives_way_to_another() -> None:
    """Error 718, for either protocol: the next one is asked for, and no half of a mapping stays."""
    async with FakeGateway() as fake:
        fake.taken = {(8468, "UDP"), (20001, "TCP")}
        gateway = client(fake)
        mapped = await gateway.open(HOME, 60.0)
        assert mapped.address == Address(OUTSIDE, 20002)
        assert set(fake.mappings) == {(20002, "UDP"), (20002, "TCP")}
        await gateway.close()
        assert fake.mappings == {}
        fake.taken = {(port, "TCP") for port in range(65536)}
        with pytest.raises(GatewayFailed, match="in use"):
            await client(fake).open(HOME, 60.0)
        assert fake.mappings == {}


@run_by("run")
async def test_a_refusal_is_told_in_the_routers_words() -> None:
    """Whatever code: the number and the router's own text; a later attempt may succeed."""
    async with FakeGateway() as fake:
        fake.refuse = 606
        gateway = client(fake)
        with pytest.raises(GatewayFailed, match=r"refused AddPortMapping: 606 'ActionNotAuthorized'"):
            await gateway.open(HOME, 60.0)
        fake.refuse = 0
        assert (await gateway.open(HOME, 60.0)).address.port == 8468


@pytest.mark.parametrize("outside", ["", "somewhere", "0.0.0.300"])
@run_by("run")
async def test_an_outside_address_that_is_none(outside: str) -> None:
    """A router without a line has no address, whatever it calls that."""
    async with FakeGateway(outside) as fake:
        with pytest.raises(GatewayFailed, match="no outside address"):
            await client(fake).open(HOME, 60.0)


@pytest.mark.parametrize(("name", "pages"), junk_pages(), ids=[name for name, _ in junk_pages()])
@run_by("run")
async def test_a_router_that_talks_nonsense(name: str, pages: dict[str, Any]) -> None:
    """One sentence, no exception of another kind, nothing mapped, and never a request to another host."""
    async with FakeGateway() as fake:
        fake.pages = {path: make() for path, make in pages.items()}
        gateway = client(fake)
        with pytest.raises(GatewayFailed) as caught:
            await gateway.open(HOME, 60.0)
        print(caught.value)
        assert len(str(caught.value)) < 300, name
        assert fake.mappings == {}
        assert len(fake.asked) <= MAX_REQUESTS


@pytest.mark.parametrize(
    "location",
    ["http://127.0.0.2:80/x", "file:///etc/passwd", "http://[", "https://127.0.0.1:1/", "http://127.0.0.1:x/"],
)
@run_by("run")
async def test_an_answer_that_points_elsewhere_is_no_answer(location: str) -> None:
    """Only the host that answers the search is asked, by plain HTTP at a port."""
    async with FakeGateway() as fake:
        fake.location = location
        with pytest.raises(GatewayFailed, match="no router"):
            await client(fake).open(HOME, 60.0)
        assert fake.searches >= 2
        assert fake.asked == []


@run_by("run")
async def test_no_router() -> None:
    """Silence is a sentence."""
    async with FakeGateway() as fake:
        gateway = client(fake)
    with pytest.raises(GatewayFailed, match="no router"):
        await gateway.open(HOME, 60.0)


def test_a_missing_package_is_one_sentence(tmp_path: Path) -> None:
    """`node.nat = "auto"` without the extra: exit code 4, and how to install it; off, nothing of it is imported."""
    hidden = (
        "import sys, importlib.util as u; f = u.find_spec; "
        "u.find_spec = lambda n, *a: None if n == 'async_upnp_client' else f(n, *a); "
        "from p2pnode.cli import main; sys.exit(main())"
    )
    settings = ["--set", "node.nat=auto", "--set", "node.host=0.0.0.0", "--set", "swarm.allow_open=true"]
    done = subprocess.run(
        [sys.executable, "-c", hidden, "start", "--state-dir", str(tmp_path / "s"), *settings],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 4, done.stderr
    assert "async-upnp-client, which is not installed" in done.stderr
    assert 'pip install "p2pnode[nat]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_is_imported_when_it_is_asked_for_alone() -> None:
    """An idle daemon does not carry it."""
    program = "import p2pnode.daemon, sys; print([m for m in sys.modules if m.startswith(('async_upnp', 'zeroconf'))])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
