"""Gathers what the choice of the codec needs before every push: the line, the shares of this node, and the times.

`training.exchange.codec_choice` decides. Here are the measured line, the shares and the log.
"""

from __future__ import annotations

import math

from training.exchange.codec_choice import LineFacts, TrainingTimes
from training.exchange.context import ExchangeContext
from training.step_bytes import StepShape

#: A vector that came in less time shows how busy the machines were, not how slow the line is.
MIN_RECEIVED_S = 5.0


class CodecControl:
    """Decides the codec of each push of one node."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._log = context.environment.log
        self._times = TrainingTimes()
        self._push_s: float | None = None
        #: Bytes per second of the vector that this node was sent when it joined.
        self._joined_at: float | None = None

    def before_push(self) -> None:
        """A delta is about to be encoded: choose its codec, and log a change."""
        choice, facts = self._context.codec, self.facts()
        former = choice.codec
        is_first = choice.is_automatic and not choice.reason
        if choice.decide(facts):
            self._log.info("codec_chosen", codec=choice.codec, former="" if is_first else former, reason=choice.reason)

    def trained(self, seconds: float) -> None:
        """A step was trained in so long, the exchange not counted."""
        self._times.add(seconds)

    def received(self, received_bytes: int, seconds: float) -> None:
        """The vector came in so long. A short time says nothing of the line."""
        if seconds >= MIN_RECEIVED_S and received_bytes:
            self._joined_at = received_bytes / seconds

    def pushed(self, seconds: float, *, is_complete: bool) -> None:
        """A push took so long; `is_complete`: every owner has acknowledged it."""
        self._push_s = seconds if is_complete else math.inf

    def facts(self) -> LineFacts:
        """What is known now."""
        context, line = self._context, self._context.swarm.line
        return LineFacts(
            shape=self._shape(),
            upload_bytes_per_s=line.upload_bytes_per_s,
            download_bytes_per_s=line.download.bytes_per_s,
            step_s=self._times.step_s,
            push_s=self._push_s,
            is_beside=not context.synchronous,
            joined_bytes_per_s=self._joined_at,
        )

    def _shape(self) -> StepShape:
        store, nodes = self._context.store, self._context.view.worker_count()
        parameters = store.bounds[-1][1]
        total = max(1, parameters)  # a run of named values has no vector
        return StepShape(
            parameters=parameters,
            nodes=nodes,
            owned=sum(map(store.size, store.owned)) / total,
            backed=sum(map(store.size, store.backed)) / total,
            sparse_values=self._context.settings.sparse_values,
        )
