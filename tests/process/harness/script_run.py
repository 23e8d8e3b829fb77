"""`p2pnode run` around a script, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p2pnode.client import NodeClient, find
from p2pnode.errors import UserError
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import start_p2pnode
from tests.process.harness.swarm_world import ANSWER_S

#: Importing torch on a loaded machine is most of every wait here.
START_S = 180.0


class Run:
    """One `p2pnode run` process around a script, its files in a folder of its own."""

    def __init__(self, folder: Path, script: str, *flags: str, seed: int = 0, launcher: Sequence[str] = ()) -> None:
        folder.mkdir()
        self.state_dir = folder / "state"
        self.result = folder / "result.json"
        (folder / "train.py").write_text(script)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = start_p2pnode(
                [
                    *("run", "--port", "0", "--status-port", "0"),
                    *("--state-dir", str(self.state_dir), "--set", "training.threads=1", *flags),
                    *("--", sys.executable, *launcher, "train.py", str(self.result), str(seed)),
                ],
                cwd=folder,
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=err,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def error(self) -> str:
        return self._err.read_text()

    def status(self) -> dict[str, Any]:
        """Its status, empty while the API does not answer."""
        found = find(self.state_dir)
        try:
            if found is not None and found.pid == self.process.pid:
                return NodeClient(found.address, timeout_s=ANSWER_S).status()
        except UserError:
            pass
        return {}

    def wait(self) -> int:
        """Its exit code. Raises `AssertionError` with its log when it does not end."""
        try:
            return self.process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.error}") from None

    def end(self) -> None:
        """Kill what is left of its session, trainer included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
