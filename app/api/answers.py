"""The shapes of what is answered, as msgspec Structs: encoded fast, and documented from the same lines.

Knows tokens, log-probabilities and OpenAI's names for them; does not know requests or streams.
"""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from app.generation import Delta, Token, Usage
from app.text.tokenizer import Tokenizer
from model.protocol import Ready, Retention, TokenLogprob

LEAST_LOGPROB = -9999.0  # JSON knows no infinity


class CachedTokens(Struct, frozen=True):
    """Prompt tokens whose keys and values were in the prefix cache."""

    cached_tokens: int


class UsageBody(Struct, frozen=True):
    """Tokens of a request. `tokens_evicted` fell out of the retention window."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    tokens_evicted: int


class TopLogprob(Struct, frozen=True):
    """A candidate. `token` is "bytes:\\xNN…" where the token is no whole character."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatLogprob(Struct, frozen=True):
    """One token of a chat answer, under the model's own distribution."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(Struct, frozen=True):
    """The tokens of a chat answer."""

    content: list[ChatLogprob]


class CompletionLogprobs(Struct, frozen=True):
    """The tokens of a completion in four lists of one length; `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(Struct, frozen=True):
    """A candidate for a place in the prompt; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TraceCandidate(Struct, frozen=True):
    """A candidate and its probability: the model's, then after each filter (`stages`)."""

    id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    stages: tuple[float, ...]


class TraceToken(Struct, frozen=True):
    """How one token came to be chosen. `rank` 0 is the most likely; `entropy` in nats."""

    id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    entropy: float
    rank: int
    candidates: list[TraceCandidate]
    stages: tuple[float, ...]


class Watched(Struct, frozen=True):
    """The KV blocks a stream holds, as [choice, first position, block, references]; the running total evicted."""

    evicted: int
    sinks: int
    window: int
    block_size: int
    blocks: list[tuple[int, int, int, int]] | UnsetType = UNSET


class CompletionChoice(Struct, frozen=True):
    """One answer of a completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    trace: list[TraceToken] | UnsetType = UNSET


class Completion(Struct, frozen=True):
    """A completion, or a chunk of one. `seed` stands in the first chunk."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    everstream: Watched | UnsetType = UNSET


class ChatMessage(Struct, frozen=True):
    """An assistant's message."""

    role: str
    content: str
    reasoning_content: str | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    """What a chunk adds to an assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One answer in a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    trace: list[TraceToken] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    trace: list[TraceToken] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True):
    """An answer in a conversation."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    seed: int
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    everstream: Watched | UnsetType = UNSET


class ChatChunk(Struct, frozen=True):
    """A chunk of an answer in a conversation. `seed` and `prompt_logprobs` stand in the first one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    everstream: Watched | UnsetType = UNSET


class Piece(Struct, frozen=True):
    """A token of a text: the vocabulary's spelling, its bytes, and where they stand in the text, in bytes."""

    id: int
    piece: str
    bytes: tuple[int, ...]
    start: int
    end: int


class Tokenized(Struct, frozen=True):
    """The ids of a text. `max_model_len` is the context."""

    tokens: list[int]
    count: int
    pieces: list[Piece]
    max_model_len: int


class Detokenized(Struct, frozen=True):
    """The text of ids."""

    prompt: str


class Model(Struct, frozen=True):
    """The model that is served; sizes are tokens."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    family: str
    retention_policies: tuple[str, ...]


class Models(Struct, frozen=True):
    """The models that are served."""

    object: str
    data: list[Model]


def usage_body(usages: Sequence[Usage]) -> UsageBody:
    """The usage of a request of one or more prompts."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = CachedTokens(sum(usage.cached_tokens for usage in usages))
    evicted = sum(usage.tokens_evicted for usage in usages)
    return UsageBody(prompt, completion, prompt + completion, cached, evicted)


def watched(deltas: Sequence[Delta], evicted: int, retention: Retention, ready: Ready) -> Watched:
    """What the deltas of one step tell of the cache."""
    blocks = [(delta.choice, *view) for delta in deltas for view in _views(delta)]
    kept = (retention.sink_tokens, retention.window) if retention.policy != "none" else (0, 0)
    return Watched(evicted, *kept, ready.block_size, blocks or UNSET)


def _views(delta: Delta) -> list[tuple[int, int, int]]:
    return [(view.position, view.block, view.references) for view in delta.blocks]


class Shaper:
    """Tokens and their log-probabilities in the shapes of the two endpoints."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """A token's own text; "bytes:\\xNN…" where it is no whole character."""
        return shown(self._tokenizer.token_bytes(token))

    def completion(self, tokens: Sequence[Token], k: int, offset: int = 0) -> CompletionLogprobs:
        """The tokens of an answer; `offset`: characters that stand before it."""
        return CompletionLogprobs(
            [shown(token.data) for token in tokens],
            [None if token.logprob is None else floor(token.logprob.logprob) for token in tokens],
            [None if token.logprob is None else self._top(token.logprob, k) for token in tokens],
            [offset + token.text_offset for token in tokens],
        )

    def prompt(
        self, ids: Sequence[int], texts: Sequence[str], logprobs: Sequence[TokenLogprob], k: int
    ) -> CompletionLogprobs:
        """The tokens of an echoed prompt; the first one has no log-probability."""
        offsets, place = [], 0
        for text in texts:
            offsets.append(place)
            place += len(text)
        known = [None, *logprobs][: len(ids)]
        return CompletionLogprobs(
            [self.text(token) for token in ids],
            [None if one is None else floor(one.logprob) for one in known],
            [None if one is None else self._top(one, k) for one in known],
            offsets,
        )

    def _top(self, logprob: TokenLogprob, k: int) -> dict[str, float]:
        """The candidates and the token itself, best first where two share a text."""
        top: dict[str, float] = {}
        for token, value in (*logprob.top[:k], (logprob.token, logprob.logprob)):
            top.setdefault(self.text(token), floor(value))
        return top

    def chat(self, tokens: Sequence[Token], k: int) -> ChatLogprobs:
        """The tokens of a chat answer."""
        return ChatLogprobs([self._chat(token, token.logprob, k) for token in tokens if token.logprob is not None])

    def _chat(self, token: Token, logprob: TokenLogprob, k: int) -> ChatLogprob:
        top = tuple(self._candidate(other, value) for other, value in logprob.top[:k])
        return ChatLogprob(shown(token.data), floor(logprob.logprob), tuple(token.data), top)

    def _candidate(self, token: int, logprob: float) -> TopLogprob:
        data = self._tokenizer.token_bytes(token)
        return TopLogprob(shown(data), floor(logprob), tuple(data))

    def prompt_logprobs(self, logprobs: Sequence[TokenLogprob], k: int) -> PromptLogprobs:
        """Each place of the prompt: candidates by id; the first place has none."""
        places: PromptLogprobs = [None]
        for one in logprobs:
            place = {
                str(token): PromptLogprob(floor(value), rank, self.text(token))
                for rank, (token, value) in enumerate(one.top[:k], 1)
            }
            place.setdefault(str(one.token), PromptLogprob(floor(one.logprob), one.rank + 1, self.text(one.token)))
            places.append(place)
        return places

    def trace(self, tokens: Sequence[Token], k: int) -> list[TraceToken]:
        """How each token came to be chosen among its `k` best candidates."""
        return [self._trace(token, token.logprob, k) for token in tokens if token.logprob is not None]

    def _trace(self, token: Token, logprob: TokenLogprob, k: int) -> TraceToken:
        stages = logprob.stages
        candidates = [
            TraceCandidate(other, self.text(other), tuple(self._tokenizer.token_bytes(other)), floor(value), own)
            for (other, value), own in zip(logprob.top[:k], stages[:-1], strict=False)
        ]
        return TraceToken(
            token.id,
            shown(token.data),
            tuple(token.data),
            floor(logprob.logprob),
            logprob.entropy,
            logprob.rank,
            candidates,
            stages[-1] if stages else (),
        )


def shown(data: bytes) -> str:
    """Bytes of a token as text: themselves where they are whole characters, else spelled out."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def floor(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LEAST_LOGPROB)
