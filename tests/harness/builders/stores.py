"""Stores of small shards, in the roles that tests need."""

from __future__ import annotations

import numpy as np

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.encoding import codecs
from p2pnode.training.exchange.store.records import BufferedDelta
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Term
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState

SUM = Rule(outer_lr=1.0, outer_momentum=0.0)
#: Sixteen values in four shards; the last six values are buffers.
BOUNDS = [(0, 4), (4, 8), (8, 12), (12, 16)]
PARAMETERS = 10

IDS = {name: name.encode() * 20 for name in "abcdx"}


def contact(name: str) -> Contact:
    return Contact(IDS[name], Address("10.0.0.1", ord(name)))


def term(number: int, name: str) -> Term:
    return Term(number, IDS[name])


def store_of(name: str, rule: Rule = SUM, *, synchronous: bool = False) -> ShardStore:
    return ShardStore(IDS[name], BOUNDS, PARAMETERS, rule, synchronous=synchronous)


def delta(step: int, amount: float = 1.0, *, node: str = "x") -> BufferedDelta:
    values = np.full(4, amount, dtype=np.float32)
    return BufferedDelta(DeltaId(IDS[node], 1, step), 1.0, values, codecs.encode(values, "float32"))


SEEN = delta(1, node="d")


def zeros(store: ShardStore, shard: int = 0) -> ShardState:
    return store.fresh_state(shard, np.zeros(store.size(shard), dtype=np.float32))


def owner_of(name: str, number: int = 1, *, synchronous: bool = False) -> ShardStore:
    store = store_of(name, synchronous=synchronous)
    store.own(0, zeros(store), term(number, name), contact(name), 0.0, by_handover=False)
    return store


def backup_of(name: str, owner: str, number: int = 1, *, synchronous: bool = False) -> ShardStore:
    """A store that backs up shard 0 of `owner` under the term (number, owner)."""
    store = store_of(name, synchronous=synchronous)
    assert store.begin_catch_up(0, term(number - 1, owner), contact(owner))
    snapshot = zeros(store)
    snapshot.applied.add(SEEN.identity)
    assert store.take_state(0, term(number, owner), contact(owner), snapshot)
    # The snapshot has this delta already: it adds nothing, but is the owner's first forward under the new term.
    assert store.accept_forward(0, term(number, owner), SEEN, 0, IDS[owner])[0] == "ok"
    return store


def value_of(state: ShardState | None) -> float:
    assert state is not None
    return float(state.value[0])
