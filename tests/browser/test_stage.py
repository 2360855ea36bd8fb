"""The page against scripted answers: hostile content, errors, twenty thousand tokens, size, keyboard, phone, axe."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.stage import Stage

AXE = Path(__file__).parent / "vendor" / "axe.min.js"
HOSTILE = (
    "<script>window.pwned = 1</script>\n\n"
    '<img src="x" onerror="window.pwned = 2">\n\n'
    "[click](javascript:window.pwned=3) ![picture](http://example.invalid/x.png)\n\n"
    '<a href="javascript:window.pwned=4">raw link</a> <iframe srcdoc="<script>parent.pwned=5</script>"></iframe>\n\n'
    "<style>body { display: none }</style>\n\n"
    "`<b onclick=window.pwned=6>`\n\n"
)
BIDI = "safe \u202e gnp.exe \u2066 hidden \u2069 \u200f end\n\n"


def send(page: Page, text: str) -> None:
    """Type a message and press Enter."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def wait_for_end(page: Page, seconds: float = 30) -> None:
    """Until the answer is complete."""
    expect(page.locator("#stop")).to_be_disabled(timeout=seconds * 1000)
    expect(page.locator("#send")).to_be_enabled()


@pytest.fixture
def ready(stage: Stage, page: Page) -> Page:
    """The page, open and connected."""
    page.goto(stage.url)
    expect(page.locator("#status")).to_have_text("ready")
    return page


def test_hostile_content_is_shown_and_never_run(ready: Page, stage: Stage) -> None:
    requests: list[str] = []
    ready.on("request", lambda request: requests.append(request.url))
    stage.play(*HOSTILE, BIDI, "w" * 10_000, "\n\n| a | b |\n|---|---|\n| <u>1</u> | 2 |\n", trace=True)
    send(ready, HOSTILE)
    wait_for_end(ready)
    assert ready.evaluate("window.pwned") is None
    body = ready.locator(".message.assistant .body")
    expect(body).to_contain_text("<script>window.pwned = 1</script>")
    expect(body).to_contain_text('<img src="x" onerror="window.pwned = 2">')
    assert body.locator("script, img, iframe, style, b, u").count() == 0
    links = body.locator("a").evaluate_all("all => all.map(a => a.href)")
    assert all(link == "" or link.startswith("http") for link in links), links
    expect(ready.locator(".message.user .body")).to_contain_text("<script>window.pwned = 1</script>")
    assert ready.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a long word widens the page"
    assert all(url.startswith(stage.url) for url in requests), "the page asked somebody else"
    ready.click("#tab-xray")
    ready.locator(".chip").first.hover()
    assert ready.evaluate("window.pwned") is None
    assert "\u202e" not in ready.locator("#chips").inner_text(), (
        "a bidirectional mark in a chip turns its neighbours round"
    )
    ready.reload()
    expect(ready.locator(".message.assistant .body")).to_contain_text("<script>window.pwned = 1</script>")
    assert ready.evaluate("window.pwned") is None


def test_markdown_is_rendered(ready: Page, stage: Stage) -> None:
    stage.play("# Title\n\nSome **bold** text and `code`.\n\n```python\nx = 1\n\ny = 2\n```\n\n- one\n- two\n")
    send(ready, "go")
    wait_for_end(ready)
    body = ready.locator(".message.assistant .body")
    assert body.locator("h1").inner_text() == "Title"
    assert body.locator("strong").inner_text() == "bold"
    assert "x = 1\n\ny = 2" in body.locator("pre code").inner_text()
    assert body.locator("li").count() == 2


