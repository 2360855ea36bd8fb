"""The page against the real server and the default model: chat, X-ray, memory of an endless stream, live charts."""

import concurrent.futures
import json
import urllib.request

import pytest
from playwright.sync_api import Page, expect


def post(url: str, path: str, body: dict) -> dict:
    """One JSON request."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=110) as response:
        return json.load(response)


@pytest.fixture
def ready(server: str, page: Page) -> Page:
    """The page of the real server, open and connected."""
    page.goto(server)
    expect(page.locator("#status")).to_have_text("ready", timeout=30_000)
    expect(page.locator("#model-name")).not_to_have_text("…")
    return page


def settings(page: Page, **values: object) -> None:
    """Fill controls by name."""
    for name, value in values.items():
        field = page.locator(f"#control-{name}")
        if name == "retention":
            field.select_option(str(value))
        elif isinstance(value, bool):
            field.set_checked(value)
        else:
            field.fill(str(value))


def test_chat_streams_and_stops(ready: Page) -> None:
    settings(ready, max_tokens=2000, ignore_eos=True)
    ready.fill("#prompt", "Tell me a long story about a river.")
    ready.press("#prompt", "Enter")
    expect(ready.locator("#progress")).to_contain_text("a second", timeout=30_000)
    body = ready.locator(".message.assistant .body")
    tokens = "n => parseInt(document.getElementById('progress').textContent) > n"
    ready.wait_for_function(tokens, arg=5, timeout=30_000)
    ready.wait_for_function(tokens, arg=60, timeout=30_000)
    assert len(body.text_content()) > 20
    ready.click("#stop")
    expect(ready.locator("#send")).to_be_enabled(timeout=5000)
    expect(ready.locator(".message.assistant footer")).to_contain_text("stopped by you")
    after = body.text_content()
    ready.wait_for_timeout(500)
    assert body.text_content() == after


def test_xray_numbers_are_the_api_log_probabilities(ready: Page, server: str) -> None:
    prompt = "The capital of France is"
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "seed": 7}
    answer = post(server, "v1/completions", body | {"model": model_of(server), "logprobs": 5})["choices"][0]
    settings(ready, max_tokens=12, temperature=0.7, top_k=5, top_p=0.9, min_p=0.02, seed=7, trace=10)
    ready.click("#tab-complete")
    ready.fill("#completion-text", prompt)
    ready.click("#send")
    expect(ready.locator("#send")).to_be_enabled(timeout=30_000)
    assert ready.locator("#completion-answer").text_content() == answer["text"]
    ready.click("#tab-xray")
    chips = ready.locator(".chip[data-index]")
    assert chips.count() == len(answer["logprobs"]["tokens"])
    for index, logprob in enumerate(answer["logprobs"]["token_logprobs"]):
        chips.nth(index).click()
        shown = float(ready.locator("#inspector [data-logprob]").get_attribute("data-logprob"))
        assert shown == pytest.approx(logprob, abs=1e-4)
    rows = ready.locator("#inspector tbody tr")
    assert rows.count() >= 10
    kept = [row for row in range(rows.count()) if rows.nth(row).get_attribute("data-cut") == "false"]
    assert 1 <= len(kept) <= 5, "top_k 5 leaves at most five"
    assert "cut by" in ready.locator("#inspector").inner_text()


def test_korean_shows_its_bytes(ready: Page) -> None:
    settings(ready, max_tokens=8, temperature=0, trace=3)
    ready.click("#tab-complete")
    ready.fill("#completion-text", "나는 밥을 먹")
    ready.click("#send")
    expect(ready.locator("#send")).to_be_enabled(timeout=30_000)
    ready.click("#tab-xray")
    ready.locator(".chip[data-index]").first.click()
    assert "byte" in ready.locator("#inspector").inner_text()
    assert "\ufffd" not in ready.locator("#view-xray").inner_text()


def test_memory_view_of_a_stream_past_its_window(ready: Page) -> None:
    settings(ready, max_tokens=400, ignore_eos=True, temperature=0, retention="sinks", sink_tokens=4, window=64)
    ready.click("#tab-complete")
    ready.fill("#completion-text", "Once upon a time")
    ready.click("#send")
    ready.click("#tab-memory")
    expect(ready.locator("#memory-blocks .gap")).to_be_visible(timeout=60_000)
    ready.click("#tab-complete")
    expect(ready.locator("#send")).to_be_enabled(timeout=60_000)
    ready.click("#tab-memory")
    held = ready.locator("#memory-blocks .kv:not([data-kind=freed])").count()
    assert 5 <= held <= (4 + 64 + 15) // 16 + 2
    assert ready.locator("#memory-blocks .kv[data-kind=sink]").count() == 1
    assert ready.locator("#memory-blocks .kv[data-kind=newest]").count() == 1
    facts = ready.locator("#memory-facts").inner_text()
    assert "tokens evicted" in facts
    assert "\n0\n" not in facts.split("tokens evicted")[1][:4]


def test_live_charts_move_under_load(ready: Page, server: str) -> None:
    ready.click("#tab-live")
    expect(ready.locator(".chart canvas").first).to_be_visible(timeout=10_000)
    body = {"model": model_of(server), "prompt": "A list of animals:", "max_tokens": 150, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(post, server, "v1/completions", body | {"seed": seed}) for seed in range(4)]
        busy = "() => !/^running 0 /.test(document.querySelector('#chart-requests p').textContent)"
        ready.wait_for_function(busy, timeout=20_000)
        moving = "() => !/^generated 0 /.test(document.querySelector('#chart-tokens p').textContent)"
        ready.wait_for_function(moving, timeout=20_000)
        for job in jobs:
            assert job.result()["usage"]["completion_tokens"] == 150
    note = ready.locator("#chart-gap p").inner_text()
    assert "ms" in note
    assert ready.locator("#chart-batch p").inner_text() != ""
    idle = "() => /^running 0 /.test(document.querySelector('#chart-requests p').textContent)"
    ready.wait_for_function(idle, timeout=20_000)


@pytest.mark.expects_errors
def test_errors_of_the_real_server_are_sentences(ready: Page) -> None:
    settings(ready, retention="sinks", sink_tokens=100, window=50)
    ready.fill("#prompt", "hello")
    ready.press("#prompt", "Enter")
    expect(ready.locator("#banner")).to_contain_text("sink", timeout=10_000)
    expect(ready.locator("#prompt")).to_have_value("hello")


def model_of(server: str) -> str:
    """The name of the served model."""
    with urllib.request.urlopen(server + "v1/models", timeout=10) as response:
        return json.load(response)["data"][0]["id"]
