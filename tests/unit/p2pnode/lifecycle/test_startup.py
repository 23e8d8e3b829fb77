"""How a node gets into training: founding, joining, and starting again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from p2pnode.config.directory_record import RECORD_FILE, DirectoryRecord
from p2pnode.config.settings import Config
from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.entry import REJOIN_TIMEOUT_S
from p2pnode.lifecycle.startup import NO_MODEL_S, Startup
from p2pnode.lifecycle.state_directory import GENESIS_FILE
from p2pnode.overlay.addresses import Address
from p2pnode.overlay.overlay import Overlay
from p2pnode.overlay.peers import Contact, PeerTable
from p2pnode.overlay.transport import TransportError
from p2pnode.training import manifest as manifests
from p2pnode.training.files import checkpoint
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.builders.peers import heartbeat
from tests.harness.environment.simulated import ListLog, MemoryDisk, NoLog, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by
from tests.harness.swarms.status_swarm import simulate
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, initial_vector


@played_by(simulate)
async def test_only_a_node_without_bootstraps_founds(swarm: Swarm) -> None:
    """The first node founds; the one with a bootstrap joins the same swarm and gets its step."""
    first = swarm.start("n0").living
    await swarm.until(lambda: first.progress.step >= 5, within_s=60, what="the first trains")
    second = swarm.start("n1", bootstrap="n0").living
    await swarm.until(lambda: second.state == "training", within_s=60, what="the second trains")

    assert (first.entry.founder, second.entry.founder) == (True, False)
    assert second.overlay.genesis == first.overlay.genesis
    assert second.progress.step >= 5


@played_by(simulate, training__checkpoint_s=1.0)
async def test_a_founder_that_starts_again_resumes_its_swarm_from_disk(swarm: Swarm) -> None:
    """Genesis, identity and step are those of the last checkpoint; the incarnation is the next."""
    host = swarm.start("n0")
    before = host.living
    await swarm.until(lambda: before.progress.step >= 5, within_s=60, what="it trains")
    before.leave()
    assert host.task is not None
    await host.task
    step = before.progress.step

    after = swarm.start("n0").living
    await swarm.until(lambda: after.state == "training", within_s=60, what="it trains again")

    assert after.entry.founder
    assert after.identity.node_id == before.identity.node_id
    assert after.overlay.genesis == before.overlay.genesis
    assert after.incarnation > before.incarnation
    assert after.progress.step >= step


async def leave(host: Host) -> None:
    host.living.leave()
    assert host.task is not None
    await host.task


def with_trainer_states(host: Host) -> list[str]:
    """Give every checkpoint on the disk a trainer's own state, as a real trainer would; returns their folders."""
    folders = checkpoint.complete_folders(host.disk)
    for folder in folders:
        host.disk.files[f"{folder}/trainer.state"] = b"optimiser"
    return folders


@played_by(simulate, training__checkpoint_s=1.0)
async def test_the_trainer_continues_from_the_state_of_the_loaded_checkpoint(swarm: Swarm) -> None:
    """Its file is named when the model is known; a trainer that crashes before the next checkpoint restores it too."""
    swarm.state_path = Path("/state")
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 5, within_s=60, what="it trains")
    await leave(host)
    newest = with_trainer_states(host)[0]

    after = swarm.start("n0", training__checkpoint_s=60.0)
    assert after.trainer is not None
    await swarm.until(lambda: after.living.state == "training", within_s=60, what="it trains again")
    after.trainer.crash_next()
    await swarm.until(lambda: len(after.trainer.restored) == 2, within_s=60, what="the trainer has crashed")

    assert after.trainer.restored == [f"/state/{newest}/trainer.state"] * 2


