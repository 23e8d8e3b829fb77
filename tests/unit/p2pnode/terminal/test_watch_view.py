"""The screen of `p2pnode watch`."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.terminal.lines import Style, cells
from p2pnode.terminal.watch_view import Seen, watch_lines

STATUS: dict[str, Any] = {
    "summary": "training at step 7 with 3 peers; waiting for no peer",
    "state": "training",
    "step": 7,
    "run": "digits",
    "node": {"id": "cd" * 20, "address": "127.0.0.1:8468", "uptime_seconds": 65.0},
    "training": {"loss": 0.31, "metrics": {"accuracy": 0.93}, "step_seconds": 0.016},
    "population": {"estimate": 4.0, "exact": True},
    "exchange": {"bytes_sent": 1_234_567, "bytes_received": 5, "shards_owned": 8},
    "lost": [{"id": "ee" * 20, "address": "10.0.0.9:1", "how": "left", "step": 3, "seconds_ago": 4.0}],
}
PEERS = [{"id": f"{at:02x}" * 20, "address": f"10.0.0.{at}:8468", "state": "training", "step": at} for at in range(200)]
CURVES = {"loss": [3.0, 2.0, 1.0, 0.31], "accuracy": [0.1, 0.93]}


def drawn(seen: Seen, width: int = 80, height: int = 23) -> list[str]:
    style = Style(width=width)
    return [style.render(line) for line in watch_lines(seen, style, height)]


def test_the_own_node_its_curves_its_peers_and_whom_it_lost_are_on_one_screen() -> None:
    """With as many peers as fit, and the number of the others."""
    lines = drawn(Seen(STATUS, PEERS, CURVES, "09:12:04"))
    text = "\n".join(lines)
    for words in (
        "digits  cdcdcdcd at 127.0.0.1:8468",
        "● training at step 7 with 3 peers",
        "training  step 7  16.0 ms a step  up 1 min 5 s",
        "loss        0.310  █▆▃▁",
        "accuracy    0.930  ▁█",
        "4 nodes  1.23 MB sent",
        "eeeeeeee at 10.0.0.9:1 left 4.0 s ago",
        "more; `p2pnode peers` lists all",
        "00000000  10.0.0.0:8468",
    ):
        assert words in text
    assert len(lines) <= 23


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("height", [5, 10, 23, 60])
def test_every_screen_is_kept_to(width: int, height: int) -> None:
    """Neither more lines nor wider ones than the screen has, also with many findings, and with half a status."""
    health = [{"level": "warning", "what": "w" * 50, "do": "d " * 60}] * 9
    for status in (STATUS, STATUS | {"health": health}, {}, {"training": None, "health": None}):
        for peers in ([], PEERS[:2], PEERS):
            lines = drawn(Seen(status, peers, CURVES, "09:12:04", "no node reachable"), width, height)
            assert len(lines) <= height
            assert all(cells(line) <= width for line in lines)


def test_findings_have_room_beside_many_peers() -> None:
    """A warning is on the screen although 200 peers would fill it, and some peers are too."""
    text = "\n".join(drawn(Seen(STATUS | {"health": [{"level": "error", "what": "bad", "do": "act"}]}, PEERS, {})))
    assert "error: bad" in text
    assert "do: act" in text
    assert "10.0.0.0:8468" in text
