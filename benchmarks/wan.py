"""wan: four nodes behind slow cables train with real daemons; how much of the time, and what do their lines carry?

Each machine is a network namespace, and a relay of ours is the Internet between them (`tests.process.harness`). The
trainer rests in its optimiser steps and notes when (`benchmarks.wan_trainer`), so the share of time in training is by
its own clock, and nothing but the exchange takes the rest. Bytes are those of the interface. What is learnt meanwhile,
beside other programs, is `time_to_loss`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import wan_window
from benchmarks.record import NotMeasured, Outcome, Series
from benchmarks.wan_window import Node
from p2pnode.errors import UserError
from p2pnode.training.shard_count import shard_count
from tests.process.harness.lan_world import LanNode, NotPermitted
from tests.process.harness.line_model import Cable
from tests.process.harness.swarm_world import kill_all
from tests.process.harness.wan_check import NotAsClaimed, check
from tests.process.harness.wan_world import Wan, wan

MINUTES = 3.0
#: Steps of every node before the measured time, and the longest wait for them and for all backups.
WARM_STEPS = 3
WARM_S = 420.0
#: After the measured time the training stops, and what is under way has so long to be acknowledged.
DRAIN_S = 60.0
LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Scenario:
    """Cables of the nodes, parameters and seconds of a step; `aim` is for the lowest share of the nodes in `judged`."""

    text: str
    cables: tuple[Cable, ...]
    millions: float
    step_s: float
    aim: str
    judged: tuple[int, ...] = (0, 1, 2, 3)


def _home(mbit: float, delay_ms: float, jitter_ms: float = 0.0, loss: float = 0.0) -> Cable:
    """A cable of which two make a path with this delay, jitter and loss one way."""
    return Cable(mbit, mbit, delay_ms / 2000, jitter_ms / 2000, 1 - (1 - loss) ** 0.5)


SCENARIOS = {
    "A": Scenario("20 Mbit/s, 30 ms, 5 M, 10 s", (_home(20, 30),) * 4, 5, 10, "≥ 0.95"),
    "B": Scenario("20 Mbit/s, 30 ms, 25 M, 20 s", (_home(20, 30),) * 4, 25, 20, "≥ 0.95"),
    "C": Scenario("5 Mbit/s, 80 ms, 5 M, 20 s", (_home(5, 80),) * 4, 5, 20, "≥ 0.9"),
    "D": Scenario(
        "one at 5 and three at 100 Mbit/s, 30 ms, 5 M, 10 s",
        (*(_home(100, 30),) * 3, _home(5, 30)),
        5,
        10,
        "≥ 0.95",
        (0, 1, 2),
    ),
    "E": Scenario(
        "20 Mbit/s, 30 ms, 1 % loss, 50 ms jitter, 5 M, 10 s", (_home(20, 30, 50, 0.01),) * 4, 5, 10, "≥ 0.9"
    ),
    # 128 and 32 optimiser steps of 30.4 ms: DiLoCo trained for 0.1155 of the time with 128, averaging float32 by a
    # ring.
    "F": Scenario("50 Mbit/s, 30 ms, 30.8 M, 3.9 s", (_home(50, 30),) * 4, 30.8, 3.9, "≥ 0.9"),
    "G": Scenario("50 Mbit/s, 30 ms, 30.8 M, 0.97 s", (_home(50, 30),) * 4, 30.8, 0.97, ""),
}


def measure(arguments: argparse.Namespace) -> Outcome:
    names = arguments.scenario or list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise NotMeasured(f"there is no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    seconds = 60 * (arguments.minutes or MINUTES)
    ways = [(way, settings_of(way)) for way in arguments.ways or [""]]
    series: list[Series] = []
    for name in names:
        scenario = SCENARIOS[name]
        for millions in arguments.parameters or [scenario.millions]:
            series += _scenario(scenario, millions, ways, seconds)
    return Outcome(
        "wan",
        "four daemons in network namespaces that a relay joins with rate, delay, jitter and loss (queues of 1 MiB), "
        "checked through sockets before; a trainer that rests as long as a step takes, pssp, one backup, plain, "
        f"defaults unless a way is named; {seconds / 60:g} minutes after {WARM_STEPS} steps of all; share of the time "
        "in local training by the trainer's own clock; bytes of the interface",
        series,
    )


def settings_of(way: str) -> dict[str, Any]:
    """`"codec=sparse, replicas=0"` as settings by dotted key; a key without a dot is of the exchange. Raises
    `NotMeasured`."""
    settings: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in way.split(","))):
        key, equals, value = (text.strip() for text in part.partition("="))
        if not equals:
            raise NotMeasured(f"a way is like “codec=sparse, replicas=0”, not {way!r}")
        try:
            settings[key if "." in key else f"exchange.{key}"] = json.loads(value)
        except ValueError:
            settings[key if "." in key else f"exchange.{key}"] = value
    return settings


def _scenario(
    scenario: Scenario, millions: float, ways: list[tuple[str, dict[str, Any]]], seconds: float
) -> list[Series]:
    parameters = int(1e6 * millions)
    label = scenario.text.replace(f"{scenario.millions:g} M", f"{millions:g} M")
    series: list[Series] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="p2pnode-wan-", ignore_cleanup_errors=True) as folder,
            wan(scenario.cables) as world,
        ):
            found = check(world)
            _say(f"{label}: {'; '.join(f'{one.mbit:.1f} Mbit/s {1000 * one.round_trip_s:.0f} ms' for one in found)}")
            for number, (way, settings) in enumerate(ways):
                place = Path(folder, str(number))
                place.mkdir()
                name = f"{label}, {way or 'defaults'}"
                nodes = _ours(world, place, parameters, scenario.step_s, settings, seconds)
                series += _series(name, nodes, scenario, parameters)
    except NotPermitted as error:
        raise NotMeasured(f"slow cables between namespaces cannot be made here: {error}") from error
    except NotAsClaimed as error:
        raise NotMeasured(f"the world is not what it claims: {error}") from error
    return series


def _series(name: str, nodes: list[Node], scenario: Scenario, parameters: int) -> list[Series]:
    judged = [nodes[number] for number in scenario.judged]
    details = {
        "shares": [round(node.share, 4) for node in nodes],
        "steps": [round(node.steps, 2) for node in nodes],
        "phases_s": [node.phases_s for node in nodes],
        "warnings": [node.warnings for node in nodes],
    }
    series = [
        Series(f"lowest share of time in training, {name}", "", [min(n.share for n in judged)], scenario.aim, details),
        Series(f"lowest share from the first step on, {name}", "", [min(n.share_from_start for n in judged)]),
        Series(f"sent per node and step, {name}", "MB", [n.sent_per_step for n in nodes]),
        Series(f"sent per parameter and step, {name}", "bytes", [1e6 * n.sent_per_step / parameters for n in nodes]),
        Series(f"shards of a delta unacknowledged when its step ended, {name}", "", [n.unacknowledged for n in nodes]),
        Series(f"deltas refused, lost, or never acknowledged, {name}", "", [_unheard(nodes)], "≤ 0"),
        Series(f"shards pulled per step, {name}", "", [n.pulled for n in nodes]),
        Series(f"shards not pulled per step, {name}", "", [n.missing for n in nodes]),
        Series(f"age of a shard's value when a step begins, {name}", "turns", [n.age for n in nodes]),
        Series(f"age of the oldest, {name}", "turns", [n.oldest for n in nodes]),
        Series(f"warnings in the log, {name}", "", [sum(n.warnings.values()) for n in nodes]),
    ]
    for one in series:
        _say(f"{one.name}: {[round(value, 3) for value in one.values]} {one.unit}")
    for node in nodes:
        _say(f"  {node.phases_s} {node.warnings}")
    return series


def _unheard(nodes: list[Node]) -> float:
    return sum(node.refused * node.steps + node.lost + node.left for node in nodes)


# -- our daemons --------------------------------------------------------------------------------------------------


def _ours(
    world: Wan, folder: Path, parameters: int, step_s: float, settings: dict[str, Any], seconds: float
) -> list[Node]:
    shards = settings.get("exchange.shards") or shard_count(parameters, len(world.machines))
    values = {"training.min_nodes": len(world.machines), "log.format": "json", "log.level": "debug", **settings}
    files = [folder / f"notes-{number}" for number in range(len(world.machines))]
    nodes: list[LanNode] = []
    try:
        for number, machine in enumerate(world.machines):
            script = [sys.executable, "-m", "benchmarks.wan_trainer", "--parameters", str(parameters)]
            script += ["--step-s", str(step_s), "--shards", str(shards), "--seed", str(number)]
            script += ["--notes", str(files[number])]
            bootstrap = nodes[0].address if nodes else ""
            nodes.append(LanNode(folder, f"n{number}", values, machine=machine, bootstrap=bootstrap, script=script))
            if number == 0:
                _wait(lambda: nodes[0].address != "", "it listens", nodes)
        _wait(lambda: all(len(_notes(file)) >= WARM_STEPS for file in files), "all train", nodes)
        with contextlib.suppress(NotMeasured):  # over a slow line some backups may never be made: measured all the same
            _wait(lambda: _is_settled(nodes), "every shard has a backup", nodes)
        _say(f"settled: {[_held(node) for node in nodes]}")
        began_s = time.monotonic()
        sent = [world.sent_bytes(number) for number in range(len(nodes))]
        logs = [node.log_file.stat().st_size for node in nodes]
        first = [node.step for node in nodes]
        _rest(seconds, nodes)
        ended_s = time.monotonic()
        started_s = max(_notes(file)[0]["began_s"] for file in files)
        sent = [world.sent_bytes(number) - before for number, before in enumerate(sent)]
        steps = [_asked(node, lambda node: node.steps(1000)) for node in nodes]
        said = [node.log_file.read_bytes()[at:].decode(errors="replace") for node, at in zip(nodes, logs, strict=True)]
        # What is still trained now is noted when it ends, and the pause comes after it.
        for node in nodes:
            _asked(node, lambda node: node.post("/pause"))
        _rest(1.1 * step_s, nodes)
        deadline = time.monotonic() + DRAIN_S
        left = [_outstanding(node) for node in nodes]
        while any(left) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
            left = [_outstanding(node) for node in nodes]
        return [
            wan_window.node(
                _notes(files[number]),
                [row for row in steps[number] if row["step"] > first[number]],
                began_s=began_s,
                ended_s=ended_s,
                sent_bytes=sent[number],
                log=said[number],
                left=len(left[number]),
                lost=sum(_exchange(node).get(f"lost_in_{kind}", 0) for kind in ("splits", "restarts")),
                started_s=started_s,
            )
            for number, node in enumerate(nodes)
        ]
    finally:
        kill_all(nodes)


def _asked(node: LanNode, question: Callable[[LanNode], Any]) -> Any:
    """Its answer; a busy node has some attempts. Raises `NotMeasured`."""
    for attempt in range(10):
        try:
            return question(node)
        except (UserError, AssertionError, OSError) as error:
            if attempt == 9:
                raise NotMeasured(f"{node.name} does not answer: {error}") from error
            time.sleep(LOOK_S)
    raise AssertionError


def _exchange(node: LanNode) -> dict[str, Any]:
    return node.status().get("exchange") or {}


def _held(node: LanNode) -> tuple[int, int]:
    exchange = _exchange(node)
    return exchange.get("shards_owned", 0), exchange.get("shards_backed", 0)


def _outstanding(node: LanNode) -> list[int]:
    """Steps of which a shard is not acknowledged; one, where the node does not answer."""
    found: list[int] = _exchange(node).get("outstanding_steps", [0])
    return found


def _is_settled(nodes: list[LanNode]) -> bool:
    """Whether each shard has an owner with a backup; a node that was the backup before may still have its copy."""
    return wan_window.is_settled([_exchange(node) for node in nodes])


def _notes(file: Path) -> list[wan_window.Note]:
    return wan_window.notes(file.read_text()) if file.exists() else []


def _wait(condition: Callable[[], bool], what: str, nodes: list[LanNode], within_s: float = WARM_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        _living(nodes)
        if time.monotonic() > deadline:
            said = "\n".join(f"{node.name}:\n{node.output()[-1500:]}" for node in nodes)
            raise NotMeasured(f"not within {within_s:.0f} s: {what}\n{said}")
        time.sleep(LOOK_S)


def _living(nodes: list[LanNode]) -> None:
    for node in nodes:
        if node.ended:
            raise NotMeasured(f"{node.name} has ended:\n{node.output()[-3000:]}")


def _rest(seconds: float, nodes: list[LanNode]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        _living(nodes)
        time.sleep(min(LOOK_S, max(0.0, deadline - time.monotonic())))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