def test_a_checkpoint_of_another_model_gives_nothing() -> None:
    """Neither its vector nor its optimiser; the new model keeps its own checkpoints, whatever their steps."""
    size = 256

    def make_trainer(name: str) -> StubTrainer:
        return StubTrainer(name, size)

    async def scenario(swarm: Swarm) -> None:
        nonlocal size
        swarm.state_path = Path("/state")
        host = swarm.start("n0")
        await swarm.until(lambda: host.living.progress.step >= 20, within_s=60, what="it trains")
        await leave(host)
        with_trainer_states(host)

        size = 320
        host.disk.remove(RECORD_FILE)  # with it the model would be refused
        after = swarm.start("n0")
        assert after.trainer is not None
        await swarm.until(lambda: after.living.state == "training", within_s=60, what="the new model trains")
        assert after.trainer.restored == []
        passed_over = [record for record in swarm.records if record.event == "checkpoint_passed_over"]
        assert {record.fields["reason"] for record in passed_over} == {"another model or another swarm"}
        assert after.living.progress.step < 20
        await swarm.until(lambda: after.living.progress.step >= 3, within_s=60, what="three steps")
        await leave(after)
        newest = checkpoint.newest(after.disk, ListLog(swarm.records))
        assert newest is not None
        assert newest.state.step == after.living.progress.step < 20

        with_trainer_states(after)
        again = swarm.start("n0")
        await swarm.until(lambda: again.living.state == "training", within_s=60, what="it goes on")
        assert again.living.progress.step >= newest.state.step
        assert again.trainer is not None
        assert again.trainer.restored == [f"/state/{newest.folder}/trainer.state"]

    simulate(scenario, make_trainer=make_trainer, training__checkpoint_s=1.0)


@pytest.mark.parametrize("damage", ["cut", "gone", "unreadable"])
@played_by(simulate, training__checkpoint_s=1.0)
async def test_a_damaged_vector_gives_the_whole_checkpoint_before_it(swarm: Swarm, *, damage: str) -> None:
    """Vector, step and optimiser are those of the older one; nothing of the damaged one is used."""
    swarm.state_path = Path("/state")
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 20, within_s=60, what="it trains")
    await leave(host)
    newest, before = with_trainer_states(host)
    vector = f"{newest}/vector.safetensors"
    if damage == "cut":
        host.disk.tear(vector)
    elif damage == "gone":
        host.disk.remove(vector)
    else:
        host.disk.unreadable.add(vector)

    after = swarm.start("n0")
    assert after.trainer is not None
    await swarm.until(lambda: after.living.state == "training", within_s=60, what="it trains again")
    assert after.trainer.restored == [f"/state/{before}/trainer.state"]
    loaded = [record.fields["step"] for record in swarm.records if record.event == "checkpoint_loaded"]
    # Its shards may have the delta of the step after it, which was exchanged while it was written.
    assert loaded[0] - checkpoint.step_of(before) in (0, 1)
    assert "checkpoint_unreadable" in {record.event for record in swarm.records}


