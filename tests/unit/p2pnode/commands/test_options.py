"""Shared options: which source wins, the error for a malformed one, and which node a client is for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.client import STATUS_FILE, NodeClient, NotReachable, status_file
from p2pnode.commands import options
from p2pnode.commands.options import WhichNode
from p2pnode.directory_lock import locked


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("P2PNODE_"):
            monkeypatch.delenv(name)


@contextlib.contextmanager
def running(folder: Path, address: str) -> Iterator[None]:
    """A node on this directory; afterwards it has crashed."""
    with locked(folder):
        (folder / STATUS_FILE).write_bytes(status_file(address, os.getpid(), "ab", str(folder / "token")))
        yield


def token_of(client: NodeClient) -> str:
    return str(client._token_file or "")


def test_set_wins_over_flags_and_flags_over_the_file_in_this_folder(tmp_path: Path) -> None:
    """`node.toml` is read without being named; a flag that was not given changes nothing."""
    (tmp_path / "node.toml").write_text("[node]\nport = 7001\n[status]\nport = 7002\n")
    flags: dict[str, tuple[str, str | None]] = {"node.port": ("--port", "7003"), "status.port": ("--status", None)}

    assert options.loaded(None, None, {}).config.node.port == 7001
    assert options.loaded(None, None, flags).config.node.port == 7003
    assert options.loaded(None, [" node.port = 7004 "], flags).config.node.port == 7004
    assert options.loaded(None, None, flags).config.status.port == 7002
    (tmp_path / "other.toml").write_text("[node]\nport = 7005\n")
    assert options.loaded(tmp_path / "other.toml", None, {}).config.node.port == 7005


def test_a_client_is_for_the_node_on_the_state_directory(tmp_path: Path) -> None:
    """With its token; another token file wins."""
    with running(tmp_path / "a", "127.0.0.1:7100"):
        assert WhichNode(state_dir="a").client().address == "127.0.0.1:7100"
        assert token_of(WhichNode(state_dir="a").client()) == str(tmp_path / "a" / "token")
        assert token_of(WhichNode(state_dir="a", token_file="other").client()) == "other"


def test_the_token_goes_only_to_the_address_of_its_own_node(tmp_path: Path) -> None:
    """A mistyped address must not receive it; localhost is the loopback."""
    with running(tmp_path / "a", "127.0.0.1:7100"):
        assert token_of(WhichNode("127.0.0.1:7100", "a").client()) == str(tmp_path / "a" / "token")
        assert token_of(WhichNode("localhost:7100", "a").client()) == str(tmp_path / "a" / "token")
        assert token_of(WhichNode("127.0.0.1:7101", "a").client()) == ""
    assert token_of(WhichNode("127.0.0.1:7100", "a").client()) == ""


def test_without_a_node_the_configured_address_is_used_or_an_error_says_what_to_do(tmp_path: Path) -> None:
    """A state directory that is named must have a running node."""
    (tmp_path / "node.toml").write_text('[status]\nport = 7002\nhost = "::1"\n')
    assert WhichNode().client().address == "[::1]:7002"

    with pytest.raises(NotReachable, match="no node runs on the state directory b") as caught:
        WhichNode(state_dir="b").client()
    assert "p2pnode start" in caught.value.hint
    with running(tmp_path / "b", "127.0.0.1:7100"):
        pass
    with pytest.raises(NotReachable, match=f"its process {os.getpid()} has ended"):
        WhichNode(state_dir="b").client()
