"""Addresses, methods and bytes: what is answered before a request's body is looked at."""

import json
import socket

from tests.http.reading import error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def test_addresses_and_methods_that_are_not_there(served):
    assert error_of(served.http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(served.http.get(COMPLETIONS), 405)["code"] == "method_not_allowed"
    assert error_of(served.http.delete("/v1/models"), 405)


def test_a_trailing_slash_is_another_address(served):
    for path in (f"{COMPLETIONS}/", f"{CHAT}/", "/v1/models/", "/tokenize/", "/health/ready/", "/metrics/", "/live/"):
        error_of(served.http.get(path, headers={"host": "elsewhere.example"}), 404)


def test_head_answers_where_get_does(served):
    for path in (
        "/",
        "/health",
        "/health/ready",
        "/metrics",
        "/v1/models",
        "/v1/models/fake",
        "/openapi.json",
        "/live",
    ):
        got = served.http.head(path, timeout=5)
        assert (got.status_code, got.content) == (200, b""), path
        assert got.headers["x-request-id"]
    assert (
        served.http.head("/v1/models").headers["content-length"]
        == served.http.get("/v1/models").headers["content-length"]
    )
    assert served.http.head("/v1/nothing").status_code == 404
    assert served.http.head(COMPLETIONS).status_code == 405


def test_bytes_that_are_no_http_are_refused_in_json(served):
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=10) as sock:
        sock.sendall(b"this is no request\r\n\r\n")
        answer = b""
        while data := sock.recv(4096):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
