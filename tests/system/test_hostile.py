"""Clients and machines at their worst: slow, many, huge, full disks, no descriptors; the service stays up."""

import asyncio
import contextlib
import json
import re
import resource
import socket
import time

import httpx
import psutil
import pytest

from tests.system.harness import Answer, ask, client
from tests.system.test_lifecycle import until

MIB = 1 << 20
JSON = {"content-type": "application/json"}


@pytest.fixture
def connect():
    """Open plain connections to a server; they are closed with the test."""
    with contextlib.ExitStack() as stack:

        def open_one(server, buffer=0):
            sock = stack.enter_context(socket.socket())
            sock.settimeout(20)
            if buffer:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            sock.connect(("127.0.0.1", server.port))
            return sock

        yield open_one


def post(body, path="/v1/completions", more=""):
    data = json.dumps({"model": "fake", "temperature": 0, **body}).encode()
    length = f"content-length: {len(data)}\r\n"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{length}{more}\r\n"
    return head.encode() + data


async def test_a_reader_of_one_byte_a_second_is_ended(fake_server, connect):
    server = fake_server({"delay": 0.0}, stream_buffer=256, write_timeout=2.0)
    before = server.memory()
    endless = {"prompt": "x", "stream": True, "max_tokens": None, "logprobs": 5, "retention": {"policy": "sinks"}}
    slow = []
    for _ in range(8):
        sock = connect(server, buffer=4096)
        sock.sendall(post(endless))
        slow.append(sock)
    for _ in range(10):
        for sock in slow:
            sock.settimeout(0.1)
            with contextlib.suppress(OSError):
                sock.recv(1)
        await asyncio.sleep(0.5)
    values = await server.quiet()
    assert server.memory() - before < 60 * MIB
    ended = values['request_success_total{finished_reason="error"}']
    assert ended + values['request_success_total{finished_reason="abort"}'] == 8
    async with client(server) as http:
        assert (await ask(http, prompt="x", max_tokens=3)).finish == ["length"]


async def test_slow_senders_are_cut_off(fake_server, connect):
    server = fake_server({}, header_timeout=1.0, body_timeout=1.0)
    silent, head, body = connect(server), connect(server), connect(server)
    head.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    body.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    start = time.monotonic()
    assert await asyncio.to_thread(silent.recv, 100) == b""
    assert (await asyncio.to_thread(head.recv, 4096)).startswith(b"HTTP/1.1 408")
    assert (await asyncio.to_thread(body.recv, 4096)).startswith(b"HTTP/1.1 408")
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("sent", "end"),
    [
        (b"\r\n", b""),
        (b"\r\n" * 50, b""),
        (b"G", b"HTTP/1.1 408"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"HTTP/1.1 408"),
    ],
)
@pytest.mark.parametrize("before", [False, True])
async def test_what_is_no_whole_head_does_not_hold_a_connection(fake_server, connect, sent, end, before):
    server = fake_server({}, header_timeout=0.5)
    peer = connect(server)
    if before:
        peer.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += await asyncio.to_thread(peer.recv, 4096)
    start = time.monotonic()
    peer.sendall(sent)
    assert (await asyncio.to_thread(peer.recv, 4096)).startswith(end)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("path", ["/health/live", "/v1/completions"])
async def test_trailers_without_end_take_no_memory(fake_server, connect, path):
    server = fake_server({}, env={"EVERSTREAM_API_KEYS": "k"})
    before = server.memory()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    lines = (b"x-t: " + b"a" * 60_000 + b"\r\n") * 16
    peers = [connect(server) for _ in range(8)]
    for peer in peers:
        sent = 0
        with contextlib.suppress(OSError):
            peer.sendall(head.encode())
            while sent < 200 * MIB:
                peer.sendall(lines)
                sent += len(lines)
        assert sent < 200 * MIB
    assert server.memory() - before < 10 * MIB


BEHIND = {
    "request": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "half": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-le",
    "long": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000,
    "junk": b"\x00\x01no http at all\r\n\r\n",
}


