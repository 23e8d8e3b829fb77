"""How a run of a parameter server ends for its user."""

from __future__ import annotations

import pickle

import pytest

from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server.core import TASKS_PER_EPOCH, Failure, Pending
from p2pnode.training.engines.server.losses import LostUpdate, UpdatesLost, lost_update, raise_end

LOST = [Pending(bytes([worker]) * 20, 5, (3 * TASKS_PER_EPOCH + worker, 1)) for worker in range(1, 6)]


def test_a_run_without_a_loss_ends_without_an_error() -> None:
    """Whatever its version."""
    raise_end(None, [], 0, 7)


def test_the_error_names_some_of_the_lost_updates_and_has_all_that_are_known() -> None:
    """Tasks have the numbers of their server, as in `/status`; the count may be higher than what is named."""
    with pytest.raises(UpdatesLost) as caught:
        raise_end(None, LOST, 9, 7)
    error = caught.value
    assert (error.count, error.version, len(error.lost)) == (9, 7, 5)
    assert error.lost[0] == lost_update(LOST[0]) == LostUpdate(1, 5, "01" * 20)
    named = "; ".join(f"that of task {number}, step 5, by worker {f'0{number}' * 4}" for number in (1, 2, 3))
    assert f"ended at version 7, and 9 updates may be missing in its values: {named}; …. Their" in str(error)


def test_an_error_of_the_user_comes_first() -> None:
    """It ended the run; that updates were lost is in the log."""
    with pytest.raises(VerbFailed):
        raise_end(Failure("push", [], "ab", 1, "ValueError: x"), LOST, 5, 7)


def test_the_error_can_be_sent_to_another_process() -> None:
    """With all it has."""
    with pytest.raises(UpdatesLost) as caught:
        raise_end(None, LOST[:1], 1, 7)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.lost, copy.count, copy.version, str(copy)) == (caught.value.lost, 1, 7, str(caught.value))
