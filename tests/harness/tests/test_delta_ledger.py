"""The law by which the ledger gets the sum of all deltas from a value with momentum, and what it takes down."""

from __future__ import annotations

import random

import numpy as np
import pytest

from p2pnode.training.encoding import codecs
from p2pnode.training.exchange.messages import Forward, Forwarded, encode
from p2pnode.training.exchange.terms import Term
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.histories.delta_ledger import TOLERANCE, Broken, Ledger

NODES = [bytes([number]) * 20 for number in range(1, 5)]


def ledger_of(settings: ExchangeSettings) -> Ledger:
    return Ledger("seed 0", settings, [(0, 4)], exact=False)


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.5), (0.5, 0.9)])
@pytest.mark.parametrize("seed", range(4))
def test_a_value_with_momentum_is_the_sum_of_its_deltas_in_any_order(lr: float, momentum: float, seed: int) -> None:
    """Weights, order and deltas without momentum as they come: the sum is found, and one delta too much is too."""
    chance = random.Random(seed)
    settings = ExchangeSettings(outer_lr=lr, outer_momentum=momentum)
    ledger, state = ledger_of(settings), ShardState(np.zeros(4, np.float32), 4)
    found = [DeltaId(node, 1, step) for node in NODES for step in range(1, 20)]
    chance.shuffle(found)
    for identity in found:
        delta = np.array([chance.uniform(0.25, 1.0) for _ in range(4)], np.float32)
        weight, has_momentum = chance.uniform(0.1, 0.5), chance.random() < 0.9
        ledger._receive((0, identity), delta)
        ledger._weigh((0, identity), weight, momentum=has_momentum)
        ledger.acknowledged[0][identity] = None
        state.apply(identity, weight, delta, Rule(lr, momentum), momentum=has_momentum)

    ledger.check_state(0, "a", state)

    state.value += np.float32(10 * TOLERANCE)
    with pytest.raises(Broken, match="not the sum"):
        ledger.check_state(0, "a", state)


def test_a_delta_that_arrives_with_other_values_under_its_identity_breaks_the_history() -> None:
    """A retry has the same bits, and so has a repair, whatever the codec rounds."""
    exact, identity = np.array([0.7, 0.3, 0.5, 0.9], np.float32), DeltaId(NODES[0], 1, 1)
    rounded = codecs.decoded(codecs.encode(exact, "bfloat16"), "bfloat16", 4)
    ledger = ledger_of(ExchangeSettings(codec="bfloat16"))
    ledger._receive((0, identity), exact)
    ledger._receive((0, identity), exact.copy())

    with pytest.raises(Broken, match="other values"):
        ledger._receive((0, identity), rounded)


def test_a_delta_that_only_a_backup_has_is_known() -> None:
    """Its owner is cut off before it adds it, and the backup takes over: the sum counts it with the weight of the
    forward."""
    ledger, state = (
        ledger_of(ExchangeSettings(outer_lr=1.0, outer_momentum=0.0)),
        ShardState(np.zeros(4, np.float32), 4),
    )
    deltas = {DeltaId(node, 1, 6): np.array([place, 1.0, 2.0, 3.0], np.float32) for place, node in enumerate(NODES[:2])}
    weights = (0.25, 0.5)
    forwards = [
        Forward(*identity, weight, [Forwarded(0, Term(3, NODES[3]), 0)])
        for identity, weight in zip(deltas, weights, strict=True)
    ]
    for message in forwards:
        ledger.forwarded("owner", encode(message))
    for (identity, delta), weight in zip(deltas.items(), weights, strict=True):
        ledger._receive((0, identity), delta)
        ledger.acknowledged[0][identity] = None
        state.apply(identity, weight, delta, Rule(1.0, 0.0))

    ledger.check_state(0, "the backup", state)

    state.value += np.float32(10 * TOLERANCE)
    with pytest.raises(Broken, match="not the sum"):
        ledger.check_state(0, "the backup", state)


def test_a_delta_that_was_forwarded_to_nobody_and_is_in_the_model_breaks_the_history() -> None:
    """No owner has added it, and none has told a backup of it."""
    ledger, state = (
        ledger_of(ExchangeSettings(outer_lr=1.0, outer_momentum=0.0)),
        ShardState(np.zeros(4, np.float32), 4),
    )
    identity, delta = DeltaId(NODES[0], 1, 6), np.ones(4, np.float32)
    ledger._receive((0, identity), delta)
    state.apply(identity, 0.5, delta, Rule(1.0, 0.0))

    with pytest.raises(Broken, match="no owner has added it"):
        ledger.check_state(0, "a", state)
