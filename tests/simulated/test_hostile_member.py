"""A member of the swarm that sends what it should not: refused with a reason and counted, and the others continue."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.lifecycle import checkpoints
from p2pnode.overlay.nat.reachability import DialBackAnswer
from p2pnode.overlay.peers import Activity, Contact
from p2pnode.overlay.transport import Buffer, TransportError
from p2pnode.training.dispatch.messages import WhoServes
from p2pnode.training.encoding.frames import Part, frames
from p2pnode.training.exchange.messages import LocateOwners, Push, PushAnswer, decode, encode
from p2pnode.training.exchange.ownership_messages import Fetch, LoggedDelta, OfferedDeltas, OfferedDeltasAnswer
from p2pnode.training.exchange.store import shard_store as store_module
from p2pnode.training.exchange.store.records import BufferedDelta
from p2pnode.training.findings.duplicate_data import FirstDeltas
from p2pnode.training.goal_announcement import GoalReached
from p2pnode.training.manifest import Manifest
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.sharing.messages import ShareData
from tests.harness.builders.stores import contact, owner_of, store_of, term
from tests.harness.builders.typed_values import KINDS, Typed
from tests.harness.environment.virtual_loop import START_S
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.simulated_swarm import play
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential

#: Every request that a node with a model serves.
EVERY_KIND: dict[str, Any] = {
    **{name: request for name, (request, _) in KINDS.items()},
    "dialback": DialBackAnswer,
    "dispatch_master": WhoServes,
    "first_deltas": FirstDeltas,
    "goal_reached": GoalReached,
    "manifest": Manifest,
    "share_data": ShareData,
}
SIZE = 64
SHARDS = 4
LIAR = "n2"
SEED = 51


def simulate(scenario: Callable[[Swarm], Awaitable[None]], **settings: Any) -> Swarm:
    async def story(swarm: Swarm) -> None:
        swarm.start_many(3)
        await swarm.until(
            lambda: len(swarm.running()) == 3 and min(swarm.steps()) >= 3,
            within_s=100,
            what="three steps of three nodes",
        )
        await scenario(swarm)

    chosen = {"exchange.shards": SHARDS, **{key.replace("__", "."): value for key, value in settings.items()}}
    return play(
        story,
        lambda: Swarm(
            seed=SEED,
            settings=chosen,
            make_trainer=lambda name: StubTrainer(name, SIZE, step_s=exponential(1.0), start_s=0.3),
        ),
    )


def step_of(host: Host) -> int:
    return host.living.progress.step


def victim_of(swarm: Swarm, shard: int = 0) -> Host:
    """The owner of the shard, if that is not the liar; the next shard otherwise."""
    for number in range(shard, SHARDS):
        for host in swarm.running():
            if host.name != LIAR and number in host.exchange.store.owned:
                return host
    raise AssertionError("the liar owns everything")


def contact_of(host: Host) -> Contact:
    return Contact(host.living.overlay.node_id, host.living.overlay.address)


def push_of(swarm: Swarm, shard: int, **changes: Any) -> Push:
    liar = swarm.hosts[LIAR].living
    step = liar.progress.step + 1000
    push = Push(liar.overlay.node_id, liar.incarnation, step, step, 1 / 3, [shard])
    return msgspec.structs.replace(push, **changes)


async def ask(
    swarm: Swarm, victim: Host, name: str, payload: bytes, body: list[Buffer], *, is_exchange: bool = True
) -> bytes:
    if is_exchange:
        payload = bytes.fromhex(victim.exchange.manifest.genesis) + payload
    request = swarm.hosts[LIAR].living.overlay.request(contact_of(victim), name, payload, body, timeout_s=5.0)
    async with request as answer:
        return answer.head


def body_of(shard: int, values: np.ndarray) -> list[Buffer]:
    return list(frames(shard, values.astype(np.float32), "float32", Part.DELTA))


def damaged(shard: int) -> Iterator[tuple[str, list[Buffer]]]:
    """Bodies that are no delta of 16 values, and the reason for which each is refused."""
    good = body_of(shard, np.ones(SIZE // SHARDS))
    yield "not_finite", body_of(shard, np.full(SIZE // SHARDS, np.nan))
    yield "not_finite", body_of(shard, np.full(SIZE // SHARDS, np.inf))
    yield "malformed", body_of(shard, np.ones(SIZE // SHARDS - 1))
    yield "malformed", body_of(shard, np.ones(SIZE // SHARDS + 1))
    yield "malformed", body_of((shard + 1) % SHARDS, np.ones(SIZE // SHARDS))
    header = bytearray(good[0])
    header[12] = 77  # an unknown codec
    yield "malformed", [bytes(header), good[1]]
    yield "malformed", [good[0]]


@pytest.mark.promise(7)
@played_by(simulate)
async def test_what_is_no_delta_is_refused_with_a_reason_and_changes_nothing(swarm: Swarm) -> None:
    """NaN, infinity, too few and too many values, another shard's, an unknown codec, half a frame."""
    victim = victim_of(swarm)
    exchange = victim.exchange
    shard = next(iter(exchange.store.owned))
    for reason, body in damaged(shard):
        before = exchange.counters.refused_here.get(reason, 0)
        push = push_of(swarm, shard)
        (result,) = decode(await ask(swarm, victim, "push", encode(push), body), PushAnswer).results

        assert (result.status, result.reason) == ("refused", reason)
        assert exchange.counters.refused_here[reason] == before + 1
        assert not exchange.store.owned[shard].state.knows(DeltaId(push.node, push.incarnation, push.step))


