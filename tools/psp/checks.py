"""Claims about the order and shape of measured points, such as "BSP < SSP < pBSP". Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from tools.psp.points import Values


@dataclass(frozen=True, slots=True)
class Check:
    """A claim about a figure; `holds` gets the mean of each point over its seeds."""

    figure: str
    text: str
    holds: Callable[[Values], bool]


def _kept(values: Values, figure: str, series: str, x: float) -> float:
    """Steps with stragglers as a share of the steps without."""
    base = min(at for name, line, at in values if (name, line) == (figure, series))
    return values[figure, series, x] / values[figure, series, base]


def _doubling(values: Values) -> bool:
    large, small = values["doubling", "pssp(4,10)", 1000], values["doubling", "pssp(4,10)", 250]
    return abs(large / small - 1) < 0.03


def _falls(values: Values) -> bool:
    means = [values["sample_size", "pbsp", beta] for beta in (1, 2, 4, 8, 16, 32, 64)]
    return all(more > less for more, less in pairwise(means))


def _ordered(values: Values) -> bool:
    names = ("bsp", "ssp(4)", "pbsp(10)", "pssp(4,10)", "asp")
    means = [values["steps", name, 0] for name in names]
    return means == sorted(means)


def _rises(values: Values) -> bool:
    means = [values["scale", "pbsp(10)", nodes] for nodes in (100, 200, 400, 600, 800, 1000)]
    return means == sorted(means)


def _flat(values: Values) -> bool:
    means = [values["scale", "pbsp(10) held, T = 100", nodes] for nodes in (100, 200, 400, 600, 800, 1000)]
    return max(means) / min(means) < 1.15


SLOW = "straggler_slowness"
CHECKS: tuple[Check, ...] = (
    Check("steps", "BSP < SSP(4) < pBSP(10) < pSSP(4,10) < ASP, event-driven, P = 1000", _ordered),
    Check("sample_size", "pBSP's mean strictly falls as β doubles", _falls),
    Check(
        "disciplines",
        "held pBSP(10) is below SSP(4): the order fails under hold",
        lambda values: values["disciplines", "hold", 10] < 194,
    ),
    Check(SLOW, "event-driven pBSP(10) keeps ≥ 87 % with 5 % slow ×4 to ×10",
          lambda values: all(_kept(values, SLOW, "pbsp(10)", factor) >= 0.87 for factor in (4, 6, 8, 10))),
    Check(SLOW, "BSP keeps ≤ 60 %",
          lambda values: all(_kept(values, SLOW, "bsp", factor) <= 0.60 for factor in (4, 6, 8, 10))),
    Check(SLOW, "held pBSP(10) keeps ≤ 60 %",
          lambda values: all(_kept(values, SLOW, "pbsp(10) held", factor) <= 0.60 for factor in (4, 6, 8, 10))),
    Check("straggler_share_1000", "5 % slow ×4: event-driven pBSP(10) keeps ≥ 92 %, BSP ≤ 47 %",
          lambda values: _kept(values, "straggler_share_1000", "pbsp(10)", 5) >= 0.92
          and _kept(values, "straggler_share_1000", "bsp", 5) <= 0.47),
    Check("scale", "event-driven pBSP(10) rises with P", _rises),
    Check("scale", "held pBSP(10) changes < 15 % over P = 100…1000", _flat),
    Check("doubling", "pSSP(4,10), re-polled: < 3 % from 250 to 1,000 nodes", _doubling),
)  # fmt: skip
