"""The choice of the codec: by the measured line, by probes before that, and without back and forth.

What the choice of the codec is told: the line, as it was measured or as the vector came over it.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.training.encoding.codec_choice import (
    CHOICES,
    CLIMB,
    CONFIRMATIONS,
    PART_ALONE,
    PART_BESIDE,
    TRY_AGAIN_STEPS,
    CodecChoice,
    CodecControl,
    LineFacts,
)
from p2pnode.training.encoding.step_bytes import StepShape, step_bytes
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.settings import ExchangeSettings

MBIT = 125_000.0
AUTO = ExchangeSettings(codec="auto")


def facts(
    *, mbit: float | None = None, step_s: float = 10.0, parameters: int = 5_000_000, nodes: int = 4, **changes: Any
) -> LineFacts:
    fields = {
        "shape": StepShape.even(parameters, nodes),
        "upload_bytes_per_s": None if mbit is None else mbit * MBIT,
        "download_bytes_per_s": None,
        "step_s": step_s,
        "push_s": None,
        "is_beside": True,
        **changes,
    }
    return LineFacts(**fields)


def settled(choice: CodecChoice, known: LineFacts, decisions: int = 10) -> CodecName:
    for _ in range(decisions):
        choice.decide(known)
    return choice.codec


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (facts(mbit=1000), "sparse512"),
        (facts(mbit=4), "sparse512"),  # 3.1 MB of 4
        (facts(mbit=2), "sparse256"),
        (facts(mbit=1), "sparse"),
        (facts(mbit=1000, is_beside=False), "bfloat16"),
        (facts(mbit=200, is_beside=False), "int8"),  # 14 MB of 25
        (facts(mbit=100, is_beside=False), "int4"),  # 7.3 MB of 12.5
        (facts(mbit=30, is_beside=False), "sparse512"),  # of a second instead of eight
        (facts(mbit=0.1), "sparse64"),  # more than the line carries: the least there is
        (facts(mbit=0.5, parameters=2000), "bfloat16"),
        (facts(mbit=2, shape=StepShape(5_000_000, 4, 0.0, 0.0)), "sparse512"),  # it owns nothing
    ],
)
def test_a_measured_line_gets_the_least_lossy_codec_that_fits(known: LineFacts, expected: CodecName) -> None:
    """Its bytes take at most their part of a step, and those of the next less lossy one take more."""
    choice = CodecChoice(AUTO)

    assert settled(choice, known) == expected
    assert choice.reason
    if expected not in ("bfloat16", "sparse64", known.choices[0]):
        assert known.upload_bytes_per_s is not None
        better = step_bytes(known.shape, CHOICES[CHOICES.index(expected) - 1])
        assert max(better.up, better.down) / known.upload_bytes_per_s > CLIMB * known.allowed_s


def test_the_time_allowed_is_a_part_of_a_steps_training() -> None:
    """Most of it beside the training; a tenth after it."""
    assert facts(is_beside=True).allowed_s == pytest.approx(PART_BESIDE * 10.0)
    assert facts(is_beside=False).allowed_s == pytest.approx(PART_ALONE * 10.0)


def test_the_first_push_over_an_unknown_line_is_short() -> None:
    """Of a node that owns some shards, or all of them: what it does not push it forwards to their backups."""
    expected = {2_000: "bfloat16", 100_000: "sparse512", 1_000_000: "sparse", 124_000_000: "sparse64"}
    for parameters, codec in expected.items():
        for owned in (0.25, 1.0):
            choice = CodecChoice(AUTO)
            unknown = facts(parameters=parameters, step_s=0.0)
            shape = dataclasses.replace(unknown.shape, owned=owned)
            assert choice.decide(dataclasses.replace(unknown, shape=shape)) is True
            assert choice.codec == codec


def test_a_fast_line_that_is_never_busy_ends_at_bfloat16_within_a_few_steps() -> None:
    """Pushes of milliseconds are followed by less lossy ones until there is none."""
    choice = CodecChoice(AUTO)
    for _ in range(1 + CONFIRMATIONS * (len(CHOICES) - 1)):
        choice.decide(facts(parameters=124_000_000, push_s=0.05, is_beside=False))

    assert choice.codec == "bfloat16"


def test_a_try_that_takes_too_long_is_given_up_for_a_while() -> None:
    """A push beyond its time makes the codec lossier; for the next ten steps nothing less lossy is tried."""
    choice = CodecChoice(AUTO)
    choice.decide(facts(parameters=7_000_000))
    settled(choice, facts(parameters=7_000_000, push_s=0.1), CONFIRMATIONS)
    assert choice.codec == "sparse512"
    settled(choice, facts(parameters=7_000_000, push_s=9.0), CONFIRMATIONS)
    assert choice.codec == "sparse256"

    for _ in range(TRY_AGAIN_STEPS):
        assert choice.decide(facts(parameters=7_000_000, push_s=1.0)) is False
    assert choice.decide(facts(parameters=7_000_000, push_s=1.0)) is True
    assert choice.codec == "sparse512"


def test_a_line_that_becomes_known_decides_at_once_what_probes_would_find_slowly() -> None:
    """124 M parameters at 100 Mbit/s in steps of a minute go from the probe to what fits, without the codecs
    between."""
    choice = CodecChoice(AUTO)
    choice.decide(facts(parameters=124_000_000, step_s=0.0))
    known = facts(parameters=124_000_000, mbit=150, step_s=60.0)
    assert [choice.decide(known) for _ in range(CONFIRMATIONS)] == [False] * (CONFIRMATIONS - 1) + [True]

    assert choice.codec == "sparse512"


def test_pushes_that_take_little_time_overrule_a_rate_that_is_too_small() -> None:
    """Slow peers made the line look slow: the codec gets no lossier, and less lossy one by one where each fits."""
    choice = CodecChoice(AUTO)
    settled(choice, facts(mbit=1000))
    assert choice.codec == "sparse512"
    assert settled(choice, facts(mbit=1, push_s=0.5)) == "sparse512"
    assert settled(choice, facts(mbit=1, push_s=9.0), 20) == "sparse64"

    assert settled(choice, facts(mbit=1, push_s=4.1), 20) == "sparse"
    assert settled(choice, facts(mbit=1, push_s=0.01), 20) == "sparse512"


def test_a_less_lossy_codec_is_tried_where_its_own_push_fits() -> None:
    """A push of 512 values in 0.35 s says nothing of int4, whose deltas have more than twice the bytes; one of 0.3 s
    does."""
    choice = CodecChoice(AUTO)
    settled(choice, facts(mbit=40, is_beside=False))
    assert choice.codec == "sparse512"

    assert settled(choice, facts(mbit=40, push_s=0.35, is_beside=False), 20) == "sparse512"
    assert settled(choice, facts(mbit=40, push_s=0.3, is_beside=False), CONFIRMATIONS) == "int4"


def test_a_node_that_has_been_alone_sends_the_largest_values_when_others_join() -> None:
    """Alone a step has no bytes. With others a swarm learns fastest from the largest values, on any line."""
    choice = CodecChoice(AUTO)
    for push_s in (None, 0.01):
        settled(choice, facts(nodes=1, push_s=push_s))
        assert choice.codec == "bfloat16"

    assert settled(choice, facts(push_s=6.0), CONFIRMATIONS) == "sparse512"


def test_a_rate_near_an_edge_does_not_change_the_codec_back_and_forth() -> None:
    """A rate that wavers by a tenth about the edge of 256 changes the codec at most once."""
    seed = 2
    print(f"seed {seed}")
    rng = random.Random(seed)
    shape = StepShape.even(5_000_000, 4)
    edge = step_bytes(shape, "sparse256").up / facts().allowed_s
    for center in (edge, edge / CLIMB):
        choice = CodecChoice(AUTO)
        settled(choice, facts(mbit=edge / MBIT * 1.0))
        changes = sum(choice.decide(facts(mbit=center * rng.uniform(0.92, 1.08) / MBIT)) for _ in range(500))
        assert changes <= 1


@given(
    mbit=st.floats(0.1, 10_000),
    parameters=st.integers(1000, 10**10),
    nodes=st.integers(2, 1000),
    step_s=st.floats(0.01, 3600),
    faster=st.floats(1.0, 100.0),
)
def test_a_faster_line_never_gets_a_lossier_codec(
    mbit: float, parameters: int, nodes: int, step_s: float, faster: float
) -> None:
    """For every model, swarm and step."""
    places = []
    for rate in (mbit, mbit * faster):
        choice = CodecChoice(AUTO)
        known = facts(mbit=rate, parameters=parameters, nodes=nodes, step_s=step_s)
        places.append(CHOICES.index(settled(choice, known)))
    assert places[1] <= places[0]


def test_a_codec_that_is_set_is_used() -> None:
    """Nothing is decided, whatever the line."""
    choice = CodecChoice(ExchangeSettings(codec="float32"))

    assert choice.decide(facts(mbit=0.1)) is False
    assert (choice.codec, choice.reason) == ("float32", "exchange.codec")


def test_a_push_that_takes_more_than_its_time_makes_the_codec_lossier_whatever_was_measured() -> None:
    """Copies of shards fill the line: every push that is late or given up makes it lossier, and it stays so a while."""
    choice = CodecChoice(AUTO)
    settled(choice, facts(mbit=1000, is_beside=False))
    assert choice.codec == "bfloat16"
    for expected in CHOICES[1:]:
        assert settled(choice, facts(mbit=1000, push_s=math.inf, is_beside=False), CONFIRMATIONS) == expected

    in_time = facts(mbit=1000, push_s=0.9, is_beside=False)
    assert settled(choice, in_time, TRY_AGAIN_STEPS - 1) == CHOICES[-1]
    assert settled(choice, in_time, 2 * CONFIRMATIONS) == "bfloat16"


def control_of() -> tuple[CodecControl, MeasuredLine]:
    line, nothing_is_logged = MeasuredLine(), cast(Any, None)
    control = CodecControl(CodecChoice(AUTO), line, nothing_is_logged, lambda: StepShape.even(1000, 2), is_beside=True)
    return control, line


def test_the_time_of_a_step_is_the_median_of_the_last_ones() -> None:
    """One long step changes nothing; 0 before the first."""
    control, _ = control_of()
    assert control.facts().step_s == 0.0
    for seconds in (10.0, 10.0, 500.0, 11.0):
        control.trained(seconds)
    assert control.facts().step_s == 11.0
    for _ in range(7):
        control.trained(2.0)
    assert control.facts().step_s == 2.0


def test_a_line_receives_no_slower_than_it_sends() -> None:
    """What was received so far may be all that was sent to this node."""
    assert facts(mbit=None).rates is None
    assert facts(mbit=8, download_bytes_per_s=1e5).rates == (1e6, 1e6)
    assert facts(mbit=8, download_bytes_per_s=3e6).rates == (1e6, 3e6)


# -- the bytes of a step in closed form; tests/simulated count them


def test_what_a_swarm_sends_it_receives() -> None:
    """Over nodes with unequal shares, bytes up and down add up to the same."""
    shapes = [
        StepShape(1_000_000, 4, owned, backed) for owned, backed in ((0.5, 0.1), (0.3, 0.2), (0.2, 0.3), (0.0, 0.4))
    ]
    found = [step_bytes(shape, "sparse") for shape in shapes]

    # The last node owns nothing, and so does not forward; all shards of the others have backups.
    assert sum(each.pushed for each in found) == pytest.approx(sum(each.deltas_received for each in found))
    assert sum(each.served for each in found) == pytest.approx(sum(each.pulled for each in found))
    assert sum(each.forwarded for each in found) == pytest.approx(sum(each.forwards_received for each in found))


def test_a_node_alone_moves_nothing_and_one_without_backups_forwards_nothing() -> None:
    """The formula of tests/simulated/test_exchange_bytes.py: (2 + backups)·(N−1)/N models."""
    alone = step_bytes(StepShape.even(1000, 1), "bfloat16")
    assert (alone.up, alone.down) == (0.0, 0.0)
    for nodes in (2, 8, 32):
        for replicas in (0, 1):
            found = step_bytes(StepShape.even(1000, nodes, replicas=replicas), "bfloat16", "bfloat16")
            assert found.up / 2000 == pytest.approx((2 + replicas) * (nodes - 1) / nodes)
            assert found.down == pytest.approx(found.up)
