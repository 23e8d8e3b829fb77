"""The dashboard in a real browser, before a node that shows every state it can have, and some attacks."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from p2pnode.status.pages import read_files
from tests.browser.chromium import LAPTOP, PHONE, Tab, violations
from tests.browser.scenes import (
    EVIL,
    SCENES,
    Scene,
    fault,
    hostile,
    many,
    paused,
    several_parts,
    starting,
    training,
    waiting,
)
from tests.browser.staged_node import TOKEN, StagedNode

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

OpenTab = Callable[..., Tab]
Stage = Callable[..., StagedNode]
#: Of a page with its scripts and styles, as they are before they are compressed.
MOST_BYTES = 150_000
FIRST_PAINT_MS = 1000.0
#: A loaded machine draws later; the median of these loads counts.
LOADS = 5


def changes(tab: Tab, selector: str, attribute: str = "", within_s: float = 5.0) -> str:
    """Wait until a text, or an attribute, is another one, and return it."""
    place = tab.page.locator(selector).first

    def read() -> str:
        return (place.get_attribute(attribute) or "") if attribute else place.inner_text()

    before, end = read(), time.monotonic() + within_s
    while (now := read()) == before:
        assert time.monotonic() < end, f"{selector} is {before!r} for {within_s} s"
        tab.page.wait_for_timeout(50)
    return now


@pytest.mark.parametrize("path", ["/", "/swarm"])
def test_every_state_fits_a_phone_and_has_nothing_that_axe_finds(open_tab: OpenTab, stage: Stage, path: str) -> None:
    """In light and dark, narrow and wide: no sideways scrolling, no violation of any rule, no error in the console."""
    node = stage(training())
    tab = open_tab()
    tab.open(node.url + path)
    found: list[str] = []
    for number, (name, make) in enumerate(SCENES.items()):
        node.show(make())
        tab.page.wait_for_timeout(250)
        for width, colours in ((PHONE, "dark"), (LAPTOP, "light")):
            tab.page.set_viewport_size({"width": width, "height": 900})
            tab.page.emulate_media(color_scheme=colours, reduced_motion="reduce")  # type: ignore[arg-type]
            tab.page.wait_for_timeout(150)
            if over := tab.overflow_px():
                found.append(f"{name}, {width} px: {over} px too wide")
            # axe needs a second: every scene in one of the two, and a fault in both.
            if name == "fault" or (number % 2 == 0) == (width == PHONE):
                found += [f"{name}, {width} px, {colours}: {one}" for one in violations(tab.page)]

    assert found == []
    assert tab.problems == []


def test_no_text_of_others_becomes_markup(open_tab: OpenTab, stage: Stage) -> None:
    """Names, reasons, addresses and events with HTML are shown as they are, on both pages, and nothing of them runs."""
    node = stage(hostile())
    for path in ("/", "/swarm"):
        tab = open_tab()
        tab.open(node.url + path)
        tab.page.wait_for_timeout(400)

        assert tab.page.evaluate("window.owned") is None
        assert tab.page.locator("main img, main script, main iframe, main a").count() == 0
        assert EVIL[1] in tab.text("#whoami"), "the text itself is shown"
        assert tab.problems == []


def test_the_token_is_asked_for_refused_and_kept_in_one_tab(open_tab: OpenTab, stage: Stage) -> None:
    """Off the loopback the page shows nothing before the token, says what is wrong with a wrong one, and forgets none
    at a reload; another tab has to ask again."""
    node = stage(training(), asks_token=True)
    tab = open_tab()
    page = tab.page
    page.goto(node.url)
    page.locator("dialog#token[open]").wait_for()
    assert page.locator("#whoami").inner_text() == ""

    page.locator("#token-input").fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("the token is not this node's").first.wait_for()
    assert page.locator("#whoami").inner_text() == ""

    page.locator("#token-input").fill(f" {TOKEN}\n")
    page.locator("#token-yes").click()
    tab.wait_live()
    page.reload()
    tab.wait_live()
    assert TOKEN not in page.content()
    assert all("401" in problem for problem in tab.problems), "the browser reports refused requests, and nothing else"

    other = open_tab()
    other.page.goto(node.url)
    other.page.locator("dialog#token[open]").wait_for()


def test_the_token_behind_the_address_is_taken_and_removed(open_tab: OpenTab, stage: Stage) -> None:
    """The token that `p2pnode dashboard` puts behind "#" makes the page live at once, and leaves the address."""
    node = stage(training(), asks_token=True)
    tab = open_tab()

    tab.open(f"{node.url}/swarm#token={TOKEN}")

    assert tab.page.url == f"{node.url}/swarm"
    assert tab.problems == []


def test_a_node_that_dies_is_said_and_found_again(open_tab: OpenTab, stage: Stage) -> None:
    """A cut connection is said within seconds, the buttons are off, the last figures stay; a node at the same address
    is shown again without a reload. One that ends in order says that it has ended."""
    node = stage(training())
    tab = open_tab()
    page = tab.open(node.url)

    node.die()
    page.get_by_text("The node does not answer").wait_for(timeout=8000)
    assert tab.text("#state") == "no connection"
    assert page.locator("#pause").is_disabled()
    assert page.locator("#leave").is_disabled()
    assert page.locator("#peers tbody tr").count() == 5

    node.start()
    tab.wait_live()
    assert tab.text("#state") == "training"
    assert page.locator("#notice").is_hidden()
    assert page.locator("#pause").is_enabled()

    node.stop()
    page.get_by_text("The node ended").wait_for(timeout=8000)
    assert tab.text("#state") == "ended"
    assert [one for one in tab.problems if "ERR_CONNECTION_REFUSED" not in one and "ERR_INCOMPLETE" not in one] == []


@pytest.mark.parametrize(("scene", "path", "table"), [(training, "/", "#peers"), (waiting, "/swarm", "#nodes")])
def test_the_tables_of_nodes_fit_a_laptop(
    open_tab: OpenTab, stage: Stage, scene: Callable[[], Scene], path: str, table: str
) -> None:
    """Every column is seen without scrolling, the version of each node among them; one that said none has a dash."""
    tab = open_tab(width=LAPTOP)
    page = tab.open(stage(scene()).url + path)
    rows = page.locator(f"{table} tbody tr")
    rows.first.wait_for()
    assert page.evaluate(f"(found => found.scrollWidth - found.clientWidth)(document.querySelector('{table}'))") <= 0
    title = page.locator(f"{table} th", has_text="Version")
    place = title.evaluate("(found) => found.cellIndex")
    versions = [row.locator("td").nth(place).inner_text() for row in rows.all()]
    assert set(versions) == {"0.1.0", "–"}
    assert tab.problems == []


def test_two_hundred_peers_are_shown_and_the_page_still_answers(open_tab: OpenTab, stage: Stage) -> None:
    """Every peer has a row in a table that scrolls by itself, the swarm's graph draws a part, and a click is answered
    in less than a second while ten updates a second come."""
    node = stage(many())
    tab = open_tab()
    page = tab.open(node.url)
    assert page.locator("#peers tbody tr").count() == 200
    assert "of about 208 nodes" in tab.text("#answers")
    assert page.evaluate("document.querySelector('#peers').clientHeight") <= 480
    began = time.monotonic()
    page.locator("#pause").click()
    page.locator("dialog#confirm[open]").wait_for()
    assert time.monotonic() - began < 1.0
    swarm = open_tab()
    swarm.open(f"{node.url}/swarm")
    assert 1 < swarm.page.locator("#graph .node").count() <= 60
    assert tab.problems == swarm.problems == []


def test_a_clock_that_is_wrong_or_is_set_does_not_stop_the_charts(open_tab: OpenTab, stage: Stage) -> None:
    """A node whose clock is an hour off is live; when its clock is set back by an hour, the charts go on."""
    node = stage(training(), wrong_s=3600.0)
    tab = open_tab()
    tab.open(node.url)
    changes(tab, "#chart-learning .plot", "aria-label")

    node.set_clock(0.0)
    tab.page.wait_for_timeout(300)

    changes(tab, "#chart-learning .plot", "aria-label")
    tab.wait_live()
    assert tab.problems == []


def test_a_slow_line_is_no_silence(open_tab: OpenTab, stage: Stage) -> None:
    """Over a line of 11 kB/s with half a second of delay, on which the history takes longer than the page waits for a
    sign of life, the page becomes live and is never said to be lost."""
    node = stage(training(), past_s=3000)
    tab = open_tab()
    session = tab.context.new_cdp_session(tab.page)
    session.send("Network.enable")
    # In gzip the staged figures, which are regular, would have a tenth of the bytes of real ones.
    tab.context.set_extra_http_headers({"Accept-Encoding": "identity"})
    session.send(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": 500, "downloadThroughput": 11_000, "uploadThroughput": 11_000},
    )
    said: list[str] = []
    tab.page.goto(node.url, timeout=60_000)
    end = time.monotonic() + 60
    while tab.page.locator("body:not(.stale) #whoami:not(:empty)").count() == 0:
        assert time.monotonic() < end, f"not live after a minute; it said {said}"
        if tab.page.locator("#notice").is_visible():
            said.append(tab.text("#notice"))
        tab.page.wait_for_timeout(100)

    assert said == []
    assert tab.problems == []


def test_changes_ask_back_and_the_harmless_answer_has_the_focus(open_tab: OpenTab, stage: Stage) -> None:
    """Pause asks, and asks for the token too; Enter in the question of Leave leaves nothing; Escape changes nothing."""
    node = stage(training())
    tab = open_tab()
    page = tab.open(node.url)

    page.locator("#leave").click()
    page.keyboard.press("Enter")
    page.locator("dialog#confirm").wait_for(state="hidden")
    page.locator("#pause").click()
    page.keyboard.press("Escape")
    page.locator("dialog#confirm").wait_for(state="hidden")
    assert node.requests == []

    page.locator("#pause").click()
    page.locator("#confirm-yes").click()
    page.locator("#token-input").fill(TOKEN)
    page.locator("#token-yes").click()
    page.locator("dialog#token").wait_for(state="hidden")
    while not node.requests:
        page.wait_for_timeout(50)
    assert node.requests == ["pause"]

    node.show(paused())
    page.get_by_role("button", name="Resume").click()
    page.locator("#confirm-yes").click()
    while len(node.requests) < 2:
        page.wait_for_timeout(50)
    assert node.requests == ["pause", "resume"]
    page.locator("#leave").click()
    page.locator("#confirm-yes").click()
    while len(node.requests) < 3:
        page.wait_for_timeout(50)
    assert node.requests[2] == "leave"
    assert tab.problems == []


def test_everything_is_reached_by_the_keyboard(open_tab: OpenTab, stage: Stage) -> None:
    """The first stop is the link past the header, every stop is visible, and tables, ranges and filters are among
    them."""
    node = stage(fault())
    tab = open_tab()
    page = tab.open(node.url)
    stops = []
    for _ in range(30):
        page.keyboard.press("Tab")
        stops.append(
            page.evaluate(
                "(() => { const e = document.activeElement, r = e.getBoundingClientRect();"
                " return [e.id || e.textContent.trim(), r.width > 0 && r.height > 0]; })()"
            )
        )
        if stops[-1][0] == "events":
            break

    names = [name for name, _ in stops]
    assert names[0] == "Skip to the figures"
    assert all(visible for _, visible in stops)
    for wanted in ("This node", "The swarm", "pause", "leave", "5 min", "1 h", "peers", "level", "search", "events"):
        assert wanted in names


def test_filters_and_ranges_do_what_they_say(open_tab: OpenTab, stage: Stage) -> None:
    """Levels and words choose events; a range is marked as chosen; the charts are there at once after a reload."""
    node = stage(fault())
    tab = open_tab()
    page = tab.open(node.url)
    assert page.locator("#events tbody tr").count() == 7

    page.locator("#level").select_option("error")
    assert page.locator("#events tbody tr").count() == 1
    page.locator("#level").select_option("")
    page.locator("#search").fill("codec")
    assert page.locator("#events tbody tr").count() == 1
    assert "codec chosen" in tab.text("#events tbody")

    page.get_by_role("button", name="1 day").click()
    assert page.get_by_role("button", name="1 day").get_attribute("aria-pressed") == "true"
    page.reload()
    tab.wait_live()
    assert "2 %" in (page.locator("#chart-devices .plot").get_attribute("aria-label") or "")


def test_parts_come_and_go_with_the_node(open_tab: OpenTab, stage: Stage) -> None:
    """Devices, values, a server's tasks, shards put back and work in progress are shown where there are some."""
    node = stage(starting())
    tab = open_tab()
    page = tab.open(node.url)
    assert "download of the state, 41 %" in tab.text("#answers")
    assert "410 MB of 990 MB, 17 s to go" in tab.text("#work")
    assert page.locator("#devices-section").is_hidden()

    node.show(several_parts())
    page.locator("#devices tbody tr").first.wait_for()
    assert page.locator("#devices tbody tr").count() == 4
    assert "crashed" in tab.text("#devices")
    assert "divided by" in tab.text("#coordination")
    assert page.locator("#coordination").is_visible()
    facts = tab.text("#facts")
    for wanted in ("Named values", "Parameter server", "Dispatched records", "Put back to a good copy", "Left out"):
        assert wanted in facts
    assert tab.problems == []


