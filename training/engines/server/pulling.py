"""Applies updates at the server that owns their keys: nothing twice, nothing from a server that another one has
replaced, and the rest by the program's `pull`.

Every update of a commit has a timestamp of its own, and the value of a key has that of its last one. A server that
repeats the commit of a dead one sends the same timestamps, so an owner knows which updates it has.

The record of the servers is a value like others, under `RECORD_KEY`. Its owner replaces it by one of the same server,
or by one of a higher epoch that counts more stored records. The count shows that the next server has read the last
one: a server that was taken for dead may have stored another meanwhile, and begun the commit that it names. A server
stores its record before each commit, so one that was replaced is refused there, before it has changed a value. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from p2pnode.training.engines.program import Surroundings, VerbFailed, summary, verb_failed
from p2pnode.training.engines.server.core import RECORD_KEY, ServerReplaced, decode_record
from p2pnode.training.engines.server.program import ServerContext, ServerVerbs
from p2pnode.training.engines.values_link import Pulling
from p2pnode.training.values.encoding import Key
from p2pnode.training.values.reducers import reduced
from p2pnode.training.values.store import NewValue, PullFailed, Stamped, ValueUpdate


class ServerPull:
    """The `pull` of one server. `surroundings` are those of the program's context."""

    def __init__(self, verbs: ServerVerbs, surroundings: Surroundings) -> None:
        self._verbs = verbs
        self._surroundings = surroundings

    def apply(self, updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        """The new values of a batch. Raises `PullFailed`, which names the key."""
        found = []
        record = present.get(RECORD_KEY)
        for one in updates:
            if one.key == RECORD_KEY:
                record = Stamped(replaced_record(one, record), one.timestamp)
                found.append(NewValue(RECORD_KEY, *record))
        fresh = not_yet_applied([one for one in updates if one.key != RECORD_KEY], present)
        return [*found, *self._pulled(fresh, present)] if fresh else found

    def _pulled(self, fresh: list[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        stamps = {one.key: one.timestamp for one in sorted(fresh, key=lambda one: one.timestamp)}
        try:
            found = self._reduced(fresh, present) if self._verbs.reducer != "pull" else self._called(fresh, present)
        except VerbFailed as error:
            if len(stamps) == 1:
                raise PullFailed(next(iter(stamps)), summary(error.cause)) from error
            alone = [[update for update in fresh if update.key == key] for key in stamps]
            return [one for updates in alone for one in self._pulled(updates, present)]
        # A key that the program leaves out keeps its value, but it has the update.
        return [NewValue(one.key, one.value, stamps[one.key]) for one in found]

    def _called(self, fresh: list[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        version = max(one.timestamp for one in fresh)
        return self._verbs.pulled(ServerContext(Pulling(present, self._surroundings), 0, version), fresh)

    def _reduced(self, fresh: list[ValueUpdate], present: Mapping[Key, Stamped]) -> list[NewValue]:
        """What a built-in reducer makes of the updates. It runs here and not in the daemon, which does not know which
        updates of a repeated commit a value has."""
        values = {key: one.value for key, one in present.items()}
        ctx = ServerContext(self._surroundings, 0)
        for one in fresh:
            try:
                values[one.key] = reduced(self._verbs.reducer, values.get(one.key), one.value)
            except (TypeError, ValueError) as error:
                raise verb_failed("pull", [one.key], ctx, error) from error
        return [NewValue(key, values[key], 0) for key in dict.fromkeys(one.key for one in fresh)]


def not_yet_applied(updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> list[ValueUpdate]:
    """The updates that the values of their keys do not have."""
    return [one for one in updates if one.key not in present or one.timestamp > present[one.key].timestamp]


def replaced_record(update: ValueUpdate, present: Stamped | None) -> object:
    """The record after a server stored its own. Raises `PullFailed` for that of a server that was replaced."""
    mine = decode_record(Stamped(update.value, 0))
    theirs = decode_record(present)
    is_older = mine.epoch < theirs.epoch or (mine.epoch == theirs.epoch and mine.server != theirs.server)
    if is_older or (mine.epoch > theirs.epoch and mine.stored <= theirs.stored):
        raise PullFailed(RECORD_KEY, str(ServerReplaced(theirs)))
    return update.value
