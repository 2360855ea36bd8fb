"""Settings: flags over environment over defaults, ranges, unknown variables, and how cores are dealt out."""

from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from app import settings
from app.api.schemas_requests import MAX_PROMPTS
from app.settings import Settings, SettingsError, load, share_cores
from model.config import EngineConfig
from model.protocol import Retention


def test_a_flag_beats_the_environment_and_the_environment_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().port == 8000
    monkeypatch.setenv("EVERSTREAM_PORT", "9001")
    assert load().port == 9001
    assert load(port=9002).port == 9002
    assert load(port=None).port == 9001


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load().port = 1


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("EVERSTREAM_PROT", "did you mean EVERSTREAM_PORT?"), ("EVERSTREAM_ZZZZZZZZ", "see `python -m app serve --help`")],
)
def test_an_unknown_variable_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, hint: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(SettingsError, match=variable) as caught:
        load()
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("port", "http"),
        ("dtype", "int3"),
        ("workers", 0),
        ("grace", -1),
        ("cache_bytes", "12 parsecs"),
        ("cache_bytes", 5),
        ("num_blocks", 1 << 64),
        ("token_budget", 0),
        ("retention", "forever"),
        ("max_stream_tokens", 10_000_001),
        ("max_stream_tokens", 1),
        ("max_waiting", 0),
        ("queue_timeout", 0),
        ("silence", float("nan")),
        ("grace", float("inf")),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_flag_or_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    with pytest.raises(SettingsError, match=f"^--{name.replace('_', '-')} is {value!r}: ") as caught:
        load(**{name: value})
    assert "\n" not in str(caught.value)
    monkeypatch.setenv(f"EVERSTREAM_{name.upper()}", str(value))
    with pytest.raises(SettingsError, match=f"^EVERSTREAM_{name.upper()} is "):
        load()


def test_sinks_must_be_fewer_than_the_window() -> None:
    with pytest.raises(SettingsError, match=r"^sink_tokens \(20\) must be fewer than window \(16\); .*--window"):
        load(retention="sinks", sink_tokens=20, window=16)
    assert load(retention="sinks", sink_tokens=1, window=508).default_retention == Retention("sinks", 1, 508)


def test_values_that_can_never_work_together_are_refused_whatever_the_policy() -> None:
    with pytest.raises(SettingsError, match=r"^sink_tokens \(2000\) must be fewer than window \(1020\)"):
        load(sink_tokens=2000)
    with pytest.raises(SettingsError, match=r"^context \(1\) holds no token beside a prompt's; .*--context"):
        load(context=1)
    assert load(retention="window", window=4).default_retention.window == 4


def test_sizes_and_lists_are_read_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTREAM_CACHE_BYTES", "2GiB")
    monkeypatch.setenv("EVERSTREAM_CORS_ORIGINS", "https://a.example, https://b.example")
    chosen = load()
    assert chosen.cache_bytes == 2 << 30
    assert chosen.cors_origins == ("https://a.example", "https://b.example")


def test_keys_are_not_printed_and_are_no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTREAM_API_KEYS", "sesame")
    assert load().api_keys == "sesame"
    assert "sesame" not in repr(load())
    assert Settings.model_fields["api_keys"].json_schema_extra["flag"] is False


def test_every_setting_has_a_meaning_and_a_heading() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.json_schema_extra["group"], name


def test_the_cache_lies_in_the_users_cache_folder() -> None:
    assert settings.default_cache({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/everstream/models")
    assert settings.default_cache({}) == Path.home() / ".cache/everstream/models"


def test_one_engine_config_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "physical_cores", lambda: [0, 2, 4, 6, 8])
    configs = load(workers=2, device="cuda:0,cuda:1", dtype="float32", served_name="mine").engine_configs(
        Path("/models/x.gguf"), "x"
    )
    assert [config.device for config in configs] == ["cuda:0", "cuda:1"]
    assert [config.cores for config in configs] == [(0, 2), (4, 6, 8)]
    assert [config.threads for config in configs] == [2, 3]
    assert {(config.name, config.model, config.dtype) for config in configs} == {("mine", "/models/x.gguf", "float32")}
    single = load(threads=7).engine_configs(Path("/models/x.gguf"), "x")
    assert [(config.threads, config.cores, config.name) for config in single] == [(7, (), "x")]


def test_every_field_of_an_engine_config_can_be_set_by_a_setting() -> None:
    made_here = {"model", "name", "socket", "cores"}
    for field in msgspec.structs.fields(EngineConfig):
        assert field.name in made_here or field.name in Settings.model_fields, field.name


@pytest.mark.parametrize(
    ("cores", "workers", "shares"),
    [
        ([0, 1], 1, [(0, 1)]),
        ([0, 1], 2, [(0,), (1,)]),
        ([0, 1], 3, [(0,), (1,), (0,)]),
        ([3, 5, 7], 2, [(3,), (5, 7)]),
    ],
)
def test_cores_are_shared_out(cores: list[int], workers: int, shares: list[tuple[int, ...]]) -> None:
    assert share_cores(cores, workers) == shares


def test_this_machine_has_a_core() -> None:
    assert len(settings.physical_cores()) >= 1


def test_the_engines_bounds_leave_room_for_one_list_of_prompts() -> None:
    (config,) = Settings(max_waiting=1, max_waiting_tokens=7, max_body_bytes="2048").engine_configs(Path("m"), "m")
    assert (config.max_waiting, config.max_waiting_tokens) == (1 + MAX_PROMPTS, 2055)
