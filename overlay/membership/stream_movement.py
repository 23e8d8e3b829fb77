"""Whether the streams with a peer move: a peer whose datagrams wait behind a full line is slow, not silent.

A home router queues seconds of what a node sends, and the answers to pings wait there with everything else. Bytes that
arrive from a peer, or that its kernel acknowledges, show that its machine is there and that its line is busy. A machine
that is gone acknowledges nothing. A process that hangs soon takes nothing more, because its window is full.

The kernel of a process that hangs takes each *new* small request as soon as it arrives. So a request counts only if it
moves on after a mark at which it had begun to move, or has moved `LARGE_BYTES`: then a line carries it. Otherwise a
stopped process would live for as long as others ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import ReferenceType, ref

from p2pnode.overlay.transport import RequestStream

#: A line of half a Mbit/s carries this in the timeout of a probe: a smaller request makes no pong as late as that.
LARGE_BYTES = 1 << 15

#: Streams, and how many bytes had moved on each.
Sample = Mapping[RequestStream, int]


class StreamMovement:
    """The streams with each peer. A stream is kept as long as others use it."""

    def __init__(self) -> None:
        #: By peer; the numbers are those of the last mark.
        self._streams: dict[bytes, dict[ReferenceType[RequestStream], int]] = {}
        #: The same of the requests of this node that are under way.
        self._requests: dict[bytes, dict[RequestStream, int]] = {}

    def __len__(self) -> int:
        """Peers of which streams are known."""
        return len(self._streams)

    def add(self, node_id: bytes, stream: RequestStream) -> None:
        """A request of, or to, this peer uses the stream. What has moved before is of the past."""
        streams = self._streams.get(node_id)
        if streams is None:
            streams = self._streams[node_id] = {}
        if ref(stream) not in streams:  # of one that is known already the kernel is not asked
            for ended in [known for known in streams if known() is None]:
                del streams[ended]
            streams[ref(stream)] = stream.moved_bytes()

    def drop_ended(self) -> None:
        """Forget the streams that have ended; of a peer without others nothing is left."""
        for node_id, streams in list(self._streams.items()):
            for ended in [known for known in streams if known() is None]:
                del streams[ended]
            if not streams:
                del self._streams[node_id]

    def begin(self, node_id: bytes, request: RequestStream) -> None:
        """A request to this peer begins; on it nothing has moved yet."""
        requests = self._requests.get(node_id)
        if requests is None:
            requests = self._requests[node_id] = {}
        requests[request] = 0

    def end(self, node_id: bytes, request: RequestStream) -> None:
        """It has ended."""
        if (requests := self._requests.get(node_id)) is not None:
            requests.pop(request, None)
            if not requests:
                del self._requests[node_id]

    def sample(self, node_id: bytes) -> Sample:
        """How far each stream with this peer is now."""
        streams = (stream for known in self._streams.get(node_id, ()) if (stream := known()) is not None)
        return {stream: stream.moved_bytes() for stream in (*streams, *self._requests.get(node_id, ()))}

    def mark(self, node_id: bytes) -> None:
        """Movement counts from now on, where no sample is given."""
        if (streams := self._streams.get(node_id)) is not None:
            streams.update({known: stream.moved_bytes() for known in streams if (stream := known()) is not None})
        if (requests := self._requests.get(node_id)) is not None:
            requests.update({request: request.moved_bytes() for request in requests})

    def has_moved(self, node_id: bytes, since: Sample | None = None) -> bool:
        """Whether a byte has moved since that sample, or the last mark, on a stream that has not ended."""
        for known, marked in self._streams.get(node_id, {}).items():
            if (stream := known()) is None:
                continue
            if stream.moved_bytes() > (marked if since is None else since.get(stream, marked)):
                return True
        for request, marked in self._requests.get(node_id, {}).items():
            before = marked if since is None else since.get(request, 0)
            moved = request.moved_bytes()
            if moved > before and (before or moved >= LARGE_BYTES):
                return True
        return False

    def forget(self, node_id: bytes) -> None:
        """The peer is no member any more."""
        self._streams.pop(node_id, None)
        self._requests.pop(node_id, None)
