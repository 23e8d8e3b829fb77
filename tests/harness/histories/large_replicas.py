"""What the replicas of a large history have to be at its end: the owners' values."""

from __future__ import annotations

import numpy as np

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.exchange import Exchange
from tests.harness.histories.delta_ledger import Ledger


def owners_of(exchanges: dict[str, Exchange]) -> dict[int, str]:
    """By shard; during a hand-over the new owner's term is higher."""
    found: dict[int, str] = {}
    for name, exchange in exchanges.items():
        for shard, owned in exchange.store.owned.items():
            if shard not in found or owned.term > exchanges[found[shard]].store.owned[shard].term:
                found[shard] = name
    return found


class LargeReplicas:
    """The replicas of all nodes, compared with the owners of so many shards."""

    def __init__(self, ledger: Ledger, shards: int) -> None:
        self._ledger = ledger
        self._shards = shards

    def check(self, exchanges: dict[str, Exchange], codec: CodecName) -> None:
        """Every replica is what the owners have, as the codec of the pulls has it."""
        owners = owners_of(exchanges)
        for shard in range(self._shards):
            exact = exchanges[owners[shard]].store.owned[shard].state.value
            rounded = codecs.decoded(bytes(codecs.encode(exact, codec)), codec, exact.size)
            for name, exchange in exchanges.items():
                pulled = exchange.replica.slice_of(shard)
                # A node copies what it owns: exact, even if it has handed the shard over since.
                if not np.array_equal(pulled, rounded) and not np.array_equal(pulled, exact):
                    raise self._ledger.broken(f"{name} has pulled shard {shard} of {owners[shard]}: other values")
                if exchange.counters.publication_mismatches:
                    raise self._ledger.broken(
                        f"{name} had other bits than those published, although nothing damages any"
                    )
