"""`swarm.shard` alone, with a loader's workers, and around streams that divide or skip by themselves."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from p2pnode.training.trainer.sampling.shard import SwarmShard
from tests.harness.stubs.shared_data import DirectConnection, Script
from tests.unit.training.trainer.sampling.test_sampler import epoch, meet


class Stream(IterableDataset[int]):
    """Numbers in order; like a streaming data set of Hugging Face it divides itself among workers, and can skip."""

    def __init__(self, size: int, start: int = 0) -> None:
        self.size = size
        self.start = start
        self.opened: list[int] = []

    def __iter__(self) -> Iterator[int]:
        self.opened.append(self.start)
        worker = get_worker_info()
        step, first = (worker.num_workers, worker.id) if worker is not None else (1, 0)
        yield from range(self.start + first, self.size, step)

    def skip(self, count: int) -> Stream:
        skipped = Stream(self.size, self.start + count)
        skipped.opened = self.opened
        return skipped


def shard_of(script: Script, source: Any, block: int = 4) -> SwarmShard:
    return script.data.shard(source, block)


@pytest.mark.parametrize("size", [1, 4, 50, 199])
def test_a_node_alone_reads_the_whole_stream(size: int) -> None:
    """Every pass has every sample, in order; the length is known from the first pass on."""
    script = Script()
    loader = DataLoader(shard_of(script, range(size)), batch_size=8)

    assert epoch(script, loader) == epoch(script, loader) == list(range(size))
    assert script.member.ledger.partitions == -(-size // 4)
    assert script.member.ledger.first == (2, 0)


def test_two_nodes_share_a_stream() -> None:
    """Together they yield every sample once."""
    scripts = [Script(DirectConnection(name * 20)) for name in (b"a", b"b")]
    loaders = [DataLoader(shard_of(script, range(1001)), batch_size=8) for script in scripts]
    meet(*scripts)

    parts = [epoch(script, loader) for script, loader in zip(scripts, loaders, strict=True)]

    assert Counter(parts[0] + parts[1]) == Counter(range(1001))
    assert min(map(len, parts)) > 300


def test_workers_share_the_nodes_part() -> None:
    """Each worker reads the stream and yields blocks of its own, although the stream divides itself; two epochs."""
    script = Script()
    loader = DataLoader(
        shard_of(script, Stream(203)),
        batch_size=8,
        num_workers=2,
        persistent_workers=True,
    )

    first, second = epoch(script, loader), epoch(script, loader)
    # The last batch may be trained before its worker has found the end of the stream; afterwards both have.
    script.step(0)

    assert Counter(first) == Counter(second) == Counter(range(203))
    assert script.member.ledger.first == (2, 0)


def test_a_worker_that_is_not_forked_gets_no_link() -> None:
    """A pickled shard reads the stream and asks through its socket; the link to the daemon stays behind."""
    script = Script()
    copy = pickle.loads(pickle.dumps(shard_of(script, range(10))))

    assert copy._link is None
    assert list(copy._in_worker((5, 1), worker=0, workers=1)) == list(range(10))
    script.step(10)
    assert script.member.ledger.partitions == 3


def test_more_samples_than_a_worker_drew_are_noticed() -> None:
    """The stream ends within its last block."""
    shard = shard_of(Script(), range(10))
    assert list(shard._in_worker((5, 1), worker=0, workers=1)) == list(range(10))

    assert shard.count(11) == 1


def test_what_workers_fetched_and_was_not_trained_comes_again() -> None:
    """After a loop that breaks off, no sample is missing, and at most two batches of a worker come twice."""
    script = Script()
    loader = DataLoader(shard_of(script, range(400)), batch_size=8, num_workers=2)

    first = epoch(script, loader, batches=20)
    rest = epoch(script, loader)

    counts = Counter(first + rest)
    assert set(counts) == set(range(400))
    assert sum(count - 1 for count in counts.values()) <= 4 * 8


def test_what_a_loader_with_workers_drops_is_left_out_of_its_epoch() -> None:
    """Of a pass that went to its end, when the next one begins; one that the script leaves gives the rest again."""
    script = Script()
    loader = DataLoader(shard_of(script, range(100)), batch_size=16, num_workers=2, drop_last=True)

    epoch(script, loader, batches=2)
    epoch(script, loader)
    assert script.member.ledger.first == (0, 0)
    epoch(script, loader, batches=1)

    assert script.member.ledger.first == (1, 0)


def test_a_resumed_pass_skips_what_is_trained() -> None:
    """Where the stream can skip, the samples before the first block to train are not read again."""
    script = Script()
    first = epoch(script, DataLoader(shard_of(script, Stream(200)), batch_size=8), batches=10)
    again = Script(saved=script.data.state())
    stream = Stream(200)

    rest = epoch(again, DataLoader(shard_of(again, stream), batch_size=8))

    assert Counter(first + rest) == Counter(range(200))
    assert stream.opened == [80]


def test_a_block_is_continued_where_its_training_stood() -> None:
    """A pass that breaks off within a block: the next yields the rest of it."""
    script = Script()
    loader = DataLoader(shard_of(script, range(100), block=10), batch_size=3)

    first = epoch(script, loader, batches=5)
    rest = epoch(script, loader)

    assert first + rest == list(range(100))


def test_workers_under_torchrun_are_refused() -> None:
    """All ranks ask for data together, which their workers cannot."""
    script = Script()
    shard = shard_of(script, range(10))
    shard._ranks = (0, 2)

    with pytest.raises(RuntimeError, match="num_workers=0"):
        list(DataLoader(shard, num_workers=1))


def test_a_stranger_is_refused_and_the_next_worker_served() -> None:
    """Another process does not know the key of the socket that workers ask."""
    shard, refused = shard_of(Script(), range(10)), list[BaseException]()

    def intrude() -> None:
        try:
            Client(shard._address, family="AF_UNIX", authkey=b"wrong")
        except BaseException as error:
            refused.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join(60)

    assert isinstance(refused[0], AuthenticationError)
    assert list(shard._in_worker((5, 1), worker=0, workers=1)) == list(range(10))
