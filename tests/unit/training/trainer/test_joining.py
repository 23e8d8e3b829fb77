"""What a trainer refuses before it describes its model."""

from __future__ import annotations

import pytest

from p2pnode.training.trainer.joining import refuse_ranks
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import Start


@pytest.mark.parametrize(("devices", "ranks", "refused"), [(1, 2, False), (2, 1, False), (2, 2, True)])
def test_a_script_with_ranks_of_its_own_has_one_device_of_its_node(devices: int, ranks: int, refused: bool) -> None:
    """Two ways to use several GPUs at once are refused for good."""
    start = Start("t", "", {}, "cpu", 1, 0, 0, 4, device_count=devices)
    if not refused:
        refuse_ranks(start, ranks)
        return
    with pytest.raises(TrainerFailed, match="ranks of its own") as failed:
        refuse_ranks(start, ranks)
    assert failed.value.fatal
