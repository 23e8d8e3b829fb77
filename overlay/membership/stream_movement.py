"""Whether the streams with a peer move: a peer whose datagrams wait behind a full line is slow, not silent.

A home router queues seconds of what a node sends, and the answers to pings wait there with everything else. Bytes that
arrive from a peer, or that its kernel acknowledges, show that its machine is there and that its line is busy. A machine
that is gone acknowledges nothing. A process that hangs soon takes nothing more, because its window is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from overlay.transport import RequestStream

#: Streams, and how many bytes had moved on each.
Sample = Mapping[RequestStream, int]


class StreamMovement:
    """The streams with each peer. A stream is kept as long as others use it."""

    def __init__(self) -> None:
        #: By peer; the numbers are those of the last mark.
        self._streams: dict[bytes, WeakKeyDictionary[RequestStream, int]] = {}
        #: The same of the requests of this node that are under way.
        self._requests: dict[bytes, dict[RequestStream, int]] = {}

    def add(self, node_id: bytes, stream: RequestStream) -> None:
        """A request of, or to, this peer uses the stream. What has moved before is of the past."""
        streams = self._streams.get(node_id)
        if streams is None:
            # Each takes half a kilobyte: those of peers whose streams have all ended are dropped.
            self._streams = {peer: used for peer, used in self._streams.items() if len(used)}
            streams = self._streams[node_id] = WeakKeyDictionary()
        if stream not in streams:  # of one that is known already the kernel is not asked
            streams[stream] = stream.moved_bytes()

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
        streams = [*self._streams.get(node_id, ()), *self._requests.get(node_id, ())]
        return {stream: stream.moved_bytes() for stream in streams}

    def mark(self, node_id: bytes) -> None:
        """Movement counts from now on, where no sample is given."""
        for known in (self._streams.get(node_id), self._requests.get(node_id)):
            if known is not None:
                known.update({stream: stream.moved_bytes() for stream in list(known)})

    def has_moved(self, node_id: bytes, since: Sample | None = None) -> bool:
        """Whether a byte has moved since that sample, or the last mark, on a stream that has not ended."""
        known: Sample = {**self._streams.get(node_id, {}), **self._requests.get(node_id, {})}
        before = known if since is None else since
        return any(stream.moved_bytes() > before.get(stream, 0) for stream in known)

    def forget(self, node_id: bytes) -> None:
        """The peer is no member any more."""
        self._streams.pop(node_id, None)
        self._requests.pop(node_id, None)
