"""How many shards a run has: by its model and the nodes its founder waits for, unless `exchange.shards` says it.

The number follows from three bounds. Each shard costs every node the same headers, rows and calls per step, whatever
its size, so a shard should be large: 64 shards of 0.1 M values took twice the processor time of 16. It is also what
one owner adds, sends and hands over at a time, so it should not be larger than a frame: `SHARD_VALUES` are one frame
of 1 MiB in bfloat16. And shards are placed by hashes, so of few shards the busiest owner has far more than its share
(`tools.scale_page.busiest_share`): there are `SHARDS_PER_NODE` per node, and `EVEN_SHARDS` where the values of one
shard more or less are worth a node's time. The number is a power of two: a model that grows a little keeps it.

The founder chooses it, every other node takes it over, and a later start remembers it: a run keeps the shards that it
was founded with. Pure.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from p2pnode.training.errors import TrainingError

MIN_SHARDS, MAX_SHARDS = 16, 4096
#: Enough for a few nodes to have about their shares, unless a shard would have fewer than `LEAST_VALUES`.
EVEN_SHARDS, LEAST_VALUES = 64, 1 << 14
#: Values of a shard at most, until there are `MAX_SHARDS`: 2 MiB of float32, 1 MiB of bfloat16.
SHARD_VALUES = 1 << 19
#: Shards for each node that the founder waits for (`training.min_nodes`).
SHARDS_PER_NODE = 4

#: Where the number comes from: `exchange.shards`, this rule, an earlier start of the run, or the swarm that was joined.
ChosenBy = Literal["setting", "model", "earlier", "swarm"]


class ShardsFixed(TrainingError):
    """`exchange.shards` names a number that the run cannot have."""


class ShardChoice(NamedTuple):
    """The shards of a run, and why there are so many."""

    shards: int
    by: ChosenBy


def shard_count(values: int, nodes: int = 1) -> int:
    """The number of shards for a vector of `values` values, and a founder that waits for `nodes` nodes.

    The least power of two from `MIN_SHARDS` to `MAX_SHARDS` that gives no shard more than `SHARD_VALUES` values, each
    node `SHARDS_PER_NODE` shards, and `EVEN_SHARDS` in all if each has `LEAST_VALUES`. A run without a model (0
    values) has `EVEN_SHARDS` of them at least: they hold tables, which grow.
    """
    even = min(EVEN_SHARDS, values // LEAST_VALUES) if values else EVEN_SHARDS
    wanted = max(-(-values // SHARD_VALUES), SHARDS_PER_NODE * nodes, even, MIN_SHARDS)
    return min(1 << (wanted - 1).bit_length(), MAX_SHARDS)


def choose(values: int, setting: int, stored: int, nodes: int = 1) -> ShardChoice:
    """What a node proposes. `setting`: `exchange.shards`, 0 for none; `stored`: the shards of the run when this node
    was in it last, 0 if it was not.

    A run keeps the shards that it was founded with. Raises `ShardsFixed` for a setting that differs from the stored
    number.
    """
    if stored and setting not in (0, stored):
        raise ShardsFixed(f"exchange.shards = {setting}, and this run has {stored} shards")
    if setting:
        return ShardChoice(setting, "setting")
    return ShardChoice(stored, "earlier") if stored else ShardChoice(shard_count(values, nodes), "model")
