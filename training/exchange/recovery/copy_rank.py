"""Ranks the copies of a shard that nodes offer after its owner is gone. Pure."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from training.exchange.ownership_messages import CopyStatus
from training.exchange.terms import ROLE_RANK, ZERO_TERM, Term


class CopyRank(NamedTuple):
    """The rank of a copy: by term, by role, learners by the term promised to them, then by version.

    Among equals a state from disk ranks above a bare value, because it has the identities of its deltas.

    Two terms with the same number belong to the two sides of a split: neither came after the other, since every
    take-over raises the number. Among these a state with its history ranks above a replica, whatever the node ids.
    """

    number: int
    has_history: bool
    node: bytes
    role: int
    promise: Term
    version: int
    is_stored: bool


def rank_copy(standing: CopyStatus, seen: Container[Term] = ()) -> CopyRank:
    """`seen` are the terms known to be in use. If the term promised to a learner is in use, the learner is the backup,
    even before a message under that term reached it."""
    role, term, promise = ROLE_RANK[standing.role], standing.term, ZERO_TERM
    if standing.role == "learner":
        if standing.fence in seen:
            role, term = ROLE_RANK["backup"], standing.fence
        else:
            promise = standing.fence
    has_history = role >= ROLE_RANK["learner"]
    return CopyRank(term.number, has_history, term.node, role, promise, standing.version, standing.is_stored)
