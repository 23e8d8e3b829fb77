"""Announcements by real multicast DNS on the loopback, junk among them, under asyncio and uvloop."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.lan import (
    SERVICE,
    Announcement,
    LanDiscovery,
    OnAnnouncement,
    ZeroconfLan,
    is_installed,
)
from p2pnode.overlay.kademlia.messages import PROTOCOL_VERSION
from p2pnode.overlay.local_node import LocalNode
from tests.harness.environment.simulated import ListLog
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import run_by
from tests.process.harness.members import until
from tests.process.harness.sockets import run

__all__ = ["run"]

LOCAL = "127.0.0.1"
GROUP = ("224.0.0.251", 5353)


def no_multicast() -> str:
    """Why this machine's loopback carries no multicast; empty where it does."""
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hears,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as says,
    ):
        try:
            hears.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            hears.bind(("", 0))
            membership = struct.pack("4s4s", socket.inet_aton("224.0.0.250"), socket.inet_aton(LOCAL))
            hears.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            says.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOCAL))
            says.sendto(b"x", ("224.0.0.250", hears.getsockname()[1]))
            hears.settimeout(2)
            hears.recv(16)
        except OSError as error:
            return str(error)
    return ""


@pytest.fixture
def multicast() -> None:
    if not is_installed():
        pytest.skip("zeroconf is not installed (extra lan)")
    why = no_multicast()
    if why:
        pytest.skip(f"no multicast on the loopback here: {why}")


def junk() -> list[bytes]:
    """Packets at the port of multicast DNS that are none, or lie."""
    name = b"\x04junk\x08_p2pnode\x04_udp\x05local\x00"
    service = b"\x08_p2pnode\x04_udp\x05local\x00"
    pointer = service + struct.pack(">HHIH", 12, 1, 120, len(name)) + name
    text = name + struct.pack(">HHIH", 16, 0x8001, 120, 8) + b"\xffid=\xff\xfe\xfd\xfc"
    where = name + struct.pack(">HHIH", 33, 0x8001, 120, 12) + struct.pack(">HHH", 0, 0, 0) + b"\x04none\x00"
    head = struct.pack(">HHHHHH", 0, 0x8400, 0, 3, 0, 0)
    itself = b"\xc0\x0c" + struct.pack(">HHIH", 12, 1, 120, 2) + b"\xc0\x0c"  # a name that points at itself
    loop = struct.pack(">HHHHHH", 0, 0x8400, 0, 1, 0, 0) + itself
    return [b"", b"\0", b"\xff" * 600, head + pointer + text + where, loop, head + pointer[:20]]


def announcement(run_name: str, byte: int, port: int) -> Announcement:
    """Of a run and an id that only this process has: multicast carries what other tests announce at the same time."""
    return Announcement(
        f"{run_name}-{os.getpid()}", bytes([byte]) + os.getpid().to_bytes(4, "big") + bytes(15), port, joined=False
    )


def discovery(own: Announcement) -> LanDiscovery:
    made = LanDiscovery(LocalNode(own.node_id, 1, 1, own.run, Address(LOCAL, own.port)), None, ListLog([]))
    assert made.own == own
    return made


@contextlib.asynccontextmanager
async def announcing(*places: tuple[Announcement, OnAnnouncement]) -> AsyncIterator[list[ZeroconfLan]]:
    """A `ZeroconfLan` for each, stopped in any case: uvloop may wait without end for the sockets of one that is not."""
    lans: list[ZeroconfLan] = []
    try:
        for own, on_announcement in places:
            lans.append(ZeroconfLan())
            await lans[-1].start(own, LOCAL, on_announcement)
        yield lans
    finally:
        for lan in lans:
            await lan.stop()


@run_by("run")
async def test_neighbours_hear_each_other(multicast: None) -> None:
    """Two of one run, one of another, and junk: the two see each other where they listen, and learn when one is in."""
    given = (("one", 1, 9001), ("one", 2, 9002), ("two", 3, 9003))
    places = [discovery(announcement(*each)) for each in given]
    heard: list[str] = []

    def first_hears(name: str, properties: Mapping[str, str], hosts: Iterable[str], port: int) -> None:
        heard.append(properties.get("run", ""))
        places[0].on_announcement(name, properties, hosts, port)

    hearers = [first_hears, *(place.on_announcement for place in places[1:])]
    async with announcing(*zip((place.own for place in places), hearers, strict=True)) as lans:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as says:
            says.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(LOCAL))
            for packet in junk():
                says.sendto(packet, GROUP)
        first, second, other = places
        await until(lambda: first.addresses() == [Address(LOCAL, 9002)], "the first sees the second")
        await until(lambda: second.addresses() == [Address(LOCAL, 9001)], "the second sees the first")
        await until(lambda: other.own.run in heard, "the other run's was heard")
        assert other.addresses() == []
        assert (first.should_found(), second.should_found()) == (True, False)
        first.own = first.own._replace(joined=True)
        await lans[0].announce(first.own)
        await until(second.is_any_joined, "the second hears that the first is in")
        assert not first.is_any_joined()
        for lan in lans:
            await lan.stop()  # and once more at the end


@run_by("run")
async def test_what_is_announced_holds_no_key(multicast: None) -> None:
    """Every property that goes out is one of the four."""
    heard: list[Mapping[str, str]] = []

    def note(_name: str, properties: Mapping[str, str], _hosts: Iterable[str], _port: int) -> None:
        heard.append(properties)

    both = [announcement("one", 1, 9001), announcement("one", 2, 9002)]
    ids = {own.node_id.hex() for own in both}
    async with announcing(*((own, note) for own in both)):
        await until(lambda: ids <= {each.get("id") for each in heard}, "both are heard")
    ours = [each for each in heard if each.get("id") in ids]
    assert all(set(each) == {"v", "run", "id", "in"} for each in ours)
    assert all(each["v"] == str(PROTOCOL_VERSION) for each in ours)
    assert SERVICE.startswith("_p2pnode.")


def test_a_missing_package_is_one_sentence(tmp_path: Path) -> None:
    """`swarm.discover = "lan"` without the extra: exit code 4, and how to install it."""
    hidden = (
        "import sys, importlib.util as u; f = u.find_spec; "
        "u.find_spec = lambda n, *a: None if n == 'zeroconf' else f(n, *a); "
        "from p2pnode.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden, "start", "--state-dir", str(tmp_path / "s"), "--set", "swarm.discover=lan"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 4, done.stderr
    assert "zeroconf, which is not installed" in done.stderr
    assert 'pip install "p2pnode[lan]"' in done.stderr
    assert "Traceback" not in done.stderr
