"""docs/events.md names every event of the code, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import get_args

from overlay.peers import ChangeKind
from tests.harness.project.repository import ROOT, sources, syntax_nodes

GLOSSARY = ROOT / "docs" / "events.md"
#: Calls that log: methods of a log, and functions that are given the event as their first argument.
METHODS = {"debug", "info", "warning", "error"}
FUNCTIONS = {"log", "level", "write", "_failed", "_warn", "_warn_once", "finding"}
#: Places that log under names which are not in the call itself, with the function that makes them.
MAKERS = {"training/sharing/service.py": "_unusual"}
NAME = re.compile(r"[a-z]+(_[a-z]+)*")
ROW = re.compile(r"^\| `(\w+)` \| ([a-z, ]+) \| (.+) \| (.+) \|$", re.MULTILINE)
#: First arguments of other calls of those names.
NO_EVENTS = {"text", "event", "end"}


def names_in(node: ast.AST) -> set[str]:
    """The names of events among the constants of an expression."""
    constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return {value for value in constants if isinstance(value, str) and NAME.fullmatch(value)}


def called(call: ast.Call) -> tuple[str, bool]:
    """The name of what is called, and whether it is an attribute."""
    match call.func:
        case ast.Attribute(attr=name):
            return name, True
        case ast.Name(id=name):
            return name, False
    return "", False


def events_of(path: str) -> dict[str, set[str]]:
    """The events that a module logs, each with its levels; no level where the call does not show it."""
    found: dict[str, set[str]] = defaultdict(set)
    for node in syntax_nodes(path):
        if isinstance(node, ast.FunctionDef) and node.name == MAKERS.get(path):
            for yielded in ast.walk(node):
                if isinstance(yielded, ast.Tuple) and yielded.elts:
                    for name in names_in(yielded.elts[0]):
                        found[name].add("warning")
        if isinstance(node, ast.Dict):  # a line of the log that is made by hand
            keys = {key.value: value for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant)}  # fmt: skip
            if {"event", "level"} <= set(keys):
                for name in names_in(keys["event"]):
                    found[name] |= names_in(keys["level"])
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name, is_method = called(node)
        if name == "LogEvent":
            for event in names_in(node.args[1]):
                found[event] |= names_in(node.args[0])
        elif name in METHODS and is_method:
            for event in names_in(node.args[0]):
                found[event].add(name)
        elif name in FUNCTIONS:
            for event in names_in(node.args[0]):
                found[event] |= set()
    return found


def events_of_the_code() -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for path in sources("overlay", "training", "p2pnode"):
        if path.startswith(("training/simulation/", "p2pnode/commands/", "training/tasks/")):
            continue
        for event, levels in events_of(path).items():
            found[event] |= levels
    for kind in get_args(ChangeKind):
        found[f"peer_{'up' if kind == 'returned' else kind}"] |= set()
    return {event: levels for event, levels in found.items() if event not in NO_EVENTS}


def rows() -> list[tuple[str, str, str, str]]:
    return ROW.findall(GLOSSARY.read_text(encoding="utf-8"))


def test_every_event_is_in_the_glossary_once_and_no_other() -> None:
    """Who adds an event adds what happened and what to do; who removes one removes its row."""
    named = [event for event, *_ in rows()]
    code = set(events_of_the_code())

    assert sorted(event for event in set(named) if named.count(event) > 1) == []
    assert {"not in the glossary": sorted(code - set(named)), "not in the code": sorted(set(named) - code)} == {
        "not in the glossary": [],
        "not in the code": [],
    }
    assert len(code) > 130


def test_the_levels_are_those_of_the_code() -> None:
    """Where a call shows its level, the glossary names it."""
    levels = events_of_the_code()
    wrong = {
        event: (named, sorted(levels[event]))
        for event, named, *_ in rows()
        if not levels.get(event, set()) <= set(named.split(", "))
    }
    assert wrong == {}


def test_every_row_says_what_to_do() -> None:
    """In one sentence or more, of at most thirty words each."""
    for event, _, what, do in rows():
        assert what.endswith("."), event
        assert do.endswith((".", ")")), event
        assert all(len(sentence.split()) <= 30 for sentence in what.split(". ")), event
