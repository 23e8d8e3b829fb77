"""`swarm.shard(iterable)`: this node's part of data that can only be read in order.

The stream is cut into blocks; a node reads all of it and yields the samples of its own blocks. Every pass has to give
the same samples in the same order, on all nodes. A loader's workers each read the stream and get blocks through the
main process, so that each block is yielded by one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import current_process
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, get_worker_info

from p2pnode.training.trainer.sampling.blocks import BLOCKS_ASKED, BlockDealer, PassId
from p2pnode.training.trainer.sampling.draws import ClaimProgress
from p2pnode.training.trainer.sampling.link import DataLink, LinkedReader
from p2pnode.training.trainer_link.data_messages import UNKNOWN, Claim, DataGranted, PartitionTrained


class SwarmShard(LinkedReader, IterableDataset[Any]):
    """An iterable data set: this node's part of `source`. One iteration is this node's part of an epoch."""

    def __init__(self, link: DataLink, source: Iterable[Any]) -> None:
        self._source = source
        self._block = link.shape.size
        self._link: DataLink | None = link
        self._ranks = (link.ranks.rank, link.ranks.count)
        self._passes = 0
        self.dealer: BlockDealer | None = BlockDealer(self._block, self._ask, link.learn_partitions)
        self._bridge: Bridge | None = Bridge(self.dealer)
        self._address = self._bridge.address

    def __getstate__(self) -> dict[str, Any]:
        """What a worker gets when it is not forked: all but the link to the daemon."""
        return self.__dict__ | {"_link": None, "dealer": None, "_bridge": None}

    def _ask(self, begins: bool, finished: bool, position: int, has_claims: bool) -> DataGranted | None:
        assert self._link is not None
        return self._link.ask(
            begins=begins, finished=finished, position=position, count=BLOCKS_ASKED, has_claims=has_claims
        )

    # -- iterating -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        worker = get_worker_info()
        if worker is None:
            assert self.dealer is not None
            return self._of_rank(self._samples(_Pass(self.dealer, (0, self._passes))))
        if self._ranks[1] > 1:
            raise RuntimeError(
                "swarm.shard with num_workers > 0 is not possible under torchrun, where all ranks ask for their data "
                "together: use num_workers=0, or a map-style data set with swarm.sampler"
            )
        # Equal in all workers of one loader, and different in its next iteration, also where the workers persist.
        return self._in_worker((worker.seed - worker.id, self._passes), worker.id, worker.num_workers)

    def _in_worker(self, this_pass: PassId, worker: int, workers: int) -> Iterator[Any]:
        blocks = BridgeClient(self._address, this_pass, worker, workers)
        try:
            yield from self._samples(blocks)
        finally:
            blocks.close()

    def _of_rank(self, samples: Iterator[Any]) -> Iterator[Any]:
        """The ranks of a node take turns; all yield equally often."""
        rank, ranks = self._ranks
        while len(group := list(itertools.islice(samples, ranks))) == ranks:
            yield group[rank]

    def _samples(self, blocks: _Pass | BridgeClient) -> Iterator[Any]:
        claim = blocks.next_block(0)
        if claim is None:
            blocks.end(None, UNKNOWN)
            return
        number = claim.partition * self._block
        drawn = claim.offset
        for sample in self._opened(number):
            if number >= (claim.partition + 1) * self._block:
                claim = blocks.next_block(number // self._block)
                if claim is None:
                    blocks.end(None, UNKNOWN)
                    return
                drawn = claim.offset
            if number >= claim.partition * self._block + claim.offset:
                blocks.drew()
                drawn += 1
                yield sample
            number += 1
        blocks.end(drawn, -(-number // self._block))

    def _opened(self, start: int) -> Iterator[Any]:
        """The samples from `start` on. A stream that can skip does so, as those of Hugging Face can."""
        skip = getattr(self._source, "skip", None)
        if start and callable(skip):
            return _undivided(skip(start))
        return itertools.islice(_undivided(self._source), start, None)

    # -- position ------------------------------------------------------------------------------------------------

    def count(self, samples: int) -> int:
        """`swarm.step` has counted so many samples of this node; returns how many were never drawn."""
        assert self.dealer is not None
        return self.dealer.count(samples)

    def take_trained(self) -> list[PartitionTrained]:
        """See `LinkedReader.take_trained`."""
        assert self.dealer is not None
        return self.dealer.report()


class _Pass:
    """Where a pass gets its blocks, in the main process. Of a worker that does not say what it has `drew` all of a
    block is drawn at once: batches of it may arrive before it asks for another one."""

    def __init__(self, dealer: BlockDealer, this_pass: PassId, worker: int = 0, workers: int = 1) -> None:
        self._dealer = dealer
        self._pass = this_pass
        self._worker = worker
        self._part: ClaimProgress | None = None
        dealer.begin(this_pass, workers)

    def next_block(self, position: int, *, is_whole: bool = False) -> Claim | None:
        """The first claim at `position` or behind it; None: this pass has no more."""
        part = self._part = self._dealer.next_block(self._pass, self._worker, position)
        if part is not None and is_whole:
            self._dealer.drew(part, part.size - part.drawn)
        return None if part is None else part.as_claim()

    def drew(self) -> None:
        """A sample of the block is about to be yielded."""
        assert self._part is not None
        self._dealer.drew(self._part, 1)

    def end(self, drawn: int | None, blocks: int) -> None:
        """The pass ends. If the stream did: after `drawn` samples of the block, and with `blocks` of them in all."""
        part = None if drawn is None else self._part
        if part is not None and drawn is not None:
            self._dealer.drew(part, drawn - part.drawn)
        self._dealer.end(self._pass, self._worker, part, blocks)


class Bridge:
    """Connects the workers of a loader to the main process, which alone talks to the daemon: the main process's end.

    A Unix socket of `multiprocessing.connection`: its address and key reach a worker however it is started, and the key
    keeps other processes out. One thread accepts, one serves each worker.
    """

    def __init__(self, dealer: BlockDealer) -> None:
        self._dealer = dealer
        self._listener = Listener(family="AF_UNIX", authkey=_key())
        self.address = self._listener.address
        threading.Thread(target=self._accept, name="p2pnode-shard", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            except Exception:  # noqa: S112 - a stranger, or a worker that ended at once: the next one is served
                continue
            threading.Thread(target=self._serve, args=(connection,), name="p2pnode-shard-worker", daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        """Answer one worker until it has gone."""
        with contextlib.suppress(EOFError, OSError), connection:
            blocks = _Pass(self._dealer, *connection.recv())
            while True:
                request = connection.recv()
                if isinstance(request, int):
                    connection.send(blocks.next_block(request, is_whole=True))
                else:
                    blocks.end(*request)
                    connection.send(None)


class BridgeClient:
    """A worker's end, for one pass; see `_Pass`."""

    def __init__(self, address: Any, this_pass: PassId, worker: int, workers: int) -> None:
        self._connection = Client(address, family="AF_UNIX", authkey=_key())
        self._connection.send((this_pass, worker, workers))

    def next_block(self, position: int) -> Claim | None:
        self._connection.send(position)
        claim: Claim | None = self._connection.recv()
        return claim

    def drew(self) -> None:
        """The main process assumes it."""

    def end(self, drawn: int | None, blocks: int) -> None:
        self._connection.send((drawn, blocks))
        self._connection.recv()

    def close(self) -> None:
        self._connection.close()


def _key() -> bytes:
    return bytes(current_process().authkey)


def _undivided(source: Iterable[Any]) -> Iterator[Any]:
    """All samples of the source, in every worker.

    An iterable data set may divide itself among the workers, as those of Hugging Face do. Here blocks divide it, so the
    source must not see that it runs in a worker.
    """
    iterator = None
    while True:
        info, torch_worker._worker_info = torch_worker._worker_info, None  # noqa: SLF001
        try:
            iterator = iter(source) if iterator is None else iterator
            sample = next(iterator)
        except StopIteration:
            return
        finally:
            torch_worker._worker_info = info  # noqa: SLF001
        yield sample
