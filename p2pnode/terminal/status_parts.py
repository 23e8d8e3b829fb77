"""Rows of `p2pnode status` for what not every node has: several devices, named values, a parameter server, repairs.

Each function takes an object of the status, which may be of another version, so every key is looked up with a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2pnode.terminal.numbers import duration, number, short, size

Row = tuple[str, str]

#: More devices than these are counted by state.
NAMED_DEVICES = 8


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
    "lost": ("shard of a delta dropped before an owner took it", "shards of deltas dropped before an owner took them"),
    "lost_in_splits": ("shard of a delta lost in splits", "shards of deltas lost in splits"),
    "lost_in_restarts": ("shard of a delta lost in restarts", "shards of deltas lost in restarts"),
}


def _labelled(label: str, texts: Sequence[str]) -> list[Row]:
    return [(label if at == 0 else "", text) for at, text in enumerate(texts)]
