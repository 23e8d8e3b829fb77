"""`p2pnode logs`: what a node has logged, from the node itself, or from its log file if it runs in the background."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from p2pnode.client import NodeClient, NotReachable, RunningNode
from p2pnode.commands.options import JsonOption, WhichNode, running_in, takes
from p2pnode.commands.output import print_line, print_lines, print_notice
from p2pnode.config.state_folders import LOCAL
from p2pnode.errors import ExitCode, UserError
from p2pnode.log_file import LEVELS, LOG_FILE, Entry, EntryFilter, Follower, event_entry, former_lines, last, line_entry
from p2pnode.terminal.lines import Line, Span, Style, Tone, cells, clipped, wrapped
from p2pnode.terminal.numbers import number

#: Seconds between two looks at a file, and between two requests.
LOOK_S, ASK_S = 0.2, 0.5

Show = Callable[[Iterable[Entry]], None]


@takes(WhichNode)
def logs(
    which: WhichNode,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last ones.")] = 100,
    level: Annotated[str, typer.Option("--level", "-l", help="From here up: debug, info, warning, error.")] = "info",
    event: Annotated[
        list[str] | None,
        typer.Option("--event", "-e", metavar="NAME", help="These events alone, such as peer_dead or 'peer_*'."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Show what a node has logged; docs/events.md says what each event means and what to do.

    Example: p2pnode logs --follow --level warning
    """
    if level not in LEVELS:
        raise UserError(f'--level: "{level}" is none', f"give one of {', '.join(LEVELS)}", ExitCode.USAGE)
    wanted = EntryFilter(level, tuple(event or ()))
    show = _json_printer() if as_json else _printer()
    try:
        if which.address is None:
            folder = which.folder()
            runs = running_in(folder)
            file = _newest(folder / LOG_FILE, folder / LOCAL / LOG_FILE)
            if folder.parent.name == LOCAL and not file.is_file():  # those of --local share one
                file, wanted = folder.parent / LOG_FILE, wanted._replace(node=folder.name)
            if file.is_file() and (runs is None or level == "debug"):
                return _from_file(file, wanted, lines, show, runs if follow else None)
            if runs is not None and level == "debug":
                print_notice("only a node in the background has a log file with debug events; these are from info up")
        return _from_node(which.client(), wanted, lines, show, follow=follow)
    except KeyboardInterrupt:
        return 0


def _newest(*files: Path) -> Path:
    """The one that was written last; the first where there is none."""
    return max((file for file in files if file.is_file()), key=lambda file: file.stat().st_mtime, default=files[0])


def _from_node(client: NodeClient, wanted: EntryFilter, lines: int, show: Show, *, follow: bool) -> int:
    """The events that the node keeps; those of a later start of it too."""
    page = client.events()
    show(last(map(event_entry, page["events"]), wanted, lines))
    seen, is_away = int(page["last"]), False
    while follow:
        time.sleep(ASK_S)
        try:
            page = client.events(seen)
        except NotReachable as error:
            if not is_away:
                print_notice(f"{error.message}; still trying, Ctrl-C ends")
            is_away = True
            continue
        if page["dropped"]:
            print_notice(f"{page['dropped']} events were no longer kept")
        show(entry for entry in map(event_entry, page["events"]) if wanted.takes(entry))
        seen, is_away = int(page["last"]), False
    return 0


def _from_file(file: Path, wanted: EntryFilter, lines: int, show: Show, follow: RunningNode | None) -> int:
    """The log file; `follow` the node that writes it, until it has ended."""
    try:
        with Follower(file) as follower:
            show(last(map(line_entry, [*former_lines(file), *follower.read()]), wanted, lines))
            while follow is not None:
                is_over = not follow.alive
                show(entry for entry in map(line_entry, follower.read()) if wanted.takes(entry))
                if is_over:
                    print_notice("the node has ended")
                    break
                time.sleep(LOOK_S)
    except OSError as error:
        raise UserError(
            f"cannot read the log file {file}: {error.strerror or error}",
            "run the command as the user that runs the node",
            ExitCode.STATE_DIRECTORY,
        ) from None
    return 0


def _json_printer() -> Show:
    def show(entries: Iterable[Entry]) -> None:
        for entry in entries:
            print_line(json.dumps({"schema": 1, **entry.as_json}))

    return show


def _printer() -> Show:
    def show(entries: Iterable[Entry]) -> None:
        taken = list(entries)
        if taken:
            print_lines(
                lambda style: [
                    line
                    for entry in taken
                    for line in log_lines(
                        clock_text(entry.time_s, time.time(), whole=style.width is None),
                        entry.level,
                        entry.event,
                        entry.fields,
                        style,
                    )
                ]
            )

    return show


_TONES: Mapping[str, Tone] = {"debug": "dim", "info": "", "warning": "warn", "error": "bad"}
#: Ids and digests; a terminal shows eight digits of them, a pipe all.
_LONG_HEX = re.compile(r"\b[0-9a-f]{32,}\b")
_SHOWN_DIGITS = 8
#: Below an event, its fields begin here.
_INDENT = 4
#: Longest field on a terminal, in cells; /events and a pipe have all of it.
_MAX_FIELD_CELLS = 400


def clock_text(time_s: float | None, now_s: float, *, whole: bool) -> str:
    """Local time: of today without a date, unless the `whole` is asked for."""
    if time_s is None:
        return ""
    when, now = (datetime.fromtimestamp(one, UTC).astimezone() for one in (time_s, now_s))
    if whole:
        return when.isoformat(timespec="milliseconds")
    return when.strftime("%H:%M:%S" if when.date() == now.date() else "%m-%d %H:%M:%S")


def log_lines(time: str, level: str, event: str, fields: Mapping[str, Any], style: Style) -> list[Line]:
    """One event. `time` as text; an event without a name is a line of text."""
    if not event:
        return [[(str(fields.get("text", "")), _TONES.get(level, ""))]]
    tone = _TONES.get(level, "")
    head: list[Span] = [(f"{time}  ", "dim"), (f"{level:<7}  ", tone), (event, tone if tone != "dim" else "")]
    if style.width is None:
        return [[*head, *((f"  {name}={_value(value)}", "") for name, value in fields.items())]]
    pairs = [clipped(f"{name}={_short(_value(value))}", _MAX_FIELD_CELLS) for name, value in fields.items()]
    used = sum(cells(text) for text, _ in head)
    room = style.width - used - 2
    text = "  ".join(pairs)
    if cells(text) <= room:
        return [[*head, (f"  {text}" if text else "", "")]]
    below = _packed(pairs, max(10, style.width - _INDENT))
    lines: list[Line] = [head]
    lines += [[(" " * _INDENT + line, "")] for line in below]
    return lines


def _packed(pairs: list[str], width: int) -> list[str]:
    """As many fields to a line as fit; a longer one is wrapped."""
    lines: list[str] = []
    for pair in pairs:
        if lines and cells(lines[-1]) + 2 + cells(pair) <= width:
            lines[-1] += f"  {pair}"
        else:
            lines += wrapped(pair, width)
    return lines


def _value(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return _LONG_HEX.sub(lambda found: found[0][:_SHOWN_DIGITS], text)
