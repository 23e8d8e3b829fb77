"""The files of the dashboard: pages, scripts and styles, as they are served.

They contain nothing about the node, so they need no token; what they show comes from the guarded paths. The files are
read when the first browser asks, because most nodes never serve one.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

#: Served at these paths; every other file is below `/static/`.
PAGES = {"/": "index.html", "/swarm": "swarm.html"}
#: The end of every page, with its dialogs, in place of this line.
PAGE_END, END_LINE = "page_end.part", b"    <!-- page_end.part -->\n"
STATIC = "/static/"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
#: Only this node's own files and answers; nothing inline, nothing from elsewhere, in no frame of another page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class File(NamedTuple):
    """One file, ready to be served. `tag` is the entity tag, with its quotes; it is weak, because the file may be sent
    compressed."""

    body: bytes
    content_type: str
    tag: str


def read_files() -> dict[str, File]:
    """Every file by the path at which it is served."""
    files = {}
    names = {name: path for path, name in PAGES.items()}
    folder = resources.files("p2pnode.status").joinpath("static")
    end = folder.joinpath(PAGE_END).read_bytes()
    for entry in folder.iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix not in CONTENT_TYPES:
            continue
        body = entry.read_bytes()
        if suffix == ".html":
            body = body.replace(END_LINE, end)
        tag = f'W/"{hashlib.sha256(body).hexdigest()[:16]}"'
        files[names.get(entry.name, STATIC + entry.name)] = File(body, CONTENT_TYPES[suffix], tag)
    return files
