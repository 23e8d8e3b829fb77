"""The verbs of a program: how they are registered, and what becomes of what they return or raise."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import pytest

from p2pnode.training.engines.program import Context, NoSuchValue, Program, VerbFailed, Verbs, summary
from p2pnode.training.values.store import NewValue, ValueUpdate
from tests.harness.swarms.server_swarm import TableSurroundings


class Around(TableSurroundings):
    """Values in a table, and two peers."""

    def __init__(self) -> None:
        super().__init__({})
        self.node_id = "ab" * 20

    def clock(self) -> float:
        return 12.5

    def peers(self, count: int | None) -> dict[str, int]:
        return {"cd": 3, "ef": 4} if count is None else {"cd": 3}

    def worker_num(self) -> int:
        return 3


@pytest.fixture
def ctx() -> Context:
    return Context(Around(), 7)


def test_a_context_shows_the_node_and_the_values(ctx: Context) -> None:
    """A context has the step, the node, the time, the peers and the values; what is set has the step as timestamp."""
    ctx.set("a", [1, 2])

    assert ctx.get("a") == ([1, 2], 7)
    assert ctx.get("b", 0.5) == (0.5, 0)
    assert (ctx.step, ctx.node_id[:4], ctx.clock(), ctx.worker_num) == (7, "abab", 12.5, 3)
    assert (ctx.keys(), ctx.peers(), ctx.peers(1)) == (["a"], {"cd": 3, "ef": 4}, {"cd": 3})
    with pytest.raises(NoSuchValue, match="the key 'b' has no value; set it first"):
        ctx.get("b")


def test_the_defaults_do_nothing(ctx: Context) -> None:
    """A program without functions schedules and pushes nothing, never stops, has no barrier, and keeps the last
    update."""
    verbs = Verbs()

    assert verbs.scheduled(ctx) == []
    assert verbs.pushed(ctx, []) == []
    assert verbs.passes(ctx)
    assert not verbs.stops(ctx)
    assert verbs.barrier is None
    assert verbs.reducer == "replace"
    assert verbs.pulled(ctx, [ValueUpdate("a", 1, 3), ValueUpdate("a", 2, 4)]) == [("a", 1, 3), ("a", 2, 4)]


def test_functions_are_registered_as_decorators(ctx: Context) -> None:
    """Every register function returns its function, which is called with the context from then on."""
    verbs = Verbs()

    @verbs.register_schedule
    def schedule(ctx: Context) -> list[str]:
        return [f"k{ctx.step}", "k", "k"]

    @verbs.register_push
    def push(ctx: Context, params: list[tuple[str, object]]) -> list[tuple[str, int]]:
        return [(key, ctx.step) for key, _ in params]

    @verbs.register_pull
    def pull(_ctx: Context, updates: list[ValueUpdate]) -> list[tuple[str, int, int]]:
        return [(str(one.key), one.value + 1, one.timestamp) for one in updates]

    @verbs.register_barrier
    def barrier(ctx: Context) -> bool:
        return min(ctx.peers().values()) >= ctx.step

    @verbs.register_stop
    def stop(ctx: Context) -> bool:
        return ctx.step == 7

    assert verbs.scheduled(ctx) == schedule(ctx)[:2] == ["k7", "k"]
    assert verbs.pushed(ctx, [("k", None)]) == [ValueUpdate("k", 7, 8, "pull")]
    assert verbs.pulled(ctx, [ValueUpdate("k", 1, 8)]) == [NewValue("k", 2, 8)]
    assert (verbs.passes(ctx), verbs.stops(ctx)) == (barrier(ctx), stop(ctx)) == (False, True)
    assert push(ctx, []) == pull(ctx, []) == []


def test_a_class_has_the_verbs_as_methods(ctx: Context) -> None:
    """A program class replaces what was registered before; only an overridden barrier and pull count."""

    class Adding(Program):
        reducer = "add"

        def schedule(self, ctx: Context) -> list[str]:
            return ["a"]

    class Own(Program):
        def pull(self, ctx: Context, updates: object) -> list[tuple[str, int, int]]:
            return []

        def barrier(self, ctx: Context) -> bool:
            return False

    verbs = Verbs()
    verbs.register_schedule(lambda _ctx: ["old"])
    verbs.use(Adding())
    assert (verbs.scheduled(ctx), verbs.reducer, verbs.passes(ctx)) == (["a"], "add", True)
    verbs.use(Own())
    assert (verbs.scheduled(ctx), verbs.reducer, verbs.passes(ctx)) == ([], "pull", False)


def test_a_reducer_of_the_daemon_is_named(ctx: Context) -> None:
    """`register_pull` takes the name of a built-in reducer, which updates carry; another name is an error."""
    verbs = Verbs()
    verbs.register_push(lambda _ctx, _params: [("n", 1)])
    verbs.register_pull("add")

    assert verbs.pushed(ctx, []) == [ValueUpdate("n", 1, 8, "add")]
    with pytest.raises(ValueError, match="pull is a function or one of replace, add, not 'sum'"):
        verbs.register_pull("sum")  # type: ignore[type-var]
    with pytest.raises(TypeError, match="schedule has to be a function, not list"):
        verbs.register_schedule([])  # type: ignore[type-var]


def test_an_error_names_the_verb_the_keys_the_node_and_the_step(ctx: Context) -> None:
    """What a function raises becomes a `VerbFailed` with these facts and the traceback; it survives pickling."""
    verbs = Verbs()
    verbs.register_push(lambda _ctx, params: [(key, 1 / 0) for key, _ in params])

    with pytest.raises(VerbFailed) as caught:
        verbs.pushed(ctx, [("a", 1), ("b", 2), ("c", 3), ("d", 4)])

    copy = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, copy):
        assert re.fullmatch(
            "push of 'a', 'b', 'c' and 1 more failed at node abababab in step 7: ZeroDivisionError: division by zero "
            r"\(test_program\.py, line \d+\)",
            str(error),
        )
        assert (error.verb, error.keys, error.step) == ("push", ("a", "b", "c", "d"), 7)
        assert "1 / 0" in error.cause


def test_a_traceback_is_summed_up_with_the_users_last_line(ctx: Context) -> None:
    """Not with a line of the engine, nor of a package that the function called; without one it is the error alone."""

    def deep() -> Any:
        return json.loads("{")

    verbs: Any = Verbs()
    verbs.register_push(lambda _ctx, _params: deep())
    with pytest.raises(VerbFailed) as caught:
        verbs.pushed(ctx, [])
    line = deep.__code__.co_firstlineno + 1
    assert str(caught.value).endswith(f"(char 1) (test_program.py, line {line})")

    verbs.register_push(lambda _ctx, _params: None)
    with pytest.raises(VerbFailed, match=r"'NoneType' object is not iterable$"):
        verbs.pushed(ctx, [])
    assert summary("") == "unknown"
    assert summary("ValueError: wrong\n") == "ValueError: wrong"


@pytest.mark.parametrize(
    ("verb", "returned", "problem"),
    [
        ("schedule", "key", "it returned the key 'key' instead of a list of keys"),
        ("schedule", [3], "a key is str or bytes, not int: 3"),
        ("schedule", None, "TypeError"),
        ("push", ["ab"], r"\(key, update\) was expected, not 'ab'"),
        ("push", [("a", 1, 2)], r"\(key, update\) was expected"),
        ("pull", [("a", 1)], r"\(key, value, timestamp\) was expected"),
        ("pull", [("b", 1, 1)], "it returned the key 'b', of which there is no update"),
        ("pull", [("a", 1, "soon")], "ValueError"),
    ],
)
def test_what_cannot_be_used_is_an_error_of_the_verb(ctx: Context, verb: str, returned: object, problem: str) -> None:
    """A wrong result is refused where it was returned, and named."""
    verbs = Verbs()
    getattr(verbs, f"register_{verb}")(lambda *_: returned)
    calls = {
        "schedule": lambda: verbs.scheduled(ctx),
        "push": lambda: verbs.pushed(ctx, [("a", None)]),
        "pull": lambda: verbs.pulled(ctx, [ValueUpdate("a", 1, 1)]),
    }

    with pytest.raises(VerbFailed, match=f"^{verb}.*{problem}"):
        calls[verb]()
