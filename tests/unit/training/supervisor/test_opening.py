"""What the first message of a trainer leads to."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pnode.training.layout import Layout
from p2pnode.training.supervisor.session import allocate, checked_total, hello_of
from p2pnode.training.trainer_link.engine_messages import EngineOpened
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerHello
from p2pnode.training.trainer_link.messages import Hello


def test_a_script_with_an_engine_trains_no_model() -> None:
    """Its layout is empty, and its engine is named; a trainer is as it describes itself."""
    opened = EngineOpened("p2p", 77)
    hello = hello_of(opened)
    assert (hello.layout.total, hello.task, hello.pid, hello.engine, hello.evaluates) == (
        0,
        "engine p2p",
        77,
        opened,
        False,
    )

    own = TrainerHello(Layout(()), "digits", "1", "", "cpu", evaluates=True, pid=3)
    assert hello_of(Hello(own)) is own


@pytest.mark.parametrize("total", [0, -1])
def test_a_model_without_values_is_refused(total: int) -> None:
    """Before memory is allocated; a start would fail in the same way again."""
    with pytest.raises(TrainerFailed, match="no trainable parameter") as failed:
        checked_total(total)
    assert failed.value.fatal
    with pytest.raises(TrainerFailed, match="no trainable parameter"):
        asyncio.run(allocate(total))
    checked_total(1)


def test_memory_for_a_model_is_of_its_size() -> None:
    """The vector and the delta, all zeros."""
    vectors = asyncio.run(allocate(3))

    assert vectors.vector.tolist() == vectors.delta.tolist() == [0.0] * 3
    assert vectors.vector.dtype == np.float32
