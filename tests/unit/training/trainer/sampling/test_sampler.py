"""`swarm.sampler` under a `DataLoader`, with the daemon's decisions in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from p2pnode.training.sharing.messages import ShareData
from p2pnode.training.trainer.connection import DaemonGone
from p2pnode.training.trainer_link.data_messages import DataTrained, DataWanted
from tests.harness.stubs.shared_data import DirectConnection, Script


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def epoch(script: Script, loader: Any, *, batches: int | None = None) -> list[int]:
    """Train one iteration of a loader, or so many batches of it; returns the samples in order."""
    seen: list[int] = []
    for number, batch in enumerate(loader):
        if number == batches:
            break
        seen += [int(sample) for sample in batch]
        script.step(len(batch))
    return seen


def meet(*scripts: Script) -> None:
    """All members exchange statements, twice."""
    for _ in range(2):
        for asking in scripts:
            for asked in scripts:
                if asking is not asked:
                    request = asking.member.request()
                    asked.member.on_message(asking.member.node_id, request, 0.0)
                    answer: ShareData = asked.member.answer(request)
                    asking.member.on_message(asked.member.node_id, answer, 0.0)


@pytest.mark.parametrize("size", [1, 5, 100, 2500])
def test_a_node_alone_trains_every_sample_of_each_epoch_once(size: int) -> None:
    """Each iteration is a permutation of the data set, and two epochs have different orders."""
    script = Script()
    loader = DataLoader(Numbers(size), batch_size=16, sampler=script.data.sampler(size, shuffle=True, nodes=1.0))

    first, second = epoch(script, loader), epoch(script, loader)

    assert sorted(first) == sorted(second) == list(range(size))
    assert size < 10 or first != second


def test_what_another_node_trains_too_is_in_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are more nodes than samples, and this one has none of its own."""
    script = Script()
    loader = DataLoader(Numbers(5), batch_size=1, sampler=script.data.sampler(5, shuffle=True, nodes=9.0))
    monkeypatch.setattr(script.member, "claim", lambda *_: [])

    assert len(epoch(script, loader)) == 1

    assert not any(message.trained for message in script.connection.sent if isinstance(message, DataTrained))


def test_a_large_batch_asks_for_its_samples_at_once() -> None:
    """After the first step a question covers a step, so that it costs one round trip and not a hundred."""
    script = Script()
    loader = DataLoader(Numbers(2000), batch_size=500, sampler=script.data.sampler(2000, shuffle=True, nodes=1.0))
    epoch(script, loader)
    before = len(script.connection.sent)

    epoch(script, loader)

    questions = [message for message in script.connection.sent[before:] if isinstance(message, DataWanted)]
    assert len(questions) <= 6


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    """`shuffle=False` gives 0, 1, 2, …"""
    script = Script()
    loader = DataLoader(Numbers(3000), batch_size=64, sampler=script.data.sampler(3000, shuffle=False, nodes=1.0))

    assert epoch(script, loader) == list(range(3000))


def test_two_nodes_share_an_epoch() -> None:
    """Together they train every sample once, each about half, and with the usual `torch.manual_seed(0)` on both."""
    torch.manual_seed(0)
    scripts = [Script(DirectConnection(name * 20)) for name in (b"a", b"b")]
    loaders = [
        DataLoader(Numbers(2000), batch_size=10, sampler=script.data.sampler(2000, shuffle=True, nodes=2.0))
        for script in scripts
    ]
    meet(*scripts)

    parts = [epoch(script, loader) for script, loader in zip(scripts, loaders, strict=True)]

    assert Counter(parts[0] + parts[1]) == Counter(range(2000))
    assert min(map(len, parts)) > 800


@pytest.mark.parametrize("workers", [0, 2])
def test_what_was_fetched_and_not_trained_comes_again(workers: int) -> None:
    """After a loop that breaks off while workers have fetched further, the next trains the rest, and nothing twice."""
    script = Script()
    loader = DataLoader(
        Numbers(300),
        batch_size=8,
        num_workers=workers,
        persistent_workers=bool(workers),
        sampler=script.data.sampler(300, shuffle=True, nodes=1.0),
    )

    first = epoch(script, loader, batches=10)
    assert script.member.ledger.trained[0, 0].bit_count() == 80
    rest = epoch(script, loader)

    assert len(first) == 80
    assert Counter(first + rest) == Counter(range(300))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_of_a_given_length_goes_on_with_the_next_epochs(workers: int) -> None:
    """All batches are full, nothing is trained twice in an epoch, and `drop_last` or a break drops nothing."""
    script = Script()
    sampler = script.data.sampler(50, shuffle=True, nodes=1.0)
    sampler.length = 128
    loader = DataLoader(Numbers(50), batch_size=16, num_workers=workers, sampler=sampler)

    first, second, third = epoch(script, loader), epoch(script, loader, batches=3), epoch(script, loader)

    assert len(loader) == 8
    assert (len(first), len(second), len(third)) == (128, 48, 128)
    trained = first + second + third
    for begin in range(0, 300, 50):
        assert sorted(trained[begin : begin + 50]) == list(range(50))


