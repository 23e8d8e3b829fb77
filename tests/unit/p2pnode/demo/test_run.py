"""The demo with scripted nodes: when it starts what, when it stops, and what it prints and returns."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2pnode.demo import run as module
from p2pnode.demo.plan import DemoPlan
from p2pnode.errors import ExitCode

GOOD = [0.96, 0.97, 0.98]


class Clock:
    """Stands for `time`: it passes only while the demo waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.on_sleep: Callable[[float], None] = lambda _: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep(self.now - 100.0)


class Node:
    """A daemon that listens after a second, and has these accuracies after ten. `exits_s`: when it ends, if it does."""

    def __init__(self, world: World, name: str, command: list[str], log: Path) -> None:
        self.world, self.name, self.command, self.log = world, name, command, log
        self.began_s = world.clock.now
        self.status: dict[str, Any] | None = None
        self.accuracies: list[float] = []

    def _age_s(self) -> float:
        return self.world.clock.now - self.began_s

    @property
    def exit_code(self) -> int | None:
        return 3 if self._age_s() >= self.world.exits_s.get(self.name, 1e9) else None

    def refresh(self) -> None:
        if self._age_s() >= self.world.listens_s:
            self.status = {"node": {"id": self.name, "address": f"127.0.0.1:{self.name[-1]}"}, "step": 40}
        if self._age_s() >= 10.0:
            self.accuracies = list(self.world.accuracies.get(self.name, GOOD))

    @property
    def listens_at(self) -> str:
        self.refresh()
        return str((self.status or {}).get("node", {}).get("address", ""))

    def last_lines(self) -> str:
        return "    its last line"


class Alone:
    """A part trained alone, for three seconds."""

    def __init__(self, world: World, name: str, command: list[str], log: Path) -> None:
        self.world, self.name, self.command, self.log = world, name, command, log
        self.began_s = world.clock.now
        log.write_text(world.printed.get(name, 'noise\n{"metrics": {"accuracy": 0.6}}\n'), encoding="utf-8")
        world.at_once = max(world.at_once, 1 + sum(one.exit_code is None for one in world.alone))

    @property
    def exit_code(self) -> int | None:
        return self.world.codes.get(self.name, 0) if self.world.clock.now - self.began_s >= 3.0 else None

    def last_lines(self) -> str:
        return "    its last line"


class World:
    """The processes of one demo, by the order in which they were started."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.nodes: list[Node] = []
        self.alone: list[Alone] = []
        self.ended: list[str] = []
        self.killed: list[str] = []
        self.at_once = 0
        self.listens_s = 1.0
        self.exits_s: dict[str, float] = {}
        self.accuracies: dict[str, list[float]] = {}
        self.printed: dict[str, str] = {}
        self.codes: dict[str, int] = {}

    def node(self, name: str, command: list[str], log: Path, _state: Path) -> Node:
        self.nodes.append(Node(self, name, command, log))
        return self.nodes[-1]

    def process(self, name: str, command: list[str], log: Path) -> Alone:
        self.alone.append(Alone(self, name, command, log))
        return self.alone[-1]

    def end(self, processes: Any, _hurry: Any) -> list[str]:
        self.ended += [one.name for one in processes]
        return self.killed


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setattr(module, "time", found.clock)
    monkeypatch.setattr(module, "DemoNode", found.node)
    monkeypatch.setattr(module, "DemoProcess", found.process)
    monkeypatch.setattr(module, "end_all", found.end)
    return found


def demo(capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, dict[str, Any], str]:
    """The exit code, the figures, and what was printed for people."""
    code = module.run(DemoPlan(**({"nodes": 3, "time_limit_s": 60.0} | changes)), as_json=True)
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err


def test_a_swarm_that_reaches_its_goal_is_a_success(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first node starts alone, the others join it; then each part is trained for as many steps, two at a time."""
    code, figures, printed = demo(capsys, keep=tmp_path)
    assert code == ExitCode.OK
    assert (figures["success"], figures["accuracy"], figures["alone"]) == (True, 0.98, 0.6)
    assert [one.name for one in world.nodes] == ["node-0", "node-1", "node-2"]
    assert world.nodes[0].began_s + 1.0 <= world.nodes[1].began_s == world.nodes[2].began_s
    configs = [Path(one.command[-1]).read_text(encoding="utf-8") for one in world.nodes]
    assert ["127.0.0.1:0" in text for text in configs] == [False, True, True]
    assert world.ended == [*(one.name for one in world.nodes), "alone-0", "alone-1", "alone-2"]
    assert world.at_once == module.MAX_CONCURRENT_BASELINES
    command = world.alone[1].command
    assert command[command.index("--steps") + 1] == "40"
    assert json.loads(command[command.index("--options") + 1])["part"] == 1
    assert "--data-dir" not in command, "there is none"
    assert "the demo reached its goal" in printed


