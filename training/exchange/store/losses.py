"""What a restart of a whole swarm has lost, by identity, and which of two copies has more. Pure.

After a restart the owners go on with the best copies that they found. A delta that is recorded on some disk and is in
no such copy is lost: it is reported once, and the state remembers it as `written_off`. A state that began as a replica
has `unlisted` deltas: their number is known, not their identities. The oldest recorded deltas that it does not list
count as those.
"""

from __future__ import annotations

from collections.abc import Iterable

from training.exchange.ownership_messages import OwnedHistory
from training.exchange.store.push_record import PushRecord
from training.exchange.store.repair_log import LogEntry, Span, SupersededCopy, identities_of
from training.exchange.store.shard_store import ShardStore
from training.shards.applied import Applied
from training.shards.state import ShardState

#: Spans of lost deltas listed in one event; the others are counted.
NAMED = 32


def recorded_deltas(store: ShardStore, record: PushRecord) -> Applied:
    """Every delta that this node knows of: those in its states, and its own. None in a run of named values: there an
    identity belongs to one shard, and is missing in all others by right."""
    if store.holds_values:
        return Applied()
    found = record.deltas()
    for known in store.known_deltas():
        found.merge(known)
    return found


def write_off(state: ShardState, recorded: Applied) -> Applied:
    """Compare a state with what is recorded elsewhere; returns the deltas that are lost and were not reported yet."""
    known = identities_of(state)
    known.merge(state.written_off)
    missing = recorded.beyond(known)
    if state.unlisted and missing.count():
        listed = missing.oldest(state.unlisted)
        state.applied.merge(listed)
        state.unlisted -= listed.count()
        missing = missing.without(listed)
    state.written_off.merge(missing)
    return missing


def spans(lost: Applied) -> list[Span]:
    """The form in which losses are reported."""
    return [(node, incarnation, low, high) for node, incarnation, ranges in lost.rows() for low, high in ranges]


def named(lost: list[Span]) -> list[str]:
    """Spans as texts for an event, each once, for they are the same in many shards."""
    texts = (f"{node.hex()[:8]}/{incarnation}:{low}-{high}" for node, incarnation, low, high in lost)
    return list(dict.fromkeys(texts))[:NAMED]


def only_here(copy: SupersededCopy, history: OwnedHistory, log: Iterable[LogEntry] = ()) -> Applied:
    """The deltas of a superseded copy that its owner lacks. So do those of the `log` count that the owner may have
    forgotten: it will not take them, and forgets nothing that a log should still reach."""
    theirs = history.known_deltas()
    missing = copy.known().without(theirs)
    for entry in log:
        if theirs.may_have_forgotten(entry.identity):
            missing.add(entry.identity)
    return missing.without(missing.oldest(history.unlisted)) if history.unlisted else missing


def is_worth_more(copy: SupersededCopy, history: OwnedHistory, log: Iterable[LogEntry] = ()) -> bool:
    """Whether the swarm loses fewer deltas if it goes on from a superseded copy, not from the owner's state.

    Whichever it is, the deltas in the `log` of the other are added to it afterwards, if all that it has is known: only
    the others count. Of two equal copies the one that lists its deltas is worth more.
    """
    known, theirs = copy.known(), history.known_deltas()
    missing = known.without(theirs)
    ahead = missing.count()
    common = known.count() - ahead
    offered = 0 if history.unlisted else sum(entry.identity in missing for entry in log)
    gained = max(0, ahead - history.unlisted - offered)
    only_theirs = history.unlogged if not copy.state.unlisted else theirs.count()
    lost = max(0, only_theirs - common) + max(0, history.unlisted - ahead - copy.state.unlisted)
    return gained > lost or (not lost and history.unlisted > copy.state.unlisted)
