"""The last check before the worker: a request against the vocabulary, the context, the KV pool and our caps.

Knows what the worker said of itself (`Ready`) and what a request asks; turns the one into refusals that name field
and remedy, the other into protocol values. No raw value of a client goes on from here.
"""

import secrets
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from app.api.errors import Invalid
from app.api.schemas import RetentionFields, Sampling
from app.text.tokenizer import Tokenizer
from model.protocol import Ready, Retention, RetentionPolicy, SamplingParams

SAFE_SEED_BITS = 53  # a seed we draw survives JavaScript's numbers
DRY_BREAKERS = ("\n", ":", '"', "*")
COMPLETION_TOKENS = 16
LEAST_TEMPERATURE = 1e-6  # below it logits that differ by 0.0001 are e^100 apart: it only risks an overflow
_UNSAID = RetentionFields.model_validate({})

_PLAIN = (
    *("temperature", "dynatemp_range", "dynatemp_exponent", "top_p", "min_p", "typical_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_range"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "penalty_range", "ignore_eos", "trace"),
)
"""Controls that go to the worker under their own name and value."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator decided: the retention of requests that name none, and how long a stream may get."""

    retention: Retention
    max_stream_tokens: int


@dataclass(frozen=True, slots=True)
class Door:
    """One look at the worker, for the checks of one request."""

    ready: Ready
    tokenizer: Tokenizer
    limits: Limits

    def retention(self, fields: RetentionFields | None) -> Retention:
        """The policy of a request. Raises Invalid, also where the model cannot honour it."""
        default = self.limits.retention
        fields = fields or _UNSAID
        policy = fields.policy or default.policy
        if policy not in self.ready.policies:
            why = self.ready.policy_refusals.get(policy, f"this model serves {', '.join(self.ready.policies)}")
            raise Invalid(
                f"the retention policy {policy!r} is refused: {why}", "retention.policy", "unsupported_policy"
            )
        if policy == "none":
            for name in ("sink_tokens", "window"):
                if getattr(fields, name) is not None:
                    text = f"retention.{name} means nothing under the policy 'none'; leave it out or choose 'sinks'"
                    raise Invalid(text, f"retention.{name}")
            return Retention()
        if policy == "window" and fields.sink_tokens:
            raise Invalid("the policy 'window' keeps no sinks; choose 'sinks' to keep them", "retention.sink_tokens")
        sinks = default.sink_tokens if fields.sink_tokens is None else fields.sink_tokens
        sinks = 0 if policy == "window" else sinks
        longest = self.ready.max_window or self.ready.context
        window = min(default.window, longest - sinks) if fields.window is None else fields.window
        self._check_window(policy, sinks, window, longest)
        return Retention(policy, sinks, window)

    def _check_window(self, policy: RetentionPolicy, sinks: int, window: int, longest: int) -> None:
        ready = self.ready
        shortest = max(ready.min_window, ready.block_size)
        if sinks >= window:
            raise Invalid(f"sink_tokens ({sinks}) must be fewer than window ({window})", "retention.sink_tokens")
        if window < shortest:
            raise Invalid(f"the window of {window} tokens is under the least, {shortest}", "retention.window")
        if sinks + window > longest:
            text = f"sinks and window, {sinks} + {window} tokens, are over the {longest} that the model was trained for"
            raise Invalid(text, "retention.window")
        blocks = -(-(sinks + window) // ready.block_size) + 2
        if blocks > ready.num_blocks:
            text = (
                f"the policy {policy!r} needs {blocks} KV blocks, and the cache has {ready.num_blocks}; shrink window"
            )
            raise Invalid(text, "retention.window")

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises Invalid where an id is outside the vocabulary."""
        if not ids or (min(ids) >= 0 and max(ids) < self.ready.vocabulary):
            return
        for token in ids:
            if not 0 <= token < self.ready.vocabulary:
                text = f"{field} holds the token id {str(token)[:24]}; ids are 0 to {self.ready.vocabulary - 1}"
                raise Invalid(text, field, "invalid_token")

    def check_length(self, length: int, max_tokens: int, retention: Retention, field: str) -> None:
        """Raises Invalid where a prompt of `length` tokens can never be served."""
        ready = self.ready
        needed = length + min(max_tokens, 1)
        if retention.policy != "none":
            if needed > self.limits.max_stream_tokens:
                text = f"the prompt has {length} tokens, and a stream ends at {self.limits.max_stream_tokens}"
                raise Invalid(text, field, "context_length_exceeded")
            return
        if needed > ready.context:
            text = f"the prompt has {length} tokens, and the context has {ready.context}; {self.remedy}"
            raise Invalid(text, field, "context_length_exceeded")
        capacity = ready.num_blocks * ready.block_size
        if needed > capacity:
            text = f"the prompt has {length} tokens, and the KV cache holds {capacity}; shorten it, or give the server"
            text += " a larger cache (--cache-bytes, or --num-blocks where that is set)"
            raise Invalid(text, field, "cache_too_small")

    @property
    def remedy(self) -> str:
        """What can be done about a prompt that is longer than the context."""
        offers = {
            "sinks": "to stream it through a window",
            "restart": "to have its beginning and its end kept, and the rest dropped",
        }
        for policy, effect in offers.items():
            if policy in self.ready.policies:
                return f'shorten it, or send "retention": {{"policy": "{policy}"}} {effect}'
        return "shorten it"

    def max_tokens(self, body: Sampling, length: int, retention: Retention, rest_of_context: bool) -> int:
        """The longest answer to a prompt of `length` tokens. Raises Invalid where no stream may be so long."""
        given = [body.max_tokens, getattr(body, "max_completion_tokens", None)]
        numbers = {number for number in given if number is not None}
        if len(numbers) > 1:
            raise Invalid("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
        longest = self.limits.max_stream_tokens
        explicit = body.model_fields_set & {"max_tokens", "max_completion_tokens"}
        if numbers:
            most = numbers.pop()
            if retention.policy != "none" and length < longest < length + most:
                name = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
                text = (
                    f"{name} ({most}) after a prompt of {length} tokens is over the longest stream, {longest} (--max-"
                )
                text += f"stream-tokens): ask for at most {longest - length}, or send null to go on until then"
                raise Invalid(text, name)
            return most
        left = max(1, longest - length)
        if explicit and retention.policy != "none":
            return left
        context = self.ready.context
        unsaid = COMPLETION_TOKENS if not rest_of_context else context - length if length < context else context
        return unsaid if retention.policy == "none" else min(unsaid, left)

    def params(
        self, body: Sampling, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None, seed: int | None
    ) -> SamplingParams:
        """A request's controls as the worker takes them. Raises Invalid.

        `seed` goes before the request's own; where there is neither, one is drawn.
        """
        if seed is None:
            seed = secrets.randbits(SAFE_SEED_BITS) if body.seed is None else body.seed
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            if body.max_tokens is None and getattr(body, "max_completion_tokens", None) is None:
                text = f"min_tokens ({min_tokens}) is more than the {max_tokens} tokens that an answer has here where "
                raise Invalid(f"{text}max_tokens does not say; send max_tokens", "min_tokens")
            raise Invalid(f"min_tokens ({min_tokens}) is more than max_tokens ({max_tokens})", "min_tokens")
        if body.trace:
            logprobs = max(logprobs or 0, body.trace)
        plain = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
        if plain.get("temperature"):
            plain["temperature"] = max(plain["temperature"], LEAST_TEMPERATURE)
        return SamplingParams(
            **plain,
            top_k=min(max(body.top_k or 0, 0), self.ready.vocabulary),
            dry_breakers=self._breakers(body),
            logit_bias=self._bias(body),
            bad_words=self._bad_words(body),
            allowed_token_ids=self._known(body.allowed_token_ids, "allowed_token_ids"),
            seed=seed,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            stop_token_ids=self._known(body.stop_token_ids, "stop_token_ids"),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _known(self, ids: Sequence[int] | None, field: str) -> tuple[int, ...]:
        self.check_ids(ids or (), field)
        return tuple(dict.fromkeys(ids or ()))

    def _bias(self, body: Sampling) -> tuple[tuple[int, float], ...]:
        bias = {int(key): float(value) for key, value in (body.logit_bias or {}).items()}
        self.check_ids(list(bias), "logit_bias")
        return tuple(sorted(bias.items()))

    def _bad_words(self, body: Sampling) -> tuple[tuple[int, ...], ...]:
        """Each word as it is spelled at the start of a text and after a space."""
        words = body.bad_words or ()
        spelled = [self.tokenizer.encode(text, add_special=False) for word in words for text in (word, f" {word}")]
        return tuple(dict.fromkeys(tuple(ids) for ids in spelled if ids))

    def _breakers(self, body: Sampling) -> tuple[int, ...]:
        if not body.dry_multiplier:
            return ()
        breakers = DRY_BREAKERS if body.dry_sequence_breakers is None else body.dry_sequence_breakers
        # As the proposal of DRY has it: the last token of the breaker written behind a letter.
        spelled = [self.tokenizer.encode(f"a{breaker}", add_special=False) for breaker in breakers]
        return tuple(dict.fromkeys(ids[-1] for ids in spelled if ids))


def check_defaults(ready: Ready, default: Retention, given: AbstractSet[str]) -> None:
    """Raises ValueError, a sentence for the operator, where requests that say little are served by no one.

    `default`: the retention of requests that name none. `given`: the settings that were set, by name.
    """
    policy = default.policy
    if policy not in ready.policies:
        why = ready.policy_refusals.get(policy, f"this model serves {', '.join(ready.policies)}; choose one of them")
        raise ValueError(f"--retention {policy} cannot be served: {why}")
    kept = [name for name in ready.policies if name != "none"]
    if policy == "none" and not (kept and given & {"window", "sink_tokens"}):
        return
    sinks = 0 if policy == "window" else default.sink_tokens
    longest, shortest = ready.max_window or ready.context, max(ready.min_window, ready.block_size)
    if longest - sinks < max(shortest, sinks + 1):
        text = f"--sink-tokens {sinks} leave no room for a window in the {longest} tokens of the model's context"
        raise ValueError(f"{text}; choose fewer --sink-tokens")
    window = default.window if "window" in given else min(default.window, longest - sinks)
    if window < shortest:
        text = f"--window {window} is under the least that the cache can keep, {shortest} tokens"
        raise ValueError(f"{text}; choose a longer --window or a smaller --block-size")
    if sinks + window > longest:
        text = f"--window {window} and --sink-tokens {sinks} are over the {longest} tokens of the model's context"
        raise ValueError(f"{text}; choose a --window of at most {longest - sinks}")
    blocks = -(-(sinks + window) // ready.block_size) + 2
    if policy != "none" and blocks > ready.num_blocks:
        text = f"--retention {policy} with a window of {window} needs {blocks} KV blocks, and the cache has "
        text += f"{ready.num_blocks}; choose a shorter --window, or a larger cache (--cache-bytes, or --num-blocks "
        raise ValueError(f"{text}where that is set)")


def stops(body: Sampling) -> tuple[str, ...]:
    """A request's stop strings."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return tuple(dict.fromkeys(given))


def check_model(name: str | None, served: str) -> None:
    """Raises Invalid (404) where a request asks for another model than the one that is served."""
    if name is not None and name != served:
        text = f"the model {name[:200]!r} is not served here; the one that is: {served!r}"
        raise Invalid(text, "model", "model_not_found", status=404)
