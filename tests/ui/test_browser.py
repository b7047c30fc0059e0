"""`lowtide ui` in a real Chromium: who may use it, what it shows and does, and what hostile names cannot do.

Needs playwright's Python package and a Chromium on this machine; its screenshots go to `LOWTIDE_TEST_SCREENSHOTS`,
where that is set, and are looked at here for blankness and layout.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from lowtide import Sandbox
from tests.ui.conftest import Fill

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
    pytest.mark.xdist_group("browser"),
]
expect.set_options(timeout=30_000)


@dataclass
class Served:
    """`lowtide ui` as a person starts it."""

    process: subprocess.Popen[str]
    link: str

    @property
    def host(self) -> str:
        return urlsplit(self.link).netloc

    def next_link(self) -> str:
        """The link that the terminal shows after one was used."""
        assert self.process.stdout is not None
        return found_link(self.process.stdout.readline())

    def ask(self, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection(self.host, timeout=30)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers={"Host": self.host, **named})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()


def found_link(line: str) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+/open\?token=\S+", line)
    assert found is not None, line
    return found.group()


@pytest.fixture
def served() -> Iterator[Served]:
    process = subprocess.Popen(
        [sys.executable, "-m", "lowtide", "ui", "--no-open"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield Served(process, found_link(process.stdout.readline()))
    finally:
        process.terminate()
        assert process.wait(30) == 0
        process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    yield made
    made.close()


@pytest.fixture
def page(context: BrowserContext, served: Served) -> Iterator[Page]:
    """The page, opened by the link. An error of its script, or anything that its policy stopped, fails the test.

    Requests that the server answers with an error are named by the page itself, and are none of them.
    """
    wrong: list[str] = []

    def note(line: ConsoleMessage) -> None:
        if line.type == "error" and not line.text.startswith("Failed to load resource"):
            wrong.append(line.text)

    opened = context.new_page()
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", note)
    opened.goto(served.link)
    expect(opened.get_by_text("live", exact=True)).to_be_visible()
    yield opened
    assert wrong == []


def looked_at(page: Page, name: str) -> None:
    """Take a screenshot: it shows something, and nothing is wider than the window."""
    picture = page.screenshot()
    if place := os.environ.get("LOWTIDE_TEST_SCREENSHOTS"):
        Path(place, f"{name}.png").write_bytes(picture)
    colours, wide = page.evaluate(
        """async ([bytes]) => {
            const image = await createImageBitmap(new Blob([new Uint8Array(bytes)], { type: "image/png" }));
            const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
            canvas.drawImage(image, 0, 0);
            const seen = new Set(new Uint32Array(canvas.getImageData(0, 0, image.width, image.height).data.buffer));
            return [seen.size, document.scrollingElement.scrollWidth - innerWidth];
        }""",
        [list(picture)],
    )
    assert colours > 20, f"{name} is blank: {colours} colours"
    assert wide <= 0, f"{name} is {wide} pixels wider than the window"


def listed(page: Page, sandbox: Sandbox) -> None:
    page.get_by_role("link", name="Sandboxes").click()
    expect(page.get_by_role("row", name=sandbox.sandbox_id)).to_be_visible()


def opened_sandbox(page: Page, sandbox: Sandbox) -> None:
    listed(page, sandbox)
    page.get_by_role("row", name=sandbox.sandbox_id).click()
    expect(page.get_by_role("heading", name="Files")).to_be_visible()


class TestWhoMay:
    def test_a_link_opens_one_browser_and_another_one_is_printed(self, served: Served) -> None:
        path = served.link.partition(served.host)[2]
        status, headers, _ = served.ask("GET", path)
        assert status == 303
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert served.ask("GET", path)[0] == 403
        assert served.ask("GET", "/", Cookie=cookie.partition(";")[0])[0] == 200
        another = served.next_link()
        assert served.ask("GET", another.partition(served.host)[2])[0] == 303

    @pytest.mark.parametrize("path", ["/", "/api/fleet", "/api/events", "/api/settings", "/app.js"])
    def test_nothing_is_answered_without_the_cookie(self, served: Served, path: str) -> None:
        assert served.ask("GET", path)[0] == 403

    def test_other_hosts_and_origins_are_refused_with_the_cookie_too(self, served: Served) -> None:
        cookie = served.ask("GET", served.link.partition(served.host)[2])[1]["Set-Cookie"].partition(";")[0]
        own = f"http://{served.host}"
        assert served.ask("GET", "/api/fleet", Cookie=cookie)[0] == 200
        assert served.ask("GET", "/api/fleet", Cookie=cookie, Host="attacker.example")[0] == 403
        assert served.ask("GET", "/api/fleet", Cookie=cookie, Origin="http://attacker.example")[0] == 403
        assert served.ask("GET", "/api/fleet", Cookie=cookie, Sec_Fetch_Site="same-site")[0] == 403
        assert served.ask("POST", "/api/sweep", Cookie=cookie)[0] == 403  # no origin at all
        assert (
            served.ask("POST", "/api/sweep", Cookie=cookie, Origin=own)[0] == 409
        )  # ours: nothing previewed
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        shell = "/api/sandbox/local/x/terminal"
        assert served.ask("GET", shell, Cookie=cookie, Origin="http://127.0.0.1:1", **upgrade)[0] == 403
        assert served.ask("GET", shell, Cookie=cookie, **upgrade)[0] == 403

    def test_every_answer_has_the_security_headers(self, served: Served) -> None:
        answers = [served.ask("GET", path) for path in ("/", "/nothing", "/open?token=wrong")]
        answers.append(served.ask("GET", served.link.partition(served.host)[2]))
        for _, headers, _ in answers:
            assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Cache-Control"] == "no-store"

    def test_it_listens_on_loopback_only(self, served: Served) -> None:
        listening = Path(f"/proc/{served.process.pid}/net/tcp").read_text()
        port = f"{int(served.host.rpartition(':')[2]):04X}"
        places = {line.split()[1] for line in listening.splitlines()[1:] if line.split()[3] == "0A"}
        assert {place for place in places if place.endswith(f":{port}")} == {f"0100007F:{port}"}


class TestOneSandbox:
    def test_commands_files_terminal_and_the_end(self, page: Page) -> None:
        with Sandbox.run(tags=["seen-in-ui"]) as sandbox:
            sandbox.write_file("/tmp/tide.txt", b"low water at noon\n").result()
            opened_sandbox(page, sandbox)
            expect(page.get_by_text("seen-in-ui")).to_be_visible()
            expect(page.get_by_role("img", name="Lease: ")).to_be_visible()

            page.get_by_label("Shell command").fill("echo out; echo err >&2; exit 3")
            page.get_by_label("Shell command").press("Enter")
            expect(page.get_by_text("exit 3 after")).to_be_visible()
            expect(page.locator("pre", has_text="out")).to_be_visible()
            expect(page.locator("pre.dead", has_text="err")).to_be_visible()

            page.get_by_label("Directory").fill("/tmp")
            page.get_by_label("Directory").press("Enter")
            page.get_by_role("button", name="tide.txt").click()
            expect(page.get_by_text("low water at noon")).to_be_visible()

            page.get_by_role("button", name="Open a terminal").click()
            shell = page.frame_locator("iframe")
            shell.locator(".xterm-helper-textarea").press_sequentially("echo $((6*7))-typed\n")
            expect(shell.locator(".xterm-accessibility")).to_contain_text("42-typed")

            page.get_by_role("button", name="Destroy", exact=True).first.click()
            question = page.get_by_role("dialog")
            expect(question).to_contain_text("is alive")
            question.get_by_role("button", name="Cancel").click()
            assert sandbox.status == "running"
            page.get_by_role("button", name="Destroy", exact=True).first.click()
            question.get_by_role("button", name="Destroy").click()
            expect(page.locator("td .state")).to_have_text("terminated")
            expect(page.get_by_role("heading", name="Files")).to_have_count(0)

    def test_nothing_that_a_sandbox_names_or_prints_becomes_markup(self, page: Page, fill: Fill) -> None:
        markup = "<img src=x onerror=window.owned=1><script>window.owned=1<"
        fill(3, name=markup)
        with Sandbox.run() as sandbox:
            sandbox.exec(
                ["sh", "-c", 'mkdir "/tmp/$1"; printf %s "$2" > "/tmp/$1/$1.html"', "sh", markup, markup]
            ).result(60)
            opened_sandbox(page, sandbox)
            page.get_by_label("Directory").fill("/tmp")
            page.get_by_label("Directory").press("Enter")
            page.get_by_role("button", name=markup).click()
            page.get_by_role("button", name=f"{markup}.html").click()
            expect(page.locator("pre", has_text=markup)).to_be_visible()
            page.get_by_label("Shell command").fill(f"printf %s '{markup}'; printf %s '{markup}' >&2")
            page.get_by_label("Shell command").press("Enter")
            expect(page.get_by_text("exit 0 after")).to_be_visible()
            page.get_by_role("link", name="Overview").click()
            expect(page.get_by_role("heading", name="Overview")).to_be_visible()
            page.get_by_role("link", name="Sandboxes").click()
            expect(page.get_by_text(f"{markup}-tag").first).to_be_visible()
            page.get_by_role("row", name=markup).first.click()
            expect(page.get_by_role("heading", name=markup)).to_be_visible()
            assert page.evaluate("window.owned") is None

    def test_a_page_of_a_sandbox_is_never_shown_as_a_page(self, page: Page, served: Served) -> None:
        with Sandbox.run() as sandbox:
            sandbox.write_file("/tmp/a.html", b"<script>document.title = 'owned'</script>").result()
            listed(page, sandbox)
            base = f"http://{served.host}/api/sandbox/local/{sandbox.sandbox_id}"
            asked = page.context.request
            assert (
                asked.get(f"{base}/file?path=/tmp/a.html")
                .headers["content-type"]
                .startswith("application/json")
            )
            assert asked.get(f"{base}/image?path=/tmp/a.html").status == 415


class TestManySandboxes:
    def test_a_thousand_are_listed_filtered_and_walked_by_keyboard(self, page: Page, fill: Fill) -> None:
        fill(1000)
        page.keyboard.press("2")
        expect(page.get_by_text("1000 shown")).to_be_visible()
        assert page.locator(".tall > .row").count() < 100  # only what can be seen is in the document
        looked_at(page, "thousand")
        page.keyboard.press("/")
        page.keyboard.type("job-7")
        expect(page.get_by_text("100 shown")).to_be_visible()
        page.keyboard.press("Escape")
        for _ in range(40):
            page.keyboard.press("j")
        focused = page.evaluate("document.activeElement.getAttribute('aria-rowindex')")
        assert focused == "40"
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Facts")).to_be_visible()

    def test_a_sweep_shows_first_what_it_would_do_and_leaves_what_a_living_process_owns(
        self, page: Page
    ) -> None:
        with Sandbox.run() as sandbox:
            listed(page, sandbox)
            page.keyboard.press("3")
            row = page.get_by_role("row", name=sandbox.sandbox_id)
            expect(row).to_contain_text("left")
            expect(row).to_contain_text("is alive")
            expect(page.get_by_role("button", name="Destroy 0 orphans")).to_be_disabled()


class TestLooks:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("size", [(1280, 800), (390, 844)], ids=["desktop", "phone"])
    def test_every_page_shows_something_and_fits(
        self, browser: Browser, served: Served, scheme: str, size: tuple[int, int]
    ) -> None:
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,  # type: ignore[arg-type]
        )
        with Sandbox.run(tags=["train", "team-a"]) as sandbox:
            page = context.new_page()
            page.goto(served.link)
            expect(page.get_by_text("live", exact=True)).to_be_visible()
            name = f"{scheme}-{size[0]}"
            expect(page.get_by_text("open sandboxes", exact=True).first).to_be_visible()
            looked_at(page, f"overview-{name}")
            opened_sandbox(page, sandbox)
            looked_at(page, f"sandbox-{name}")
            page.get_by_role("link", name="Sweep").click()
            expect(page.get_by_role("row", name=sandbox.sandbox_id)).to_be_visible()
            looked_at(page, f"sweep-{name}")
            page.get_by_role("link", name="Settings").click()
            expect(page.get_by_text("checking this machine…")).to_have_count(0)
            looked_at(page, f"settings-{name}")
        context.close()

    def test_every_control_has_a_name_and_every_page_a_heading(self, page: Page) -> None:
        with Sandbox.run() as sandbox:
            for visit in (None, sandbox):
                if visit is not None:
                    opened_sandbox(page, visit)
                nameless = page.evaluate(
                    """() => [...document.querySelectorAll("button, a, input, select")].filter((one) =>
                        one.offsetParent && !one.textContent.trim() && !one.getAttribute("aria-label") && !one.labels?.length
                    ).map((one) => one.outerHTML)"""
                )
                assert nameless == []
                assert page.locator("h1").count() == 1
