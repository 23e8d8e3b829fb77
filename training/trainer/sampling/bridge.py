"""Connects the workers of a loader to the main process, which alone talks to the daemon.

A Unix socket of `multiprocessing.connection`: its address and key reach a worker however it is started, and the key
keeps other processes out. One thread accepts, one serves each worker.
"""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from p2pnode.training.trainer.sampling.blocks import BlockDealer, PassId
from p2pnode.training.trainer_link.data_messages import Claim


class Bridge:
    """The main process's end."""

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
            this_pass, worker, workers = connection.recv()
            self._dealer.begin(this_pass, workers)
            part = None
            while True:
                request = connection.recv()
                if isinstance(request, int):
                    part = self._dealer.next_block(this_pass, worker, request)
                    if part is not None:
                        # Until the worker says otherwise: batches of it may arrive before it asks for another block.
                        self._dealer.drew(part, part.size - part.drawn)
                    connection.send(None if part is None else part.as_claim())
                else:
                    drawn, blocks = request
                    if part is not None and drawn is not None:
                        self._dealer.drew(part, drawn - part.drawn)
                    self._dealer.end(this_pass, worker, None if drawn is None else part, blocks)
                    connection.send(None)


class BridgeClient:
    """A worker's end, for one pass. Implements `training.trainer.sampling.shard.Blocks`."""

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
    from multiprocessing import current_process

    return bytes(current_process().authkey)