@pytest.mark.parametrize("behind", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("later", [False, True])
async def test_what_comes_behind_a_running_request_is_dropped(fake_server, connect, behind, later):
    """The running one gets its whole answer, then the connection closes; a client that leaves is seen to leave."""
    server = fake_server({"delay": 0.01}, header_timeout=0.5)
    asked = post({"prompt": "x", "stream": True, "max_tokens": 100})
    peer = connect(server)
    peer.sendall(asked if later else asked + behind)
    if later:
        await asyncio.sleep(0.2)
        peer.sendall(behind)
    answer = await asyncio.to_thread(lambda: b"".join(iter(lambda: peer.recv(4096), b"")))
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    endless = {"prompt": "x", "max_tokens": None, "retention": {"policy": "sinks"}}
    for stream in (False, True):
        leaving = connect(server)
        leaving.sendall(post({**endless, "stream": stream}) + behind)
        await asyncio.sleep(0.3)
        leaving.close()
    values = await server.quiet()
    assert values['request_success_total{finished_reason="abort"}'] == 2
    assert "Traceback" not in server.log.read_text()


async def test_an_answer_that_nobody_reads_does_not_hold_its_connection(fake_server, connect):
    """Of answers from 100 to 600 kB at least one fills the system's buffers, with too little left to pause writing."""
    server = fake_server({}, write_timeout=1.0)
    process, mine = psutil.Process(server.process.pid), set()
    for prompts in range(40, 240, 20):
        body = {"prompt": ["x" * 2500] * prompts, "echo": True, "max_tokens": 1}
        deaf = connect(server, buffer=2304)
        mine.add(deaf.getsockname()[1])
        deaf.sendall(post(body, more="connection: close\r\n"))
    await asyncio.sleep(0.2)

    def held():
        return mine & {one.raddr.port for one in process.net_connections("tcp") if one.raddr and one.status != "CLOSE"}

    await until(lambda: not held(), 40)


async def test_clients_that_do_not_read_do_not_trouble_the_end(fake_server, connect):
    server = fake_server({"delay": 0.0}, grace=0.5, write_timeout=60.0)
    for _ in range(4):
        connect(server, buffer=2304).sendall(
            post({"prompt": "x", "stream": True, "max_tokens": None, "logprobs": 5, "retention": {"policy": "sinks"}})
        )
    await until(lambda: server.metrics()["streams_open"] == 4)
    await asyncio.sleep(1.5)
    start = time.monotonic()
    server.terminate()
    assert server.ends() == 0
    assert time.monotonic() - start < 8
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "Exception" not in log


@pytest.mark.parametrize("chunked", [False, True])
async def test_uploads_do_not_trouble_the_end(fake_server, connect, chunked):
    server = fake_server({}, grace=0.3)
    framing = b"transfer-encoding: chunked\r\n\r\n1\r\n{" if chunked else b"content-length: 1000\r\n\r\n{"
    peers = [connect(server) for _ in range(3)]
    for peer in peers:
        peer.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + framing)
    await asyncio.sleep(0.3)
    start = time.monotonic()
    server.terminate()
    for peer in peers:
        answer = await asyncio.to_thread(lambda peer=peer: b"".join(iter(lambda: peer.recv(4096), b"")))
        assert answer.startswith(b"HTTP/1.1 503")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert error["type"] == "overloaded_error"
        assert "shutting down" in error["message"]
    assert server.ends() == 0
    assert time.monotonic() - start < 6
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "Exception" not in log


async def test_long_heads_and_bodies_are_turned_away(fake_server, connect):
    server = fake_server({}, max_header_bytes=4096, max_body_bytes=100_000)
    before = server.memory()
    long_head = connect(server)
    long_head.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-padding: " + b"a" * 8000)
    assert long_head.recv(4096).startswith(b"HTTP/1.1 431")
    big = connect(server)
    big.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
    reply = big.recv(4096)
    assert reply.startswith(b"HTTP/1.1 413")
    while b"}" not in reply and (more := big.recv(4096)):  # head and body may come apart
        reply += more
    assert b"--max-body-bytes" in reply
    chunked = connect(server)
    chunked.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
    with contextlib.suppress(OSError):
        for _ in range(100):
            chunked.sendall(chunk)
    assert chunked.recv(4096).startswith(b"HTTP/1.1 413")
    long_but_fine = httpx.post(f"{server.url}/v1/completions", content=b"x" * 50_000, headers=JSON)
    assert long_but_fine.status_code == 400, "a long body right behind a short head is no long head"
    assert server.memory() - before < 20 * MIB


async def test_two_thousand_idle_connections(fake_server, connect):
    server = fake_server({}, header_timeout=60.0)
    before = server.memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    idle = []
    try:
        for number in range(2000):
            idle.append(connect(server))
            if number % 200 == 0:
                await asyncio.sleep(0.01)
        async with client(server) as http:
            start = time.monotonic()
            assert (await ask(http, prompt="x", max_tokens=20)).finish == ["length"]
            assert time.monotonic() - start < 2
        per_connection = (server.memory() - before) / 2000
        assert per_connection < 25_000, f"{per_connection:.0f} bytes a connection"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_more_connections_than_allowed_get_503(fake_server, connect):
    server = fake_server({}, max_connections=11)  # ten, and the harness's own
    idle = [connect(server) for _ in range(10)]
    await asyncio.sleep(0.1)
    late = connect(server)
    assert (await asyncio.to_thread(late.recv, 4096)).startswith(b"HTTP/1.1 503")
    idle.pop().close()
    await asyncio.sleep(0.1)
    assert httpx.get(f"{server.url}/health").status_code == 200


