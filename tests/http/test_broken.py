"""Streams that break off: what the log, the counters and the client see of each, once."""

import io
import json
import logging
import threading
import time

import httpx
import pytest

from app import logs
from app.connections import Chunks
from tests.http.reading import error_of
from tests.http.test_streams import both

SECRET = "nobody reads this"


@pytest.fixture
def lines():
    """The log as the service writes it: a function that gives its lines of one request."""
    root = logging.getLogger()
    before, stream = (root.handlers[:], root.level, logging.raiseExceptions), io.StringIO()
    logs.configure("info", stream)

    def of(response):
        end = time.monotonic() + 5
        while time.monotonic() < end:  # the last line comes after the last byte
            told = [json.loads(line) for line in stream.getvalue().splitlines()]
            mine = [line for line in told if line["request_id"] == response.headers["x-request-id"]]
            if any(line["event"] == "request" for line in mine):
                assert SECRET not in stream.getvalue()
                return mine
            time.sleep(0.01)
        raise AssertionError(stream.getvalue())

    yield of
    root.handlers[:], logging.raiseExceptions = before[0], before[2]
    root.setLevel(before[1])


def ended(served, reason):
    return served.metrics.registry.get_sample_value("everstream_request_success_total", {"finished_reason": reason})


def rejected(served, reason):
    return served.metrics.registry.get_sample_value("everstream_admission_rejections_total", {"reason": reason}) or 0


def last_error(response):
    assert response.status_code == 200
    return json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]


@both
@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_broken_request_is_logged_once_with_its_code_and_sentence(serve, lines, path, body, streamed):
    served = serve(settings={"request_timeout": 0.4}, delay=0.05)
    before = ended(served, "error")
    response = served.post(path, {**body, "user": SECRET, "max_tokens": 1000, "stream": streamed})
    error = last_error(response) if streamed else error_of(response, 504)
    broken, request = lines(response)
    assert (broken["event"], broken["error"], broken["level"]) == ("stream broken", "timeout", "warning")
    assert broken["sentence"] == error["message"]
    assert broken["tokens"] > 0
    assert (request["event"], request["status"], request["error"]) == ("request", 200 if streamed else 504, "timeout")
    assert ended(served, "error") == before + 1


@both
def test_a_fault_of_the_servers_own_is_logged_with_its_cause_and_counted(served, lines, monkeypatch, path, body):
    def full(chunks, data):
        raise ValueError("no words for this")

    before = ended(served, "error"), ended(served, "abort")
    monkeypatch.setattr(Chunks, "write", full)
    broken, request = lines(served.post(path, {**body, "max_tokens": 20, "stream": True}))
    assert (broken["event"], broken["error"], broken["level"]) == ("stream broken", "internal_error", "error")
    assert "no words for this" in broken["exception"]
    assert (request["status"], request["error"]) == (200, "internal_error")
    assert (ended(served, "error"), ended(served, "abort")) == (before[0] + 1, before[1])


def test_one_broken_prompt_ends_the_request_and_is_told_once(serve, lines):
    served = serve(settings={"request_timeout": 0.4}, delay=0.05)
    before = ended(served, "error"), ended(served, "abort")
    response = served.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1000, "stream": True})
    assert last_error(response)["code"] == "timeout"
    assert [line["event"] for line in lines(response)] == ["stream broken", "request"]
    assert (ended(served, "error"), ended(served, "abort")) == (before[0] + 3, before[1])


def test_what_is_refused_has_its_code_in_the_access_line(served, lines):
    for body, error in (({"prompt": ""}, "invalid"), ({"prompt": "x", "model": "other"}, "model_not_found")):
        response = served.post("/v1/completions", {"user": SECRET, "temperature": 9, **body})
        (request,) = lines(response)
        assert request["error"] == (response.json()["error"]["code"] or "invalid"), error
    (request,) = lines(served.post("/nowhere", {}))
    assert (request["status"], request["error"]) == (404, "not_found")
    (request,) = lines(served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
    assert "error" not in request


@both
def test_a_client_that_leaves_its_stream_is_told_from_one_that_stays(serve, lines, path, body):
    served = serve(delay=0.02)
    with (
        httpx.Client(base_url=served.url, timeout=10) as http,
        http.stream("POST", path, json={**body, "max_tokens": 2000, "stream": True}) as response,
    ):
        chunks = response.iter_raw()  # kept: the response closes with its iterator
        next(chunks)
    (request,) = lines(response)
    assert (request["status"], request["error"]) == (200, "client_left")
    (request,) = lines(served.post(path, {**body, "max_tokens": 5, "stream": True}))
    assert "error" not in request


def test_given_up_in_the_queue(serve, lines):
    """A whole answer gets 503 and when to come again, a stream its event; both are counted by their reason."""
    served = serve(settings={"queue_timeout": 0.3}, engine={"max_sequences": 1}, delay=0.05)
    asked = {"prompt": "x", "max_tokens": 5}
    busy = threading.Thread(target=served.post, args=("/v1/completions", {**asked, "max_tokens": 60}))
    busy.start()
    while not served.pool.engine.running:
        time.sleep(0.01)
    before = rejected(served, "queue_timeout"), ended(served, "error")
    whole = served.post("/v1/completions", asked)
    assert error_of(whole, 503)["code"] == "queue_timeout"
    assert int(whole.headers["retry-after"]) >= 1
    streamed = served.post("/v1/completions", {**asked, "stream": True})
    assert last_error(streamed)["code"] == "queue_timeout"
    assert [line["error"] for line in lines(whole) + lines(streamed)] == ["queue_timeout"] * 4
    assert (rejected(served, "queue_timeout"), ended(served, "error")) == (before[0] + 2, before[1] + 2)
    busy.join()
    assert served.metrics.registry.get_sample_value("everstream_request_queue_time_seconds_sum") > 0.6


@both
@pytest.mark.parametrize("more", [{}, {"n": 2}], ids=["one", "two"])
def test_text_that_is_held_back_is_silence_too(serve, path, body, more):
    served = serve(settings={"silence": 0.2}, delay=0.05, script=(97,) * 40)
    asked = {**body, **more, "max_tokens": 30, "stop": ["a" * 250], "stream": True}
    silent, _, told = served.post(path, asked).text.partition("aaa")
    assert 3 <= silent.count(": waiting\n\n") <= 9, "once in 0.2 s of 1.5 s"
    assert ": waiting" not in told
