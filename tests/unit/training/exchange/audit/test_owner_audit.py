"""A node audits the owners that have acknowledged its deltas: by its own copies, and by questions to their backups."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, backup_of, contact, delta, store_of, term
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of, records_of
from training.exchange.audit import owner_audit
from training.exchange.audit.answers import digest_of
from training.exchange.audit.owner_audit import ACCUSED_S, ALONE, ALONE_S, REPEAT_S, OwnerAudit
from training.exchange.audit_messages import Audit, AuditAnswer, AuditResult, Known
from training.exchange.audit_records.acknowledged import Acknowledged, AcknowledgedKey
from training.exchange.audit_records.outcomes import OWN
from training.exchange.audit_records.published_values import CopyVerdict
from training.exchange.messages import Push, decode
from training.exchange.ownership_messages import ConfirmBackup, TransferResult
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import OwnerInfo
from training.shards.applied import DeltaId

ME, OWNER, BACKUP = contact("b"), contact("a"), contact("c")


class SentAgain:
    """In place of `Resending`: everything is acknowledged."""

    def __init__(self) -> None:
        self.keys: list[AcknowledgedKey] = []

    async def send_again(self, _owner: Contact, keys: list[AcknowledgedKey]) -> int:
        self.keys += keys
        return len(keys)


@pytest.fixture(autouse=True)
def every_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_audit, "ONE_IN", 1)


class Audited:
    """One node with its audit, and what an owner "a" and a backup "c" answer."""

    def __init__(self, store: ShardStore | None = None) -> None:
        self.store = store or store_of("b")
        self.swarm = ScriptedSwarm(ME, [OWNER, BACKUP, contact("d")])
        self.context: Any = context_of(self.swarm, self.store)
        self.store.note_owner(0, term(1, "a"), OWNER)
        self.sent = SentAgain()
        self.audit = OwnerAudit(self.context, self.sent)  # type: ignore[arg-type]
        self.owner: Known = "has"
        self.backup: Known = "has"
        self.partner, self.relies = IDS["c"], True
        self.swarm.answers["audit"] = self._answer
        self.swarm.answers["backing"] = self._backing

    def _answer(self, to: Contact, payload: bytes) -> AuditAnswer:
        question = decode(payload, Audit)
        is_owner = to.node_id == IDS["a"]
        known, partner = (self.owner, self.partner) if is_owner else (self.backup, IDS["a"])
        return AuditAnswer(
            [AuditResult(one.shard, one.step, known, is_owner, *term(1, "a"), partner) for one in question.deltas]
        )

    def _backing(self, _to: Contact, payload: bytes) -> TransferResult:
        shards = decode(payload, ConfirmBackup).shards
        return TransferResult(shards if self.relies else [], [])

    def acknowledged(self, step: int, encoded: bytes = b"1234", owner: str = "a") -> AcknowledgedKey:
        push = Push(GENESIS, IDS["b"], 1, step, step, 1.0, [])
        backed = self.store.backed.get(0)
        key = AcknowledgedKey(0, DeltaId(IDS["b"], 1, step))
        is_doubtful = backed is not None and backed.state is not None and not backed.state.knows(key.identity)
        doubt = backed.token if backed is not None and is_doubtful else None
        now_s = self.context.environment.clock.monotonic()
        self.context.acknowledged.note(0, Acknowledged(push, IDS[owner], now_s, "float32", 1, encoded, doubt))
        return key

    async def work(self) -> None:
        await asyncio.sleep(owner_audit.EVERY_S)
        if (work := self.audit.due()) is not None:
            await self.audit.audit(work)

    def asked(self) -> list[tuple[str, bool]]:
        """Whom it has asked, and whether again."""
        names = {identity: name for name, identity in IDS.items()}
        sent = [(to, decode(payload, Audit)) for name, to, payload in self.swarm.requests if name == "audit"]
        return [(names[to.node_id], question.is_repeated) for to, question in sent]

    def failed(self) -> list[str]:
        return [one.fields["reason"] for one in records_of(self.context) if one.event == "owner_audit_failed"]


def test_an_owner_that_forwards_is_asked_and_not_blamed() -> None:
    """Its backup is asked with the digest of what was pushed."""

    async def scenario() -> None:
        one = Audited()
        one.acknowledged(1)
        await one.work()
        await asyncio.sleep(2 * REPEAT_S)
        await one.work()
        assert (one.asked(), one.failed()) == ([("a", False), ("c", False)], [])
        to_backup = one.swarm.sent("audit", Audit)[1]
        assert (to_backup.owner, to_backup.deltas[0].digest) == (IDS["a"], digest_of(b"1234"))
        assert to_backup.deltas[0].term == term(1, "a")

    run(scenario())


def test_of_an_owner_with_a_backup_nobody_asks_who_else_could_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of members none is looked at, and of an owner without a backup no more than need be: two others."""
    looked: list[bytes] = []

    def may_own(swarm: ScriptedSwarm, peer: Any) -> bool:
        looked.append(peer.node_id)
        return True

    monkeypatch.setattr(ScriptedSwarm, "may_own", may_own)

    async def scenario() -> None:
        one = Audited()
        for number in range(100, 130):
            one.swarm.peers[bytes([number]) * 20] = one.swarm.peers[IDS["d"]]
        one.acknowledged(1)
        await one.work()
        assert looked == []
        one.partner = b""
        one.acknowledged(2)
        await one.work()
        assert len(looked) == 2

    run(scenario())


