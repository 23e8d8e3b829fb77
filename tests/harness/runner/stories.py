"""Tests that are coroutines: what plays or runs each stands above it.

`@played_by(simulate, nodes=4)` above `async def test_…(swarm, *, codec)` makes the test `simulate(story, nodes=4)`: the
positional parameters come from what plays it, those behind the star from pytest. `@run_by(run)` makes it
`run(story(…))`, whose parameters all come from pytest. What plays or runs it may be a fixture: then it is named, as
`"run"` or `"world.run"`.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from tests.harness.environment.virtual_loop import run

Story = Callable[..., Awaitable[None] | None]
Player = Callable[..., Any] | str


def played_by(play: Player, *arguments: Any, **settings: Any) -> Callable[[Story], Callable[..., None]]:
    """The test is `play(story, *arguments, **settings)`."""

    def make(story: Story) -> Callable[..., None]:
        given = [one for one in inspect.signature(story).parameters.values() if one.kind is one.KEYWORD_ONLY]

        def test(player: Callable[..., Any], fixtures: dict[str, Any]) -> None:
            player(functools.partial(story, **fixtures), *arguments, **settings)

        return _test(story, play, given, test)

    return make


def run_by(runs: Player, **settings: Any) -> Callable[[Story], Callable[..., None]]:
    """The test is `run(story(), **settings)`."""

    def make(story: Story) -> Callable[..., None]:
        def test(player: Callable[..., Any], fixtures: dict[str, Any]) -> None:
            player(story(**fixtures), **settings)

        return _test(story, runs, inspect.signature(story).parameters.values(), test)

    return make


def in_world(story: Callable[[Any], Awaitable[None] | None], make: Callable[[], Any]) -> None:
    """Plays a story of what `make` makes, in virtual time."""

    async def main() -> None:
        told = story(make())
        if told is not None:
            await told

    run(main())


def _test(
    story: Story,
    player: Player,
    given: Iterable[inspect.Parameter],
    call: Callable[[Callable[..., Any], dict[str, Any]], None],
) -> Callable[..., None]:
    """What pytest calls, with the parameters that it gives: those of the story, and the fixture that plays it."""
    parameters = {one.name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in given}
    wanted = dict(parameters)
    name, _, attribute = player.partition(".") if isinstance(player, str) else ("", "", "")
    if name:
        wanted[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(story)
    def test(**fixtures: Any) -> None:
        found: Any = fixtures[name] if name else player
        play = operator.attrgetter(attribute)(found) if attribute else found
        call(play, {one: fixtures[one] for one in parameters})

    test.__signature__ = inspect.Signature(list(wanted.values()))  # type: ignore[attr-defined]
    return test
