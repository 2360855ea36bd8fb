"""Reads server-sent events as a client that trusts nothing, and joins them to what the whole answer should be."""

import json


def events(response):
    """The JSON of each event of a whole response body; the last must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in data)
    assert data[-1] == "data: [DONE]"
    return [json.loads(block[6:]) for block in data[:-1]]


def joined(chunks, chat):
    """The choices of a stream in the shape of the whole answer: text, finish_reason, logprobs, trace by index."""
    choices = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": "", "finish": None, "logprobs": None, "trace": []})
            assert "finish_reason" in part
            assert choice["finish"] is None, "something came after the last word"
            choice["text"] += (part["delta"].get("content") or "") if chat else part["text"]
            choice["finish"] = part["finish_reason"]
            choice["stop"] = part.get("stop_reason")
            choice["logprobs"] = more_logprobs(choice["logprobs"], part["logprobs"])
            choice["trace"] += part.get("trace", [])
    return [choices[index] for index in sorted(choices)]


def whole(answer, chat):
    """The same of a whole answer."""
    return [
        {
            "text": choice["message"]["content"] if chat else choice["text"],
            "finish": choice["finish_reason"],
            "stop": choice.get("stop_reason"),
            "logprobs": choice["logprobs"],
            "trace": choice.get("trace", []),
        }
        for choice in answer["choices"]
    ]


def more_logprobs(before, after):
    if before is None or after is None:
        return before or after
    return {name: before[name] + after[name] for name in before}


def error_of(response, status=400):
    """The error of a refusal, whose body has OpenAI's shape."""
    assert response.status_code == status, f"{response.status_code}: {response.text[:500]}"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]
