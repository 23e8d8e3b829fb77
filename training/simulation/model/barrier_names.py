"""Short names of barriers, as the literature writes them: `bsp`, `ssp(4)`, `pbsp(10)`, `pssp(4,10)`. Pure."""

from __future__ import annotations

import re

from p2pnode.training.settings import BarrierMethod, BarrierSettings

_NAME = re.compile(r"^(asp|bsp|ssp|pbsp|pssp)(?:\((\d+)(?:,(\d+))?\))?$")


def parse_barrier(name: str) -> BarrierSettings:
    """The settings of a short name; of two numbers the first is the staleness. Raises `ValueError`."""
    match = _NAME.match(name)
    if match is None:
        raise ValueError(f'"{name}" is not a barrier: write asp, bsp, ssp(4), pbsp(10) or pssp(4,10)')
    method: BarrierMethod = match[1]  # type: ignore[assignment]
    numbers = [int(number) for number in match.groups()[1:] if number]
    match method:
        case "ssp":
            return BarrierSettings(method=method, staleness=numbers[0] if numbers else 4)
        case "pbsp":
            return BarrierSettings(method=method, sample=numbers[0] if numbers else 0)
        case "pssp":
            staleness, sample = (*numbers, 0, 0)[:2] if numbers else (4, 0)
            return BarrierSettings(method=method, staleness=staleness, sample=sample)
        case _:
            return BarrierSettings(method=method)
