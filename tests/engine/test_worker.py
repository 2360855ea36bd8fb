"""The worker as a process of its own: what it says, and how it ends."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from model.config import EngineConfig
from model.protocol import (
    VERSION,
    Accepted,
    Beat,
    Begin,
    Cancel,
    Drain,
    Ready,
    Rejected,
    Retention,
    SamplingParams,
    Step,
    Submit,
    Up,
)
from model.wire import ConnectionClosed, encode
from model.worker import arithmetic

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds for anything at all to be said; a loaded machine is slow

pytestmark = pytest.mark.timeout(300)


class Line:
    """The front end's side of a worker, as plainly as can be."""

    def __init__(self, folder, model, **config):
        path = str(folder / "worker")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            server.settimeout(PATIENCE)
            fields = {"model": str(model), "name": "m", "socket": path, "cache_bytes": 64 << 20, **config}
            self.process = subprocess.Popen(
                [sys.executable, "-m", "model.worker", msgspec.json.encode(EngineConfig(**fields)).decode()],
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.socket, _ = server.accept()
        self.socket.settimeout(PATIENCE)
        self.decoder = msgspec.msgpack.Decoder(Up)

    def read(self, count):
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionClosed("the worker is gone")
            data += part
        return data

    def receive(self, *kinds):
        """The next message of these kinds."""
        while True:
            (length,) = struct.unpack(">I", self.read(4))
            message = self.decoder.decode(self.read(length))
            if isinstance(message, kinds):
                return message

    def send(self, message):
        self.socket.sendall(encode(message))

    def rows(self, request):
        """All rows of a request until its last word."""
        found = []
        while not found or not found[-1].finish:
            found += [row for row in self.receive(Step).rows if row.request == request]
        return found

    def end(self):
        with contextlib.suppress(OSError):
            self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(short_folder):
    lines = []

    def begin(model, **config):
        lines.append(Line(short_folder, model, **config))
        (short_folder / "worker").unlink()
        return lines[-1]

    yield begin
    for line in lines:
        line.end()


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_a_request_from_ready_to_its_last_word(start, default_model):
    line = start(default_model)
    ready = line.receive(Ready)
    assert (ready.version, ready.pid, ready.context) == (VERSION, line.process.pid, 8192)
    assert ready.num_blocks * ready.block_size * 23_040 <= 64 << 20
    assert set(ready.policies) >= {"none", "sinks", "window"}
    line.send(Submit("a", 1, (1, 2, 3), GREEDY))
    assert line.receive(Accepted).request == "a"
    assert line.receive(Begin).requests == ("a",)
    rows = line.rows("a")
    assert [row.index for row in rows] == list(range(6))
    assert rows[-1].finish == "length"
    assert line.receive(Beat).steps >= 6
    line.send(Submit("b", 1, (1,) * 9000, GREEDY))
    refused = line.receive(Rejected)
    assert "9000" in refused.message
    assert "8192" in refused.message
    line.send(Submit("c", 1, (1, 2, 3), SamplingParams(max_tokens=5000), Retention("sinks", 4, 64)))
    line.receive(Begin)
    line.send(Cancel("c"))
    assert line.rows("c")[-1].finish == "abort"


def test_the_number_of_blocks_is_had_exactly_or_refused_at_once(start, default_model):
    assert start(default_model, num_blocks=37).receive(Ready).num_blocks == 37
    line = start(default_model, num_blocks=99_999_999)
    _, said = line.process.communicate(timeout=PATIENCE)
    assert line.process.returncode == 3
    assert said.startswith("--num-blocks 99999999 takes 34,332.3 GiB for the KV cache, and the memory that is free has")
    assert "leave --num-blocks out" in said
    assert said.count("\n") == 1


def test_it_ends_by_itself_in_the_middle_of_its_work(start, default_model):
    line = start(default_model, cache_bytes=512 << 20)
    line.receive(Ready)
    for number in range(4):
        prompt = tuple(range(number, number + 4000))
        line.send(Submit(str(number), 1, prompt, SamplingParams(max_tokens=4000, ignore_eos=True)))
    line.receive(Begin)
    line.socket.close()
    begun = time.monotonic()
    assert line.process.wait(PATIENCE) == 0
    assert time.monotonic() - begun < 2.0


def test_a_crowd_that_comes_and_goes_during_one_step_is_heard_at_its_end(start, default_model):
    """Two megabytes of prompts, ten times what a socket holds, and behind them the words of those who left again."""
    line = start(default_model)
    line.receive(Ready)
    line.send(Submit("first", 1, tuple(range(2000)), SamplingParams(max_tokens=1)))
    line.receive(Begin)
    for number in range(100):
        line.send(Submit(str(number), 1, (100_000, *range(7_000)), GREEDY))
    for number in range(100):
        line.send(Cancel(str(number)))
    line.send(Submit("small", 1, (1, 2, 3), GREEDY, priority=-1))
    steps = 0
    while "small" not in [row.request for row in line.receive(Step).rows]:
        steps += 1
    assert steps <= 2, "the one that ran, and one that began while the crowd was read"


LOADS_FOR_EVER = """
import socket, sys, time
from model.wire import BlockingConnection
from model.worker import Heart
door = socket.socket(socket.AF_UNIX)
door.connect(sys.argv[1])
Heart(BlockingConnection(door)).start()
time.sleep(600)
"""


def test_it_says_that_it_lives_before_it_has_loaded(short_folder):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short_folder / "worker"))
        server.listen()
        server.settimeout(PATIENCE)
        command = [sys.executable, "-c", LOADS_FOR_EVER, str(short_folder / "worker")]
        with subprocess.Popen(command, cwd=ROOT) as process:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE)
                (length,) = struct.unpack(">I", connection.recv(4))
                assert msgspec.msgpack.decode(connection.recv(length), type=Up) == Beat(0, 0.0, 0.0)
            assert process.wait(PATIENCE) == 0, "nobody is left to load for"


