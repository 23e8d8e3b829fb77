"""The messages of pulls by way of another node: it sends changes of published values that it has received. Pure.

The answer has one result for each shard, as that of a `pull`: `same`, `changes`, or `retry` where the node that is
asked has nothing that helps. Each is as old as the age beside it, since its owner said so. A result of whatever status
names the published value that the node has.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from training.exchange.messages import PullResult, Wanted
from training.exchange.terms import MAX_SHARDS, Genesis, Number


class Follow(msgspec.Struct, frozen=True, array_like=True):
    """Asks for what is new of published values that the sender holds, of any owners."""

    genesis: Genesis
    shards: Annotated[list[Wanted], Meta(max_length=MAX_SHARDS)]


class FollowAnswer(msgspec.Struct, frozen=True, array_like=True):
    """`ages_ms`: how long ago at most the owner had each of `results`, in the same order. The changes follow in the
    body."""

    results: Annotated[list[PullResult], Meta(max_length=MAX_SHARDS)]
    ages_ms: Annotated[list[Number], Meta(max_length=MAX_SHARDS)]
