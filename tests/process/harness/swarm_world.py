"""Daemon processes with settings of a test, on the loopback or in a network namespace.

Ports are free ones, and a state directory may be used again. Every wait has a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import Forked, start_p2pnode

#: The documented detection bound.
DETECTION_BOUND_S = 10.0
#: A loaded machine imports torch slowly; the figure for a quiet one is a benchmark's.
START_S = 180.0
#: How long a daemon that runs may take to answer a request: on a loaded machine it answers late.
ANSWER_S = 60.0
POLL_INTERVAL_S = 0.05
#: Steps of a quarter of a second, asleep: enough of them to see a gap, and the cores are left to the other tests.
SHORT_STEPS: dict[str, Any] = {"training.local_steps": 1, "training.eval_steps": 0}
TRAINER = (sys.executable, "-m", "tests.process.harness.plain_trainer", "0.25")


class StartedNode:
    """A node that a test has started in a session of its own, and what can be asked of it."""

    answer_s = ANSWER_S

    def __init__(self, process: Forked | subprocess.Popen[Any], state_dir: Path, log_file: Path) -> None:
        self.process, self.state_dir, self.log_file = process, state_dir, log_file

    def client(self) -> NodeClient | None:
        """A client of its API, as soon as `status.json` has the address."""
        found = find(self.state_dir)
        return None if found is None or not found.alive else NodeClient.of(found, timeout_s=self.answer_s)

    def post(self, path: str) -> None:
        """Ask it to do something; raises `UserError` where it cannot be asked."""
        client = self.client()
        assert client is not None, f"{self.state_dir}: no node runs"
        client.post(path)

    def status(self) -> dict[str, Any]:
        """Empty while it cannot be asked."""
        client = self.client()
        try:
            return {} if client is None else client.status()
        except UserError:
            return {}

    @property
    def step(self) -> int:
        return int(self.status().get("step", -1))

    @property
    def state(self) -> str:
        return str(self.status().get("state", ""))

    @property
    def trains(self) -> bool:
        return self.state in ("training", "waiting")

    @property
    def address(self) -> str:
        return str((self.status().get("node") or {}).get("address", ""))

    def output(self) -> str:
        """What it has written."""
        return self.log_file.read_text(errors="replace")

    def wait(self) -> int:
        """Its exit code. Raises `AssertionError` with its log when it does not end."""
        try:
            return self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.output()}") from None

    def kill(self) -> None:
        """SIGKILL to the node and its trainer, at once; idempotent."""
        self.end_without_waiting()
        self.process.wait()

    def end_without_waiting(self) -> None:
        """The first half of `kill`: where many are to end, an interrupt between them leaves none."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None


class ProcessNode(StartedNode):
    """`p2pnode start` on a state directory, or `p2pnode run` of a training `script`. `settings` are dotted keys;
    `arguments` are further ones of the command, `given` is its input and `stdout` a descriptor instead of its log.
    `prefix` is put before the command; `program` is what Python runs, if not `p2pnode`. With `forks`, where nothing
    about the start itself is tested, daemon and script are forks of a process that has imported the daemon; of one that
    has imported torch, too, if the script `needs_torch`."""

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: dict[str, Any],
        *,
        bootstrap: str = "",
        prefix: Iterable[str] = (),
        program: str = "p2pnode",
        script: Sequence[str] = (),
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        given: str = "",
        stdout: int | None = None,
        forks: bool = False,
        needs_torch: bool = False,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.name = name
        self.state_dir = folder / name
        self.log_file = folder / f"{name}.log"
        self.signalled = False
        self.answer_s = answer_s
        values = {"node.host": "127.0.0.1", "node.port": 0, "status.port": 0, "training.threads": 1, **settings}
        command = ["run" if script else "start", "--state-dir", str(self.state_dir), *arguments]
        command += ["--bootstrap", bootstrap] if bootstrap else []
        for key, value in values.items():
            command += ["--set", f"{key}={_toml(value)}"]
        command += ["--", *script] if script else []
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        env = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
        with self.log_file.open("ab") as log, tempfile.TemporaryFile("w+") as stdin:
            stdin.write(given)
            stdin.seek(0)
            output = log if stdout is None else stdout
            if forks:
                self.process = start_p2pnode(
                    command, cwd=folder, env=env, stdin=stdin, stdout=output, stderr=output, have_torch=needs_torch
                )
            else:
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, "-m", program, *command],
                    cwd=folder,
                    env=env,
                    stdin=stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def output(self) -> str:
        """What this process has written."""
        with self.log_file.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """Its events of one name, from its log of JSON lines."""
        return [entry for entry in whole_entries(self.output()) if entry.get("event") == name]

    # -- signals ------------------------------------------------------------------------------------------------

    def pid(self) -> int:
        """Of the daemon itself: behind a prefix it is another process than the one started here."""
        found = find(self.state_dir)
        return self.process.pid if found is None else found.pid

    def terminate(self) -> None:
        """Ask it to leave."""
        os.kill(self.pid(), signal.SIGTERM)

    def stop(self) -> None:
        os.kill(self.pid(), signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid(), signal.SIGCONT)


def kill_all(nodes: Iterable[StartedNode]) -> None:
    """End them all, also where this is interrupted."""
    nodes = list(nodes)
    for node in nodes:
        node.end_without_waiting()
    for node in nodes:
        node.process.wait()


def whole_entries(log: str) -> list[dict[str, Any]]:
    """The JSON lines of a log that may be written to meanwhile: its last line may be torn."""
    lines = log.rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def _toml(value: Any) -> str:
    """A value as `--set` reads it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def until(condition: Callable[[], bool], within_s: float, what: str, nodes: Sequence[StartedNode] = ()) -> float:
    """Seconds until the condition held. Raises `AssertionError` with `what`, and the last lines of the nodes' logs."""
    began = time.monotonic()
    while not condition():
        failed = any(node.ended and node.process.returncode > 0 for node in nodes)
        if failed or time.monotonic() - began > within_s:
            said = [f"{node.state_dir}: {node.status().get('summary')}\n{node.output()[-1500:]}" for node in nodes]
            raise AssertionError(f"not within {within_s} s: {what}\n" + "\n".join(said))
        time.sleep(POLL_INTERVAL_S)
    return time.monotonic() - began
