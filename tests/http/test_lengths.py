"""How long an answer may get: what the request says, what the server bounds, and no silent cut between them."""

from tests.http.reading import error_of, events
from tests.http.test_requests import sent

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOUND = {"max_stream_tokens": 300}


def test_an_endless_stream_ends_at_the_servers_bound(serve):
    served = serve(settings=BOUND)
    body = {"prompt": "x", "max_tokens": None, "retention": {"policy": "sinks", "window": 64}, "stream": True}
    chunks = events(served.post(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}))
    assert chunks[-1]["usage"]["completion_tokens"] == 299
    assert chunks[-1]["usage"]["tokens_evicted"] == 300 - 68
    for most in (None, 1):
        error = error_of(served.post(COMPLETIONS, {**body, "prompt": "x" * 300, "max_tokens": most}))
        assert (error["param"], error["message"]) == ("prompt", "the prompt has 300 tokens, and a stream ends at 300")


def test_no_length_that_was_asked_for_is_cut(serve):
    served = serve(settings=BOUND)
    assert sent(served, max_tokens=298, retention={"policy": "sinks"}).params.max_tokens == 298
    assert sent(served, max_tokens=4000).params.max_tokens == 4000, "the context bounds what has no retention"
    assert sent(served, min_tokens=301, max_tokens=400).params.min_tokens == 301
    for path, name in ((COMPLETIONS, "max_tokens"), (CHAT, "max_tokens"), (CHAT, "max_completion_tokens")):
        given = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
        error = error_of(served.post(path, {**given, name: 5000, "retention": {"policy": "sinks"}}))
        assert error["param"] == name
        assert f"{name} (5000)" in error["message"]
        assert "is over the longest stream, 300 (--max-stream-tokens): ask for at most 2" in error["message"]
    unsaid = sent(served, CHAT, retention={"policy": "sinks"}, stop=["a", "e", "i", "o", "u"])
    assert unsaid.params.max_tokens == 300 - len(unsaid.prompt)


def test_a_least_length_is_held_against_what_the_client_said(served):
    error = error_of(served.post(COMPLETIONS, {"prompt": "x", "min_tokens": 100}))
    assert error["param"] == "min_tokens"
    assert "more than the 16 tokens that an answer has here where max_tokens does not say" in error["message"]
