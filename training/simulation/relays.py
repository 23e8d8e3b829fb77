"""How many requests a node sends per step, and how often a delta is sent, with and without relays.

Counted over the tables of next nodes that real nodes would have (`training.exchange.aggregation.routes`), for random
ids and shards that are placed at random. All nodes push once, and every node sends one bundle to each next node: how it
is when they push at about the same time. Where they do not, a relay sends up to 1 / `GATHER_SHARE` bundles per step to
each. All nodes pull once: from each next node what it hands down, and from owners what no node is on the way to, what
they back up, and one shard for a check. Pure.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from overlay.ids import ID_BYTES
from training.encoding.codecs import CodecName
from training.exchange.aggregation.routes import RouteTable
from training.shard_count import MAX_SHARDS
from training.step_bytes import bytes_per_value

#: Nodes of which the requests are counted, and deltas whose way is followed.
SAMPLED_NODES, SAMPLED_WAYS = 12, 24
SHARDS_PER_NODE = 4
#: The default of `exchange.sparse_values`.
SPARSE_VALUES = 128


@dataclass(frozen=True, slots=True)
class Load:
    """Means per node and step. `transfers`: how often a delta is sent until its owner has it. `pulls`: those from
    owners; `follows`: those from other nodes."""

    pushes: float
    bundles: float
    forwards: float
    pulls: float
    transfers: float
    follows: float = 0.0

    @property
    def for_deltas(self) -> float:
        """What a node sends with its deltas and those of others, but for forwards."""
        return self.pushes + self.bundles

    @property
    def for_values(self) -> float:
        """What it asks for values."""
        return self.pulls + self.follows


@cache
def load(nodes: int, shards: int, bits: int, seed: int = 1) -> Load:
    """The requests of a swarm with so many shards, each with a backup; `bits` 0: without relays."""
    chance = random.Random(seed)
    ids = [chance.randbytes(ID_BYTES) for _ in range(nodes)]
    owned: dict[bytes, dict[bytes, None]] = {}
    backed: dict[bytes, dict[bytes, None]] = {}
    for _ in range(shards):
        owner, backup = chance.sample(ids, 2)
        owned.setdefault(owner, {})[backup] = None
        backed.setdefault(backup, {})[owner] = None
    backups = sum(len(theirs) for theirs in owned.values()) / len(owned)
    owners = len(owned) * (nodes - 1) / nodes
    if not bits:
        return Load(owners, 0.0, owners * backups, owners, 1.0)
    pushes = bundles = pulls = follows = 0.0
    sampled = min(SAMPLED_NODES, nodes)
    for me in chance.sample(ids, sampled):
        table = RouteTable(me, (one for one in ids if one != me), nodes, bits)
        direct = sum(table.hop(owner) is None for owner in owned if owner != me)
        pushes += direct
        # What others hand it for the owners that share its digits goes to each of them in a bundle.
        bundles += len(table.next_nodes()) + direct
        follows += len(table.next_nodes())
        pulls += direct + sum(table.hop(owner) is not None for owner in backed.get(me, {})) + 1
    pushes, bundles, pulls, follows = (count / sampled for count in (pushes, bundles, pulls, follows))
    # As many as are sent are received, and none of them is forwarded to a backup in more than one request.
    forwards = (pushes + bundles) * backups * len(owned) / nodes
    return Load(pushes, bundles, forwards, pulls, _transfers(ids, bits, chance), follows)


def _transfers(ids: list[bytes], bits: int, chance: random.Random) -> float:
    """How often a delta is sent, in the mean."""
    count = 0
    for _ in range(SAMPLED_WAYS):
        at, owner = chance.sample(ids, 2)
        while at != owner:
            at = RouteTable(at, (one for one in ids if one != at), len(ids), bits).hop(owner) or owner
            count += 1
    return count / SAMPLED_WAYS


#: Nodes, and digits of how many bits; 0: without relays.
CASES = tuple((nodes, bits) for nodes in (300, 1000, 10_000) for bits in (0, 5, 4, 3))


def bytes_factor(transfers: float, push: CodecName, pull: CodecName) -> float:
    """The bytes that a node sends with so many transfers of each delta, over those with one; each delta is forwarded
    once, and every node pulls once."""
    pushed, pulled = bytes_per_value(push, SPARSE_VALUES), bytes_per_value(pull, SPARSE_VALUES)
    return (pushed * (transfers + 1.0) + pulled) / (pushed * 2.0 + pulled)


def table() -> str:
    """The table of docs/scale.md."""
    lines = [
        "| nodes | bits | deltas | values | both | forwards, at most | sent | bytes: sparse | bfloat16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for nodes, bits in CASES:
        found = load(nodes, min(SHARDS_PER_NODE * nodes, MAX_SHARDS), bits)
        sparse = bytes_factor(found.transfers, "sparse", "int4")
        dense = bytes_factor(found.transfers, "bfloat16", "bfloat16")
        lines.append(
            f"| {nodes:,} | {bits or '–'} | {found.for_deltas:.0f} | {found.for_values:.0f} | "
            f"{found.for_deltas + found.for_values:.0f} | {found.forwards:.0f} | {found.transfers:.1f} | "
            f"{sparse:.2f} | {dense:.2f} |"
        )
    return "\n".join(lines)
