"""Closed swarms of real daemons: joining by invitation, rotating the key, and keys that appear nowhere."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2pnode.errors import ExitCode
from p2pnode.overlay.sealing.invitation import Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing
from tests.harness.project.repository import ROOT
from tests.process.harness.forked_python import run_p2pnode
from tests.process.harness.swarm_world import SHORT_STEPS, START_S, ProcessNode, kill_all, until


class Daemon(ProcessNode):
    """A daemon with arguments, input and environment of a test."""

    def __init__(self, folder: Path, name: str, *arguments: str, given: str = "", **environment: str) -> None:
        settings = {**SHORT_STEPS, "training.checkpoint_s": 0}
        super().__init__(folder, name, settings, arguments=arguments, environment=environment, given=given)

    @property
    def keys(self) -> list[str]:
        return list(self.status().get("swarm", {}).get("keys", []))

    @property
    def known(self) -> int:
        client = self.client()
        return len(client.peers()) if client else 0


def p2pnode(folder: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command and wait for its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return run_p2pnode(arguments, cwd=folder, env=environment, given=given, timeout=60)


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    started: list[Daemon] = []

    def start(name: str, *arguments: str, given: str = "", **environment: str) -> Daemon:
        started.append(Daemon(tmp_path, name, *arguments, given=given, **environment))
        return started[-1]

    yield start
    kill_all(started)
    for daemon in started:
        print(f"--- {daemon.name}, its end:\n{daemon.output()[-1500:]}")


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.promise(8)
def test_a_closed_swarm_by_invitation(daemons: Callable[..., Daemon], tmp_path: Path) -> None:
    """Nodes join by an invitation on the command line, one on standard input, and a key in the environment.

    A node without the key does not join. The swarm rotates its key without losing a member. No key appears in a log,
    the status or a command line.
    """
    made = p2pnode(tmp_path, "key", "new", "--state-dir", "first")
    assert made.returncode == 0, made.stderr
    key_file = tmp_path / "first" / "swarm.key"
    assert key_file.stat().st_mode & 0o777 == 0o600
    old = KeyRing.parse(key_file.read_text())
    first = daemons("first", "--run", "closed")
    until(lambda: first.trains, START_S, "the founder trains")
    refused = p2pnode(tmp_path, "key", "invite", "--state-dir", "first")
    assert (refused.returncode, refused.stdout) == (4, ""), "the founder listens on the loopback alone"
    assert "node.host=0.0.0.0" in refused.stderr
    invited = p2pnode(tmp_path, "key", "invite", "--state-dir", "first", "--address", first.address)
    line = invited.stdout.strip()
    assert Invitation.parse(line).addresses == [first.address]
    assert Invitation.parse(line).run == "closed", "that of the running node, which the command did not name"

    second = daemons("second", "--invite", line)
    third = daemons("third", "--invite", "-", given=line)
    fourth = daemons("fourth", "--run", "closed", "--bootstrap", first.address, P2PNODE_SWARM_KEY=old.primary.text)
    outsider = daemons("outsider", "--run", "closed", "--bootstrap", first.address)
    members = [first, second, third, fourth]
    until(lambda: all(node.trains for node in members), START_S, "all four train")
    until(lambda: all(node.known == 3 for node in members), 90, "all know each other")
    assert all(node.keys == [old.primary.fingerprint] for node in members)
    until(lambda: "a swarm with a key" in outsider.output(), START_S, "the outsider logs the likely cause")
    assert outsider.state == "joining"
    outsider.kill()
    for node in members:
        shown = Path(f"/proc/{node.process.pid}/cmdline").read_bytes()
        assert line.encode() not in shown

    fourth.kill()  # its key is in no file, so it cannot take part in the rotation
    members.remove(fourth)
    until(lambda: all(node.known == 2 for node in members), 90, "the fourth is removed")
    _rotate(tmp_path, members)
    new = KeyRing.parse(key_file.read_text())
    until(lambda: all(node.keys == new.fingerprints for node in members), 90, "all use the new key alone")
    assert old.primary not in set(new)
    steps = [node.step for node in members]
    until(lambda: all(node.step > step for node, step in zip(members, steps, strict=True)), 90, "all continue to train")
    assert all(node.known == 2 for node in members)
    for node in members:
        assert '"peer_dead"' not in _after(node, "swarm_keys_changed"), "a member was lost"

    # It joins again from its state directory alone, at once. The others still consider its former process alive, and
    # use their sessions with it.
    third.kill()
    again = daemons("third")
    until(lambda: again.trains, START_S, "the third is back")
    secrets = [line, *(text for key in (*old, *new) for text in (key.text, key.secret.hex()))]
    for log in tmp_path.glob("*.log"):
        assert not [secret for secret in secrets if secret in log.read_text()], log
    for node in (first, second, again):
        client = node.client()
        assert client is not None
        shown_text = str(client.status()) + str(client.peers()) + str(client.events())
        assert not [secret for secret in secrets if secret in shown_text]


def _rotate(folder: Path, members: list[Daemon]) -> None:
    """Prepare on the first node, copy its invitation to the others; then switch and finish on all."""
    done = p2pnode(folder, "key", "rotate", "prepare", "--state-dir", "first")
    assert done.returncode == 0, done.stderr
    command = ["key", "invite", "--state-dir", "first", "--address", members[0].address]
    both = p2pnode(folder, *command).stdout
    for node in members[1:]:
        joined = p2pnode(folder, "key", "join", "-", "--state-dir", str(node.state_dir), given=both)
        assert joined.returncode == 0, joined.stderr
    for step, valid in (("switch", 2), ("finish", 1)):
        until(lambda: all(len(node.keys) == 2 for node in members), 90, f"all are ready to {step}")
        before = members[0].keys
        for node in members:
            done = p2pnode(folder, "key", "rotate", step, "--state-dir", str(node.state_dir))
            assert done.returncode == 0, done.stderr
        until(
            lambda last=before, count=valid: all(len(node.keys) == count and node.keys != last for node in members),
            90,
            f"all have done {step}",
        )


def _after(node: Daemon, event: str) -> str:
    return node.output().partition(event)[2]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("p2pkey1-short\n", 0o600, "a part is missing"),
        (KeyRing.parse, 0o644, "open to others"),
        (None, 0o600, "No such file"),
    ],
    ids=["torn", "open to others", "missing"],
)
def test_key_files_that_cannot_be_used(tmp_path: Path, content: object, mode: int, message: str) -> None:
    """The start ends with exit code 4 and an error that does not contain the file's contents."""
    file = tmp_path / "swarm.key"
    if callable(content):
        made = p2pnode(tmp_path, "key", "new", str(file))
        assert made.returncode == 0
        file.chmod(mode)
    elif isinstance(content, str):
        file.write_text(content)
        file.chmod(mode)
    started = p2pnode(tmp_path, "start", "--state-dir", "s", "--set", f"swarm.key_file={file}")

    assert started.returncode == 4
    assert message in started.stderr
    assert "p2pkey1-" not in started.stderr.replace("begins with p2pkey1-", "")


