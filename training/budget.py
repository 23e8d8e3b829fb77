"""Computes the memory that the exchange of a node needs, part by part, before it is allocated. Pure.

The sizes follow from the length of the vector, the settings of the exchange, and the number of nodes that share the
shards. The trainer's own memory (model, optimiser, activations) is not counted.
"""

from __future__ import annotations

import msgspec

from training.encoding import codecs
from training.settings import ExchangeSettings
from training.shards.robust import FIRST_MEMBERS, MAX_MEMBERS

_FLOAT32_BYTES = 4


class Budget(msgspec.Struct, frozen=True):
    """Bytes by part. `replica` (which is also the base of the next delta) and `delta` are shared with the trainer."""

    replica: int
    delta: int
    residual: int
    owned: int
    backed: int
    outbox: int
    repair_log: int
    windows: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    @property
    def shared(self) -> int:
        """The part in shared memory (`training.trainer_link.shared_memory`)."""
        return self.replica + self.delta

    def parts(self) -> dict[str, int]:
        """Bytes by part, for `/status`."""
        return {f"{name}_bytes": getattr(self, name) for name in self.__struct_fields__}


def budget(values: int, settings: ExchangeSettings, nodes: float) -> Budget:
    """For a vector of `values` float32 whose shards are distributed over `nodes` nodes, this one included.

    A shard is its value and, with an outer momentum, the momentum and the accumulated delta. With one node, or with
    `replicas = 0`, there are no backups.
    """
    vector_bytes = values * _FLOAT32_BYTES
    if not settings.enabled:
        return Budget(vector_bytes, vector_bytes, 0, 0, 0, 0, 0)
    nodes = max(1.0, nodes)
    alone = nodes < 1.5
    state_bytes = vector_bytes * (1 if settings.outer_momentum == 0.0 else 3)
    share_bytes = round(state_bytes / nodes)
    encoded_bytes = codecs.size_bytes(settings.codec, values)
    return Budget(
        replica=vector_bytes,
        delta=vector_bytes,
        residual=0 if alone or settings.codec == "float32" else vector_bytes,
        owned=share_bytes,
        backed=0 if alone else share_bytes * settings.replicas,
        # The newest delta is always kept, whatever the limit; most steps end with an empty outbox.
        outbox=0 if alone else max(encoded_bytes, settings.outbox_bytes),
        repair_log=0 if alone or not settings.log_seconds else settings.log_bytes,
        windows=_windows_bytes(vector_bytes, settings, nodes),
    )


def _windows_bytes(vector_bytes: int, settings: ExchangeSettings, nodes: float) -> int:
    """Deltas that wait for their window, at owner and backup: normally one of each member."""
    if settings.robust != "trimmed-mean" or nodes < FIRST_MEMBERS - 0.5:
        return 0
    return round(vector_bytes / nodes * min(nodes, MAX_MEMBERS)) * (1 + settings.replicas)
