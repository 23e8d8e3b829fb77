"""Finds the newest good copy of one shard in the checkpoints of this node, for a shard that is broken in memory."""

from __future__ import annotations

from p2pnode.lifecycle.environment import NodeEnvironment
from training import checkpoint
from training.checkpoint import Checkpoint
from training.exchange.store.good_copies import StoredCopy
from training.layout import shard_bounds
from training.manifest import Manifest
from training.shards.delta_range import MAX_STATE_LENGTH, has_length


class CheckpointCopies:
    """Implements `StoredCopies` for the checkpoints of one run. A damaged file is logged, and an older one is read."""

    def __init__(self, environment: NodeEnvironment, manifest: Manifest) -> None:
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log
        self._manifest = manifest
        self._bounds = shard_bounds(manifest.layout.total, manifest.shards)

    async def newest_good(self, shard: int) -> StoredCopy | None:
        """See `StoredCopies`."""
        return await self._executor.run(self._newest_good, shard)

    def _newest_good(self, shard: int) -> StoredCopy | None:
        layout, genesis = self._manifest.layout, self._manifest.genesis
        try:
            complete = list(checkpoint.complete(self._disk, self._log))
        except OSError as error:
            self._log.warning("checkpoint_unreadable", folder=checkpoint.FOLDER, reason=str(error))
            return None
        for found in complete:
            if found.state.layout_digest != layout.digest() or found.state.genesis != genesis:
                continue
            copy = self._state(found, shard) or self._value(found, shard)
            if copy is not None:
                return copy
        return None

    def _state(self, found: Checkpoint, shard: int) -> StoredCopy | None:
        """The state of a shard that this node owned or backed up."""
        layout, momentum = self._manifest.layout, self._manifest.rule.outer_momentum
        stored = checkpoint.read_states(
            self._disk, found, self._bounds, layout.parameter_total, momentum, self._log, only=shard
        ).get(shard)
        if stored is None:
            return None
        state = stored.state
        return StoredCopy(found.folder, state.value, stored.term, state.version, state)

    def _value(self, found: Checkpoint, shard: int) -> StoredCopy | None:
        """The shard's part of the vector."""
        try:
            value = checkpoint.read_slice(self._disk, found.folder, self._manifest.layout, *self._bounds[shard])
            terms = found.state.terms()
        except (ValueError, OSError) as error:
            self._log.warning("checkpoint_unreadable", step=found.state.step, reason=str(error))
            return None
        if shard >= len(terms) or not has_length(value, MAX_STATE_LENGTH):
            return None
        listed = checkpoint.read_listed(self._disk, found, self._log)
        return StoredCopy(found.folder, value, *terms[shard], listed=listed.get(shard))
