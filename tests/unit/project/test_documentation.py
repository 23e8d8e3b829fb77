"""The documentation: generated pages equal the code, links lead somewhere, snippets are of this version."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from p2pnode.config.load import load
from p2pnode.training.encoding.table import NAMES
from tests.harness.project.documents import FENCE
from tests.harness.project.repository import ROOT
from tools import site_hooks as site
from tools.http_page import http_page
from tools.metrics_page import metrics_page

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))
DOCUMENTS = ["README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md", *PAGES]
#: The names of docs/python-api.md; a longer one with the heading it has there.
API = re.findall(r"^::: (\S+)", (ROOT / "docs/python-api.md").read_text(encoding="utf-8"), re.MULTILINE) + [
    "p2pnode.attach"
]
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """The document and the contents of each fenced block of a language, without its indentation."""
    for document in DOCUMENTS:
        for indent, found, block in FENCE.findall(text_of(document)):
            if found == language:
                yield document, re.sub(rf"^{indent}", "", block, flags=re.MULTILINE)


def anchor(heading: str) -> str:
    """The address of a heading within its page, as MkDocs and code hosts make it."""
    bare = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", bare).strip().replace(" ", "-")


def anchors(document: str) -> set[str]:
    text = FENCE.sub("", text_of(document))
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def test_the_protocol_names_every_codec() -> None:
    """With its number in a frame's header."""
    (row,) = re.findall(r"^\| 1 \| codec: (.*) \|$", text_of("docs/protocol.md"), re.MULTILINE)
    assert row.split(", ") == [f"{number} {name}" for number, name in sorted(NAMES.items())]


@pytest.mark.parametrize(
    ("page", "made"),
    [("docs/http-api.md", http_page), ("docs/metrics.md", metrics_page)],
)
def test_generated_pages_equal_the_code(page: str, made: object) -> None:
    """The page at hand is the one the code generates; `make generated` renews it."""
    assert callable(made)
    assert text_of(page) == made()


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    """Relative links of all documents name a file of the repository, and a heading of it where they name one."""
    broken, counted = [], 0
    for document in DOCUMENTS:
        for target in LINK.findall(FENCE.sub("", text_of(document))):
            if "://" in target or target.startswith("mailto:"):
                continue
            counted += 1
            name, _, part = target.partition("#")
            file = (ROOT / document).parent / name if name else ROOT / document
            found = file.exists()
            if found and part:
                found = part in anchors(file.resolve().relative_to(ROOT).as_posix())
            if not found:
                broken.append(f"{document}: {target}")

    assert broken == []
    assert counted > 50


def test_every_page_is_in_the_navigation_once() -> None:
    """The pages of docs/ are those that mkdocs.yml lists, and files outside docs/ that it lists exist."""
    listed = re.findall(r"^ +- (?:[\w ]+: )?(\S+\.md)$", text_of("mkdocs.yml"), re.MULTILINE)

    own = [f"docs/{name}" for name in listed if not name.startswith(site.PLACE)]
    assert sorted(own) == PAGES
    others = [name.removeprefix(site.PLACE + "/") for name in listed if name.startswith(site.PLACE)]
    assert set(others) <= set(site.outside(ROOT))


def test_the_site_is_strict_and_loads_nothing_from_elsewhere() -> None:
    """A broken link ends the build with an error; fonts and search come from the site itself."""
    settings = yaml.safe_load(text_of("mkdocs.yml"))

    assert settings["strict"] is True
    assert settings["validation"]["links"] == dict.fromkeys(
        ("not_found", "anchors", "absolute_links", "unrecognized_links"), "warn"
    )
    assert settings["theme"]["font"] is False
    assert "offline" in settings["plugins"]
    # Without one of this name the plugin adds a script of unpkg.com.
    assert [name for name in settings["extra"]["polyfills"] if "iframe-worker" in name] == ["assets/iframe-worker.js"]
    assert (ROOT / "docs" / "assets" / "iframe-worker.js").exists()


