"""Requests byte by byte: heads, trailers and lengths that are wrong, and what frames an answer for whom."""

import json
import re
import socket
import time

import pytest

from tests.http.reading import events
from tests.http.test_streams import both

LIMIT = 64 << 10
HOST = b"host: x\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n"
)
BODY = b'{"prompt": "Hi", "max_tokens": 2}'
ALIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


class Peer:
    """A connection on which anything may be sent."""

    def __init__(self, served):
        host, port = served.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, data):
        """Whether the server still took it."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def rest(self):
        """All that comes until the connection ends."""
        data = b""
        try:
            while more := self.socket.recv(1 << 16):
                data += more
        except ConnectionResetError:  # closed with bytes of ours unread
            pass
        return data

    def answer(self):
        """One answer with a length: its head and its body."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.socket.recv(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        while len(body) < length:
            body += self.socket.recv(1 << 16)
        return head, body


@pytest.fixture
def peer(served):
    with Peer(served) as one:
        yield one


def refusal(answer, status):
    """The sentence of a refusal in our own shape, after which the connection ended."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"]


LONG_HEADS = {
    "value": b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"a" * 100_000 + b"\r\n\r\n",
    "address": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "fields": b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a:b\r\n" * 12_000 + b"\r\n",
    "endless": b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"a" * 100_000,
}


@pytest.mark.parametrize("head", LONG_HEADS.values(), ids=LONG_HEADS)
@pytest.mark.parametrize("before", [0, 1, 2])
@pytest.mark.parametrize("piece", [30_000, 1 << 20])
def test_every_head_of_a_connection_is_bounded(peer, head, before, piece):
    for _ in range(before):
        peer.send(ALIVE.replace(b"connection: close\r\n", b""))
        assert peer.answer()[0].startswith(b"HTTP/1.1 200")
    for start in range(0, len(head), piece):
        peer.send(head[start : start + piece])
    answer = peer.rest()
    if answer:  # with bytes of ours unread, the end of the connection may overtake it
        assert "--max-header-bytes" in refusal(answer, 431)


@pytest.mark.parametrize("field", [b"", b"a: " + b"a" * (LIMIT - 500) + b"\r\n"], ids=["short", "just fits"])
def test_a_head_within_the_limit_and_a_long_body_in_one_piece(peer, field):
    body = b'{"prompt": "Hi", "max_tokens": 2, "user": "' + b"u" * 200 + b'"}' + b" " * 150_000
    length = b"content-length: %d\r\n" % len(body)
    peer.send(CHUNKED.replace(b"transfer-encoding: chunked\r\n", length) + field + b"\r\n" + body)
    assert peer.answer()[0].startswith(b"HTTP/1.1 200")


ENDLESS = {
    "trailers": (b"0\r\n", b"x-t: " + b"a" * 60_000 + b"\r\n"),
    "one trailer": (b"0\r\nx-t: ", b"a" * 60_000),
    "small trailers": (b"0\r\n", b"a:b\r\n" * 1000),
    "extension": (b"5;a=", b"a" * 60_000),
    "trailers behind a body": (b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY), b"x-t: " + b"a" * 60_000 + b"\r\n"),
}


@pytest.mark.parametrize(("begin", "more"), ENDLESS.values(), ids=ENDLESS)
def test_what_is_no_body_is_bounded_behind_the_head_too(peer, begin, more):
    peer.send(CHUNKED + b"\r\n" + begin)
    sent = 0
    while sent < 20 << 20 and peer.send(more):
        sent += len(more)
    assert sent < 20 << 20
    assert not peer.rest().startswith(b"HTTP/1.1 200")


def test_the_refusal_of_trailers_says_what_was_too_long(peer):
    peer.send(CHUNKED + b"\r\n0\r\n" + b"x-t: " + b"a" * LIMIT + b"\r\n\r\n")
    assert "trailers" in refusal(peer.rest(), 431)


def test_empty_lines_before_a_request_are_bounded(peer):
    sent = 0
    while sent < 20 << 20 and peer.send(b"\r\n" * 10_000):
        sent += 20_000
    assert sent < 20 << 20


def test_trailers_are_dropped_and_do_not_leak_into_the_next_request(peer):
    peer.send(CHUNKED + b"\r\n%x;a=b\r\n%b\r\n0\r\nx-request-id: mine\r\nx-more: b\r\n\r\n" % (len(BODY), BODY))
    assert b"mine" not in peer.answer()[0]
    peer.send(b"\r\n" + ALIVE)
    answer = peer.rest()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"mine" not in answer


FRAMING = {
    "many digits": (b"content-length: " + b"0" * 5000 + b"5", 400, "19 digits"),
    "twenty digits": (b"content-length: 00000000000000000005", 400, "19 digits"),
    "gzip": (b"transfer-encoding: gzip, chunked", 501, "chunked"),
    "unknown": (b"transfer-encoding: x-mine, Chunked", 501, "chunked"),
    "gzip apart": (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked", 501, "chunked"),
    "nested": (b"transfer-encoding: chunked, chunked", 400, "malformed"),
    "not last": (b"transfer-encoding: chunked, identity", 400, "malformed"),
    "negative": (b"content-length: -5", 400, "malformed"),
    "two lengths": (b"content-length: 5\r\ncontent-length: 41", 400, "malformed"),
    "no chunks": (b"transfer-encoding: chunked\r\n\r\nzz", 400, "malformed"),
    "both": (b"transfer-encoding: chunked\r\ncontent-length: 5", 400, "malformed"),
}


@pytest.mark.parametrize(("field", "status", "words"), FRAMING.values(), ids=FRAMING)
def test_bodies_whose_end_is_not_sure_are_refused(peer, field, status, words):
    head = CHUNKED.replace(b"transfer-encoding: chunked", field)
    peer.send(head + b"\r\n5\r\nabcde\r\n0\r\n\r\n")
    assert words in refusal(peer.rest(), status)


@pytest.mark.parametrize("field", [b"content-length: %d \t", b"content-length: 00%d"])
def test_lengths_in_odd_but_right_spelling(peer, field):
    peer.send(CHUNKED.replace(b"transfer-encoding: chunked", field % len(BODY)) + b"\r\n" + BODY)
    assert peer.answer()[0].startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("coding", [b"Chunked", b"  chunked "])
def test_chunked_in_any_spelling(peer, coding):
    head = CHUNKED.replace(b" chunked", coding)
    peer.send(head + b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert peer.answer()[0].startswith(b"HTTP/1.1 200")


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
FRAMED = {
    "length": (b"content-length: %d\r\n" % len(BODY), BODY),
    "chunks": (b"transfer-encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\nx-t: a\r\n\r\n" % (len(BODY), BODY)),
}


@pytest.mark.parametrize(("framing", "body"), FRAMED.values(), ids=FRAMED)
@pytest.mark.parametrize("offer", [OFFER, b"connection: upgrade\r\nupgrade: websocket\r\n"], ids=["h2c", "websocket"])
@pytest.mark.parametrize("pieces", [1, 2, 3, 40])
def test_offers_of_another_protocol_are_passed_over(peer, framing, body, offer, pieces):
    """Java's HttpClient makes one with every request; the body must not be lost, nor be taken for a request."""
    head = CHUNKED.replace(b"transfer-encoding: chunked\r\n", framing) + offer + b"\r\n"
    for _ in range(2):
        for data in (head[: 50 * (pieces > 2)], head[50 * (pieces > 2) :] + body * (pieces == 1)):
            peer.send(data)
        size = max(1, 2 * len(body) // pieces)
        for start in range(0, len(body) * (pieces > 1), size):
            time.sleep(0.002)
            peer.send(body[start : start + size])
        head_of_answer, answer = peer.answer()
        assert head_of_answer.startswith(b"HTTP/1.1 200")
        assert json.loads(answer)["usage"]["completion_tokens"] == 2
    peer.send(ALIVE.replace(b"connection: close\r\n", offer + b"content-length: 0\r\n"))
    assert peer.answer()[0].startswith(b"HTTP/1.1 200")
    peer.send(ALIVE)
    assert peer.rest().startswith(b"HTTP/1.1 200")


def test_bytes_behind_an_offer_are_bounded_and_checked(served):
    head = CHUNKED + OFFER + b"\r\n"
    with Peer(served) as peer:
        peer.send(head + b"zz\r\n")
        assert "malformed" in refusal(peer.rest(), 400)
    with Peer(served) as peer:
        peer.send(head + b"0\r\nx: " + b"a" * LIMIT + b"\r\n\r\n")
        assert "trailers" in refusal(peer.rest(), 431)
    with Peer(served) as peer:
        peer.send(CHUNKED.replace(b"chunked", b"gzip, chunked") + OFFER + b"\r\n0\r\n\r\n")
        assert "chunked" in refusal(peer.rest(), 501)
    with Peer(served) as peer:
        peer.send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) + ALIVE * 2)
        answer = peer.rest()
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1