@played_by(simulate)
async def test_a_vector_that_cannot_be_read_to_its_end_leaves_the_models_own_values(swarm: Swarm) -> None:
    """The first half of it is in the trainer's memory when the disk fails: the model writes its own values again."""
    host = swarm.start("n0", training__checkpoint_s=1.0)
    await swarm.until(lambda: host.living.progress.step >= 2, within_s=60, what="it trains")
    await leave(host)
    read_at = host.disk.read_at

    def fails(name: str, offset: int, size_bytes: int) -> bytes:
        piece = read_at(name, offset, size_bytes)
        return piece[: size_bytes // 2] if size_bytes == 1024 else piece

    host.disk.read_at = fails  # type: ignore[method-assign]
    after = swarm.start("n0")
    assert after.trainer is not None
    await swarm.until(lambda: after.trainer.starts > 0, within_s=60, what="the trainer has started")
    assert np.array_equal(after.trainer.vector, initial_vector(0, 256))
    assert "checkpoint_unreadable" in {record.event for record in swarm.records}


async def end(swarm: Swarm, *names: str) -> None:
    """Have these nodes leave, and wait until they have."""
    for name in names:
        swarm.hosts[name].living.leave()
    await swarm.until(
        lambda: not {host.name for host in swarm.running()} & set(names), within_s=30, what="they have left"
    )


@played_by(simulate, training__checkpoint_s=1.0)
async def test_a_founder_whose_only_bootstrap_is_itself_founds(swarm: Swarm) -> None:
    """One configuration for all machines names the founder, also to itself: it founds, the others join it, and it
    returns to its swarm, or opens it again, with the same setting. No fault of the bootstrap stays in its status."""
    founder = swarm.start("n0", bootstrap="n0").living
    member = swarm.start("n1", bootstrap="n0").living
    await swarm.until(lambda: member.state == "training", within_s=60, what="both train")
    assert (founder.entry.founder, member.entry.founder) == (True, False)
    assert founder.overlay.failures == {}

    await end(swarm, "n0")
    back = swarm.start("n0", bootstrap="n0").living
    await swarm.until(lambda: back.state == "training", within_s=60, what="it is back")
    assert not back.entry.founder
    assert back.overlay.genesis == member.overlay.genesis

    await end(swarm, "n0", "n1")
    alone = swarm.start("n0", bootstrap="n0").living
    await swarm.until(lambda: alone.state == "training", within_s=60, what="it opens its swarm again")
    assert alone.entry.founder
    assert alone.overlay.genesis == member.overlay.genesis
    assert swarm.of("not_this_swarm") == []


@pytest.mark.parametrize("names_founder", [False, True])
@played_by(simulate, training__checkpoint_s=1.0)
async def test_only_the_founder_opens_a_swarm_again(swarm: Swarm, *, names_founder: bool) -> None:
    """A member that starts while nobody answers, as a laptop without its network does, waits and says so, for an hour
    if need be, with or without its bootstrap; once the founder is back it joins and goes on."""
    swarm.start("n0")
    member = swarm.start("n1", bootstrap="n0").living
    await swarm.until(lambda: member.state == "training", within_s=60, what="both train")
    genesis = member.overlay.genesis
    await end(swarm, "n0", "n1")

    laptop = swarm.start("n1", bootstrap="n0" if names_founder else None).living
    await swarm.until(lambda: laptop.entry.waits_for_swarm, within_s=REJOIN_TIMEOUT_S + 1, what="it says that it waits")
    await swarm.until(lambda: swarm.clock.monotonic() > 400, within_s=600, what="minutes pass")
    assert (laptop.state, laptop.entry.founder, laptop.progress.step) == ("joining", False, laptop.progress.step)
    assert laptop.overlay.genesis is None
    (waiting,) = swarm.of("waiting_for_swarm")
    assert "--reopen" in waiting.fields["hint"]

    founder = swarm.start("n0").living
    await swarm.until(lambda: laptop.state == "training", within_s=60, what="both train again")
    assert (founder.entry.founder, laptop.entry.founder, laptop.entry.waits_for_swarm) == (True, False, False)
    assert laptop.overlay.genesis == founder.overlay.genesis == genesis


@played_by(simulate)
async def test_a_founder_that_is_told_of_a_member_waits_for_it(swarm: Swarm) -> None:
    """Its swarm may go on there: it opens it only when it is started without that address."""
    founder = swarm.start("n0").living
    member = swarm.start("n1", bootstrap="n0").living
    await swarm.until(lambda: member.state == "training", within_s=60, what="both train")
    await end(swarm, "n0", "n1")

    told = swarm.start("n0", bootstrap="n1").living
    await swarm.until(lambda: told.entry.waits_for_swarm, within_s=REJOIN_TIMEOUT_S + 1, what="it says that it waits")
    await asyncio.sleep(60.0)
    assert (told.state, told.entry.founder) == ("joining", False)

    await end(swarm, "n0")
    again = swarm.start("n0").living
    await swarm.until(lambda: again.state == "training", within_s=60, what="it opens its swarm")
    assert again.overlay.genesis == founder.overlay.genesis


@played_by(simulate, training__checkpoint_s=1.0)
async def test_a_member_opens_the_swarm_of_a_lost_founder_on_request(swarm: Swarm) -> None:
    """With --reopen it goes on from its own state, is a founder from then on, and does so without being asked again."""
    swarm.start("n0")
    member = swarm.start("n1", bootstrap="n0").living
    await swarm.until(lambda: member.progress.step >= 5, within_s=60, what="both train")
    genesis, step = member.overlay.genesis, member.progress.step
    await end(swarm, "n0", "n1")

    for reopens in (True, False):
        again = swarm.start("n1", bootstrap="n0" if reopens else None, reopens=reopens).living
        await swarm.until(lambda node=again: node.state == "training", within_s=60, what="it trains alone")
        assert again.entry.founder
        assert again.overlay.genesis == genesis
        assert again.progress.step >= step
        await end(swarm, "n1")


@played_by(simulate)
async def test_there_must_be_a_swarm_to_open_again(swarm: Swarm) -> None:
    """--reopen on a new state directory is an error, not a new swarm."""
    task = swarm.start("n0", reopens=True).task
    assert task is not None
    with pytest.raises(UserError, match="no swarm to open again"):
        await task


@pytest.mark.parametrize("bootstrap", [None, "n1"])
@played_by(simulate)
async def test_a_member_that_knows_no_address_is_told(swarm: Swarm, *, bootstrap: str | None) -> None:
    """Without stored peers, and with no bootstrap but its own address, nobody can be dialled: the start ends and says
    what to give."""
    swarm.start("n0")
    member = swarm.start("n1", bootstrap="n0").living
    await swarm.until(lambda: member.state == "training", within_s=60, what="both train")
    await end(swarm, "n0", "n1")
    swarm.hosts["n1"].disk.remove("peers.json")

    task = swarm.start("n1", bootstrap=bootstrap).task
    assert task is not None
    with pytest.raises(UserError, match="knows no address of another member") as refused:
        await task
    assert refused.value.exit_code == ExitCode.CONFIGURATION


def test_another_model_is_refused_and_costs_nothing() -> None:
    """A start with a changed model ends with what to do, and the next one with the right model goes on where it was."""
    sizes: dict[str, int] = {}

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0")
        await swarm.until(lambda: host.living.progress.step >= 5, within_s=60, what="it trains")
        await end(swarm, "n0")
        step = host.living.progress.step
        kept = {name: content for name, content in host.disk.files.items() if name != "incarnation"}

        sizes["n0"] = 1000
        task = swarm.start("n0").task
        assert task is not None
        with pytest.raises(UserError, match=r'its "weight" is \d+, and here it is 1000') as refused:
            await task
        assert refused.value.exit_code == ExitCode.MISMATCH
        assert {name: content for name, content in host.disk.files.items() if name != "incarnation"} == kept

        del sizes["n0"]
        again = swarm.start("n0").living
        await swarm.until(lambda: again.state == "training", within_s=60, what="it trains again")
        assert again.progress.step >= step

    simulate(scenario, make_trainer=lambda name: StubTrainer(name, sizes.get(name, 256)), training__checkpoint_s=1.0)


@played_by(simulate, training__checkpoint_s=1.0)
async def test_only_a_founder_opens_a_swarm_in_which_no_node_has_the_model(swarm: Swarm) -> None:
    """A member that enters through a master waits for the founder; this one opens the run, and the member joins."""
    founder = swarm.start("n0")
    swarm.start("n1", bootstrap="n0")
    swarm.start("m", bootstrap="n0", node__role="master", dispatch__source="master")
    await swarm.until(lambda: founder.living.progress.step >= 5, within_s=60, what="it trains")
    await asyncio.sleep(5.0)
    await swarm.kill("n0")
    await swarm.kill("n1")

    member = swarm.start("n1", bootstrap="m")
    await asyncio.sleep(3 * NO_MODEL_S)
    assert (member.living.phase, swarm.of("swarm_without_model")) == ("joining", [])

    swarm.start("n0", bootstrap="m")
    await swarm.until(lambda: member.living.phase == "training", within_s=60, what="the member trains")
    assert [record.node for record in swarm.of("swarm_without_model")] == ["n0"]


@played_by(simulate, training__checkpoint_s=1.0)
async def test_a_founder_opens_nothing_while_a_silent_node_may_have_the_model(
    swarm: Swarm, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that does not answer the question for the manifest may train; the founder joins it when it does."""

    async def silent(_swarm: object, peer: Contact, _proposal: object, *, adopts_shards: bool) -> None:
        raise TransportError("timeout", peer.address, "was silent")

    swarm.start("n0")
    other = swarm.start("n1", bootstrap="n0")
    await swarm.until(lambda: other.living.progress.step >= 5, within_s=60, what="both train")
    await swarm.kill("n0")
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "compare_with", silent)
        founder = swarm.start("n0", bootstrap="n1")
        await asyncio.sleep(3 * NO_MODEL_S)
        assert founder.living.phase == "joining"

    await swarm.until(lambda: founder.living.phase == "training", within_s=10, what="it joined")
    assert swarm.of("swarm_without_model") == []


def test_a_member_that_is_gone_while_another_answers_is_asked_at_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known of it must not be read afterwards."""
    peers, asked = PeerTable(), list[str]()

    async def gone(_swarm: object, peer: Contact, _proposal: object, *, adopts_shards: bool) -> None:
        asked.append(str(peer.address))
        for node_id in peers.ids():
            peers.remove(node_id)
        raise TransportError("timeout", peer.address, "was silent")

    async def scenario() -> None:
        environment: Any = SimpleNamespace(clock=VirtualClock(), log=NoLog(), reopens=False)
        directory: Any = SimpleNamespace(record=DirectoryRecord(founder=False))
        overlay: Any = SimpleNamespace(members=lambda: list(peers), refusal="")
        nothing: Any = None
        startup = Startup(Config(), environment, overlay, nothing, nothing, directory, nothing)
        for number in (1, 2):
            peers.observe(heartbeat(bytes([number]) * 20), Address(f"10.0.0.{number}", 8468), 0.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await startup._ask_members(nothing, adopts_shards=False)

    monkeypatch.setattr(manifests, "compare_with", gone)
    run(scenario())
    assert asked == ["10.0.0.1:8468", "10.0.0.2:8468"]


def test_a_founder_has_its_genesis_on_disk_before_others_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut between the two would leave them with a swarm that nobody can open again."""
    on_disk: list[bool] = []
    found = Overlay.found

    async def scenario(swarm: Swarm) -> None:
        def look(overlay: Overlay, genesis: bytes) -> None:
            on_disk.append(swarm.hosts["n0"].disk.files.get(GENESIS_FILE) == genesis)
            found(overlay, genesis)

        monkeypatch.setattr(Overlay, "found", look)
        founder = swarm.start("n0").living
        await swarm.until(lambda: founder.state == "training", within_s=60, what="it trains")

    simulate(scenario)
    assert on_disk == [True]


@pytest.mark.parametrize("is_told", [False, True])
def test_a_founder_that_has_told_others_of_its_swarm_opens_it_in_its_next_start(is_told: bool) -> None:
    """They have entered it, and enter no other one: the failed first start leaves them a state directory. Without them
    it leaves nothing, so that the directory is emptied."""
    failure: TrainerFailed | None = TrainerFailed("a typing error", "see the script")

    def make_trainer(name: str) -> StubTrainer:
        trainer = StubTrainer(name, start_s=5.0)
        trainer.fail_start = failure if name == "n0" else None
        return trainer

    async def scenario(swarm: Swarm) -> None:
        nonlocal failure
        founder = swarm.start("n0")
        joiner = swarm.start("n1", bootstrap="n0") if is_told else None
        assert founder.task is not None
        with pytest.raises(UserError, match="a typing error"):
            await founder.task
        assert (RECORD_FILE in founder.disk.files) is is_told
        if joiner is None:
            return

        failure = None
        again = swarm.start("n0").living
        await swarm.until(
            lambda: (again.state, joiner.living.state) == ("training", "training"), within_s=60, what="both train"
        )
        assert again.overlay.genesis == joiner.living.overlay.genesis

    simulate(scenario, make_trainer=make_trainer)


@played_by(simulate, make_trainer=lambda name: StubTrainer(name, start_s=5.0))
async def test_a_joiner_of_a_swarm_that_was_given_up_ends_and_joins_the_next(swarm: Swarm) -> None:
    """Its founder begins anew on an empty disk, before it had a model: the joiner says so instead of waiting."""
    swarm.start("n0")
    joiner = swarm.start("n1", bootstrap="n0")
    await swarm.until(lambda: joiner.living.overlay.genesis is not None, within_s=4, what="it has entered")
    await swarm.kill("n0")
    swarm.hosts["n0"].disk = MemoryDisk()
    founder = swarm.start("n0").living
    assert joiner.task is not None
    with pytest.raises(UserError, match="belongs to another swarm") as refused:
        async with asyncio.timeout(60):
            await joiner.task
    assert refused.value.exit_code == ExitCode.MISMATCH

    again = swarm.start("n1", bootstrap="n0").living
    await swarm.until(lambda: (again.state, founder.state) == ("training", "training"), within_s=60, what="both")


@played_by(simulate, training__checkpoint_s=1.0)
async def test_a_run_has_the_shards_that_its_founder_has_chosen(swarm: Swarm) -> None:
    """Joiners that were given no number have the founder's and train with it; one that was given another is refused,
    and told what to do. A founder that starts again has the number of before, and refuses one that is no multiple."""
    first = swarm.start("n0", exchange__shards=12).living
    second = swarm.start("n1", bootstrap="n0").living
    same = swarm.start("n2", bootstrap="n0", exchange__shards=12).living
    nodes = (first, second, same)
    await swarm.until(lambda: min(node.progress.step for node in nodes) >= 5, within_s=60, what="all train")
    assert [len(node.exchange.store) for node in nodes] == [12, 12, 12]
    assert [node.startup.shards_by for node in nodes] == ["setting", "swarm", "setting"]
    assert second.manifest == first.manifest

    task = swarm.start("n3", bootstrap="n0", exchange__shards=24).task
    assert task is not None
    with pytest.raises(UserError, match="shards: mine 24, theirs 12") as refused:
        await task
    assert refused.value.exit_code == ExitCode.MISMATCH
    assert "leave exchange.shards out" in refused.value.hint

    await end(swarm, "n0", "n1", "n2")
    task = swarm.start("n0", exchange__shards=18).task
    assert task is not None
    with pytest.raises(UserError, match=r"exchange\.shards = 18, .* has 12 shards") as refused:
        await task
    assert (refused.value.exit_code, "leave exchange.shards out" in refused.value.hint) == (ExitCode.MISMATCH, True)

    again = swarm.start("n0", training__min_nodes=9).living
    await swarm.until(lambda: again.state == "waiting_for_nodes", within_s=60, what="it has opened its swarm")
    assert (len(again.exchange.store), again.startup.shards_by) == (12, "earlier")
    chosen = [(one.node, one.fields["shards"], one.fields["by"]) for one in swarm.of("shards_chosen")]
    assert sorted(chosen) == [
        ("n0", 12, "earlier"),
        ("n0", 12, "setting"),
        ("n1", 12, "swarm"),
        ("n2", 12, "setting"),
    ]


@played_by(simulate, training__min_nodes=20)
async def test_a_founder_chooses_shards_for_the_nodes_that_it_waits_for(swarm: Swarm) -> None:
    """Four for each, in a power of two: here 80, so 128."""
    founder = swarm.start("n0").living
    await swarm.until(lambda: founder.state == "waiting_for_nodes", within_s=60, what="it waits")
    assert (len(founder.exchange.store), founder.startup.shards_by) == (128, "model")


@pytest.mark.parametrize(("free", "limit"), [(None, 512 << 20), (1 << 30, 512 << 20), (8 << 30, 2 << 30)])
@played_by(simulate)
async def test_a_node_owns_named_values_of_a_quarter_of_its_free_memory(
    swarm: Swarm, *, free: int | None, limit: int
) -> None:
    """At its start, and of 512 MiB at least."""
    swarm.available_memory = free
    node = swarm.start("n0").living
    await swarm.until(lambda: node.exchange is not None, within_s=30, what="it has an exchange")
    assert node.exchange.values.handler.rounds.limit_bytes == limit
