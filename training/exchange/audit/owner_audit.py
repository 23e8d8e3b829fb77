"""Audits the owners that have acknowledged this node's deltas.

* Of shards that this node backs up it knows by itself whether a delta was forwarded to it. Before that counts, the
  owner is asked whether it relies on this node.
* Of one push in `ONE_IN` the owners are asked whether they have it and who their backups are, and the backups whether
  they have it too. What does not fit is asked again after `REPEAT_S`: a backup may just have changed.

A question that gets no answer says nothing. An owner that has no backup for long, although others could be one, and
acknowledges deltas all the same, does not tell the truth about one of the two.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.audit.answers import MAX_HASHED_BYTES, digest_of
from training.exchange.audit.questions import AuditQuestions
from training.exchange.audit.resending import Resending
from training.exchange.audit_messages import AuditedDelta, AuditResult
from training.exchange.audit_records.acknowledged import AcknowledgedKey
from training.exchange.audit_records.outcomes import ACCUSERS
from training.exchange.audit_records.published_values import CopyVerdict
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S
from training.exchange.ownership_messages import ConfirmBackup, TransferResult
from training.shards.applied import DeltaId

ONE_IN = 16
REPEAT_S = 3.0
#: How often questions are asked at most: those of many short steps together.
EVERY_S = 0.5
#: An owner without a backup is asked again at each push: so often, and so long, or less where others have left it out.
ALONE, ALONE_S, ACCUSED_S = 3, 10.0, 5.0
#: Deltas of one question, and contradictions that wait to be asked about again.
MAX_ASKED, MAX_WAITING = 1024, 256


class _Question(NamedTuple):
    """A delta that is asked about. Again, where this `owner` and the `backup` that it named contradicted each other, or
    where the owner had acknowledged it and lacked it (`was_lacking`), and was sent it once more."""

    key: AcknowledgedKey
    owner: bytes
    backup: bytes = b""
    was_lacking: bool = False


class _Doubt(NamedTuple):
    """A copy of this node that does not fit what its owner has acknowledged (`key`), or published (`verdict`)."""

    shard: int
    copy: object
    key: AcknowledgedKey | None = None
    verdict: CopyVerdict = CopyVerdict.FITS


@dataclass(slots=True)
class AuditWork:
    """What is to be asked, all of it small."""

    doubts: list[_Doubt] = field(default_factory=list)
    questions: list[_Question] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.doubts or self.questions)


class OwnerAudit:
    """The audits of one node."""

    def __init__(self, context: ExchangeContext, resending: Resending) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._kept = context.acknowledged
        self._questions = AuditQuestions(context)
        self._resending = resending
        # One of its own: how others draw does not change by it.
        self._random = random.Random(context.environment.entropy.token(8))
        self._next_s = 0.0
        self._waiting: deque[tuple[float, _Question]] = deque(maxlen=MAX_WAITING)
        #: Owners that acknowledge without a backup: since when, and how often they were asked.
        self._alone: dict[bytes, tuple[float, int]] = {}

    # -- what is due --------------------------------------------------------------------------------------------

    def due(self) -> AuditWork | None:
        """What is to be asked now; takes it."""
        if not self._context.settings.replicas or self._store.holds_values:
            self._kept.take_fresh()
            return None
        now_s, work = self._clock.monotonic(), AuditWork()
        if now_s < self._next_s:
            return None
        self._next_s = now_s + EVERY_S
        self._kept.drop_old(now_s, self._view.is_gone)
        steps: dict[tuple[bytes, int], bool] = {}
        for key in self._kept.take_fresh():
            found = self._kept.find(key)
            assert found is not None
            if found.doubt is not None:
                work.doubts.append(_Doubt(key.shard, found.doubt, key))
                continue
            step = found.owner, key.identity.step
            if step not in steps:
                is_watched = found.owner in self._alone or self._context.audits.watchers(found.owner, now_s)
                steps[step] = bool(is_watched) or self._random.randrange(ONE_IN) == 0
            if steps[step] and len(work.questions) < MAX_ASKED and not self._backs_up(key.shard, found.owner):
                work.questions.append(_Question(key, found.owner))
        for shard, doubt in self._context.published_values.take_doubts().items():
            work.doubts.append(_Doubt(shard, doubt.copy, verdict=doubt.verdict))
        while self._waiting and self._waiting[0][0] <= now_s:
            work.questions.append(self._waiting.popleft()[1])
        return work or None

    def _backs_up(self, shard: int, owner: bytes) -> bool:
        backed = self._store.backed.get(shard)
        return backed is not None and backed.owner.node_id == owner

    async def audit(self, work: AuditWork) -> None:
        """Ask about all of it."""
        await self._confirm(work.doubts)
        await self._ask_owners(work.questions)

    # -- own evidence -------------------------------------------------------------------------------------------

    async def _confirm(self, doubts: list[_Doubt]) -> None:
        """Ask owners whether they rely on copies that do not fit what they have acknowledged or published."""
        by_owner: dict[bytes, list[_Doubt]] = {}
        for doubt in doubts:
            if (owner := self._owner_in_doubt(doubt)) is not None:
                by_owner.setdefault(owner, []).append(doubt)
        for node, theirs in by_owner.items():
            if (contact := self._context.swarm.contact(node)) is None:
                continue
            question = ConfirmBackup(self._context.genesis, list(dict.fromkeys(doubt.shard for doubt in theirs)))
            try:
                answer = await self._rpc.ask(contact, "backing", question, TransferResult, PARTNER_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("audit_unanswered", owner=node.hex()[:8], reason=str(error))
                continue
            for doubt in theirs:
                if doubt.shard in answer.taken and self._owner_in_doubt(doubt) == node:
                    reason = "not_forwarded" if doubt.key is not None else f"value_{doubt.verdict}"
                    self._context.contradicted_itself(node, reason, doubt.shard)

    def _owner_in_doubt(self, doubt: _Doubt) -> bytes | None:
        """The owner of a copy, if this node has the same copy still, as an active backup, and it lacks the delta
        still."""
        backed = self._store.backed.get(doubt.shard)
        if backed is None or backed.token is not doubt.copy or backed.state is None or not backed.is_active:
            return None
        if doubt.key is not None:
            identity = doubt.key.identity
            if backed.state.knows(identity) or backed.state.may_have_forgotten(identity):
                return None
        return backed.owner.node_id

    # -- questions to owners and their backups ------------------------------------------------------------------

    async def _ask_owners(self, questions: list[_Question]) -> None:
        by_owner: dict[bytes, dict[AcknowledgedKey, _Question]] = {}
        for question in questions:
            found = self._kept.find(question.key)
            known = self._store.ownership.known_owners.get(question.key.shard)
            if found is None or known is None or known.owner.node_id != question.owner:
                continue
            if found.owner == question.owner and not self._view.is_gone(question.owner):
                by_owner.setdefault(question.owner, {})[question.key] = question
        for node, keys in by_owner.items():
            if (contact := self._context.swarm.contact(node)) is not None:
                await self._ask_owner(contact, keys)

    async def _ask_owner(self, owner: Contact, questions: dict[AcknowledgedKey, _Question]) -> None:
        """Ask an owner whether it has these deltas and who backs them up, and then those."""
        asked = [AuditedDelta(key.shard, key.identity.step) for key in questions]
        self._context.counters.audited += len(asked)
        if (results := await self._questions.ask(owner, asked)) is None:
            return
        by_backup: dict[tuple[bytes, bool], dict[AcknowledgedKey, AuditResult]] = {}
        lacking: list[AcknowledgedKey] = []
        for key, question in questions.items():
            result = results.get((key.shard, key.identity.step))
            if result is None or not result.is_owner:
                continue
            if result.known == "lacks" and not question.was_lacking:
                found = self._kept.find(key)
                if found is not None and result.misses(found.push.base_step):
                    lacking.append(key)
            elif result.known in ("has", "lacks") and result.partner not in (b"", self._context.swarm.node_id):
                is_repeated = result.known == "lacks" or question.backup == result.partner
                by_backup.setdefault((result.partner, is_repeated), {})[key] = result
        self._note_alone(owner, [result for result in results.values() if result.is_owner])
        for (backup, is_repeated), theirs in by_backup.items():
            if (contact := self._context.swarm.contact(backup)) is not None and not self._view.is_gone(backup):
                await self._ask_backup(owner, contact, theirs, is_repeated=is_repeated)
        await self._send_lacking(owner, lacking)

    async def _send_lacking(self, owner: Contact, keys: list[AcknowledgedKey]) -> None:
        """An owner lacks what it has acknowledged: it may have lost it, with its backup, and adds it now."""
        if not keys or not await self._resending.send_again(owner, keys):
            return
        for key in keys:
            if self._kept.find(key) is not None:
                self._waiting.append(
                    (self._clock.monotonic() + REPEAT_S, _Question(key, owner.node_id, was_lacking=True))
                )

    def _acknowledged_s(self, result: AuditResult) -> float:
        """When a delta of this node that was asked about was acknowledged."""
        run, me = self._context.run, self._context.swarm.node_id
        found = self._kept.find(AcknowledgedKey(result.shard, DeltaId(me, run.incarnation, result.step)))
        return 0.0 if found is None else found.at_s

    async def _ask_backup(
        self, owner: Contact, backup: Contact, asked: dict[AcknowledgedKey, AuditResult], *, is_repeated: bool
    ) -> None:
        digests = await self._digests(asked)
        questions = [
            AuditedDelta(key.shard, key.identity.step, digests.get(key, b""), *result.term)
            for key, result in asked.items()
        ]
        found = await self._questions.ask(backup, questions, owner.node_id, is_repeated=is_repeated)
        if found is None:
            return
        failed = False
        for key in asked:
            result = found.get((key.shard, key.identity.step))
            if result is None or result.is_owner or result.known == "forgotten":
                continue
            if result.known == "has" and result.partner == owner.node_id:
                continue
            if is_repeated:
                failed = True
            else:
                self._waiting.append(
                    (self._clock.monotonic() + REPEAT_S, _Question(key, owner.node_id, backup.node_id))
                )
        if failed:
            self._blame(owner.node_id, backup.node_id)

    def _blame(self, owner: bytes, backup: bytes) -> None:
        """An owner and its backup contradict each other. The backup has heard of it: it takes over, if others complain
        too. So the shard of an owner that lies to this node alone stays where it is."""
        self._context.counters.audits_failed += 1
        self._log.warning("owner_audit_failed", source=owner.hex()[:8], reason="pair", backup=backup.hex()[:8])
        liar = self._context.audits.pair(owner, backup, self._clock.monotonic())
        if liar == backup:
            self._context.fail_audit(backup)
        for node in (owner, backup):
            self._context.heed_verdicts(node)

    async def _digests(self, keys: Iterable[AcknowledgedKey]) -> dict[AcknowledgedKey, bytes]:
        """Those of some deltas, drawn by chance."""
        order, room = list(keys), MAX_HASHED_BYTES
        self._random.shuffle(order)
        chosen: dict[AcknowledgedKey, bytes | bytearray | memoryview] = {}
        for key in order:
            found = self._kept.find(key)
            if found is not None and found.encoded is not None and len(found.encoded) <= room:
                room -= len(found.encoded)
                chosen[key] = found.encoded
        return await self._context.environment.executor.run(
            lambda: {key: digest_of(encoded) for key, encoded in chosen.items()}
        )

    def _has_two_others(self, owner: Contact) -> bool:
        """Whether two nodes beside an owner could be its backup."""
        others = (
            peer
            for peer in self._context.swarm.members()
            if peer.node_id != owner.node_id and peer.node_id in self._view.trust and self._context.swarm.may_own(peer)
        )
        return len(list(islice(others, 2))) == 2

    def _note_alone(self, owner: Contact, results: list[AuditResult]) -> None:
        """An owner that acknowledges has a backup, or sees nobody that could be one."""
        alone = [result for result in results if not result.partner]
        if not alone or not self._has_two_others(owner):
            self._alone.pop(owner.node_id, None)
            return
        now_s = self._clock.monotonic()
        since_s, asked = self._alone.get(owner.node_id, (now_s, 0))
        # What it acknowledged before may have gone to a backup that it has lost since.
        asked += any(self._acknowledged_s(result) > since_s for result in alone)
        self._alone[owner.node_id] = since_s, asked
        is_accused = self._context.audits.watchers(owner.node_id, now_s) >= ACCUSERS
        if asked >= ALONE and now_s - since_s >= (ACCUSED_S if is_accused else ALONE_S):
            source = owner.node_id.hex()[:8]
            self._log.warning("owner_audit_failed", source=source, reason="no_backup", shard=results[0].shard)
            self._context.counters.audits_failed += 1
            self._context.fail_audit(owner.node_id)
