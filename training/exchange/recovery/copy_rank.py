"""Ranks the copies of a shard that nodes offer after its owner is gone. Pure."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from training.exchange.ownership_messages import CopyStatus
from training.exchange.terms import ROLE_RANK, ZERO_TERM, Term


class CopyRank(NamedTuple):
    """How copies of a shard rank: by term, by role, learners by what was promised to them, then by version; of equal
    ones a state from disk, for it knows its deltas, before a bare value.

    Of terms with one number neither comes after the other, for whoever goes on raises it: they are two sides of a
    split. There the state with its history is worth more than a replica, whosever node id is higher.
    """

    number: int
    has_history: bool
    node: bytes
    role: int
    promise: Term
    version: int
    is_stored: bool


def rank_copy(standing: CopyStatus, spoken: Container[Term] = ()) -> CopyRank:
    """A learner is the backup, though it has not heard so, if its owner is known to have `spoken` under its promise."""
    role, term, promise = ROLE_RANK[standing.role], standing.term, ZERO_TERM
    if standing.role == "learner":
        if standing.fence in spoken:
            role, term = ROLE_RANK["backup"], standing.fence
        else:
            promise = standing.fence
    has_history = role >= ROLE_RANK["learner"]
    return CopyRank(term.number, has_history, term.node, role, promise, standing.version, standing.is_stored)
