"""`p2pnode peers`: one line per peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2pnode.terminal.lines import Column, Line, Span, Style, table
from p2pnode.terminal.numbers import duration, number, short
from p2pnode.terminal.status_view import STATE_TONES, state_name

PEER_COLUMNS = (
    Column("id", keep=9),
    Column("address", keep=4, least=15),
    Column("state", keep=7),
    Column("step", right=True, keep=8),
    Column("lag", right=True, keep=6),
    Column("round trip", right=True, keep=3),
    Column("heard", right=True, keep=2),
    Column("version", keep=1),
)
#: A peer that is this many steps behind is shown in amber.
LAGGING_STEPS = 5


def peer_cells(peer: Mapping[str, Any]) -> list[Span]:
    """The cells of one peer, in the order of `PEER_COLUMNS`."""
    round_trip, seen, lag = peer.get("round_trip_ms"), peer.get("last_seen_seconds"), peer.get("lag")
    state = peer.get("state")
    is_behind = isinstance(lag, int) and lag >= LAGGING_STEPS
    return [
        (short(peer.get("id")), ""),
        (str(peer.get("address") or "-"), ""),
        (state_name(state) if state else "-", STATE_TONES.get(str(state), "")),
        (number(peer.get("step")), ""),
        (number(lag), "warn" if is_behind else ""),
        ("-" if round_trip is None else duration(round_trip / 1000), ""),
        ("-" if seen is None else f"{duration(seen)} ago", "dim"),
        (str(peer.get("version") or "-"), "dim"),
    ]


def peers_lines(peers: Sequence[Mapping[str, Any]], style: Style, limit: int | None = None) -> list[Line]:
    """A header and at most `limit` peers, those that train slowest or not at all last, as the node sorts them."""
    shown = peers if limit is None else peers[:limit]
    lines = table(PEER_COLUMNS, [peer_cells(peer) for peer in shown], style)
    if len(shown) < len(peers):
        lines.append([(f"… {len(peers) - len(shown)} more; `p2pnode peers` lists all", "dim")])
    return lines