def test_twenty_thousand_tokens_stay_smooth(ready: Page, stage: Stage) -> None:
    words = [f"word{i} " if i % 50 else f"word{i}.\n\n" for i in range(20_000)]
    stage.play(*words, rate=2000, trace=True)
    ready.evaluate(
        """() => { window.frames_ = []; let last = performance.now();
        const tick = (now) => {
          window.frames_.push(now - last);
          last = now;
          if (!window.enough) requestAnimationFrame(tick);
        };
        requestAnimationFrame(tick); }"""
    )
    send(ready, "go")
    wait_for_end(ready, 90)
    frames = sorted(ready.evaluate("() => { window.enough = true; return window.frames_.slice(5); }"))
    median, p95, worst = (frames[int(q * (len(frames) - 1))] for q in (0.5, 0.95, 1.0))
    print(f"frames {len(frames)}: median {median:.1f} ms, 95 % {p95:.1f} ms, worst {worst:.0f} ms")
    assert ready.evaluate("document.querySelectorAll('.chip[data-index]').length") == 20_000
    assert "word19999" in ready.locator(".message.assistant .body").text_content()
    assert median <= 34
    assert p95 <= 100
    assert worst <= 1000


def test_first_load_is_small_and_asks_nobody_else(stage: Stage, page: Page) -> None:
    client = page.context.new_cdp_session(page)
    client.send("Network.enable")
    sizes: dict[str, float] = {}
    client.on(
        "Network.loadingFinished", lambda event: sizes.__setitem__(event["requestId"], event["encodedDataLength"])
    )
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto(stage.url, wait_until="load")
    expect(page.locator("#status")).to_have_text("ready")
    total = sum(sizes.values())
    print(f"first load: {total / 1000:.1f} kB in {len(sizes)} files")
    assert 20_000 < total < 150_000
    assert all(url.startswith((stage.url, "blob:")) for url in urls)


@pytest.mark.expects_errors
def test_errors_are_sentences_and_the_text_is_not_lost(ready: Page, stage: Stage) -> None:
    stage.play(error="temperature must be between 0 and 2: choose a smaller one.")
    send(ready, "my long question")
    expect(ready.locator("#banner")).to_have_text("temperature must be between 0 and 2: choose a smaller one.")
    expect(ready.locator("#prompt")).to_have_value("my long question")
    stage.play("half an ", error="The worker ended: send the request again.")
    send(ready, "again")
    expect(ready.locator("#banner")).to_have_text("The worker ended: send the request again.")
    expect(ready.locator(".message.assistant").last).to_contain_text("half an")
    stage.play("cut ", cut=True)
    send(ready, "again")
    expect(ready.locator("#banner")).to_contain_text("lost before the answer was complete")


def test_a_bad_value_is_caught_before_sending(ready: Page, stage: Stage) -> None:
    ready.fill("#control-temperature", "7")
    send(ready, "hello")
    expect(ready.locator("#banner")).to_contain_text("temperature")
    expect(ready.locator("#control-temperature")).to_be_focused()
    assert stage.script.bodies == []


def test_every_control_reaches_the_request(ready: Page, stage: Stage) -> None:
    names = ready.evaluate(
        """() => { const form = document.getElementById('controls'); const names = [];
        for (const input of form.elements) {
          if (!input.name) continue;
          names.push(input.name);
          if (input.type === 'checkbox') input.checked = true;
          else if (input.tagName === 'SELECT') input.value = 'sinks';
          else if (input.tagName === 'TEXTAREA') input.value = 'STOP HERE';
          else {
            const whole = input.step === '1';
            const [low, high] = [Number(input.min), Number(input.max)];
            input.value = low >= 1 ? Math.min(high, low + 2) : high >= 2 ? (whole ? 3 : 1.5) : 0.5;
          }
        }
        return names; }"""
    )
    stage.play("ok")
    send(ready, "hello")
    wait_for_end(ready)
    body = stage.script.bodies[-1]
    inside = set(body) | set(body["retention"]) | {"system" if body["messages"][0]["role"] == "system" else ""}
    missing = [name for name in names if name not in inside]
    assert missing == []