@played_by(simulate)
async def test_a_delta_in_another_s_name_or_of_long_ago_is_refused(swarm: Swarm) -> None:
    """Only its node pushes a delta; and none whose base is ten steps and more behind."""
    victim = victim_of(swarm)
    shard = next(iter(victim.exchange.store.owned))
    await swarm.until(lambda: min(map(step_of, swarm.running())) >= 30, within_s=200, what="30 steps")
    body = body_of(shard, np.ones(SIZE // SHARDS))
    for changes, reason in (
        ({"node": swarm.hosts["n0"].living.overlay.node_id}, "not_yours"),
        ({"base_step": 0}, "late"),
    ):
        payload = encode(push_of(swarm, shard, **changes))
        (result,) = decode(await ask(swarm, victim, "push", payload, body), PushAnswer).results
        assert (result.status, result.reason) == ("refused", reason)


@pytest.mark.parametrize(("kind", "most"), [("population", 2 / 3), ("samples", 8 / 3), ("sum", 1.0)])
@played_by(simulate, exchange__weight=Fixture("kind"), exchange__outer_lr=1.0, exchange__outer_momentum=0.0)
async def test_a_weight_is_believed_within_reason_only(swarm: Swarm, *, kind: str, most: float) -> None:
    """Whatever weight a delta claims, its owner gives it that of an honest one of three at most."""
    victim = victim_of(swarm)
    exchange = victim.exchange
    for host in swarm.running():
        host.living.pause()
    await asyncio.sleep(8.0)  # no other node's delta changes the shard, and paused nodes are not counted
    shard = next(iter(exchange.store.owned))
    own = 1.0 / max(1.0, exchange.view.worker_count())
    expected = {"population": 2 * own, "samples": 8 * own, "sum": 1.0}[kind]
    assert expected >= most
    state = exchange.store.owned[shard].state
    before = state.value.copy()
    payload = encode(push_of(swarm, shard, weight=1e6))
    answer = await ask(swarm, victim, "push", payload, body_of(shard, np.ones(SIZE // SHARDS)))

    assert decode(answer, PushAnswer).results[0].status == "ok"
    np.testing.assert_allclose(exchange.store.owned[shard].state.value - before, expected, rtol=1e-5)


@played_by(simulate)
async def test_reconciling_a_split_does_not_bypass_validation(swarm: Swarm) -> None:
    """What comes as a repair is looked at like a push: finite, and of no more weight than two estimates allow."""
    victim = victim_of(swarm)
    exchange = victim.exchange
    shard = next(iter(exchange.store.owned))
    liar = swarm.hosts[LIAR].living
    for number, values in enumerate((np.full(16, np.nan), np.full(16, 1.0))):
        logged = LoggedDelta(shard, liar.overlay.node_id, liar.incarnation - 1, 5000 + number, 1e6, 1.0)
        answer = await ask(swarm, victim, "repair", encode(OfferedDeltas([logged])), body_of(shard, values))
        assert decode(answer, OfferedDeltasAnswer).added == number

    assert exchange.counters.refused_here == {"not_finite": 1}
    assert np.isfinite(exchange.store.owned[shard].state.value).all()
    assert np.abs(exchange.store.owned[shard].state.value).max() < 100.0


@played_by(simulate)
async def test_lists_and_numbers_have_bounds(swarm: Swarm) -> None:
    """More entries than a swarm has shards, longer texts than an address, numbers beyond a frame's: not decoded."""
    victim = victim_of(swarm)
    where = [0, [1, b""], b"n" * 20, "x" * 46, 8468]
    for name, payload in (
        ("push", encode(push_of(swarm, 0, shards=[0] * 4097))),
        ("push", encode(push_of(swarm, 0, step=(1 << 64) - 1))),
        ("fetch", encode(Fetch([0] * 17))),
        ("where_is", encode(LocateOwners([0] * 4097, []))),
        ("where_is", msgspec.msgpack.encode([[], [where]])),
        ("where_is", msgspec.msgpack.encode([[], [[0, [1, b"n" * 21], *where[2:]]]])),
    ):
        with pytest.raises(TransportError, match="malformed") as caught:
            await ask(swarm, victim, name, payload, [])
        assert caught.value.kind == "rejected"


@played_by(simulate, barrier__method="bsp")
async def test_deltas_held_for_a_barrier_do_not_pile_up(swarm: Swarm) -> None:
    """Under bsp a member that pushes step upon step without any barrier is answered `too_many_pending`; memory is
    bounded."""
    victim = victim_of(swarm)
    exchange = victim.exchange
    shard = next(iter(exchange.store.owned))
    body = body_of(shard, np.ones(SIZE // SHARDS))
    statuses = []
    for number in range(40):
        payload = encode(push_of(swarm, shard, step=10_000 + number))
        (result,) = decode(await ask(swarm, victim, "push", payload, body), PushAnswer).results
        statuses.append((result.status, result.reason))

    assert statuses[:16] == [("ok", "")] * 16
    assert set(statuses[16:]) == {("retry", "too_many_pending")}


def test_live_deltas_for_a_state_that_never_comes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member makes another its learner, sends deltas and never the state: beyond a bound it gets `unknown`."""
    monkeypatch.setattr(store_module, "MAX_BUFFERED_BYTES", 1600)
    store = store_of("b")
    assert store.begin_catch_up(0, term(1, "a"), contact("a"), 1)
    statuses = []
    for step in range(300):
        item = BufferedDelta(DeltaId(b"x" * 20, 1, step), 1.0, np.ones(4, np.float32), b"")
        statuses.append(store.accept_forward(0, term(1, "a"), item, 0, contact("a").node_id)[0])

    assert statuses[:100] == ["ok"] * 100
    assert set(statuses[110:]) == {"unknown"}
    assert sum(item.size_bytes for item in store.backed[0].buffered) < 1700


def test_incarnations_made_up_do_not_grow_a_shard_for_ever() -> None:
    """The set of applied identities keeps the starts that were added to last, and so the nodes that train."""
    applied = Applied()
    for incarnation in range(2 * Applied.MAX_STARTS):
        applied.add(DeltaId(b"h" * 20, 1, 7 + incarnation // 1000))
        applied.add(DeltaId(b"l" * 20, incarnation, 1))

    assert len(applied.rows()) == Applied.MAX_STARTS
    assert DeltaId(b"h" * 20, 1, 7) in applied
    assert DeltaId(b"l" * 20, 2 * Applied.MAX_STARTS - 1, 1) in applied
    assert owner_of("a").owned[0].state.applied.rows() == []


@pytest.mark.promise(7)
@played_by(simulate)
async def test_the_largest_numbers_leave_every_value_finite_and_training_goes_on(swarm: Swarm) -> None:
    """As a delta and as a repair, once and again: they are refused with a reason, nothing of them stays in a value, and
    the honest deltas that follow are added."""
    victim = victim_of(swarm)
    exchange = victim.exchange
    shard = next(iter(exchange.store.owned))
    liar = swarm.hosts[LIAR].living
    largest = np.full(SIZE // SHARDS, 3e38)
    for number, values in enumerate((largest, -largest, largest * np.resize([1, -1], largest.size))):
        push = push_of(swarm, shard, step=liar.progress.step + 1000 + number, weight=1.0)
        answer = decode(await ask(swarm, victim, "push", encode(push), body_of(shard, values)), PushAnswer)
        assert [(one.status, one.reason) for one in answer.results] == [("refused", "out_of_range")]
        logged = LoggedDelta(shard, liar.overlay.node_id, liar.incarnation - 1, 5000 + number, 1.0, 1.0)
        mended = OfferedDeltas([logged])
        answer = await ask(swarm, victim, "repair", encode(mended), body_of(shard, values))
        assert decode(answer, OfferedDeltasAnswer).added == 0
    before = min(map(step_of, swarm.running()))
    await swarm.until(lambda: min(map(step_of, swarm.running())) >= before + 3, within_s=60, what="three steps more")
    assert np.abs(swarm.model()).max() < 100.0
    assert set(exchange.counters.refused_here) == {"out_of_range"}


@pytest.mark.parametrize("method", ["bsp", *more("pbsp")])
@played_by(simulate, barrier__method=Fixture("method"))
async def test_a_member_that_never_moves_is_not_waited_for(swarm: Swarm, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """It announces that it trains and that a step takes it thirty years, and stays at its step. The others wait once,
    for ten seconds, and go on."""
    host = swarm.hosts[LIAR]
    host.living.overlay.announce(activity=Activity.TRAINING, step_seconds=1e9)
    monkeypatch.setattr(host.living.overlay.local, "announce", lambda **_: None)
    host.trainer.hang()
    honest = [one for one in swarm.running() if one.name != LIAR]
    began, before = swarm.clock.monotonic(), min(map(step_of, honest))
    await swarm.until(lambda: min(map(step_of, honest)) >= before + 12, within_s=90, what="twelve steps")
    assert swarm.clock.monotonic() - began <= 45.0
    assert host.living.overlay.heartbeat.step <= before + 1


@pytest.mark.parametrize(
    ("honest", "claimed"),
    [
        (1, 10**9),
        (2, 1 << 60),
    ],
)
@played_by(simulate, training__max_steps=100_000, barrier__method="pbsp")
async def test_a_step_that_no_time_explains_takes_nobody_along(
    swarm: Swarm, *, honest: int, claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One member announces a step of a billion, or more than a message takes. The others, also a single one, stay where
    they are, and train on; none ends its run by it."""
    if honest == 1:
        await swarm.kill("n1")
    others = [host for host in swarm.running() if host.name != LIAR]
    local = swarm.hosts[LIAR].living.overlay.local
    announce = local.announce
    monkeypatch.setattr(local, "announce", lambda **fields: announce(**(fields | {"step": claimed})))
    local.announce(activity=Activity.TRAINING)
    before = max(map(step_of, others))
    await swarm.until(lambda: min(map(step_of, others)) >= before + 10, within_s=90, what="ten steps")
    assert max(map(step_of, others)) < before + 1000
    assert len(others) == honest


@played_by(simulate, training__checkpoint_s=3.0)
async def test_a_swarm_whose_values_were_broken_goes_on_from_its_last_good_checkpoint(
    swarm: Swarm, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest checkpoints of all nodes have broken values, of a version that took them: they are passed over."""
    monkeypatch.setattr(checkpoints, "has_length", lambda _values, _limit: True)
    await swarm.until(lambda: min(map(step_of, swarm.running())) >= 12, within_s=100, what="a few checkpoints")
    # One that is being written would have the values of before.
    await swarm.until(lambda: _no_checkpoint_is_due(swarm, 3.0), within_s=20, what="a moment between checkpoints")
    for host in swarm.running():
        store, replica = host.exchange.store, host.exchange.replica
        states = [*(one.state for one in store.owned.values()), *(one.state for one in store.backed.values())]
        for state in states:
            if state is not None:
                state.value[:] = np.nan
        replica.vector[:] = np.nan
    broken = len(swarm.records)
    await swarm.until(lambda: len(_written_since(swarm, broken)) == 3, within_s=20, what="a checkpoint of each")
    for name in list(swarm.hosts):
        await swarm.kill(name)
    swarm.start_many(3, training__checkpoint_s=3.0)
    await swarm.until(lambda: all(host.trainer.trained for host in swarm.running()), within_s=90, what="they train")
    await asyncio.sleep(5.0)

    assert np.isfinite(swarm.model()).all()
    assert {one.fields["reason"] for one in swarm.of("checkpoint_passed_over")} == {"its values are out of range"}


def _no_checkpoint_is_due(swarm: Swarm, period_s: float) -> bool:
    now = swarm.clock.monotonic() - START_S
    ages_s = {one.node: now - one.t for one in swarm.of("checkpoint_written")}
    return all(0.1 < age_s < period_s - 0.3 for age_s in ages_s.values())


def _written_since(swarm: Swarm, record: int) -> set[str]:
    return {one.node for one in swarm.records[record:] if one.event == "checkpoint_written"}


@played_by(simulate, training__checkpoint_s=3.0)
async def test_requests_of_every_kind_with_any_values_leave_nothing_behind(swarm: Swarm) -> None:
    """All requests that a node serves, with random and extreme values in every field. The liar leaves; the others train
    on, and after they were killed and started again too."""
    chance = random.Random(f"{SEED}/typed")
    victim = victim_of(swarm)
    genesis = bytes.fromhex(victim.exchange.manifest.genesis)
    ids = [host.living.overlay.node_id for host in swarm.running()]
    typed = Typed(chance, [*ids, genesis])
    served = victim.living.overlay._requests._handlers
    assert set(served) <= set(EVERY_KIND)
    refused = 0
    for name in sorted(served):
        for _ in range(12):
            message = typed.value(EVERY_KIND[name])
            if hasattr(message, "genesis") and isinstance(message.genesis, bytes):
                message = msgspec.structs.replace(message, genesis=genesis)
            try:
                payload = msgspec.msgpack.encode(message)
                await ask(swarm, victim, name, payload, [], is_exchange=name in KINDS)
            except TransportError as error:
                refused += error.kind == "rejected"
    assert 0 < refused < 12 * len(served)
    await swarm.kill(LIAR)
    await _train_on(swarm, "without the liar")
    for name in ("n0", "n1"):
        await swarm.kill(name)
    for name in ("n0", "n1"):
        swarm.start(name, bootstrap=None if name == "n0" else "n0", training__checkpoint_s=3.0)
    await _train_on(swarm, "after a restart")
    assert not [one for one in swarm.records if one.level == "error"]


async def _train_on(swarm: Swarm, when: str) -> None:
    await swarm.until(
        lambda: len(swarm.running()) == 2 and all(host.node and host.node.exchange for host in swarm.running()),
        within_s=60,
        what=f"both run {when}",
    )
    steps = {host.name: step_of(host) for host in swarm.running()}
    assert max(steps.values()) < 1000, steps
    await swarm.until(
        lambda: all(step_of(host) >= steps[host.name] + 6 for host in swarm.running()),
        within_s=90,
        what=f"steps {when}",
    )
    assert np.abs(swarm.model()).max() < 1e4
