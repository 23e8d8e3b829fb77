"""`start --background`, `logs` and `stop` with a real node, which outlives the command and its terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from p2pnode.client import find
from p2pnode.directory_lock import is_locked
from p2pnode.errors import ExitCode
from p2pnode.log_file import LOG_FILE
from p2pnode.overlay.sealing.swarm_key import PREFIX, SwarmKey
from tests.harness.project.repository import ROOT

TRAINER = [sys.executable, "-m", "tests.process.harness.plain_trainer"]


def p2pnode(folder: Path, command: str, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("P2PNODE_")}
    environment |= {"HOME": str(folder.parent), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "p2pnode", command, "--state-dir", str(folder), *arguments],
        cwd=folder.parent,
        env=environment,
        input=given,
        capture_output=True,
        timeout=180,
        check=False,
    )


def test_a_node_in_the_background_trains_is_read_and_leaves(tmp_path: Path) -> None:
    """The command returns when it trains; a second one is refused; its key came through standard input and is in no
    list of processes; it leaves cleanly, and its log tells why a start with a wrong program failed."""
    folder = tmp_path / "state"
    secret = SwarmKey(bytes(range(32))).text
    settings = ["--set", "node.port=0", "--set", "status.port=0", "--set", "swarm.key_file=-"]
    began = p2pnode(folder, "run", "--background", *settings, "--", *TRAINER, "0.02", given=secret.encode())
    try:
        assert began.returncode == 0, began.stderr.decode()
        node = find(folder)
        assert node is not None
        assert f"process {node.pid}" in began.stdout.decode()
        line = Path(f"/proc/{node.pid}/cmdline")
        assert not line.exists() or PREFIX.encode() not in line.read_bytes()
        assert os.getsid(node.pid) == node.pid
        again = p2pnode(folder, "run", "--background", *settings, "--", *TRAINER, "0.02", given=secret.encode())
        assert again.returncode == ExitCode.STATE_DIRECTORY
        assert f"process {node.pid}".encode() in again.stderr
    finally:
        ended = p2pnode(folder, "leave", "--json")
    assert ended.returncode == 0, ended.stderr.decode()
    (one,) = json.loads(ended.stdout)["ended"]
    assert (one["pid"], one["clean"]) == (node.pid, True)
    assert not is_locked(folder)

    shown = p2pnode(folder, "logs", "--json")
    events = [json.loads(entry)["event"] for entry in shown.stdout.splitlines()]
    assert [name for name in events if name in ("swarm_closed", "training_started", "leaving")] == [
        "swarm_closed",
        "training_started",
        "leaving",
    ]
    failed = p2pnode(folder, "run", "--background", *settings, "--", *TRAINER, "x", given=secret.encode())
    assert failed.returncode == ExitCode.TRAINER
    assert b"ValueError" in failed.stderr
    assert secret.encode() not in (folder / LOG_FILE).read_bytes()
