"""Ranges of the settings of training."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pnode.training.settings import BarrierSettings, ExchangeSettings, TrainingSettings


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (TrainingSettings, {"local_steps": 0}),
        (TrainingSettings, {"hang_s": -1.0}),
        (TrainingSettings, {"unknown": 1}),
        (BarrierSettings, {"method": "psp"}),
        (BarrierSettings, {"quantile": 0.0}),
        (BarrierSettings, {"quantile": 1.1}),
        (ExchangeSettings, {"replicas": 2}),
        (ExchangeSettings, {"outer_momentum": 1.0}),
        (ExchangeSettings, {"pull_codec": "int2"}),
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused(section: type, values: dict[str, Any]) -> None:
    """Below or above its range, not among its choices, or a name that does not exist."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(values, section)


@pytest.mark.parametrize("section", [TrainingSettings, BarrierSettings, ExchangeSettings])
def test_the_defaults_are_in_range(section: type) -> None:
    """What a node runs with when nothing is configured passes the same checks."""
    assert msgspec.convert(msgspec.to_builtins(section()), section) == section()
