"""What the terminal shows of a node: sentences, columns and tables."""

from __future__ import annotations

import io

from p2pnode import tables


def test_status_is_said_in_sentences() -> None:
    """The summary comes first, then whether the node is connected, learns, waits, and what to do."""
    status = {
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
    }

    text = tables.status_text(status)

    assert text.splitlines()[0] == "waiting for one"
    for words in (
        "about 24 nodes (20 to 28)",
        "waiting at step 412; loss 0.310, accuracy 0.930 at step 410 on 360 samples",
        "1 of 10 sampled peers, for 3.2 s; slowest 19ab19ab at step 407",
        "17 shards owned, 1.2 MB sent, 999 B received",
        "warning: port closed; open it",
    ):
        assert words in text


def test_half_a_status_is_shown_all_the_same() -> None:
    """A node that has just started has null where there is nothing yet."""
    for status in ({}, {"population": None, "training": {"loss": None}, "waiting": None, "health": []}):
        assert "nothing to report" in tables.status_text(status)
        assert tables.status_line(status)
        assert len(tables.demo_row("node-0", status)) == len(tables.DEMO_COLUMNS)
    assert len(tables.demo_row("node-0", None)) == len(tables.DEMO_COLUMNS)
    assert len(tables.peer_row({})) == len(tables.PEER_COLUMNS)


def test_tables_can_be_drawn() -> None:
    """The tables of watch and demo have their rows, and the number of peers left out."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=160, record=True)
    console.print(tables.watch_table({"summary": "all well [x]"}, [{"id": "ab" * 20, "step": 7}] * 5, 3))
    console.print(tables.demo_table([tables.demo_row("node-0", {"step": 9})], "title"))
    text = console.export_text()

    for words in ("all well [x]", "abababab", "… 2 more", "node-0", "waits for"):
        assert words in text


def test_sizes_and_columns() -> None:
    """Sizes use decimal units; columns are as wide as their widest cell, without trailing spaces."""
    assert [tables.size(count) for count in (999, 1_500_000, 2e15, None)] == ["999 B", "1.5 MB", "2000.0 TB", "-"]
    assert tables.columns(("a", "bb"), [("ccc", "d")]) == "a    bb\nccc  d"


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

    text = tables.status_text({"result": result})

    for words in (
        "after 400 steps (max_steps); best accuracy 0.975 at step 390",
        "model: /tmp/model.safetensors",
        "    from safetensors.torch import load_file",
        "other nodes: 2 nodes train on",
    ):
        assert words in text
    assert "model: no file was written" in tables.status_text({"result": {"steps": 3, "reason": "script"}})
    assert "ended" not in tables.status_text({"result": None})
