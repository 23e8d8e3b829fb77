"""What a script gives to `pull`, and how updates are cut into messages."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.engines import model_values
from p2pnode.training.engines.model_values import ModelValues
from p2pnode.training.engines.program import Pulling, Verbs
from p2pnode.training.engines.values_link import answer_pull, in_parts
from p2pnode.training.trainer_link.engine_messages import MESSAGE_VALUES_BYTES, PullAsked, PullDone
from p2pnode.training.values.encoding import encode_key, encode_value
from p2pnode.training.values.store import Stamped


def test_updates_are_cut_into_messages_of_about_a_megabyte() -> None:
    """None, one, and so many that the first message is full; one that is larger goes by itself."""
    large = (b"sk", bytes(MESSAGE_VALUES_BYTES), 0, "pull")
    half = (b"sk", bytes(MESSAGE_VALUES_BYTES // 2), 0, "pull")

    assert in_parts([]) == []  # type: ignore[arg-type]
    assert [len(part) for part in in_parts([half])] == [1]  # type: ignore[list-item]
    assert [len(part) for part in in_parts([half, half, half])] == [2, 1]  # type: ignore[list-item]
    assert [len(part) for part in in_parts([large, half, large, half])] == [1, 2, 1]  # type: ignore[list-item]


def test_the_traceback_of_a_pull_is_logged_where_it_ran(caplog: pytest.LogCaptureFixture) -> None:
    """Once, when it is known which update raised: the sender is told in one line."""
    verbs: Any = Verbs()
    verbs.register_pull(lambda _ctx, _updates: 1 // 0)
    ctx: Any = SimpleNamespace(node_id="ab" * 20, step=3)

    def asked(*keys: str) -> PullDone:
        updates: list[Any] = [(encode_key(key), encode_value(key, 1), 0, "pull") for key in keys]
        return answer_pull(PullAsked(1, updates, {}), lambda found, _present: verbs.pulled(ctx, found))

    asked("a", "b")
    assert caplog.records == []
    done = asked("a")
    assert [record.name for record in caplog.records] == ["p2pnode.engine"]
    assert "pull failed for 'a':\nTraceback" in caplog.text
    assert "1 // 0" in caplog.text
    assert re.fullmatch(
        r"pull failed: ZeroDivisionError: integer division or modulo by zero \(test_values_link\.py, line \d+\)",
        done.failure,
    )


def surroundings(found: dict[Any, Stamped]) -> Any:
    return SimpleNamespace(
        node_id="n", rng=None, clock=None, keys=None, peers=None, worker_num=None, get=found.get, set=None
    )


def test_a_pull_reads_its_batch_without_a_request_and_sets_nothing() -> None:
    """A key of the batch that has no value has none; another key is asked for."""
    around = Pulling({"a": Stamped(1, 1)}, surroundings({"b": Stamped(2, 2), "c": Stamped(3, 3)}), ["a", "b"])

    assert (around.get("a"), around.get("b"), around.get("c")) == (Stamped(1, 1), None, Stamped(3, 3))
    with pytest.raises(TypeError, match="pull returns new values; it does not set 'a'"):
        around.set("a", 1, 1)


# -- the parameters of a model as named values


def test_a_model_comes_back_from_its_values(monkeypatch):
    """Large parameters are cut; another model that loads the values computes the same."""
    monkeypatch.setattr(model_values, "PART_VALUES", 7)
    torch.manual_seed(1)
    first, second = nn.Linear(5, 4), nn.Linear(5, 4)
    values = ModelValues(first)
    assert values.names == ["weight/0", "weight/1", "weight/2", "bias/0"]
    assert [value.shape for _, value in values.values()] == [(7,), (7,), (6,), (4,)]
    ModelValues(second).load(values.values())
    points = torch.randn(3, 5)
    assert torch.equal(first(points), second(points))


def test_values_are_copies():
    """What a script does to them does not change the model."""
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    for _, value in ModelValues(model).values():
        value += 1.0
    assert torch.equal(model.weight, before)


def test_gradients_have_the_names_of_their_parameters():
    """A parameter without a gradient has zeros; a frozen one is none of the values."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.requires_grad_(False)
    (3.0 * model[1].bias).sum().backward()
    found = dict(ModelValues(model).gradients())
    assert list(found) == ["0.bias/0", "1.weight/0", "1.bias/0"]
    assert found["1.bias/0"].tolist() == [3.0]
    assert found["0.bias/0"].tolist() == [0.0, 0.0]
    assert found["1.bias/0"].dtype == np.float32


def test_values_of_another_model_are_refused():
    """A wrong size is named with its key."""
    values = ModelValues(nn.Linear(2, 1))
    with pytest.raises(ValueError, match=r"'weight/0' has shape \(3,\)"):
        values.load([("weight/0", np.zeros(3))])
    with pytest.raises(KeyError):
        values.load([("other/0", np.zeros(3))])
