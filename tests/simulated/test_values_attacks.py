"""Named values while nodes die at the worst moments, leave together, and join together: what was acknowledged stays."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.terms import Term
from p2pnode.training.shards.value_table import TableEntry
from p2pnode.training.values.client import shard_of
from p2pnode.training.values.encoding import decode_value, encode_key
from p2pnode.training.values.store import Stamped, StoreUnavailable, ValueUpdate
from tests.harness.runner.stories import played_by
from tests.harness.swarms.light_network import Member
from tests.harness.swarms.value_swarm import SHARDS, Few, play

KEYS = [f"k{number}" for number in range(200)]


async def fill(few: Few, name: str) -> None:
    await few.store(name).update([ValueUpdate(key, b"x" * 200, 1, "replace") for key in KEYS])


@played_by(play, seed=23)
async def test_nodes_that_leave_at_one_moment_lose_no_value(few: Few) -> None:
    """Each hands shards to its backups, of which the other leaver is one: whoever gets them last hands them on."""
    await few.start("a", "b", "c", "d")
    await fill(few, "d")
    chance = random.Random(23)
    first, second = chance.sample("abcd", 2)

    async def leave(name: str) -> tuple[int, int]:
        await asyncio.sleep(chance.uniform(0.0, 0.05))
        return await few.leave(name)

    assert await asyncio.gather(leave(first), leave(second)) == [(0, 0), (0, 0)]
    stays = next(name for name in "abcd" if name not in (first, second))
    assert len(await few.store(stays).get_many(KEYS)) == len(KEYS)
    assert few.events("values_lost") == []


def backup_of(few: Few, key: str) -> Member:
    owner = few.owner(key)
    backup = owner.exchange.store.owned[shard_of(encode_key(key), SHARDS)].backup
    assert backup is not None
    return next(one for one in few.world.running() if one.contact.node_id == backup.node_id)


@pytest.mark.parametrize("who", ["owner", "backup"])
@pytest.mark.parametrize("moment", ["asked", "forwarding", "forwarded", "answered"])
@played_by(play)
async def test_a_set_that_owner_or_backup_dies_in_counts_once(few: Few, *, who: str, moment: str) -> None:
    """The node dies when it is asked, before the backup has the batch, when it has it, or before the answer arrives:
    the call ends, and each of its updates is in the value once."""
    await few.start("a", "b", "c", "d")
    key = few.key_of("a")
    backup = backup_of(few, key).name
    other = next(name for name in "bcd" if name != backup)
    await few.store(other).update([ValueUpdate(key, 1, 0, "add")])
    name, after_s = {
        "asked": ("update_values", 0.0),
        "forwarding": ("forward", 0.0),
        "forwarded": ("forward", 0.021),
        "answered": ("forward", 0.035),
    }[moment]
    victim = "a" if who == "owner" else backup
    struck: list[float] = []
    kills: list[asyncio.Task[None]] = []

    def strike(_source: str, target: str, request: str, _payload: bytes) -> None:
        if request == name and not struck and target in ("a", backup):
            struck.append(after_s)
            loop = asyncio.get_running_loop()
            loop.call_later(after_s, lambda: kills.append(loop.create_task(few.world.kill(victim))))

    few.world.observers.append(strike)
    await few.store(other).update([ValueUpdate(key, 10, 0, "add"), ValueUpdate(key, 100, 0, "add")])
    assert struck
    await asyncio.sleep(struck[0])  # the victim reads no more
    await few.whole()
    for reader in few.world.running():
        assert await few.store(reader.name).get(key) == Stamped(111, 0)


def test_two_nodes_that_join_at_once_get_their_shares() -> None:
    """While values are set all the time: none is lost, none counts twice, and both joiners own shards."""

    async def scenario(few: Few) -> None:
        await few.start("a", "b")
        await fill(few, "a")
        made = 0

        async def count() -> None:
            nonlocal made
            while True:
                await few.store("b").update([ValueUpdate(f"n{made % 16}", 1, 0, "add")])
                made += 1

        counting = asyncio.create_task(count())
        for name in ("c", "d"):
            member = await few.world.start(name)
            await member.exchange.join(few.world.members["a"].contact)

        def shares() -> list[int]:
            return [len(one.exchange.store.owned) for one in few.world.running() if one.exchange is not None]

        async with asyncio.timeout(60.0):
            while not all(shares()):  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.2)
        counting.cancel()
        await asyncio.gather(counting, return_exceptions=True)
        await few.whole()
        assert sum(shares()) == SHARDS
        assert len(await few.store("d").get_many(KEYS)) == len(KEYS)
        found = await few.store("c").get_many([f"n{number}" for number in range(16)])
        # The last call was cancelled, and may have counted.
        assert sum(one.value for one in found.values()) in (made, made + 1)

    play(scenario)


@pytest.mark.parametrize("verb", ["get", "keys"])
@played_by(play)
async def test_a_value_of_a_lower_term_than_was_seen_is_not_taken(few: Few, *, verb: str) -> None:
    """An owner that was replaced may answer still, with old values: the reader asks until the owner is above the term
    that the reader has seen."""
    await few.start("a", "b", "c")
    key = few.key_of("a")
    shard = shard_of(encode_key(key), SHARDS)
    await few.store("b").set(key, 1)
    reader, owner = (few.world.members[name].exchange for name in "ca")
    assert reader is not None
    assert owner is not None
    before = owner.store.owned[shard].term
    seen = Term(before.number + 1, few.world.members["b"].contact.node_id)
    reader.store.ownership.raise_fence(shard, seen)
    asked: list[str] = []
    name = "read_values" if verb == "get" else "list_keys"
    few.world.observers.append(lambda _s, target, request, _p: asked.append(target) if request == name else None)
    if verb == "get":
        assert await few.store("c").get(key) == Stamped(1, 0)
    else:
        assert await few.store("c").keys() == [key]
    assert asked.count("a") > 1
    (now,) = few.world.owners(shard)
    assert now.exchange.store.owned[shard].term > seen


@played_by(play)
async def test_a_node_that_may_own_nothing_takes_no_values_over(few: Few) -> None:
    """The only server dies: its worker hears that no owner answers, and does not begin the values anew. When the server
    starts again with its disk, they are as it wrote them."""
    await few.start("a")
    worker = await few.world.start("b")
    worker.overlay.eligible = False
    few.world.spread(worker)
    await worker.exchange.join(few.world.members["a"].contact)
    await asyncio.sleep(3.0)
    for number in range(16):
        await few.store("b").set(f"k{number}", number)
    before = few.world.members["a"].exchange
    assert before is not None
    parts = shard_states.encode(bytes.fromhex(before.manifest.genesis), before.store.states_to_save(), clean=False)
    saved = b"".join(parts)
    await few.world.kill("a")
    with pytest.raises(StoreUnavailable, match="'k3'"):
        await few.store("b").get("k3")
    assert few.events("values_lost") == []
    assert not worker.exchange.store.owned
    again = await few.world.start("a")
    again.exchange.offer(
        0, [], shard_states.decode(saved, bytes.fromhex(before.manifest.genesis), [(0, 0)] * SHARDS, 0)
    )
    await again.exchange.join(worker.contact)
    found = await few.store("b").get_many([f"k{number}" for number in range(16)])
    assert found == {f"k{number}": Stamped(number, 0) for number in range(16)}


@played_by(play)
async def test_a_swarm_that_is_killed_goes_on_from_the_newest_copies_on_its_disks(few: Few) -> None:
    """Nodes had written what they hold at different moments. Of each shard the swarm takes the copy with the most
    updates, all nodes read the same, and an update that was sent before and is not in it may be made again."""
    names, keys = "abc", [f"k{number}" for number in range(24)]
    await few.start(*names)
    saved: dict[str, bytes] = {}
    genesis = bytes.fromhex(few.world.manifest.genesis)
    for number, name in enumerate("bcab"):
        await few.store("a").update([ValueUpdate(key, 1, number, "add") for key in keys[number:]])
        exchange = few.world.members[name].exchange
        saved[name] = b"".join(shard_states.encode(genesis, exchange.store.states_to_save(), clean=False))
    for name in names:
        await few.world.kill(name)

    newest: dict[int, dict[bytes, TableEntry]] = {}
    for raw in saved.values():
        for shard, stored in shard_states.decode(raw, genesis, [(0, 0)] * SHARDS, 0).items():
            assert stored.state.table is not None
            entries = stored.state.table.entries
            if sum(one.timestamp for one in entries.values()) >= sum(
                one.timestamp for one in newest.get(shard, {}).values()
            ):
                newest[shard] = entries
    assert len(newest) == SHARDS
    members = [await few.world.start(name) for name in names]
    for member in members:
        member.exchange.rebalancer.delay_takeover(30.0)
        states = shard_states.decode(saved[member.name], genesis, [(0, 0)] * SHARDS, 0)
        member.exchange.offer(0, [], states)
    first, *others = [member.exchange for member in members if member.exchange is not None]
    await first.resume(2, 5.0)
    for exchange in others:
        await exchange.join(members[0].contact)
    await few.whole()
    for name in names:
        found = await few.store(name).get_many(keys)
        for key in keys:
            entry = newest[shard_of(encode_key(key), SHARDS)][encode_key(key)]
            assert found[key] == Stamped(decode_value(entry.value), entry.timestamp)
    before = {key: one.value for key, one in (await few.store("c").get_many(keys)).items()}
    assert min(before.values()) < max(before.values())
    await few.store("c").update([ValueUpdate(key, 10, 0, "add") for key in keys])
    after = await few.store("b").get_many(keys)
    assert {key: one.value for key, one in after.items()} == {key: value + 10 for key, value in before.items()}
