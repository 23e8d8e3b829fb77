"""Home folders in which commands of the documents run as they are written, in a shell of their own.

`p2pnode` in that shell is a fork of the server that has imported it (`tests.process.harness.forked_python`), except
where a command executes itself again or needs the signals of its terminal. A command that starts a node in the
foreground is waited for until the node trains or serves, and is ended by `p2pnode leave`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, RunningNode, find
from p2pnode.config.state_folders import LOCAL
from p2pnode.errors import UserError
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import with_daemon, with_torch
from tests.process.harness.free_port import free_port

#: Longest wait for one command, on a loaded machine.
PATIENCE_S = 120.0

PROGRAM = """\
#!/bin/sh
case " $* " in
  *" --invite "*|*" --follow "*|*" watch "*) exec {python} -m p2pnode "$@" ;;
esac
exec {python} -m tests.process.harness.forked_command {daemon} -m tests.process.harness.forked_python {torch} "$@"
"""


def until(holds: Callable[[], bool], what: Callable[[], str]) -> None:
    """Wait until it holds. Raises `AssertionError` with `what()`."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, what()
        time.sleep(0.05)


def programs(folder: Path) -> Path:
    """A folder for PATH with the programs of this environment."""
    folder.mkdir()
    python = shlex.quote(sys.executable)
    text = PROGRAM.format(python=python, daemon=with_daemon().path, torch=with_torch().path)
    for name, content in (("p2pnode", text), ("python", f'#!/bin/sh\nexec {python} "$@"\n')):
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    return folder


class Home:
    """A machine: a home folder, which is also the working directory, and a port."""

    def __init__(self, folder: Path, programs: Path) -> None:
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        # A command with `--local 4` takes three more ports.
        self.folder, self.port = folder, free_port(4)
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("P2PNODE_", "DISPLAY", "XDG"))
        }
        self._environment = kept | {
            "HOME": str(folder),
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TERM": "dumb",
            "MPLBACKEND": "agg",
            "MPLCONFIGDIR": str(Path.home() / ".cache" / "matplotlib"),  # the list of fonts takes a minute to make
            # All machines share one set of ports and two cores.
            "P2PNODE_NODE__PORT": str(self.port),
            "P2PNODE_STATUS__PORT": "0",
            "P2PNODE_TRAINING__THREADS": "1",
        }

    def nodes(self) -> dict[Path, RunningNode]:
        """The nodes that run here, by their state directories."""
        found = {}
        state = self.folder / ".local" / "state" / "p2pnode"
        for path in (*state.glob("*/status.json"), *state.glob(f"*/{LOCAL}/*/status.json")):
            node = find(path.parent)
            if node is not None and node.alive:
                found[path.parent] = node
        return found

    def node(self) -> RunningNode:
        [node] = self.nodes().values()
        return node

    def status(self) -> dict[str, Any]:
        """That of the one node here; empty while there is none that answers."""
        for node in self.nodes().values():
            with contextlib.suppress(UserError):
                return NodeClient.of(node, timeout_s=PATIENCE_S).status()
        return {}

    def start(
        self, command: str, environment: Mapping[str, str] | None = None, terminal: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        """A shell with the command, in a session of its own; its output is in the file `log`."""
        # The daemon forks what is started as this Python.
        command = command.replace(" -- python ", f" -- {shlex.quote(sys.executable)} ")
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-e", "-o", "pipefail", "-c", command],
                cwd=self.folder,
                env=self._environment | dict(environment or {}),
                stdin=terminal,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def do(self, command: str, environment: Mapping[str, str] | None = None, code: int = 0) -> str:
        """Run a command to its end. Returns what it printed; raises `AssertionError` if its exit code is another."""
        process = self.start(command, environment)
        try:
            ended = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill(process)
            raise AssertionError(f"it does not end: {command}\n{self.log}") from None
        assert ended == code, f"exit code {ended}: {command}\n{self.log}"
        return self.log

    def answer(self, command: str, typed: str) -> str:
        """Run a command that asks at its terminal, and type the answer there."""
        ours, theirs = os.openpty()
        try:
            process = self.start(command, terminal=theirs)
            try:
                os.write(ours, f"{typed}\n".encode())
                assert process.wait(PATIENCE_S) == 0, f"exit code {process.returncode}: {command}\n{self.log}"
            finally:
                self._kill(process)
        finally:
            os.close(ours)
            os.close(theirs)
        return self.log

    def serve(
        self,
        command: str,
        environment: Mapping[str, str] | None = None,
        has_worked: Callable[[], bool] = lambda: True,
    ) -> str:
        """Run a command that starts a node, wait until that is at work and has worked, end it in order; the command
        ends with 0."""
        process = self.start(command, environment)
        try:
            until(
                lambda: (
                    process.poll() is not None
                    or (self.status().get("state") in ("training", "waiting", "serving") and has_worked())
                ),
                lambda: f"the node is not at work: {command}\n{self.status().get('summary')}\n{self.log}",
            )
            assert process.poll() is None, f"it has ended with {process.returncode}: {command}\n{self.log}"
            os.kill(self.node().pid, signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0, f"exit code {process.returncode}: {command}\n{self.log}"
        finally:
            self._kill(process)
        return self.log

    def follow(self, command: str) -> str:
        """Run a command that ends with Ctrl-C only, until it has printed something."""
        process = self.start(f"exec {command}")
        try:
            until(
                lambda: process.poll() is not None or "\n" in self.log,
                lambda: f"it prints nothing: {command}\n{self.log}",
            )
            assert process.poll() is None, f"it has ended with {process.returncode}: {command}\n{self.log}"
            os.killpg(process.pid, signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0, f"exit code {process.returncode}: {command}\n{self.log}"
        finally:
            self._kill(process)
        return self.log

    def take(self, name: str, other: Home) -> None:
        """Bring a file here from the same place of another machine."""
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(other.folder / name, self.folder / name)

    def end(self) -> None:
        """Kill the nodes that still run."""
        for node in self.nodes().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(node.pid), signal.SIGKILL)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
