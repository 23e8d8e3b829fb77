"""Counts the deltas of a history that is too large to be kept: each one is a view of one array.

300 nodes that push 50 deltas of a million values have trained 60 GB. Here the delta of a step is a slice of one random
array, which begins at a place that no other delta has. So it takes no memory, the ledger can compare what an owner
receives with it bit by bit, and what a shard has to be is a sum of slices. The values are multiples of 1/256 below 1:
bfloat16 has them exactly, and so has every sum of 50,000 of them in float32. Other values are kept only where an
owner received something else: a delta that has travelled with a later one.

It proves what `Ledger` does, for deltas that all weigh 1, at the rate 1 and without momentum.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.messages import KNOWN, PushResult
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.state import ShardState
from tests.harness.histories.delta_ledger import Key, Ledger, Sent

#: Values are so many parts of 1: eight bits with the sign, as the significand of bfloat16 has.
UNITS = 256
#: Sums up to so many units are exact in float32.
EXACT_UNITS = 1 << 24
#: What became of a part of a delta at its sender.
OK, REFUSED, TAKEN_BACK = 1, 2, 3


@dataclass(slots=True)
class Row:
    """One delta. A byte for each shard: what its sender counted, whether an owner acknowledged and received it."""

    first: int
    final: bytearray
    acknowledged: bytearray
    received: bytearray
    #: What an owner received where it is not the slice.
    other: dict[int, Vector] = field(default_factory=dict)


class ViewLedger(Ledger):
    """All deltas of one history, each a view of one array."""

    def __init__(
        self, where: str, settings: ExchangeSettings, bounds: list[tuple[int, int]], seed: int, deltas: int
    ) -> None:
        """`deltas`: how many there will be at most."""
        if (settings.weight, settings.outer_lr, settings.outer_momentum) != ("sum", 1.0, 0.0):
            raise ValueError("a view ledger counts deltas that weigh 1, at the rate 1 and without momentum")
        super().__init__(where, settings, bounds, exact=True)
        self._most = deltas
        generator = np.random.default_rng(random.Random(f"{seed}/deltas").randrange(1 << 32))
        units = generator.integers(1 - UNITS, UNITS, size=bounds[-1][1] + deltas, dtype=np.int32)
        self._units: npt.NDArray[np.int32] = units
        self._values = (units / np.float32(UNITS)).astype(np.float32)
        self._values.flags.writeable = False
        self._rows: dict[DeltaId, Row] = {}
        #: The sum of a set of deltas, which owner and backup have both: shard -> set, sum.
        self._sums: dict[int, tuple[tuple[DeltaId, ...], Vector]] = {}

    def delta(self, node: bytes, incarnation: int, step: int) -> Vector:
        """What a node trains in this step, float32[total], read only."""
        identity, shards = DeltaId(node, incarnation, step), len(self._bounds)
        if len(self._rows) >= self._most:
            raise ValueError(f"there are more than {self._most} deltas")
        row = self._rows[identity] = Row(len(self._rows), bytearray(shards), bytearray(shards), bytearray(shards))
        return self._values[row.first : row.first + self._bounds[-1][1]]

    @property
    def acknowledged_count(self) -> int:
        """Parts of deltas that an owner has acknowledged."""
        return sum(sum(row.acknowledged) for row in self._rows.values())

    @property
    def carried_count(self) -> int:
        """Parts of deltas that were never sent, and travelled with a later one."""
        return sum(row.final.count(TAKEN_BACK) for row in self._rows.values())

    def _slice(self, row: Row, shard: int) -> Vector:
        start, stop = self._bounds[shard]
        return self._values[row.first + start : row.first + stop]

    # -- taking down ----------------------------------------------------------------------------------------------

    def _acknowledge(self, shard: int, identity: DeltaId) -> None:
        self._rows[identity].acknowledged[shard] = True

    def _take_back(self, sent: Sent, key: Key) -> None:
        row, cell = self._rows[key[1]], key[0]
        if row.final[cell] or row.received[cell]:
            raise self.broken(f"shard {cell}: {self.named(key[1])} was sent, and is returned")
        row.final[cell] = TAKEN_BACK

    def _of(self, sent: Sent) -> list[DeltaId]:
        (node, incarnation) = next(key for key, one in self._sent.items() if one is sent)
        return [DeltaId(node, incarnation, step) for step in sent.steps]

    def _receive(self, key: Key, delta: Vector) -> None:
        row, cell = self._rows[key[1]], key[0]
        if row.final[cell] == TAKEN_BACK:
            raise self.broken(f"shard {cell}: {self.named(key[1])} was returned, and arrives")
        if not row.received[cell]:
            row.received[cell] = True
            if not np.array_equal(self._slice(row, cell), delta):
                row.other[cell] = np.array(delta, np.float32)
        elif not np.array_equal(self._found(row, cell), delta):
            raise self.broken(f"shard {cell}: {self.named(key[1])} arrived with other values than before")

    def _found(self, row: Row, shard: int) -> Vector:
        """What an owner received."""
        return row.other[shard] if shard in row.other else self._slice(row, shard)

    def _answered(self, sent: Sent, key: Key, result: PushResult) -> None:
        row, shard = self._rows[key[1]], key[0]
        if row.final[shard]:
            raise self.broken(f"shard {shard}: {self.named(key[1])} was counted twice: {row.final[shard]}")
        if result.status == "ok" and not row.acknowledged[shard]:
            raise self.broken(f"shard {shard}: {self.named(key[1])} is acknowledged, but not by its owner")
        # No delta is late here, malformed or not finite; one may be older than a new era.
        if result.status not in ("ok", "refused") or result.reason not in ("", KNOWN, "before_era"):
            raise self.broken(f"shard {shard}: {self.named(key[1])} was given up: {result.status} {result.reason}")
        self.refused += result.status != "ok"
        row.final[shard] = OK if result.status == "ok" else REFUSED

    def _weigh(self, key: Key, weight: float, *, momentum: bool) -> None:
        if weight != 1.0:
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} is added with the weight {weight}")

    # -- checking -------------------------------------------------------------------------------------------------

    def check_node(self, node: bytes, incarnation: int, exchange: Exchange) -> None:
        """As `Ledger.check_node`. What was sent as it was trained leaves nothing."""
        sent = self._sent[node, incarnation]
        outbox: dict[Key, Vector] = {}
        for delivery in exchange.sent.deliveries.values():
            for shard, item in delivery.unacknowledged.items():
                outbox[shard, delivery.identity] = codecs.decoded(bytes(item.encoded), item.codec, item.values)
        rows = [(one, self._rows[one]) for one in self._of(sent)]
        for shard, (start, stop) in enumerate(self._bounds):
            left_out = np.zeros(stop - start)
            for identity, row in rows:
                if not row.final[shard] and (shard, identity) not in outbox:
                    raise self.broken(f"shard {shard}: {self.named(identity)} left the outbox without an answer")
                left_out += self._slice(row, shard)
                if not row.final[shard]:
                    left_out -= outbox[shard, identity]
                elif row.final[shard] != TAKEN_BACK:
                    if not row.received[shard]:
                        raise self.broken(f"shard {shard}: {self.named(identity)} has an answer of no owner")
                    left_out -= self._found(row, shard)
            if sent.progress is not None:
                left_out -= sent.progress[start:stop]
            if (apart := float(np.abs(left_out).max())) > 0.0:
                raise self.broken(f"shard {shard}: {sent.name} has trained {apart} that it neither sent nor keeps")

    def check_state(self, shard: int, whose: str, state: ShardState) -> None:
        applied = tuple(
            DeltaId(node, incarnation, step)
            for node, incarnation, ranges in sorted(state.applied.rows())
            for low, high in ranges
            for step in range(low, high + 1)
        )
        known = dict.fromkeys(applied)
        lost = [one for one, row in self._rows.items() if row.acknowledged[shard] and one not in known]
        if lost:
            names = [self.named(one) for one in lost[:5]]
            era = f" (a new era since step {state.era_step})" if state.era_step else ""
            raise self.broken(f"shard {shard} of {whose}{era} lost {len(lost)}: {names}")
        if state.version != len(applied):
            raise self.broken(f"shard {shard} of {whose} has {len(applied)} deltas, and is version {state.version}")
        if (found := self._sums.get(shard)) is None or found[0] != applied:
            found = self._sums[shard] = applied, self._sum(shard, applied)
        if not np.array_equal(found[1], state.value):
            apart = float(np.abs(found[1] - state.value).max())
            raise self.broken(f"shard {shard} of {whose} is not the sum of its {len(applied)} deltas: {apart} apart")

    def _sum(self, shard: int, applied: tuple[DeltaId, ...]) -> Vector:
        start, stop = self._bounds[shard]
        total, others, largest = np.zeros(stop - start, np.int32), np.zeros(stop - start), 0.0
        for identity in applied:
            row = self._rows[identity]
            if not row.received[shard]:
                raise self.broken(f"shard {shard}: {self.named(identity)} is in the model, and no owner has added it")
            if shard in row.other:
                others += row.other[shard]
            else:
                total += self._units[row.first + start : row.first + stop]
        exact: npt.NDArray[np.float64] = total / UNITS + others
        largest = float(np.abs(exact).max(initial=0.0))
        if largest * UNITS >= EXACT_UNITS:
            raise ValueError(f"a sum of {largest} is not exact in float32")
        return exact.astype(np.float32)
