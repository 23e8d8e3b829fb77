"""The ledger of large histories: each way in which a delta may be lost, doubled or changed breaks the history."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.encoding import codecs
from p2pnode.training.exchange.messages import PushResult
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from tests.harness.histories.delta_ledger import Broken, Sent
from tests.harness.histories.view_ledger import ViewLedger

NODES = [bytes([number]) * 20 for number in range(1, 4)]
BOUNDS = [(0, 32), (32, 64)]
PLAIN = ExchangeSettings(codec="bfloat16", weight="sum", outer_lr=1.0, outer_momentum=0.0)
IDENTITIES = [DeltaId(node, 1, step) for step in range(1, 4) for node in NODES]


def ledger_of(seed: int = 1) -> ViewLedger:
    return ViewLedger(f"seed {seed}", PLAIN, BOUNDS, seed, 10)


def added(ledger: ViewLedger, *identities: DeltaId) -> ShardState:
    """The state of the second shard with these deltas, all of them acknowledged."""
    state = ShardState(np.zeros(32, np.float32), 32)
    for identity in identities:
        part = ledger.delta(*identity)[slice(*BOUNDS[1])]
        ledger._receive((1, identity), part)
        ledger._acknowledge(1, identity)
        state.apply(identity, 1.0, part, Rule(1.0, 0.0))
    return state


def test_every_delta_is_another_view_that_bfloat16_has_exactly() -> None:
    """None takes memory, none can be written to, no two are equal, and encoding leaves nothing out."""
    ledger = ledger_of()
    deltas = [ledger.delta(*identity) for identity in IDENTITIES]

    assert all(delta.base is not None and not delta.flags.writeable for delta in deltas)
    assert len({delta.tobytes() for delta in deltas}) == len(deltas)
    for delta in deltas:
        assert np.array_equal(codecs.decoded(bytes(codecs.encode(delta, "bfloat16")), "bfloat16", delta.size), delta)
    ledger.delta(NODES[0], 2, 1)
    with pytest.raises(ValueError, match="more than 10"):
        ledger.delta(NODES[0], 2, 2)


def test_a_state_with_each_acknowledged_delta_once_is_whole() -> None:
    """In any order; with one more, one less, one twice, or one bit another it is not."""
    ledger = ledger_of()
    state = added(ledger, *IDENTITIES[:5])
    ledger.check_state(1, "a", state)

    other = ShardState(np.zeros(32, np.float32), 32)
    for identity in reversed(IDENTITIES[:5]):
        other.apply(identity, 1.0, ledger._slice(ledger._rows[identity], 1), Rule(1.0, 0.0))
    ledger.check_state(1, "its backup", other)

    other.value += ledger._slice(ledger._rows[IDENTITIES[0]], 1)
    with pytest.raises(Broken, match="not the sum"):
        ledger.check_state(1, "its backup", other)
    state.value[3] = np.nextafter(state.value[3], np.float32(9.0))
    with pytest.raises(Broken, match="not the sum"):
        ledger.check_state(1, "a", state)


def test_an_acknowledged_delta_that_a_state_does_not_list_is_lost() -> None:
    """The one that is missing is named; so is one that no owner has received."""
    ledger = ledger_of()
    state = added(ledger, *IDENTITIES[:2])
    ledger.delta(*IDENTITIES[2])
    ledger._acknowledge(1, IDENTITIES[2])
    with pytest.raises(Broken, match="lost 1"):
        ledger.check_state(1, "a", state)

    state.apply(IDENTITIES[2], 1.0, ledger._slice(ledger._rows[IDENTITIES[2]], 1), Rule(1.0, 0.0))
    with pytest.raises(Broken, match="no owner has added it"):
        ledger.check_state(1, "a", state)


def test_a_delta_that_travels_with_another_counts_there() -> None:
    """What an owner receives then is not the slice: it is kept, and is what the state has to have."""
    ledger = ledger_of()
    former, later = ledger.delta(*IDENTITIES[0]), ledger.delta(*IDENTITIES[3])
    sent = ledger._sent[NODES[0], 1] = Sent("a")
    ledger.handed_over(sent, 1)
    ledger.returned(sent, IDENTITIES[0], [1])
    ledger.handed_over(sent, 2)
    both = (former + later)[slice(*BOUNDS[1])]
    ledger._receive((1, IDENTITIES[3]), both)
    state = ShardState(np.zeros(32, np.float32), 32)
    state.apply(IDENTITIES[3], 1.0, both, Rule(1.0, 0.0))

    ledger.check_state(1, "a", state)
    assert ledger.carried_count == 1
    with pytest.raises(Broken, match="returned, and arrives"):
        ledger._receive((1, IDENTITIES[0]), former[slice(*BOUNDS[1])])


def test_answers_are_counted_once_and_come_from_owners() -> None:
    """A second answer, an `ok` of no owner, another weight, and other values of one identity break the history."""
    ledger = ledger_of()
    (identity, part), sent = (IDENTITIES[0], ledger.delta(*IDENTITIES[0])[slice(*BOUNDS[1])]), Sent("a")
    ledger._receive((1, identity), part)
    ledger._receive((1, identity), part.copy())
    with pytest.raises(Broken, match="not by its owner"):
        ledger._answered(sent, (1, identity), PushResult(1, "ok"))
    ledger._acknowledge(1, identity)
    ledger._answered(sent, (1, identity), PushResult(1, "ok"))
    with pytest.raises(Broken, match="counted twice"):
        ledger._answered(sent, (1, identity), PushResult(1, "ok"))
    with pytest.raises(Broken, match="other values"):
        ledger._receive((1, identity), part + np.float32(0.5))
    with pytest.raises(Broken, match="weight"):
        ledger._weigh((1, identity), 0.5, momentum=True)
    ledger._answered(sent, (0, identity), PushResult(0, "refused", reason="before_era"))
    assert ledger.refused == 1


def test_weights_that_make_no_exact_sum_are_not_taken() -> None:
    """The sums are compared bit by bit."""
    with pytest.raises(ValueError, match="weigh 1"):
        ViewLedger("seed 1", ExchangeSettings(codec="bfloat16"), BOUNDS, 1, 10)
