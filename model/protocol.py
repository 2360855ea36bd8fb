"""Every message that crosses the door between front end and worker, and nothing else.

Knows ids, numbers and names; no text, no tensors, no sockets. Down go `Submit`, `Cancel`, `Drain`;
up come `Ready`, `Accepted`, `Step`, `Rejected`, `Failed`, `Beat`. Every request gets exactly one last
word: a final `Row` for each of its choices, or one `Rejected`, or one `Failed`.
"""

from typing import Literal

from msgspec import Struct

VERSION = 2

MAX_PENALTY_RANGE = 1 << 16  # longest `penalty_range`, in tokens: what a stream remembers for it
MAX_DRY_RANGE = 1 << 13  # longest `dry_range`; 0 means this

RetentionPolicy = Literal["none", "sinks", "window", "restart"]
FinishReason = Literal["", "stop", "length", "abort"]


class Retention(Struct, frozen=True, omit_defaults=True):
    """What a stream keeps once it is longer than its window; counts are tokens."""

    policy: RetentionPolicy = "none"
    sink_tokens: int = 4
    window: int = 1020


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """One request's sampling controls, validated at the door; every default means "off".

    `temperature` 0 is greedy. `top_k` 0 is off. `seed` is always set by the front end.
    `logprobs` and `prompt_logprobs`: None is off, k asks for the chosen token and k candidates.
    `trace` asks for k candidates with their probability after each filter (`TokenLogprob.stages`).
    """

    temperature: float = 1.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_range: int = 0
    dry_breakers: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_range: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    trace: int = 0


def history_length(params: SamplingParams) -> int:
    """How many of a stream's last ids its sampling controls look at; a Resume's tail must hold as many."""
    dry = min(params.dry_range or MAX_DRY_RANGE, MAX_DRY_RANGE) if params.dry_multiplier > 0 else 0
    words = max((len(word) for word in params.bad_words), default=1) - 1
    return max(dry, words, min(params.penalty_range, MAX_PENALTY_RANGE) if penalises(params) else 0)


