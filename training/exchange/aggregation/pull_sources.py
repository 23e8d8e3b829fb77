"""Whom a node asks for published values in a large swarm, how old they may be, and whom it asks no more. Pure.

A shard is asked for at the node to which a delta for its owner would be handed (`aggregation.routes`). Each node pulls
in each of its steps, so a value gets older by a step at most with each node that hands it down. One that is older is
refused: then the second closest node is asked, and then the owner.

* A node whose steps take longer than `SLOW` of the median hands nothing down.
* So a value that has passed n nodes is at most n · `SLOW` median steps old, and `GRACE_S`. That is what is accepted.
* A step's base is as old as the oldest value that came this way (`behind_steps`).

Of one node that hands down, in each pull, one shard is asked for at its owner instead. If the bits that came from that
node do not lead to the owner's, they were wrong. A date was wrong if the owner has said itself that it had a later
value before, or if it has made more values since than it can have in that time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from overlay.peers import Contact
from training.exchange.aggregation.routes import RouteTable
from training.exchange.messages import PullResult
from training.exchange.owner.publishing import BYTES_PER_STEP
from training.exchange.terms import Term

#: A node that takes so many times the median for a step hands nothing down.
SLOW = 1.5
#: For transfers and answers on the way. While no step time is known a node is given `UNKNOWN_STEP_S`.
GRACE_S, UNKNOWN_STEP_S = 0.5, 1.0
#: An age of this share of a step is none: it is the time of a request.
SAME_STEP = 0.1
#: An owner makes a value for each `BYTES_PER_STEP` of its changes, and twice as many at most
#: (`training.exchange.owner.publishing`). Step times differ between nodes by this factor, and it may be this many steps
#: off. No change is shorter than so many bytes per value.
PACE, PACE_STEPS = 2.0, 2.0
SHORTEST_CHANGE, LONGEST_CHANGE = 0.05, 4.0
#: A node that is asked while it pulls itself answers when it has what it is asked for, or after this share of the
#: median step, between these bounds.
WAIT_SHARE, WAIT_LEAST_S, WAIT_MOST_S = 0.25, 0.1, 0.5

#: Shards, by the node that they are asked from.
Groups = list[tuple[Contact, list[int]]]


def is_quick(step_seconds: float, median_s: float) -> bool:
    """Whether a node that announces this step time pulls often enough to hand values down; 0: not known."""
    return not median_s or step_seconds <= SLOW * median_s


def oldest_s(relays: int, step_s: float) -> float:
    """How old a value may be that comes over so many nodes, in seconds; `step_s` is the median step, 0: not known."""
    return GRACE_S + relays * SLOW * (step_s or UNKNOWN_STEP_S)


def behind_steps(age_s: float, step_s: float) -> int:
    """How many steps ago the swarm was where values of this age are; a step that has begun counts."""
    return max(0, math.ceil(age_s / step_s - SAME_STEP)) if step_s > 0.0 else 0


def tick_s(bytes_per_value: float, step_s: float) -> float:
    """How long an owner waits at least between two values, if the changes are so long."""
    return min(1.0, max(bytes_per_value, SHORTEST_CHANGE) / BYTES_PER_STEP) / 2 * step_s


def wait_s(step_s: float) -> float:
    """How long a node that pulls lets those wait that ask it."""
    return min(max(WAIT_SHARE * step_s, WAIT_LEAST_S), WAIT_MOST_S)


def divide(
    groups: Groups,
    routes: RouteTable,
    hold: Container[int],
    without: Container[bytes],
    find: Callable[[bytes], Contact | None],
) -> tuple[Groups, Groups]:
    """Shards grouped by owner as (those that their owners are asked for, those that others are). `hold`: shards for
    which it may be another; `without`: nodes that are not asked."""
    direct, ways = Groups(), dict[bytes, tuple[Contact, list[int]]]()
    for owner, shards in groups:
        hop = routes.hop(owner.node_id, without)
        to = None if hop is None else find(hop)
        if to is None:
            direct.append((owner, shards))
            continue
        if theirs := [shard for shard in shards if shard in hold]:
            ways.setdefault(to.node_id, (to, []))[1].extend(theirs)
        if rest := [shard for shard in shards if shard not in hold]:
            direct.append((owner, rest))
    return direct, list(ways.values())


class Stated(NamedTuple):
    """What an owner has said itself: it had this published value at this time, in monotonic seconds."""

    term: Term
    chain: bytes
    published: int
    heard_s: float


@dataclass(frozen=True, slots=True)
class Giver:
    """By whom a shard's present value was handed down, and under which term of its owner."""

    by: bytes
    term: Term


