"""Pulls of real exchanges: what is sent, what a broken line leaves, what a joiner does about it, and final values."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.transport import TransportError
from p2pnode.training.encoding import codecs
from p2pnode.training.exchange.messages import LocateOwners, LocateOwnersAnswer, Pull, PullAnswer, Wanted
from p2pnode.training.exchange.ownership_messages import ReplicasAnswer, ShardList
from p2pnode.training.exchange.terms import ZERO_TERM, Fence, Term
from tests.harness.environment.simulated import InlineExecutor
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.exchange_story import BOUND_S, ONES, ask, simulate, striking
from tests.harness.swarms.exchange_swarm import World
from tests.harness.swarms.light_network import Links

# -- a step -----------------------------------------------------------------------------------------------------------


@played_by(simulate, nodes=6, shards=4, owners=2, pull_codec="bfloat16")
async def test_only_what_has_changed_is_sent_and_each_version_is_encoded_once(
    world: World, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second pull brings nothing, one after a delta brings everything, whoever asks."""
    encoded: list[str] = []
    encode = codecs.encode

    def counted(values: Any, codec: Any) -> Any:
        encoded.append(codec)
        return encode(values, codec)

    monkeypatch.setattr(codecs, "encode", counted)
    owners = {world.owner(shard).name for shard in range(4)}
    pullers = [one for one in world.running() if one.name not in owners]
    assert len(pullers) >= 2
    await pullers[0].push(1)
    for step in (1, 2):
        encoded.clear()
        for one in pullers:
            report = await one.exchange.pull(step)
            assert (report.changed, report.unchanged, report.missing) == (4, [], [])
            assert one.exchange.replica.vector.tolist() == world.model().tolist()
            assert len((await one.exchange.pull(step)).unchanged) == 4
        assert encoded == ["bfloat16"] * 4
        await pullers[1].push(step + 1)


@played_by(simulate, nodes=4, shards=16, values=32, owners=3, pull_codec="float32")
async def test_of_broken_answers_whole_shards_are_kept_and_no_more_is_sent_again(world: World) -> None:
    """Each body is cut somewhere. What has arrived is not asked for again."""
    puller = next(one for one in world.running() if len(one.exchange.store.owned) < 4)
    await puller.push(1)
    others = [shard for shard in range(16) if world.owner(shard) is not puller]
    before = puller.exchange.counters.bytes_received
    world.links = Links(torn=1.0)
    for step in range(1, 20):
        if not (await puller.exchange.pull(step)).missing:
            break
    assert puller.exchange.replica.vector.tolist() == [1.0] * 32
    assert puller.exchange.counters.bytes_received - before == len(others) * 2 * 4


@played_by(simulate, nodes=4, shards=16, values=32, pull_codec="float32")
async def test_a_pull_lasts_as_long_as_shards_come(world: World) -> None:
    """Attempts of two seconds each bring two of sixteen shards: together they last longer than the silence that would
    end the pull."""
    puller = world.bystander()
    await puller.push(1)
    world.links = Links(delay_s=(0.9, 0.9))

    def cut(buffers: list[bytes]) -> bool:
        is_cut = len(buffers) > 4
        del buffers[4:]
        return is_cut

    world.tear = cut
    began_s = world.clock.monotonic()
    assert (await puller.exchange.pull(1)).missing == []
    assert world.clock.monotonic() - began_s > 8 * 1.8 - 0.1


@played_by(simulate, nodes=4, pull_codec="float32")
async def test_a_step_goes_on_with_what_it_has_where_an_owner_serves_nothing(world: World) -> None:
    """Its pull ends after the deadline. Only a joiner is sent copies of other nodes, which may lack the last deltas."""
    to, puller = world.owner(), world.bystander()
    mine = [shard for shard in range(2) if world.owner(shard) is to]
    await puller.push(1)
    await puller.exchange.pull(1)
    await puller.push(2)
    with striking(world.unanswered, "pull", to=to):
        began_s = world.clock.monotonic()
        report = await puller.exchange.pull(2)
        assert 5.0 <= world.clock.monotonic() - began_s < 6.0
    assert report.missing == mine
    assert [puller.exchange.replica.slice_of(shard)[0] for shard in mine] == [1.0] * len(mine)
    (unfinished,) = world.of("pull_unfinished")
    assert unfinished.fields["shards"] == len(mine)
    assert (await puller.exchange.pull(3)).missing == []


