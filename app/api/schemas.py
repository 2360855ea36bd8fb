"""Fields that several requests share, each with its range, its default and what it means.

Knows names and ranges only: whether an id is in the vocabulary or a window fits the model is asked at the door
(`app/api/door.py`). Strict: no number is made of a string, no field is taken that is not written here.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from model.protocol import MAX_DRY_RANGE, MAX_PENALTY_RANGE

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 128
MAX_BIAS_ENTRIES = 1024
MAX_BAD_WORDS = 256
MAX_ALLOWED_IDS = 1 << 16
MAX_TOKENS = 10_000_000
LEAST_REPETITION = 1e-6  # logits are divided by it, and must stay finite numbers
MAX_SCORED = 1 << 18  # candidates told for a prompt: its tokens times (k + 1)

Text = Annotated[str, Field(strict=True)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Whole = TypeVar("Whole")

HARMLESS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields that clients send to name a request or to bill it: they ask nothing of the answer."""

NOT_YET = "is not served yet; leave it out"
NOT_HONOURED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": (("",), "asks for an answer that leads up to a given text, which is not served; leave it out"),
    "response_format": (({"type": "text"},), NOT_YET),
    "tools": (([],), NOT_YET),
    "tool_choice": (("none", "auto"), NOT_YET),
    "parallel_tool_calls": ((True, False), NOT_YET),
    "functions": (([],), NOT_YET),
    "function_call": (("none", "auto"), NOT_YET),
    "structured_outputs": (({},), NOT_YET),
    "guided_json": ((), NOT_YET),
    "guided_regex": ((), NOT_YET),
    "guided_choice": ((), NOT_YET),
    "guided_grammar": ((), NOT_YET),
    "json_schema": ((), NOT_YET),
    "regex": ((), NOT_YET),
    "grammar": (("",), NOT_YET),
    "chat_template": ((), "must come with the model: templates of clients are not run; leave it out"),
    "modalities": ((["text"],), "can only be text; leave it out"),
    "audio": ((), "is not served; leave it out"),
    "prediction": ((), "is not served; leave it out"),
    "web_search_options": ((), "is not served; leave it out"),
    "reasoning_effort": ((), "is not served; what a template knows can be given in chat_template_kwargs"),
    "verbosity": (("medium",), "is not served; leave it out"),
    "documents": (([],), "is not served; leave it out"),
    "use_beam_search": ((False,), "is not served; leave it out"),
    "length_penalty": ((1, 1.0), "belongs to beam search, which is not served; leave it out"),
    "early_stopping": ((False,), "belongs to beam search, which is not served; leave it out"),
    "spaces_between_special_tokens": ((True,), "is not served; leave it out"),
    "truncate_prompt_tokens": ((), "is not served: prompts are never cut; use retention for long ones"),
    "prompt_embeds": ((), "is not served; send text or token ids"),
    "mirostat": ((0,), "is not served; leave it out"),
    "tfs": ((1, 1.0), "is not served; leave it out"),
    "top_a": ((0, 0.0), "is not served; leave it out"),
    "return_tokens_as_token_ids": ((False,), "is not served; leave it out"),
    "return_token_ids": ((False,), "is not served; `trace` and /tokenize tell ids"),
}
"""Fields that others serve and we do not: their neutral values beside null, and what a refusal says."""


class Strict(BaseModel):
    """What all requests are: strict in types, closed to unknown fields, finite in numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Strict):
    """What a stream tells beside its tokens; only with `stream: true`."""

    include_usage: bool | None = Field(
        False, description="End with one more chunk that has no choices and the usage; the others have `usage: null`."
    )
    continuous_usage_stats: bool | None = Field(
        False, description="Put the usage so far into every chunk (together with include_usage)."
    )
    include_obfuscation: Literal[False] | None = Field(
        None, description="Padding against eavesdroppers is not served: only false or null."
    )


class RetentionFields(Strict):
    """What a stream keeps once it is longer than its window. Defaults: the server's own."""

    policy: Literal["none", "sinks", "window", "restart"] | None = Field(
        None,
        description="`none` stops at the context; `sinks` keeps the first tokens and the most recent ones; `window` "
        "keeps the most recent ones; `restart` prefills sinks and the newest half window anew (learned positions).",
    )
    sink_tokens: int | None = Field(
        None, ge=0, le=MAX_TOKENS, description="First tokens of the stream that stay; fewer than `window`. Default 4."
    )
    window: int | None = Field(
        None,
        ge=1,
        le=MAX_TOKENS,
        description="Most recent tokens that stay: at least one KV block, at most what the model was trained for. "
        "Default 1020.",
    )