def test_drained_it_finishes_and_ends(start, default_model):
    line = start(default_model)
    line.receive(Ready)
    line.send(Submit("a", 1, (1, 2, 3), GREEDY))
    line.send(Drain())
    line.send(Submit("late", 1, (1, 2, 3), GREEDY))
    assert line.receive(Rejected).reason == "draining"
    assert line.rows("a")[-1].finish == "length"
    assert line.process.wait(PATIENCE) == 0


def test_it_dies_with_its_parent(default_model, short_folder):
    """The parent is killed without a chance to say anything; its socket lives on in this test's hands."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short_folder / "worker"))
        server.listen()
        server.settimeout(PATIENCE)
        config = EngineConfig(model=str(default_model), name="m", socket=str(short_folder / "worker"))
        code = (
            "import subprocess, sys, time\n"
            "p = subprocess.Popen([sys.executable, '-m', 'model.worker', sys.argv[1]])\n"
            "print(p.pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        command = [sys.executable, "-c", code, msgspec.json.encode(config).decode()]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
            worker = int(parent.stdout.readline())
            connection, _ = server.accept()
            with connection:
                connection.settimeout(PATIENCE)
                assert connection.recv(4)  # it loads, and says that it lives
                parent.kill()
                parent.wait()
                begun = time.monotonic()
                while Path(f"/proc/{worker}").exists() and "zombie" not in Path(f"/proc/{worker}/status").read_text():
                    assert time.monotonic() - begun < 2.0
                    time.sleep(0.02)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"context": 10_000}, ("10000", "8192", "--context")),
        ({"cache_bytes": 100_000}, ("100000 bytes", "blocks")),
        ({"block_size": 12}, ("12", "multiple of 8")),
        ({"model": "no-such-file.gguf"}, ("no-such-file.gguf",)),
        ({"device": "nonsense"}, ("nonsense",)),
    ],
)
def test_what_cannot_be_served_is_one_sentence_and_code_3(start, default_model, config, words):
    line = start(**{"model": default_model, **config})
    with pytest.raises(ConnectionClosed):
        line.receive(Ready)
    _, complaint = line.process.communicate(timeout=PATIENCE)
    assert line.process.returncode == 3
    assert len(complaint.strip().splitlines()) == 1, complaint
    for word in words:
        assert word in complaint


def test_a_fault_token_kills_it_in_its_step(start, default_model):
    """The hook of the tests of crashes: as a bad kernel would."""
    line = start(default_model, fault_token=77)
    line.receive(Ready)
    line.send(Submit("fine", 1, (1, 2, 3), GREEDY))
    line.rows("fine")
    line.send(Submit("bad", 1, (1, 77, 3), GREEDY))
    assert line.receive(Begin).requests == ("bad",)
    assert line.process.wait(PATIENCE) == -signal.SIGKILL


def test_garbage_from_the_front_end_ends_it_quietly(start, default_model):
    line = start(default_model)
    line.receive(Ready)
    line.socket.sendall(struct.pack(">I", 5) + os.urandom(5))
    assert line.process.wait(PATIENCE) == 0


def test_an_endless_stream_in_constant_memory(start, default_model):
    """The short twin of `python -m bench.streaming soak`."""
    line = start(default_model, cache_bytes=256 << 20)
    line.receive(Ready)
    retention = Retention("sinks", 4, 28)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=800, ignore_eos=True)
    line.send(Submit("endless", 1, (1, 2, 3), params, retention))
    blocks, resident, count = [], [], 0
    while count < 800:
        step = line.receive(Step)
        count += sum(len(row.tokens) for row in step.rows)
        if 300 <= count < 800:
            blocks.append(step.stats.blocks_used)
            resident.append(step.stats.resident_bytes)
    assert max(blocks) <= -(-(4 + 28) // 16) + 2
    assert max(blocks) - min(blocks) <= 1
    assert max(resident) / min(resident) < 1.01
    assert step.stats.tokens_evicted == 3 + 800 - 1 - 4 - 27


@pytest.mark.parametrize(
    ("kernels", "kind", "said"),
    [
        ("cpu avx2", "Q4_1", "Q4_1 weights x int8 rows, float16 cache"),
        ("cpu avx512", "BF16", "bfloat16 weights, float16 cache"),
        ("cpu avx2", "F16", "float16 weights, float16 cache"),
        ("cpu avx2 float32", "Q4_1", "float32"),
        ("torch bfloat16", "F32", "bfloat16"),
    ],
)
def test_the_banner_hears_what_is_computed_in(kernels, kind, said):
    assert arithmetic(kernels, kind) == said
