"""A stream on which as many bytes have moved as a test says."""

from __future__ import annotations


class StreamStub:
    """Implements `overlay.transport.RequestStream`."""

    def __init__(self) -> None:
        self.bytes = 0

    def moved_bytes(self) -> int:
        return self.bytes