@pytest.mark.parametrize(
    ("accuracies", "is_reached"),
    [([0.95, 0.95, 0.95], True), ([0.96, 0.94, 0.97, 0.97], False), ([0.99, 0.99], False), ([], False)],
)
def test_the_goal_has_to_hold_at_every_node(
    world: World, capsys: pytest.CaptureFixture[str], accuracies: list[float], is_reached: bool
) -> None:
    """In three evaluations in a row; otherwise the demo ends at its limit, and trains no part alone."""
    world.accuracies["node-2"] = accuracies
    code, figures, printed = demo(capsys)
    assert (code == ExitCode.OK) == is_reached == figures["success"]
    if not is_reached:
        assert code == ExitCode.DEMO_FAILED
        assert figures["reason"] == "the goal was not reached within 60 s"
        assert figures["seconds"] == pytest.approx(60.0, abs=1.0)
        assert world.alone == []
        assert "the demo failed: the goal was not reached" in printed
    assert world.ended[:3] == ["node-0", "node-1", "node-2"]


@pytest.mark.parametrize(("name", "started"), [("node-0", 1), ("node-1", 3)])
def test_a_node_that_ends_early_ends_the_demo_with_its_last_lines(
    world: World, capsys: pytest.CaptureFixture[str], name: str, started: int
) -> None:
    """Also the first one, before the others have started; all are ended."""
    world.exits_s[name] = 0.5
    code, figures, _ = demo(capsys)
    assert code == ExitCode.DEMO_FAILED
    assert figures["reason"] == f"{name} ended early with exit code 3; its last lines:\n    its last line"
    assert len(world.nodes) == len(world.ended) == started


def test_a_first_node_that_nobody_can_join_is_no_success(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever it learns alone."""
    world.listens_s = 1000.0
    code, figures, _ = demo(capsys)
    assert (code, figures["reason"]) == (ExitCode.DEMO_FAILED, "the goal was not reached within 60 s")
    assert len(world.nodes) == 1


def test_an_interrupted_demo_ends_what_it_has_started(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The handlers of the signals are as before when it returns, and processes that had to be killed are named."""
    former = signal.getsignal(signal.SIGTERM)
    world.killed = ["node-1"]

    def interrupt(seconds: float) -> None:
        if seconds == 5.0:
            signal.raise_signal(signal.SIGTERM)

    world.clock.on_sleep = interrupt
    code, figures, printed = demo(capsys)
    assert (code, figures["reason"]) == (ExitCode.DEMO_FAILED, "it was interrupted")
    assert "had to be killed: node-1" in printed
    assert signal.getsignal(signal.SIGTERM) is former


@pytest.mark.parametrize(("code", "printed"), [(1, '{"accuracy": 0.6}'), (0, "no figures")])
def test_a_part_that_fails_alone_leaves_the_comparison_out(
    world: World, capsys: pytest.CaptureFixture[str], code: int, printed: str
) -> None:
    """The swarm has reached its goal all the same; the part is named."""
    world.codes["alone-1"], world.printed["alone-1"] = code, printed
    exit_code, figures, shown = demo(capsys)
    assert exit_code == ExitCode.OK
    assert (figures["alone"], figures["alone_each"]) == (None, [])
    assert f"alone-1 failed with exit code {code}" in shown


def test_the_last_figures_that_a_part_printed_count(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """With or without `metrics`; other lines, and other JSON, are passed over."""
    world.printed["alone-0"] = '{"accuracy": 0.1}\n{"accuracy": 0.5}\nwarning\n[1]\n{"loss": 2}\n'
    _, figures, _ = demo(capsys)
    assert figures["alone_each"] == [0.5, 0.6, 0.6]


def test_files_are_removed_unless_they_are_to_be_kept(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of its own below the given one, which is made."""
    demo(capsys)
    assert not world.nodes[0].log.parent.parent.exists()
    _, _, printed = demo(capsys, keep=tmp_path / "new")
    (kept,) = (tmp_path / "new").iterdir()
    assert f"the nodes' files are in {kept}" in printed
    assert (kept / "node-0" / "node.toml").is_file()