def test_two_nodes_share_epochs_of_a_given_length() -> None:
    """Each trains as many samples as the data set has, and both together every sample twice."""
    scripts = [Script(DirectConnection(name * 20)) for name in (b"a", b"b")]
    samplers = [script.data.sampler(2000, shuffle=True, nodes=2.0) for script in scripts]
    for sampler in samplers:
        sampler.length = 2000
    meet(*scripts)

    loaders = [DataLoader(Numbers(2000), batch_size=10, sampler=sampler) for sampler in samplers]
    parts: list[list[int]] = [[], []]
    for batches in zip(*loaders, strict=True):  # at one pace
        for part, batch, script in zip(parts, batches, scripts, strict=True):
            part += [int(sample) for sample in batch]
            script.step(len(batch))
        meet(*scripts)

    counts = Counter(parts[0] + parts[1])
    assert len(parts[0]) == len(parts[1]) == 2000
    assert (len(counts), min(counts.values()), max(counts.values())) <= (2000, 2, 3)
    assert sum(count != 2 for count in counts.values()) < 200


class Rows:
    """As a `datasets.Dataset`: rows are dictionaries, and a loader asks for a whole batch at once."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"label": index}

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        assert all(isinstance(index, int) for index in indices)
        return [self[index] for index in indices]


def test_a_data_set_of_rows_needs_nothing_else() -> None:
    """What has a length and rows is enough; it need not be a `torch.utils.data.Dataset`."""
    script = Script()
    rows: Any = Rows()
    loader = DataLoader(rows, batch_size=8, sampler=script.data.sampler(len(rows), shuffle=True, nodes=1.0))

    seen = [int(label) for batch in loader for label in batch["label"]]

    assert sorted(seen) == list(range(50))


def test_what_a_loader_drops_at_the_end_comes_in_the_next_iteration() -> None:
    """`drop_last` skips nothing: what is missing of an epoch comes first in the next."""
    script = Script()
    sampler = script.data.sampler(100, shuffle=True, nodes=1.0)
    loader = DataLoader(Numbers(100), batch_size=16, drop_last=True, sampler=sampler)

    first, second, third = (epoch(script, loader) for _ in range(3))

    assert len(first) == 96
    assert set(range(100)) - set(first) == set(second[:4])
    counts = Counter(first + second + third)
    assert min(counts.values()) >= 2
    assert max(counts.values()) <= 3


@pytest.mark.parametrize("known", [False, True])
def test_a_script_resumes_in_the_middle_of_an_epoch(known: bool) -> None:
    """Another start with the saved state trains what the first had not, whether or not the daemon had told it all."""
    script = Script()
    loader = DataLoader(Numbers(500), batch_size=8, sampler=script.data.sampler(500, shuffle=True, nodes=1.0))
    first = epoch(script, loader, batches=20)
    if known:
        script.connection.tell_known()

    again = Script(saved=script.data.state())
    rest = epoch(
        again, DataLoader(Numbers(500), batch_size=8, sampler=again.data.sampler(500, shuffle=True, nodes=1.0))
    )

    assert Counter(first + rest) == Counter(range(500))


def test_a_restarted_trainer_continues_its_claims() -> None:
    """The daemon lives: a new process of the script gets what the old one had begun, from its last report on."""
    script = Script()
    size = 10_000  # partitions of ten samples, so that one is begun and not finished
    loader = DataLoader(Numbers(size), batch_size=7, sampler=script.data.sampler(size, shuffle=True, nodes=1.0))
    first = epoch(script, loader, batches=9)

    again = Script(script.connection)
    rest = epoch(
        again, DataLoader(Numbers(size), batch_size=7, sampler=again.data.sampler(size, shuffle=True, nodes=1.0))
    )

    assert Counter(first + rest) == Counter(range(size))


def test_a_state_of_other_data_is_refused() -> None:
    """The position in 500 samples means nothing in 400: `load_state_dict` says so, an automatic restore warns."""
    script = Script()
    state = script.data.sampler(500, shuffle=True, nodes=1.0).state_dict()

    other = Script(saved=script.data.state())
    sampler = other.data.sampler(400, shuffle=True, nodes=1.0)

    assert other.warned == ["data_position_not_restored"]
    with pytest.raises(
        ValueError, match=r"other data \(samples 500, seed 7\) than the present \(samples 400, seed 7\)"
    ):
        sampler.load_state_dict(state)
    for wrong in ("", "[]", state["position"][:-1]):
        with pytest.raises(ValueError, match=r"no state of swarm\.sampler or swarm\.shard"):
            sampler.load_state_dict({"position": wrong})


def test_steps_without_samples_are_warned_of() -> None:
    """A script that never says how many samples it trained is told once, and what it fetched counts as trained."""
    script = Script()
    loader = DataLoader(Numbers(100), batch_size=10, sampler=script.data.sampler(100, shuffle=True, nodes=1.0))
    for _ in loader:
        script.step(0)

    assert script.warned == ["data_not_counted"]
    assert script.member.ledger.first == (1, 0)


def test_steps_with_too_many_samples_are_warned_of() -> None:
    """A script that counts tokens instead of samples is told once."""
    script = Script()
    loader = DataLoader(Numbers(100), batch_size=10, sampler=script.data.sampler(100, shuffle=True, nodes=1.0))
    for _ in loader:
        script.step(10_000)

    assert script.warned == ["data_counted_twice"]


def test_one_data_set_at_a_time() -> None:
    """A second sampler, an empty data set and an empty block are refused with what to do."""
    script = Script()
    with pytest.raises(ValueError, match="is empty"):
        script.data.sampler(0, shuffle=True, nodes=1.0)
    with pytest.raises(ValueError, match="block = 0"):
        script.data.shard([], 0)
    script.data.sampler(5, shuffle=True, nodes=1.0)
    with pytest.raises(ValueError, match="ConcatDataset"):
        script.data.sampler(5, shuffle=True, nodes=1.0)


def test_a_script_that_begins_anew_has_the_same_sampler() -> None:
    """After a second `attach` in the middle of an epoch: its rest is trained, and no sample twice."""
    script = Script()
    loader = DataLoader(Numbers(64), batch_size=16, sampler=script.data.sampler(64, shuffle=True, nodes=1.0))
    before = epoch(script, loader, batches=2)

    script.data.begin_anew()
    again = DataLoader(Numbers(64), batch_size=8, sampler=script.data.sampler(64, shuffle=True, nodes=1.0))

    assert sorted(before + epoch(script, again)) == list(range(64))


def test_what_is_in_no_delta_yet_is_reported_with_the_next_one() -> None:
    """A trainer that fails before has lost it: the swarm has to train it again."""
    script = Script()
    loader = DataLoader(Numbers(64), batch_size=16, sampler=script.data.sampler(64, shuffle=True, nodes=1.0))

    for turn, _ in enumerate(loader, 1):
        script.data.count(16)
        script.data.report(turn, turn, 16, has_delta=turn % 4 == 3)
    script.data.report_rest(5)

    reported = [message for message in script.connection.sent if isinstance(message, DataTrained)]
    assert [message.turn for message in reported] == [3, 5]
    assert script.member.ledger.first == (1, 0)


@pytest.mark.parametrize("how", ["stopping", "lost"])
@pytest.mark.parametrize("kind", ["sampler", "shard"])
def test_a_daemon_that_ends_or_stops_the_node_ends_the_iteration(
    how: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers no more: the loader ends instead of waiting."""
    script = Script()
    data = script.data.sampler(100, shuffle=True, nodes=1.0) if kind == "sampler" else script.data.shard(range(100), 4)
    script.connection.stopping = True
    if how == "lost":

        def send(_: Any) -> None:
            raise DaemonGone

        monkeypatch.setattr(script.connection, "send", send)

    assert list(data) == []
    assert script.data.stopped


def test_the_length_is_this_nodes_share() -> None:
    """`len(loader)` is about an iteration's: progress bars and schedules use it."""
    assert len(Script().data.sampler(1000, shuffle=True, nodes=4.0)) == 250
