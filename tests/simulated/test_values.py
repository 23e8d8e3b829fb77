"""The store of named values of several nodes on the simulated network: calls, failures of scripts, losses, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.terms import KnownOwner
from p2pnode.training.shards.value_updates import FULL
from p2pnode.training.values.client import TIMEOUT_S, shard_of
from p2pnode.training.values.encoding import (
    MAX_VALUE_BYTES,
    InvalidKey,
    ValueNotEncodable,
    decode_value,
    encode_key,
    encode_value,
)
from p2pnode.training.values.script_pulls import SCRIPT_WAIT_S
from p2pnode.training.values.store import (
    EncodedResult,
    EncodedUpdate,
    EncodedValue,
    PullFailed,
    ScriptGone,
    Stamped,
    StoreUnavailable,
    UpdateFailed,
    ValueUpdate,
)
from tests.harness.histories.value_histories import append
from tests.harness.runner.stories import played_by
from tests.harness.swarms.light_network import RETURNED_S
from tests.harness.swarms.value_swarm import KEYS, SHARDS, Few, play


@played_by(play)
async def test_every_node_reads_what_any_has_set(few: Few) -> None:
    """Values, timestamps and keys are those of the last set; arrays keep dtype and shape."""
    await few.start("a", "b", "c")
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    await few.store("a").set("weights", weights, 4)
    await few.store("b").set(b"raw", {"x": [1, 2]}, 1)
    await few.store("c").update([ValueUpdate("n", 2, 5, "add"), ValueUpdate("n", 3, 4, "add")])
    for name in "abc":
        store = few.store(name)
        found = await store.get_many(["weights", b"raw", "n", "nothing"])
        array = found.pop("weights")
        assert found == {b"raw": Stamped({"x": [1, 2]}, 1), "n": Stamped(5, 5)}
        assert (array.timestamp, array.value.dtype, array.value.shape) == (4, np.float32, (2, 3))
        assert await store.get("nothing") is None
        assert await store.keys() == ["n", "weights", b"raw"]


@played_by(play)
async def test_a_node_alone_has_a_store(few: Few) -> None:
    """Without others nothing is replicated, and nothing waits."""
    await few.start("a")
    assert await few.store("a").keys() == []
    await few.store("a").set("k", 1)
    assert await few.store("a").get("k") == Stamped(1, 0)


@played_by(play)
async def test_a_lone_server_answers_without_a_backup_and_the_next_one_has_all_of_it(few: Few) -> None:
    """Beside workers, which own nothing, its copy is the only one and nothing waits. A second server takes a copy of
    every value; then the first may die."""
    await few.start("a")
    worker = await few.world.start("w", founder=False)
    worker.overlay.eligible = False
    few.world.spread(worker)
    await asyncio.sleep(RETURNED_S[1])
    await worker.exchange.join(few.world.members["a"].contact)
    async with asyncio.timeout(5.0):
        await asyncio.gather(*(few.store("w").set(key, key, 3) for key in KEYS))
    assert all(few.owner(key).name == "a" for key in KEYS)
    server = few.world.members["a"].exchange
    assert server is not None
    assert all(owned.backup is None for owned in server.store.owned.values())
    assert not worker.exchange.store.backed
    await few.start("b")
    await few.world.kill("a")
    async with asyncio.timeout(30.0):
        found = await few.store("w").get_many(KEYS)
    assert found == {key: Stamped(key, 3) for key in KEYS}
    assert all(few.owner(key).name == "b" for key in KEYS)


@played_by(play)
async def test_what_cannot_be_sent_is_refused_before_anything_is(few: Few) -> None:
    """The errors name the key, and no update of the call counts."""
    await few.start("a", "b")
    store = few.store("b")
    with pytest.raises(ValueNotEncodable, match="'bad'"):
        await store.update([ValueUpdate("good", 1, 0, "add"), ValueUpdate("bad", object(), 0, "add")])
    with pytest.raises(ValueNotEncodable, match="timestamp"):
        await store.set("late", 1, 1 << 70)
    with pytest.raises(ValueNotEncodable, match="1,048,576 are allowed"):
        await store.encoded.update_encoded([EncodedUpdate(encode_key("large"), b"x" * (MAX_VALUE_BYTES + 1))])
    with pytest.raises(InvalidKey):
        await store.encoded.update_encoded([EncodedUpdate(b"s" * 300, b"x")])
    with pytest.raises(InvalidKey):
        await store.get("")
    assert await store.keys() == []


@played_by(play)
async def test_an_update_that_raises_is_refused_and_the_others_count(few: Few) -> None:
    """The error names key and node; the value is as before, the other keys of the batch count, and so does a retry."""
    await few.start("a", "b", "c")
    for name in "abc":
        few.store(name).encoded.on_pull(append)
    calls = [few.store("b").update([ValueUpdate("list", [number, "x"], number)]) for number in range(3)]
    calls.append(few.store("b").update([ValueUpdate("other", [0, "poison"], 9)]))
    *fine, failed = await asyncio.gather(*calls, return_exceptions=True)
    assert fine == [None, None, None]
    assert isinstance(failed, UpdateFailed)
    assert failed.key == "other"
    assert failed.node == few.owner("other").contact.node_id.hex()[:8]
    assert "poisoned" in failed.reason
    assert await few.store("a").get("other") is None
    await few.store("c").update([ValueUpdate("other", [1, "x"], 1)])
    assert await few.store("a").get("other") == Stamped([[1, "x"]], 1)
    assert await few.store("a").get("list") == Stamped([[0, "x"], [1, "x"], [2, "x"]], 2)


@played_by(play)
async def test_a_pull_without_results_or_with_another_key_changes_nothing(few: Few) -> None:
    """A key that is left out keeps its value; a result of a key outside the batch is an error of all."""
    await few.start("a")
    store = few.store("a")
    results: list[EncodedResult] = []

    async def pull(_: Sequence[EncodedUpdate], __: Mapping[bytes, EncodedValue]) -> list[EncodedResult]:
        return results

    store.encoded.on_pull(pull)
    await store.set("k", 1)
    await store.update([ValueUpdate("k", 2)])
    assert await store.get("k") == Stamped(1, 0)
    results.append((encode_key("foreign"), encode_value("foreign", 1), 1))
    with pytest.raises(UpdateFailed, match="'foreign'"):
        await store.update([ValueUpdate("k", 2)])
    assert await store.keys() == ["k"]


@played_by(play)
async def test_an_update_waits_for_a_script(few: Few) -> None:
    """Until one is attached, or has come back; after ten seconds without one it is refused, and names the node."""
    await few.start("a", "b")
    key, loop = few.key_of("a"), asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(UpdateFailed, match="no script with a pull function") as caught:
        await few.store("b").update([ValueUpdate(key, [1, "x"])])
    assert caught.value.key == key
    assert SCRIPT_WAIT_S <= loop.time() - began <= SCRIPT_WAIT_S + 2.0
    waiting = asyncio.create_task(few.store("b").update([ValueUpdate(key, [2, "x"])]))
    await asyncio.sleep(3.0)
    assert not waiting.done()
    few.store("a").encoded.on_pull(append)
    await waiting

    async def gone(_: Sequence[EncodedUpdate], __: Mapping[bytes, EncodedValue]) -> list[EncodedResult]:
        raise ScriptGone("it has ended")

    few.store("a").encoded.on_pull(gone)
    waiting = asyncio.create_task(few.store("b").update([ValueUpdate(key, [3, "x"])]))
    await asyncio.sleep(1.0)
    assert not waiting.done()
    few.store("a").encoded.on_pull(append)
    await waiting
    found = await few.store("b").get(key)
    assert found is not None
    assert found.value == [[2, "x"], [3, "x"]]


@played_by(play)
async def test_built_in_reducers_go_on_while_a_script_is_missing(few: Few) -> None:
    """An update that waits holds up those behind it in its own shard alone."""
    await few.start("a", "b")
    key = few.key_of("a")
    other = next(
        name
        for name in (f"other{number}" for number in range(1000))
        if few.owner(name).name == "a" and shard_of(encode_key(name), SHARDS) != shard_of(encode_key(key), SHARDS)
    )
    waiting = asyncio.create_task(few.store("b").update([ValueUpdate(key, 1)]))
    await asyncio.sleep(0.5)
    async with asyncio.timeout(2.0):
        await few.store("b").set(other, 1)
    assert not waiting.done()
    with pytest.raises(UpdateFailed):
        await waiting


@played_by(play)
async def test_a_batch_in_which_one_key_raises_is_given_to_pull_again(few: Few) -> None:
    """PullFailed names one key: the others of the call are applied in one more call, each once."""
    await few.start("a")
    calls: list[list[int]] = []

    async def pull(updates: Sequence[EncodedUpdate], _: Mapping[bytes, EncodedValue]) -> list[EncodedResult]:
        calls.append([decode_value(one.value) for one in updates])
        for one in updates:
            if decode_value(one.value) < 0:
                raise PullFailed(one.key, "negative")
        return [(one.key, one.value, one.timestamp) for one in updates]

    few.store("a").encoded.on_pull(pull)
    with pytest.raises(UpdateFailed, match="'b'"):
        await few.store("a").update([ValueUpdate("a", 1), ValueUpdate("b", -1), ValueUpdate("c", 3)])
    assert [sorted(call) for call in calls] == [[-1, 1, 3], [1, 3]]
    assert await few.store("a").keys() == ["a", "c"]


@played_by(play)
async def test_a_bad_update_refuses_no_other_of_its_key(few: Few) -> None:
    """Of five updates in a batch the one that raises is refused, whoever sent it; the order of the others stays."""
    await few.start("a", "b")
    store = few.store("a")
    store.encoded.on_pull(append)
    few.store("b").encoded.on_pull(append)
    tokens = [[0, "x"], [1, "x"], [2, "poison"], [3, "x"], [4, "x"]]
    with pytest.raises(UpdateFailed, match="poisoned"):
        await store.update([ValueUpdate("list", token, 1) for token in tokens])
    assert await store.get("list") == Stamped([[0, "x"], [1, "x"], [3, "x"], [4, "x"]], 1)


@played_by(play)
async def test_an_answer_that_is_lost_is_given_again(few: Few) -> None:
    """The owner applies an update once, although its origin sends it until an answer arrives."""
    await few.start("a", "b", "c")
    sent: list[str] = []
    few.world.observers.append(lambda _s, _t, name, _p: sent.append(name) if name == "update_values" else None)
    few.world.links.loss = 0.15
    for _ in range(20):
        await few.store("b").update([ValueUpdate("n", 1, 0, "add"), ValueUpdate("m", 1, 0, "add")])
    few.world.links.loss = 0.0
    assert await few.store("c").get_many(["n", "m"]) == {"n": Stamped(20, 0), "m": Stamped(20, 0)}
    assert len(sent) > 20


@played_by(play)
async def test_many_updates_travel_in_requests_of_a_bounded_size(few: Few) -> None:
    """Three thousand of one owner in three requests or more, and as many reads: none holds a loop for long."""
    await few.start("a", "b")
    keys = [key for key in (f"n{number}" for number in range(9000)) if few.owner(key).name == "a"][:3000]
    sent: list[str] = []
    few.world.observers.append(lambda source, _t, name, _p: sent.append(name) if source == "b" else None)
    await few.store("b").update([ValueUpdate(key, 1, 0, "add") for key in keys])
    assert sent.count("update_values") >= 3
    assert len(await few.store("b").get_many(keys)) == len(keys) == 3000
    assert sent.count("read_values") >= 3


def test_an_owner_that_dies_loses_nothing_that_it_acknowledged() -> None:
    """Its backup has every batch, and answers the retry of one that it has."""

    async def scenario(few: Few) -> None:
        await few.start("a", "b", "c")
        key = few.key_of("a")
        done = 0

        async def count() -> None:
            nonlocal done
            while done < 40:
                await few.store("b").update([ValueUpdate(key, 1, 0, "add")])
                done += 1

        counting = asyncio.create_task(count())
        while done < 10:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
        await few.world.kill("a")
        await counting
        assert await few.store("c").get(key) == Stamped(40, 0)

    play(scenario)


@played_by(play)
async def test_a_node_that_joins_gets_its_share_of_the_keys(few: Few) -> None:
    """Within a minute it owns shards with their values; every key can be read, and the tables are on two nodes each."""
    await few.start("a", "b")
    keys = [f"k{number}" for number in range(400)]
    await few.store("a").update([ValueUpdate(key, b"x" * 300, 1, "replace") for key in keys])
    await few.start("c")
    joined = few.world.members["c"].exchange
    assert joined is not None
    async with asyncio.timeout(60.0):
        while not joined.store.owned:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.2)
    await few.whole()
    await few.without_former_backups()
    assert sum(len(one.state.table.entries) for one in joined.store.owned.values() if one.state.table) > 20
    assert len(await few.store("b").get_many(keys)) == 400
    assert sorted(await few.store("c").keys()) == sorted(keys)
    held = [one.exchange.store for one in few.world.running() if one.exchange is not None]
    kept = [one.state for store in held for one in (*store.owned.values(), *store.backed.values())]
    entries = [len(state.table.entries) for state in kept if state is not None and state.table is not None]
    assert sum(entries) == 800


@played_by(play)
async def test_a_shard_that_lost_both_copies_begins_empty(few: Few) -> None:
    """The log says which; what other shards have stays, and the store goes on."""
    await few.start("a", "b", "c", "d")
    keys = [f"k{number}" for number in range(60)]
    await few.store("d").update([ValueUpdate(key, 1, 0, "add") for key in keys])
    await few.without_former_backups()
    owner = few.owner("k0")
    backup = owner.exchange.store.owned[shard_of(encode_key("k0"), SHARDS)].backup
    assert backup is not None
    other = next(one for one in few.world.running() if one.contact.node_id == backup.node_id)
    left = next(name for name in "abcd" if name not in (owner.name, other.name))
    await few.world.kill(owner.name)
    await few.world.kill(other.name)
    found = await few.store(left).get_many(keys)
    await few.whole()
    lost = {fields["shard"] for fields in few.events("values_lost")}
    assert shard_of(encode_key("k0"), SHARDS) in lost
    assert [key for key in keys if key not in found] == [
        key for key in keys if shard_of(encode_key(key), SHARDS) in lost
    ]
    await few.store(left).update([ValueUpdate("k0", 5, 0, "add")])
    assert await few.store(left).get("k0") == Stamped(5, 0)


@played_by(play)
async def test_values_survive_a_restart_of_all_nodes(few: Few) -> None:
    """Every node writes what it holds and ends; the swarm resumes with all values, and knows the old updates."""
    await few.start("a", "b", "c")
    await few.store("a").update([ValueUpdate(f"k{number}", number, number, "add") for number in range(50)])
    saved = {}
    for member in few.world.running():
        await member.exchange.close(1.0)
        exchange = member.exchange
        parts = shard_states.encode(
            bytes.fromhex(exchange.manifest.genesis), exchange.store.states_to_save(), clean=exchange.is_clean()
        )
        saved[member.name] = b"".join(parts)
    for name in "abc":
        await few.world.kill(name)
    members = [await few.world.start(name) for name in "abc"]
    genesis = bytes.fromhex(few.world.manifest.genesis)
    for member in members:
        states = shard_states.decode(saved[member.name], genesis, [(0, 0)] * SHARDS, 0)
        member.exchange.rebalancer.delay_takeover(30.0)
        member.exchange.offer(0, [], states)
    first, *others = [member.exchange for member in members if member.exchange is not None]
    await first.resume(2, 5.0)
    for exchange in others:
        await exchange.join(members[0].contact)
    await few.whole()
    found = await few.store("b").get_many([f"k{number}" for number in range(50)])
    assert found == {f"k{number}": Stamped(number, number) for number in range(50)}
    assert few.events("swarm_resumed")[0]["deltas_lost"] == 0


@played_by(play)
async def test_a_store_that_is_full_refuses_what_would_make_it_larger(few: Few) -> None:
    """Values that do not grow are replaced still."""
    await few.start("a")
    few.limit_bytes("a", 4000)
    store = few.store("a")
    await store.set("k", b"x" * 3000)
    with pytest.raises(UpdateFailed, match=FULL):
        await store.set("l", b"x" * 3000)
    await store.set("k", b"y" * 3000)
    assert await store.keys() == ["k"]


@played_by(play)
async def test_updates_of_a_moment_share_a_request_and_a_slow_one_holds_up_no_other(few: Few) -> None:
    """What comes while a request is under way goes with the next, as far as the line is quick; one that waits for a
    script has others beside it a moment later."""
    await few.start("a", "b")
    keys = [key for key in (f"n{number}" for number in range(900)) if few.owner(key).name == "a"][:300]
    sent: list[str] = []
    few.world.observers.append(lambda source, _t, name, _p: sent.append(name) if source == "b" else None)
    calls = []
    for key in keys:
        calls.append(asyncio.create_task(few.store("b").set(key, 1)))
        await asyncio.sleep(0.0001)  # while others are under way
    await asyncio.gather(*calls)
    assert sent.count("update_values") <= 30
    slow = asyncio.create_task(few.store("b").update([ValueUpdate(keys[0], 1, 0, "pull")]))
    await asyncio.sleep(0.001)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    other = next(key for key in keys if shard_of(encode_key(key), SHARDS) != shard_of(encode_key(keys[0]), SHARDS))
    await few.store("b").set(other, 2)
    assert loop.time() - began_s < 0.2  # not the time that an owner waits with its answer

    async def pull(updates: Sequence[EncodedUpdate], _present: Mapping[bytes, EncodedValue]) -> Sequence[EncodedResult]:
        return [(one.key, one.value, one.timestamp) for one in updates]

    few.store("a").encoded.on_pull(pull)
    await slow


@played_by(play)
async def test_a_set_that_is_cancelled_leaves_nothing_that_waits(few: Few) -> None:
    """Its owner has died unnoticed; the value is not set later, and the next set of the key is."""
    await few.start("a", "b", "c")
    key = few.key_of("a")
    await few.world.kill("a")
    setting = asyncio.create_task(few.store("b").set(key, 1))
    await asyncio.sleep(0.5)
    setting.cancel()
    await asyncio.gather(setting, return_exceptions=True)
    assert few.store("b").encoded.waiting() == 0
    await asyncio.sleep(10.0)
    assert await few.store("c").get(key) is None
    await few.store("b").set(key, 2)
    assert await few.store("c").get(key) == Stamped(2, 0)


@played_by(play)
async def test_a_redirect_is_followed_at_once(few: Few) -> None:
    """A node that takes another for the owner asks it once: its answer names the owner."""
    await few.start("a", "b", "c")
    key = few.key_of("a")
    ownership = few.store("b").encoded._store.ownership
    shard = shard_of(encode_key(key), SHARDS)
    known = ownership.known_owners[shard]
    ownership.known_owners[shard] = KnownOwner(ownership.fence(shard), few.world.members["c"].contact)
    asked: list[str] = []
    few.world.observers.append(
        lambda source, to, name, _p: asked.append(to) if (source, name) == ("b", "update_values") else None
    )
    async with asyncio.timeout(5.0):
        await few.store("b").set(key, 1)
    assert asked == ["c", "a"]
    assert ownership.known_owners[shard].owner == known.owner


@played_by(play)
async def test_a_store_without_an_owner_says_which_keys(few: Few) -> None:
    """A node that reaches nobody raises after its time, for reads and for updates."""
    await few.start("a", "b", "c")
    backups = {one: few.owner(one).exchange.store.owned[shard_of(encode_key(one), SHARDS)].backup for one in KEYS}
    mine = few.world.members["b"].contact.node_id
    key = next(one for one in KEYS if few.owner(one).name != "b" and backups[one].node_id != mine)
    few.world.part({"a": 0, "b": 1, "c": 0})
    for member in few.world.running():
        if member.name == "b" and member.exchange is not None:
            member.exchange.rebalancer.delay_takeover(3600.0)
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(StoreUnavailable, match=repr(key)):
        await few.store("b").get(key)
    with pytest.raises(StoreUnavailable, match=repr(key)):
        await few.store("b").set(key, 1)
    assert loop.time() - began < 2 * TIMEOUT_S + 5.0
    assert few.store("b").encoded.waiting() == 0


@played_by(play)
async def test_both_sides_of_a_split_end_in_one_value(few: Few) -> None:
    """Each side counts by itself; afterwards the count has the updates of both, and the later set stays."""
    await few.start("a", "b", "c", "d")
    await few.store("a").update([ValueUpdate("n", 1, 0, "add")])
    few.world.part({"a": 0, "b": 0, "c": 1, "d": 1})
    await asyncio.sleep(12.0)
    for name, number, stamp in (("a", 10, 5), ("c", 100, 9)):
        await few.store(name).update([ValueUpdate("n", number, 0, "add") for _ in range(3)])
        await few.store(name).update([ValueUpdate(f"s{one}", name, stamp, "replace") for one in range(8)])
        await few.store(name).update([ValueUpdate(f"t{one}", name, -stamp, "replace") for one in range(8)])
    few.world.heal()
    await asyncio.sleep(20.0)
    await few.whole()
    later = {f"s{one}": Stamped("c", 9) for one in range(8)} | {f"t{one}": Stamped("a", -5) for one in range(8)}
    for name in "abcd":
        assert await few.store(name).get_many(["n", *later]) == {"n": Stamped(331, 0)} | later
