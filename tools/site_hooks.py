"""Hooks of MkDocs: files outside docs/ that a page links to become pages of the site, and links to them follow.

On a code host `../examples/own_loop.py` opens the file. On the site it has to be a page, or the link would be broken.
So every file of the repository that a page links to is added below `repository/`: Markdown as it is, anything else as
a block of code, a folder as a list of its files. A link to a file that does not exist is left, and the strict build
fails.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs"
PLACE = "repository"
#: A link or an image: its text, its target, and the part behind `#`.
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
#: How docstrings name a page.
DOCSTRING_LINK = re.compile(r"\(docs/([\w-]+)\.md\)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".conf": "ini"}
#: Kept by git, or worth no page.
SKIPPED = {"__pycache__"}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files outside docs/, those that are linked from them included."""
    from mkdocs.structure.files import File

    for path in outside(ROOT):
        files.append(File.generated(config, uri_of(path, ROOT), content=page_of(path, ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let the links of a page in docs/ lead to those pages."""
    uri = page.file.src_uri
    return markdown if uri.startswith(PLACE + "/") else relinked(markdown, f"{DOCS}/{uri}", ROOT)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Let a docstring that names a page of docs/ lead to it."""
    return DOCSTRING_LINK.sub(r'(<a href="\1.html">\1.md</a>)', html) if page.file.src_uri == "python-api.md" else html


def outside(root: Path) -> list[str]:
    """The files and folders outside docs/ that its pages link to, or that those link to, in order."""
    found: dict[str, None] = {}
    waiting = [f"{DOCS}/{path.relative_to(root / DOCS).as_posix()}" for path in sorted((root / DOCS).rglob("*.md"))]
    while waiting:
        page = waiting.pop()
        for target in sorted(_links(page, root)):
            if not target.startswith(DOCS + "/") and target not in found:
                found[target] = None
                waiting.append(target)
    return sorted(found)


def uri_of(path: str, root: Path) -> str:
    """Where a file or folder of the repository is on the site."""
    if path.startswith(DOCS + "/"):
        return path.removeprefix(DOCS + "/")
    if (root / path).is_dir():
        return f"{PLACE}/{path}/index.md"
    return f"{PLACE}/{path}" if path.endswith(".md") else f"{PLACE}/{path}.md"


def page_of(path: str, root: Path) -> str:
    """The page of a file or folder outside docs/."""
    file = root / path
    if file.is_dir():
        listed = [f"* [{one.name}]({path}/{one.name})" for one in _listed(file)]
        return _titled(path, relinked("\n".join(listed), "", root, at=uri_of(path, root)))
    text = file.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return relinked(text, path, root)
    fence = "````" if "```" in text else "```"
    return _titled(path, f"{fence}{LANGUAGES.get(file.suffix, '')}\n{text.rstrip()}\n{fence}\n")


def relinked(markdown: str, path: str, root: Path, at: str = "") -> str:
    """The text of the repository's file `path`, with its links as they are on the site. `at`: its page's address."""
    page = at or uri_of(path, root)

    def replaced(found: re.Match[str]) -> str:
        target = _resolved(found[2], path, root)
        if target is None:
            return found[0]
        uri = posixpath.relpath(uri_of(target, root), posixpath.dirname(page) or ".")
        return f"{found[1]}{uri}{found[3] or ''}{found[4]}"

    return LINK.sub(replaced, markdown)


def _links(path: str, root: Path) -> set[str]:
    """The repository's files and folders that a file links to."""
    file = root / path
    if file.is_dir():
        return {f"{path}/{one.name}" for one in _listed(file)}
    if not path.endswith(".md"):
        return set()
    links = LINK.findall(file.read_text(encoding="utf-8"))
    return {target for _, link, _, _ in links if (target := _resolved(link, path, root)) is not None}


def _resolved(link: str, path: str, root: Path) -> str | None:
    """The repository's file that a link in the file `path` means; None for addresses and for what does not exist."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return None if target.startswith("..") or not (root / target).exists() else target


def _listed(folder: Path) -> list[Path]:
    return [one for one in sorted(folder.iterdir()) if one.name not in SKIPPED and not one.name.startswith(".")]


def _titled(path: str, text: str) -> str:
    return f"# {path}\n\n{text}"