@pytest.mark.parametrize("damage", ["torn", "foreign"])
def test_invitations_that_cannot_be_used(tmp_path: Path, damage: str) -> None:
    """A damaged line and other text end with exit code 4 and different errors; nothing is written."""
    p2pnode(tmp_path, "key", "new", "--state-dir", "a")
    line = p2pnode(
        tmp_path, "key", "invite", "--state-dir", "a", "--run", "r", "--address", "10.0.0.5:8468"
    ).stdout.strip()
    given, message = (line[:-5], "torn") if damage == "torn" else ("https://example.org", "begins with p2pnode1:")
    joined = p2pnode(tmp_path, "start", "--state-dir", "b", "--invite", given)

    assert joined.returncode == 4
    assert message in joined.stderr
    assert line[20:60] not in joined.stderr
    assert not (tmp_path / "b").exists()


def test_an_invitation_in_a_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    """`key invite --out` writes the line with mode 0600, also over an open file, and does not print it.

    A file that cannot be written is an error.
    """
    p2pnode(tmp_path, "key", "new", "--state-dir", "a")
    command = ["key", "invite", "--state-dir", "a", "--run", "r", "--address", "10.0.0.5:8468"]
    line = p2pnode(tmp_path, *command).stdout
    file = tmp_path / "invitation.txt"
    file.touch(mode=0o644)
    written = p2pnode(tmp_path, *command, "--out", "invitation.txt")

    assert written.returncode == 0
    assert file.read_text() == line
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert line.strip() not in written.stdout + written.stderr
    assert p2pnode(tmp_path, "key", "join", "invitation.txt", "--state-dir", "b").returncode == 0

    (tmp_path / "folder").mkdir()
    failed = p2pnode(tmp_path, *command, "--out", "folder")
    assert failed.returncode == ExitCode.STATE_DIRECTORY
    assert failed.stderr.startswith("error: cannot write the invitation to folder")
