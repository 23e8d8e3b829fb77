"""Which findings the doctor makes, and where it stops: a node that runs, a directory that is held, ports that are not
free, and what is left out without a network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.config.settings import Config
from p2pnode.doctor import examine as module
from p2pnode.doctor.examine import Examination, examine, node_checks
from p2pnode.doctor.machine import DoctorCheck, error, ok
from p2pnode.errors import UserError
from p2pnode.overlay.settings import NodeSettings, SwarmSettings

NODE: Any = SimpleNamespace(pid=77, address="127.0.0.1:1")


class World:
    """What the machine and the swarm are like."""

    def __init__(self) -> None:
        self.ports = [ok("port", "free")]
        self.is_locked = False
        self.status: Any = {}
        self.disk_error: OSError | None = None
        self.visited = 0
        self.visit_error: UserError | None = None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()

    def raising(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    async def visit(config: Config, keys: Any) -> AsyncIterator[DoctorCheck]:
        found.visited += 1
        if found.visit_error is not None:
            raise found.visit_error
        yield ok("visit", "well")

    gather = SimpleNamespace(
        file_limit=lambda: 1, longest_delay_s=lambda: 0.0, clock_is_set=lambda: True, torch_facts=lambda: None,
        has_nvidia=lambda: False, is_writable=lambda _: True, checkpoint_bytes=lambda _: 0, secret_files=lambda _: [],
        port_checks=lambda _: found.ports,
        free_bytes=lambda _: raising(found.disk_error or 1), loopback_check=lambda _: None,
    )  # fmt: skip
    names = ("version", "files", "delay", "clock", "folder", "disk")
    checks: dict[str, Any] = {f"{name}_check": lambda *_, name=name: ok(name, "fine") for name in names}
    client = SimpleNamespace(of=lambda _: SimpleNamespace(status=lambda: raising(found.status)))
    monkeypatch.setattr(module, "gather", gather)
    monkeypatch.setattr(module, "machine", SimpleNamespace(**checks, torch_check=lambda *_: [ok("torch", "fine")]))
    monkeypatch.setattr(module, "NodeClient", client)
    monkeypatch.setattr(module, "node_checks", lambda *_: [ok("node", "well")])
    monkeypatch.setattr(module, "is_locked", lambda _: found.is_locked)
    monkeypatch.setattr(module, "find_keys", lambda *_: None)
    monkeypatch.setattr(module, "visit", visit)
    monkeypatch.setattr(module, "check_start", lambda _: [])
    monkeypatch.setattr(module, "warnings_for", lambda _: [])
    return found


def findings(folder: Path, node: Any = None, *, key_file: str = "", **fields: Any) -> list[DoctorCheck]:
    config = Config(node=NodeSettings(state_dir=str(folder)), swarm=SwarmSettings(run="r", key_file=key_file))

    async def main() -> list[DoctorCheck]:
        return [check async for check in examine(Examination(config, node, **fields))]

    return asyncio.run(main())


def names(checks: list[DoctorCheck]) -> list[str]:
    return [check.name for check in checks]


MACHINE = ["version", "files", "delay", "clock", "torch", "folder", "disk"]


def test_the_machine_then_the_ports_then_the_swarm(world: World, tmp_path: Path) -> None:
    """Without a network the swarm is left out."""
    assert names(findings(tmp_path)) == [*MACHINE, "port", "visit"]
    assert names(findings(tmp_path, network=False)) == [*MACHINE, "port"]
    assert world.visited == 1


def test_a_node_that_runs_is_asked_and_nothing_is_tried_beside_it(world: World, tmp_path: Path) -> None:
    """Its ports are its own. One whose API does not answer is an error with its process."""
    assert names(findings(tmp_path, NODE)) == [*MACHINE, "node"]
    world.status = UserError("timed out", "look again")
    last = findings(tmp_path, NODE)[-1]
    assert (last.level, last.do) == ("error", "look again")
    assert "process 77 runs, and its API does not answer: timed out" in last.what
    assert world.visited == 0


def test_a_directory_that_is_held_without_an_answer_is_an_error(world: World, tmp_path: Path) -> None:
    """The node starts or hangs; nothing more is looked at."""
    world.is_locked = True
    found = findings(tmp_path)

    assert names(found) == [*MACHINE, "node"]
    assert found[-1].level == "error"
    assert str(tmp_path) in found[-1].what


def test_where_a_port_is_not_free_the_swarm_is_not_visited(world: World, tmp_path: Path) -> None:
    """The visit would need it."""
    world.ports = [error("port", "held", "end it")]

    assert names(findings(tmp_path)) == [*MACHINE, "port"]
    assert world.visited == 0


def test_a_disk_that_cannot_be_asked_is_an_error_of_its_folder(world: World, tmp_path: Path) -> None:
    """The other findings are made."""
    world.disk_error = OSError(13, "Permission denied")
    (found,) = [check for check in findings(tmp_path, network=False) if check.level == "error"]

    assert (found.name, found.what) == ("disk", f"{tmp_path}: Permission denied")


def test_a_key_that_is_missing_or_comes_later_keeps_the_doctor_out(world: World, tmp_path: Path) -> None:
    """The first is an error with what to do, the second is said."""
    world.visit_error = UserError("no key", "make one")
    last = findings(tmp_path)[-1]
    assert (last.name, last.level, last.what, last.do) == ("key", "error", "no key", "make one")
    before = world.visited
    last = findings(tmp_path, key_file="-")[-1]
    assert (last.name, last.level) == ("key", "info")
    assert world.visited == before


def test_a_node_that_runs_says_how_it_is() -> None:
    """Its summary, everything under `health` with its level, and an installation after which it was not restarted;
    nothing is required."""
    status = {
        "summary": "training at step 7",
        "node": {"version": "1"},
        "health": [
            {"level": "warning", "what": "disk full", "do": "free space"},
            {"level": "error", "what": "hung", "do": "x"},
        ],
    }
    found = [(check.name, check.level) for check in node_checks(status, "2")]
    assert found == [("node", "ok"), ("version", "warning"), ("health", "warning"), ("health", "error")]
    assert [check.name for check in node_checks({}, "2")] == ["node"]
