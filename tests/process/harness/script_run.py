"""`p2pnode run` around a script, as a user starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import start_p2pnode
from tests.process.harness.swarm_world import StartedNode


class Run(StartedNode):
    """One `p2pnode run` process around a script, its files in a folder of its own."""

    def __init__(self, folder: Path, script: str, *flags: str, seed: int = 0, launcher: Sequence[str] = ()) -> None:
        folder.mkdir()
        self.result = folder / "result.json"
        (folder / "train.py").write_text(script)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
        self._out = folder / "out"
        with self._out.open("wb") as out, (folder / "err").open("wb") as err:
            process = start_p2pnode(
                [
                    *("run", "--port", "0", "--status-port", "0"),
                    *("--state-dir", str(folder / "state"), "--set", "training.threads=1", *flags),
                    *("--", sys.executable, *launcher, "train.py", str(self.result), str(seed)),
                ],
                cwd=folder,
                env=environment | {"PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=err,
            )
        super().__init__(process, folder / "state", folder / "err")

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def error(self) -> str:
        return self.output()