class Dated(NamedTuple):
    """Who has said that an owner still had this published value at this date."""

    by: bytes
    term: Term
    chain: bytes
    published: int
    date_s: float


class PullSources:
    """What one node remembers of those that hand values down to it; all times in monotonic seconds."""

    def __init__(self) -> None:
        #: Nodes that are not asked, until when.
        self._avoided: dict[bytes, float] = {}
        self._given: dict[int, Giver] = {}
        self._stated: dict[int, Stated] = {}
        self._dated: dict[int, Dated] = {}

    def avoid(self, node: bytes, until_s: float) -> None:
        self._avoided[node] = max(until_s, self._avoided.get(node, until_s))

    def is_avoided(self, node: bytes, now_s: float) -> bool:
        return self._avoided.get(node, now_s) > now_s

    def drop_past(self, now_s: float) -> None:
        """Forget who was avoided."""
        self._avoided = {node: until_s for node, until_s in self._avoided.items() if until_s > now_s}

    def took(self, result: PullResult, by: bytes, date_s: float) -> None:
        """A value was handed down, and taken."""
        shard = result.shard
        if result.status == "changes":
            self._given[shard] = Giver(by, result.term)
        self._dated[shard] = Dated(by, result.term, result.chain, result.published, date_s)

    def heard(self, result: PullResult, now_s: float, tick_s: float = 0.0, step_s: float = 0.0) -> bytes | None:
        """The owner of a shard has answered itself, and its value was taken. Returns whose date was wrong: the owner
        lets `tick_s` pass between two values at least."""
        shard = result.shard
        self._given.pop(shard, None)
        self._stated[shard] = Stated(result.term, result.chain, result.published, now_s)
        dated = self._dated.pop(shard, None)
        if dated is None or (dated.term, dated.chain) != (result.term, result.chain):
            return None
        # The first of the later values came when the dated one ended, the others one after the other since.
        least_s = (result.published - dated.published - 1) * tick_s
        return dated.by if least_s > PACE * (now_s - dated.date_s) + PACE_STEPS * step_s else None

    def giver(self, result: PullResult) -> bytes | None:
        """Whose bits of a shard are wrong, if its owner's answer does not fit them; None where the owner may have been
        another one when they came, or was asked itself."""
        given = self._given.pop(result.shard, None)
        return given.by if given is not None and given.term == result.term else None

    def is_untrue(self, result: PullResult, date_s: float) -> bool:
        """Whether the owner had a later value at that date already."""
        stated = self._stated.get(result.shard)
        if stated is None or (stated.term, stated.chain) != (result.term, result.chain):
            return False
        return result.published < stated.published and date_s >= stated.heard_s


def drawn(ways: Groups, owner_of: Mapping[int, bytes], chance: random.Random) -> int | None:
    """A shard that its owner is asked for, of those that others would be: each of them is drawn as often."""
    foreign = [[shard for shard in shards if owner_of[shard] != to.node_id] for to, shards in ways]
    drawn_from = [shards for shards in foreign if shards]
    return chance.choice(chance.choice(drawn_from)) if drawn_from else None


def without_shard(ways: Groups, shard: int) -> Groups:
    """The ways without one shard."""
    left = [(to, [one for one in shards if one != shard]) for to, shards in ways]
    return [(to, shards) for to, shards in left if shards]
