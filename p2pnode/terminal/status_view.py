"""`p2pnode status`: a status of the HTTP API as lines, and the parts of it that other views share.

A node of another version may lack any key, so every one is looked up with a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2pnode.terminal.lines import Column, Line, Span, Style, Tone, labelled, table
from p2pnode.terminal.numbers import duration, number, progress_text, rate, share, short, size

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


#: The tone of each state of a node or a peer.
STATE_TONES: Mapping[str, Tone] = {
    "training": "ok",
    "serving": "ok",
    "finished": "ok",
    "waiting": "warn",
    "waiting_for_nodes": "warn",
    "joining": "warn",
    "paused": "warn",
    "leaving": "warn",
    "suspect": "bad",
    "stalled": "bad",
    "failed": "bad",
}
_MARKS: Mapping[Tone, str] = {"ok": "●", "warn": "▲", "bad": "✖"}
_LEVELS: Mapping[str, Tone] = {"info": "", "warning": "warn", "error": "bad"}

Row = tuple[str, str]

#: More devices than these are counted by state.
NAMED_DEVICES = 8


def part(status: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object of the status; empty where it is null or missing."""
    value = status.get(key)
    return value if isinstance(value, dict) else {}


def listed(status: Mapping[str, Any], key: str) -> list[Any]:
    """A list of the status; empty where it is null or missing."""
    value = status.get(key)
    return value if isinstance(value, list) else []