class Sampling(Strict):
    """Fields of the requests that generate: sampling controls, ends, streaming, retention."""

    temperature: float | None = Field(
        1.0, ge=0, le=2, description="0 always takes the most likely token.", examples=[0.7]
    )
    dynatemp_range: float | None = Field(
        0.0, ge=0, le=2, description="The temperature moves by this much with the entropy; 0 is off."
    )
    dynatemp_exponent: float | None = Field(
        1.0, gt=0, le=10, description="How steeply the temperature follows the entropy."
    )
    top_k: int | None = Field(0, ge=-1, le=MAX_TOKENS, description="Keep the k most likely tokens; 0 and -1 keep all.")
    top_p: float | None = Field(
        1.0, gt=0, le=1, description="Keep the most likely tokens that together reach this probability."
    )
    min_p: float | None = Field(0.0, ge=0, le=1, description="Cut tokens less likely than this share of the best one.")
    typical_p: float | None = Field(
        1.0, gt=0, le=1, description="Keep the tokens whose surprise is nearest to the mean one; 1 is all."
    )
    top_n_sigma: float | None = Field(
        0.0, ge=0, le=100, description="Keep tokens within n standard deviations of the best logit; 0 is off."
    )
    xtc_probability: float | None = Field(
        0.0, ge=0, le=1, description="Chance to cut all but the least of the very likely tokens."
    )
    xtc_threshold: float | None = Field(
        0.1, ge=0, le=1, description="What counts as very likely for XTC; above 0.5 is off."
    )
    dry_multiplier: float | None = Field(
        0.0, ge=0, le=10, description="Strength against repeating phrases (DRY); 0 is off."
    )
    dry_base: float | None = Field(1.75, ge=1, le=10, description="Growth of DRY with the phrase's length.")
    dry_allowed_length: int | None = Field(
        2, ge=1, le=1024, description="Longest phrase that may repeat freely under DRY."
    )
    dry_range: int | None = Field(
        0, ge=0, le=MAX_DRY_RANGE, description=f"How many last tokens DRY looks at; 0 is the most, {MAX_DRY_RANGE}."
    )
    dry_sequence_breakers: Texts | None = Field(
        None,
        max_length=MAX_STOPS,
        description='Strings no DRY phrase goes across (their last token counts); default newline, `:`, `"`, `*`.',
    )
    repetition_penalty: float | None = Field(
        1.0,
        ge=LEAST_REPETITION,
        le=10,
        description="Above 1 makes tokens of prompt and answer less likely, below 1 more likely.",
    )
    presence_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="Taken once off the logit of each token of the answer."
    )
    frequency_penalty: float | None = Field(
        0.0, ge=-2, le=2, description="Taken off for each time a token occurred in the answer."
    )
    penalty_range: int | None = Field(
        0, ge=0, le=MAX_PENALTY_RANGE, description="How many last tokens the three penalties look at; 0 is all."
    )
    logit_bias: dict[Text, float] | None = Field(
        None,
        description=f"Added to logits, by token id as text: -100 to 100, at most {MAX_BIAS_ENTRIES} entries.",
        examples=[{"50": -100}],
    )
    bad_words: Texts | None = Field(
        None,
        max_length=MAX_BAD_WORDS,
        description=f"Words that never occur, at most {MAX_BAD_WORDS} of at most {MAX_STOP_LENGTH} characters.",
    )
    allowed_token_ids: Ids | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_IDS, description="Only these ids are ever sampled; default: all."
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        le=2**63 - 1,
        description="The same seed gives the same answer; the server draws one where none is given and returns it.",
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_TOKENS,
        description="Longest answer. Default: 16 on completions, the rest of the context on chat. An explicit null "
        "under retention means until stopped, bounded by the server's --max-stream-tokens; more than that is refused.",
    )
    min_tokens: int | None = Field(
        0, ge=0, le=MAX_TOKENS, description="No end of sequence and no stop id before this many tokens."
    )
    stop: Text | Texts | None = Field(
        None,
        description=f"The answer ends before the first of these: at most {MAX_STOPS} strings of at most "
        f"{MAX_STOP_LENGTH} characters.",
    )
    stop_token_ids: Ids | None = Field(
        None, max_length=MAX_STOP_IDS, description="The answer ends with the first of these ids; none by default."
    )
    include_stop_str_in_output: bool | None = Field(
        False, description="Show the stop string or stop token at the end of the text."
    )
    skip_special_tokens: bool | None = Field(True, description="Leave control tokens out of the text.")
    ignore_eos: bool | None = Field(False, description="Go on past the model's own end of text.")
    n: int | None = Field(1, ge=1, le=MAX_CHOICES, description="How many answers, each with a chance of its own.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Tell each prompt token's log-probability and k candidates; null is off.",
    )
    stream: bool | None = Field(False, description="Send server-sent events as tokens come.")
    stream_options: StreamOptions | None = Field(None, description="What a stream tells beside its tokens.")
    retention: RetentionFields | None = Field(None, description="What the stream keeps past its window.")
    trace: int | None = Field(
        0,
        ge=0,
        le=MAX_LOGPROBS,
        description="For each token the k best candidates and their probability after each filter; 0 is off.",
    )
    watch: bool | None = Field(False, description="Tell the KV blocks the stream holds with its chunks.")
    timeout: float | None = Field(
        None, gt=0, le=86_400, description="Seconds the whole request may take; the server's own limit by default."
    )
    priority: int | None = Field(
        0, ge=-100, le=100, description="Lower numbers leave the queue first; 10 s of waiting make up for 1."
    )

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings are more than the limit of {MAX_STOPS}")
        return _sized(stops, value)

    @field_validator("bad_words", "dry_sequence_breakers")
    @classmethod
    def _words(cls, value: list[str] | None) -> list[str] | None:
        return _sized(value or [], value)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _entries(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIAS_ENTRIES:
            raise ValueError(f"{len(value)} entries are more than the limit of {MAX_BIAS_ENTRIES}")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdigit() and len(key) < 12 and key == str(int(key))):
                raise ValueError(f"the key {key[:40]!r} is no token id")
            if not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {key} is not between -100 and 100")
        return value


def _sized(strings: list[str], whole: Whole) -> Whole:
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise ValueError(f"each string must have 1 to {MAX_STOP_LENGTH} characters, and one has {len(string)}")
    return whole
