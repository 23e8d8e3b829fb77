"""Where tasks run: in this process, in processes of this machine, or on a Dask cluster.

A backend runs the tasks of one stage and returns a handle for each result: the result itself, or a future of the
cluster, whose value stays at its worker. Handles are inputs of later tasks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from typing import Any, NamedTuple

from p2pnode.training.engines.mapreduce.errors import BadRequest, WorkersLost

#: How long a cluster may take to answer, and to have a worker.
CONNECT_S = 10.0


class StageTask(NamedTuple):
    """`function(inputs)`, where `inputs` has handles, in lists."""

    function: Callable[[Any], Any]
    inputs: Any


class Backend:
    """Runs tasks in the calling thread, one after the other."""

    #: Whether results leave this process.
    is_remote = False

    def run(self, tasks: list[StageTask]) -> list[Any]:
        """A handle per task. Raises what a task raised."""
        return [task.function(task.inputs) for task in tasks]

    def pick(self, handle: Any, place: int) -> Any:
        """A handle of one element of a tuple."""
        return handle[place]

    def values(self, handles: list[Any]) -> list[Any]:
        """The results themselves. Raises what a task raised."""
        return handles

    def workers(self) -> int:
        """How many tasks run at a time."""
        return 1

    def close(self) -> None:
        """Nothing is open."""


class Processes(Backend):
    """Processes of this machine. They start without importing the script again, so it needs no main guard (loky)."""

    is_remote = True

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._pool: Any = None

    def run(self, tasks: list[StageTask]) -> list[Any]:
        """The results. Raises `WorkersLost` when a process ends in the middle; the next call has new ones."""
        from loky.process_executor import BrokenProcessPool, ProcessPoolExecutor

        if self._pool is None:
            self._pool = ProcessPoolExecutor(max_workers=self._processes)
        futures = [self._pool.submit(task.function, task.inputs) for task in tasks]
        try:
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            self.close()
            raise WorkersLost(
                f"a process of the map-reduce engine ended in the middle of a task ({error}); was it killed, or is "
                "memory short? Fewer processes or smaller partitions need less"
            ) from None
        finally:
            for future in futures:
                future.cancel()

    def workers(self) -> int:
        return self._processes

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, kill_workers=True)
            self._pool = None


class Cluster(Backend):
    """A Dask cluster. Results stay at its workers; it runs tasks of a lost worker again."""

    is_remote = True

    def __init__(self, address: str) -> None:
        """Raises `BadRequest` if nobody answers at the address, or has no worker."""
        try:
            from distributed import Client
        except ImportError as error:
            raise BadRequest(
                "a Dask cluster needs the package distributed: pip install 'p2pnode[mapreduce]'"
            ) from error
        try:
            self._client = Client(address, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise BadRequest(f"no Dask scheduler answers at {address}: {error}") from None
        try:
            self._client.wait_for_workers(1, timeout=CONNECT_S)
        except TimeoutError:
            self._client.close()
            raise BadRequest(
                f"the Dask scheduler at {address} has no worker after {CONNECT_S:.0f} s: start `dask worker {address}`"
            ) from None

    def run(self, tasks: list[StageTask]) -> list[Any]:
        """Futures."""
        # pure=False: two tasks with equal arguments are two tasks, also if the function reads a file.
        return [self._client.submit(task.function, task.inputs, pure=False, key=None) for task in tasks]

    def pick(self, handle: Any, place: int) -> Any:
        """A future of one element, taken where the tuple is."""
        return self._client.submit(operator.getitem, handle, place, pure=False)

    def values(self, handles: list[Any]) -> list[Any]:
        """The results. Raises `WorkersLost` where Dask gave a task up."""
        from distributed import KilledWorker
        from distributed.client import FutureCancelledError

        try:
            return list(self._client.gather(handles))
        except (KilledWorker, FutureCancelledError) as error:
            raise WorkersLost(f"the Dask cluster gave up a task: {error}") from None

    def workers(self) -> int:
        """Threads of all workers."""
        return max(1, int(sum(self._client.nthreads().values())))

    def close(self) -> None:
        """Leave the cluster; it goes on."""
        self._client.close()


def make_backend(processes: int, address: str | None) -> Backend:
    """The backend that a script asks for. Raises `BadRequest`."""
    if processes < 0:
        raise BadRequest(f"processes={processes}: use 0 for this process, or how many to start")
    if address is not None:
        if processes:
            raise BadRequest("either processes of this machine, or the address of a Dask cluster")
        return Cluster(address)
    return Processes(processes) if processes else Backend()