def penalises(params: SamplingParams) -> bool:
    """Whether one of the three penalties on tokens that have occurred is on."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class Resume(Struct, frozen=True, omit_defaults=True):
    """What one choice had already produced when it is taken up again on another worker.

    `tail` are the ids of the stream (prompt then output) at positions `tail_start` onward, up to the
    last delivered token; `tail_start` is len(prompt) unless older ids were dropped under retention, in
    which case `Submit.prompt` holds only the ids still known and `prompt_length` the true length.
    `counts` are how often each output token occurred, for penalties whose ids are gone. `head` are the
    output ids among the stream's first `sink_tokens` + block size positions, where the prompt is shorter
    and older output ids were dropped; else it is empty.
    """

    choice: int
    num_output_tokens: int
    tail: tuple[int, ...]
    tail_start: int
    counts: tuple[tuple[int, int], ...] = ()
    finished: bool = False
    head: tuple[int, ...] = ()


class Submit(Struct, frozen=True, tag="submit", omit_defaults=True):
    """One request. `salt` parts prefix blocks between API keys. Times are seconds.

    `alone`: run in a batch of its own (a request suspected of having killed a worker).
    `watch`: send the KV blocks of each choice with each row (the playground's memory view).
    """

    request: str
    attempt: int
    prompt: tuple[int, ...]
    params: SamplingParams
    retention: Retention = Retention()
    n: int = 1
    salt: str = ""
    priority: int = 0
    queue_timeout: float | None = None
    prompt_length: int = 0
    resume: tuple[Resume, ...] = ()
    alone: bool = False
    watch: bool = False


class Cancel(Struct, frozen=True, tag="cancel"):
    """Stop one choice, or all of them (`choice` -1); answered by each choice's last word, "abort"."""

    request: str
    choice: int = -1


class Drain(Struct, frozen=True, tag="drain"):
    """Finish what runs, then end the process."""


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log-probability of a token under the model's own distribution (before sampling controls), its
    rank (0 is the most likely), and the most likely candidates as (id, logprob), best first.

    `stages`, on request only: for the candidates in order, then the chosen token, its probability in the
    model's distribution and after penalties and bias, temperature, top_k, top_p, min_p and the rest:
    one tuple of seven a token, 0.0 once a filter has cut it. `entropy`, in nats, is the model's own
    distribution's, filled when `trace` was asked for.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    stages: tuple[tuple[float, ...], ...] = ()
    entropy: float = 0.0


class BlockView(Struct, frozen=True, array_like=True):
    """One KV block of a watched stream: first position it holds, its number, and its reference count."""

    position: int
    block: int
    references: int


class Row(Struct, frozen=True, omit_defaults=True):
    """What one step gave one choice.

    `index` is the place of `tokens[0]` in the choice's output, so a repeated or missing token is seen.
    `finish` is "" until the choice's last row. `prompt_logprobs` comes in pieces, in order, the first
    prompt token having none. `cached_tokens` (prefix hit) is set on a choice's first row with a token (or its
    last row where it has none); `evicted` is the running total.
    """

    request: str
    attempt: int
    choice: int
    index: int = 0
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason = ""
    stop_token: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0
    evicted: int = 0
    blocks: tuple[BlockView, ...] = ()


class Stats(Struct, frozen=True, omit_defaults=True):
    """The worker's counters since it started, and its gauges now. Seconds, bytes, tokens, blocks."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    steps: int = 0
    prompt_tokens_computed: int = 0
    tokens_sampled: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    tokens_evicted: int = 0
    replayed_tokens: int = 0
    pool_checks: int = 0
    step_seconds: float = 0.0
    last_step_seconds: float = 0.0
    last_prefill_tokens: int = 0
    last_prefill_rows: int = 0
    last_decode_rows: int = 0
    resident_bytes: int = 0


class Ready(Struct, frozen=True, tag="ready", omit_defaults=True):
    """The worker is loaded: what the door needs to validate requests, and what the banner prints.

    `policy_refusals` says, in a sentence, why a retention policy that is not in `policies` is refused.
    `layer_windows` are the layers' own trained windows, 0 for a layer that sees everything: what a
    stream must keep for a replay is sinks + 1 + sum of (min(layer window, window) - 1).
    """

    version: int
    pid: int
    model: str
    family: str
    context: int
    vocabulary: int
    num_blocks: int
    block_size: int
    max_sequences: int
    token_budget: int
    dtype: str
    device: str
    kernels: str
    policies: tuple[RetentionPolicy, ...]
    policy_refusals: dict[str, str] = {}
    min_window: int = 0
    max_window: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    load_seconds: float = 0.0
    layer_windows: tuple[int, ...] = ()


class Accepted(Struct, frozen=True, tag="accepted"):
    """The request passed admission and is queued: a stream may begin."""

    request: str
    attempt: int


class Rejected(Struct, frozen=True, tag="rejected", omit_defaults=True):
    """Admission refused: `reason` is a short code for metrics, `message` a sentence with the remedy."""

    request: str
    attempt: int
    reason: str
    message: str
    param: str | None = None


class Failed(Struct, frozen=True, tag="failed", omit_defaults=True):
    """The request ended by a fault of ours, or by its own where `reason` names one; the worker goes on."""

    request: str
    attempt: int
    message: str
    reason: str = ""


class Step(Struct, frozen=True, tag="step", omit_defaults=True):
    """One engine step: every row's tokens, and the counters after it."""

    number: int
    rows: tuple[Row, ...]
    stats: Stats


class Beat(Struct, frozen=True, tag="beat"):
    """Sent by a thread of its own every 0.5 s, also before `Ready`, while the worker loads.

    `step_seconds`: age of the step in flight, 0 when idle.
    """

    steps: int
    step_seconds: float
    median_step_seconds: float


class Begin(Struct, frozen=True, tag="begin"):
    """Sent before a step whenever its set of requests differs from the last one sent."""

    number: int
    requests: tuple[str, ...]


Down = Submit | Cancel | Drain
Up = Ready | Accepted | Rejected | Failed | Step | Beat | Begin
