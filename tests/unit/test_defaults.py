"""The server's own retention against what the model can do: what no plain request could get is told at the start."""

import pytest
from msgspec.structs import replace

from app.api.door import Door, Limits, check_defaults
from app.api.errors import Invalid
from app.api.schemas import RetentionFields
from app.settings import Settings
from model.protocol import VERSION, Ready

READY = Ready(
    VERSION, 1, "m", "f", 1024, 258, 4096, 16, 8, 512, "float32", "cpu", "fake", ("none", "sinks", "window", "restart"),
    {}, 16, 1024,
)  # fmt: skip
LEARNED = replace(
    READY,
    policies=("none", "restart"),
    policy_refusals={"sinks": "a kept key cannot slide; use the policy 'restart'", "window": "no"},
)
PLAIN = replace(READY, policies=("none",))


def test_defaults_that_no_request_can_be_served_under_name_flag_and_remedy():
    for ready, given, *words in (
        (LEARNED, {"retention": "sinks"}, "--retention sinks cannot be served: a kept key cannot slide;", "'restart'"),
        (PLAIN, {"retention": "window"}, "--retention window cannot", "this model serves none; choose"),
        (READY, {"retention": "sinks", "window": 8}, "--window 8 is under", "16 tokens; choose a longer --window"),
        (READY, {"retention": "window", "window": 3}, "--window 3 is under"),
        (READY, {"window": 8}, "--window 8 is under"),
        (READY, {"window": 2000}, "--window 2000 and --sink-tokens 4 are over the 1024", "at most 1020"),
        (READY, {"retention": "window", "window": 1025}, "--sink-tokens 0", "at most 1024"),
        (READY, {"sink_tokens": 600, "window": 700}, "--sink-tokens 600 leave no room", "fewer --sink-tokens"),
        (replace(READY, num_blocks=60), {"retention": "sinks"}, "needs 66 KV blocks, and the cache has 60", "shorter"),
        (replace(READY, block_size=1024), {"retention": "restart"}, "--sink-tokens 4 leave no room"),
    ):
        settings = Settings(**given)
        with pytest.raises(ValueError, match=r"^--") as told:
            check_defaults(ready, settings.default_retention, settings.model_fields_set)
        assert all(word in str(told.value) for word in words), told.value


@pytest.mark.parametrize(
    ("ready", "given"),
    [
        (READY, {}),
        (PLAIN, {}),
        (PLAIN, {"window": 8}),
        (LEARNED, {"retention": "restart"}),
        (READY, {"retention": "sinks"}),
        (READY, {"retention": "sinks", "window": 1020}),
        (READY, {"retention": "window", "window": 1024}),
        (replace(READY, context=64, max_window=64), {"retention": "sinks"}),
        (replace(READY, num_blocks=60), {}),
        (replace(READY, block_size=1024), {}),
    ],
)
def test_defaults_that_work_are_taken_and_do_work(ready, given):
    settings = Settings(**given)
    check_defaults(ready, settings.default_retention, settings.model_fields_set)
    door = Door(ready, None, Limits(settings.default_retention, settings.max_stream_tokens))
    assert door.retention(None).policy == settings.retention


def test_every_default_that_is_taken_serves_a_plain_request():
    """The check at the start and the door agree, whatever is set."""
    for ready in (READY, LEARNED, PLAIN, replace(READY, num_blocks=40), replace(READY, context=128, max_window=128)):
        for policy in ("sinks", "window", "restart"):
            for window in (None, 5, 15, 16, 124, 125, 600, 1020, 1024):
                given = {"retention": policy} if window is None else {"retention": policy, "window": window}
                settings = Settings(**given)
                door = Door(ready, None, Limits(settings.default_retention, 1000))
                try:
                    check_defaults(ready, settings.default_retention, settings.model_fields_set)
                except ValueError:
                    with pytest.raises(Invalid):
                        door.retention(None if window is None else RetentionFields(window=window))
                else:
                    assert door.retention(None).policy == policy


@pytest.mark.parametrize(
    ("ready", "words"),
    [(READY, '"policy": "sinks"'), (LEARNED, '"policy": "restart"'), (PLAIN, "shorten it")],
)
def test_the_remedy_for_a_long_prompt_is_one_that_the_model_has(ready, words):
    remedy = Door(ready, None, Limits(Settings().default_retention, 1000)).remedy
    assert words in remedy
    assert ("retention" in remedy) == (len(ready.policies) > 1)
