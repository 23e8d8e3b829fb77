"""Confirmation: a backup that receives nothing asks its owner, and drops or offers its copy."""

from __future__ import annotations

import asyncio
from typing import Any

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import IDS, backup_of, contact, delta, owner_of, store_of, term, zeros
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of
from training.exchange.backup import CONFIRM_AFTER_S, BackupConfirmation
from training.exchange.ownership_messages import ConfirmBackup, TransferResult
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import OwnerInfo

OWNER, ME = contact("a"), contact("b")


def confirmation_of(store: ShardStore, me: Contact = ME) -> tuple[BackupConfirmation, ScriptedSwarm, Any]:
    swarm = ScriptedSwarm(me, [OWNER, contact("c")])
    context = context_of(swarm, store)
    return BackupConfirmation(context), swarm, context


def test_a_copy_that_has_not_changed_for_a_while_is_asked_about_once_an_interval() -> None:
    """A delta, or a new term, starts the interval again."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, _, _ = confirmation_of(store)
        assert confirmation.due() == {}

        await asyncio.sleep(CONFIRM_AFTER_S)
        store.accept_forward(0, term(1, "a"), delta(1), 0, IDS["a"])
        assert confirmation.due() == {}

        await asyncio.sleep(CONFIRM_AFTER_S)
        assert confirmation.due() == {IDS["a"]: (OWNER, [0])}
        assert confirmation.due() == {}

    run(scenario())


def test_an_owner_that_is_gone_or_has_restarted_is_not_asked() -> None:
    """Its backup takes over instead."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        confirmation.due()
        swarm.gone.append(IDS["a"])
        await asyncio.sleep(CONFIRM_AFTER_S)
        assert confirmation.due() == {}

        swarm.gone.clear()
        store.on_restart(IDS["a"], ME)
        assert confirmation.due() == {}

    run(scenario())


def test_a_copy_that_the_owner_backs_up_elsewhere_is_dropped() -> None:
    """The owner names itself under a newer term."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(4, "a"), OWNER)])

        await confirmation.ask({IDS["a"]: (OWNER, [0])})

        assert (store.backed, store.superseded) == ({}, {})

    run(scenario())


def test_a_copy_of_a_shard_that_its_owner_lost_is_kept_to_be_offered() -> None:
    """The shard has another owner, which may lack deltas of this copy."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(4, "c"), contact("c"))])

        await confirmation.ask({IDS["a"]: (OWNER, [0])})

        assert store.backed == {}
        assert store.superseded[0].term == term(1, "a")

    run(scenario())


def test_an_owner_that_does_not_answer_changes_nothing() -> None:
    """The failure detector decides about it."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda to, _: TransportError("timeout", to.address, "no answer")

        await confirmation.ask({IDS["a"]: (OWNER, [0])})

        assert store.backed[0].is_active

    run(scenario())


def test_an_owner_confirms_its_backup_and_its_learner_only() -> None:
    """To any other node it names itself, or the owner it knows."""

    async def scenario() -> None:
        store = owner_of("a")
        store.owned[0].backup = ME
        store.note_owner(1, term(2, "c"), contact("c"))
        _, swarm, _ = confirmation_of(store, OWNER)
        question = ConfirmBackup(GENESIS, [0, 1, 2])

        answer = await swarm.deliver("backing", ME, question, TransferResult)
        assert (answer.taken, [info.shard for info in answer.others]) == ([0], [1])
        answer = await swarm.deliver("backing", contact("d"), question, TransferResult)
        assert (answer.taken, [info.owner for info in answer.others]) == ([], [IDS["a"], IDS["c"]])
        assert store_of("d").redirect(0) is None

    run(scenario())


def test_a_catch_up_that_the_owner_has_given_up_is_dropped() -> None:
    """Its answer was lost: the owner has no learner, and the term of the catch-up. A later catch-up goes on."""

    async def scenario() -> None:
        for has_state in (False, True):
            store = store_of("b")
            assert store.begin_catch_up(0, term(4, "a"), OWNER, 5)
            if has_state:
                assert store.take_state(0, term(5, "a"), OWNER, zeros(store))
            confirmation, swarm, _ = confirmation_of(store)
            swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(4, "a"), OWNER)])
            await confirmation.ask({IDS["a"]: (OWNER, [0])})
            assert (store.backed, store.superseded) == ({}, {})

            assert store.begin_catch_up(0, term(4, "a"), OWNER, 6)

            def begun_anew(*_: object, store: ShardStore = store) -> TransferResult:
                assert store.begin_catch_up(0, term(4, "a"), OWNER, 7)
                return TransferResult([], [OwnerInfo.of(0, term(4, "a"), OWNER)])

            swarm.answers["backing"] = begun_anew
            await confirmation.ask({IDS["a"]: (OWNER, [0])})
            assert store.backed[0].attempt == 7

    run(scenario())


def test_a_backup_is_not_dropped_for_an_answer_from_before_its_promotion() -> None:
    """The owner relied on it by then: an active copy ends with a later term of the owner alone."""

    async def scenario() -> None:
        store = backup_of("b", "a")
        confirmation, swarm, _ = confirmation_of(store)
        swarm.answers["backing"] = lambda *_: TransferResult([], [OwnerInfo.of(0, term(1, "a"), OWNER)])
        await confirmation.ask({IDS["a"]: (OWNER, [0])})
        assert store.backed[0].is_active

    run(scenario())
