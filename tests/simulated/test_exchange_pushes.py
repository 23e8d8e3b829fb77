"""Deltas on their way to the owners: what is sent, to whom, how often, and what comes back to the trainer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.transport import TransportError
from p2pnode.training import kernels
from p2pnode.training.cooperative import VALUES_PER_TURN
from p2pnode.training.encoding.codecs import CodecName
from p2pnode.training.encoding.frames import Part, frames
from p2pnode.training.encoding.table import CODECS
from p2pnode.training.exchange.client.push import PUSH_DEADLINE_S
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.messages import Forward, ForwardAnswer, Forwarded, Push, PushAnswer, decode
from p2pnode.training.exchange.ownership_messages import ShardList, TransferResult
from p2pnode.training.exchange.run_state import LASTING_S
from tests.harness.builders.codec_kinds import KINDS
from tests.harness.environment.simulated import InlineExecutor
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.exchange_story import BOUND_S, ONES, VALUES, ask, simulate, striking
from tests.harness.swarms.exchange_swarm import GENESIS, World


def pushes_seen(world: World) -> list[Push]:
    """The pushes that are sent from now on."""
    seen: list[Push] = []

    def observe(_sender: str, _receiver: str, name: str, payload: bytes) -> None:
        if name == "push":
            seen.append(decode(payload.removeprefix(GENESIS), Push))

    world.observers.append(observe)
    return seen


@pytest.mark.parametrize("nodes", [1, 4])
@played_by(simulate, nodes=Fixture("nodes"), shards=4, owners=3)
async def test_a_push_is_one_request_to_each_owner(world: World) -> None:
    """Of a node alone it is none: what it owns is added at once, and exactly, and its next pull has it."""
    member, seen = world.running()[-1], pushes_seen(world)
    delta = np.random.default_rng(1).standard_normal(VALUES).astype(np.float32)
    report = await member.exchange.push(1, 0, 1.0, delta.copy())

    assert (report.acknowledged, report.refused, report.outstanding) == (4, {}, 0)
    assert world.model().tolist() == delta.tolist()
    others = {world.owner(shard).name for shard in range(4)} - {member.name}
    assert len(seen) == len(others)
    assert bool(report.bytes_sent) is bool(others)
    for one in world.running():
        exchange, shards = one.exchange, one.exchange.store.owned
        assert (exchange.counters.merged, len(exchange.take_merged())) == (len(shards), bool(shards))
    assert (await member.exchange.pull(1)).missing == []
    assert member.exchange.replica.vector.tolist() == delta.tolist()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_encoding_pauses_for_the_event_loop(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy takes many times as long as compiled kernels: it pauses after fewer values."""
    if not is_compiled:
        monkeypatch.setattr(kernels, "COMPILED", None)
    elif kernels.COMPILED is None:
        pytest.skip("no kernels here")
    pauses: list[None] = []
    monkeypatch.setattr(InlineExecutor, "pause", lambda _executor: pauses.append(None))

    async def scenario(world: World) -> None:
        pauses.clear()
        await world.bystander().push(1)
        assert len(pauses) == (1 if is_compiled else 4)

    simulate(scenario, nodes=3, shards=8, values=4 * VALUES_PER_TURN, codec="int8")


@pytest.mark.parametrize("codec", KINDS)
@played_by(simulate, nodes=3, values=64, codec=Fixture("codec"))
async def test_what_the_owners_decode_is_all_that_a_push_takes_from_the_trainer(
    world: World, *, codec: CodecName
) -> None:
    """The rest stays with it, for its next delta. The last delta of a run leaves less of it."""
    member, rests = world.bystander(), []
    world.training = False
    for step, is_last in ((1, False), (2, True)):
        trained = np.random.default_rng(1).normal(size=64).astype(np.float32)
        delta, before, told = trained.copy(), world.model().copy(), list[np.ndarray]()
        await member.exchange.push(
            step, step - 1, 1.0, delta, on_encoded=lambda d=delta, t=told: t.append(d.copy()), is_last=is_last
        )
        np.testing.assert_allclose(world.model() - before, delta, rtol=1e-5, atol=1e-6)
        assert [one.tolist() for one in told] == [delta.tolist()]
        rests.append(float(np.abs(trained - delta).sum()))
        left_out = np.linalg.norm(trained - delta) / np.linalg.norm(trained)
        expected = pytest.approx(left_out / (1.0 - left_out), rel=1e-3) if CODECS[codec].is_partial else None
        assert member.exchange.push_client.held_back == expected
    assert (rests[0] == 0.0) is (codec == "float32")
    assert rests[1] <= rests[0]


