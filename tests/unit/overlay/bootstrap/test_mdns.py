"""Multicast DNS without a socket: which changes are queried, and what malformed answers become."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from p2pnode.overlay.bootstrap.lan import DETAILS_MS, MAX_CONCURRENT_QUERIES, SERVICE, Announcement, ZeroconfLan
from p2pnode.overlay.ids import ID_BYTES
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by

zeroconf = pytest.importorskip("zeroconf")
import zeroconf.asyncio as package  # noqa: E402

OWN = Announcement("tests", b"\xab" * ID_BYTES, 8468, joined=True)
ADDED = zeroconf.ServiceStateChange.Added

Received = tuple[str, dict[str, str], list[str], int]


class Info:
    """In the place of `AsyncServiceInfo`: the details of one announcement, by its name."""

    asked: list[str]
    waits_s = 0.0

    def __init__(self, _service_type: str, name: str) -> None:
        self.name = name
        self.port: int | None = 9000
        self.decoded_properties: dict[str, str | None] = {"v": "1", "flag": None}

    async def async_request(self, _zeroconf: object, timeout_ms: int) -> bool:
        assert timeout_ms == DETAILS_MS
        Info.asked.append(self.name)
        await asyncio.sleep(Info.waits_s)
        if self.name == "malformed":
            raise IndexError("truncated record")
        return self.name != "silent"

    def parsed_addresses(self) -> list[str]:
        return ["192.168.1.5"]


@pytest.fixture
def lan(monkeypatch: pytest.MonkeyPatch) -> tuple[ZeroconfLan, list[Received]]:
    monkeypatch.setattr(package, "AsyncServiceInfo", Info)
    Info.asked, Info.waits_s = [], 0.0
    received: list[Received] = []

    def on_announcement(name: str, properties: Mapping[str, str], hosts: Iterable[str], port: int) -> None:
        received.append((name, dict(properties), list(hosts), port))

    made: Any = ZeroconfLan()
    made._on_announcement = on_announcement
    return made, received


@run_by(run)
async def test_the_details_of_a_new_announcement_are_passed_on_as_text(lan: tuple[Any, list[Received]]) -> None:
    """Keys without value are left out; an announcement without details is dropped; a malformed one has none."""
    made, received = lan
    for name in ("one", "silent", "malformed"):
        made._changed(None, SERVICE, name, ADDED)
    await asyncio.sleep(0.1)

    assert received == [("one", {"v": "1"}, ["192.168.1.5"], 9000), ("malformed", {}, [], 0)]


@run_by(run)
async def test_queries_are_bounded_and_made_once_at_a_time_for_a_name(lan: tuple[Any, list[Received]]) -> None:
    """Withdrawals and names that DNS does not allow cause no query."""
    made, _ = lan
    Info.waits_s = 1.0
    made._changed(None, SERVICE, "gone", zeroconf.ServiceStateChange.Removed)
    made._changed(None, SERVICE, "n" * 256, ADDED)
    made._changed(None, SERVICE, "one", ADDED)
    made._changed(None, SERVICE, "one", zeroconf.ServiceStateChange.Updated)
    for number in range(2 * MAX_CONCURRENT_QUERIES):
        made._changed(None, SERVICE, f"other {number}", ADDED)
    await asyncio.sleep(0.1)
    assert Info.asked[0] == "one"
    assert len(Info.asked) == MAX_CONCURRENT_QUERIES

    await asyncio.sleep(2.0)
    made._changed(None, SERVICE, "one", zeroconf.ServiceStateChange.Updated)
    await asyncio.sleep(0.1)
    assert Info.asked[MAX_CONCURRENT_QUERIES:] == ["one"]

    await made.stop()
    assert made._asking == {}


def test_the_service_names_the_node_and_its_port() -> None:
    """The name has the start of the id, so that two processes of one identity have the same name."""
    made = ZeroconfLan()
    made._hosts = ["192.168.1.7"]

    info = made._service(OWN)

    assert info.name == f"{'ab' * 8}.{SERVICE}"
    assert (info.port, info.parsed_addresses()) == (8468, ["192.168.1.7"])
    assert info.decoded_properties["id"] == "ab" * ID_BYTES
    assert info.decoded_properties["in"] == "1"
