"""The one layer around all routes, driven as plain ASGI."""

import asyncio
import json

import pytest

from app.gate import Gate, Limits
from app.security import Keys


class Counter:
    def __init__(self):
        self.seen = []

    def http_request(self, route, method, status):
        self.seen.append((route, method, status))


class Exchange:
    """One request as the server sees it: feed messages, read what was sent."""

    def __init__(self, *messages, headers=(), path="/x", method="POST"):
        self.incoming = asyncio.Queue()
        for message in messages:
            self.incoming.put_nowait(message)
        self.sent = []
        self.scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}

    async def send(self, message):
        self.sent.append(message)

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return dict(self.sent[0]["headers"])

    @property
    def error(self):
        return json.loads(self.sent[1]["body"])["error"]


def body(data=b"", more=False):
    return {"type": "http.request", "body": data, "more_body": more}


GONE = {"type": "http.disconnect"}


async def echo(scope, receive, send):
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


async def run(exchange, app=echo, keys="", **limits):
    counter = Counter()
    gate = Gate(app, Keys(keys), Limits(**limits), counter)
    await asyncio.wait_for(gate(exchange.scope, exchange.incoming.get, exchange.send), 5)
    return counter.seen


async def test_a_body_in_pieces_arrives_whole():
    exchange = Exchange(body(b"one ", True), body(b"two ", True), body(b"three"))
    seen = await run(exchange)
    assert exchange.sent[1]["body"] == b"one two three"
    assert seen == [("other", "POST", 200)]


async def test_request_ids_are_taken_or_made():
    exchange = Exchange(body(), headers=[(b"x-request-id", b"mine-1")])
    await run(exchange)
    assert exchange.headers[b"x-request-id"] == b"mine-1"
    for bad in (b"", b"a b", b"\xff", b"x" * 129, b"a\r\nset-cookie: b"):
        exchange = Exchange(body(), headers=[(b"x-request-id", bad)])
        await run(exchange)
        assert len(exchange.headers[b"x-request-id"]) == 32


async def test_the_state_for_routes():
    states = []

    async def app(scope, receive, send):
        states.append(scope["state"])
        await echo(scope, receive, send)

    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = [(b"authorization", b"Bearer k1"), (b"traceparent", trace)]
    await run(Exchange(body(), headers=headers), app, keys="k1")
    await run(Exchange(body()), app)
    assert len(states[0]["salt"]) == 32
    assert states[0]["traceparent"] == trace.decode()
    assert states[1]["salt"] == ""


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_goes_away_cancels_the_route(streamed):
    cancelled = asyncio.Event()

    async def app(scope, receive, send):
        await receive()
        if streamed:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    exchange = Exchange(body(b"x"))
    task = asyncio.create_task(run(exchange, app))
    await asyncio.sleep(0.01)
    exchange.incoming.put_nowait(GONE)
    seen = await task
    assert cancelled.is_set()
    assert seen == [("other", "POST", 200 if streamed else 499)]


async def test_a_client_that_goes_away_before_its_body_is_whole():
    exchange = Exchange(body(b"half", True), GONE)
    assert await run(exchange) == [("other", "POST", 499)]
    assert exchange.sent == []


async def test_limits_of_the_body():
    long = Exchange(headers=[(b"content-length", b"1000")])
    await run(long, max_body_bytes=999)
    assert (long.status, long.error["code"]) == (413, "body_too_large")
    assert long.headers[b"connection"] == b"close"
    lying = Exchange(body(b"x" * 600, True), body(b"x" * 600))
    await run(lying, max_body_bytes=999)
    assert lying.status == 413
    slow = Exchange(body(b"x", True))
    await run(slow, body_timeout=0.05)
    assert (slow.status, slow.error["code"]) == (408, "body_timeout")


FRAMES = [
    ([(b"content-length", b"0" * 5000 + b"5")], 400, "invalid_framing"),
    ([(b"content-length", b"5,5")], 400, "invalid_framing"),
    ([(b"content-length", b"-5")], 400, "invalid_framing"),
    ([(b"content-length", "\u0665".encode())], 400, "invalid_framing"),
    ([(b"content-length", b"9" * 19)], 413, "body_too_large"),
    ([(b"transfer-encoding", b"gzip, chunked")], 501, "unsupported_transfer_encoding"),
    ([(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"gzip")], 501, "unsupported_transfer_encoding"),
    ([(b"transfer-encoding", b"CHUNKED")], 200, ""),
    ([(b"content-length", b"0000000000000000002")], 200, ""),
]


@pytest.mark.parametrize(("headers", "status", "code"), FRAMES)
async def test_lengths_and_codings(headers, status, code):
    exchange = Exchange(body(b"{}"), headers=headers)
    await run(exchange)
    assert exchange.status == status
    assert status == 200 or exchange.error["code"] == code


NO_BODY = [("POST", "/health"), ("POST", "/metrics"), ("PUT", "/"), ("GET", "/v1/models"), ("OPTIONS", "/tokenize")]


@pytest.mark.parametrize(("method", "path"), NO_BODY)
async def test_a_body_is_read_only_where_it_may_belong(method, path):
    for headers in ([(b"content-length", b"2")], [(b"transfer-encoding", b"chunked")]):
        exchange = Exchange(headers=headers, path=path, method=method)  # no message: reading one would wait for ever
        await run(exchange)
        assert (exchange.status, exchange.error["code"]) == (400, "unexpected_body")
        assert exchange.headers[b"connection"] == b"close"
    exchange = Exchange(body(), headers=[(b"content-length", b"0")], path=path, method=method)
    await run(exchange)
    assert exchange.status == 200


async def test_all_bodies_together_are_bounded():
    gate = Gate(echo, Keys(), Limits(max_body_bytes=1000, total_body_bytes=1500), Counter())
    first = Exchange(body(b"x" * 900, True))
    task = asyncio.create_task(gate(first.scope, first.incoming.get, first.send))
    await asyncio.sleep(0.01)
    second = Exchange(body(b"x" * 900))
    await gate(second.scope, second.incoming.get, second.send)
    assert (second.status, second.error["code"]) == (503, "overloaded")
    first.incoming.put_nowait(body(b"y"))
    await task
    assert first.status == 200
    third = Exchange(body(b"x" * 900))
    await gate(third.scope, third.incoming.get, third.send)
    assert third.status == 200


async def test_a_fault_of_a_route_is_counted_and_raised():
    async def app(scope, receive, send):
        raise RuntimeError("a fault")

    counter = Counter()
    exchange = Exchange(body())
    with pytest.raises(RuntimeError, match="a fault"):
        await Gate(app, Keys(), Limits(), counter)(exchange.scope, exchange.incoming.get, exchange.send)
    assert counter.seen == [("other", "POST", 500)]


async def test_odd_methods_do_not_make_new_series():
    exchange = Exchange(body(), method="BREW")
    assert await run(exchange) == [("other", "other", 200)]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/v1/models", "GET", 401),
        ("/docs", "GET", 401),
        ("/playgroundx", "GET", 401),
        ("/", "GET", 200),
        ("/playground/app.js", "GET", 200),
        ("/health/ready", "GET", 200),
        ("/metrics", "GET", 200),
        ("/v1/models", "OPTIONS", 200),
    ],
)
async def test_which_paths_ask_for_a_key(path, method, status):
    exchange = Exchange(body(), path=path, method=method)
    await run(exchange, keys="k")
    assert exchange.status == status
