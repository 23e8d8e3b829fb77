"""docs/tutorial.md, run as it is written: three machines, each a home folder and a port of its own on the loopback."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import run_p2pnode, start_p2pnode
from tests.process.harness.free_port import free_port
from tests.process.harness.swarm_world import START_S, StartedNode, kill_all, until

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FIRST, _, OWN_MODEL = PAGE.partition("## 7.")
#: A fenced block: language and contents.
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: The address of A in the page.
ADDRESS = "192.0.2.10:8468"


class Machine:
    """A home folder with its nodes; commands run in it as in a terminal."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir()
        self.folder = folder
        self.address = f"127.0.0.1:{port}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("P2PNODE_")}
        self._environment = kept | {
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            # Three machines have three ports 8468; here they share one set of ports, and two cores.
            "P2PNODE_NODE__PORT": str(port),
            "P2PNODE_STATUS__PORT": "0",
            "P2PNODE_TRAINING__THREADS": "1",
        }
        self.node: StartedNode | None = None

    def state(self, run: str) -> Path:
        return self.folder / ".local" / "state" / "p2pnode" / run

    def do(self, command: str) -> str:
        """Run a command; one that starts a node goes on beside the others. Returns what it printed."""
        program, *arguments = shlex.split(command)
        assert program == "p2pnode", command
        if arguments[0] in ("start", "run"):
            arguments = [sys.executable if word == "python" else word for word in arguments]
            with (self.folder / "log").open("ab") as log:
                process = start_p2pnode(arguments, cwd=self.folder, env=self._environment, stdout=log, stderr=log)
            self.node = StartedNode(process, self.state("digits"), self.folder / "log")
            return ""
        done = run_p2pnode(arguments, cwd=self.folder, env=self._environment, timeout=START_S)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def status(self, run: str) -> dict[str, Any]:
        if self.node is None:
            return {}
        self.node.state_dir = self.state(run)
        return self.node.status()

    def end(self) -> None:
        """Ctrl-C, as a terminal sends it; the node ends with 0."""
        assert self.node is not None
        os.killpg(self.node.process.pid, signal.SIGINT)
        self.wait()
        self.node = None

    def wait(self) -> None:
        """The node ends with 0 by itself."""
        assert self.node is not None
        assert self.node.wait() == 0, self.log

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    """A, B and C."""
    found = {name: Machine(tmp_path / name, port) for port, name in enumerate("ABC", free_port(3))}
    yield found
    kill_all(machine.node for machine in found.values() if machine.node is not None)


def commands(part: str) -> list[tuple[str, str]]:
    """Machine and command, in the order of a part of the page; those of the installation have no machine."""
    found = []
    for language, block in BLOCK.findall(part):
        first, *lines = block.splitlines()
        if language == "sh" and first.startswith("# on "):
            found += [(name, line) for name in re.findall(r"\b[ABC]\b", first) for line in lines]
    return found


def test_every_command_says_where_it_runs() -> None:
    """All shell blocks but the installation begin with the machine; the one Python block is the script."""
    blocks = BLOCK.findall(PAGE)
    others = [block for language, block in blocks if language == "sh" and not block.startswith("# on ")]

    assert len(others) == 1
    assert 'pip install -c constraints.txt ".[torch]"' in others[0]
    assert [language for language, _ in blocks].count("python") == 1
    assert len(commands(FIRST)) >= 14
    assert len(commands(OWN_MODEL)) == 5


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_first_part_works_as_written(machines: dict[str, Machine]) -> None:
    """Each command succeeds, the nodes meet, and one that was taken away returns; the model can be exported."""
    a, b, c = machines.values()
    for name, command in commands(FIRST):
        machine = machines[name]
        if command == "p2pnode demo":
            continue  # tests/process/test_wheel.py
        if command == "p2pnode start" and machine is c:
            c.end()  # "On C, press Ctrl-C"
        if command.startswith("p2pnode export"):
            a.end()  # "End the nodes on A and C too"
            c.end()
        printed = machine.do(command.replace(ADDRESS, a.address))
        if command.startswith("p2pnode start") and machine is a:
            meet("digits", a)
        elif command.startswith("p2pnode start") and machine is c:
            meet("digits", a, b, c)
        elif "--out" in command:
            hand_over(command, a, b, c)
        elif command == "p2pnode status":
            assert "digits" in printed
        elif command == "p2pnode peers":
            assert len(printed.splitlines()) >= 3
        elif command == "p2pnode dashboard --no-open":
            assert "/swarm" in printed
        elif command == "p2pnode leave":
            b.wait()

    assert (a.folder / "digits.safetensors").stat().st_size > 1000


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_model_of_one_s_own_works_as_written(machines: dict[str, Machine]) -> None:
    """The script of the page trains in three nodes, which end with exit code 0 and with one model."""
    a, b, c = machines.values()
    [script] = [block for language, block in BLOCK.findall(PAGE) if language == "python"]
    for machine in machines.values():
        (machine.folder / "train.py").write_text(script)
    for name, command in commands(OWN_MODEL):
        machines[name].do(command.replace(ADDRESS, a.address))
        if command.startswith("p2pnode run") and name == "A":
            until(lambda: bool(a.status("circle")), START_S, f"A can be asked:\n{a.log}")
        elif "--out" in command:
            hand_over(command, a, b, c)

    for machine in machines.values():
        machine.wait()
    models = {(machine.state("circle") / "model.safetensors").read_bytes() for machine in machines.values()}
    assert len(models) == 1, [machine.log for machine in machines.values()]


def meet(run: str, *nodes: Machine) -> None:
    """Wait until each of them trains and knows all others."""

    def met() -> bool:
        known = [node.status(run) for node in nodes]
        return all(one.get("step", 0) >= 1 and one["population"]["estimate"] == len(nodes) for one in known)

    until(met, START_S, f"{len(nodes)} nodes of {run} meet:\n" + "\n".join(node.log for node in nodes))


def hand_over(command: str, *machines: Machine) -> None:
    """Bring the invitation that a command wrote to the other machines."""
    first, *others = machines
    name = command.split()[-1]
    for other in others:
        (other.folder / name).write_text((first.folder / name).read_text())
