"""`p2pnode key`: each command on files, without a running node."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from p2pnode import cli
from p2pnode.config.directory_record import RECORD_FILE, DirectoryRecord, encode
from p2pnode.config.toml import template
from p2pnode.errors import ExitCode
from p2pnode.keys.key_files import read_key_file
from p2pnode.overlay.sealing.invitation import Invitation
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("P2PNODE_SWARM_KEY", raising=False)
    return tmp_path


def key(*arguments: str) -> int:
    return cli.main(["key", *arguments])


def test_new_makes_a_private_file_and_replaces_none(folder: Path, capsys: Output) -> None:
    """The file has mode 0600; a second key needs --force; the key is not printed."""
    path = folder / "a" / "swarm.key"
    path.parent.mkdir()

    assert key("new", "--state-dir", "a") == 0
    first = read_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key("new", "--state-dir", "a") == ExitCode.STATE_DIRECTORY
    assert read_key_file(path) == first
    assert key("new", "--state-dir", "a", "--force") == 0
    assert read_key_file(path) != first
    shown = capsys.readouterr()
    assert first.primary.fingerprint in shown.out
    assert first.primary.text not in shown.out + shown.err


def test_show_prints_fingerprints_unless_asked_to_reveal(folder: Path, capsys: Output) -> None:
    """Text and JSON have the fingerprint, and only `--reveal` prints the key."""
    assert key("new", str(folder / "k")) == 0
    keys = read_key_file(folder / "k")
    setting = ("--set", f"swarm.key_file={folder / 'k'}")
    capsys.readouterr()

    assert key("show", *setting) == 0
    assert keys.primary.text not in (text := capsys.readouterr().out)
    assert keys.primary.fingerprint in text
    assert key("show", *setting, "--json") == 0
    assert json.loads(capsys.readouterr().out)["keys"] == keys.fingerprints
    assert key("show", *setting, "--reveal") == 0
    assert keys.primary.text in capsys.readouterr().out


def test_an_invitation_is_accepted_by_another_directory(folder: Path, capsys: Output) -> None:
    """`invite` prints a line that `join` keeps; a second `join` changes nothing."""
    (folder / "a").mkdir()
    assert key("new", "--state-dir", "a") == 0
    capsys.readouterr()
    assert key("invite", "--state-dir", "a", "--address", "10.0.0.5:8468", "--set", "swarm.run=digits") == 0
    line = capsys.readouterr().out.strip()
    assert Invitation.parse(line).addresses == ["10.0.0.5:8468"]

    assert key("join", line, "--state-dir", "b") == 0
    joined = capsys.readouterr().out
    assert "joins run digits" in joined
    assert joined.endswith("p2pnode start --state-dir b\n")
    assert key("join", line, "--state-dir", "b") == 0
    assert "joined already" in capsys.readouterr().out
    assert read_key_file(folder / "b" / "swarm.key") == read_key_file(folder / "a" / "swarm.key")


@pytest.mark.parametrize(
    ("addresses", "message"),
    [
        ([], "needs the address of a node"),
        (["no port"], "--address"),
        (["0.0.0.0:8468"], "nobody can dial 0.0.0.0"),
        (["[::]:8468"], "nobody can dial ::"),
        ([f"10.0.0.{number}:1" for number in range(9)], "an invitation holds 8 addresses, not 9"),
    ],
    ids=["none", "invalid", "every interface", "every interface, IPv6", "too many"],
)
def test_addresses_of_an_invitation(folder: Path, capsys: Output, addresses: list[str], message: str) -> None:
    """Without a running node an invitation needs valid addresses, and at most eight."""
    (folder / "a").mkdir()
    assert key("new", "--state-dir", "a") == 0
    flags = [flag for address in addresses for flag in ("--address", address)]

    assert key("invite", "--state-dir", "a", "--run", "digits", *flags) != 0
    assert message in capsys.readouterr().err


def test_an_invitation_with_loopback_addresses_warns(folder: Path, capsys: Output) -> None:
    """A loopback address that was asked for is put into the line, with a warning."""
    (folder / "a").mkdir()
    assert key("new", "--state-dir", "a") == 0

    assert key("invite", "--state-dir", "a", "--run", "digits", "--address", "127.0.0.1:8468") == 0
    assert "can be dialled from this machine only" in capsys.readouterr().err


def test_a_rotation_in_three_steps(folder: Path, capsys: Output) -> None:
    """Prepare, switch and finish replace the key; any other order is an error and changes nothing."""
    (folder / "a").mkdir()
    path = folder / "a" / "swarm.key"
    assert key("new", "--state-dir", "a") == 0
    (old,) = read_key_file(path)

    assert key("rotate", "switch", "--state-dir", "a") == ExitCode.USAGE
    assert "prepare the rotation first" in capsys.readouterr().err
    assert key("rotate", "prepare", "--state-dir", "a") == 0
    primary, new = read_key_file(path)
    assert primary == old
    assert key("rotate", "switch", "--state-dir", "a") == 0
    assert list(read_key_file(path)) == [new, old]
    assert key("rotate", "finish", "--state-dir", "a") == 0
    assert list(read_key_file(path)) == [new]


def test_a_folder_with_the_default_configuration_changes_no_key(folder: Path, capsys: Output) -> None:
    """Beside a node.toml to start from, as in a clone of the repository, the key of the state directory is
    used, and a node may listen beyond the loopback with it."""
    (folder / "node.toml").write_text(template(), encoding="utf-8")

    assert key("new", "--state-dir", "a") == 0
    assert key("invite", "--state-dir", "a", "--run", "digits", "--address", "192.0.2.10:8468") == 0
    assert Invitation.parse(capsys.readouterr().out.splitlines()[-1]).addresses == ["192.0.2.10:8468"]
    assert cli.main(["config", "check", "--set", "node.state_dir=a", "--set", "node.host=0.0.0.0"]) == 0


class Running:
    """Stands in for the client of a running node."""

    def __init__(self, address: str, *peers: str) -> None:
        self.answer = {"schema": 1, "run": "digits", "node": {"address": address}}
        self.known = [{"address": peer, "eligible": True} for peer in peers]

    def status(self) -> dict[str, object]:
        return self.answer

    def peers(self) -> list[dict[str, object]]:
        return self.known


@pytest.mark.parametrize(
    ("address", "peers", "expected"),
    [
        ("10.0.0.5:8468", ("10.0.0.6:1", "127.0.0.1:2"), ["10.0.0.5:8468", "10.0.0.6:1"]),
        ("0.0.0.0:8468", (), ["10.0.0.9:8468"]),
        ("127.0.0.1:8468", ("10.0.0.6:1",), ["10.0.0.6:1"]),
        ("127.0.0.1:8468", ("127.0.0.1:2",), []),
    ],
    ids=["as it is", "every interface", "loopback beside others", "loopback only"],
)
def test_an_invitation_names_what_others_can_dial(
    folder: Path,
    capsys: Output,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
    peers: tuple[str, ...],
    expected: list[str],
) -> None:
    """Of the running node: its run, though the command names none, and its addresses, every interface replaced by this
    machine's; with the loopback alone it is refused with what to do."""
    (folder / "a").mkdir()
    assert key("new", "--state-dir", "a") == 0
    capsys.readouterr()
    monkeypatch.setattr("p2pnode.commands.key.running_in", lambda _: object())
    monkeypatch.setattr("p2pnode.commands.key.NodeClient.of", lambda _: Running(address, *peers))
    monkeypatch.setattr("p2pnode.commands.key.own_host", lambda: "10.0.0.9")

    code = key("invite", "--state-dir", "a")
    shown = capsys.readouterr()

    if expected:
        invitation = Invitation.parse(shown.out)
        assert (code, invitation.addresses, invitation.run) == (0, expected, "digits")
        assert ("10.0.0.9:8468, this machine's own" in shown.err) == (address == "0.0.0.0:8468")
    else:
        assert (code, shown.out) == (ExitCode.CONFIGURATION, "")
        assert "--set node.host=0.0.0.0" in shown.err
        assert "--address HOST:PORT" in shown.err


