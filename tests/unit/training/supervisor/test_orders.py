"""What a trainer was asked for and has not answered."""

from __future__ import annotations

import pytest

from p2pnode.training.supervisor.orders import PendingOrders
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


@run_by(run)
async def test_a_file_that_is_written_is_forgotten() -> None:
    """A run of weeks saves thousands; those that are not written yet are waited for at the end."""
    orders = PendingOrders()
    for turn in (1, 2, 3, 4):
        orders.begin(lambda turn: messages.Save(turn, "state"))
        if turn in (1, 3):
            orders.written(turn)
            await orders.file(turn)
    unwritten = orders.unwritten()

    assert unwritten == [orders.file(2), orders.file(4)]
    with pytest.raises(KeyError):
        orders.file(1)
    orders.fail(TrainerFailed("killed"))
    for file in unwritten:
        with pytest.raises(TrainerFailed, match="killed"):
            await file


@run_by(run)
async def test_the_answer_to_a_cancelled_order_is_not_that_of_the_next() -> None:
    """Nor of an order that has its answer already."""
    orders = PendingOrders()
    orders.begin(lambda turn: messages.Evaluate(turn, 1))
    orders.forget()
    assert not orders.awaits(1)
    _, reply = orders.begin(lambda turn: messages.Evaluate(turn, 2))
    assert (orders.awaits(1), orders.awaits(2)) == (False, True)
    orders.answer("it")
    assert not orders.awaits(2)
    assert await reply == "it"
