"""What the choice of the codec is told: the line, as it was measured or as the vector came over it."""

from __future__ import annotations

from tests.harness.builders.stores import contact, owner_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from training.exchange.codec_choice import MIN_RECEIVED_S, CodecControl
from training.exchange.context import ExchangeContext
from training.settings import ExchangeSettings


def control_of(settings: ExchangeSettings) -> tuple[CodecControl, ExchangeContext]:
    swarm = ScriptedSwarm(contact("a"), [contact("b")])
    swarm.worker_count = 2.0
    context = context_of(swarm, owner_of("a"), settings=settings)
    control = CodecControl(
        context.codec,
        context.swarm.line,
        context.store,
        context.view,
        settings,
        context.environment.log,
        is_beside=not context.synchronous,
    )
    return control, context


def test_the_vector_that_was_received_is_a_measure_of_the_line() -> None:
    """Unless it came within seconds; bursts that a busy machine received show less than its line."""

    async def scenario() -> None:
        control, context = control_of(ExchangeSettings())
        control.received(10**9, MIN_RECEIVED_S / 2)
        control.received(0, 100.0)
        assert control.facts().rates is None
        _other, around = control_of(ExchangeSettings())
        for _ in range(4):
            around.swarm.line.received(0.25, 200_000, is_busy=True)

        control.received(1000, 10.0)
        assert control.facts().rates == (100.0, 100.0)
        for _ in range(4):
            context.swarm.line.received(0.25, 200_000, is_busy=True)
        assert control.facts().rates == (100.0, 800_000.0)

    run(scenario())