def objects(status: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The objects of a list of the status."""
    return [entry for entry in listed(status, key) if isinstance(entry, dict)]


def state_name(state: object) -> str:
    """A state in words."""
    return str(state or "?").replace("_", " ")


def tone_of(status: Mapping[str, Any]) -> Tone:
    """Green, amber or red: the state, or what is worst in `health`."""
    levels = {_LEVELS.get(str(entry.get("level")), "") for entry in objects(status, "health")}
    tone = STATE_TONES.get(str(status.get("state")), "")
    if "bad" in levels or tone == "bad":
        return "bad"
    return "warn" if "warn" in levels or tone == "warn" else tone


def population(entry: Mapping[str, Any] | None) -> str:
    """ "4 nodes" if they are counted, "about 24 nodes (20 to 28)" if they are estimated."""
    if not entry or entry.get("estimate") is None:
        return "population unknown"
    if entry.get("exact"):
        count = round(entry["estimate"])
        return f"{count} node" if count == 1 else f"{count} nodes"
    low, high = entry.get("low"), entry.get("high")
    bounds = f" ({low:.0f} to {high:.0f})" if low is not None and high is not None else ""
    return f"about {entry['estimate']:.0f} nodes{bounds}"


def waiting(entry: Mapping[str, Any] | None) -> str:
    """Which peers a node waits for, and since when."""
    if not entry:
        return "no peer"
    slowest = entry.get("slowest")
    whom = f"; slowest {short(slowest)} at step {entry.get('its_step', '?')}" if slowest else ""
    since = duration(float(entry.get("since_seconds") or 0.0))
    return f"{entry.get('behind', '?')} of {entry.get('sampled', '?')} sampled peers, for {since}{whom}"


def metrics(training: Mapping[str, Any]) -> str:
    """ "loss 0.310, accuracy 0.930 at step 410 on 360 samples"."""
    values = part(training, "metrics")
    parts = [f"loss {number(training.get('loss'))}"]
    parts += [f"{name} {number(value)}" for name, value in values.items()]
    text = ", ".join(parts)
    if training.get("evaluated_step") is not None and values:
        text += f" at step {training['evaluated_step']}"
        if training.get("evaluated_samples"):
            text += f" on {training['evaluated_samples']} samples"
    return text


def lost_peer(entry: Mapping[str, Any]) -> str:
    """ "7f3a7f3a at 10.0.0.5:8468 was found dead 12 s ago, at step 410"."""
    how = "left" if entry.get("how") == "left" else "was found dead"
    step = entry.get("step")
    at = "" if step is None else f", at step {step}"
    ago = duration(entry.get("seconds_ago"))
    return f"{short(entry.get('id'))} at {entry.get('address') or '?'} {how} {ago} ago{at}"


def headline(status: Mapping[str, Any], style: Style) -> list[Line]:
    """The summary with its colour."""
    tone = tone_of(status)
    mark = _MARKS.get(tone, "●")
    text = str(status.get("summary") or f"{state_name(status.get('state'))} at step {status.get('step', '?')}")
    lines = labelled("", text, style, indent=2, tone="bold")
    lines[0][0] = (f"{mark} ", tone)
    return lines


def status_lines(status: Mapping[str, Any], style: Style) -> list[Line]:
    """The answer to `p2pnode status`: the summary, then connected, learning, waiting, exchange, health."""
    lines: list[Line] = [*headline(status, style), []]
    for label, text in [
        *_connected(status),
        *_learning(status),
        *_waiting(status),
        *device_rows(objects(status, "devices"), part(status, "coordination")),
        *gpu_rows(objects(status, "gpus")),
        *_exchange(status),
        *repair_rows(part(status, "exchange")),
        *value_rows(part(status, "values")),
        *server_rows(part(status, "server")),
        *_dispatch(part(status, "dispatch")),
        *_result(part(status, "result")),
    ]:
        lines += labelled(label, text, style)
    return [*lines, *progress_lines(status, style), *health_lines(status, style)]


def _connected(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    node = part(status, "node")
    closed = part(status, "swarm").get("closed")
    kind = "" if closed is None else " (closed by a key)" if closed else " (open: no key)"
    up = f", up {duration(node['uptime_seconds'])}" if "uptime_seconds" in node else ""
    rows = [
        ("connected", f"{population(status.get('population'))}; run {status.get('run', '?')}{kind}"),
        ("", f"this node: {short(node.get('id'))} at {node.get('address', '?')}{up}"),
    ]
    recent = objects(status, "lost")[:3]
    return rows + [("lost" if at == 0 else "", lost_peer(entry)) for at, entry in enumerate(recent)]


def _learning(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    training = part(status, "training")
    pace = f"{duration(training.get('step_seconds'))} a step"
    busy = f", {share(training['training_share'])} of it training" if training.get("training_share") else ""
    return [
        ("learning", f"{state_name(status.get('state'))} at step {status.get('step', '?')}; {metrics(training)}"),
        ("", f"{pace}{busy}; trainer {training.get('trainer', '?')}"),
    ]


def _waiting(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    barrier = part(status, "barrier").get("method", "?")
    return [("waiting", f"for {waiting(status.get('waiting'))} (barrier {barrier})")]


def _exchange(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    exchange, line = part(status, "exchange"), part(status, "line")
    refused = exchange.get("refused", 0)
    owned = exchange.get("shards_owned", "?")
    rows = [
        (
            "exchange",
            f"{owned} {'shard' if owned == 1 else 'shards'} owned; {size(exchange.get('bytes_sent'))} sent, "
            f"{size(exchange.get('bytes_received'))} received; {refused or 'none'} refused",
        )
    ]
    upload = line.get("upload_bytes_per_s") or line.get("upload_at_least_bytes_per_s")
    if upload:
        least = "" if line.get("upload_bytes_per_s") else "at least "
        rows.append(("", f"line: {least}{rate(upload)} up; codec {line.get('codec') or '?'}"))
    return rows


def _dispatch(dispatch: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The queue of the records, and who serves it; nothing where none are dispatched."""
    if not dispatch:
        return []
    who = "this node" if dispatch.get("serves") else short(dispatch.get("master"))
    passes = dispatch.get("passes") or "no end"
    if dispatch.get("tasks") is None:
        return [("records", f"master {who}; {dispatch.get('last_error') or 'nothing is registered yet'}")]
    counts = ", ".join(f"{dispatch.get(state, '?')} {state}" for state in ("todo", "leased", "done", "failed"))
    store, trained = dispatch.get("store") or "?", dispatch.get("records_trained", 0)
    return [
        ("records", f"pass {dispatch.get('pass_number', '?')} of {passes}: {counts}"),
        ("", f"master {who} ({store}), {trained} records trained here"),
    ]


def _result(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How the run ended, and where its model is; nothing while it goes on."""
    if not result:
        return []
    best = part(result, "best")
    ended = f"after {result.get('steps', '?')} steps ({result.get('reason', '?')})"
    if best:
        ended += f"; best {best.get('metric', '?')} {number(best.get('value'))} at step {best.get('step', '?')}"
    rows = [("ended", ended), ("", f"model: {result.get('model') or 'no file was written'}")]
    rows += [("", f"    {line}") for line in listed(result, "load")]
    if result.get("may_differ"):
        rows.append(("", f"it may differ from the model of other nodes: {result['may_differ']}"))
    return rows


def progress_lines(status: Mapping[str, Any], style: Style, label: str = "progress") -> list[Line]:
    """What takes long, with the time to go."""
    lines: list[Line] = []
    indent = 11 if label else 0
    width = (80 if style.width is None else style.width) - indent
    for entry in objects(status, "progress"):
        text = progress_text(
            str(entry.get("what", "?")),
            float(entry.get("done") or 0),
            float(entry.get("total") or 0),
            str(entry.get("unit") or ""),
            entry.get("left_seconds"),
            width=width,
            passed_s=float(entry.get("since_seconds") or 0),
        )
        lines.append([(f"{label if not lines else '':<{indent}}", "dim"), (text, "")])
    return lines


def health_lines(status: Mapping[str, Any], style: Style) -> list[Line]:
    """What needs attention, each with what to do below it."""
    lines: list[Line] = []
    for entry in objects(status, "health"):
        level = str(entry.get("level", "?"))
        label = "" if lines else "health"
        lines += labelled(label, f"{level}: {entry.get('what', '')}", style, tone=_LEVELS.get(level, "warn"))
        if entry.get("do"):
            lines += labelled("", f"do: {entry['do']}", style)
    return lines or labelled("health", "nothing to report", style, tone="ok")


def status_line(status: Mapping[str, Any]) -> str:
    """One line, for `watch` without a terminal."""
    training, exchange = part(status, "training"), part(status, "exchange")
    return (
        f"{status.get('state', '?')} step {status.get('step', '?')}; {metrics(training)}; "
        f"waits for {waiting(status.get('waiting'))}; {population(status.get('population'))}; "
        f"{size(exchange.get('bytes_sent'))} sent"
    )


# -- what not every node has: devices, named values, a parameter server, repairs ---------------------------------------


def device_rows(devices: Sequence[Mapping[str, Any]], coordination: Mapping[str, Any]) -> list[Row]:
    """One row per device, or their states where they are many; then what the nodes decide together."""
    if len(devices) > NAMED_DEVICES:
        states = [str(device.get("state", "?")) for device in devices]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        texts = [f"{len(devices)}: {counts}"]
    else:
        texts = [_device(device) for device in devices]
    if coordination:
        if coordination.get("serves"):
            dividing = f"this node divides the local steps, among {coordination.get('trainers', '?')} trainers"
        elif coordination.get("server"):
            dividing = f"{short(coordination['server'])} divides the local steps"
        else:
            dividing = "no node answers that divides the local steps: this one takes its own share"
        leader = f"; the leader of all is at {short(coordination['leader'])}" if coordination.get("leader") else ""
        texts.append(dividing + leader)
    return _labelled("devices", texts)


def _device(device: Mapping[str, Any]) -> str:
    failures = device.get("failures") or 0
    return (
        f"{device.get('device', '?')} ({device.get('index', '?')}): {device.get('state', '?')}"
        f"{', leads' if device.get('leads') else ''}, loss {number(device.get('loss'))}, "
        f"{device.get('optimizer_steps', '?')} steps at {duration(device.get('step_seconds'))}, "
        f"{device.get('samples', '?')} samples" + (f", failed {failures} times" if failures else "")
    )


def gpu_rows(gpus: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row per GPU; nothing without."""
    return _labelled("gpu", [_gpu(gpu) for gpu in gpus])


def _gpu(gpu: Mapping[str, Any]) -> str:
    total, busy, degrees = (gpu.get(key) for key in ("memory_total_bytes", "utilisation", "temperature_celsius"))
    facts = [] if total is None else [f"{size(gpu.get('memory_used_bytes'))} of {size(total)}"]
    facts += [] if busy is None else [f"{share(busy)} busy"]
    facts += [] if degrees is None else [f"{degrees:.0f} °C"]
    return f"{gpu.get('device', '?')} ({gpu.get('name', '?')}): {', '.join(facts) or 'does not answer'}"


def value_rows(values: Mapping[str, Any]) -> list[Row]:
    """Named values owned here; nothing in a run without."""
    if not values:
        return []
    waiting, unanswered = values.get("waiting") or 0, values.get("unanswered") or 0
    rest = [f"{values['refused']} refused"] if values.get("refused") else []
    rest += [f"{waiting} wait here ({size(values.get('waiting_bytes'))})"] if waiting else []
    rest += [f"{unanswered} of this node have no answer yet"] if unanswered else []
    texts = [
        f"{values.get('keys', '?')} keys owned, {size(values.get('bytes'))} of {size(values.get('limit_bytes'))}",
        ", ".join([f"{values.get('updates', '?')} updates applied, {values.get('reads', '?')} keys read", *rest]),
    ]
    return _labelled("values", texts)


def server_rows(server: Mapping[str, Any]) -> list[Row]:
    """The tasks of a parameter server; nothing where this node serves none."""
    if not server:
        return []
    rest = [f"{server[key]} {words}" for key, words in _REST.items() if server.get(key)]
    texts = [
        f"version {server.get('version', '?')}, {server.get('workers', '?')} workers",
        ", ".join([f"{server.get('given', '?')} tasks given, {server.get('done', '?')} done", *rest]),
    ]
    return _labelled("server", texts)


_REST = {
    "held": "with workers",
    "waiting": "wait for one",
    "again": "given again",
    "refused": "updates refused as too old",
    "lost": "updates lost",
}


def repair_rows(exchange: Mapping[str, Any]) -> list[Row]:
    """What was repaired, and what was lost for good; nothing where neither is."""
    parts = [f"{found} {_REPAIRS[key][found != 1]}" for key in _REPAIRS if (found := exchange.get(key))]
    return [("", "; ".join(parts))] if parts else []


#: Of one, and of several. A delta is counted in each shard by itself: one that is lost whole counts once per shard.
_REPAIRS = {
    "shards_resigned": ("broken shard left to its backup", "broken shards left to their backups"),
    "shards_to_mend": ("superseded copy waits for its owner", "superseded copies wait for their owners"),
    "shards_without_backup": ("shard has no backup yet", "shards have no backup yet"),
    "repaired": ("shard of a delta repaired after a split", "shards of deltas repaired after a split"),
    "lost_in_splits": ("shard of a delta lost in splits", "shards of deltas lost in splits"),
    "lost_in_restarts": ("shard of a delta lost in restarts", "shards of deltas lost in restarts"),
}


def _labelled(label: str, texts: Sequence[str]) -> list[Row]:
    return [(label if at == 0 else "", text) for at, text in enumerate(texts)]
