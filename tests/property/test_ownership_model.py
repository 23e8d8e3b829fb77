"""The model of a shard's ownership, searched whole: every order of a handful of events, and what each rule is for."""

from __future__ import annotations

import pytest

from tests.harness.ownership.model import RULES, SCENARIOS, search
from tests.harness.runner.long_run import more

#: Where leaving a rule out shows soonest.
SHOWN_IN = {
    "backup_first": "pair",
    "recheck": "new backup",
    "identities": "pair",
    "fence": "superseded",
    "activation": "first backup",
    "late_catch_up": "first backup",
    "new_term": "new backup",
    "drop_raises": "pair",
    "drain": "handing",
    "successor_first": "hand-over",
    "known_count": "hand-over",
    "fences_survive": "restart",
    "ask_before_yielding": "hand-over",
    "better_copy": "superseded",
    "rise": "remembered fence",
    "above_promises": "switched, suspected",
    "best_state": "switched",
    "ask_when_moving": "moved",
    "old_copy": "hand-over",
    "repair": "switched, suspected",
    "by_identity": "switched, suspected",
    "restart_ends_ownership": "restart",
    "keep_superseded": "switched, suspected",
    "repair_replicated": "after a split",
}


#: Those with some thousands of states: all but their last two events in `make test`.
LARGE = (
    "new backup",
    "hand-over",
    "handing",
    "suspicion",
    "suspected by both",
    "restart",
)
#: Shown after 17,000 states, half of what all others take.
LATE = ("drain",)


@pytest.mark.parametrize(
    ("name", "left_out"), [*[(name, 2 * (name in LARGE)) for name in SCENARIOS], *more(*[(name, 0) for name in LARGE])]
)
def test_every_order_of_events_keeps_what_was_acknowledged(name: str, left_out: int) -> None:
    """Nothing acknowledged is lost or doubled, no term has two owners or pairs, and every state comes to rest."""
    result = search(SCENARIOS[name], depth=SCENARIOS[name].depth - left_out, settle_every=2)
    print(f"{name}: {result.states} states", *result.trace, sep="\n")

    assert result.broken == ""
    assert result.states >= 50


def test_every_rule_has_a_place_where_it_is_needed() -> None:
    """The table names each rule of the model."""
    assert list(SHOWN_IN) == list(RULES)


@pytest.mark.parametrize(
    ("rule", "scenario"),
    [*[one for one in SHOWN_IN.items() if one[0] not in LATE], *more(*[(rule, SHOWN_IN[rule]) for rule in LATE])],
)
def test_without_any_one_rule_a_promise_breaks(rule: str, scenario: str) -> None:
    """Each rule is left out in turn, and the search finds a history that shows why it is there."""
    result = search(SCENARIOS[scenario], without=rule, settle_every=4)
    print(f"without {rule!r} ({RULES[rule]}): {result.broken} after {result.states} states", *result.trace, sep="\n")

    assert result.broken
