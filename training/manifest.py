"""The manifest: what all nodes of a swarm must agree on, and the comparison of two manifests.

The founder's manifest is the swarm's. A joiner builds its own from its model and settings, and asks a member for the
swarm's; where the two differ, it is refused with both values. The number of shards is the swarm's: a joiner that was
given none (`exchange.shards = 0`) takes it over from the answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response, TransportError, gathered, in_parts
from p2pnode.training.errors import TrainingError
from p2pnode.training.layout import Layout, LayoutEntry, shard_bounds
from p2pnode.training.settings import BarrierSettings, ExchangeSettings, TrainingSettings
from p2pnode.training.shard_count import MAX_SHARDS, shard_count
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.swarm import Swarm
from p2pnode.training.trainer_link.interface import TrainerHello

#: Increased when nodes of two versions cannot work in one swarm.
PROTOCOL = 5
QUESTION_TIMEOUT_S = 3.0
#: A model of ten thousand tensors has a megabyte of names and shapes.
MAX_MANIFEST_BYTES = 8 << 20


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


class ManifestRefused(TrainingError):
    """This node and the swarm disagree; the text names the fields with both sides' values, and so does `fields`."""

    def __init__(self, mismatches: list[Mismatch], peer: str) -> None:
        super().__init__(explain(mismatches, peer=peer))
        self.fields = [item.field for item in mismatches]


def answer_joiners(swarm: Swarm, manifest: Manifest) -> None:
    """Answer joiners with this node's manifest."""

    async def handler(_sender: Contact, _payload: bytes, _stream: AsyncIterator[Buffer]) -> Response:
        return Response(b"", in_parts(msgspec.msgpack.encode(manifest)))

    swarm.register("manifest", handler)


async def compare_with(swarm: Swarm, peer: Contact, proposal: Manifest, *, adopts_shards: bool = False) -> Manifest:
    """Compare this node's proposal with a peer's manifest; returns the one that both have. Raises `ManifestRefused`
    where they differ.

    `adopts_shards`: it takes the swarm's number of shards. Raises `TransportError` when the peer has no manifest yet,
    has one that no node can have, or cannot be reached: ask another.
    """
    try:
        async with swarm.request(peer, "manifest", b"", timeout_s=QUESTION_TIMEOUT_S) as response:
            answer = msgspec.msgpack.decode(await gathered(response.body, MAX_MANIFEST_BYTES), type=Manifest)
    except (ValueError, RecursionError) as error:
        raise TransportError("foreign", peer.address, f"gave a malformed manifest: {error}") from error
    if adopts_shards:
        if not 1 <= answer.shards <= MAX_SHARDS:
            raise TransportError("foreign", peer.address, f"gave a manifest with {answer.shards} shards")
        proposal = msgspec.structs.replace(proposal, shards=answer.shards)
    if mismatches := compare(proposal, answer):
        raise ManifestRefused(mismatches, peer.node_id.hex()[:8])
    return proposal
