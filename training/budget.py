"""The memory a node needs for the exchange, part by part, before it is taken. Pure.

Sizes follow from the length of the vector, the settings of the exchange and how many nodes share the shards. The
trainer's own memory (model, optimiser, activations) is the user's and not counted.
"""

from __future__ import annotations

import msgspec

from training.encoding import codecs
from training.settings import ExchangeSettings
from training.shards.robust import FIRST_MEMBERS, MAX_MEMBERS

_FLOAT32_BYTES = 4


class Budget(msgspec.Struct, frozen=True):
    """Bytes by part. `replica` (which is the base of the next delta too) and `delta` are shared with the trainer."""

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
        """What `training.trainer_link.shared_memory` claims."""
        return self.replica + self.delta

    def parts(self) -> dict[str, int]:
        """Bytes by the parts' names, for `/status`."""
        return {f"{name}_bytes": getattr(self, name) for name in self.__struct_fields__}


def budget(values: int, settings: ExchangeSettings, nodes: float) -> Budget:
    """For a vector of `values` float32 whose shards lie on `nodes` nodes, this one included (at least 1).

    A shard is its value, and under an outer momentum the momentum and the accumulated delta too. With one node there
    is no backup; with `replicas = 0` never.
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
    """Deltas that wait for their window, at owner and backup: one of each member, as a rule."""
    if settings.robust != "trimmed-mean" or nodes < FIRST_MEMBERS - 0.5:
        return 0
    return round(vector_bytes / nodes * min(nodes, MAX_MEMBERS)) * (1 + settings.replicas)
