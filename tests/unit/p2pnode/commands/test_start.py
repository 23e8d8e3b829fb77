"""`p2pnode start` and `p2pnode run`: how their options reach the daemon."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from p2pnode import cli
from p2pnode.commands.start import _without_invite
from p2pnode.config.settings import Config
from tests.harness.repository import ROOT


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node.toml of the repository and no variable of the caller reaches these tests."""
    monkeypatch.chdir(tmp_path)
    for name in ("P2PNODE_NODE__PORT",):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("P2PNODE_STATUS__PORT", "1")
    monkeypatch.setenv("P2PNODE_NODE__STATE_DIR", str(tmp_path / "state"))


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_start_hands_the_configuration_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags become settings, the command after -- is the user's, and the daemon's code is ours."""
    seen: list[tuple[Config, list[str] | None]] = []

    class Daemon:
        @staticmethod
        def run(config: Config, *, command: list[str] | None = None) -> int:
            seen.append((config, command))
            return 5

    monkeypatch.setitem(sys.modules, "p2pnode.daemon", Daemon)  # type: ignore[arg-type]
    monkeypatch.setattr("p2pnode.daemon", Daemon, raising=False)

    flags = ["--port", "7", "--status-port", "8", "--run", "2024", "-b", "a:1", "-b", "[::1]:2", "--state-dir", "true"]
    assert run("start", *flags, "--task", "mnist", "--set", "training.seed=3", "--debug") == 5
    assert run("run", "--port", "9", "--", sys.executable, "train.py", "--port", "1") == 5
    assert run("run", sys.executable, "train.py", "--debug") == 5

    config = seen[0][0]
    assert (config.node.port, config.status.port, config.swarm.run) == (7, 8, "2024")
    assert (config.swarm.bootstrap, config.node.state_dir) == (["a:1", "[::1]:2"], "true")
    assert (config.training.task, config.training.seed, config.log.level) == ("mnist", 3, "debug")
    assert seen[0][1] is None
    assert seen[1][0].node.port == 9
    assert seen[1][1] == [sys.executable, "train.py", "--port", "1"]
    assert seen[2][1] == [sys.executable, "train.py", "--debug"]


def test_a_daemon_runs_with_its_garbage_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection is off while the daemon's modules are imported, and on before it runs."""
    from p2pnode import daemon
    from p2pnode.commands import start

    collecting: list[bool] = []
    monkeypatch.setattr(daemon, "run", lambda _config, command: collecting.append(gc.isenabled()) or 0)

    assert start._daemon(Config(), None) == 0
    assert collecting == [True]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["start", "--invite", "LINE", "--port", "1"], ["start", "--port", "1"]),
        (["start", "--invite=LINE", "--port", "1"], ["start", "--port", "1"]),
        (["run", "--port", "1"], ["run", "--port", "1"]),
    ],
)
def test_the_invitation_is_taken_off_the_command_line(before: list[str], after: list[str]) -> None:
    """The option and its value are removed, in both of its forms; other arguments stay."""
    assert _without_invite(before) == after
