"""Tests that are coroutines: what plays or runs each stands above it.

`@played_by(simulate, nodes=4)` above `async def test_…(swarm, *, codec)` makes the test `simulate(story, nodes=4)`: the
positional parameters come from what plays it, those behind the star from pytest. `@run_by(run)` makes it
`run(story(…))`, whose parameters all come from pytest. What plays or runs it may be a fixture: then it is named, as
`"run"` or `"world.run"`. `codec=Fixture("codec")` gives what plays it a parameter of the test, or a fixture.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from tests.harness.environment.virtual_loop import run

Story = Callable[..., Awaitable[None] | None]
Player = Callable[..., Any] | str


class Fixture(NamedTuple):
    """Stands for what pytest gives by this name."""

    name: str


def played_by(play: Player, *arguments: Any, **settings: Any) -> Callable[[Story], Callable[..., None]]:
    """The test is `play(story, *arguments, **settings)`."""

    def make(story: Story) -> Callable[..., None]:
        parameters = inspect.signature(story).parameters.values()
        own = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]

        def test(given: dict[str, Any]) -> None:
            positional = [_value(one, given) for one in arguments]
            named = {name: _value(one, given) for name, one in settings.items()}
            player = _player(play, given)
            player(functools.partial(story, **{name: given[name] for name in own}), *positional, **named)

        used = [one.name for one in (*arguments, *settings.values()) if isinstance(one, Fixture)]
        return _test(story, play, [*own, *used], test)

    return make


def run_by(runs: Player, **settings: Any) -> Callable[[Story], Callable[..., None]]:
    """The test is `run(story(), **settings)`."""

    def make(story: Story) -> Callable[..., None]:
        own = list(inspect.signature(story).parameters)

        def test(given: dict[str, Any]) -> None:
            _player(runs, given)(story(**{name: given[name] for name in own}), **settings)

        return _test(story, runs, own, test)

    return make


def in_world(story: Callable[[Any], Awaitable[None] | None], make: Callable[[], Any]) -> None:
    """Plays a story of what `make` makes, in virtual time."""

    async def main() -> None:
        told = story(make())
        if told is not None:
            await told

    run(main())


def _value(given: Any, fixtures: dict[str, Any]) -> Any:
    return fixtures[given.name] if isinstance(given, Fixture) else given


def _player(player: Player, fixtures: dict[str, Any]) -> Callable[..., Any]:
    if not isinstance(player, str):
        return player
    name, _, attribute = player.partition(".")
    return operator.attrgetter(attribute)(fixtures[name]) if attribute else fixtures[name]


def _test(
    story: Story, player: Player, names: Iterable[str], call: Callable[[dict[str, Any]], None]
) -> Callable[..., None]:
    """What pytest calls, with the parameters of these names and the fixture that plays it."""
    wanted = dict.fromkeys([*names, *([player.partition(".")[0]] if isinstance(player, str) else [])])

    @functools.wraps(story)
    def test(**given: Any) -> None:
        call(given)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in wanted]
    test.__signature__ = inspect.Signature(parameters)
    return test
