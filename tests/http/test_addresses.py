"""Addresses, methods and bytes: what is answered before a request's body is looked at."""

import json
import socket

import pytest

from app.main import listen
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


def test_the_openapi_page_lists_the_answers_there_are(served):
    document = served.http.get("/openapi.json").json()
    told = {
        (path, method): set(one["responses"])
        for path, all_ in document["paths"].items()
        for method, one in all_.items()
    }
    assert not [place for place, statuses in told.items() if "422" in statuses]
    assert not [name for name in document["components"]["schemas"] if "ValidationError" in name]
    assert {"500", "504"} <= told[COMPLETIONS, "post"] & told[CHAT, "post"]
    assert "500" in told["/tokenize", "post"] & told["/v1/models", "get"]
    assert "404" in told[COMPLETIONS, "post"] & told["/v1/models/{name}", "get"]
    assert "404" not in told["/v1/models", "get"], "it names no model"


def test_the_openapi_page_tells_who_asks_for_a_key_and_how(serve):
    open_, closed = serve(), serve(settings={"api_keys": "k", "protect_health": True, "protect_metrics": True})
    half = serve(settings={"api_keys": "k"})
    documents = [
        one.http.get("/openapi.json", headers={"authorization": "Bearer k"}).json() for one in (open_, half, closed)
    ]
    assert "securitySchemes" not in documents[0]["components"]
    assert documents[1]["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for served, document in zip((open_, half, closed), documents, strict=True):
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                if path == "/live":  # it would never end
                    continue
                answer = served.http.request(method, path.replace("{name}", "fake").replace("{path}", "x"))
                assert str(answer.status_code) in operation["responses"], (method, path)
                assert ("security" in operation) == (answer.status_code == 401), (method, path)
                assert ("401" in operation["responses"]) == (answer.status_code == 401), (method, path)
    told = {path: set(next(iter(one.values()))["responses"]) for path, one in documents[2]["paths"].items()}
    assert told["/health/ready"] == {"200", "401", "503"}
    assert told["/health/live"] == {"200", "401"}
    assert "429" in told[COMPLETIONS] & told[CHAT]
    assert "429" not in told["/tokenize"] | told["/detokenize"], "they wait in no queue"


def test_an_address_that_cannot_be_had_is_told_with_the_flag_to_change():
    for host in ("203.0.113.9", "a" * 70 + ".example"):
        with pytest.raises(OSError, match=f"^cannot listen on {host} port 0: .*; choose a --host"):
            listen(host, 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"^cannot listen on 127.0.0.1 port {port}: .*; choose another --port$"):
            listen("127.0.0.1", port)
