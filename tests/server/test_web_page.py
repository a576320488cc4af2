"""The web page, in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any

import pytest
from harness import Server, fake_command, serve_command, until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
expect = sync_api.expect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: apt-get install chromium (Debian), then run again"
)
KEY = "a-key-of-the-test"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        root = sys.platform == "linux" and os.getuid() == 0  # the sandbox does not start as root
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if root else [])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a server's page; afterwards the browser must have had nothing to complain of, but what a test allows."""
    contexts: list[Any] = []
    complaints: list[str] = []

    def open(server: Server, view: str = "chat", **context: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **context}))
        page = contexts[-1].new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: message.type in ("error", "warning") and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.complaints = complaints
        page.goto(f"{server.url}/#/{view}")
        return page

    yield open
    for context in contexts:
        context.close()
    assert not complaints


def say(page: Any, text: str, **options: str) -> None:
    """Send a message; options go into the form first."""
    if options:
        page.click("#options")
        for name, value in options.items():
            page.fill(f"[name={name}]", value)
        page.click("#options")
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def without_likelihood(page: Any) -> None:
    """The scripted engine knows no logits."""
    page.click("#options")
    page.uncheck("[name=logprobs]")
    page.click("#options")


# -- what is served


def test_the_page_loads_nothing_but_itself(server):
    reply = server.get("/")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    files = [file for file in resources.files("headrace.server").joinpath("web").iterdir() if file.name != "index.html"]
    assert len(files) > 8
    for file in files:
        found = server.get(f"/web/{file.name}")
        assert found.status == 200 and found.data == file.read_bytes()
        again = server.get(f"/web/{file.name}", **{"if-none-match": found.headers["etag"]})
        assert again.status == 304 and not again.data
        text = file.read_text()
        assert "innerHTML" not in text and "eval(" not in text and "https://" not in text.replace("(https?://", "")
    assert server.ask("POST", "/", b"").status == 405


# -- chat


def test_a_round_of_chat(server, open_page):
    page = open_page(server)
    assert page.evaluate("document.activeElement.id") == "prompt"
    expect(page.locator("#status")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("tiny")
    say(page, "hello", max_tokens="12", temperature="0", seed="1")
    answer = page.locator(".message[aria-label=Answer]")
    expect(answer.locator(".figures")).to_contain_text("tokens")
    text = answer.locator(".text").inner_text()
    expected = server.chat("hello", max_tokens=12, temperature=0).json["choices"][0]["message"]["content"]
    assert "".join(text.split())[:3] == "".join(expected.split())[:3]  # markdown may take signs away

    answer.get_by_role("button", name="Tokens").click()
    tokens = answer.locator(".tokens [role=listitem]")
    assert 1 <= tokens.count() <= 12
    tokens.first.hover()
    expect(page.locator("#popover")).to_contain_text("%")
    assert page.locator("#popover tr").count() == 5
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()

    answer.get_by_role("button", name="Bill").click()
    expect(answer.locator(".bill")).to_contain_text("own decode")

    answer.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".message[aria-label=Answer] .figures")).to_contain_text("tokens")
    assert page.locator(".message").count() == 2
    say(page, "more")
    expect(page.locator(".message .figures")).to_have_count(2)
    expect(page.locator(".regenerate:visible")).to_have_count(1)
    page.click("#clear")
    expect(page.locator(".message")).to_have_count(0)
    expect(page.locator("#welcome")).to_be_visible()


def test_stop(slow, open_page):
    page = open_page(slow)
    without_likelihood(page)
    aborted = slow.metric("headrace_requests_total", outcome="aborted")
    say(page, "xx", max_tokens="3000")
    until(lambda: slow.metric("headrace_requests_running") == 1)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".figures")).to_contain_text("stopped")
    until(slow.is_idle, 2)
    assert slow.metric("headrace_requests_total", outcome="aborted") == aborted + 1
    say(page, "yy")
    until(lambda: slow.metric("headrace_requests_running") == 1)
    page.keyboard.press("Escape")
    expect(page.locator(".figures").last).to_contain_text("stopped")
    until(slow.is_idle, 2)


def test_wrong_options_are_told_beside_them(server, open_page):
    page = open_page(server)
    say(page, "hello", temperature="hot")
    expect(page.locator("#settings-error")).to_contain_text("temperature must be a number")
    assert page.input_value("#prompt") == "hello" and page.locator(".message").count() == 0


def test_errors_of_the_server_are_shown(server, open_page):
    page = open_page(server)
    say(page, "x" * 2000)
    expect(page.locator(".message .error")).to_contain_text("tokens")
    page.complaints[:] = [each for each in page.complaints if "400" not in each]


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**a** *b* `c` ~~d~~", "<p><strong>a</strong> <em>b</em> <code>c</code> <del>d</del></p>"),
        ("# A\nb\n\n---\n> q", "<h2>A</h2><p>b</p><hr><blockquote><p>q</p></blockquote>"),
        ("- a\n- b\n  - c\n\n3. d", '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="3"><li>d</li></ol>'),
        ("```py\n<b>\n```", '<pre tabindex="0"><code data-language="py">&lt;b&gt;</code></pre>'),
        ("```\nunfinished", '<pre tabindex="0"><code>unfinished</code></pre>'),
        (
            "|a|b|\n|-|:-:|\n|1|2|",
            '<table><thead><tr><th scope="col">a</th><th scope="col">b</th></tr></thead>'
            "<tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
        ),
        ("<img src=x onerror=alert(1)><script>", "<p>&lt;img src=x onerror=alert(1)&gt;&lt;script&gt;</p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("snake_case_name 2*3*4 \\*x\\*", "<p>snake_case_name 2<em>3</em>4 *x*</p>"),
    ],
)
def test_markdown(server, markdown, text, html):
    assert markdown(text) == html


