"""Starts that fail beside one that does not, workers that hang while they load, and how long it is waited between."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest

from app import supervisor as supervision
from app import watching
from app.supervisor import StartFailed, Supervisor
from model.config import EngineConfig
from model.protocol import SamplingParams, Submit
from tests.fake_worker import command
from tests.system.harness import Answer, ask, client
from tests.system.test_lifecycle import until

NO_MEMORY = "There is no memory for the cache; choose a smaller --cache-bytes."


class Tally:
    """An observer that counts."""

    restarts = 0

    def worker_step(self, *_told):
        """Nobody asks."""

    def worker_ended(self, slot):
        """Nobody asks."""

    def worker_restarted(self, slot):
        self.restarts += 1


class Deaf:
    """An inbox that nobody reads."""

    attempt, client, closed, overflowed, started = 0, None, False, False, 0.0

    def put(self, event):
        """Nobody asks."""


@pytest.fixture
def lives(tmp_path):
    """Makes the file that says how the next lives of fake workers start."""

    def write(*lines):
        path = tmp_path / "lives"
        path.write_text("\n".join(lines))
        return str(path)

    return write


@asynccontextmanager
async def supervised(count=1, **behaviour):
    configs = [EngineConfig(model="m", name="m", socket="")] * count
    pool = Supervisor(configs, Tally(), command=command(**behaviour))
    try:
        yield pool
    finally:
        await pool.stop()


async def test_a_worker_that_dies_in_its_first_load_takes_no_stream_with_it(fake_server):
    server = fake_server({"delay": 0.01, "start_seconds": 1.0}, workers=2, ready=0)
    await until(lambda: len(server.workers()) == 2)
    held = server.workers()[1]
    held.suspend()
    server.wait_ready(20)
    async with client(server) as http:
        answer = Answer()
        task = asyncio.create_task(ask(http, answer, prompt="x", max_tokens=300))
        await until(lambda: answer.between)
        held.kill()
        await task
        assert (answer.finish, len(answer.text), answer.errors) == (["length"], 300, [])
        await until(lambda: server.metrics()["workers_ready"] == 2)
    assert server.metrics()["worker_restarts_total"] == 1
    assert "worker did not start" in server.log.read_text()


async def test_one_that_refuses_is_tried_again_while_the_other_serves(fake_server, lives):
    path = lives(f"fail {NO_MEMORY}", "", f"fail {NO_MEMORY}", f"fail {NO_MEMORY}")
    server = fake_server({"delay": 0.01, "lives": path}, workers=2)
    async with client(server) as http:
        answer = await ask(http, prompt="x", max_tokens=50)
        assert answer.finish == ["length"]
        await until(lambda: server.metrics()["workers_ready"] == 2)
    assert server.metrics()["worker_restarts_total"] == 3
    said = [line for line in server.log.read_text().splitlines() if NO_MEMORY in line]
    assert len(said) == 3
    assert all("worker did not start" in line for line in said)


@pytest.mark.parametrize("first", ["die", f"fail {NO_MEMORY}"])
def test_where_none_can_start_it_ends_with_one_sentence(fake_server, lives, first):
    server = fake_server({"lives": lives(first, f"fail {NO_MEMORY}"), "start_seconds": 0.2}, workers=2, ready=0)
    assert server.ends(20) == 1
    (line,) = server.log.read_text().strip().splitlines()
    assert line.startswith("error: ")
    assert NO_MEMORY in line or "SIGKILL" in line


@pytest.mark.parametrize("first", ["die", f"fail {NO_MEMORY}"])
async def test_the_first_to_fail_waits_for_the_word_of_the_others(lives, first):
    """It is not known yet whether the service can be: nothing is started a second time, and nothing is said."""
    async with supervised(2, lives=lives(first), start_seconds=0.5) as pool:
        held = asyncio.create_task(pool.start())
        await until(lambda: len(pool.pids) == 2)
        os.kill(pool.pids[1], signal.SIGSTOP)
        await until(lambda: len(pool.pids) == 1)
        await asyncio.sleep(1.0)
        assert pool.num_restarts == 0
        os.kill(pool.pids[0], signal.SIGCONT)
        await held
        assert pool.num_ready == 1
        await until(lambda: pool.num_ready == 2)
        assert pool.num_restarts == 1


async def test_a_worker_that_stops_in_its_load_is_replaced_and_streams_go_on(fake_server, lives):
    server = fake_server({"delay": 0.01, "lives": lives("", "stop")}, silence=2.0)
    async with client(server) as http:
        answer = Answer()
        task = asyncio.create_task(ask(http, answer, prompt="x", max_tokens=300))
        await until(lambda: answer.between)
        server.workers()[0].kill()
        start = time.monotonic()
        await until(lambda: server.ready_status() != 200)
        await until(lambda: server.ready_status() == 200, 20)
        assert 9 < time.monotonic() - start < 20
        await task
    assert (answer.finish, len(answer.text), answer.errors) == (["length"], 300, [])
    assert server.metrics()["worker_restarts_total"] == 2
    assert "it gave no sign of life for 10." in server.log.read_text()


async def test_also_one_that_stops_in_the_first_load_is_replaced(lives, monkeypatch):
    monkeypatch.setattr(watching, "LOADING_SILENCE_SECONDS", 1.0)
    async with supervised(lives=lives("stop")) as pool:
        await asyncio.wait_for(pool.start(), 15)
        assert pool.num_restarts == 1


async def test_one_that_stops_in_each_load_is_given_up_with_a_sentence(lives, monkeypatch):
    monkeypatch.setattr(watching, "LOADING_SILENCE_SECONDS", 0.6)
    monkeypatch.setattr(supervision, "HOPELESS_STARTS", 2)
    async with supervised(lives=lives("stop", "stop")) as pool:
        with pytest.raises(StartFailed, match="it gave no sign of life for"):
            await asyncio.wait_for(pool.start(), 15)


async def test_one_that_stops_before_it_has_called_is_replaced(monkeypatch):
    monkeypatch.setattr(watching, "LOADING_SILENCE_SECONDS", 1.0)
    async with supervised() as pool:
        start = asyncio.create_task(pool.start())
        await until(lambda: pool.pids)
        os.kill(pool.pids[0], signal.SIGSTOP)
        await asyncio.wait_for(start, 15)
        assert pool.num_restarts == 1


async def test_a_long_load_is_not_replaced(monkeypatch):
    """It sleeps: only its beats say that it lives."""
    monkeypatch.setattr(watching, "LOADING_SILENCE_SECONDS", 1.5)
    async with supervised(start_seconds=5.0) as pool:
        await pool.start()
        assert pool.num_restarts == 0


@pytest.mark.parametrize(("worth", "pauses"), [(0.2, [0.1] * 4), (60.0, [0.2, 0.4, 0.8, 1.6])])
async def test_pauses_grow_only_where_a_life_was_worth_nothing(monkeypatch, worth, pauses):
    """Killed while idle: one that has lived for a while is started again at once."""
    monkeypatch.setattr(supervision, "LIVED_SECONDS", worth)
    assert await pauses_after(4, lived=0.3) == pauses


async def test_one_token_makes_a_life_worth_its_start(monkeypatch):
    monkeypatch.setattr(supervision, "LIVED_SECONDS", 60.0)
    assert await pauses_after(2, lived=0.0, asked=True) == [0.1] * 2


async def pauses_after(kills, lived, asked=False):
    """How long it was meant to wait after each of so many kills."""
    pauses, real = [], supervision._backoff

    def noted(fruitless, others):
        pauses.append(real(fruitless, others))
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervision, "_backoff", noted)
        async with supervised() as pool:
            await pool.start()
            for number in range(kills):
                await until(lambda: pool.num_ready == 1)
                if asked:
                    pool.place(Submit(str(number), 1, (1, 2), SamplingParams(max_tokens=1)), Deaf())
                    await until(lambda number=number: pool.workers[0][2].tokens_sampled == 1)
                await asyncio.sleep(lived)
                os.kill(pool.pids[0], signal.SIGKILL)
                await until(lambda number=number: pool.num_restarts == number + 1)
    return pauses


async def test_the_end_does_not_wait_for_a_pause():
    async with supervised() as pool:
        await pool.start()
        pool._slots[0].fruitless = 20
        os.kill(pool.pids[0], signal.SIGKILL)
        await until(lambda: pool.num_restarts == 1)
        start = time.monotonic()
    assert time.monotonic() - start < 1.0


def test_pauses_are_bounded():
    assert supervision._backoff(5000, False) == supervision.MAX_BACKOFF_SECONDS
    assert supervision._backoff(5000, True) == supervision.MAX_BACKOFF_BESIDE_SECONDS
    assert [supervision._backoff(n, False) for n in range(3)] == [0.1, 0.2, 0.4]