NO_BODY = ["POST /health/live", "POST /health", "POST /metrics", "POST /", "POST /playground/app.js", "GET /v1/models",
           "GET /health", "OPTIONS /v1/completions", "GET /v1/completions"]  # fmt: skip


@pytest.mark.parametrize("what", NO_BODY)
@pytest.mark.parametrize("body", [b"content-length: 9000000\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n9\r\n123456"])
def test_bodies_where_none_belongs_are_refused_unread(served, what, body):
    with Peer(served) as peer:
        peer.send(what.encode() + b" HTTP/1.1\r\nhost: x\r\n" + body)
        assert "takes no body" in refusal(peer.rest(), 400)
    method, path = what.split()
    assert served.http.request(method, path, headers={"content-length": "0"}).status_code != 400


@pytest.mark.parametrize("version", [b"0.9", b"2.0"])
def test_other_versions_are_refused(peer, version):
    peer.send(b"GET /health HTTP/" + version + b"\r\nhost: x\r\n\r\n")
    assert "HTTP/1.1" in refusal(peer.rest(), 505)


class Old(Peer):
    """A client of HTTP/1.0."""

    def ask(self, method, path, body=None):
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
        self.send(head.encode() + b"connection: keep-alive\r\nexpect: 100-continue\r\n\r\n" + data)
        head, _, body = self.rest().partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        return int(head.split()[1]), head, body


