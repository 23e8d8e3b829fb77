"""Node `a`, which owns shards 0 and 1 of three of a run without a model; `b` owns the third."""

from __future__ import annotations

import numpy as np

from p2pnode.training.exchange.exchange import VALUE_BYTES
from p2pnode.training.exchange.messages import PushResult
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.value_batch import KeyUpdate
from p2pnode.training.values.client import SwarmValues
from p2pnode.training.values.encoding import decode_value, encode_key
from tests.harness.builders.stores import IDS, SUM, contact, term
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of, deltas_of, directory_of


class ValueOwner:
    def __init__(self, replicas: int = 0) -> None:
        self.store = ShardStore(IDS["a"], [(0, 0)] * 3, 0, SUM)
        for shard in range(2):
            self.own(shard, 1)
        self.store.note_owner(2, term(1, "b"), contact("b"))
        self.swarm = ScriptedSwarm(contact("a"), [contact("b")])
        self.context = context = context_of(self.swarm, self.store, settings=ExchangeSettings(replicas=replicas))
        self.deltas = deltas_of(context)
        values = SwarmValues(
            node_id=IDS["a"],
            run=context.run,
            store=self.store,
            view=context.view,
            rpc=context.rpc,
            rebalance=context.rebalance,
            replicator=self.deltas.replicator,
            in_flight=self.deltas.in_flight,
            directory=directory_of(context),
            limit_bytes=VALUE_BYTES,
            environment=context.environment,
        )
        self.values = values.handler
        self.rounds = values.handler.rounds
        self.values.register()

    def own(self, shard: int, number: int) -> None:
        state = self.store.fresh_state(shard, np.zeros(0, np.float32))
        self.store.own(shard, state, term(number, "a"), contact("a"), 0.0, by_handover=False)

    async def accept(self, *updates: KeyUpdate, shard: int = 0, sender: str = "x") -> list[PushResult]:
        return await self.values.accept(IDS[sender], [(shard, one) for one in updates])

    def value(self, shard: int = 0, key: str = "k") -> object:
        table = self.store.owned[shard].state.table
        assert table is not None
        entry = table.entries.get(encode_key(key))
        return None if entry is None else decode_value(entry.value)
