"""What counts as drawn, trained and reported."""

from __future__ import annotations

from p2pnode.training.trainer.sampling.draws import ClaimProgress, Draws
from p2pnode.training.trainer_link.data_messages import Claim, PartitionTrained


def test_samples_are_trained_in_the_order_of_drawing() -> None:
    """Steps count through the parts; each change is reported once."""
    draws = Draws()
    first, second = ClaimProgress.of(Claim(0, 4, 0), 5), ClaimProgress.of(Claim(0, 7, 2), 5)
    for part in (first, second):
        draws.add(part)
    first.drawn, second.drawn = 5, 4

    assert draws.count(6) == 0
    assert draws.report() == [PartitionTrained(0, 4, 5, True), PartitionTrained(0, 7, 3, False)]
    assert draws.report() == []
    assert draws.count(3) == 2
    assert draws.report() == [PartitionTrained(0, 7, 4, False)]


def test_what_was_drawn_and_not_trained_is_left() -> None:
    """A restart gives back unfinished parts, drawn as far as they are trained; what is trained is still reported."""
    draws = Draws()
    done, rest = ClaimProgress.of(Claim(0, 1, 0), 3), ClaimProgress.of(Claim(0, 2, 0), 3)
    for part in (done, rest):
        draws.add(part)
        part.drawn = 3
    draws.count(4)

    assert draws.restart() == [rest]
    assert (rest.drawn, rest.trained) == (1, 1)
    assert draws.report() == [PartitionTrained(0, 1, 3, True)]


def test_copies_are_not_reported() -> None:
    """Data that others train too belongs to nobody's report."""
    draws = Draws()
    copy = ClaimProgress.of(Claim(0, 1, 0, counted=False), 2)
    draws.add(copy)
    copy.drawn = 2

    assert draws.count(2) == 0
    assert draws.report() == []
