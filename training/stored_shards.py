"""What a checkpoint has of the shards of its run, for a run that has divided them since, or divides them now.

A checkpoint is read as it was cut. Where the run has several shards for each of its own, every copy is divided
(`training.shards.splitting`): the parts have the term, the version and the identities of the whole, so each ranks among
copies as the whole did, and no delta is lost or added twice. Blocks, and belongs into a thread.
"""

from __future__ import annotations

from typing import NamedTuple

from overlay.environment import Disk, Log
from training import checkpoint
from training.checkpoint import Checkpoint, CheckpointState
from training.exchange.store.records import StoredState
from training.exchange.terms import Term
from training.layout import shard_bounds
from training.manifest import Manifest
from training.shard_count import Partition
from training.shards.splitting import split


class StoredShards(NamedTuple):
    """Term and version of each shard of the vector, and the shards that the node owned or backed up."""

    versions: list[tuple[Term, int]]
    states: dict[int, StoredState]


def parts_of_each(state: CheckpointState, manifest: Manifest) -> int:
    """Into how many parts the run of this manifest divides each shard of a checkpoint; 0 if that is not how it is cut.

    Of a vector shorter than the number of shards there is one shard per value.
    """
    present = Partition(len(manifest.bounds()), manifest.shard_parts)
    return 0 if state.partition is None else state.partition.divisor(present)


def read(disk: Disk, stored: Checkpoint, manifest: Manifest, log: Log) -> StoredShards | None:
    """What a checkpoint offers to the run of this manifest. None, with a warning, if its shards cannot be divided into
    those of the run; then its vector alone is of use."""
    state, layout, bounds = stored.state, manifest.layout, manifest.bounds()
    if (cut := state.partition) is None:
        return None
    if not (factor := parts_of_each(state, manifest)):
        log.warning("checkpoint_cut_otherwise", step=state.step, stored=cut.shards, shards=len(bounds))
        return None
    former = shard_bounds(layout.total, *cut)
    states = checkpoint.read_states(disk, stored, former, layout.parameter_total, log)
    found = StoredShards(state.terms(), states)
    if factor == 1:
        return found
    log.info("shards_divided", stored=cut.shards, shards=len(bounds), step=state.step)
    return divided(found, factor, bounds)


def divided(found: StoredShards, factor: int, bounds: list[tuple[int, int]]) -> StoredShards:
    """The same of each of `factor` parts of every shard; `bounds` are those of the parts. `found.states` is emptied on
    the way, so that no state is in memory twice for longer than its division."""
    states: dict[int, StoredState] = {}
    for shard in list(found.states):
        one = found.states.pop(shard)
        first = shard * factor
        sizes = [stop - start for start, stop in bounds[first : first + factor]]
        for place, part in enumerate(split(one.state, sizes), first):
            states[place] = StoredState(one.term, part, one.clean)
    return StoredShards(
        [version for version in found.versions for _ in range(factor)],
        states,
    )