@played_by(simulate, nodes=4, shards=1, pull_codec="float32", replicas=1)
async def test_a_value_of_a_take_over_ranks_as_the_copy_that_it_began_with(world: World) -> None:
    """A replica of it must not rank above a copy of the pair of before, on another disk."""
    puller, former = world.bystander(), world.owned().term
    await puller.push(1)
    copy = world.backup()
    await world.kill(world.owner().name)
    await world.until(lambda: 0 in copy.exchange.store.owned, within_s=BOUND_S, what="a take-over")
    assert (await puller.exchange.pull(2)).missing == []
    term, _ = puller.exchange.replica.version_of(0)
    assert former <= term < world.owned().term
    await puller.push(3)
    await puller.exchange.pull(3)
    assert puller.exchange.replica.version_of(0)[0] == world.owned().term


# -- publications -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("synchronous", "versions"), [(False, [0, 1, 1, 2, 2]), (True, [2, 3, 4, 5, 6])])
def test_versions_are_as_far_apart_as_the_followers_can_bear(synchronous: bool, versions: list[int]) -> None:
    """For a change of a byte per value the median step of 10 s; half of it for a follower that has the present version.
    Under bsp each barrier has a version."""

    async def scenario(world: World) -> None:
        world.training = False
        to, current = world.owner(), world.bystander()
        behind = next(one for one in world.running() if one not in (to, current, world.backup()))
        for one in world.running():
            one.overlay.step, one.overlay.step_seconds = 1, 10.0
            world.spread(one)
        await asyncio.sleep(3.0)
        step, found = 0, []

        async def pulled(member: Any) -> int:
            nonlocal step
            step += 1
            await to.exchange.push(step, step - 1, 1.0, ONES.copy())
            await member.exchange.pull(step)
            published = to.exchange.publisher.published(0)
            assert published is not None
            return published.version

        await pulled(current)
        first = await pulled(current)
        assert await pulled(behind) >= first
        for wait_s, member in [(4.0, current), (2.0, current), (6.0, behind), (3.0, behind), (2.0, behind)]:
            await asyncio.sleep(wait_s - 0.2)
            found.append(await pulled(member) - first)
        assert found == versions

    simulate(scenario, nodes=4, shards=1, codec="int8", tenure_s=600.0, synchronous=synchronous)


