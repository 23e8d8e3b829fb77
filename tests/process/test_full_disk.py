"""A state directory on a full disk, at the start and in the middle of training. Needs root, to mount a small disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.harness.swarm_world import SHORT_STEPS, START_S, TRAINER, ProcessNode, until
from tests.process.test_bad_input import start

#: Enough for a node with its checkpoints of the digits' small network, and quickly filled.
SIZE_BYTES = 8 * 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that is a disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write until nothing more fits; returns the file whose removal frees the space."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return ballast


def has_checkpoint(folder: Path) -> bool:
    """Whether any is whole. A folder that is looked into may be one that fails to be written, and go."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            return any(folder.rglob("state.json"))
    return False


def test_a_start_on_a_full_disk_says_so(small_disk: Path) -> None:
    """One sentence that names the directory and the reason, exit code 7, and no half-written identity."""
    fill(small_disk)
    state = small_disk / "state"

    refused = start(small_disk, "--state-dir", str(state))

    assert refused.code == 7
    assert str(state) in refused.error
    assert "No space left on device" in refused.error
    assert "free space" in refused.hint
    assert not list(state.glob("*.tmp"))
    assert not (state / "identity.key").exists()


@pytest.mark.timeout(600)
@pytest.mark.promise(20)
def test_a_disk_that_fills_up_stops_no_training(small_disk: Path) -> None:
    """Checkpoints fail with an event that names the reason, steps continue, the last whole one stays; with space they
    succeed."""
    settings = {**SHORT_STEPS, "training.checkpoint_s": 2}
    daemon = ProcessNode(small_disk, "node", settings, script=TRAINER, forks=True)
    try:
        until(lambda: daemon.trains, START_S, "the node trains")
        client = daemon.client()
        assert client is not None

        def events(name: str) -> list[str]:
            return [str(event["fields"]) for event in client.events()["events"] if event["event"] == name]

        until(lambda: bool(events("checkpoint_written")), 90, "a checkpoint")
        ballast = fill(small_disk)
        until(lambda: bool(events("checkpoint_not_written")), 90, "a checkpoint that fails")
        assert "No space left" in events("checkpoint_not_written")[0]
        assert has_checkpoint(daemon.state_dir), "the earlier checkpoint has gone"
        reached = daemon.step
        until(lambda: daemon.step > reached, 90, "steps on a full disk")
        written = len(events("checkpoint_written"))
        ballast.unlink()
        until(lambda: len(events("checkpoint_written")) > written, 90, "a checkpoint once there is room")
    finally:
        daemon.kill()