def test_links_to_files_outside_docs_become_pages(tmp_path: Path) -> None:
    """A script is a page with its source, a folder a list of its files; links among them are of the site."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "examples").mkdir()
    (tmp_path / "docs" / "a.md").write_text("[b](b.md) [own](../examples/own.py) [all](../examples) [top](../TOP.md#x)")
    (tmp_path / "docs" / "b.md").write_text("")
    (tmp_path / "examples" / "own.py").write_text("print(1)\n")
    (tmp_path / "TOP.md").write_text("[a](docs/a.md) [gone](docs/gone.md) [web](https://example.org/x.md)")

    assert site.outside(tmp_path) == ["TOP.md", "examples", "examples/own.py"]
    assert site.relinked((tmp_path / "docs" / "a.md").read_text(), "docs/a.md", tmp_path) == (
        "[b](b.md) [own](repository/examples/own.py.md) [all](repository/examples/index.md) [top](repository/TOP.md#x)"
    )
    assert site.page_of("TOP.md", tmp_path) == "[a](../a.md) [gone](docs/gone.md) [web](https://example.org/x.md)"
    assert site.page_of("examples", tmp_path) == "# examples\n\n* [own.py](own.py.md)"
    assert "```python\nprint(1)\n```" in site.page_of("examples/own.py", tmp_path)


def test_python_snippets_are_python_of_this_version() -> None:
    """Each block compiles, and what it takes from p2pnode, `swarm` or `engine` is documented in the Python API."""
    known, unknown, count = documented(), set(), 0
    for document, block in blocks("python"):
        count += 1
        for node in ast.walk(ast.parse(block, document)):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            if node.attr not in known.get(node.value.id, {node.attr}):
                unknown.add(f"{document}: {node.value.id}.{node.attr}")

    assert unknown == set()
    assert count > 10


def documented() -> dict[str, set[str]]:
    """By the name that snippets give to an object: its public attributes, those that its methods set included."""
    engines = ("peer.PeerToPeer", "server.engine.ParameterServer", "mapreduce.engine.MapReduce")
    return {
        "p2pnode": {name.removeprefix("p2pnode.") for name in API if name.startswith("p2pnode.")},
        "swarm": attributes("p2pnode.training.trainer.attached_swarm.AttachedSwarm"),
        "engine": set().union(*(attributes(f"p2pnode.training.engines.{name}") for name in engines)),
    }


def attributes(name: str) -> set[str]:
    assert name in API
    found = set()
    for base in pkgutil.resolve_name(name).__mro__[:-1]:
        found |= set(vars(base)) | set(re.findall(r"self\.(\w+)(?:: [^=]+)? = ", inspect.getsource(base)))
    return {one for one in found if not one.startswith("_")}


def test_every_name_of_the_python_api_exists() -> None:
    """The site can describe what docs/python-api.md lists: each name, or the class in a module of another library."""
    for name in API:
        module, _, attribute = name.rpartition(".")
        if module.startswith("p2pnode.integrations."):
            source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
            assert f"class {attribute}(" in source
        else:
            assert pkgutil.resolve_name(name).__doc__, name


def test_an_attribute_that_does_not_exist_is_noticed() -> None:
    """The check of snippets is not vacuous."""
    known = documented()

    assert {"step", "done", "workers", "seed", "sampler"} <= known["swarm"]
    assert "no_such_thing" not in known["swarm"] | known["p2pnode"] | known["engine"]
    assert {"attach", "engine"} <= known["p2pnode"]


def test_toml_and_json_snippets_are_of_this_version(tmp_path: Path) -> None:
    """Each block of TOML is a `node.toml` that this version reads, and each block of JSON parses."""
    path = tmp_path / "node.toml"
    settings = list(blocks("toml"))
    for document, block in settings:
        path.write_text(block, encoding="utf-8")
        assert load(path, {}).origins, document
    for document, block in blocks("json"):
        assert json.loads(block) is not None, document

    assert settings
