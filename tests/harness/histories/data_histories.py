"""Random histories of nodes that share a data set: they join, leave, die and come back, and messages are lost.

The decisions are those of `training.sharing.member`; network, failure detection and trainers are a heap of events, so
that a history of eight nodes takes some milliseconds. Every sample that a reported turn trained is recorded, and
`Tally` counts what was trained twice by nodes of which neither died, and what was skipped. Everything follows from one
seed: `python -m tests.harness.histories.data_histories --seed N` repeats a history.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from p2pnode.training.sharing.member import DataMember
from p2pnode.training.sharing.messages import ShareData
from p2pnode.training.trainer_link.data_messages import UNKNOWN, Claim, DataShape, DataState, PartitionTrained

#: A request without an answer has failed after this long.
TIMEOUT_S = 1.0
SYNC_S = 1.0
RETRY_S = 0.3
#: A new iteration is told at once, if the last telling is this long ago.
HURRY_S = 0.2
#: Seconds until a node learns of a death; drawn for each node.
DETECTED_S = (2.0, 6.0)

#: (epoch, partition, sample)
Sample = tuple[int, int, int]


@dataclass
class Start:
    """One start of a node: the member, and a trainer that draws ahead of what it has trained."""

    node: bytes
    incarnation: int
    member: DataMember
    turn_s: float
    per_turn: int
    ahead: int
    alive: bool = True
    leaving: bool = False
    began: bool = False
    #: Claims in the order in which they were drawn; the first is trained up to `offset`.
    drawn: list[Claim] = field(default_factory=list)
    offset: int = 0
    #: An iteration is under way.
    iterates: bool = False
    #: It went to its end.
    finished: bool = False
    #: For a stream: the next block it can read.
    position: int = 0
    saved: DataState | None = None
    told_s: float = 0.0


@dataclass
class Tally:
    """What a history came to."""

    seed: int
    nodes: int = 0
    joins: int = 0
    leaves: int = 0
    deaths: int = 0
    epochs: int = 0
    trained: int = 0
    #: Samples trained again within an epoch: because the first to train them died, and otherwise.
    twice_after_death: int = 0
    twice: int = 0
    #: Samples of complete epochs that no node trained.
    skipped: int = 0
    #: Samples trained only when a later epoch but one had begun.
    late: int = 0


class History:
    """A world of nodes. `size`: samples, or for a stream blocks."""

    def __init__(self, seed: int, *, stream: bool = False, size: int = 96) -> None:
        self.random = random.Random(f"{seed}/data")
        self.seed = seed
        self.now = 100.0
        self.size = size
        self.stream = stream
        self.per_block = 4 if stream else 1
        self.shape = DataShape("stream" if stream else "samples", self.per_block if stream else size, seed)
        self.loss = self.random.choice([0.0, 0.02, 0.2])
        self.delay_s = self.random.choice([(0.001, 0.01), (0.01, 0.4)])
        self.starts: dict[bytes, Start] = {}
        self.saved: dict[bytes, DataState] = {}
        self.died: set[tuple[bytes, int]] = set()
        #: Who trained each sample, and when, in order.
        self.trained: dict[Sample, list[tuple[bytes, int]]] = defaultdict(list)
        self.first_of_epoch: dict[int, float] = {}
        self.trained_at: dict[Sample, float] = {}
        self.tally = Tally(seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    # -- the course

    def at(self, delay_s: float, event: Callable[..., None], *args: Any) -> None:
        self._made += 1
        heapq.heappush(self._events, (self.now + delay_s, self._made, event, args))

    def run(self, until: Callable[[], bool], limit_s: float = 30_000.0) -> None:
        end = self.now + limit_s
        while not until():
            self.now, _, event, args = heapq.heappop(self._events)
            assert self.now < end, f"not finished after {limit_s:g} s (seed {self.seed})"
            event(*args)

    def living(self) -> list[Start]:
        return [start for start in self.starts.values() if start.alive]

    def node_of(self, number: int) -> bytes:
        return hashlib.sha256(f"{self.seed}/{number}".encode()).digest()[:20]

    def lead(self) -> int:
        """The oldest epoch that is not complete for some living node."""
        return min((start.member.ledger.first[0] for start in self.living()), default=0)

    # -- nodes

    def start(self, number: int) -> None:
        node = self.node_of(number)
        before = self.starts.get(node)
        if before is not None and before.alive:
            return
        incarnation = 1 if before is None else before.incarnation + 1
        member = DataMember(node, incarnation, self.shape, self.now)
        if node in self.saved:
            member.restore(self.saved[node])
        turn_s = self.random.choice([0.1, 0.2, 0.5, 1.5])
        start = Start(
            node,
            incarnation,
            member,
            turn_s,
            self.random.choice([1, 3, 8]),
            self.random.choice([0, 2, 12]) // self.per_block,
        )
        self.starts[node] = start
        self.tally.joins += 1
        self.tally.nodes = max(self.tally.nodes, len(self.living()))
        self.ask_around(start)
        self.at(self.random.uniform(0, SYNC_S), self.sync, start)
        self.at(turn_s, self.turn, start)

    def kill(self, node: bytes) -> None:
        start = self.starts[node]
        if not start.alive:
            return
        start.alive = False
        self.died.add((node, start.incarnation))
        self.tally.deaths += 1
        if start.saved is not None:
            self.saved[node] = start.saved
        for other in self.living():
            self.at(self.random.uniform(*DETECTED_S), self.detect, other, node, start.incarnation)

    def detect(self, other: Start, node: bytes, incarnation: int) -> None:
        """A node that came back before it was missed is not declared dead: its new start replaces the old one."""
        if other.alive and self.starts[node].incarnation == incarnation:
            other.member.on_gone(node)

    def leave(self, node: bytes) -> None:
        """Tell every member, again and again until it has heard; then end."""
        start = self.starts[node]
        if not start.alive or start.leaving:
            return
        start.leaving = True
        self.tally.leaves += 1
        start.member.leave()
        self.saved[node] = start.member.state()
        waiting = {other.node for other in self.living() if other is not start}
        self.farewell(start, waiting, 30)

    def farewell(self, start: Start, waiting: set[bytes], attempts: int) -> None:
        waiting &= {other.node for other in self.living()}
        if not start.alive:
            return
        if not waiting or not attempts:
            start.alive = False
            return
        for node in sorted(waiting):
            self.request(start, node, lambda node=node: waiting.discard(node))
        self.at(RETRY_S, self.farewell, start, waiting, attempts - 1)

    # -- messages

    def alive_nodes(self, start: Start) -> list[bytes]:
        return [other.node for other in self.living() if other is not start]

    def ask_around(self, start: Start) -> None:
        """Ask those that have to answer before this node begins anything."""
        if not start.alive:
            return
        start.member.on_peers(self.alive_nodes(start), self.now)
        for node in start.member.missing():
            self.request(start, node)
        if start.member.missing():
            self.at(RETRY_S, self.ask_around, start)

    def sync(self, start: Start) -> None:
        if not start.alive:
            return
        start.member.on_peers(self.alive_nodes(start), self.now)
        self.exchange(start)
        for node in start.member.missing():
            self.request(start, node)
        if not start.leaving:
            start.saved = start.member.state() if self.random.random() < 0.2 else start.saved
        self.at(SYNC_S * self.random.uniform(0.5, 1.5), self.sync, start)

    def hurry(self, start: Start) -> None:
        if self.now - start.told_s > HURRY_S:
            start.told_s = self.now
            self.exchange(start)

    def exchange(self, start: Start) -> None:
        for node in start.member.partners(self.random):
            self.request(start, node)

    def delay(self) -> float:
        return self.random.uniform(*self.delay_s)

    def request(self, start: Start, node: bytes, answered: Callable[[], None] = lambda: None) -> None:
        to = self.starts.get(node)
        if to is None or not to.alive or self.random.random() < self.loss:
            return
        message = msgspec.msgpack.encode(start.member.request())
        self.at(self.delay(), self.arrive, start, to, message, answered)

    def arrive(self, start: Start, to: Start, message: bytes, answered: Callable[[], None]) -> None:
        if not to.alive:
            return
        request = msgspec.msgpack.decode(message, type=ShareData)
        to.member.on_message(start.node, request, self.now)
        answer = msgspec.msgpack.encode(to.member.answer(request))
        if self.random.random() >= self.loss:
            self.at(self.delay(), self.answered, start, to, answer, answered)

    def answered(self, start: Start, to: Start, answer: bytes, answered: Callable[[], None]) -> None:
        if start.alive:
            start.member.on_message(to.node, msgspec.msgpack.decode(answer, type=ShareData), self.now)
            answered()

    # -- trainers

    def turn(self, start: Start) -> None:
        """One turn is over: its samples are reported, and the next ones drawn."""
        if not start.alive or start.leaving:
            return
        if start.member.is_admitted(self.now):
            self.report(start, self.random.randint(1, start.per_turn))
            self.draw(start)
        self.at(start.turn_s * self.random.uniform(0.5, 1.5), self.turn, start)

    def samples_of(self, partition: int) -> int:
        return self.per_block if self.stream else 1 if self.size <= 1024 else 0

    def report(self, start: Start, count: int) -> None:
        trained = []
        while count and start.drawn:
            claim = start.drawn[0]
            size = self.samples_of(claim.partition)
            many = min(count, size - start.offset)
            for sample in range(start.offset, start.offset + many):
                self.record(start, claim, sample)
            count -= many
            start.offset += many
            finished = start.offset == size
            if claim.counted:
                trained.append(PartitionTrained(claim.epoch, claim.partition, start.offset, finished))
            if finished:
                start.drawn.pop(0)
                start.offset = start.drawn[0].offset if start.drawn else 0
        start.member.on_trained(trained, self.size if self.stream and start.finished else UNKNOWN)

    def record(self, start: Start, claim: Claim, sample: int) -> None:
        if not claim.counted:
            return
        who = (start.node, start.incarnation)
        key = (claim.epoch, claim.partition, sample)
        before = self.trained[key]
        if before:
            if all(one in self.died for one in before):
                self.tally.twice_after_death += 1
            else:
                self.tally.twice += 1
        before.append(who)
        self.tally.trained += 1
        self.trained_at.setdefault(key, self.now)
        self.first_of_epoch.setdefault(claim.epoch, self.now)

    def draw(self, start: Start) -> None:
        """Draw until enough is ahead, iteration after iteration."""
        for _ in range(4):
            if len(start.drawn) > start.ahead:
                return
            if not start.iterates:
                if not start.member.begin(self.now, finished=start.finished, has_claims=bool(start.drawn)):
                    self.hurry(start)
                    return
                start.iterates, start.finished, start.position = True, False, 0
                self.hurry(start)
            claims = start.member.claim(start.position, 1 + start.ahead)
            # A stream has to be read to its end before anybody knows how many blocks it has.
            claims = [claim for claim in claims if claim.partition < self.size]
            if claims and self.stream:
                start.position = claims[-1].partition
            if not claims:
                start.iterates, start.finished = False, True
                if self.stream:
                    start.member.ledger.learn_partitions(self.size)
            if not start.drawn and claims:
                start.offset = claims[0].offset
            start.drawn += claims

    # -- the result

    def count(self) -> Tally:
        complete = self.lead()
        self.tally.epochs = complete
        for epoch in range(complete):
            for partition in range(self.size):
                for sample in range(self.samples_of(partition)):
                    key = (epoch, partition, sample)
                    self.tally.skipped += key not in self.trained
                    after_next = self.first_of_epoch.get(epoch + 2)
                    self.tally.late += after_next is not None and self.trained_at.get(key, 0.0) > after_next
        return self.tally


def play(seed: int, *, stream: bool | None = None, seconds: float = 65.0, size: int = 0) -> Tally:
    """One random history."""
    chance = random.Random(f"{seed}/plan")
    history = History(
        seed,
        stream=chance.random() < 0.3 if stream is None else stream,
        size=size or chance.choice([40, 120, 300]),
    )
    nodes = chance.choice([2, 3, 5, 8])
    for number in range(chance.randint(1, nodes)):
        history.at(chance.choice([0.0, chance.uniform(0, 2)]), history.start, number)
    for _ in range(chance.randint(2, 14)):
        when = chance.uniform(1, seconds - 5)
        number = chance.randrange(nodes)
        what = chance.choice(["start", "start", "kill", "leave"])
        if what == "start":
            history.at(when, history.start, number)
        else:
            history.at(when, disturb, history, what, number)
    history.run(lambda: history.now > 100 + seconds and bool(history.living()) and history.lead() >= 1)
    return history.count()


def disturb(history: History, what: str, number: int) -> None:
    """Kill a node or have it leave, if another one stays that knows what was trained."""
    node = history.node_of(number)
    staying = [
        one for one in history.living() if not one.leaving and one.node != node and one.member.is_admitted(history.now)
    ]
    if node in history.starts and staying:
        (history.kill if what == "kill" else history.leave)(node)


def main() -> None:
    line = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    line.add_argument("--seed", type=int, default=0)
    line.add_argument("--histories", type=int, default=1)
    arguments = line.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.histories):
        tally = play(seed)
        if arguments.histories == 1 or tally.twice or tally.skipped:
            print(tally)


if __name__ == "__main__":
    main()
