"""The store in memory, by the meaning that every store has."""

import asyncio

import numpy as np
import pytest

from p2pnode.training.values.encoding import InvalidKey, ValueNotEncodable
from p2pnode.training.values.store import NewValue, PullFailed, Stamped, UpdateFailed, ValueUpdate
from tests.harness.swarms.memory_values import MemoryValues


def run(work):
    return asyncio.run(work)


async def summed(updates, present):
    """A `pull` that subtracts all updates of a key."""
    values = {key: found.value for key, found in present.items()}
    stamps: dict[object, int] = {}
    for one in updates:
        values[one.key] = values.get(one.key, 0.0) - one.value
        stamps[one.key] = max(stamps.get(one.key, 0), one.timestamp)
    return [NewValue(key, values[key], stamp) for key, stamp in stamps.items()]


def test_set_get_and_keys():
    """A value is returned with its timestamp; a key that was never set has none."""

    async def body():
        store = MemoryValues()
        await store.set("w", np.arange(3), 7)
        await store.set(b"raw", {"a": 1})
        assert await store.get("nothing") is None
        found = await store.get("w")
        assert found.timestamp == 7
        np.testing.assert_array_equal(found.value, [0, 1, 2])
        assert await store.get_many(["nothing", b"raw"]) == {b"raw": Stamped({"a": 1}, 0)}
        assert await store.keys() == ["w", b"raw"]

    run(body())


def test_add_counts_every_update():
    """The sum of all, stamped by the highest."""

    async def body():
        store = MemoryValues()
        await store.update([ValueUpdate("n", number, number, "add") for number in (1, 3, 2)])
        assert await store.get("n") == Stamped(6, 3)

    run(body())


def test_pull_gets_the_batch_and_the_present_values():
    """Two updates of one key in a batch both count."""

    async def body():
        store = MemoryValues(summed)
        await store.set("w", 10.0, 1)
        await store.update([ValueUpdate("w", 1.0, 4), ValueUpdate("w", 2.0, 3)])
        assert await store.get("w") == Stamped(7.0, 4)

    run(body())


def test_an_error_in_pull_names_key_and_node_and_the_store_goes_on():
    """The value is as before, and the next update works."""

    async def body():
        async def failing(updates, present):
            for one in updates:
                if one.value < 0:
                    raise PullFailed(one.key, "RuntimeError: negative")
            return await summed(updates, present)

        store = MemoryValues(failing, node="ab12")
        await store.set("w", 5.0)
        with pytest.raises(UpdateFailed, match=r"'w' failed at node ab12: RuntimeError: negative") as caught:
            await store.update([ValueUpdate("w", -1.0), ValueUpdate("v", 1.0)])
        assert (caught.value.key, caught.value.node) == ("w", "ab12")
        assert (await store.get("w")).value == 5.0
        assert (await store.get("v")).value == -1.0
        await store.update([ValueUpdate("w", 1.0)])
        assert (await store.get("w")).value == 4.0

    run(body())


def test_without_a_script_an_update_fails_and_says_so():
    """Nothing is applied where there is no pull."""

    async def body():
        with pytest.raises(UpdateFailed, match="no script"):
            await MemoryValues().update([ValueUpdate("w", 1.0)])

    run(body())


def test_nothing_is_applied_if_one_value_cannot_be_sent():
    """The values are encoded before the first is applied."""

    async def body():
        store = MemoryValues()
        with pytest.raises(ValueNotEncodable, match="'b'"):
            await store.update([ValueUpdate("a", 1, 0, "add"), ValueUpdate("b", object(), 0, "add")])
        assert await store.keys() == []
        with pytest.raises(InvalidKey):
            await store.set("", 1)

    run(body())


def test_add_of_text_fails_and_the_others_of_the_call_count():
    """Every update of a call has its own fate."""

    async def body():
        store = MemoryValues()
        with pytest.raises(UpdateFailed, match="'text'"):
            await store.update([ValueUpdate("text", "a", 0, "add"), ValueUpdate("n", 1, 0, "add")])
        assert await store.get("n") == Stamped(1, 0)

    run(body())