@played_by(simulate, nodes=4)
async def test_an_owner_that_answers_nothing_keeps_one_delta_and_the_others_go_back_to_the_trainer(
    world: World,
) -> None:
    """Each push waits for its deadline. The first delta was sent, so it stays, and is added once, however often it was
    sent; of the later ones no byte was sent, and they are given back."""
    to, member, returned = world.owner(), world.bystander(), []
    with striking(world.unanswered, "push", sender=member, to=to):
        for step in range(1, 5):
            began_s = world.clock.monotonic()
            report = await member.exchange.push(step, step - 1, 1.0, step * ONES)
            assert world.clock.monotonic() - began_s == pytest.approx(PUSH_DEADLINE_S, abs=0.3)
            returned.append(report.returned)
    mine = tuple(shard for shard in range(2) if world.owner(shard) is to)
    assert returned == [(), mine, mine, mine]
    assert member.exchange.outbox.steps == [1]
    assert member.exchange.outbox.shards == set(mine)
    assert await member.exchange.flush(BOUND_S) == 0
    assert [world.value()[shard] for shard in mine] == [1.0] * len(mine)
    assert len(world.of("push_unfinished")) == 4


@played_by(simulate, nodes=4)
async def test_a_fault_of_this_node_drops_no_delta(world: World, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged, and the delivery goes on: the owner may have added some of it."""
    by_owner, faults = OwnerDirectory.by_owner, [KeyError("a fault"), KeyError("another")]

    def failing(*arguments: Any) -> Any:
        if faults:
            raise faults.pop()
        return by_owner(*arguments)

    monkeypatch.setattr(OwnerDirectory, "by_owner", failing)
    await world.bystander().push(1)
    assert world.value() == [1.0, 1.0]
    assert len(world.of("exchange_service_failed")) == 2


@played_by(simulate, nodes=4, synchronous=True)
async def test_under_bsp_a_step_waits_for_its_owners(world: World) -> None:
    """Nothing is trained apart: a step is announced when all have it."""
    member = world.bystander()
    with striking(world.rejected, "push", sender=member), pytest.raises(TimeoutError):
        async with asyncio.timeout(20.0):
            await member.exchange.push(1, 0, 1.0, ONES.copy())
    assert not member.exchange.is_apart
    assert await member.exchange.flush(BOUND_S) == 0
    world.owner().exchange.store.fold(0, 1)
    assert world.value()[0] == 1.0


@pytest.mark.parametrize("kind", ["sum", "population"])
def test_what_a_node_trains_out_of_reach_of_all_owners_is_added_when_it_is_back(kind: str) -> None:
    """No push of it waits, and none is sent. What goes out then says that it was trained apart, and has the weight of
    the workers of before; what was begun to be sent before keeps its identity."""

    async def scenario(world: World) -> None:
        member, seen = world.members["client"], pushes_seen(world)
        exchange = member.exchange
        world.training = False
        with striking(world.unanswered, "push", sender=member):
            await exchange.push(1, 0, 1.0, 8 * ONES)
        world.part({"client": 1})
        await world.until(exchange.directory.is_apart, within_s=BOUND_S, what="no owner is in reach")
        exchange.view.invalidate()
        began_s = world.clock.monotonic()
        for step in range(2, 5):
            exchange.begin_at(step)
            report = await exchange.push(step, step - 1, 1.0, step * ONES)
            assert report.returned == (0, 1)
        bad = await exchange.push(5, 4, 1.0, np.nan * ONES)
        assert bad.refused == {"not_finite": 2}
        assert world.clock.monotonic() == began_s
        assert exchange.is_apart

        world.heal()
        assert await exchange.flush(30.0) == 0
        before = world.value()
        report = await exchange.push(6, 5, 1.0, 100 * ONES)
        assert (report.outstanding, report.refused) == (0, {})
        assert not exchange.is_apart
        assert [now - then for now, then in zip(world.value(), before, strict=True)] == [100.0, 100.0]
        assert {(one.step, one.apart) for one in seen} >= {(1, False), (1, True), (6, True)}
        assert [one.event for one in world.records if "in_reach" in one.event or "out_of_reach" in one.event] == [
            "owners_out_of_reach",
            "owners_in_reach",
        ]
        await exchange.push(7, 6, 1.0, ONES.copy())
        assert not seen[-1].apart

    async def with_client(world: World) -> None:
        client = await world.start("client")
        client.overlay.eligible = False
        world.spread(client)
        await client.exchange.join(world.members["n0"].contact)
        await asyncio.sleep(3.0)
        await scenario(world)

    simulate(with_client, nodes=3, weight=kind)


def test_large_shards_are_worked_on_beside_the_loop_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Founding, encoding, decoding, measuring and copying run in threads, which pause. A delta that is not finite is
    refused."""
    for name, most in (("PASS", 3), ("TURN", 1), ("PART", 4)):
        monkeypatch.setattr(f"p2pnode.training.cooperative.VALUES_PER_{name}", most)
    monkeypatch.setattr("p2pnode.training.exchange.client.outbox.VALUES_PER_PART", 4)
    names, run_in_thread = dict[str, None](), InlineExecutor.run

    async def noted(self: InlineExecutor, function: Any, /, *arguments: Any, **options: Any) -> Any:
        names[getattr(function, "__name__", "")] = None
        await asyncio.sleep(0.01)
        return await run_in_thread(self, function, *arguments, **options)

    monkeypatch.setattr(InlineExecutor, "run", noted)
    pauses: list[None] = []
    monkeypatch.setattr(InlineExecutor, "pause", lambda _self: pauses.append(None))

    async def scenario(world: World) -> None:
        assert "fresh_state" in names
        names.clear()
        pauses.clear()
        member = world.bystander()
        await member.push(1)
        assert len(pauses) == 2  # after each shard: the loop may share the thread's core
        await world.owner().push(1, 10.0)
        report = await member.exchange.push(2, 1, 1.0, np.array([np.nan, *[1.0] * 7], np.float32))
        assert report.refused == {"not_finite": 1}
        assert {"_encode", "received", "item", "_decoded_in_range"} <= names.keys()
        assert world.model().tolist() == [11.0] * 4 + [12.0] * 4
        await world.until(world.paired, within_s=BOUND_S, what="backups with the same bits")

    simulate(scenario, nodes=4, codec="bfloat16")


def test_a_delta_that_is_sent_again_is_added_everywhere_with_the_weight_of_its_first_attempt() -> None:
    """Its backup has added it, and the answer was lost. Meanwhile there are more workers."""

    async def scenario(world: World) -> None:
        member = world.bystander()
        count_workers(world, 2.0)
        with striking(world.unanswered, "forward", to=world.backup()):
            await member.exchange.push(1, 0, 0.5, ONES.copy())
        count_workers(world, 8.0)
        assert await member.exchange.flush(BOUND_S) == 0
        assert world.paired()
        assert world.value() == [0.5]

    def count_workers(world: World, count: float) -> None:
        for member in world.running():
            member.overlay.workers = lambda: count
            member.exchange.view.invalidate()

    simulate(scenario, nodes=4, shards=1, weight="population")


@played_by(simulate, nodes=4, shards=4, owners=2)
async def test_a_push_that_is_not_its_senders_or_does_not_fit_is_refused_with_the_reason(world: World) -> None:
    """What came before a broken frame is added. A shard of another owner is redirected to it."""
    to, member = world.owner(), world.bystander()
    mine = [shard for shard in range(4) if world.owner(shard) is to]
    assert len(mine) > 1
    node = member.contact.node_id

    async def answered(message: Push, *shards: int, torn: int = 0) -> list[tuple[str, str]]:
        body = [bytes(one) for shard in shards for one in frames(shard, np.ones(2, np.float32), "float32", Part.DELTA)]
        if torn:
            body[-1] = body[-1][:-torn]
        found = await ask(member, to, "push", message, PushAnswer, body)
        return [(result.status, result.reason) for result in found.results]

    other = Push(to.contact.node_id, 1, 1, 0, 1.0, mine[:1])
    assert await answered(other, mine[0]) == [("refused", "not_yours")]
    assert await answered(Push(node, 1, 1, 0, 1.0, [99]), 0) == [("refused", "shape")]
    assert await answered(Push(node, 1, 1, 0, 1.0, mine[:2]), *mine[:2], torn=3) == [
        ("ok", ""),
        ("refused", "malformed"),
    ]
    theirs = next(shard for shard in range(4) if shard not in mine)
    found = await ask(
        member,
        to,
        "push",
        Push(node, 1, 2, 1, 1.0, [theirs]),
        PushAnswer,
        [bytes(one) for one in frames(theirs, np.ones(2, np.float32), "float32", Part.DELTA)],
    )
    (result,) = found.results
    assert (result.status, result.owner_info and result.owner_info.owner) == (
        "redirect",
        world.owner(theirs).contact.node_id,
    )
    assert [world.value()[shard] for shard in mine[:2]] == [1.0, 0.0]


@played_by(simulate, nodes=1)
async def test_a_node_that_has_closed_adds_nothing_more(world: World) -> None:
    """It knows that its states are complete, and its disk gets all of them."""
    exchange = world.owner().exchange
    await world.owner().push(1)
    assert not exchange.is_clean()
    await exchange.close(1.0)
    report = await exchange.push(2, 1, 1.0, ONES.copy())
    assert (report.acknowledged, report.outstanding) == (0, 2)
    assert exchange.is_clean()
    assert [(shard, float(state.value[0])) for shard, _, state in exchange.store.states_to_save()] == [
        (0, 1.0),
        (1, 1.0),
    ]


def test_the_own_step_counts_in_the_median_and_an_owner_that_counts_otherwise_is_noted() -> None:
    """From the moment on that it is told. A push carries the start of its node, and the workers that it counts."""

    async def scenario(world: World) -> None:
        member, seen = world.bystander(), pushes_seen(world)
        exchange = member.exchange
        world.training = False
        assert exchange.view.median_step() == 0
        for one in world.running():
            one.exchange.begin_at(5)
            one.overlay.step = 5
            world.spread(one)
        await asyncio.sleep(3.0)
        assert exchange.view.median_step() == 5
        exchange.run.incarnation = 3
        member.overlay.workers = lambda: 9.0
        for step in (6, 7):
            exchange.view.invalidate()
            await exchange.push(step, step - 1, 1.0, ONES.copy())
            await asyncio.sleep(LASTING_S)
        assert [(one.incarnation, one.step, one.workers) for one in seen] == [(3, 6, 9.0), (3, 7, 9.0)]
        assert exchange.view.counts.lasting() == [(world.owner().contact.node_id, 1.0)]

    async def alone(world: World) -> None:
        exchange = world.owner().exchange
        for step in (5, 6):
            exchange.advance(step)
            assert exchange.view.median_step() == step

    simulate(scenario, nodes=4, shards=1)
    simulate(alone, nodes=1)


@played_by(simulate, nodes=5, shards=1)
async def test_a_backup_that_dies_is_replaced_and_no_delta_is_added_without_one(world: World) -> None:
    """The owner goes on under a higher term, with another node that has what was added."""
    former, member, term = world.backup(), world.bystander(), world.owned().term
    await world.kill(former.name)
    pushing = asyncio.ensure_future(member.exchange.push(1, 0, 1.0, ONES.copy()))
    await asyncio.sleep(1.0)
    assert world.value() == [0.0]
    await world.until(
        lambda: world.owned().backup not in (None, former.contact),
        within_s=BOUND_S,
        what="another backup",
    )
    await pushing
    assert await member.exchange.flush(BOUND_S) == 0
    assert world.owned().term > term
    assert world.value() == [1.0]
    await world.until(world.paired, within_s=BOUND_S, what="a backup with the same bits")


@played_by(simulate, nodes=4, shards=1)
async def test_a_backup_that_has_lost_the_shard_is_dropped_by_its_owner(world: World) -> None:
    """It answers that it backs up nothing, as after a restart that nobody has noticed: the owner looks for another."""
    del world.backup().exchange.store.backed[0]
    term = world.owned().term
    await world.bystander().push(1)
    await world.until(lambda: world.owned().backup is not None and world.paired(), within_s=BOUND_S, what="a pair")
    assert world.owned().term > term
    assert world.value() == [1.0]


@played_by(simulate, nodes=4, shards=1)
async def test_a_backup_adds_its_own_delta_from_its_own_copy_and_asks_for_what_it_keeps_no_more(world: World) -> None:
    """The forward of its delta has no array, whatever the codec."""
    member, sizes = world.backup(), list[int]()
    carry = world.carry

    def noted(source: Any, to: Any, name: str, payload: bytes, buffers: list[bytes], answer: Any) -> None:
        if name == "forward" and to == member.contact:
            sizes.append(sum(map(len, buffers)))
        carry(source, to, name, payload, buffers, answer)

    world.carry = noted
    await member.push(1)
    assert sizes == [0]
    sent = member.exchange.sent
    find, sent.find = sent.find, lambda *_: None
    await member.push(2)
    assert [bool(size) for size in sizes] == [False, False, True]
    sent.find = find
    assert world.paired()
    assert world.value() == [3.0]


@played_by(simulate, nodes=3, shards=1)
async def test_values_out_of_range_reach_no_backup(world: World) -> None:
    """Whatever its owner has accepted: the copy stays one that training can go on from, and the nonsense is counted."""
    sender, to = world.owner(), world.backup()
    for bad in (3e38, np.inf, np.nan):
        body = [bytes(one) for one in frames(0, np.full(VALUES, bad, np.float32), "float32", Part.DELTA)]
        message = Forward(b"x" * 20, 1, 1, 1.0, [Forwarded(0, world.owned().term, 0)])
        answer = await ask(sender, to, "forward", message, ForwardAnswer, body)
        assert [result.status for result in answer.results] == ["unknown"]
    assert world.paired()
    assert [one.event for one in world.records if "range" in one.event] == ["forward_out_of_range"] * 3


@played_by(simulate, nodes=5)
async def test_a_node_that_finds_an_owner_dead_waits_for_it_no_longer(world: World) -> None:
    """Its request ends when the failure detector has decided, and its shards are sent to who takes them over."""
    dead, member = world.owner(), world.bystander()
    await member.push(1)
    await world.kill(dead.name)
    began_s = world.clock.monotonic()
    await member.exchange.push(2, 1, 1.0, 2 * ONES)
    assert await member.exchange.flush(BOUND_S) == 0
    assert world.clock.monotonic() - began_s <= BOUND_S
    assert world.value() == [3.0, 3.0]
    await world.until(world.logged, within_s=BOUND_S, what="pairs again")


@played_by(simulate, nodes=4, shards=1)
async def test_who_asks_another_to_take_over_is_not_believed_that_the_owner_is_dead(world: World) -> None:
    """The shard waits for a survey, and its owner keeps it. The answer names that one."""
    member, to, owning = world.bystander(), world.backup(), world.owner()
    answer = await ask(member, to, "request_takeover", ShardList([0, 99]), TransferResult)
    assert answer.taken == [0]
    assert [info.owner for info in answer.others] == [owning.contact.node_id]
    await asyncio.sleep(3.0)
    assert world.owner() is owning
    with pytest.raises(TransportError):
        await ask(member, to, "no_such_request", ShardList([0]), TransferResult)