def test_keyboard_only(ready: Page, stage: Stage) -> None:
    stage.play("alpha ", "beta ", "gamma", trace=True)
    ready.keyboard.press("Tab")
    expect(ready.locator(".skip")).to_be_focused()
    ready.focus("#prompt")
    ready.keyboard.type("hi")
    ready.keyboard.press("Enter")
    wait_for_end(ready)
    ready.focus("#tab-chat")
    ready.keyboard.press("ArrowRight")
    expect(ready.locator("#tab-complete")).to_be_focused()
    ready.keyboard.press("ArrowRight")
    expect(ready.locator("#view-xray")).to_be_visible()
    for _ in range(60):
        ready.keyboard.press("Tab")
        if ready.evaluate("document.activeElement.classList.contains('chip')"):
            break
    ready.keyboard.press("ArrowRight")
    expect(ready.locator("#inspector")).to_contain_text("beta")
    ready.keyboard.press("End")
    expect(ready.locator("#inspector")).to_contain_text("gamma")
    stage.play(*["slow "] * 500, rate=50)
    ready.focus("#tab-chat")
    ready.keyboard.press("Home")
    ready.focus("#prompt")
    ready.keyboard.type("more")
    ready.keyboard.press("Enter")
    expect(ready.locator(".message.assistant").last).to_contain_text("slow slow")
    ready.keyboard.press("Escape")
    wait_for_end(ready, 5)
    expect(ready.locator(".message.assistant").last).to_contain_text("stopped by you")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (375, 740)], ids=["desk", "phone"])
def test_accessible_in_every_view(ready: Page, stage: Stage, scheme: str, size: tuple[int, int]) -> None:
    ready.emulate_media(color_scheme=scheme)
    ready.set_viewport_size({"width": size[0], "height": size[1]})
    stage.play("A *short* answer.", " With `code`.", trace=True)
    send(ready, "hello")
    wait_for_end(ready)
    # The policy forbids inline scripts, so axe comes in through the debugger and not through the page.
    source = AXE.read_text(encoding="utf-8")
    for view in ("chat", "complete", "xray", "memory", "live"):
        ready.click(f"#tab-{view}")
        if view == "xray":
            ready.locator(".chip[data-index]").first.click()
        assert ready.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} is wider than the screen"
        ready.evaluate(source)
        found = ready.evaluate("axe.run(document, {resultTypes: ['violations']}).then(r => r.violations)")
        told = [(v["id"], [node["target"] for node in v["nodes"]][:3]) for v in found]
        assert told == [], f"{view}: {json.dumps(told)}"


def test_conversations_are_kept_exported_and_imported(ready: Page, stage: Stage, tmp_path: Path) -> None:
    stage.play("the answer")
    send(ready, "the question")
    wait_for_end(ready)
    ready.click("#conversations-box summary")
    with ready.expect_download() as download:
        ready.click("#conversation-export")
    saved = tmp_path / "saved.json"
    download.value.save_as(saved)
    data = json.loads(saved.read_text())
    assert data["conversations"][0]["messages"] == [
        {"role": "user", "content": "the question"},
        {"role": "assistant", "content": "the answer"},
    ]
    ready.get_by_label("Delete “the question”").click()
    assert ready.locator(".conversations .name").count() == 0
    ready.set_input_files("#conversation-import", saved)
    expect(ready.locator(".conversations .name")).to_have_text("the question")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    ready.set_input_files("#conversation-import", broken)
    expect(ready.locator("#banner")).to_contain_text("no JSON")


def test_code_can_be_copied(ready: Page, stage: Stage) -> None:
    ready.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ready.fill("#prompt", 'it\'s "quoted"')
    ready.click("#code-box summary")
    ready.click("#copy-curl")
    curl = ready.evaluate("navigator.clipboard.readText()")
    assert curl.startswith("curl -N http://127.0.0.1")
    assert "it'\\''s" in curl
    ready.click("#copy-python")
    python = ready.evaluate("navigator.clipboard.readText()")
    compile(python, "copied", "exec")
    assert "client.chat.completions.create(" in python


@pytest.mark.expects_errors
def test_a_restart_and_a_lost_server_are_shown(ready: Page, stage: Stage) -> None:
    stage.play(ready=False)
    expect(ready.locator("#status")).to_have_text("restarting", timeout=5000)
    stage.play(ready=True)
    expect(ready.locator("#status")).to_have_text("ready", timeout=5000)
    expect(ready.locator("#banner")).to_be_hidden()
    stage.stop()
    expect(ready.locator("#status")).to_have_text("connection lost", timeout=15000)
    expect(ready.locator("#banner")).to_contain_text("trying again")
