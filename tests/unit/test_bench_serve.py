"""The HTTP benchmark counts what it says it counts: against a small server whose answers are known."""

import argparse
import asyncio
import json

import pytest
from aiohttp import web

from bench import serve


class Imitation:
    """Answers completions with four events and a usage; knows how many requests were open at once."""

    def __init__(self, pause: float = 0.0) -> None:
        self.bodies: list[dict] = []
        self.open = self.most_open = 0
        self.pause = pause
        self.status = 200

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="full")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse()
        await response.prepare(request)
        for number in range(4):
            await asyncio.sleep(self.pause)
            await response.write(b"data: " + json.dumps({"choices": [{"text": str(number)}]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 7, "completion_tokens": 4}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
        self.open -= 1
        return response

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})


@pytest.fixture
async def imitation(free_port: int):
    state = Imitation(0.01)
    app = web.Application()
    app.router.add_post("/v1/completions", state.completions)
    app.router.add_get("/v1/models", state.models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", free_port).start()
    state.url = f"http://127.0.0.1:{free_port}"
    yield state
    await runner.cleanup()


async def test_a_run_counts_tokens_and_times(imitation: Imitation) -> None:
    work = serve.Work(imitation.url, "tiny", words=5, max_tokens=4)
    result = await serve.load(work, concurrency=3, requests=9)
    assert (result.output_tokens, result.prompt_tokens) == (36, 63)
    assert imitation.most_open == 3
    assert len(imitation.bodies) == 10, "nine, and one to warm up"
    assert imitation.bodies[-1]["ignore_eos"] is True
    assert imitation.bodies[-1]["stream_options"] == {"include_usage": True}
    assert 0.005 < result.first_p50 < result.whole_p50 < result.wall
    assert result.output_rate == pytest.approx(36 / result.wall)


async def test_a_refusal_ends_the_run_with_what_the_server_said(imitation: Imitation) -> None:
    imitation.status = 429
    with pytest.raises(serve.Refused, match=r"^HTTP 429: full$"):
        await serve.load(serve.Work(imitation.url, "tiny", 5, 4), 1, 1)


async def test_concurrencies_take_turns_with_fresh_prompts(imitation: Imitation) -> None:
    asked = serve.arguments(["--url", imitation.url, "--concurrency", "1,2", "--requests", "2", "--repeat", "2"])
    work, runs = await serve.measure(asked)
    assert work.model == "tiny"
    assert [[result.concurrency for result in results] for results in runs] == [[1, 1], [2, 2]]
    prompts = [body["prompt"] for body in imitation.bodies if body["prompt"] != "warm up"]
    assert len(set(prompts)) == 8


def test_prompts_are_the_same_for_the_same_seed() -> None:
    assert serve.prompts(2, 128) == serve.prompts(2, 128)
    assert serve.prompts(1, 128, seed=1) != serve.prompts(1, 128)
    assert len(serve.prompts(1, 128)[0].split()) == 128


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 3), (0.99, 4)])
def test_quantiles(share: float, value: int) -> None:
    assert serve.quantile([4, 1, 3, 2], share) == value
    assert serve.quantile([], share) == 0.0


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str], free_port: int) -> None:
    assert serve.main(["--url", f"http://127.0.0.1:{free_port}"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_arguments_are_read() -> None:
    asked = serve.arguments([])
    assert isinstance(asked, argparse.Namespace)
    assert (asked.concurrency, asked.words, asked.max_tokens) == ([1, 8, 32], 128, 64)
