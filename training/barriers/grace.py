"""How much of its time a node spends on being abreast of the others (`barrier.grace`), and for whom it waits. Pure.

A node whose barrier has passed may wait for those that train its last step. If they come they pull together with it,
and learn as much per step as under bsp. Among nodes of unequal speed, or with steps of very unequal length, they seldom
come. So the waits are paid from a credit: each costs what it took, each step that ends abreast of most of the sample
earns up to `WORTH`, and every step earns a little. A node without credit does not wait, until it has the first credit
again: the waits in a row that follow can bring nodes of equal speed together. Whatever the others do, and whatever they
announce, the waits in n steps, in units of its step, are at most

    FIRST + WORTH · (steps that ended abreast) + EARNED · n + the last wait.
"""

from __future__ import annotations

from collections.abc import Sequence

#: A step that ends abreast of the whole sample is worth so much of a step. Three nodes with a third of a text each
#: learn as much by it as by a tenth more steps, and the fastest waits twice the mean. With 0.2 it runs out of credit
#: among nodes of nearly equal speed.
WORTH = 0.3
#: With this credit a node begins, and waits again; more than the most is not kept.
FIRST, MOST = 0.6, 1.0
#: What each step earns: the cost of trying, where it never pays.
EARNED = 0.005
#: A peer whose announced step is longer than this multiple of the own one is not waited for: to wait for it in each
#: step would cost more than being abreast of it is worth.
NEARLY_EQUAL = 1.15


class GraceCredit:
    """The credit of one node, in units of its step."""

    def __init__(self) -> None:
        self.left = FIRST
        self.is_open = True

    def earn(self) -> bool:
        """A step ends; returns whether the node may wait now."""
        self.left = min(MOST, self.left + EARNED)
        if self.left <= 0.0:
            self.is_open = False
        elif self.left >= FIRST:
            self.is_open = True
        return self.is_open

    def pay(self, waited_steps: float, share_abreast: float) -> None:
        """It has waited for so much of a step, and this share of its sample has completed the same step then."""
        self.left = min(MOST, self.left - waited_steps + WORTH * worth(share_abreast))


def worth(share_abreast: float) -> float:
    """Of being abreast of this share of the sample: nothing up to half of it, which groups of unequal speed are too."""
    return max(0.0, 2.0 * share_abreast - 1.0)


def share_abreast(mine: int, others: Sequence[int]) -> float:
    """The share of these peers that has completed exactly as many steps."""
    return sum(other == mine for other in others) / len(others) if others else 0.0


def is_nearly_as_fast(announced_s: float, own_s: float) -> bool:
    """Whether the steps of a peer, which announces that they take so long, take hardly longer than the own ones. One in
    its first step announces nothing yet, and counts as equal."""
    return announced_s <= NEARLY_EQUAL * own_s
