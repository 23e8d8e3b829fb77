"""What the terminal shows of a node: sentences, and columns of its peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from p2pnode.status.schema import ExchangeStatus
from p2pnode.terminal.lines import Style, cells
from p2pnode.terminal.status_view import (
    PEER_COLUMNS,
    gpu_rows,
    peer_cells,
    peers_lines,
    status_line,
    status_lines,
    tone_of,
)

PIPE = Style()


def status_text(status: Mapping[str, Any], style: Style = PIPE) -> str:
    """The answer to `p2pnode status` as text; in a pipe neither cut nor coloured."""
    return "\n".join(style.render(line) for line in status_lines(status, style))


def test_status_is_said_in_sentences() -> None:
    """The summary comes first, then whether the node is connected, learns, waits, and what to do."""
    status: dict[str, Any] = {
        "summary": "waiting for one",
        "node": {"id": "7f3a" * 10, "incarnation": 3, "address": "10.0.0.5:8468"},
        "run": "digits",
        "state": "waiting",
        "step": 412,
        "population": {"estimate": 23.8, "low": 20.1, "high": 28.2, "exact": False},
        "barrier": {"method": "pssp"},
        "waiting": {"since_seconds": 3.2, "behind": 1, "sampled": 10, "slowest": "19ab" * 10, "its_step": 407},
        "training": {"loss": 0.31, "metrics": {"accuracy": 0.93}, "evaluated_step": 410, "evaluated_samples": 360},
        "exchange": {"shards_owned": 17, "bytes_sent": 1_234_567, "bytes_received": 999, "refused": 0},
        "health": [{"level": "warning", "what": "port closed", "do": "open it"}],
        "lost": [{"id": "ab" * 20, "address": "10.0.0.9:8468", "how": "dead", "step": 400, "seconds_ago": 12.3}],
        "progress": [{"what": "steps", "done": 412, "total": 1000, "unit": "steps", "left_seconds": 90.0}],
    }

    text = status_text(status)

    assert text.splitlines()[0] == "▲ waiting for one"
    for words in (
        "about 24 nodes (20 to 28)",
        "waiting at step 412; loss 0.310, accuracy 0.930 at step 410 on 360 samples",
        "412 of 1000 steps  1 min 30 s to go",
        "1 of 10 sampled peers, for 3.2 s; slowest 19ab19ab at step 407",
        "17 shards owned; 1.23 MB sent, 999 B received; none refused",
        "lost       abababab at 10.0.0.9:8468 was found dead 12 s ago, at step 400",
        "warning: port closed\n           do: open it",
    ):
        assert words in text


def test_the_end_of_a_run_is_shown() -> None:
    """After the end the text has the reason, the best metric, the file and how to load it; before it, nothing."""
    result = {
        "reason": "max_steps",
        "steps": 400,
        "best": {"metric": "accuracy", "value": 0.975, "step": 390},
        "model": "/tmp/model.safetensors",
        "load": ["from safetensors.torch import load_file"],
        "may_differ": "2 nodes train on",
    }

    text = status_text({"result": result})

    for words in (
        "after 400 steps (max_steps); best accuracy 0.975 at step 390",
        "model: /tmp/model.safetensors",
        "    from safetensors.torch import load_file",
        "other nodes: 2 nodes train on",
    ):
        assert words in text
    assert "model: no file was written" in status_text({"result": {"steps": 3, "reason": "script"}})
    assert "ended" not in status_text({"result": None})


BROKEN: list[dict[str, Any]] = [
    {},
    {"population": None, "training": {"loss": None}, "waiting": None, "health": []},
    {"training": "x", "exchange": None, "health": None, "lost": None, "progress": [None, {}], "node": []},
    {"health": [{}], "lost": [{}], "result": {}, "dispatch": {"tasks": None}, "population": {}},
]


@pytest.mark.parametrize("status", BROKEN)
def test_half_a_status_is_shown_all_the_same(status: dict[str, Any]) -> None:
    """A node that has just started has null where there is nothing yet, and one of another version lacks keys."""
    for width in (None, 40, 80):
        assert status_text(status, Style(width=width))
    assert status_line(status)


def test_a_status_fits_every_width() -> None:
    """No line is wider than the terminal, however long a name or an advice is, and nothing of an advice is lost."""
    advice = "one of three things: (1) forward UDP and TCP 8468 to this machine; (2) allow UPnP in your router"
    status: dict[str, Any] = {
        "summary": "training at step 7 with 3 peers; waiting for no peer",
        "run": "r" * 64,
        "node": {"id": "ab" * 20, "address": "[2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff]:65535", "incarnation": 3},
        "health": [{"level": "error", "what": "your port cannot be reached", "do": advice}],
    }
    for width in (40, 60, 80, 200):
        style = Style(width=width)
        lines = [style.render(line) for line in status_lines(status, style)]
        assert all(cells(line) <= width for line in lines)
        assert "…" not in "".join(lines)
        joined = " ".join(line.strip() for line in lines)
        assert all(word in joined for word in advice.split())


def test_the_colour_is_that_of_the_worst() -> None:
    """Green where it trains, amber for a warning or a wait, red for an error or a trainer that hangs."""
    warning, error = {"level": "warning"}, {"level": "error"}
    assert tone_of({"state": "training", "health": []}) == "ok"
    assert tone_of({"state": "training", "health": [{"level": "info"}]}) == "ok"
    assert tone_of({"state": "waiting"}) == tone_of({"state": "training", "health": [warning]}) == "warn"
    assert tone_of({"state": "stalled"}) == tone_of({"state": "training", "health": [warning, error]}) == "bad"
    assert status_text({"state": "stalled"}, Style(colour=True)).startswith("\x1b[31m")


DEVICE = {"optimizer_steps": 40, "samples": 1280, "loss": 0.31234, "step_seconds": 0.8}
DEVICES = [
    DEVICE | {"index": 0, "device": "cuda:0", "state": "running", "failures": 0, "leads": True},
    DEVICE | {"index": 1, "device": "cuda:1", "state": "crashed", "failures": 1},
]
VALUES = {"keys": 7, "bytes": 700, "limit_bytes": 9000, "updates": 5, "reads": 3}
WAITING = {"refused": 2, "waiting": 4, "waiting_bytes": 64, "unanswered": 1}
SERVER = {"version": 9, "workers": 3, "given": 20, "done": 15, "held": 3, "waiting": 2, "again": 1, "refused": 0}


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        (
            {"devices": DEVICES},
            [
                "devices    cuda:0 (0): running, leads, loss 0.312, 40 steps at 800 ms, 1280 samples",
                "           cuda:1 (1): crashed, loss 0.312, 40 steps at 800 ms, 1280 samples, failed 1 times",
            ],
        ),
        ({"devices": DEVICES * 5}, ["devices    10: 5 running, 5 crashed"]),
        ({"devices": [{}, 3]}, ["devices    ? (?): ?"]),
        (
            {"coordination": {"serves": True, "trainers": 6}},
            ["devices    this node divides the local steps, among 6 trainers"],
        ),
        (
            {"coordination": {"server": None, "serves": False}},
            ["devices    no node answers that divides the local steps: this one takes its own share"],
        ),
        (
            {"coordination": {"server": "ab" * 20, "leader": "cd" * 20}},
            ["devices    abababab divides the local steps; the leader of all is at cdcdcdcd"],
        ),
        (
            {"values": VALUES | WAITING},
            [
                "values     7 keys owned, 700 B of 9.00 kB",
                "5 updates applied, 3 keys read, 2 refused, 4 wait here (64 B), 1 of this node have no answer yet",
            ],
        ),
        ({"values": VALUES}, ["5 updates applied, 3 keys read\n"]),
        (
            {"server": SERVER},
            [
                "server     version 9, 3 workers",
                "20 tasks given, 15 done, 3 with workers, 2 wait for one, 1 given again\n",
            ],
        ),
        (
            {"exchange": {"shards_resigned": 2, "shards_to_mend": 1}},
            ["           2 broken shards left to their backups; 1 superseded copy waits for its owner"],
        ),
    ],
)
def test_what_not_every_node_has_is_shown(status: dict[str, Any], shown: list[str]) -> None:
    """Many devices are counted by state; what waits, is refused, lost or repaired is named only where there is any."""
    text = status_text(status)
    assert [line for line in shown if line not in text] == []
    assert not any(label in status_text({}) for label in ("devices", "values", "server", "shard of", "copy waits"))


def test_the_keys_of_repairs_are_those_of_the_schema() -> None:
    """A key that the schema lacks would never be shown."""
    everything = dict.fromkeys(ExchangeStatus.__struct_fields__, 1)
    (line,) = [line for line in status_text({"exchange": everything}).splitlines() if "copy waits" in line]
    assert line.count(";") == 5


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


def test_each_gpu_has_a_row_with_what_its_driver_says() -> None:
    """Nothing on a node without; one that does not answer says so."""
    known = {"memory_used_bytes": 40_000_000_000, "memory_total_bytes": 80_000_000_000, "utilisation": 0.93}
    gpus = [
        {"device": "cuda:0", "name": "H100", "temperature_celsius": 61.4, **known},
        {"device": "cuda:1", "name": "H100", "temperature_celsius": None, "memory_total_bytes": None},
    ]
    assert gpu_rows(gpus) == [
        ("gpu", "cuda:0 (H100): 40.0 GB of 80.0 GB, 93 % busy, 61 °C"),
        ("", "cuda:1 (H100): does not answer"),
    ]
    assert gpu_rows([]) == []
