"""The settings that follow from the environment and from an accepted invitation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import (
    KEY_FILE,
    KEY_VARIABLE,
    SWARM_FILE,
    dialable,
    own_host,
    read_swarm,
    remembered_settings,
)
from p2pnode.overlay.addresses import is_loopback, usable_host


def settings(folder: Path, environment: dict[str, str] | None = None, *, joining: bool = False) -> dict[str, object]:
    found = remembered_settings(folder, environment or {}, joining=joining)
    return {override.key: json.loads(override.text) for override in found}


def accepted(folder: Path) -> Path:
    """A state directory with an accepted invitation."""
    (folder / KEY_FILE).write_text("key")
    (folder / SWARM_FILE).write_text(json.dumps({"run": "digits", "bootstrap": ["10.0.0.5:8468"]}))
    return folder


def test_an_empty_directory_gives_no_settings(tmp_path: Path) -> None:
    """Without key and invitation nothing follows; `joining` assumes the key file."""
    assert settings(tmp_path) == {}
    assert settings(tmp_path, joining=True) == {"swarm.key_file": str(tmp_path / KEY_FILE)}


def test_an_accepted_invitation_gives_key_run_and_addresses(tmp_path: Path) -> None:
    """The next start knows all three."""
    assert settings(accepted(tmp_path)) == {
        "swarm.key_file": str(tmp_path / KEY_FILE),
        "swarm.run": "digits",
        "swarm.bootstrap": ["10.0.0.5:8468"],
    }


def test_a_key_alone_gives_its_file(tmp_path: Path) -> None:
    """`p2pnode key new` writes a key file without an invitation."""
    (tmp_path / KEY_FILE).write_text("key")

    assert settings(tmp_path) == {"swarm.key_file": str(tmp_path / KEY_FILE)}


def test_a_key_in_the_environment_takes_precedence(tmp_path: Path) -> None:
    """Only the name of the variable becomes a setting, not the key in it."""
    found = settings(accepted(tmp_path), {KEY_VARIABLE: "secret"})

    assert found == {"swarm.key_file": f"${KEY_VARIABLE}"}


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"run": "a", "bootstrap": 1}'])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    """The error names the file and the way to replace it."""
    (tmp_path / SWARM_FILE).write_text(content)
    with pytest.raises(UserError, match="cannot read") as caught:
        read_swarm(tmp_path)

    assert caught.value.exit_code == ExitCode.STATE_DIRECTORY
    assert "p2pnode key join" in caught.value.hint


def test_no_invitation_is_an_empty_run(tmp_path: Path) -> None:
    """A directory without the file has no run and no addresses."""
    assert read_swarm(tmp_path) == ("", [])


def test_an_invitation_gives_a_founder_no_addresses(tmp_path: Path) -> None:
    """A founder that accepted an invitation to its own swarm still opens it alone: key and run count, addresses not."""
    found = remembered_settings(accepted(tmp_path), {}, founder=True)

    assert {override.key for override in found} == {"swarm.key_file", "swarm.run"}


@pytest.mark.parametrize(
    ("addresses", "own", "expected"),
    [
        (["10.0.0.5:8468", "node.example:1"], "10.0.0.9", ["10.0.0.5:8468", "node.example:1"]),
        (["0.0.0.0:8468"], "10.0.0.9", ["10.0.0.9:8468"]),
        (["[::]:8468"], "2001:db8::9", ["[2001:db8::9]:8468"]),
        (["0.0.0.0:8468"], "", []),
        (["127.0.0.1:8468", "[::1]:8468", "localhost:8468"], "10.0.0.9", []),
        (["127.0.0.1:8468", "10.0.0.5:1"], "10.0.0.9", ["10.0.0.5:1"]),
        (["10.0.0.9:8468", "0.0.0.0:8468", "10.0.0.9:8468"], "10.0.0.9", ["10.0.0.9:8468"]),
    ],
    ids=["usable", "every interface", "IPv6", "no network", "loopback", "mixed", "once"],
)
def test_only_addresses_that_others_can_dial(addresses: list[str], own: str, expected: list[str]) -> None:
    """Every interface is replaced by this machine's address, the loopback left out, each address named once."""
    assert list(dialable(addresses, own).addresses) == expected


def test_replaced_addresses_are_told() -> None:
    """The caller can say what stands for what."""
    assert dialable(["0.0.0.0:8468", "10.0.0.5:1"], "10.0.0.9").replaced == (("0.0.0.0:8468", "10.0.0.9:8468"),)


def test_this_machine_s_own_address_is_usable_or_unknown() -> None:
    """Never every interface or the loopback; empty without a network."""
    host = own_host()

    assert host == "" or (usable_host(host) == host and not is_loopback(host))
