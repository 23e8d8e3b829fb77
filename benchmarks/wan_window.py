"""What `wan` reads from notes, rows of /steps and logs of a measured time. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

Note = Mapping[str, Any]
WARNINGS = ("warning", "error", "critical")
#: Counted with the warnings, whatever their level: on these lines nobody is dead.
DOUBTS = ("peer_suspect", "peer_dead")


@dataclass(frozen=True, slots=True)
class Node:
    """One node in the measured time. Counts of shards are means per step; ages are in turns; `sent_bytes` are the
    interface's. `left`: steps with shards that no owner had acknowledged some time after the training had stopped."""

    share: float
    steps: float
    sent_bytes: int
    unacknowledged: float = 0.0
    refused: float = 0.0
    missing: float = 0.0
    pulled: float = 0.0
    oldest: float = 0.0
    age: float = 0.0
    lost: int = 0
    left: int = 0
    warnings: dict[str, int] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    #: The share since all nodes began to train, while the states of the shards were moved too.
    share_from_start: float = 0.0

    @property
    def sent_per_step(self) -> float:
        """MB."""
        return self.sent_bytes / 1e6 / self.steps if self.steps else float("nan")


def notes(text: str) -> list[Note]:
    """The whole lines of a file that is still written."""
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def training_share(of: Iterable[Note], began_s: float, ended_s: float) -> float:
    """The part of the time in which local training ran."""
    inside = (min(note["ended_s"], ended_s) - max(note["began_s"], began_s) for note in of)
    return sum(seconds for seconds in inside if seconds > 0) / (ended_s - began_s)


def steps_made(of: Iterable[Note], began_s: float, ended_s: float) -> float:
    """Turns of local training in that time; those across its ends by their parts."""
    parts = (
        (min(note["ended_s"], ended_s) - max(note["began_s"], began_s)) / (note["ended_s"] - note["began_s"])
        for note in of
    )
    return sum(part for part in parts if part > 0)


def warnings(log: str) -> dict[str, int]:
    """How often each event of a warning or worse, or of a doubt in a peer, is in a log, the most frequent first."""
    found: Counter[str] = Counter()
    for line in log.splitlines():
        if line.startswith("{"):
            entry = json.loads(line)
            if entry.get("level") in WARNINGS or entry.get("event") in DOUBTS:
                found[entry["event"]] += 1
    return dict(found.most_common())


def node(
    of: Sequence[Note],
    rows: Sequence[Mapping[str, Any]],
    *,
    began_s: float,
    ended_s: float,
    sent_bytes: int,
    log: str = "",
    left: int = 0,
    lost: int = 0,
    started_s: float | None = None,
) -> Node:
    """One of our nodes, from the notes of its trainer, its rows of /steps in that time, and its log of that time.
    `started_s`: when all had begun to train."""
    inside = [note for note in of if began_s <= note["began_s"] <= ended_s]

    def per_step(key: str) -> float:
        values = [row[key] for row in rows if key in row]
        return mean(sum(value.values()) if isinstance(value, Mapping) else value for value in values) if values else 0.0

    return Node(
        share=training_share(of, began_s, ended_s),
        steps=steps_made(of, began_s, ended_s),
        sent_bytes=sent_bytes,
        unacknowledged=per_step("outstanding"),
        refused=per_step("refused"),
        missing=per_step("pull_missing"),
        pulled=per_step("pulled"),
        oldest=max((note["oldest"] for note in inside), default=0.0),
        age=mean(note["age"] for note in inside) if inside else 0.0,
        lost=lost,
        left=left,
        warnings=warnings(log),
        share_from_start=training_share(of, began_s if started_s is None else started_s, ended_s),
        phases_s={phase: round(per_step(f"{phase}_seconds"), 3) for phase in ("train", "push", "wait", "pull")},
    )


def is_settled(exchanges: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every shard has one owner, and a backup, by the `exchange` of every node's `/status`."""
    shards = [one.get("shards", 0) for one in exchanges]
    owned = sum(one.get("shards_owned", 0) for one in exchanges)
    return min(shards) > 0 and owned == shards[0] and not any(one["shards_without_backup"] for one in exchanges)
