"""How many shards a run has: by its model and the nodes its founder waits for, unless `exchange.shards` says it.

The number follows from three bounds. Each shard costs every node the same headers, rows and calls per step, whatever
its size, so a shard should be large. It is also what one owner adds, sends and hands over at a time, so it should not
be larger than a frame: `SHARD_VALUES` are one frame of 1 MiB in bfloat16. And shards are placed by hashes, so of fewer
than `SHARDS_PER_NODE` per node the busiest owner has far more than its share
(`documentation.scale.busiest_share`). The number is a power of two: a model that grows a little keeps it.

The founder chooses it, every other node takes it over, and a later start remembers it. Where a swarm has outgrown its
shards they are divided while it runs (`outgrown`, `training.exchange.divider`). When all nodes are off, the founder may
divide them too: it starts again with a multiple of their number. Pure.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from training.errors import TrainingError
from training.layout import BLOCK_VALUES, is_partition

MIN_SHARDS, MAX_SHARDS = 64, 4096
#: Values of a shard at most, until there are `MAX_SHARDS`: 2 MiB of float32, 1 MiB of bfloat16.
SHARD_VALUES = 1 << 19
#: Shards for each node that the founder waits for (`training.min_nodes`).
SHARDS_PER_NODE = 4
#: With fewer per node a swarm has outgrown its shards: they are divided until there are `SHARDS_PER_NODE` again.
FEWEST_PER_NODE = 2

#: Where the number comes from: `exchange.shards`, this rule, an earlier start of the run, the swarm that was joined, or
#: a division while it runs.
ChosenBy = Literal["setting", "model", "earlier", "swarm", "division"]


class ShardsFixed(TrainingError):
    """`exchange.shards` names a number that the run cannot have."""


class Partition(NamedTuple):
    """How a vector is cut: into so many shards, `parts` of each one that the run began with
    (`training.layout.shard_bounds`)."""

    shards: int
    parts: int = 1

    def divisor(self, into: Partition) -> int:
        """Into how many parts each shard of this partition is divided in another; 0 if that is no division of it."""
        factor, rest = divmod(into.shards, self.shards)
        return factor if not rest and into.parts == self.parts * factor else 0


class ShardChoice(NamedTuple):
    """The shards of a run, and why there are so many."""

    partition: Partition
    by: ChosenBy


def shard_count(values: int, nodes: int = 1) -> int:
    """The number of shards for a vector of `values` values, and a founder that waits for `nodes` nodes.

    The least power of two that gives no shard more than `SHARD_VALUES` values and each node `SHARDS_PER_NODE` shards,
    from `MIN_SHARDS` to `MAX_SHARDS`. A run without a model (0 values) has it by its nodes alone.
    """
    wanted = max(-(-values // SHARD_VALUES), SHARDS_PER_NODE * nodes, MIN_SHARDS)
    return min(1 << (wanted - 1).bit_length(), MAX_SHARDS)


def outgrown(present: Partition, values: int, nodes: int) -> Partition | None:
    """The shards that a swarm of `nodes` nodes divides its present ones into; None while they are enough, or cannot be
    divided further: there are `MAX_SHARDS` at most, and none has less than `BLOCK_VALUES` values.

    The factor is a power of two. So of the divisions that two nodes choose at once, one is a division of the other.
    """
    if FEWEST_PER_NODE * nodes <= present.shards:
        return None
    factor = 1
    while present.shards * factor < SHARDS_PER_NODE * nodes:
        shards = 2 * factor * present.shards
        if (
            shards > MAX_SHARDS
            or values // shards < BLOCK_VALUES
            or not is_partition(values, shards, 2 * factor * present.parts)
        ):
            break
        factor *= 2
    return None if factor == 1 else Partition(factor * present.shards, factor * present.parts)


def is_expected(shards: int, nodes: int) -> bool:
    """Whether a swarm of about `nodes` nodes may have divided its shards into so many: one member that says so is
    believed. It has four times what `outgrown` gives for this estimate, which is not that of others. Of two nodes one
    has no third to ask."""
    return nodes <= 2 or shards <= max(MIN_SHARDS, 4 * SHARDS_PER_NODE * nodes)


def choose(values: int, setting: int, stored: Partition | None, nodes: int = 1) -> ShardChoice:
    """What a node proposes. `setting`: `exchange.shards`, 0 for none; `stored`: the shards of the run when this node
    was in it last, None if it was not.

    A setting that is a multiple of the stored number divides the shards. Raises `ShardsFixed` for any other that
    differs: what is stored can be divided, and put together by nobody.
    """
    count = setting or shard_count(values, nodes)
    if stored is None:
        return ShardChoice(Partition(count), "setting" if setting else "model")
    # A vector with fewer values than shards is cut into one shard per value.
    if stored.shards in (count, min(count, values)):
        return ShardChoice(Partition(count, stored.parts), "setting" if setting else "earlier")
    if not setting or Partition(setting, stored.parts * setting // stored.shards).divisor(stored):
        return ShardChoice(stored, "earlier")  # it is the number that the run had before its shards were divided
    divided = Partition(setting, stored.parts * (setting // stored.shards))
    if not stored.divisor(divided) or not is_partition(values, *divided):
        raise ShardsFixed(f"exchange.shards = {setting}, and this run has {stored.shards} shards")
    return ShardChoice(divided, "setting")