async def test_no_descriptors_left(fake_server, connect):
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))}
    server = fake_server({"delay": 0.01}, popen=limit)
    async with client(server) as http:
        running = Answer()
        task = asyncio.create_task(ask(http, running, prompt="x", max_tokens=300))
        await until(lambda: running.pieces)
        crowd = [connect(server) for _ in range(120)]
        await asyncio.sleep(0.5)
        assert server.process.poll() is None
        await task
        assert running.finish == ["length"]
        for sock in crowd:
            sock.close()
        await asyncio.sleep(0.2)
    async with client(server) as http:
        assert (await ask(http, prompt="x", max_tokens=3)).finish == ["length"]


async def test_a_full_disk_under_the_log(byte_model, fake_server, tmp_path):
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))}
    server = fake_server({}, popen=limit)
    async with client(server) as http:
        for _ in range(40):
            assert (await ask(http, prompt="x", max_tokens=5)).finish == ["length"]
    assert server.log.stat().st_size <= 3000
    server.workers()[0].kill()
    await until(lambda: server.metrics()["worker_restarts_total"] == 1)
    server.wait_ready(10)
    server.terminate()
    server.ends()


async def test_keys_guard_everything_but_health_metrics_and_the_page(fake_server, tmp_path):
    file = tmp_path / "keys"
    file.write_text("first-key\n")
    server = fake_server({}, api_keys_file=str(file), env={"EVERSTREAM_API_KEYS": "other-key"})
    body = {"model": "fake", "prompt": "x", "max_tokens": 2}

    def status(key=None, path="/v1/completions"):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if path != "/v1/completions":
            return httpx.get(server.url + path, headers=headers).status_code
        return httpx.post(server.url + path, json=body, headers=headers).status_code

    assert [status(), status("wrong"), status("first-key"), status("other-key")] == [401, 401, 200, 200]
    assert [status(path=path) for path in ("/health/live", "/health/ready", "/metrics")] == [200] * 3
    assert [status(path=path) for path in ("/v1/models", "/live", "/docs")] == [401] * 3
    file.write_text("second-key\n")
    await asyncio.sleep(1.1)
    assert [status("first-key"), status("second-key"), status("other-key")] == [401, 200, 200]
    log = server.log.read_text()
    assert not [key for key in ("first-key", "second-key", "other-key", "wrong") if key in log]
    reply = httpx.post(f"{server.url}/v1/completions", json=body)
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


async def test_health_and_metrics_can_be_guarded_too(fake_server):
    server = fake_server({}, protect_health=True, protect_metrics=True, ready=0, env={"EVERSTREAM_API_KEYS": "k"})
    await until(lambda: server.ready_status() == 401, 10)
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert httpx.get(f"{server.url}/metrics", headers={"authorization": "Bearer k"}).status_code == 200


async def test_cross_origin_is_off_unless_named(fake_server):
    origin = {"origin": "https://page.example"}
    plain = fake_server({})
    assert "access-control-allow-origin" not in httpx.get(f"{plain.url}/health", headers=origin).headers
    open_to_one = fake_server({}, cors_origins="https://page.example")
    reply = httpx.get(f"{open_to_one.url}/health", headers=origin)
    assert reply.headers["access-control-allow-origin"] == "https://page.example"
    other = httpx.get(f"{open_to_one.url}/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_prompts_are_not_logged_unless_asked(fake_server):
    quiet, loud = fake_server({}), fake_server({}, log_prompts=True)
    for server, logged in ((quiet, False), (loud, True)):
        async with client(server) as http:
            answer = await ask(http, prompt="my diary of today", max_tokens=4)
        assert ("my diary of today" in server.log.read_text()) == logged
        assert answer.text not in server.log.read_text()


async def test_log_lines_are_json_with_the_request_id(fake_server):
    server = fake_server({})
    reply = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "abc-123"})
    assert reply.headers["x-request-id"] == "abc-123"
    odd = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": "a b\tc" * 50})
    assert len(odd.headers["x-request-id"]) == 32
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    mine = [line for line in lines if line.get("request_id") == "abc-123"]
    assert mine[0]["route"] == "/v1/models"
    assert mine[0]["status"] == 200
    assert {"event", "level", "logger", "timestamp", "seconds"} <= set(mine[0])


async def test_traces_reach_a_collector(fake_server):
    received = []

    async def collect(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head).group(1))
        received.append((head.split(b" ")[1], await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    collector = await asyncio.start_server(collect, "127.0.0.1", 0)
    port = collector.sockets[0].getsockname()[1]
    server = fake_server({}, otlp_endpoint=f"http://127.0.0.1:{port}")
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with client(server, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"}) as http:
        await ask(http, prompt="x", max_tokens=3)
    server.terminate()
    await until(lambda: server.process.poll() is not None)
    collector.close()
    assert received[0][0] == b"/v1/traces"
    assert bytes.fromhex(trace) in received[0][1]
    assert b"prefill" in received[0][1]
