"""`p2pnode peers`."""

from __future__ import annotations

from typing import Any

from p2pnode.terminal.lines import Style, cells
from p2pnode.terminal.peers_view import PEER_COLUMNS, peer_cells, peers_lines

PEER: dict[str, Any] = {
    "id": "ab" * 20,
    "address": "10.0.0.2:8468",
    "state": "waiting_for_nodes",
    "step": 6,
    "lag": 1,
    "round_trip_ms": 0.4567,
    "last_seen_seconds": 0.21,
    "version": "0.1.0",
}


def test_a_peer_is_one_line() -> None:
    """Its id, address, state, step, lag, round trip, when it was heard last, and its version."""
    style = Style(width=100)
    header, line = (style.render(line) for line in peers_lines([PEER], style))
    assert header.split("  ")[0] == "id"
    assert " ".join(line.split()) == "abababab 10.0.0.2:8468 waiting for nodes 6 1 0.457 ms 210 ms ago 0.1.0"
    _, narrow = (style.render(line) for line in peers_lines([PEER | {"state": "training"}], Style(width=80)))
    assert narrow.endswith("0.1.0")


def test_200_peers_with_long_addresses_fit_every_width() -> None:
    """The address is narrowed first; the id stays. With a limit the last line counts the others."""
    peers = [
        PEER | {"address": "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff]:65535", "step": 10**12 + at} for at in range(200)
    ]
    for width in (40, 60, 80, 120):
        style = Style(width=width)
        lines = [style.render(line) for line in peers_lines(peers, style)]
        assert len(lines) == 201
        assert all(cells(line) <= width and line.startswith(("abababab", "id")) for line in lines)
    assert "… 190 more" in Style().render(peers_lines(peers, Style(), 10)[-1])


def test_what_is_wrong_with_a_peer_is_coloured() -> None:
    """A suspect is red, a peer far behind amber, one that trains green; one without keys has dashes."""
    assert peer_cells(PEER | {"state": "suspect"})[2] == ("suspect", "bad")
    assert peer_cells(PEER | {"state": "training", "lag": 9})[2:5] == [("training", "ok"), ("6", ""), ("9", "warn")]
    assert [text for text, _ in peer_cells({})] == ["-"] * len(PEER_COLUMNS)
