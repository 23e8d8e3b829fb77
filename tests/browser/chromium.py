"""A real browser for the tests of the dashboard and for its screenshots: Chromium, driven by playwright.

Both are optional: `make test-browser` installs the packages, `.ci/run` the browser.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

#: Where a browser is, if its name is not on the path.
VARIABLE = "P2PNODE_CHROMIUM"
NAMES = ("chromium", "chromium-browser", "google-chrome")
#: The widths at which the pages are looked at: a phone, a tablet, a laptop.
PHONE, TABLET, LAPTOP = 360, 768, 1280
#: No sandbox: tests run as root in containers, where Chromium has none, and the pages are our own.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--font-render-hinting=none")


def missing() -> str:
    """What has to be installed before a browser can be started; empty where all is there."""
    for package in ("playwright", "axe_playwright_python"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: make test-browser"
    if executable() is None:
        return f"Chromium is not installed: apt-get install chromium, or name it in {VARIABLE}"
    return ""


def executable() -> str | None:
    """The path of a Chromium."""
    named = os.environ.get(VARIABLE)
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A running browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=executable(), args=[*ARGUMENTS])
        try:
            yield found
        finally:
            found.close()


class Tab:
    """A page in a profile of its own. `problems` has everything that went wrong in it: errors and warnings of the
    console, exceptions, refused content, and requests that failed."""

    def __init__(self, found: Browser, *, width: int = LAPTOP, height: int = 900, dark: bool = False) -> None:
        self.context = found.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            locale="en-GB",
            timezone_id="UTC",
            reduced_motion="reduce",
        )
        self.context.set_default_timeout(15_000)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("requestfailed", self._on_failed)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text} ({message.location.get('url', '')})")

    def _on_failed(self, request: Any) -> None:
        # What the page itself closes, as its stream where the page is left, has not failed.
        if "ERR_ABORTED" not in (request.failure or ""):
            self.problems.append(f"failed: {request.url}: {request.failure}")

    def open(self, url: str) -> Page:
        """Load a page, and wait until it shows a node."""
        self.page.goto(url)
        self.wait_live()
        return self.page

    def wait_live(self, within_s: float = 15.0) -> None:
        """Wait until the page shows what the node says now."""
        # Not by a function: the policy of the pages evaluates none.
        self.page.locator("body:not(.stale) #whoami:not(:empty)").wait_for(timeout=1000 * within_s)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

    def overflow_px(self) -> int:
        """By how much the page is wider than the screen."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def close(self) -> None:
        self.context.close()


def violations(page: Page) -> list[str]:
    """What axe-core finds: its rule, its impact, and the first elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']} ({one['impact']}): {one['help']}: " + "; ".join(node["html"][:160] for node in one["nodes"][:4])
        for one in found
    ]
