"""`p2pnode start` and `p2pnode run`: how their options reach the daemon."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode import cli
from p2pnode.commands.start import _without_invite
from p2pnode.config.directory_record import RECORD_FILE, DirectoryRecord, Given, encode
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode
from p2pnode.local_run import LocalStart
from p2pnode.overlay.sealing.invitation import Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey

pytestmark = pytest.mark.usefixtures("own_folder")


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_start_hands_the_configuration_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags become settings, the command after -- is the user's, and the daemon's code is ours."""
    seen: list[tuple[Config, list[str] | None]] = []

    class Daemon:
        @staticmethod
        def run(config: Config, *, command: list[str] | None = None, **_request: Any) -> int:
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


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        (("start",), True),
        (("start", "--set", "training.device=cpu"), False),
        (("run", sys.executable, "train.py"), False),
        (("start", "--local", "2"), False),
    ],
)
def test_a_torch_without_cuda_beside_a_gpu_is_warned_of_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], warns: bool
) -> None:
    """Unless the CPU is wanted; a script may run in another Python, and each of several nodes says it by itself."""
    daemon = SimpleNamespace(run=lambda *_, **__: 0)
    monkeypatch.setitem(sys.modules, "p2pnode.daemon", daemon)
    monkeypatch.setattr("p2pnode.daemon", daemon, raising=False)
    monkeypatch.setattr("p2pnode.local_run.run_local", lambda _: 0)
    monkeypatch.setattr("p2pnode.commands.start.torch_cuda", lambda: "")
    monkeypatch.setattr("p2pnode.training.devices.gpus.has_gpu", lambda: True)

    assert run(*arguments) == 0

    assert ("PyTorch is built without CUDA" in capsys.readouterr().err) is warns


def test_servers_reach_the_start_of_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the number of nodes and the program."""
    seen: list[LocalStart] = []
    monkeypatch.setattr("p2pnode.local_run.run_local", lambda start: seen.append(start) or 0)

    assert run("run", "--local", "3", "--servers", "1", "--", sys.executable, "script.py") == 0
    assert (seen[0].nodes, seen[0].servers, seen[0].command) == (3, 1, [sys.executable, "script.py"])


def test_a_daemon_runs_with_its_garbage_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage collection is off while the daemon's modules are imported, and on before it runs."""
    from p2pnode import daemon
    from p2pnode.commands import start

    collecting: list[bool] = []
    monkeypatch.setattr(daemon, "run", lambda _config, **_request: collecting.append(gc.isenabled()) or 0)

    assert start._daemon(Config(), command=None) == 0
    assert collecting == [True]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["start", "--invite", "LINE", "--port", "1"], ["start", "--invite", "-", "--port", "1"]),
        (["start", "--invite=LINE", "--port", "1"], ["start", "--invite=-", "--port", "1"]),
        (["run", "--port", "1"], ["run", "--port", "1"]),
    ],
)
def test_the_invitation_is_taken_off_the_command_line(before: list[str], after: list[str]) -> None:
    """Its line is replaced by standard input, in both forms of the option; other arguments stay."""
    assert _without_invite(before) == after


class Recorded:
    """Stands in for the daemon, and keeps what it was asked to run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = Config()
        self.request: dict[str, Any] = {}
        monkeypatch.setitem(sys.modules, "p2pnode.daemon", self)  # type: ignore[arg-type]
        monkeypatch.setattr("p2pnode.daemon", self, raising=False)

    def run(self, config: Config, **request: Any) -> int:
        self.config, self.request = config, request
        return 0


INVITATION = Invitation.of("digits", ["192.0.2.10:8468"], KeyRing((SwarmKey(bytes(32)),)))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with one state directory per run; no variable names another."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("P2PNODE_NODE__STATE_DIR")
    return tmp_path / ".local" / "state" / "p2pnode"


def test_an_invitation_becomes_settings_and_is_written_by_the_daemon(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run chooses the state directory, its addresses are the bootstraps; the command itself writes nothing."""
    daemon = Recorded(monkeypatch)
    (tmp_path / "invitation").write_text(INVITATION.line)

    assert run("start", "--invite", "invitation", "--set", "node.host=0.0.0.0") == 0

    swarm = daemon.config.swarm
    assert (swarm.run, swarm.bootstrap) == ("digits", ["192.0.2.10:8468"])
    assert (daemon.config.state_folder, swarm.key_file) == (home / "digits", str(home / "digits" / "swarm.key"))
    assert daemon.request["invitation"] == INVITATION
    assert daemon.request["given"]["node.host"] == Given("0.0.0.0", on_command_line=True)
    assert not home.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--run", "text", "--set", "node.host=0.0.0.0"], ExitCode.MISMATCH, "the invitation is to run"),
        ([], ExitCode.CONFIGURATION, "listens on this machine only, and the swarm is at 192.0.2.10:8468"),
    ],
    ids=["another run", "on the loopback"],
)
def test_an_invitation_that_does_not_fit_is_refused(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    """Nothing is started and nothing is written."""
    daemon = Recorded(monkeypatch)
    (tmp_path / "invitation").write_text(INVITATION.line)

    assert run("start", "--invite", "invitation", *arguments) == code
    assert message in capsys.readouterr().err
    assert daemon.request == {}
    assert not home.exists()


def test_a_plain_start_continues_with_what_was_told(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record of the only directory gives run and settings, over defaults and below everything else; another run
    has its own directory and none of them."""
    daemon = Recorded(monkeypatch)
    settings = {"node.port": 9000, "training.task": "mnist", "training.options": {"part": 2}, "training.seed": 5}
    (home / "digits").mkdir(parents=True)
    (home / "digits" / RECORD_FILE).write_bytes(encode(DirectoryRecord(run="digits", settings=settings)))
    monkeypatch.setenv("P2PNODE_TRAINING__SEED", "6")

    assert run("start", "--task", "text") == 0
    config = daemon.config
    assert (config.swarm.run, config.node.port, config.state_folder) == ("digits", 9000, home / "digits")
    assert (config.training.task, config.training.options, config.training.seed) == ("text", {"part": 2}, 6)

    assert run("config", "show", "--origin") == 0
    assert f"port = 9000  # {home / 'digits' / RECORD_FILE}" in capsys.readouterr().out

    assert run("start", "--run", "other") == 0
    assert (daemon.config.node.port, daemon.config.state_folder) == (Config().node.port, home / "other")
