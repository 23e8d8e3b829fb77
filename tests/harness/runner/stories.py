"""Tests that are coroutines: what each is told to, or run by, stands above it.

`@played_by(simulate, nodes=4)` above `async def test_…(swarm, *, codec)` makes the test `simulate(story, nodes=4)`: the
positional parameters come from what plays it, those behind the star from pytest. `@run_by(run)` makes it
`run(story(…))`, whose parameters all come from pytest.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Story = Callable[..., Awaitable[None]]


def played_by(play: Callable[..., Any], *arguments: Any, **settings: Any) -> Callable[[Story], Callable[..., None]]:
    """The test is `play(story, *arguments, **settings)`."""

    def make(story: Story) -> Callable[..., None]:
        given = [one for one in inspect.signature(story).parameters.values() if one.kind is one.KEYWORD_ONLY]

        @functools.wraps(story)
        def test(**fixtures: Any) -> None:
            play(functools.partial(story, **fixtures), *arguments, **settings)

        test.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        return test

    return make


def run_by(run: Callable[..., Any], **settings: Any) -> Callable[[Story], Callable[..., None]]:
    """The test is `run(story(), **settings)`."""

    def make(story: Story) -> Callable[..., None]:
        @functools.wraps(story)
        def test(**fixtures: Any) -> None:
            run(story(**fixtures), **settings)

        test.__signature__ = inspect.signature(story)  # type: ignore[attr-defined]
        return test

    return make
