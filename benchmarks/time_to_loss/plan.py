"""Which runs are made, of which the command line names some; their results, figures, tables and the picture."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import msgspec

from benchmarks.environments import python_of
from benchmarks.record import NotMeasured, Outcome, Series
from benchmarks.time_to_loss import pages
from benchmarks.time_to_loss import results as of
from benchmarks.time_to_loss.results import NODES, TITLES, Line, Result
from benchmarks.time_to_loss.runs import Order, run

WALL_S, LONG_S, QUICK_S = 300.0, 600.0, 180.0
#: What the best of its rules was on lines of this rate and slower: steps of the whole model between two averages.
TORCHFT_STEPS = {2.5: 160, 50.0: 40, float("inf"): 10}
HIVEMIND = {"steps": 10, "codec": "8bit"}
#: What the figures should be; that of the limit after `LONG_S`.
SOONER, LIMIT, EARLY, PAUSE = "≤ 0.8", "≤ 1.04", "≤ 1", "≤ 5"
#: Beside four equal lines and no fault.
SLOW_AIM, KILLED_AIM = "≤ 1.05", "≤ 1.02"
#: The loss to which another number of nodes takes this part of the time of four.
SCALED, SCALED_AIM = 1.5, "≤ 0.75"


def measure(arguments: argparse.Namespace) -> Outcome:
    """Make the runs, print their tables, and renew the record and its pages. With `--picture` nothing runs: figures and
    pages are those of the record."""
    fresh = of.load() if arguments.picture else _made(arguments)
    results = of.merged(of.load(), fresh)
    if arguments.picture and not arguments.dry_run:
        pages.write(results)
    lines = dict.fromkeys(result.line.of_any_seed for result in fresh if _is_long(result))
    dates = sorted({result.date for result in results})
    return Outcome(
        "time_to_loss",
        "four nodes in network namespaces, each with a cable of its own (queues of 1 MiB), train a byte transformer of "
        "1.3 M parameters on a quarter of a text each; optimiser steps of 0.5 s by the clock; loss of the shared model "
        f"on a common part; a value per seed; runs of {dates[0]} to {dates[-1]}",
        [one for line in sorted(lines, key=lambda line: line.name) for one in series(line, results)],
    )


def _is_long(result: Result) -> bool:
    """A shorter run is a try: it replaces nothing in the record."""
    return result.wall_s >= WALL_S


def _made(arguments: argparse.Namespace) -> list[Result]:
    """Each result is kept as soon as it is there: a later run may fail."""
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="p2pnode-loss-"))
    folder.mkdir(parents=True, exist_ok=True)
    fresh: list[Result] = []
    for number, order in enumerate(orders(arguments, text_in(folder, arguments.text))):
        _say(f"{TITLES[order.contestant]}: {order.line.name}, seed {order.line.seed}, {order.wall_s:g} s …")
        result = msgspec.structs.replace(run(order, folder / f"{number}-{order.contestant}"), source=version())
        _say(f"  losses {result.losses}, shares {result.shares}")
        fresh.append(result)
        of.write(fresh, folder / "results.json")
        if _is_long(result) and not arguments.dry_run:
            pages.write(of.merged(of.load(), [result]))
    _say(f"{of.tables(fresh)}\nin {folder}: results.json, and what the nodes wrote")
    return fresh


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def version() -> str:
    """Of this program: the commit, and whether the tree differs from it."""
    described = ["git", "describe", "--always", "--dirty"]
    return f"p2pnode {subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip()}"


def text_in(folder: Path, given: Path | None) -> Path:
    """The file of the text: one text for all contestants, whose Pythons may have others. CPython's own reference, which
    each Python has, unless another is given."""
    if given is not None:
        return given.resolve()
    file = folder / "text"
    file.write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    return file


def orders(arguments: argparse.Namespace, text_file: Path) -> list[Order]:
    """The runs that the command line asks for: one scenario, the quick ones, or all."""
    wanted = arguments.only or list(TITLES)
    if unknown := [name for name in wanted if name not in TITLES]:
        raise NotMeasured(f"there is no contestant {', '.join(unknown)}; there are {', '.join(TITLES)}")

    def order(contestant: str, line: Line, wall_s: float) -> Order:
        program = contestant if contestant in ("torchft", "hivemind") else ""
        given = getattr(arguments, program) if program else None
        return Order(
            contestant,
            line,
            wall_s,
            text_file,
            min(60.0, wall_s / 2),
            tuple(arguments.set) if contestant == "p2p" else (),
            options_of(contestant, line),
            python_of(program, given) if program else Path(sys.executable),
        )

    def line(*rates_mbit: float, kill: bool = False) -> Line:
        rates = rates_mbit if len(rates_mbit) > 1 else rates_mbit * (arguments.nodes or NODES)
        text = arguments.text.stem if arguments.text else "documentation"
        return Line(rates_mbit=rates, seed=arguments.seed, text=text, kill=kill)

    scenarios: list[tuple[Line, float, Sequence[str]]]
    networked = ("p2p", "torchft", "hivemind")
    without = line(0.0)
    if arguments.rate or arguments.slow or arguments.kill or arguments.wall or arguments.nodes:
        wall_s = arguments.wall or WALL_S
        rates = arguments.rate or [5.0]
        scenarios = [(without, wall_s, ("joint", "alone"))]
        scenarios += [
            (
                line(*_with_slow([rate] * (arguments.nodes or NODES), arguments.slow), kill=arguments.kill),
                wall_s,
                networked,
            )
            for rate in rates
        ]
    elif arguments.quick:
        scenarios = [(without, QUICK_S, ("joint", "alone")), (line(5.0), QUICK_S, networked)]
    else:
        both = ("p2p", "torchft")
        scenarios = [
            (without, LONG_S, ("joint", "alone")),
            (line(5.0), LONG_S, networked),
            (line(5.0, kill=True), LONG_S, networked),
            *((line(rate), WALL_S, both) for rate in (1.0, 20.0, 100.0)),
            (line(20.0, 20.0, 20.0, 1.0), WALL_S, ("p2p",)),
        ]
    return [
        order(contestant, line, wall_s)
        for line, wall_s, contestants in scenarios
        for contestant in contestants
        if contestant in wanted
    ]


def _with_slow(rates: list[float], slow: Sequence[str]) -> list[float]:
    """`3:1` gives node 3 a line of 1 Mbit/s. Raises `NotMeasured`."""
    for one in slow:
        node, colon, rate = one.partition(":")
        if not (colon and node.isdigit() and int(node) < len(rates)):
            raise NotMeasured(f"--slow is like 3:1, a node below {len(rates)} and Mbit/s, not {one!r}")
        rates[int(node)] = float(rate)
    return rates


def options_of(contestant: str, line: Line) -> dict[str, float | int | str]:
    """The rule of another program on this line: the best one that was found for it."""
    if contestant == "hivemind":
        return dict(HIVEMIND)
    if contestant == "torchft":
        rate = min(line.rates_mbit)
        steps = next(steps for bound, steps in TORCHFT_STEPS.items() if rate <= bound)
        # One fragment is averaged while the next steps are made, and must be there before the next one's turn.
        fragments = 4 if steps % 4 == 0 else 2
        momentum = 0.5 if line.kill else 0.9
        return {"steps": steps, "fragments": fragments, "delay": steps // fragments - 1, "momentum": momentum}
    return {}


# -- figures ------------------------------------------------------------------------------------------------------


def series(line: Line, results: Sequence[Result]) -> list[Series]:
    """What p2pnode's defaults do on this line beside torchft and the limit: a value for each seed."""
    ours = [
        result
        for result in results
        if result.contestant == "p2p" and result.line.of_any_seed == line and not result.settings
    ]
    if not ours:
        return []
    shortest = min(ours, key=lambda result: result.wall_s).losses
    first_s, last_s = min(shortest), max(shortest)
    calm = msgspec.structs.replace(line, rates_mbit=(max(line.rates_mbit),) * len(line.rates_mbit), kill=False)

    def over(contestant: str, line: Line, second: int) -> Callable[[Result], float | None]:
        """Our loss over that of another contestant on that line, with the same seed."""

        def ratio(result: Result) -> float | None:
            same_seed = msgspec.structs.replace(line, seed=result.line.seed)
            others = [
                one for one in results if (one.contestant, one.line) == (contestant, same_seed) and not one.settings
            ]
            losses = [other.losses[second] for other in others if second in other.losses]
            return result.losses[second] / min(losses) if losses else None

        return ratio

    rows: list[tuple[str, str, str, Callable[[Result], float | None]]] = [
        ("time to torchft's loss, over torchft's time", "", SOONER, lambda result: _time_ratio(result, results)),
        (f"loss after {first_s} s, over torchft's", "", EARLY, over("torchft", line, first_s)),
        (
            f"loss after {last_s} s, over the joint batch's",
            "",
            LIMIT if last_s >= LONG_S else "",
            over("joint", line.without_network, last_s),
        ),
        ("lowest share of time in training", "", "", lambda result: min(result.shares)),
        (
            "longest pause of a node that was not killed",
            "s",
            PAUSE if line.kill else "",
            lambda result: result.longest_pause_s,
        ),
    ]
    four = msgspec.structs.replace(calm, rates_mbit=calm.rates_mbit[:1] * NODES)

    def over_four(result: Result) -> float | None:
        """Our time to a loss over that of four nodes, with the same seed."""
        same_seed = msgspec.structs.replace(four, seed=result.line.seed)
        theirs = [
            second
            for one in results
            if (one.contestant, one.line) == ("p2p", same_seed)
            and not one.settings
            and (second := of.seconds_to(SCALED, one.losses))
        ]
        return (of.seconds_to(SCALED, result.losses) or result.wall_s) / min(theirs) if theirs else None

    if len(line.rates_mbit) != NODES:
        rows.append((f"time to a loss of {SCALED}, over that of {NODES} nodes", "", SCALED_AIM, over_four))
    if line != calm:
        aim = KILLED_AIM if line.kill else SLOW_AIM
        rows.append(
            (f"loss after {last_s} s, over that of equal lines without a fault", "", aim, over("p2p", calm, last_s))
        )
    found = []
    for what, unit, aim, value_of in rows:
        values = [value for value in map(value_of, ours) if value is not None]
        if values:
            found.append(Series(f"{what}, {line.name}", unit, values, aim))
    return found


def _time_ratio(result: Result, results: Sequence[Result]) -> float | None:
    """`None` without torchft's run. A run that never has its loss counts as if it had it at its end."""
    point = of.reference_of(results, result.line)
    if point is None:
        return None
    second, loss = point
    return (of.seconds_to(loss, result.losses) or result.wall_s) / second
