"""`p2pnode dashboard`: opens the pages of a running node in a browser, logged in where the token may be read.

A command line is visible to other users of the machine, so the browser is not given the token there. It opens a file
that only this user can read, which leads on to the page with the token behind "#"; no request contains that part.
"""

from __future__ import annotations

import contextlib
import html
import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from p2pnode.client import NodeClient
from p2pnode.commands.options import JsonOption, WhichNode, takes
from p2pnode.commands.output import print_json, print_line
from p2pnode.keys import api_token
from p2pnode.overlay.addresses import split_address

#: The file that leads to the page, beside the token.
LOGIN_FILE = "dashboard.html"
#: Every interface: a browser on this machine takes the loopback.
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}

_LOGIN = """<!doctype html><meta charset="utf-8"><title>p2pnode</title>
<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0;url={url}">
<p><a href="{url}">To the dashboard</a></p>
"""


@takes(WhichNode)
def dashboard(
    which: WhichNode,
    node: Annotated[bool, typer.Option("--node", help="The page of this node instead of that of the swarm.")] = False,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser, where there is one.")] = True,
    as_json: JsonOption = False,
) -> int:
    """Show the swarm on one page: open it in a browser, or print its address.

    Example: p2pnode dashboard --no-open
    """
    client = which.client()
    client.status()  # a node that does not answer is an error here, not an empty page
    base = base_url(client.address)
    page = f"{base}/" if node else f"{base}/swarm"
    token = "" if client.token_file is None else str(client.token_file)
    if as_json:
        print_json({"swarm": f"{base}/swarm", "node": f"{base}/", "token_file": token})
        return 0
    print_line(f"the swarm  {base}/swarm")
    print_line(f"this node  {base}/")
    if token:
        print_line(f"token      {token}")
    if opens and has_display(os.environ, sys.platform) and webbrowser.open(login_url(client, page)):
        print_line("opened in your browser")
    return 0


def base_url(address: str) -> str:
    """The address of a node's pages, as a browser on this machine reaches them."""
    host, port = split_address(address)
    host = ANY_HOST.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def has_display(environment: Mapping[str, str], platform: str) -> bool:
    """Whether a browser would have a screen: one for terminals would take this one over."""
    return platform in ("darwin", "win32") or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def login_url(client: NodeClient, page: str) -> str:
    """The file that leads to `page` with the token, or `page` itself where the token cannot be read or written."""
    if client.token_file is None:
        return page
    with contextlib.suppress(api_token.TokenNotReadable, OSError):
        return write_login(client.token_file.parent / LOGIN_FILE, page, api_token.read(client.token_file)).as_uri()
    return page


def write_login(path: Path, page: str, token: str) -> Path:
    """Write the file for this user alone, in the place of the last one; returns its whole path, links not followed."""
    path = path.absolute()
    path.unlink(missing_ok=True)
    # O_EXCL: never writes through a link.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(_LOGIN.format(url=html.escape(f"{page}#token={token}")))
    return path
