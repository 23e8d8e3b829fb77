"""`p2pnode dashboard`: the addresses, and how the token reaches the browser."""

from __future__ import annotations

import html
import json
import os
import re
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from p2pnode.client import NotReachable
from p2pnode.commands import dashboard
from p2pnode.commands.options import WhichNode

TOKEN = "a-token-of-the-node-1234"
Output = pytest.CaptureFixture[str]


class Client:
    """In the place of `NodeClient`."""

    address = "127.0.0.1:8080"

    def __init__(self, token_file: Path | None) -> None:
        self.token_file = token_file
        self.gone = False

    def status(self) -> dict[str, int]:
        if self.gone:
            raise NotReachable("no node reachable", "start one")
        return {"schema": 1}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Client:
    token = tmp_path / "status.token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)
    made = Client(token)
    monkeypatch.setattr(WhichNode, "client", lambda _: made)
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a browser was asked to open, on a machine with a screen."""
    urls: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(dashboard.webbrowser, "open", lambda url: urls.append(url) or True)
    return urls


def test_it_prints_both_addresses_and_where_the_token_is(client: Client, capsys: Output) -> None:
    """Without a browser the addresses are all there is; the token itself is never printed."""
    assert dashboard.dashboard(opens=False) == 0

    printed = capsys.readouterr().out
    assert "http://127.0.0.1:8080/swarm\n" in printed
    assert "http://127.0.0.1:8080/\n" in printed
    assert str(client.token_file) in printed
    assert TOKEN not in printed


def test_json_has_the_same(client: Client, capsys: Output) -> None:
    """A program gets the addresses under fixed names, and nothing is opened."""
    assert dashboard.dashboard(as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "swarm": "http://127.0.0.1:8080/swarm",
        "node": "http://127.0.0.1:8080/",
        "token_file": str(client.token_file),
    }


@pytest.mark.parametrize(("node", "page"), [(False, "/swarm"), (True, "/")])
def test_the_browser_gets_a_file_that_only_its_user_reads(
    client: Client, opened: list[str], tmp_path: Path, node: bool, page: str
) -> None:
    """The file leads to the page with the token behind "#"; what others see of the command has no token."""
    assert dashboard.dashboard(node=node) == 0

    assert opened == [(tmp_path / "dashboard.html").as_uri()]
    path = Path(unquote(urlsplit(opened[0]).path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = re.search(r'content="0;url=([^"]+)"', path.read_text())
    assert found is not None
    assert html.unescape(found[1]) == f"http://127.0.0.1:8080{page}#token={TOKEN}"


def test_a_link_in_the_place_of_the_file_is_not_followed(client: Client, opened: list[str], tmp_path: Path) -> None:
    """What someone else has put there is removed, and its target stays as it is."""
    target = tmp_path / "other"
    target.write_text("kept")
    (tmp_path / "dashboard.html").symlink_to(target)

    assert dashboard.dashboard() == 0

    assert target.read_text() == "kept"
    assert not (tmp_path / "other").is_symlink()
    assert TOKEN in (tmp_path / "dashboard.html").resolve().read_text()


def test_without_a_readable_token_the_page_opens_and_asks(client: Client, opened: list[str], tmp_path: Path) -> None:
    """A missing token, or one that others may read, is not handed over: the page asks where it needs it."""
    assert client.token_file is not None
    client.token_file.chmod(0o644)
    assert dashboard.dashboard() == 0
    client.token_file = None
    assert dashboard.dashboard() == 0

    assert opened == ["http://127.0.0.1:8080/swarm"] * 2
    assert not (tmp_path / "dashboard.html").exists()


def test_a_node_that_does_not_answer_is_an_error(client: Client, opened: list[str]) -> None:
    """No empty page is opened."""
    client.gone = True
    with pytest.raises(NotReachable):
        dashboard.dashboard()
    assert opened == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", "http://127.0.0.1:1"),
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:80", "http://[::1]:80"),
        ("[2001:db8::1]:8080", "http://[2001:db8::1]:8080"),
    ],
)
def test_an_address_of_all_interfaces_is_reached_on_the_loopback(address: str, expected: str) -> None:
    """A browser cannot open 0.0.0.0."""
    assert dashboard.base_url(address) == expected


def test_a_terminal_without_a_screen_opens_nothing() -> None:
    """A browser for terminals would take the terminal over."""
    assert not dashboard.has_display({}, "linux")
    assert dashboard.has_display({"WAYLAND_DISPLAY": "wayland-0"}, "linux")
    assert dashboard.has_display({}, "darwin")
    assert os.name != "posix" or not dashboard.has_display({"DISPLAY": ""}, "linux")
