"""`p2pnode doctor`: what keeps a node from working, each finding with what to do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import typer

from p2pnode.commands.options import JsonOption, Place, running_in, takes
from p2pnode.commands.output import print_json, print_line, print_lines
from p2pnode.terminal.lines import Line, Style, Tone, labelled

#: Between two redraws of the bar; a look at PyTorch or at other machines takes seconds.
TICK_S = 0.25
_MARKS: Mapping[str, tuple[str, Tone]] = {
    "ok": ("●", "ok"),
    "info": ("·", "dim"),
    "warning": ("▲", "warn"),
    "error": ("✖", "bad"),
}
#: The widest name of a check, and the mark before it.
_NAME_CELLS, _INDENT = 11, 14


@takes(Place)
def doctor(
    place: Place,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option("--bootstrap", "-b", metavar="HOST:PORT", help="A peer to try; may be given several times."),
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Leave out what asks other machines.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Look for what keeps a node from joining or training: ports, addresses, key, clock, disk, GPU, each bootstrap.

    Exit code 14 if something does. A node that runs is asked; without one the swarm is visited for a moment, under
    another identity.

    Example: p2pnode doctor --run digits --bootstrap 192.0.2.10:8468
    """
    import asyncio  # here: other commands do not need it

    from p2pnode.config.toml import toml
    from p2pnode.doctor.examine import Examination, examine
    from p2pnode.doctor.machine import DoctorCheck, exit_code
    from p2pnode.screen import progress_bar

    tried = {"swarm.bootstrap": ("--bootstrap", toml(bootstrap) if bootstrap else None)}
    found = place.loaded(tried, for_running=True).config
    asked = Examination(found, running_in(found.state_folder), network=not offline)
    checks: list[DoctorCheck] = []

    async def look() -> None:
        with progress_bar("looking") as bar:

            async def tick() -> None:
                while True:
                    bar.show(0, 0, "")
                    await asyncio.sleep(TICK_S)

            ticking = asyncio.create_task(tick())
            try:
                async for check in examine(asked):
                    checks.append(check)
                    if not as_json:
                        bar.close()
                        print_lines(partial(finding_lines, *check))
            finally:
                ticking.cancel()
                await asyncio.gather(ticking, return_exceptions=True)

    asyncio.run(look())
    code = exit_code(checks)
    if as_json:
        print_json({"works": not code, "checks": [one.as_json for one in checks]})
    else:
        errors = sum(check.level == "error" for check in checks)
        print_line("")
        print_line(
            "nothing keeps this node from working"
            if not code
            else f"{errors} {'finding keeps' if errors == 1 else 'findings keep'} this node from working"
        )
    return int(code)


def finding_lines(name: str, level: str, what: str, do: str, style: Style) -> list[Line]:
    """Mark, name and text; on a terminal wrapped beside the name."""
    mark, tone = _MARKS.get(level, ("?", ""))
    lines = labelled("", what, style, indent=_INDENT, tone=tone if level in ("warning", "error") else "")
    lines[0][:1] = [(f"{mark} ", tone), (f"{name:<{_NAME_CELLS}} ", "dim")]
    return lines + (labelled("", f"do: {do}", style, indent=_INDENT) if do else [])