def test_an_invitation_is_to_the_run_that_the_node_has(folder: Path, capsys: Output) -> None:
    """The run of the state directory counts; another one on the command line is refused; and before the first start it
    must be named, because the default would be a guess."""
    (folder / "a").mkdir()
    assert key("new", "--state-dir", "a") == 0
    invite = ("invite", "--state-dir", "a", "--address", "10.0.0.5:8468")
    capsys.readouterr()

    assert key(*invite) == ExitCode.USAGE
    assert "the run to invite to is not known" in capsys.readouterr().err
    (folder / "a" / RECORD_FILE).write_bytes(encode(DirectoryRecord(run="digits")))
    assert key(*invite) == 0
    assert Invitation.parse(capsys.readouterr().out).run == "digits"
    assert key(*invite, "--run", "text") == ExitCode.MISMATCH
    assert 'is in run "digits", and the invitation was to name "text"' in capsys.readouterr().err


def test_an_invitation_is_kept_in_the_directory_of_its_run(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --state-dir each run has its own directory, and the command prints how to start the node there."""
    monkeypatch.setenv("HOME", str(folder))
    line = Invitation.of("my run", ["10.0.0.5:8468"], KeyRing((SwarmKey(bytes(32)),))).line

    assert key("join", line) == 0
    assert capsys.readouterr().out.endswith("p2pnode start --run 'my run'\n")
    assert (folder / ".local" / "state" / "p2pnode" / "my run" / "swarm.key").is_file()


def test_the_swarm_of_a_directory_gets_no_key_by_mistake(folder: Path, capsys: Output) -> None:
    """A key would separate the node from the members of its open swarm: refused, also where the directory is meant only
    because it is the only one here, unless it is forced."""
    (folder / "a").mkdir()
    (folder / "a" / RECORD_FILE).write_bytes(encode(DirectoryRecord(run="digits")))

    assert key("new", "--state-dir", "a") == ExitCode.MISMATCH
    assert "p2pnode key new --run NAME" in capsys.readouterr().err
    assert not (folder / "a" / "swarm.key").exists()
    assert key("new", "--state-dir", "a", "--force") == 0
    assert (folder / "a" / "swarm.key").exists()
