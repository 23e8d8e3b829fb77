"""What `/status` says of the line: figures always, words only where it carries less than a step sends."""

from __future__ import annotations

from typing import Any

import pytest

from overlay.line_rate import WINDOW_S, MeasuredLine
from p2pnode.status.line import line_findings, line_status
from p2pnode.status.metrics import line_metrics
from p2pnode.status.prometheus import render
from training.exchange.codec_choice import CodecChoice, LineFacts
from training.settings import ExchangeSettings
from training.step_bytes import StepShape, step_bytes


def measured(bytes_per_s: float) -> MeasuredLine:
    line = MeasuredLine()
    for _ in range(100):
        line.sent(WINDOW_S, round(bytes_per_s * WINDOW_S), is_busy=True, is_full=True)
    return line


def facts(line: MeasuredLine, **changes: Any) -> LineFacts:
    fields = {
        "shape": StepShape.even(5_000_000, 4),
        "upload_bytes_per_s": line.upload_bytes_per_s,
        "download_bytes_per_s": None,
        "step_s": 10.0,
        "push_s": None,
        "is_beside": True,
        **changes,
    }
    return LineFacts(**fields)


def test_a_line_that_carries_less_than_a_step_says_so_and_what_to_do() -> None:
    """bfloat16 of 5 M parameters over 2.5 MB/s in steps of two seconds: 5 of 22.5 MB."""
    line, choice = measured(2_500_000), CodecChoice(ExchangeSettings(codec="bfloat16"))
    known = facts(line, step_s=2.0)
    status = line_status(line, choice, known)

    assert status.upload_bytes_per_s == 2_500_000
    assert status.carried_bytes_per_step == 5_000_000
    assert status.needed_bytes_per_step == round(step_bytes(known.shape, "bfloat16").up) == 22_500_000
    (finding,) = line_findings(status, choice)
    assert finding.what == "this node's line carries 5.0 of 22.5 MB per step"
    assert finding.do == 'set exchange.codec = "sparse"; or raise training.local_steps on all nodes'


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("sparse", "raise training.local_steps on all nodes; or lower exchange.sparse_values"),
        ("int8", 'set exchange.codec = "sparse"; or raise training.local_steps on all nodes'),
    ],
)
def test_the_advice_is_what_is_left_to_do(codec: Any, expected: str) -> None:
    """Nobody is told to set what is set."""
    line, choice = measured(10_000), CodecChoice(ExchangeSettings(codec=codec))
    (finding,) = line_findings(line_status(line, choice, facts(line)), choice)

    assert finding.do == expected


def test_nothing_is_said_where_all_is_well_or_nothing_is_known() -> None:
    """A fast line, a line not measured, a first step, a node alone, no exchange."""
    choice = CodecChoice(ExchangeSettings(codec="bfloat16"))
    fast, unknown = measured(20_000_000), MeasuredLine()
    slow = measured(10_000)
    for line, known in (
        (fast, facts(fast)),
        (measured(2_500_000), facts(measured(2_500_000))),  # just enough
        (unknown, facts(unknown)),
        (slow, facts(slow, step_s=0.0)),
        (slow, facts(slow, shape=StepShape.even(5_000_000, 1))),
    ):
        assert line_findings(line_status(line, choice, known), choice) == []
    alone = line_status(slow, None, None)
    assert (alone.upload_bytes_per_s, alone.codec, alone.needed_bytes_per_step) == (10_000, "", None)
    assert line_findings(alone, None) == []


def test_the_line_is_in_the_metrics() -> None:
    """Rates by direction, bytes of a step, and the codec as a label; what is not known has no sample."""
    line, choice = measured(2_500_000), CodecChoice(ExchangeSettings(codec="int8"))
    lines = render(list(line_metrics(line_status(line, choice, facts(line))))).splitlines()

    assert 'p2pnode_line_bytes_per_second{direction="out"} 2500000' in lines
    assert not [each for each in lines if 'direction="in"' in each]
    assert 'p2pnode_line_step_bytes{what="carried"} 25000000' in lines
    assert 'p2pnode_codec{codec="int8"} 1' in lines