@pytest.mark.parametrize("known", ["lacks", "differs", "other"])
def test_what_a_backup_lacks_is_asked_again_before_it_counts(known: Known) -> None:
    """Then the backup hears of it. By one pair nobody is left out; nor by the same pair again and again."""

    async def scenario() -> None:
        one = Audited()
        one.backup = known
        one.acknowledged(1)
        await one.work()
        assert one.failed() == []
        await asyncio.sleep(REPEAT_S)
        await one.work()
        assert one.asked() == [("a", False), ("c", False), ("a", False), ("c", True)]
        assert one.failed() == ["pair"]
        for step in range(2, 8):
            one.acknowledged(step)
            await one.work()
            await asyncio.sleep(REPEAT_S)
        assert len(one.failed()) > 3
        assert not one.context.view.is_gone(IDS["a"])
        assert not one.context.view.is_gone(IDS["c"])

    run(scenario())


def test_a_backup_that_has_changed_meanwhile_counts_for_nothing() -> None:
    """The owner names another one the second time, or the backup has caught up, or cannot tell."""

    async def scenario() -> None:
        for partner, second in [(IDS["d"], "lacks"), (IDS["c"], "has"), (IDS["c"], "forgotten"), (b"", "lacks")]:
            one = Audited()
            one.backup = "lacks"
            one.acknowledged(1)
            await one.work()
            one.partner, one.backup = partner, second
            await asyncio.sleep(REPEAT_S)
            await one.work()
            assert one.failed() == []
            assert ("c", True) not in one.asked()[:3] or second != "lacks"

    run(scenario())


def test_a_backup_that_contradicts_two_owners_is_left_out() -> None:
    """An owner that two backups contradict is not, by this node: its backups hear of it."""

    async def scenario() -> None:
        one = Audited()
        for owner in "ad":
            assert one.context.audits.pair(IDS[owner], IDS["c"], 1000.0) == (None if owner == "a" else IDS["c"])
        one.backup = "lacks"
        one.acknowledged(1)
        await one.work()
        await asyncio.sleep(REPEAT_S)
        await one.work()
        assert one.context.view.is_gone(IDS["c"])
        assert not one.context.view.is_gone(IDS["a"])

    run(scenario())


def test_an_owner_that_lacks_what_it_acknowledged_is_sent_it_and_asked_again() -> None:
    """If it lacks it still its backup hears of it. One that has it then is not blamed."""

    async def scenario() -> None:
        for second, asked in [("lacks", True), ("has", False)]:
            one = Audited()
            one.owner = one.backup = "lacks"
            key = one.acknowledged(1)
            await one.work()
            assert (one.sent.keys, one.asked()) == ([key], [("a", False)])
            one.owner = one.backup = second  # type: ignore[assignment]
            await asyncio.sleep(REPEAT_S)
            await one.work()
            assert one.asked()[1:] == [("a", False), ("c", asked)]
            assert one.failed() == (["pair"] if asked else [])

    run(scenario())


def test_no_answer_says_nothing() -> None:
    async def scenario() -> None:
        for silent in "ac":
            one = Audited()
            honest = one.swarm.answers["audit"]

            def answer(to: Contact, payload: bytes, silent: str = silent, honest: Any = honest) -> Any:
                return TransportError("timeout", to.address, "x") if to == contact(silent) else honest(to, payload)

            one.swarm.answers["audit"] = answer
            one.backup = "lacks"
            for step in range(5):
                one.acknowledged(step)
                await one.work()
                await asyncio.sleep(REPEAT_S)
            assert one.failed() == []

    run(scenario())


def test_a_copy_that_misses_what_its_owner_acknowledged_is_the_nodes_own_evidence() -> None:
    """The owner is asked whether it relies on the copy; three times are enough."""

    async def scenario() -> None:
        one = Audited(backup_of("b", "a"))
        for step in range(1, OWN + 1):
            assert not one.context.view.is_gone(IDS["a"])
            one.acknowledged(step)
            await one.work()
        assert one.failed() == ["not_forwarded"] * OWN
        assert one.context.view.is_gone(IDS["a"])
        assert one.asked() == [], "the owner's backup is this node itself"

    run(scenario())


def test_a_copy_that_its_owner_does_not_rely_on_is_no_evidence() -> None:
    """It has another backup, or none, and this node has not heard of it. Nor is a copy that has the delta by now, nor
    one that came after it."""

    async def scenario() -> None:
        other = Audited(backup_of("b", "a"))
        other.relies = False
        late = Audited(backup_of("b", "a"))
        again = Audited(backup_of("b", "a"))
        for step in range(1, 6):
            for one in (other, late, again):
                one.acknowledged(step)
            late.store.accept_forward(0, term(1, "a"), delta(step, node="b"), 0, IDS["a"])
            again.store.backed[0] = backup_of("b", "a").backed[0]
            for one in (other, late, again):
                await one.work()
        assert [one.failed() for one in (other, late, again)] == [[], [], []]

    run(scenario())


