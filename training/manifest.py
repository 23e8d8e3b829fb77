"""The manifest: what all nodes of a swarm must agree on, and the comparison of two manifests.

The founder's manifest is the swarm's. A joiner builds its own from its model and settings; where the two differ, it is
refused with both values. Pure.
"""

from __future__ import annotations

import msgspec

from p2pnode.training.layout import Layout, LayoutEntry, shard_bounds
from p2pnode.training.settings import BarrierSettings, ExchangeSettings, TrainingSettings
from p2pnode.training.shard_count import shard_count
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.trainer_link.interface import TrainerHello

#: Increased when nodes of two versions cannot work in one swarm.
PROTOCOL = 5


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must be equal on all nodes; `genesis` is the founder's random number, as hex."""

    protocol: int
    run: str
    genesis: str
    task: str
    task_version: str
    layout: Layout
    frozen_digest: str
    shards: int
    rule: Rule
    weight: str
    replicas: int
    local_steps: int
    barrier_family: str
    max_steps: int
    until: str
    #: A fingerprint of each tensor in `frozen_digest`, for the message.
    frozen: dict[str, str] = {}

    def bounds(self) -> list[tuple[int, int]]:
        """The slices of the shards."""
        return shard_bounds(self.layout.total, self.shards)


#: Of the mismatches that a peer sends, so many are shown, each value cut to so many characters.
MAX_SHOWN_MISMATCHES, MAX_SHOWN_CHARACTERS = 32, 200


class Mismatch(msgspec.Struct, frozen=True):
    """One field on which two nodes disagree, with both values as text."""

    field: str
    mine: str
    theirs: str


def propose(
    *,
    run: str,
    genesis: bytes,
    hello: TrainerHello,
    training: TrainingSettings,
    barrier: BarrierSettings,
    exchange: ExchangeSettings,
    shards: int = 0,
) -> Manifest:
    """The manifest that follows from this node's settings and model. `shards` is what was chosen
    (`training.shard_count.choose`); 0: that of the settings, or of the model."""
    return Manifest(
        protocol=PROTOCOL,
        run=run,
        genesis=genesis.hex(),
        task=hello.task,
        task_version=hello.task_version,
        layout=hello.layout,
        frozen_digest=hello.frozen_digest,
        shards=shards or exchange.shards or shard_count(hello.layout.total),
        rule=Rule(exchange.outer_lr, exchange.outer_momentum, exchange.robust),
        weight=exchange.weight,
        replicas=exchange.replicas,
        local_steps=training.local_steps,
        # Under bsp deltas become visible at another time. Nothing else of the barrier has to be equal.
        barrier_family="bsp" if barrier.method == "bsp" else "relaxed",
        max_steps=training.max_steps,
        until=training.until,
        frozen=hello.frozen,
    )


def compare(mine: Manifest, theirs: Manifest) -> list[Mismatch]:
    """The fields that differ, the most informative first; empty when the two nodes can train together."""
    found = [
        Mismatch(name, str(getattr(mine, name)), str(getattr(theirs, name)))
        for name in ("protocol", "run", "genesis", "task", "task_version")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if mine.layout != theirs.layout:
        found.append(_layout_mismatch(mine.layout, theirs.layout))
    if (frozen := _frozen_mismatch(mine, theirs)) is not None:
        found.append(frozen)
    names = ("shards", "rule", "weight", "replicas", "local_steps", "barrier_family")
    found.extend(
        Mismatch(name, str(getattr(mine, name)), str(getattr(theirs, name)))
        for name in (*names, "max_steps", "until")
        if getattr(mine, name) != getattr(theirs, name)
    )
    return found


def explain(mismatches: list[Mismatch], *, peer: str) -> str:
    """One sentence with both values of every mismatch; a peer's values are cut and printable."""
    shown = [
        f"{_shown(item.field)}: mine {_shown(item.mine)}, theirs {_shown(item.theirs)}"
        for item in mismatches[:MAX_SHOWN_MISMATCHES]
    ]
    return f"this node does not fit the swarm of {peer}: {'; '.join(shown)}"


def _shown(text: str) -> str:
    printable = "".join(character if character.isprintable() else "?" for character in text[: MAX_SHOWN_CHARACTERS + 1])
    return printable if len(printable) <= MAX_SHOWN_CHARACTERS else f"{printable[:MAX_SHOWN_CHARACTERS]}…"


def _layout_mismatch(mine: Layout, theirs: Layout) -> Mismatch:
    for own, other in zip(mine.entries, theirs.entries, strict=False):
        if own != other:
            return Mismatch("layout", _describe(own), _describe(other))
    return Mismatch(
        "layout",
        f"{len(mine.entries)} tensors of {mine.total} values",
        f"{len(theirs.entries)} tensors of {theirs.total} values",
    )


def _frozen_mismatch(mine: Manifest, theirs: Manifest) -> Mismatch | None:
    """The first frozen tensor that differs, and how many do."""
    names = [
        name
        for name in sorted(mine.frozen.keys() | theirs.frozen.keys())
        if mine.frozen.get(name) != theirs.frozen.get(name)
    ]
    if names:
        others = f", and {len(names) - 1} more" if len(names) > 1 else ""
        ours, other = (f"{names[0]} {node.frozen.get(names[0], 'is not frozen')}" for node in (mine, theirs))
        return Mismatch("frozen", ours + others, other + others)
    if mine.frozen_digest != theirs.frozen_digest:
        return Mismatch("frozen_digest", mine.frozen_digest, theirs.frozen_digest)
    return None


def _describe(entry: LayoutEntry) -> str:
    return f"{entry.kind} {entry.name} {list(entry.shape)} {entry.dtype}"
