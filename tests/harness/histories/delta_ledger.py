"""Counts every delta of a history: what was trained, what was sent, what each answer was, and what is in the model.

The ledger watches one node after the other (`watch`). It takes down

* what the node trained, by step (`trained`);
* what an owner received under an identity, bit by bit, also the owner's own deltas that no other node has;
* every `ok`, twice: as the owner gave it and as the node that sent the delta counted it;
* the weight with which an owner added a delta, which must be the one that it told its backup.

Then `check_node` proves that nothing is lost at the sender: what it trained was acknowledged or refused, is in its
outbox, or is progress of its trainer.
`check_state` proves that a state is the sum of the deltas in its set of identities, each once, with the weight of its
owner. A value with momentum is no sum, but a sum can be computed from it: Delayed Nesterov adds `lr·w·δ` at once and
`lr·μ·m` each time Σw reaches 1, with `m ← μ·m + Σ w·δ`. So, whatever the order and wherever the Σw reached 1,

    Σ w·δ = (1 − μ) / lr · value + μ · (Σ w·δ of the round under way + μ · m)

where a delta that a repair added, without momentum, counts 1 − μ times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import LEAST_LOSSY, CodecName
from p2pnode.training.exchange.delta import Delivery, IncomingDelta
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.messages import KNOWN, Forward, Push, PushResult, decode
from p2pnode.training.exchange.store.records import BufferedDelta
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import is_plain
from p2pnode.training.shards.state import ShardState

Exact = npt.NDArray[np.float64]
Key = tuple[int, DeltaId]

#: Sums whose order may differ, or that have rounded weights, are compared with this: rounding errors of some hundred
#: additions are ten times smaller, the smallest delta ten times larger.
TOLERANCE = 1e-3


class Broken(AssertionError):
    """An invariant does not hold; the message names the seed."""


@dataclass
class Sent:
    """What one node has trained since a start, and what became of it."""

    name: str
    #: All of it, float64[total], and what of it its trainer has kept, float32[total]; None: nothing.
    total: Exact | None = None
    progress: Vector | None = None
    #: The steps whose delta was handed over.
    steps: list[int] = field(default_factory=list)
    finals: dict[Key, str] = field(default_factory=dict)
    #: By step, where not all steps have the codec of the settings.
    codecs: dict[int, CodecName] = field(default_factory=dict)


class Ledger:
    """All deltas of one history."""

    def __init__(self, where: str, settings: ExchangeSettings, bounds: list[tuple[int, int]], *, exact: bool) -> None:
        """`exact`: weights and codec are such that the sums of any order are equal to the bit. `bounds`: of shards."""
        self._where = where
        self._settings = settings
        self._bounds = bounds
        self._exact = exact
        #: Per shard the identities that an owner has acknowledged, to anyone.
        self.acknowledged: list[dict[DeltaId, None]] = [{} for _ in bounds]
        #: What owners received under an identity: the same bits each time, also in a repair.
        self._received: dict[Key, Vector] = {}
        #: The weights with which owners have added a delta, and whether with momentum; more than one after a split.
        self._weights: dict[Key, dict[tuple[float, bool], None]] = {}
        #: What a node last told a backup or learner of a delta: the weight to add it with, and whether with momentum.
        self._forwarded: dict[tuple[str, Key], tuple[float, bool]] = {}
        #: By node and incarnation.
        self._sent: dict[tuple[bytes, int], Sent] = {}
        #: Never sent.
        self._returned: set[Key] = set()
        self.ambiguous = 0
        #: Of the states that were checked.
        self.forgotten = 0
        self.refused = 0

    def broken(self, why: str) -> Broken:
        return Broken(f"{self._where}: {why}")

    # -- taking down ----------------------------------------------------------------------------------------------

    def watch(self, name: str, node: bytes, incarnation: int, exchange: Exchange) -> Sent:
        """Take down what this node receives and is answered from now on."""
        sent = self._sent.setdefault((node, incarnation), Sent(name))
        deltas, store, outbox = exchange.deltas, exchange.store, exchange.outbox
        accept, count, add = deltas.accept, outbox.note_answer, store.add

        async def accepted(push: Push, items: list[IncomingDelta]) -> list[PushResult]:
            identity = DeltaId(push.node, push.incarnation, push.step)
            for item in items:
                self._receive((item.shard, identity), item.delta)
            results = await accept(push, items)
            for result, item in zip(results, items, strict=True):
                if result.status == "ok" and not item.repair:
                    self._acknowledge(result.shard, identity)
            return results

        def counted(delivery: Delivery, result: PushResult) -> None:
            push = delivery.push
            identity = DeltaId(push.node, push.incarnation, push.step)
            self._answered(sent, (result.shard, identity), result)
            count(delivery, result)

        def weighed(shard: int, item: BufferedDelta, state: ShardState | None = None) -> None:
            if state is None and not store.owned[shard].state.knows(item.identity):
                key, weight = (shard, item.identity), (item.weight, item.momentum)
                told = self._forwarded.get((name, key), weight)
                if store.owned[shard].has_targets and told != weight:
                    raise self.broken(
                        f"shard {shard}: {name} adds {self.named(item.identity)} by {weight}, told {told}"
                    )
                self._weigh(key, item.weight, momentum=item.momentum)
            elif state is not None and (shard, item.identity) not in self._weights:
                # Forwarded over a third node, to a backup that takes over before the owner has added it.
                self._weigh((shard, item.identity), item.weight, momentum=item.momentum)
            add(shard, item, state)

        deltas.accept = accepted
        outbox.note_answer = counted
        store.add = weighed
        return sent

    def trained(self, sent: Sent, own: Vector) -> None:
        """A node has trained a step, float32[total]."""
        sent.total = own.astype(np.float64) if sent.total is None else sent.total + own

    def handed_over(self, sent: Sent, step: int) -> None:
        """A node is about to push its progress under this step."""
        sent.steps.append(step)

    def returned(self, sent: Sent, identity: DeltaId, shards: Iterable[int]) -> None:
        """These shards of a delta were not sent: they are progress again."""
        for shard in shards:
            self._take_back(sent, (shard, identity))

    def forwarded(self, name: str, payload: bytes) -> None:
        """A node forwards a delta: a backup may add it so, and take over before the owner has
        added it."""
        message = decode(payload, Forward)
        identity = DeltaId(message.node, message.incarnation, message.step)
        for entry in message.shards:
            key = entry.shard, identity
            self._forwarded[name, key] = message.weight * entry.scale, message.momentum
            self._weigh(key, message.weight * entry.scale, momentum=message.momentum)

    def _acknowledge(self, shard: int, identity: DeltaId) -> None:
        self.acknowledged[shard].setdefault(identity)

    def _take_back(self, sent: Sent, key: Key) -> None:
        if key in sent.finals or key in self._received:
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} was sent, and is returned")
        sent.finals[key] = "returned"
        self._returned.add(key)

    def _receive(self, key: Key, delta: Vector) -> None:
        if key in self._returned:
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} was returned, and arrives")
        if not np.array_equal(self._received.setdefault(key, np.array(delta, np.float32)), delta):
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} arrived with other values than before")

    def _answered(self, sent: Sent, key: Key, result: PushResult) -> None:
        if key in sent.finals:
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} was counted twice: {sent.finals[key]}")
        if result.status == "ok" and key[1] not in self.acknowledged[key[0]]:
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} is acknowledged, but not by its owner")
        # No delta is late here, malformed or not finite; one may be older than a new era.
        if result.status not in ("ok", "refused") or result.reason not in ("", KNOWN, "before_era"):
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} was given up: {result.status} {result.reason}")
        self.refused += result.status != "ok"
        sent.finals[key] = result.status if result.status == "ok" else result.reason

    def _weigh(self, key: Key, weight: float, *, momentum: bool) -> None:
        if not 0.0 < weight <= 1.0:
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} is added with the weight {weight}")
        self._weights.setdefault(key, {})[weight, momentum] = None

    # -- checking -------------------------------------------------------------------------------------------------

    def check_node(self, node: bytes, incarnation: int, exchange: Exchange) -> None:
        """What a node has trained was acknowledged, refused, is in its outbox, or is progress. Not while it is between
        encoding a delta and putting it into the outbox."""
        sent = self._sent[node, incarnation]
        if sent.total is None:
            return
        outbox: dict[Key, Vector] = {}
        for delivery in exchange.sent.deliveries.values():
            identity = DeltaId(delivery.push.node, delivery.push.incarnation, delivery.push.step)
            for shard, item in delivery.unacknowledged.items():
                whole = codecs.decoded(bytes(item.encoded), item.codec, item.values)
                outbox[shard, identity] = whole
        for shard, (start, stop) in enumerate(self._bounds):
            left_out = sent.total[start:stop].copy()
            for step in sent.steps:
                key = (shard, DeltaId(node, incarnation, step))
                if key not in sent.finals and key not in outbox:
                    raise self.broken(f"shard {shard}: {self.named(key[1])} left the outbox without an answer")
                if key not in self._returned:
                    left_out -= outbox[key] if key in outbox else self._received[key]
            if sent.progress is not None:
                left_out -= sent.progress[start:stop]
            apart = float(np.abs(left_out).max())
            if apart > (0.0 if self._exact else TOLERANCE):
                raise self.broken(f"shard {shard}: {sent.name} has trained {apart} that it neither sent nor keeps")

    def check_state(self, shard: int, whose: str, state: ShardState) -> None:
        """A state has every acknowledged delta, and is the sum of its deltas, each once. One that it does not list any
        more is among those that its version counts, and nobody can tell from new ones."""
        forgotten = [one for one in self.acknowledged[shard] if state.applied.may_have_forgotten(one)]
        lost = [one for one in self.acknowledged[shard] if not state.knows(one)]
        unlisted = state.version - state.applied.count() if state.applied.before else 0
        lost = [] if len(lost) == len(forgotten) <= unlisted else lost
        if lost:
            era = f" (a new era since step {state.era_step})" if state.era_step else ""
            names = [self.named(one) for one in lost[:5]]
            raise self.broken(f"shard {shard} of {whose}{era} lost {len(lost)}: {names}")
        low, high = np.zeros(state.value.size), np.zeros(state.value.size)
        applied = [*identities(state), *forgotten]
        self.forgotten += unlisted
        if unlisted > len(forgotten):
            return  # some were never acknowledged: which ones, nobody can tell
        for identity in applied:
            least, most = self._contribution((shard, identity))
            low += least
            high += most
        lr, mu = self._settings.outer_lr, self._settings.outer_momentum
        total = state.value.astype(np.float64) * ((1.0 - mu) / lr)
        if state.momentum is not None:  # within a round it is the sum in the brackets, before it m
            total += mu * state.momentum.astype(np.float64) * (1.0 if state.sum_weight else mu)
        apart = float(max((low - total).max(), (total - high).max()))
        if apart > (0.0 if self._exact else TOLERANCE) or state.version != len(applied):
            raise self.broken(
                f"shard {shard} of {whose} is not the sum of its {len(applied)} deltas, version {state.version}: "
                f"{apart} apart"
            )

    def _contribution(self, key: Key) -> tuple[Exact, Exact]:
        """The least and the most that a delta may add to the sum; equal unless a split gave it two weights."""
        received, weights = self._received.get(key), self._weights.get(key)
        if received is None or weights is None:
            raise self.broken(f"shard {key[0]}: {self.named(key[1])} is in the model, and no owner has added it")
        lr, mu = self._settings.outer_lr, self._settings.outer_momentum
        if is_plain(self._codec(key[1])):  # added as it is: at the rate 1, without momentum
            factors = [weight * (1.0 - mu) / lr for weight, _ in weights]
        else:
            factors = [weight * (1.0 if momentum else 1.0 - mu) for weight, momentum in weights]
        found = [factor * received.astype(np.float64) for factor in factors]
        self.ambiguous += len(found) > 1
        return np.minimum.reduce(found), np.maximum.reduce(found)

    def _codec(self, identity: DeltaId) -> CodecName:
        """In which codec a delta was pushed."""
        settings = self._settings.codec
        if settings != "auto":
            return settings
        sent = self._sent.get((identity.node, identity.incarnation))
        # A history that draws no codecs has the least lossy one.
        return LEAST_LOSSY if sent is None else sent.codecs.get(identity.step, LEAST_LOSSY)

    def named(self, identity: DeltaId) -> str:
        sent = self._sent.get((identity.node, identity.incarnation))
        name = identity.node.hex()[:8] if sent is None else sent.name
        return f"{name}/{identity.incarnation}:{identity.step}"


def identities(state: ShardState) -> Iterator[DeltaId]:
    """The deltas that are in the value of a state."""
    for node, incarnation, ranges in state.applied.rows():
        for low, high in ranges:
            yield from (DeltaId(node, incarnation, step) for step in range(low, high + 1))
