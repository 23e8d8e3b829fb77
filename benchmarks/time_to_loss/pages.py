"""What the documents show of the recorded results: the tables between two markers, and the picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import ROOT
from benchmarks.time_to_loss import results as of
from benchmarks.time_to_loss.picture import Curve, svg
from benchmarks.time_to_loss.results import Line, Result

PICTURE = ROOT / "docs" / "pictures" / "time-to-loss.svg"
#: All results; and for users, those of the first seed on the usual text without a kill.
ALL, USUAL = ROOT / "docs" / "performance.md", ROOT / "docs" / "slow-lines.md"
SECONDS = (60, 120, 300, 600)
#: What the picture shows, and until when.
PICTURED = Line(rates_mbit=(5.0,) * 4)
UNTIL_S = 300
CURVES = {
    "alone": ("one machine alone", "#8a6d3b"),
    "hivemind": ("four, hivemind", "#7a7a7a"),
    "torchft": ("four, torchft", "#b3541e"),
    "p2p": ("four, p2pnode", "#1f5fa8"),
    "joint": ("limit: one machine, all data", "#222222"),
}
#: Losses of a run with more of them are too high: other programs had the cores.
LATE_STEPS = 100
_MARKED = re.compile(r"(<!-- time to loss: begin[^\n]*-->\n).*?(<!-- time to loss: end -->)", re.DOTALL)


def renewed(page: str, tables: str) -> str:
    """The page with its tables. Raises `ValueError` where the markers are missing."""
    text, count = _MARKED.subn(lambda match: f"{match[1]}\n{tables}\n{match[2]}", page)
    if count != 1:
        raise ValueError("the page has no lines <!-- time to loss: begin … --> and <!-- time to loss: end -->")
    return text


def rendered(results: Sequence[Result]) -> dict[Path, str]:
    """The text of each file that shows results."""
    usual = [result for result in results if _is_usual(result)]
    return {
        ALL: renewed(ALL.read_text(encoding="utf-8"), of.tables(results, SECONDS)),
        USUAL: renewed(USUAL.read_text(encoding="utf-8"), of.tables(usual, SECONDS)),
        PICTURE: picture(usual),
    }


def _is_usual(result: Result) -> bool:
    usual = Line(rates_mbit=result.line.rates_mbit)
    return result.line == usual and not result.settings


def picture(results: Sequence[Result]) -> str:
    """The first result of each contestant on the line that is shown."""
    lines = (PICTURED, PICTURED.without_network)
    found = {result.contestant: result for result in reversed(results) if result.line in lines}
    shown = {name: found[name] for name in CURVES if name in found}
    curves = [
        Curve(_label(result), CURVES[name][1], result.losses, name in ("joint", "alone"))
        for name, result in shown.items()
    ]
    dates = dict.fromkeys(sorted(result.date for result in shown.values()))
    title = "Four home machines over 5 Mbit/s: loss of the shared model, nats per byte"
    return svg(title, f"measured {', '.join(dates)}", curves, UNTIL_S)


def _label(result: Result) -> str:
    label = CURVES[result.contestant][0]
    return f"{label} (busy machine)" if result.late_steps > LATE_STEPS else label


def write(results: Sequence[Result]) -> None:
    """Keep the results, and renew all that shows them."""
    of.write(results)
    for file, text in rendered(results).items():
        file.write_text(text, encoding="utf-8")
