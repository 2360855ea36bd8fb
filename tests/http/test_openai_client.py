"""The real `openai` client against both endpoints, streamed and whole, as users drive it."""

import asyncio

import openai
import pytest


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "everstream"
    with pytest.raises(openai.NotFoundError, match="not served"):
        client.models.retrieve("gpt-4")


def test_completions(client):
    whole = client.completions.create(model="fake", prompt="Hello", max_tokens=8, logprobs=2, seed=3)
    assert len(whole.choices[0].text) == 8
    assert len(whole.choices[0].logprobs.tokens) == 8
    assert whole.usage.completion_tokens == 8
    stream = client.completions.create(
        model="fake", prompt="Hello", max_tokens=8, seed=3, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert last.choices == []
    assert last.usage == whole.usage


def test_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    asked = {"model": "fake", "messages": messages, "max_completion_tokens": 8, "seed": 4}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.choices[0].message.role == "assistant"
    assert len(whole.choices[0].logprobs.content) == 8
    with client.chat.completions.create(**asked, stream=True) as stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    again = client.chat.completions.create(**asked, extra_body={"min_p": 0.1, "retention": {"policy": "sinks"}})
    assert again.choices[0].message.content == text


def test_an_answer_can_be_sent_back(client):
    messages = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(model="fake", messages=messages, max_tokens=4)
    messages += [answer.choices[0].message, {"role": "user", "content": "Go on"}]
    assert client.chat.completions.create(model="fake", messages=messages, max_tokens=4).choices[0].message.content
    messages[1] = answer.choices[0].message.model_dump()
    assert client.chat.completions.create(model="fake", messages=messages, max_tokens=4).choices[0].message.content


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}], temperature=5)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x", n=0, stream=True)
    assert caught.value.param == "n"


def test_an_error_in_mid_stream_is_raised(serve):
    served = serve(settings={"request_timeout": 0.4}, delay=0.05)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="x", max_tokens=2000, stream=True)
        with pytest.raises(openai.APIError, match="time limit"):
            for _ in stream:
                pass


async def test_many_streams_at_once(served):
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

        async def one(number):
            stream = await client.completions.create(
                model="fake", prompt="x" * (number + 1), max_tokens=number + 1, stream=True
            )
            return sum([len(chunk.choices[0].text) async for chunk in stream])

        assert await asyncio.gather(*(one(number) for number in range(32))) == list(range(1, 33))