def test_a_published_value_that_does_not_fit_is_confirmed_in_the_same_way() -> None:
    async def scenario() -> None:
        for relies, found in [(True, ["value_stale"]), (False, [])]:
            one = Audited(backup_of("b", "a"))
            one.relies = relies
            one.context.published_values.doubt(0, one.store.backed[0].token, CopyVerdict.STALE)
            await one.work()
            assert one.failed() == found
        gone = Audited(backup_of("b", "a"))
        gone.context.published_values.doubt(0, gone.store.backed[0].token, CopyVerdict.DIFFERS)
        gone.store.backed[0] = backup_of("b", "a").backed[0]
        await gone.work()
        assert gone.failed() == []

    run(scenario())


def test_an_owner_that_acknowledges_for_long_without_a_backup_is_left_out() -> None:
    """While two others could be one. It is asked at each push then, until it has one."""

    async def scenario() -> None:
        one = Audited()
        one.partner = b""
        step, began_s = 0, one.context.environment.clock.monotonic()
        while not one.context.view.is_gone(IDS["a"]):
            step += 1
            one.acknowledged(step)
            await one.work()
            await asyncio.sleep(1.0)
            assert step < 100
        took_s = one.context.environment.clock.monotonic() - began_s
        assert ALONE_S <= took_s < ALONE_S + 5.0
        assert step >= ALONE
        assert one.failed() == ["no_backup"]

        few, found = Audited(), Audited()
        few.swarm.gone.append(IDS["d"])
        for number in range(100):
            for other in (few, found):
                other.partner = IDS["c"] if other is found and number % 5 == 0 else b""
                other.acknowledged(number)
                await other.work()
        assert (few.failed(), found.failed()) == ([], [])

    run(scenario())


def test_where_two_members_have_left_an_owner_out_less_time_is_enough() -> None:
    """Otherwise the nodes that have would wait for the others' shards meanwhile."""

    async def scenario() -> None:
        for members, seconds in [("d", ALONE_S), ("dc", ACCUSED_S)]:
            one = Audited()
            one.partner = b""
            began_s = one.context.environment.clock.monotonic()
            for member in members:
                one.context.audits.watch(IDS["a"], IDS[member], began_s)
            step = 0
            while not one.context.view.is_gone(IDS["a"]):
                step += 1
                one.acknowledged(step)
                await one.work()
                assert step < 100
            assert seconds <= one.context.environment.clock.monotonic() - began_s < seconds + 2.0

    run(scenario())


def test_what_was_acknowledged_before_a_backup_was_lost_says_nothing() -> None:
    """However often it is asked about, and whoever has left the owner out."""

    async def scenario() -> None:
        one = Audited()
        one.partner = b""
        for member in "dc":
            one.context.audits.watch(IDS["a"], IDS[member], one.context.environment.clock.monotonic())
        for step in range(40):
            one.acknowledged(step)
        found = dict(one.context.acknowledged)
        for key, delta_of_key in found.items():
            one.context.acknowledged.note(0, delta_of_key)
            await one.work()
            assert key.shard == 0
        assert one.failed() == []

    run(scenario())


def test_what_another_owner_lacks_is_no_repetition() -> None:
    """The shard has moved between the two questions."""

    async def scenario() -> None:
        one = Audited()
        one.owner = one.backup = "lacks"
        key = one.acknowledged(1)
        await one.work()
        one.store.note_owner(0, term(2, "d"), contact("d"))
        one.context.acknowledged.moved(key, IDS["d"])
        await asyncio.sleep(REPEAT_S)
        await one.work()
        assert one.asked() == [("a", False)]
        assert one.failed() == []

    run(scenario())


def test_one_push_in_so_many_is_audited_and_those_to_a_watched_owner_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_audit, "ONE_IN", 16)

    async def scenario() -> None:
        one = Audited()
        for step in range(400):
            one.acknowledged(step)
            await one.work()
        asked = sum(name == "a" for name, _ in one.asked())
        print(asked)
        assert 10 <= asked <= 45
        one.context.audits.watch(IDS["a"], IDS["d"], one.context.environment.clock.monotonic())
        for step in range(400, 440):
            one.acknowledged(step)
            await one.work()
        assert sum(name == "a" for name, _ in one.asked()) == asked + 40

    run(scenario())


def test_without_backups_nothing_is_asked() -> None:
    """Nor about deltas that another owner has acknowledged than the present one."""

    async def scenario() -> None:
        one = Audited()
        one.acknowledged(1, owner="d")
        await one.work()
        assert one.asked() == []
        one.store.note_owners([OwnerInfo.of(0, term(2, "d"), contact("d"))])

    run(scenario())
