"""One node's part of a shared data set: which partitions it may begin, and what it states to the other members.

A partition of an epoch belongs to the first member in rank (`training.sharing.ranking`) among those in this node's
*view*. Three rules keep two living members from p2pnode.training one partition:

1. A node states the members of its view, and begins nothing that belongs to one of them.
2. A node that joins begins nothing before every member it knows of has stated a view with it, or is gone. Such a
   statement says what its sender has begun and knows to be trained, so the joiner never begins that. Answers pass on
   the statements of members that the joiner lacks, and these have to answer too. Of two nodes that join at once the
   later one hears of the other from the members that both asked, or they hear of each other directly.
3. What a living member has begun is left to it, whoever is first in rank.

A member that is gone drops out of the view: what it has begun and is not known to be trained belongs to the next in
rank. So only what a dead member trained may be trained twice. A member that leaves states how far it has come.

Fast members help slow ones: a node that has begun nothing of the next epoch, while others have, *releases* what it has
not begun to those of them that are next in rank, and never begins it afterwards. So no epoch waits for a paused node.

Events and the time come in, claims and statements go out. Pure.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from p2pnode.training.sharing.ledger import (
    LAP,
    MAX_OPEN,
    Ledger,
    Place,
    Section,
    bit_of,
    bits,
    packed,
    section_of,
    unpacked,
)
from p2pnode.training.sharing.messages import ShareData, Statement
from p2pnode.training.sharing.ranking import Weights, first_in_rank, mask_of, weights
from p2pnode.training.trainer_link.data_messages import UNKNOWN, Claim, DataShape, DataState, PartitionTrained

#: A member whose statement is missing holds nobody up for longer.
ADMISSION_S = 15.0
#: A member that the overlay does not know counts as gone when it has stated nothing new for this long.
SILENCE_S = 30.0
#: An answer renews so many statements of others, if they are older by so many numbers: some ten seconds. They show that
#: a member lives that cannot be reached directly.
RENEWED, RENEWED_GAP = 8, 40
#: Epochs that are searched for a partition of this node's own, where there are few.
LOOK_AHEAD = 8
#: A node that is so many epochs ahead waits for the others to release what they have not begun, so long at most.
LEAD_EPOCHS = 2
LEAD_WAIT_S = 2.0
#: Laps of a stream that are searched for the next block: with a thousand blocks in each, some are this node's.
LAPS_SEARCHED = 16
#: Ranked sections that are kept.
MAX_RANKED = 64


@dataclass(slots=True)
class _Other:
    """A member as of its last statement. `knows_us`: it sent us a message itself, so it will not forget us."""

    statement: Statement
    knows_us: bool
    heard_s: float


class DataMember:
    """The part of one start of a node in a shared data set."""

    def __init__(self, node_id: bytes, incarnation: int, shape: DataShape, now: float) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.shape = shape
        self.ledger = Ledger(shape.partitions)
        self.epoch = 0
        self.begun: dict[Place, None] = {}
        #: Nodes that hold data of another shape.
        self.strangers: dict[bytes, DataShape] = {}
        #: Nodes that had not answered in time when this one went on.
        self.unanswered: dict[bytes, None] = {}
        self.has_left = False
        self.joining = True
        self._number = 0
        self._front = -1
        self._released: dict[Section, int] = {}
        self._others: dict[bytes, _Other] = {}
        self._gone: dict[bytes, int] = {}
        #: Peers that have not said yet whether they share data.
        self._unasked: dict[bytes, None] = {}
        self._no_data: dict[bytes, None] = {}
        self._blocked_since: float | None = now
        self._early_since: float | None = None
        self._again: dict[Place, None] = {}
        self._ranked: dict[Section, tuple[list[bytes], Weights]] = {}
        self._owned: dict[Section, tuple[int, int]] = {}
        self._change = 0

    # -- who shares the data -------------------------------------------------------------------------------------

    def view(self) -> list[tuple[bytes, int]]:
        """This node and the living members it knows, in order of their ids."""
        others = [(other.statement.node, other.statement.incarnation) for other in self._living()]
        return sorted([(self.node_id, self.incarnation), *others])

    def _counts(self, node: bytes) -> bool:
        statement = self._others[node].statement
        return not statement.left and self._gone.get(node, -1) < statement.incarnation

    def _living(self) -> list[_Other]:
        gone = self._gone
        return [
            other
            for node, other in self._others.items()
            if not other.statement.left and gone.get(node, -1) < other.statement.incarnation
        ]

    def on_peers(self, peers: Iterable[bytes], now: float) -> None:
        """The living peers of the overlay, whether they share data or not. Members that nobody hears of are gone."""
        alive = dict.fromkeys(peers)  # in their order, which is that of the requests
        for node in alive:
            if self.joining and node not in self._others and node not in self._no_data:
                self._unasked.setdefault(node, None)
        for node in [node for node in self._unasked if node not in alive]:
            del self._unasked[node]
        for node, other in self._others.items():
            if node not in alive and self._counts(node) and now - other.heard_s > SILENCE_S:
                self.on_gone(node)

    def on_no_data(self, node: bytes) -> None:
        """A peer has answered that it shares no data. It will ask us if it begins to."""
        self._unasked.pop(node, None)
        self._no_data[node] = None

    def on_gone(self, node: bytes) -> None:
        """The overlay has declared this node dead, or it has left."""
        self._unasked.pop(node, None)
        other = self._others.get(node)
        if other is not None and self._counts(node):
            self._gone[node] = other.statement.incarnation
            self._change += 1

    def missing(self) -> list[bytes]:
        """The nodes that have to answer before this one begins anything more."""
        me = (self.node_id, self.incarnation)
        found = dict(self._unasked)
        for other in self._living():
            statement = other.statement
            if not statement.includes(*me) and not (statement.joining and other.knows_us):
                found[statement.node] = None
        return list(found)

    def is_admitted(self, now: float) -> bool:
        """Whether this node may begin what is its own."""
        missing = self.missing()
        if not missing:
            self._blocked_since = None
        else:
            if self._blocked_since is None:
                self._blocked_since = now
            if now - self._blocked_since < ADMISSION_S:
                return False
            for node in missing:
                self.unanswered[node] = None
                self._unasked.pop(node, None)
                self._no_data[node] = None
        self.joining = False
        return True

    # -- statements ----------------------------------------------------------------------------------------------

    def statement(self) -> Statement:
        """This node's next statement."""
        self._number += 1
        ledger = self.ledger
        return Statement(
            node=self.node_id,
            incarnation=self.incarnation,
            number=self._number,
            shape=self.shape,
            joining=self.joining,
            left=self.has_left,
            view=self.view(),
            partitions=ledger.partitions,
            first=ledger.first,
            trained=packed(ledger.trained),
            offsets=ledger.packed_offsets(),
            begun=list(self.begun),
            released=packed(self._released),
            front=self._front,
        )

    def request(self) -> ShareData:
        """The message to another node; its answer goes to `on_message`."""
        known = [(node, one.statement.incarnation, one.statement.number) for node, one in self._others.items()]
        return ShareData([self.statement()], known, self.missing())

    def answer(self, request: ShareData) -> ShareData:
        """The answer to a request that went to `on_message` before: only so does the view include its sender."""
        known = {node: (incarnation, number) for node, incarnation, number in request.known}
        asking = {statement.node for statement in request.statements}
        lacking, older = [], []
        for node, other in self._others.items():
            one = other.statement
            incarnation, number = known.get(node, (-1, 0))
            gap = one.number - number
            if node in asking or (one.incarnation, gap) <= (incarnation, 0):
                continue
            if incarnation < one.incarnation or one.left or node in request.wanted:
                lacking.append(one)
            elif gap >= RENEWED_GAP:
                older.append((gap, one))
        older.sort(key=lambda entry: entry[0], reverse=True)
        return ShareData([self.statement(), *lacking, *(one for _, one in older[:RENEWED])])

    def on_message(self, sender: bytes, message: ShareData, now: float) -> None:
        """A request or an answer has arrived. `sender` proved its id; the other statements are passed on."""
        for statement in message.statements:
            if statement.node != self.node_id:
                self._on_statement(statement, now, direct=statement.node == sender)
        if all(statement.node != sender for statement in message.statements):
            self.on_no_data(sender)
        self._release()

    def _on_statement(self, statement: Statement, now: float, *, direct: bool) -> None:
        node = statement.node
        self._unasked.pop(node, None)  # whoever passed it on: `missing` names it until it has stated a view with us
        if statement.shape != self.shape:
            self.strangers[node] = statement.shape
            return
        if direct and not statement.left and self._gone.get(node) == statement.incarnation:
            del self._gone[node]  # wrongly declared dead
            self._change += 1
        known = self._others.get(node)
        if known is not None:
            stamp = (known.statement.incarnation, known.statement.number)
            if (statement.incarnation, statement.number) <= stamp:
                known.knows_us |= direct and statement.incarnation == stamp[0]
                return
        before = (
            None if known is None else (known.statement.incarnation, known.statement.released, known.statement.left)
        )
        same_start = before is not None and before[0] == statement.incarnation
        knows_us = direct or (same_start and known is not None and known.knows_us)
        self._others[node] = _Other(statement, knows_us, now)
        self._no_data.pop(node, None)
        self.unanswered.pop(node, None)
        self.ledger.merge(statement.partitions, statement.first, statement.trained, statement.offsets)
        if before != (statement.incarnation, statement.released, statement.left):
            self._change += 1

    # -- claims --------------------------------------------------------------------------------------------------

    def begin(self, now: float, *, finished: bool, has_claims: bool) -> bool:
        """Begin a new iteration; `finished`: the one before went to its end. Call it when admitted.

        False: this node is far ahead, and others have not said yet what they leave to it; ask again soon.
        """
        epoch = max(self.epoch + finished, self.ledger.first[0])
        if self._is_too_early(epoch, now):
            return False
        self._early_since = None
        self.epoch = epoch
        if not has_claims and not self._again:
            found = (one for one in range(epoch, epoch + LOOK_AHEAD) if self._has_own(one))
            self.epoch = next(found, epoch)
        return True

    def _is_too_early(self, epoch: int, now: float) -> bool:
        """Whether partitions of epochs long past are still to be begun by others, who may just not know."""
        section = self.ledger.first
        for _ in range(MAX_OPEN):
            if section[0] > epoch - LEAD_EPOCHS:
                break
            free = self.ledger.untrained(section) & ~self._begun_in(section) & ~self._owned_in(section)
            if free:
                self._early_since = now if self._early_since is None else self._early_since
                return now - self._early_since < LEAD_WAIT_S
            section = self.ledger.after(section)
        return False

    def claim(self, position: int, count: int) -> list[Claim]:
        """Begin at most `count` partitions of this node's own, none of an epoch after the iteration's.

        For a stream they are at `position` or behind it, in order; otherwise the oldest epoch comes first.
        """
        places: list[Place] = []
        if self.shape.is_stream:
            while len(places) < count and (place := self._next_block(position, self.epoch)) is not None:
                places.append(place)
                self.begun[place] = None
                self._again.pop(place, None)
                position = place[1] + 1  # a pass reads each block once
        else:
            places = list(itertools.islice(self._own_places(self.epoch), count))
        for place in places:
            self.begun[place] = None
            self._again.pop(place, None)
            self._front = max(self._front, place[0])
        return [Claim(*place, self.ledger.offsets.get(place, 0)) for place in places]

    def claim_copy(self) -> Claim:
        """A partition that others train too, for a node that has none of its own."""
        section = (self.epoch, 0)
        mine = weights(self.shape.seed, section, [self.node_id], self.ledger.all_of(section).bit_length())
        return Claim(self.epoch, int(np.argmax(mine)), 0, counted=False)

    def is_short_of_data(self) -> bool:
        """Whether there are fewer partitions than members."""
        return self.ledger.partitions != UNKNOWN and self.ledger.partitions < len(self.view())

    def _has_own(self, epoch: int) -> bool:
        """Whether this node may begin something in the epochs up to this one."""
        if self.shape.is_stream:
            return self._next_block(0, epoch) is not None
        return next(self._own_places(epoch), None) is not None

    def _own_places(self, epoch: int) -> Iterator[Place]:
        """What this node may begin now, the oldest epoch first."""
        yield from list(self._again)
        section = self.ledger.first
        while section[0] <= epoch:
            for bit in bits(self._claimable(section)):
                yield section[0], section[1] * LAP + bit
            section = self.ledger.after(section)

    def _next_block(self, position: int, epoch: int) -> Place | None:
        """The first block of a stream from `position` on, of the oldest epoch that lacks it."""
        granted = [place[::-1] for place in self._again if place[1] >= position]
        ledger = self.ledger
        last = ledger.laps() if ledger.partitions != UNKNOWN else position // LAP + LAPS_SEARCHED
        for lap in range(position // LAP, last):
            if granted and min(granted)[0] < lap * LAP:
                break
            behind = (1 << position - lap * LAP) - 1 if position > lap * LAP else 0
            masks = {one: self._claimable((one, lap)) & ~behind for one in range(ledger.first[0], epoch + 1)}
            granted += [(lap * LAP + (mask & -mask).bit_length() - 1, one) for one, mask in masks.items() if mask]
            if granted:
                break
        return min(granted)[::-1] if granted else None

    def _claimable(self, section: Section) -> int:
        """The mask of what this node may begin now."""
        free = self.ledger.untrained(section)
        if not free:
            return 0
        free &= self._owned_in(section)
        return free & ~self._begun_in(section) if free else 0

    def _begun_in(self, section: Section) -> int:
        """The mask of what a living member has begun, this one included."""
        mask = 0
        for places in [list(self.begun), *(other.statement.begun for other in self._living())]:
            for place in places:
                if section_of(place) == section:
                    mask |= bit_of(place)
        return mask

    def _owned_in(self, section: Section) -> int:
        known = self._owned.get(section)
        if known is not None and known[0] == self._change:
            return known[1]
        members, table, released = self._rank(section)
        owned = mask_of(first_in_rank(table, released) == members.index(self.node_id))
        self._owned = {one: entry for one, entry in self._owned.items() if entry[0] == self._change}
        self._owned[section] = (self._change, owned)
        return owned

    def _rank(self, section: Section) -> tuple[list[bytes], Weights, list[int]]:
        """Members, their weights, and what each has released."""
        members = [node for node, _ in self.view()]
        known = self._ranked.get(section)
        count = self.ledger.all_of(section).bit_length()
        if known is None or known[0] != members or len(known[1]) != count:
            if len(self._ranked) >= MAX_RANKED:
                self._ranked.clear()
            known = self._ranked[section] = (members, weights(self.shape.seed, section, members, count))
        return members, known[1], [self._released_by(node).get(section, 0) for node in members]

    def _released_by(self, node: bytes) -> dict[Section, int]:
        return self._released if node == self.node_id else unpacked(self._others[node].statement.released)

    # -- progress ------------------------------------------------------------------------------------------------

    def on_trained(self, trained: Iterable[PartitionTrained], partitions: int) -> None:
        """The trainer's delta is reported, and with it how far its claims are trained."""
        self.ledger.learn_partitions(partitions)
        for one in trained:
            place = (one.epoch, one.partition)
            if place in self.begun:
                self.ledger.note(place, one.offset, finished=one.finished)
                if one.finished:
                    del self.begun[place]
        self._tidy()

    def restore(self, state: DataState) -> None:
        """Take over what was saved, by this start or an earlier one."""
        self.ledger.merge(state.partitions, state.first, state.trained, state.offsets)
        self.epoch = max(self.epoch, state.epoch)

    def grant_again(self) -> None:
        """The trainer has restarted: what it had begun is granted once more, from where its last report stood."""
        self._again = dict(self.begun)

    def state(self) -> DataState:
        return self.ledger.state(self.epoch)

    def leave(self) -> None:
        """Begin nothing any more; the next statement says how far this node has come."""
        self.has_left = True

    def partners(self, generator: random.Random) -> list[bytes]:
        """The members to exchange statements with now: one at random, and the one that lags most."""
        living = sorted(self._living(), key=lambda other: (other.statement.front, other.statement.node))
        return list({one.statement.node: None for one in (living[0], generator.choice(living))}) if living else []

    def _release(self) -> None:
        """Leave what this node has not begun to those that are ahead and next in rank."""
        if self.joining or self.has_left:
            return
        ahead = {other.statement.node: other.statement.front for other in self._living()}
        front = max(ahead.values(), default=-1)
        section = self.ledger.first
        for _ in range(MAX_OPEN):
            if section[0] >= front:
                break
            if self._front <= section[0] and (mine := self._claimable(section)):
                members, table, released = self._rank(section)
                released[members.index(self.node_id)] |= mine
                heirs = first_in_rank(table, released)
                is_ahead = np.array([ahead.get(node, -1) > section[0] for node in members])
                if given := mine & mask_of(is_ahead[heirs]):
                    self._released[section] = self._released.get(section, 0) | given
                    self._change += 1
            section = self.ledger.after(section)
        self._tidy()

    def _tidy(self) -> None:
        """Forget what lies before the first open section, or behind the end of a stream."""
        first, partitions = self.ledger.first, self.ledger.partitions
        if partitions != UNKNOWN:
            self.begun = {place: None for place in self.begun if place[1] < partitions}
        self._released = {section: mask for section, mask in self._released.items() if section >= first}