def test_a_selection_lives_while_the_numbers_move(open_tab: OpenTab, stage: Stage) -> None:
    """Who has selected the node's address to copy it keeps the selection through updates."""
    node = stage(training())
    tab = open_tab()
    page = tab.open(node.url)
    page.locator("#facts dd", has_text="192.0.2.1:8468").dblclick(position={"x": 20, "y": 10})
    before = page.evaluate("getSelection().toString()")
    changes(tab, "#vitals")

    assert before
    assert page.evaluate("getSelection().toString()") == before


def test_the_pages_are_light_and_paint_soon(open_tab: OpenTab, stage: Stage) -> None:
    """A page with its scripts and styles has less than 150 KB before compression, two fifths of it on the line, and the
    first paint comes within a second."""
    node = stage(training())
    whole = {path: len(file.body) for path, file in read_files().items()}
    for path in ("/", "/swarm"):
        tab = open_tab()
        asked: list[tuple[str, int]] = []
        tab.page.on(
            "requestfinished",
            lambda request, asked=asked: asked.append(
                (request.url.removeprefix(node.url), request.sizes()["responseBodySize"])
            ),
        )
        paints = []
        for _ in range(LOADS):
            tab.open(node.url + path)
            script = (
                "performance.getEntriesByType('paint').find(({ name }) => name === 'first-contentful-paint').startTime"
            )
            tab.page.wait_for_timeout(100)
            paints.append(tab.page.evaluate(script))
        files = {name: size for name, size in asked if name in whole}
        print(path, sum(whole[name] for name in files), "bytes;", paints)

        assert sum(whole[name] for name in files) < MOST_BYTES
        assert sum(size for name, size in asked if name in files) < MOST_BYTES / 2.5
        assert sorted(paints)[LOADS // 2] < FIRST_PAINT_MS
