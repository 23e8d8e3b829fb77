"""Terms order take-overs; owners and fences carry them over the wire."""

from __future__ import annotations

import pytest

from p2pnode.training.exchange.messages import decode, encode
from p2pnode.training.exchange.terms import ROLE_RANK, ZERO_TERM, Fence, OwnerInfo, Term
from tests.harness.builders.stores import IDS, contact, term


def test_terms_are_ordered_by_number_and_then_by_node() -> None:
    """Of two simultaneous take-overs one is higher, the same one at every node."""
    assert ZERO_TERM < term(1, "a") < term(1, "b") < term(2, "a")


def test_an_owner_survives_the_wire() -> None:
    """Term and contact are those that were encoded."""
    info = OwnerInfo.of(3, term(5, "c"), contact("b"))

    again = decode(encode(info), OwnerInfo)

    assert (again.shard, again.term, again.contact()) == (3, term(5, "c"), contact("b"))


def test_a_malformed_address_is_an_error_of_the_contact_only() -> None:
    """The message is decoded; the entry is skipped where its contact is needed."""
    info = decode(encode(OwnerInfo(0, term(1, "b"), IDS["b"], "not-an-address", 1)), OwnerInfo)

    with pytest.raises(ValueError, match="address"):
        info.contact()


def test_a_fence_carries_its_term() -> None:
    """Number and node, as a `Term`, which compares as one."""
    assert decode(encode(Fence(2, term(7, "a"))), Fence).term > Term(6, IDS["b"])


def test_roles_rank_from_owner_to_none() -> None:
    """Under the same term, the copy of a higher role lacks nothing that one of a lower role has."""
    assert sorted(ROLE_RANK, key=lambda role: -ROLE_RANK[role]) == ["owner", "backup", "learner", "replica", "none"]
