"""What a run's end tells the user. That all nodes write the same bytes is in tests/simulated/test_final_model.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from p2pnode.config.settings import Config
from p2pnode.lifecycle.run_result import RunEnding, RunResult
from p2pnode.training.goal import Best
from p2pnode.training.trainer_link.interface import ModelDescription, TensorSource


@pytest.mark.parametrize(("name", "loader"), [("m.safetensors", "load_file"), ("m.pt", "torch.load")])
def test_the_lines_say_steps_best_metric_file_and_how_to_load_it(name: str, loader: str) -> None:
    """Two lines of Python, which compile, with the path in them."""
    result = RunResult("max_steps", 60, f"/srv/a'b/{name}", "ab12", "", Best("accuracy", 0.97, 50))

    text = "\n".join(result.lines())

    assert "after 60 steps (max_steps)" in text
    assert "best accuracy: 0.97, at step 50" in text
    assert len(result.how_to_load) == 2
    assert loader in text
    compile("\n".join(result.how_to_load), "lines", "exec")
    assert "may differ" not in text


def test_a_model_that_may_differ_or_was_not_written_is_named() -> None:
    """Silence would pass for a promise."""
    result = RunResult("max_seconds", 3, "", "", "2 nodes train on")

    assert result.lines() == [
        "the run has ended after 3 steps (max_seconds)",
        "no file of the model was written",
        "it may differ from the model of other nodes: 2 nodes train on",
    ]


def test_a_start_that_trained_nothing_says_so_and_what_to_do() -> None:
    """The same command once more, of a run that has all its steps; one that trains the rest is not told."""
    whole = RunResult("max_steps", 6, "/srv/m.pt", "ab12", "")

    again = replace(whole, first_step=6).lines()
    print(again)

    assert "trained nothing" in again[1]
    assert all(way in again[1] for way in ("training.max_steps", "--run", "p2pnode forget"))
    for other in (whole, replace(whole, first_step=5), RunResult("until", 6, "", "", "", first_step=6)):
        assert "trained nothing" not in "\n".join(other.lines())


class Agreeing:
    """An exchange whose first owner has these buffers; None: no node has said."""

    def __init__(self, agreed: Any) -> None:
        self.agreed = agreed
        self.asked: list[bytes] = []
        self.final_values = self

    async def agree_on_buffers(self, mine: bytes, timeout_s: float) -> bytes | None:
        self.asked.append(mine)
        return self.agreed if isinstance(self.agreed, bytes | None) else msgspec.msgpack.encode(self.agreed)


def described(**local: bytes) -> ModelDescription:
    """A model with a fixed tensor, and with some that are this node's own."""
    names = {"weight": "vector", "codes": "fixed", **dict.fromkeys(local, "local")}
    tensors = tuple(TensorSource(name, "uint8", (), cast(Any, kind), name) for name, kind in names.items())
    return ModelDescription("", "", tensors, local)


@pytest.mark.parametrize(
    ("mine", "agreed", "taken", "reason"),
    [
        ({"count": b"1"}, {"count": b"2"}, {"count": b"2"}, ""),
        ({}, {}, {}, ""),
        ({}, None, {}, ""),  # fixed tensors are compared when a node joins
        ({"count": b"1"}, None, {"count": b"1"}, "its own tensors (count) are this node's"),
        ({"count": b"1"}, b"torn", {"count": b"1"}, "has changed tensors (count) on some nodes"),
        ({"count": b"1", "codes": b"1"}, {"count": b"2"}, None, "has changed tensors (codes) on some nodes"),
        ({"count": b"1"}, {"count": b"2", "codes": b"1"}, None, "has changed tensors (codes) on some nodes"),
        ({"count": b"1"}, {"count": b"2", "a stranger's": b"1"}, None, "has changed tensors on some nodes"),
        ({"table": bytes(1 << 20), "count": b"1"}, {}, None, "its own tensors (table, count) have 1048"),
    ],
)
def test_tensors_that_differ_between_nodes_are_named(mine: Any, agreed: Any, taken: Any, reason: str) -> None:
    """What all take is that of one node; a node with others says which, also one that has changed nothing itself. What
    a peer has named is not shown."""
    exchange, reasons = Agreeing(agreed), list[str]()
    ending = RunEnding(Config(), *cast(Any, [None] * 5))

    found = asyncio.run(ending._with_agreed_buffers(described(**mine), cast(Any, exchange), reasons))

    assert found.local == (mine if taken is None else taken)
    assert len(reasons) == bool(reason)
    assert reason in "".join(reasons)
    assert "stranger" not in "".join(reasons)


def test_a_model_that_is_all_in_the_vector_asks_nobody() -> None:
    """There is nothing that nodes could have apart."""
    exchange = Agreeing(None)
    ending = RunEnding(Config(), *cast(Any, [None] * 5))
    description = ModelDescription("", "", (TensorSource("weight", "float32", (), "vector", "weight"),), {})

    assert asyncio.run(ending._with_agreed_buffers(description, cast(Any, exchange), [])) == description
    assert exchange.asked == []
