"""Where a swarm key is read from and how it is written, and what a state directory keeps of an invitation."""

from __future__ import annotations

import io
import json
import os
import stat
from pathlib import Path

import pytest

from p2pnode.config.directory_record import RECORD_FILE, DirectoryRecord, encode
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys.invitation_files import (
    IN_ENVIRONMENT,
    KEY_FILE,
    KEY_VARIABLE,
    STANDARD_INPUT,
    SWARM_FILE,
    dialable,
    own_host,
    read_swarm,
    remembered_settings,
)
from p2pnode.keys.key_files import find_keys, read_key_file, save_invitation, write_invitation, write_key_file
from p2pnode.overlay.addresses import is_loopback, usable_host
from p2pnode.overlay.sealing.swarm_key import KeyRing, SwarmKey
from p2pnode.overlay.settings import SwarmSettings

ONE, TWO, THREE = (SwarmKey(bytes([number]) * 32) for number in (1, 2, 3))
RING = KeyRing((ONE,))
ADDRESSES = ["10.0.0.5:8468"]


def config(source: str) -> Config:
    return Config(swarm=SwarmSettings(key_file=source))


def test_keys_from_each_source(tmp_path: Path) -> None:
    """A file, standard input and the environment give the same keys; the variable is removed; no source is no key."""
    write_key_file(tmp_path / "k", RING)
    environment = {KEY_VARIABLE: ONE.text, "OTHER": "x"}

    assert find_keys(config(str(tmp_path / "k")), {}, io.BytesIO()) == RING
    assert find_keys(config(STANDARD_INPUT), {}, io.BytesIO(RING.text.encode())) == RING
    assert find_keys(config(IN_ENVIRONMENT), environment, io.BytesIO()) == RING
    assert environment == {"OTHER": "x"}
    assert find_keys(config(""), {}, io.BytesIO()) is None


@pytest.mark.parametrize("content", [b"", b"p2pkey1-short", b"\xff\xfe"], ids=["empty", "short", "no text"])
def test_unusable_input_is_an_error_that_names_its_source(content: bytes) -> None:
    """The error has exit code 4, names the source, and contains no part of the input."""
    with pytest.raises(UserError, match="standard input has no usable swarm key") as caught:
        find_keys(config(STANDARD_INPUT), {}, io.BytesIO(content))

    assert caught.value.exit_code == ExitCode.CONFIGURATION
    assert "short" not in str(caught.value)


def test_a_key_file_is_private_and_replaces_another(tmp_path: Path) -> None:
    """Written files have mode 0600, also over an open one."""
    path = tmp_path / "k"
    path.touch(mode=0o644)
    write_key_file(path, RING)
    write_invitation(tmp_path / "i", "p2pnode1:line")

    assert read_key_file(path) == RING
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "i").stat().st_mode) == 0o600
    assert (tmp_path / "i").read_text() == "p2pnode1:line\n"


@pytest.mark.parametrize(("mode", "is_refused"), [(0o600, False), (0o640, False), (0o604, True), (0o660, True)])
def test_a_key_file_open_to_others_is_refused(tmp_path: Path, mode: int, *, is_refused: bool) -> None:
    """The group may read the file, others may not, and only its owner may write it."""
    path = tmp_path / "k"
    write_key_file(path, RING)
    path.chmod(mode)

    if is_refused:
        with pytest.raises(UserError, match="open to others"):
            read_key_file(path)
    else:
        assert read_key_file(path) == RING


def test_missing_files_and_folders_are_one_sentence(tmp_path: Path) -> None:
    """Reading a missing file and writing into a missing folder raise `UserError` with a next step."""
    with pytest.raises(UserError, match="No such file") as reading:
        read_key_file(tmp_path / "none")
    assert "p2pnode key new" in reading.value.hint
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="cannot write the swarm key file"):
        write_key_file(tmp_path / "folder", RING)


def test_an_invitation_is_kept_once(tmp_path: Path) -> None:
    """A new state directory gets key, run and addresses; saving the same invitation again changes nothing."""
    folder = tmp_path / "state"

    assert save_invitation(folder, "digits", ADDRESSES, RING)
    assert read_key_file(folder / KEY_FILE) == RING
    assert read_swarm(folder) == ("digits", ADDRESSES)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 & ~_umask()
    assert not save_invitation(folder, "digits", ADDRESSES, RING)
    assert save_invitation(folder, "digits", ["10.0.0.6:1"], RING)


def _umask() -> int:
    former = os.umask(0o022)
    os.umask(former)
    return former


def test_a_directory_belongs_to_one_swarm(tmp_path: Path) -> None:
    """Once a node was in it: another key is accepted only with a known one; another run or only unknown keys are exit
    code 5, and nothing is written."""
    save_invitation(tmp_path, "digits", ADDRESSES, RING)
    (tmp_path / RECORD_FILE).write_bytes(encode(DirectoryRecord(run="digits")))

    assert save_invitation(tmp_path, "digits", ADDRESSES, KeyRing((TWO, ONE)))
    for run, keys in (("digits", KeyRing((THREE,))), ("other", KeyRing((ONE,)))):
        with pytest.raises(UserError, match="belongs to another swarm") as caught:
            save_invitation(tmp_path, run, ADDRESSES, keys)
        assert caught.value.exit_code == ExitCode.MISMATCH
    assert read_key_file(tmp_path / KEY_FILE) == KeyRing((TWO, ONE))


def test_an_invitation_replaces_one_that_was_never_used(tmp_path: Path) -> None:
    """Before a node was in the swarm a later invitation counts; a key that was made here is not lost to one."""
    save_invitation(tmp_path / "a", "digits", ADDRESSES, RING)
    assert save_invitation(tmp_path / "a", "text", ADDRESSES, KeyRing((TWO,)))
    assert read_swarm(tmp_path / "a") == ("text", ADDRESSES)
    assert read_key_file(tmp_path / "a" / KEY_FILE) == KeyRing((TWO,))

    (tmp_path / "b").mkdir()
    write_key_file(tmp_path / "b" / KEY_FILE, RING)
    with pytest.raises(UserError, match="belongs to another swarm"):
        save_invitation(tmp_path / "b", "digits", ADDRESSES, KeyRing((TWO,)))


def test_the_directory_of_an_open_swarm_takes_no_invitation(tmp_path: Path) -> None:
    """A key would separate its node from the swarm it is in: exit code 5, and neither file is written."""
    (tmp_path / RECORD_FILE).write_bytes(encode(DirectoryRecord(run="digits", founder=True)))

    with pytest.raises(UserError, match="of an open swarm") as caught:
        save_invitation(tmp_path, "digits", ADDRESSES, RING)

    assert caught.value.exit_code == ExitCode.MISMATCH
    assert "p2pnode forget" in caught.value.hint
    assert [entry.name for entry in tmp_path.iterdir()] == [RECORD_FILE]


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
