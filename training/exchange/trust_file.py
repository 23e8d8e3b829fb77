"""Keeps the members that this node distrusts in its state directory, so that a restart does not trust them again.

`training.exchange.trust` decides who is distrusted. A file of another run is not used.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from msgspec import Meta

from training.exchange.context import ExchangeContext
from training.exchange.terms import Genesis, NodeId, Number, Reason
from training.exchange.trust import MAX_MEMBERS, Distrusted

TRUST_FILE = "trust.msgpack"
#: Node id, reason, and the number of untrue messages.
_Rows = Annotated[list[tuple[NodeId, Reason, Number]], Meta(max_length=MAX_MEMBERS)]


class TrustFile:
    """Restores the distrusted members when it is made; `run` writes them when they change."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._trust = context.view.trust
        self._disk = context.environment.disk
        self._log = context.environment.log
        self._load()

    def _load(self) -> None:
        try:
            raw = self._disk.read(TRUST_FILE)
            if raw is None:
                return
            genesis, rows = msgspec.msgpack.decode(raw, type=tuple[Genesis, _Rows])
        except (OSError, msgspec.DecodeError) as error:
            self._log.warning("trust_unreadable", reason=str(error))
            return
        now_s = self._context.environment.clock.monotonic()
        for node, reason, lies in rows if genesis == self._context.genesis else ():
            self._trust.restore(Distrusted(node, now_s, reason, lies))
            self._log.warning("member_distrusted", source=node.hex(), reason=reason, lies=lies)

    async def run(self) -> None:
        """Write the members when they have changed, at most once a second. A failed write is repeated until it
        succeeds, and logged once. Runs until cancelled."""
        has_failed = False
        while True:
            await asyncio.sleep(1.0)
            if (distrusted := self._trust.take_unsaved()) is None:
                continue
            rows = [(one.node, one.reason, one.lies) for one in distrusted[:MAX_MEMBERS]]
            data = msgspec.msgpack.encode((self._context.genesis, rows))
            try:
                await self._context.environment.executor.run(self._disk.write, TRUST_FILE, data)
            except OSError as error:
                self._trust.keep_unsaved()
                if not has_failed:
                    self._log.error("trust_not_written", reason=str(error))
                has_failed = True
            else:
                has_failed = False
