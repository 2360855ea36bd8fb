"""The request schemas against the protocol: same defaults, every control carried, nothing taken twice."""

import json

import pytest

from app.api.bodies import parse_body
from app.api.door import _PLAIN
from app.api.errors import Invalid
from app.api.schemas import HARMLESS, NOT_HONOURED, Sampling
from app.api.schemas_requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from model.protocol import SamplingParams

MADE_AT_THE_DOOR = {"dry_breakers"}  # of `dry_sequence_breakers`


def test_every_control_of_the_worker_has_a_field_and_the_same_default():
    fields = Sampling.model_fields | CompletionRequest.model_fields
    defaults = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        if name in MADE_AT_THE_DOOR:
            continue
        field, default = fields[name], getattr(defaults, name)
        if name in ("seed", "max_tokens"):  # drawn, and different by endpoint
            assert field.default is None
        elif default == ():
            assert field.default is None, name
        else:
            assert field.default == default, name
    assert set(_PLAIN) <= set(SamplingParams.__struct_fields__) & set(Sampling.model_fields)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
def test_no_field_is_both_served_and_refused(kind):
    assert not set(kind.model_fields) & (set(NOT_HONOURED) | set(HARMLESS))
    for name, field in kind.model_fields.items():
        assert field.description, name
        assert field.is_required() or not field.default or field.annotation is not None


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_what_is_not_honoured_is_refused_beside_its_neutral_values(name):
    neutral, _ = NOT_HONOURED[name]
    for value in (None, *neutral):
        body = {"prompt": "x", name: value}
        assert parse_body(_json(body), CompletionRequest).prompt == "x"
    with pytest.raises(Invalid) as caught:
        parse_body(_json({"prompt": "x", name: "certainly not neutral"}), CompletionRequest)
    assert caught.value.param == name


def test_a_boolean_is_no_neutral_number():
    for name, value in (("length_penalty", True), ("mirostat", False), ("use_beam_search", 0)):
        with pytest.raises(Invalid):
            parse_body(_json({"prompt": "x", name: value}), CompletionRequest)


def _json(body):
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("text", "half"),
    [
        (r"\ud83d", r"\ud83d"),
        (r"a\uD83D b", r"\uD83D"),
        (r"\ud83dx" + "y" * 99, r"\ud83d"),
        (r"\udc00" + "y" * 99, r"\udc00"),
        (r"\ud83d\ud83d\ude00", r"\ud83d"),
        (r"\\\\\udc00", r"\udc00"),
        ("y" * 99 + r"\ud83d\u0041", r"\ud83d"),
    ],
)
def test_half_a_surrogate_pair_is_told_as_such(text, half):
    with pytest.raises(Invalid) as refused:
        parse_body(f'{{"prompt": "{text}"}}'.encode(), CompletionRequest)
    assert (
        refused.value.message == f"a text of the body holds half of a surrogate pair, {half}; send the whole character"
    )


@pytest.mark.parametrize(
    "data", [b'{"prompt": "\\ud83d\\ude00"', b'{"prompt": "\\\\ud83d', b'{"prompt": "\\ud83d\\ude00" 5}']
)
def test_other_broken_json_is_not_called_half_a_pair(data):
    with pytest.raises(Invalid, match="no valid JSON"):
        parse_body(data, CompletionRequest)


def test_a_text_that_is_too_long_to_tokenize_is_told_the_limit():
    with pytest.raises(Invalid, match="1048576"):
        parse_body(b'{"prompt": "%s"}' % (b"a" * 1_048_577), TokenizeRequest)
