"""Finds the newest good copy of one shard in the checkpoints of this node, for a shard that is broken in memory."""

from __future__ import annotations

from p2pnode.lifecycle.environment import NodeEnvironment
from training import checkpoint, stored_shards
from training.checkpoint import Checkpoint
from training.exchange.store.good_copies import StoredCopy
from training.layout import shard_bounds
from training.manifest import Manifest
from training.shards.delta_range import MAX_STATE_LENGTH, has_length
from training.shards.splitting import split


class CheckpointCopies:
    """Implements `StoredCopies` for the checkpoints of one run. A damaged file is logged, and an older one is read."""

    def __init__(self, environment: NodeEnvironment, manifest: Manifest) -> None:
        self._disk = environment.disk
        self._executor = environment.executor
        self._log = environment.log
        self._manifest = manifest
        self._bounds = manifest.bounds()

    def on_divided(self, manifest: Manifest) -> None:
        """The shards of the run were divided: from now on its parts are asked for."""
        self._manifest, self._bounds = manifest, manifest.bounds()

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
            # Of a checkpoint from before a division of the shards, the part of a shard.
            factor = stored_shards.parts_of_each(found.state, self._manifest)
            if not factor:
                continue
            copy = self._state(found, shard, factor) or self._value(found, shard, factor)
            if copy is not None:
                return copy
        return None

    def _state(self, found: Checkpoint, shard: int, factor: int) -> StoredCopy | None:
        """The state of a shard that this node owned or backed up."""
        layout, momentum, cut = self._manifest.layout, self._manifest.rule.outer_momentum, found.state.partition
        assert cut is not None, "it has parts of each shard"
        whole, bounds = shard // factor, shard_bounds(layout.total, *cut)
        stored = checkpoint.read_states(
            self._disk, found, bounds, layout.parameter_total, momentum, self._log, only=whole
        ).get(whole)
        if stored is None:
            return None
        state = stored.state
        if factor > 1:
            parts = self._bounds[whole * factor : (whole + 1) * factor]
            state = split(state, [stop - start for start, stop in parts])[shard % factor]
        return StoredCopy(found.folder, state.value, stored.term, state.version, state)

    def _value(self, found: Checkpoint, shard: int, factor: int) -> StoredCopy | None:
        """The shard's part of the vector."""
        try:
            value = checkpoint.read_slice(self._disk, found.folder, self._manifest.layout, *self._bounds[shard])
            terms = found.state.terms()
        except (ValueError, OSError) as error:
            self._log.warning("checkpoint_unreadable", step=found.state.step, reason=str(error))
            return None
        if not has_length(value, MAX_STATE_LENGTH):
            return None
        return StoredCopy(found.folder, value, *terms[shard // factor])
