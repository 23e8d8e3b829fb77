"""What a run found, the seconds to a loss, and the tables. Pure, but for `load` and `write`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

RECORDED = Path(__file__).with_name("recorded.json")
#: By its key, what a contestant is called, in the order of the tables.
TITLES = {
    "joint": "one process, the joint batch (the limit)",
    "p2p": "p2pnode",
    "torchft": "torchft 0.2.0",
    "hivemind": "hivemind 1.1.12",
    "alone": "one node alone",
}
#: Others are compared by the second at which they have the loss that this one has at this second.
REFERENCE, AT_S = "torchft", 300
#: The usual number of nodes, and the node that is killed where one is.
NODES = 4
KILLED = 3


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Under which conditions the contestants of a table ran. `rates_mbit` has each node's, both ways; all are 0 where
    there is no network."""

    rates_mbit: tuple[float, ...]
    delay_ms: float = 30.0
    step_s: float = 0.5
    seed: int = 0
    text: str = "documentation"
    kill: bool = False

    @property
    def name(self) -> str:
        """Without the seed, as figures of several seeds have it."""
        rates = self.rates_mbit
        usual = max(set(rates), key=rates.count)
        slow = [f"node {node} at {rate:g}" for node, rate in enumerate(rates) if rate != usual]
        parts = [f"{len(rates)} nodes"] if len(rates) != NODES else []
        parts += [f"{usual:g} Mbit/s", *slow, f"{self.delay_ms:g} ms one way"] if usual else ["no network"]
        parts += [f"text {self.text}"] if self.text != "documentation" else []
        return ", ".join([*parts, *([f"node {KILLED} killed and started again"] if self.kill else [])])

    @property
    def of_any_seed(self) -> Line:
        return msgspec.structs.replace(self, seed=0)

    @property
    def without_network(self) -> Line:
        return msgspec.structs.replace(self, rates_mbit=(0.0,) * len(self.rates_mbit), kill=False)


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run. `losses` by second are those of node 0's shared model, `losses_1` node 1's; lists have a value per node.

    `late_steps`: optimiser steps whose own computing took longer than `step_s`. `pauses_s`: the longest time of a node
    without an optimiser step; a killed node's has the time until it was started again."""

    contestant: str
    line: Line
    wall_s: float
    losses: dict[int, float]
    losses_1: dict[int, float] = {}
    settings: list[str] = []
    options: dict[str, float | int | str] = {}
    ready_s: float = 0.0
    steps: list[int] = []
    shares: list[float] = []
    sent_mb: list[float] = []
    pauses_s: list[float] = []
    late_steps: int = 0
    load: float = 0.0
    date: str = ""
    source: str = ""

    @property
    def key(self) -> str:
        """Runs with the same key replace each other."""
        return msgspec.json.encode([self.contestant, self.line, self.settings, self.options]).decode()

    @property
    def name(self) -> str:
        details = [*self.settings, *(f"{name} {value}" for name, value in self.options.items())]
        return ", ".join([TITLES[self.contestant], *details])

    @property
    def longest_pause_s(self) -> float:
        """Of the nodes that were not killed."""
        killed = KILLED if self.line.kill else -1
        return max((pause for node, pause in enumerate(self.pauses_s) if node != killed), default=0.0)


def load(path: Path = RECORDED) -> list[Result]:
    """The results kept; none where there is no file."""
    return msgspec.json.decode(path.read_bytes(), type=list[Result]) if path.exists() else []


def write(results: Sequence[Result], path: Path = RECORDED) -> None:
    """A line per result."""
    lines = ",\n".join(msgspec.json.encode(result).decode() for result in results)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def merged(known: Iterable[Result], fresh: Iterable[Result]) -> list[Result]:
    """A fresh result replaces the known one of the same conditions."""
    return list({result.key: result for result in [*known, *fresh]}.values())


def seconds_to(loss: float, losses: Mapping[int, float]) -> float | None:
    """When a curve first had this loss, on straight lines between its points. `None`: never. A curve whose first
    point is already there may have had it earlier: its first second is returned."""
    before: tuple[int, float] | None = None
    for second, found in sorted(losses.items()):
        if found <= loss:
            if before is None:
                return float(second)
            return before[0] + (second - before[0]) * (before[1] - loss) / (before[1] - found)
        before = second, found
    return None


def reference_of(results: Iterable[Result], line: Line) -> tuple[int, float] | None:
    """The second and the loss that others are compared by: torchft's on this line without a kill, at 300 s or its last.
    The best of several runs of torchft is taken."""
    undisturbed = msgspec.structs.replace(line, kill=False)
    points = []
    for result in results:
        if result.contestant == REFERENCE and result.line == undisturbed and result.losses:
            second = AT_S if AT_S in result.losses else max(result.losses)
            points.append((second, result.losses[second]))
    return min(points, key=lambda point: point[1], default=None)


def tables(results: Sequence[Result], seconds: Sequence[int] = ()) -> str:
    """A Markdown table for each line, with its name before it; ends in a newline. Losses at all seconds that a result
    has, or at those named."""
    lines = dict.fromkeys(result.line.of_any_seed for result in results if any(result.line.rates_mbit))
    return "\n".join(f"{line.name}:\n\n{table(line, results, seconds)}" for line in lines)


def table(line: Line, results: Sequence[Result], seconds: Sequence[int] = ()) -> str:
    """The runs on this line, with any seed, and those without a network on the same text."""
    shown = [result for result in results if result.line.of_any_seed in (line, line.without_network)]
    shown.sort(key=lambda result: (list(TITLES).index(result.contestant), result.line.seed))
    seconds = seconds or sorted({second for result in shown for second in result.losses})
    heads = ["run", "seed", *(f"{second} s" for second in seconds), "torchft's loss after, s", "share in training"]
    heads += ["sent per node, MB", "ready after, s", "longest pause, s", "late steps", "load", "date"]
    rows = [heads, ["---"] * len(heads)]
    for result in shown:
        at_seed = msgspec.structs.replace(line, seed=result.line.seed)
        cells = [result.name, str(result.line.seed)]
        cells += [f"{result.losses[second]:.3f}" if second in result.losses else "" for second in seconds]
        cells += [_seconds(result, reference_of(results, at_seed))]
        cells += [_span(result.shares, 2), _span(result.sent_mb, 0)]
        if any(result.line.rates_mbit):
            cells += [f"{result.ready_s:.0f}", f"{result.longest_pause_s:.1f}", str(result.late_steps)]
            cells += [f"{result.load:.1f}"]
        rows.append(cells + [""] * (len(heads) - len(cells) - 1) + [result.date])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _seconds(result: Result, point: tuple[int, float] | None) -> str:
    """When it has the loss of this point; `≤` where its first snapshot has it."""
    if point is None:
        return ""
    second = seconds_to(point[1], result.losses)
    if second is None:
        return f"not within {result.wall_s:g}"
    return f"≤ {second:.0f}" if second == min(result.losses) else f"{second:.0f}"


def _span(values: Sequence[float], digits: int) -> str:
    """The lowest and the highest, once where they look the same."""
    ends = dict.fromkeys(f"{value:.{digits}f}" for value in (min(values), max(values))) if values else {}
    return " to ".join(ends)
