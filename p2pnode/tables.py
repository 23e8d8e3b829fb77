"""Formats the JSON of the HTTP API for the terminal: sentences, aligned columns, and rich tables for redrawing.

Sends no request and prints nothing. rich is imported by the functions that build tables, so `p2pnode status` works
without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

PEER_COLUMNS = ("id", "address", "state", "step", "lag", "round trip", "last seen")


def short(node_id: object) -> str:
    """The first eight characters of an id."""
    return str(node_id or "")[:8] or "-"


def number(value: Any, digits: int = 3) -> str:
    """A number, or a dash for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def size(count: Any) -> str:
    """Bytes in a readable unit: 1.5 MB is 1,500,000 bytes."""
    if not isinstance(count, int | float):
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def population(entry: dict[str, Any] | None) -> str:
    """ "4 nodes" if they are counted, "about 24 nodes (20 to 28)" if they are estimated."""
    if not entry or entry.get("estimate") is None:
        return "population unknown"
    if entry.get("exact"):
        count = round(entry["estimate"])
        return f"{count} node" if count == 1 else f"{count} nodes"
    low, high = entry.get("low"), entry.get("high")
    bounds = f" ({low:.0f} to {high:.0f})" if low is not None and high is not None else ""
    return f"about {entry['estimate']:.0f} nodes{bounds}"


def waiting(entry: dict[str, Any] | None) -> str:
    """Which peers a node waits for, and since when."""
    if not entry:
        return "no peer"
    slowest = entry.get("slowest")
    whom = f"; slowest {short(slowest)} at step {entry.get('its_step', '?')}" if slowest else ""
    since = number(float(entry.get("since_seconds") or 0.0), 1)
    return f"{entry.get('behind', '?')} of {entry.get('sampled', '?')} sampled peers, for {since} s{whom}"


def metrics(training: dict[str, Any]) -> str:
    """ "loss 0.310, accuracy 0.930 at step 410 on 360 samples"."""
    parts = [f"loss {number(training.get('loss'))}"]
    parts += [f"{name} {number(value)}" for name, value in (training.get("metrics") or {}).items()]
    text = ", ".join(parts)
    if training.get("evaluated_step") is not None and training.get("metrics"):
        text += f" at step {training['evaluated_step']}"
        if training.get("evaluated_samples"):
            text += f" on {training['evaluated_samples']} samples"
    return text


def status_text(status: dict[str, Any]) -> str:
    """The answer to `p2pnode status`: the summary, then connected, learning, waiting, exchange, health."""
    node, training = status.get("node") or {}, status.get("training") or {}
    exchange = status.get("exchange") or {}
    barrier = status.get("barrier") or {}
    rows = [
        ("connected", f"{population(status.get('population'))}; run {status.get('run', '?')}"),
        (
            "",
            f"this node is {short(node.get('id'))} at {node.get('address', '?')}, start {node.get('incarnation', '?')}",
        ),
        ("learning", f"{status.get('state', '?')} at step {status.get('step', '?')}; {metrics(training)}"),
        ("", f"{number(training.get('step_seconds'))} s a step, trainer {training.get('trainer', '?')}"),
        ("waiting", f"{waiting(status.get('waiting'))} (barrier {barrier.get('method', '?')})"),
        (
            "exchange",
            f"{exchange.get('shards_owned', '?')} shards owned, {size(exchange.get('bytes_sent'))} sent, "
            f"{size(exchange.get('bytes_received'))} received, {exchange.get('refused', 0)} refused",
        ),
    ]
    rows += _dispatch_rows(status.get("dispatch"))
    rows += _result_rows(status.get("result"))
    health = status.get("health") or []
    rows += [
        (
            "health" if position == 0 else "",
            f"{entry.get('level', '?')}: {entry.get('what', '')}; {entry.get('do', '')}",
        )
        for position, entry in enumerate(health)
    ] or [("health", "nothing to report")]
    return "\n".join([str(status.get("summary", "")), "", *(f"{name:<11}{text}" for name, text in rows)])


def _dispatch_rows(dispatch: dict[str, Any] | None) -> list[tuple[str, str]]:
    """The queue of the records, and who serves it; nothing where none are dispatched."""
    if not dispatch:
        return []
    who = "this node" if dispatch.get("serves") else short(dispatch.get("master"))
    passes = dispatch.get("passes") or "no end"
    if dispatch.get("tasks") is None:
        return [("records", f"master {who}; {dispatch.get('last_error') or 'nothing is registered yet'}")]
    counts = ", ".join(f"{dispatch.get(state, '?')} {state}" for state in ("todo", "leased", "done", "failed"))
    return [
        ("records", f"pass {dispatch.get('pass_number', '?')} of {passes}: {counts}"),
        (
            "",
            f"master {who} ({dispatch.get('store') or '?'}), {dispatch.get('records_trained', 0)} records trained here",
        ),
    ]


