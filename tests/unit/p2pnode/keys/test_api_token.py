"""The token of the HTTP API: created once, kept, and readable by one user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from p2pnode.client import NodeClient, RunningNode
from p2pnode.errors import ExitCode, UserError
from p2pnode.keys import api_token

NEW = bytes(range(32))


def test_a_token_is_created_once_and_private(tmp_path: Path) -> None:
    """The file has mode 0600 whatever the umask; the second start finds the same token."""
    path = tmp_path / "status.token"
    former = os.umask(0)
    try:
        token = api_token.load_or_create(path, NEW)
    finally:
        os.umask(former)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(token) == 43
    assert api_token.load_or_create(path, bytes(32)) == token == api_token.read(path)


def test_its_path(tmp_path: Path) -> None:
    """It is in the state directory, or at `status.token_file` with `~` resolved."""
    assert api_token.token_path(tmp_path, "") == tmp_path / "status.token"
    assert api_token.token_path(tmp_path, "~/t") == Path.home() / "t"


@pytest.mark.parametrize("mode", [0o660, 0o650, 0o604, 0o620, 0o602, 0o666])
def test_a_file_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    """A token that others could read or write stops the start; the error shows the remedy."""
    path = tmp_path / "status.token"
    api_token.load_or_create(path, NEW)
    path.chmod(mode)

    with pytest.raises(UserError) as caught:
        api_token.load_or_create(path, NEW)

    assert caught.value.exit_code == ExitCode.STATE_DIRECTORY
    assert "chmod 600" in caught.value.message


def test_the_group_may_read_it(tmp_path: Path) -> None:
    """A service account shares a group with its monitor; Kubernetes mounts secrets so."""
    path = tmp_path / "status.token"
    token = api_token.load_or_create(path, NEW)
    path.chmod(0o440)

    assert api_token.read(path) == token


@pytest.mark.parametrize("content", ["", "short", "two words that are long", "ünicode-of-some-length", "x" * 5000])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: str) -> None:
    """Empty, short, long or otherwise invalid contents are no token."""
    path = tmp_path / "status.token"
    path.write_text(content, encoding="utf-8")
    path.chmod(0o600)

    with pytest.raises(api_token.TokenNotReadable, match="it is no token"):
        api_token.read(path)


def test_a_link_is_not_followed_when_a_token_is_created(tmp_path: Path) -> None:
    """Nothing is written through a dangling link."""
    (tmp_path / "status.token").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(UserError):
        api_token.load_or_create(tmp_path / "status.token", NEW)

    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    """A missing folder gives exit code 7 and names the setting."""
    with pytest.raises(UserError) as caught:
        api_token.load_or_create(tmp_path / "missing" / "status.token", NEW)

    assert caught.value.exit_code == ExitCode.STATE_DIRECTORY
    assert "status.token_file" in caught.value.hint


def test_the_client_sends_the_token_only_where_it_is_needed(tmp_path: Path) -> None:
    """Reads over the loopback do not contain it; changes, and every request to another address, do."""
    path = tmp_path / "status.token"
    token = api_token.load_or_create(path, NEW)

    here = NodeClient.of(RunningNode("127.0.0.1:1", os.getpid(), "ab", str(path)))
    there = NodeClient("192.0.2.1:1", token_file=str(path))
    assert "Authorization" not in here._headers("GET")
    assert here._headers("POST")["Authorization"] == f"Bearer {token}"
    assert there._headers("GET")["Authorization"] == f"Bearer {token}"
    assert "Authorization" not in NodeClient("192.0.2.1:1")._headers("POST")


def test_a_client_that_cannot_read_the_token_names_the_file(tmp_path: Path) -> None:
    """The error names the file, the reason and the option, and no request is sent."""
    client = NodeClient("127.0.0.1:1", token_file=str(tmp_path / "none"))

    with pytest.raises(UserError, match="cannot be read") as caught:
        client.post("/pause")

    assert "--token-file" in caught.value.hint