@pytest.fixture(scope="module")
def markdown(browser, server):
    page = browser.new_page()
    page.goto(server.url)
    call = """async (text) => {
        const { render } = await import("/web/markdown.js");
        const box = document.createElement("div");
        box.append(render(text));
        return box.innerHTML;
    }"""
    yield lambda text: page.evaluate(call, text)
    page.close()


def test_markdown_of_the_worst_kind_is_quick(server, markdown):
    for text in (
        "`" * 20_000,
        "*" * 20_000,
        "[" * 20_000,
        "> " * 5000,
        "- " * 5000,
        "|-" * 5000,
        "# " + " " * 9000 + "x",
    ):
        assert markdown(text + "\n" + text)
    assert markdown("[a](https://x.example)").startswith('<p><a href="https://x.example/" rel="noopener')


# -- the live view


def test_the_live_view_under_load(server, open_page):
    page = open_page(server, "live")
    body = {"temperature": 1, "max_tokens": 150, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        load = [pool.submit(server.text, f"prompt {i}", **body) for i in range(12)]
        expect(page.locator("#verdict")).to_contain_text("bound by")
        expect(page.locator("#latency tr").first).to_contain_text("s")
        assert all(each.result(30).status == 200 for each in load)
    page.wait_for_function("document.querySelectorAll('#recent button').length >= 8")
    page.focus("#timeline")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#step")).to_contain_text("predicted")
    drawn = "id => document.getElementById(id).getContext('2d').getImageData(0, 0, 2000, 300).data.some(x => x)"
    for chart in ("timeline", "batch", "kv", "queue"):
        assert page.evaluate(drawn, chart), chart
    page.locator("#recent button").first.click()
    expect(page.locator("#bill")).to_contain_text("prompt tokens")
    page.fill("#bill-id", "nobody")
    page.keyboard.press("Enter")
    expect(page.locator("#bill .error")).to_contain_text("no bill")
    page.complaints[:] = [each for each in page.complaints if "404" not in each]


def test_by_keyboard_on_a_phone_in_the_dark(server, open_page):
    page = open_page(
        server, viewport={"width": 360, "height": 640}, color_scheme="dark", is_mobile=True, has_touch=True
    )
    assert page.evaluate("document.activeElement.id") == ""  # a focus would open the keyboard
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#live")).to_be_visible()
    expect(page.locator("#chat")).to_be_hidden()
    for view in ("live", "chat"):
        page.evaluate("view => { location.hash = `/${view}`; }", view)
        page.wait_for_timeout(100)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert int(red) < 50
    unnamed = """() => [...document.querySelectorAll("button, input, textarea, canvas")].filter((each) =>
        !(each.getAttribute("aria-label") || each.textContent.trim() || each.labels?.length)).map((each) => each.id)"""
    assert page.evaluate(unnamed) == []


# -- keys, and the end


def test_an_api_key_is_asked_for(tiny_model, open_page):
    with Server(serve_command(tiny_model, "--served-model-name", "tiny"), {"HEADRACE_API_KEYS": KEY}) as server:
        page = open_page(server)
        expect(page.locator("#key-dialog")).to_be_visible()
        page.fill("#key", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_contain_text("does not know")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("tiny")
        say(page, "hello", max_tokens="3")
        expect(page.locator(".figures")).to_contain_text("tokens")
        assert KEY not in page.evaluate("JSON.stringify({ ...localStorage })") and KEY not in page.content()
        page.close()
        page.complaints[:] = [each for each in page.complaints if "401" not in each]


def test_the_death_of_the_engine_is_shown(tiny_model, open_page):
    with Server(fake_command(tiny_model), {"FAKE_STEP_SECONDS": "0.01"}) as server:
        page = open_page(server)
        without_likelihood(page)
        pid = server.engine_pid
        say(page, "xx", max_tokens="3000")
        until(lambda: server.metric("headrace_requests_running") == 1)
        os.kill(pid, signal.SIGKILL)
        expect(page.locator(".message .error")).to_contain_text("the engine died")
        assert server.process.wait(5) == 1
        expect(page.locator("#notice")).to_contain_text("cannot be reached")
        expect(page.locator("#status")).to_have_attribute("data-state", "gone")
        page.complaints[:] = [each for each in page.complaints if "ERR_CONNECTION" not in each and "503" not in each]


def test_the_live_view_comes_back_with_the_engine(tiny_model, open_page):
    options = ("--on-engine-death", "restart", "--served-model-name", "tiny")
    with Server(serve_command(tiny_model, *options)) as server:
        server.text(max_tokens=40, ignore_eos=True)
        page = open_page(server, "live")
        expect(page.locator("#verdict")).to_contain_text("latest 40 steps")
        os.kill(server.engine_pid, signal.SIGKILL)
        expect(page.locator("#live-error")).to_be_visible()
        until(lambda: server.get("/ready").status == 200, 20)
        server.text(max_tokens=7, ignore_eos=True)
        expect(page.locator("#verdict")).to_contain_text("latest 7 steps", timeout=10_000)
        expect(page.locator("#live-error")).to_be_hidden()
        page.close()  # before its server goes
        page.complaints[:] = [each for each in page.complaints if "503" not in each]