def _result_rows(result: dict[str, Any] | None) -> list[tuple[str, str]]:
    """How the run ended, and where its model is; nothing while it goes on."""
    if not result:
        return []
    best = result.get("best")
    ended = f"after {result.get('steps', '?')} steps ({result.get('reason', '?')})"
    if best:
        ended += f"; best {best.get('metric', '?')} {number(best.get('value'))} at step {best.get('step', '?')}"
    rows = [("ended", ended), ("", f"model: {result.get('model') or 'no file was written'}")]
    rows += [("", f"    {line}") for line in result.get("load") or []]
    if result.get("may_differ"):
        rows.append(("", f"it may differ from the model of other nodes: {result['may_differ']}"))
    return rows


def status_line(status: dict[str, Any]) -> str:
    """One line, for `watch` without a terminal."""
    training, exchange = status.get("training") or {}, status.get("exchange") or {}
    return (
        f"{status.get('state', '?')} step {status.get('step', '?')}; {metrics(training)}; "
        f"waits for {waiting(status.get('waiting'))}; {population(status.get('population'))}; "
        f"{size(exchange.get('bytes_sent'))} sent"
    )


def peer_row(peer: dict[str, Any]) -> tuple[str, ...]:
    """The cells of one peer, in the order of `PEER_COLUMNS`."""
    round_trip, seen = peer.get("round_trip_ms"), peer.get("last_seen_seconds")
    return (
        short(peer.get("id")),
        str(peer.get("address", "-")),
        str(peer.get("state", "-")),
        number(peer.get("step")),
        number(peer.get("lag")),
        "-" if round_trip is None else f"{round_trip:.1f} ms",
        "-" if seen is None else f"{seen:.1f} s ago",
    )


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, one line per row, for grep and awk."""
    widths = [max(len(row[index]) for row in [header, *rows]) for index in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    )


def watch_table(status: dict[str, Any], peers: Sequence[dict[str, Any]], rows: int) -> Table:
    """A node and at most `rows` of its peers, for redrawing in place."""
    cells = [peer_row(peer) for peer in peers[:rows]]
    if len(peers) > rows:
        cells.append((f"… {len(peers) - rows} more", *[""] * (len(PEER_COLUMNS) - 1)))
    return _table(PEER_COLUMNS, (3, 4, 5, 6), cells, str(status.get("summary", "")), status_line(status))


DEMO_COLUMNS = ("node", "state", "step", "loss", "accuracy", "waits for", "population", "sent", "received")


def demo_row(name: str, status: dict[str, Any] | None) -> tuple[str, ...]:
    """The cells of one node of the demo, in the order of `DEMO_COLUMNS`."""
    if status is None:
        return (name, "starting", *["-"] * (len(DEMO_COLUMNS) - 2))
    training, exchange = status.get("training") or {}, status.get("exchange") or {}
    counted = status.get("population") or {}
    wait = status.get("waiting")
    return (
        f"{name} {short((status.get('node') or {}).get('id'))}",
        str(status.get("state", "?")),
        str(status.get("step", "?")),
        number(training.get("loss")),
        number((training.get("metrics") or {}).get("accuracy")),
        "no peer" if not wait else f"{short(wait.get('slowest'))} at {wait.get('its_step', '?')}",
        number(counted.get("estimate"), 1),
        size(exchange.get("bytes_sent")),
        size(exchange.get("bytes_received")),
    )


def demo_table(rows: Sequence[Sequence[str]], title: str) -> Table:
    """The demo's live table."""
    return _table(DEMO_COLUMNS, (2, 3, 4, 6, 7, 8), rows, title)


def _table(
    header: Sequence[str], right: Sequence[int], rows: Sequence[Sequence[str]], title: str, caption: str = ""
) -> Table:
    from rich.table import Table
    from rich.text import Text

    # Text, not str: a peer's address must not be parsed as rich's markup.
    table = Table(title=Text(title), title_justify="left", caption=Text(caption) if caption else None)
    for position, name in enumerate(header):
        table.add_column(name, no_wrap=True, justify="right" if position in right else "left")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