@both
@pytest.mark.parametrize("n", [1, 2])
def test_streams_of_http_1_0_are_unframed(served, path, body, n):
    asked = {**body, "n": n, "max_tokens": 60, "seed": 4, "stream": True, "logprobs": 2}
    if "messages" in asked:
        asked |= {"logprobs": True, "top_logprobs": 2}
    told = events(served.post(path, asked))
    with Old(served) as old:
        status, head, data = old.ask("POST", path, asked)
    assert status == 200
    assert b"content-length" not in head
    assert b"text/event-stream" in head
    blocks = data.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]

    def choices(chunks):
        return sorted((c["index"], json.dumps(c)) for chunk in chunks for c in chunk["choices"])

    assert choices(json.loads(block.removeprefix("data: ")) for block in blocks[:-2]) == choices(told)


def test_whole_answers_and_errors_of_http_1_0(served):
    for method, path, body, status in (
        ("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 5}, 200),
        ("POST", "/v1/completions", {"prompt": "Hi", "n": 0}, 400),
        ("POST", "/v1/completions", {"prompt": "Hi", "n": 0, "stream": True}, 400),
        ("GET", "/nothing", None, 404),
        ("GET", "/", None, 200),
        ("GET", "/metrics", None, 200),
        ("HEAD", "/metrics", None, 200),
        ("HEAD", "/live", None, 200),
        ("HEAD", "/nothing", None, 404),
    ):
        with Old(served) as old:
            got, head, data = old.ask(method, path, body)
            assert got == status
            length = re.search(rb"content-length: (\d+)", head)
            assert (length is None) == (path == "/live")
            if length:
                assert len(data) == (0 if method == "HEAD" else int(length[1]))


def test_http_1_0_has_no_chunks_to_send(served):
    with Old(served) as old:
        old.send(CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n")
        assert "content-length" in refusal(old.rest(), 400)


@pytest.fixture
def crossed(serve):
    """A server that pages of one origin may use."""
    return serve(settings={"cors_origins": ("https://page.example",)})


def preflight(served, origin="https://page.example", **more):
    headers = {"origin": origin, "access-control-request-method": "POST", **more}
    return served.http.options("/v1/chat/completions", headers=headers)


def test_pages_of_an_allowed_origin_may_send_what_their_clients_send(crossed):
    asked = "authorization,content-type,traceparent,x-request-id,x-stainless-arch,x-stainless-retry-count"
    more = {"access-control-request-headers": asked, "access-control-request-private-network": "true"}
    answer = preflight(crossed, **more)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-headers"] == asked
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    assert answer.headers["access-control-allow-private-network"] == "true"
    other = preflight(crossed, "https://other.example", **more)
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


def test_a_body_behind_a_preflight_is_not_read_for_ever(crossed):
    head = CHUNKED.replace(b"POST", b"OPTIONS").replace(b"host: x", b"host: x\r\norigin: https://page.example\r\n"
                                                         b"access-control-request-method: POST")  # fmt: skip
    with Peer(crossed) as peer:
        peer.send(head + b"\r\n")
        sent = 0
        while sent < 50 << 20 and peer.send(b"8000\r\n" + b"a" * 0x8000 + b"\r\n"):
            sent += 0x8000
        assert sent < 50 << 20