@played_by(simulate, nodes=4, shards=8, values=32, codec="int8", owners=2)
async def test_while_whole_values_are_chosen_a_publication_rests(
    world: World, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pull asks what is chosen. Values are computed a part at a time, beside the loop; of two that ask at once the
    second is sent the version of the first."""
    monkeypatch.setattr("p2pnode.training.exchange.owner.publishing.VALUES_PER_PART", 2)
    parts: list[int] = []
    run_in_thread = InlineExecutor.run

    async def noted(self: InlineExecutor, function: Any, /, *arguments: Any, **options: Any) -> Any:
        if getattr(function, "__name__", "") == "_made":
            parts.append(len(arguments[0]))
            await asyncio.sleep(0.2)
        return await run_in_thread(self, function, *arguments, **options)

    monkeypatch.setattr(InlineExecutor, "run", noted)
    to = world.owner()
    others = [one for one in world.running() if one is not to]
    publisher = to.exchange.publisher
    mine = [shard for shard in range(8) if world.owner(shard) is to]
    await others[0].push(1)
    parts.clear()
    await asyncio.gather(*(one.exchange.pull(1) for one in others))
    assert set(parts) == {1}
    versions = {one.exchange.replica.position_of(mine[0]) for one in others}
    assert len(versions) == 1
    to.exchange.codec.codec = "bfloat16"
    await others[0].push(2)
    await others[0].exchange.pull(2)
    assert publisher.published(mine[0]) is None
    assert others[0].exchange.replica.slice_of(mine[0])[0] == 3.0
    to.exchange.codec.codec = "int8"
    assert publisher.published(mine[0]) is not None


# -- a joiner ---------------------------------------------------------------------------------------------------------


@played_by(simulate, nodes=4, pull_codec="float32")
async def test_a_joiner_takes_from_others_what_an_owner_does_not_send(world: World) -> None:
    """From the backup or a replica; as old copies, so that the next pull brings the owner's own."""
    await world.bystander().push(1)
    for one in world.running():
        await one.exchange.pull(1)
    with striking(world.unanswered, "pull", to=world.owner()):
        joiner = await asyncio.wait_for(world.join("late"), 60.0)
    assert joiner.exchange.replica.vector.tolist() == [1.0] * 8
    mine = [shard for shard in range(2) if world.owner(shard) is world.owner()]
    assert [joiner.exchange.replica.version_of(shard)[1] for shard in mine] == [0] * len(mine)
    report = await joiner.exchange.pull(2)
    assert report.changed == len(mine)


@pytest.mark.parametrize("codec", ["float32", "int8"])
@played_by(simulate, nodes=4, pull_codec=Fixture("codec"))
async def test_a_joiner_gets_every_bit_over_a_line_that_breaks(world: World, *, codec: str) -> None:
    """It asks again for what was torn."""
    world.links = Links(torn=0.6)
    await world.bystander().exchange.push(1, 0, 1.0, 3 * ONES)
    joiner = await asyncio.wait_for(world.join("late"), 200.0)
    world.links = Links()
    assert await world.bystander().exchange.flush(60.0) == 0
    assert (await joiner.exchange.pull(2)).missing == []
    for shard in range(2):
        published = world.owner(shard).exchange.publisher.published(shard)
        expected = world.owned(shard).state.value if codec == "float32" else published.value
        assert joiner.exchange.replica.slice_of(shard).tobytes() == expected.tobytes()


@played_by(simulate, nodes=4)
async def test_a_joiner_that_its_first_peer_does_not_answer_is_told_so(world: World) -> None:
    """It asks another one, and learns all owners from it."""
    with striking(world.rejected, "where_is"), pytest.raises(TransportError):
        await world.join("late")
    late, other = world.members["late"], world.bystander()
    await late.exchange.directory.learn_all(other.contact)
    groups, unknown = late.exchange.directory.by_owner(range(2))
    assert {one.node_id: theirs for one, theirs in groups} == {
        world.owner(shard).contact.node_id: [s for s in range(2) if world.owner(s) is world.owner(shard)]
        for shard in range(2)
    }
    assert unknown == []


# -- what nodes tell each other --------------------------------------------------------------------------------------


@played_by(simulate, nodes=4, shards=1)
async def test_a_node_answers_with_what_it_has_and_names_the_owner_of_the_rest(world: World) -> None:
    """Pulls, searches for owners, surveys. A fence that nobody owns is raised above by the owner that hears of it."""
    member, copy, to = world.bystander(), world.backup(), world.owner()
    await member.push(1)
    node = to.contact.node_id

    async def pulled(one: Any, *, takes_copies: bool = False) -> tuple[str, bytes | None]:
        message = Pull(1, "float32", [Wanted(0, ZERO_TERM, 0)], [], takes_copies)
        (result,) = (await ask(member, one, "pull", message, PullAnswer)).results
        return result.status, result.owner_info and result.owner_info.owner

    assert await pulled(to) == ("value", None)
    assert await pulled(copy) == ("redirect", node)
    assert await pulled(copy, takes_copies=True) == ("copy", None)

    survey = ShardList([0, 99])
    roles = {}
    for one in (to, copy, member):
        answer = await ask(member, one, "query_replicas", survey, ReplicasAnswer)
        roles[one.name] = [status.role for status in answer.statuses]
    assert roles == {to.name: ["owner"], copy.name: ["backup"], member.name: ["replica"]}

    term = world.owned().term
    question = LocateOwners([0], [], [Fence(0, Term(term.number + 7, b"z" * 20))])
    answer = await ask(member, to, "where_is", question, LocateOwnersAnswer)
    assert [info.owner for info in answer.known] == [node]
    await world.until(lambda: world.owned().term.number > term.number + 7, within_s=5.0, what="a higher term")
    assert world.owner() is to
    assert world.value() == [1.0]


# -- the end of a run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [False, True])
@played_by(simulate, nodes=4, synchronous=Fixture("synchronous"))
async def test_all_nodes_get_the_same_final_bits_which_the_backups_have_too(world: World) -> None:
    """A backup with other bits is replaced first. Under bsp the deltas of the last step are visible. What is confirmed
    is not compared again until it changes."""
    for number, one in enumerate(world.running()):
        await one.push(1, 0.1 * (1 + number))
    state = world.backup().exchange.store.backed[0].state
    assert state is not None
    state.value[1] = np.nextafter(state.value[1], np.float32(9.0))
    names: list[str] = []
    world.observers.append(lambda _sender, _receiver, name, _payload: names.append(name))
    found = set()
    for one in world.running():
        assert (await one.exchange.pull_final(1, 60.0)).missing == []
        found.add(one.exchange.replica.vector.tobytes())
    assert found == {world.model().tobytes()}
    assert world.paired()
    compared = names.count("compare")
    for one in world.running():
        await one.exchange.pull_final(1, 60.0)
    assert names.count("compare") == compared <= 6
    assert np.allclose(world.model(), 1.0)


@played_by(simulate, nodes=3, shards=1)
async def test_a_final_value_waits_for_the_backup_and_for_a_delta_that_comes_meanwhile(world: World) -> None:
    """A backup that does not answer keeps its place, for it may have the same bits: who asks is told to wait."""
    await world.bystander().push(1)
    copy, term = world.backup(), world.owned().term
    with striking(world.unanswered, "compare"):
        assert (await world.bystander().exchange.pull_final(1, 5.0)).missing == [0]
    assert (world.backup(), world.owned().term) == (copy, term)
    pulling = asyncio.ensure_future(world.bystander().exchange.pull_final(2, 30.0))
    await world.owner().exchange.push(2, 1, 1.0, ONES.copy())
    assert (await pulling).missing == []
    await world.bystander().exchange.pull_final(2, 30.0)
    assert world.bystander().exchange.replica.vector.tolist() == [2.0] * 8
    final, mine = world.owner().exchange.final_values, world.owned()
    assert final.is_final(0)
    mine.moving = True  # it is about to change
    assert not final.is_final(0)
    assert not world.bystander().exchange.final_values.is_final(0)


def test_without_a_backup_a_value_is_final_where_nobody_could_be_one() -> None:
    """A node alone; with others it waits for a backup."""

    async def alone(world: World) -> None:
        assert (await world.owner().exchange.pull_final(1, 5.0)).missing == []

    async def with_others(world: World) -> None:
        with striking(world.rejected, "learn"):
            await world.kill(world.backup().name)
            assert (await world.owner().exchange.pull_final(1, 8.0)).missing == [0]
        assert (await world.owner().exchange.pull_final(1, 20.0)).missing == []

    simulate(alone, nodes=1, shards=1)
    simulate(with_others, nodes=3, shards=1)


@played_by(simulate, nodes=4, shards=1)
async def test_all_nodes_take_the_buffers_of_one_owner_which_its_backup_keeps(world: World) -> None:
    """Those that it has named first, also when it dies: its backup names the same. Nobody names any before."""
    first, copy = world.owner(), world.backup()
    others = [one for one in world.running() if one is not first]

    async def agreed(one: Any, timeout_s: float = BOUND_S) -> bytes | None:
        return await one.exchange.final_values.agree_on_buffers(one.name.encode(), timeout_s)

    began_s = world.clock.monotonic()
    assert await agreed(others[0], 3.0) is None
    assert world.clock.monotonic() - began_s == pytest.approx(3.0)
    with striking(world.unanswered, "final_buffers", to=copy):
        assert await agreed(first, 2.0) is None
    assert await agreed(first) == first.name.encode()
    await world.kill(first.name)
    found = await asyncio.gather(*(agreed(one, 2 * BOUND_S) for one in others))
    assert set(found) == {first.name.encode()}
