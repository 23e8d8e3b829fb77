"""A model of the ownership of one shard, small enough to search completely: every order of events, up to a bound.

It repeats the decisions of `training.exchange.store`, `owner`, `backup` and `recovery` as plain functions on immutable
states. It has owner, backup, learner, terms, promises, promotion, release and hand-over. Its faults are crash, restart
with the fence, and split; after them come take-over and repair. A search visits every state that a few events
can reach, with messages that arrive in any order or never, and checks the invariants. Each rule can be left out
(`without`). Then the search must find a history that breaks an invariant, which shows that the rule is needed and that
the search can fail.

`python -m tests.harness.ownership.model --depth 12` searches further than the tests do. The rules are described in
docs/protocol.md, "Operations".
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.harness.ownership.rules import Rules
from tests.harness.ownership.starts import SCENARIOS
from tests.harness.ownership.states import NO_NODE, RULES, Broken, Message, Node, Scenario, State, Term

__all__ = ["RULES", "SCENARIOS", "search"]


class Model(Rules):
    """Which events are possible in a state, and what must hold in every one, and after quiet."""

    # -- the search ----------------------------------------------------------------------------------------------

    def deliver(self, state: State, message: Message) -> State | None:
        if state.sides[message.source] != state.sides[message.to]:
            return None
        state = State(state.nodes, state.messages - {message}, *state[2:])
        if message.kind == "claim":
            return self.note_owner(state, message.to, message.term, message.source)
        handler: Any = getattr(self, f"on_{message.kind}")
        after: State = handler(state, message)
        return after

    def successors(self, state: State) -> Iterator[tuple[tuple[object, ...], State]]:
        """Every possible next event, as the words of its name, and the state after it."""
        size = len(state.nodes)
        for message in sorted(state.messages):
            if (after := self.deliver(state, message)) is not None:
                yield (message.kind, f"{message.source}→{message.to}", message.term), after
        for place, node in enumerate(state.nodes):
            # What nothing can come of is not tried: that would be half of a search.
            if not node.alive:
                yield from named(self.restart(state, place), "restart", place)
                continue
            for action in (self.crash, self.declare_dead, self.survey):
                yield from named(action(state, place), action.__name__, place)
            yield from named(self.take_over(state, place), "take_over", place)
            if node.own is not None:
                yield from self.of_owner(state, place)
            if self.scenario.repairs and node.superseded:
                for other in range(size):
                    if other != place and state.nodes[other].alive:
                        yield from named(self.offer(state, place, other), place, "offers to", other)
        if dict(state.budget).get("split"):
            for mask in range(1, 2 ** (size - 1)):
                sides = tuple(int(place > 0 and bool(mask >> (place - 1) & 1)) for place in range(size))
                yield from named(self.split(state, sides), "split", sides)
        yield from named(self.heal(state), "heal")

    def of_owner(self, state: State, place: int) -> Iterator[tuple[tuple[object, ...], State]]:
        """What an owner may do, and others do with it."""
        for delta in self.deltas:
            # Deltas are interchangeable: the second is pushed after the first.
            if delta == 0 or delta - 1 in state.acknowledged:
                yield from named(self.push(state, place, delta), "push", delta, "to", place)
            yield from named(self.abandon(state, place, delta), place, "abandons", delta)
        for action in (self.cancel_catch_up, self.hand_over):
            yield from named(action(state, place), action.__name__, place)
        for other, node in enumerate(state.nodes):
            if other == place or not node.alive:
                continue
            if (spent := self.spend(state, "add_learner")) is not None:
                yield from named(self.add_learner(spent, place, other), place, "adds learner", other)
            if (spent := self.spend(state, "claim")) is not None:
                yield from named(self.send_claim(spent, place, other), place, "sends its claim to", other)
            yield from named(self.read_fence(state, place, other), other, "shows its fence to", place)

    # -- what must hold ------------------------------------------------------------------------------------------

    def acting_owner(self, state: State) -> int:
        owners = [place for place, node in enumerate(state.nodes) if node.alive and node.own is not None]
        return max(owners, key=lambda place: self.rank(state.nodes[place]), default=NO_NODE)

    def check(self, state: State) -> None:
        """The invariants of every state."""
        terms: dict[Term, int] = {}
        for place, node in enumerate(state.nodes):
            copies = [held.counts for held in (node.own, node.back) if held is not None and held.counts is not None]
            if any(max(counts) > 1 for counts in copies):
                raise Broken("a delta was added twice")
            if node.own is not None and terms.setdefault(node.own.term, place) != place:
                raise Broken(f"two owners under {node.own.term}")
            if node.own is not None and node.own.term > node.fence:
                raise Broken("an owner above its own fence")
            for other, partner in enumerate(state.nodes):
                back = partner.back if partner.alive else None
                if node.own is None or back is None or not back.is_active or other == node.own.backup:
                    continue
                if (back.owner, back.term) == (place, node.own.term):
                    raise Broken(f"two pairs under {back.term}")
            for reader in state.nodes:
                if reader.alive and node.own is not None and reader.fence <= node.own.term < reader.highest_seen:
                    raise Broken("a node reads under a lower term than before")
        if self.scenario.repairs:
            held = {d for node in state.nodes if node.alive for d in (*self.of(node), *node.superseded)}
        else:
            successor = max((node for node in state.nodes if node.alive), key=self.rank)
            held = set(self.of(successor))
        if missing := state.acknowledged - held:
            raise Broken(f"acknowledged and lost: {sorted(missing)}")

    def of(self, node: Node) -> list[int]:
        copies = [held.counts for held in (node.own, node.back) if held is not None and held.counts is not None]
        return [delta for counts in copies for delta in self.deltas if counts[delta]]

    def settle(self, state: State) -> State:
        """No more faults, and all due actions run: the end must be one owner with every delta once."""
        passed: list[State] = []
        for _ in range(12):
            # Without end: what is spent in one round is there for the next, so that equal states are equal.
            state = state._replace(sides=(0,) * len(state.nodes), budget=(("add_learner", 99), ("timeout", 99)))
            if state in self._at_rest:
                state = self._at_rest[state]
                break
            passed.append(state)
            after = self.round(state)._replace(budget=state.budget)
            if after == state:  # another round would change nothing either
                break
            state = after
        else:
            return state
        self._at_rest.update(dict.fromkeys(passed, state))
        return state

    def round(self, state: State) -> State:
        """Every message arrives, and every node does once what is due."""
        size = range(len(state.nodes))
        state = self.deliver_all(state)
        for place in size:
            for delta in self.deltas:
                state = self.abandon(state, place, delta) or state
            for action in (self.declare_dead, self.cancel_catch_up, self.survey, self.take_over):
                state = self.deliver_all(action(state, place) or state)
            for other in size:
                if other != place and state.nodes[other].alive:
                    state = self.deliver_all(self.send_claim(state, place, other) or state)
                    state = self.deliver_all(self.read_fence(state, place, other) or state)
        acting_owner = self.acting_owner(state)
        if acting_owner == NO_NODE:
            return state
        own = state.nodes[acting_owner].own
        assert own is not None
        if own.moving is not None:  # the next tick asks again: here it was not taken
            state = self.drop_backup(state, acting_owner)
        candidate = next((other for other in size if other != acting_owner and state.nodes[other].alive), NO_NODE)
        if own.backup == NO_NODE and candidate != NO_NODE:
            state = self.deliver_all(self.add_learner(state, acting_owner, candidate) or state)
        for place in size:
            if self.scenario.repairs and self.has("repair"):
                state = self.deliver_all(self.offer(state, place, acting_owner) or state)
        for delta in self.deltas:
            state = self.deliver_all(self.push(state, acting_owner, delta) or state)
        return state

    def deliver_all(self, state: State) -> State:
        """All messages arrive, in order."""
        for _ in range(200):
            if not state.messages:
                return state
            state = self.deliver(state, min(state.messages)) or state
        raise Broken("messages without end")

    def check_settled(self, state: State) -> None:
        before = state.acknowledged
        state = self.settle(state)
        owners = [node.own for node in state.nodes if node.alive and node.own is not None]
        if len(owners) != 1:
            raise Broken(f"{len(owners)} owners at rest")
        (own,) = owners
        if any(node.alive and node.fence > own.term for node in state.nodes):
            raise Broken("a node whose fence is above the owner's term starves")
        if any(node.superseded for node in state.nodes):
            raise Broken("a reconciliation that never ends")
        if lost := [delta for delta in before if own.counts[delta] == 0]:
            raise Broken(f"acknowledged and lost at rest: {lost}")
        if own.counts != (1,) * len(self.deltas):
            raise Broken(f"deltas at rest: {own.counts}")


def named(state: State | None, *words: object) -> Iterator[tuple[tuple[object, ...], State]]:
    if state is not None:
        yield words, state


@dataclass
class Result:
    """How far a search went; `trace` is the shortest history to a broken invariant."""

    states: int
    broken: str = ""
    trace: tuple[str, ...] = ()


def search(scenario: Scenario, *, without: str = "", depth: int | None = None, settle_every: int = 1) -> Result:
    """Breadth first to `depth` events; every `settle_every`-th state is also brought to rest."""
    model = Model(scenario, without)
    limit = scenario.depth if depth is None else depth
    seen: dict[State, tuple[State, tuple[object, ...]] | None] = {scenario.start: None}
    queue = deque([(scenario.start, 0)])
    checked = 0
    while queue:
        state, deep = queue.popleft()
        checked += 1
        try:
            model.check(state)
            if checked % settle_every == 0:
                model.check_settled(state)
            found = list(model.successors(state)) if deep < limit else []
        except Broken as broken:
            return Result(checked, str(broken), _trace(seen, state))
        for words, after in found:
            if after not in seen:
                seen[after] = (state, words)
                queue.append((after, deep + 1))
    return Result(checked)


def _trace(seen: dict[State, tuple[State, tuple[object, ...]] | None], state: State) -> tuple[str, ...]:
    names: list[str] = []
    while (step := seen[state]) is not None:
        state, words = step
        names.append(" ".join(map(str, words)))
    return tuple(reversed(names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=list(SCENARIOS), default=None)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--without", choices=list(RULES), default="")
    arguments = parser.parse_args()
    for name in [arguments.scenario] if arguments.scenario else SCENARIOS:
        began = time.perf_counter()
        result = search(SCENARIOS[name], without=arguments.without, depth=arguments.depth)
        print(f"{name}: {result.states} states in {time.perf_counter() - began:.1f} s; {result.broken or 'all holds'}")
        for line in result.trace:
            print(f"    {line}")


if __name__ == "__main__":
    main()
