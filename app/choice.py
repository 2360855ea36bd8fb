"""One choice of a request: output ids become text that is safe to show.

Knows the detokenizer, the stop strings and the ids a resume needs; no worker, no HTTP. A delta never holds
part of a stop string or a character that is not complete; the joined deltas are the whole answer.
"""

from typing import Protocol

from msgspec import Struct

from app.ledger import Ledger
from app.text.detokenizer import Detokenizer
from app.text.stops import StopScanner
from app.text.tokenizer import Tokenizer
from model.protocol import BlockView, Ready, Retention, Row, SamplingParams, TokenLogprob, history_length


class Token(Struct, frozen=True):
    """One output token. `text` is what it added (it may be "" while a character is incomplete), `data` its
    own bytes, `text_offset` where `text` begins in the choice's text, in characters."""

    id: int
    text: str
    data: bytes
    text_offset: int
    logprob: TokenLogprob | None


class Delta(Struct, frozen=True):
    """What one choice gained. `choice` -1 is a heartbeat: nothing happened, but the stream lives.

    `tokens` may be ahead of `text`, which holds back the beginnings of stop strings. `finish_reason` stands in
    a choice's last delta only; `stop_reason` is the stop string or id that ended it. `evicted`: running total.
    """

    choice: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    blocks: tuple[BlockView, ...] = ()
    evicted: int = 0


HEARTBEAT = Delta(choice=-1, text="", tokens=())


class TextOptions(Protocol):
    """The part of a `Generation` that shapes text."""

    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def include_stop(self) -> bool: ...
    @property
    def skip_special_tokens(self) -> bool: ...
    @property
    def prompt_ids(self) -> tuple[int, ...]: ...
    @property
    def retention(self) -> Retention: ...
    @property
    def params(self) -> SamplingParams: ...


class OutOfOrder(Exception):
    """A worker's row skips tokens: something is badly wrong, and the stream must not go on."""


class Choice:
    """The state of one choice between its first and its last delta."""

    def __init__(self, number: int, options: TextOptions, tokenizer: Tokenizer, ready: Ready) -> None:
        self.number = number
        self.finish_reason: str | None = None
        self.evicted = 0
        self.last_token = 0.0
        self.ledger = Ledger(
            number,
            len(options.prompt_ids),
            options.retention,
            ready.layer_windows,
            ready.block_size,
            history_length(options.params),
        )
        self._token_bytes = tokenizer.token_bytes
        self._include_stop = options.include_stop
        self._detokenizer = Detokenizer(tokenizer, options.skip_special_tokens)
        self._stops = StopScanner(options.stop, options.include_stop) if options.stop else None
        self._offset = 0

    @property
    def num_output_tokens(self) -> int:
        return self.ledger.num_output_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, row: Row) -> Delta:
        """The delta of one row. Raises OutOfOrder when the row skips tokens.

        A stop string wins over the worker's own reason at the same token, and what follows it is not counted.
        """
        skip = self.num_output_tokens - row.index
        if skip < 0:
            raise OutOfOrder(f"choice {self.number}: token {row.index} came where {self.num_output_tokens} was due")
        if row.evicted > self.evicted:
            self.evicted = row.evicted
        if len(row.tokens) == 1 and not skip and not row.finish:
            return self._pushed(row, row.tokens[0])
        texts: list[str] = []
        tokens: list[Token] = []
        matched: str | None = None
        last = len(row.tokens) - 1
        for place in range(skip, last + 1):
            token = row.tokens[place]
            hidden = token == row.stop_token and place == last and not self._include_stop
            text = "" if hidden else self._detokenizer.push(token)
            logprob = row.logprobs[place] if row.logprobs else None
            tokens.append(Token(token, text, self._token_bytes(token), self._offset, logprob))
            self._offset += len(text)
            self.ledger.append(token)
            matched = self._scan(text, texts)
            if matched is not None:
                break
        reason: str | int | None = matched
        if matched is not None:
            self._finish("stop")
        elif row.finish:
            matched = self._flush(texts)
            reason = matched if matched is not None else row.stop_token
            self._finish("stop" if matched is not None else row.finish)
        return Delta(self.number, "".join(texts), tuple(tokens), self.finish_reason, reason, row.blocks, self.evicted)

    def _pushed(self, row: Row, token: int) -> Delta:
        """`push` for nearly every row there is: one new token that does not end the choice by itself."""
        text = shown = self._detokenizer.push(token)
        logprob = row.logprobs[0] if row.logprobs else None
        told = Token(token, text, self._token_bytes(token), self._offset, logprob)
        self._offset += len(text)
        self.ledger.append(token)
        matched: str | None = None
        if self._stops is not None:
            shown, matched = self._stops.push(text)
            if matched is not None:
                self._finish("stop")
        return Delta(self.number, shown, (told,), self.finish_reason, matched, row.blocks, self.evicted)

    def _scan(self, text: str, texts: list[str]) -> str | None:
        if self._stops is None:
            texts.append(text)
            return None
        safe, matched = self._stops.push(text)
        texts.append(safe)
        return matched

    def _flush(self, texts: list[str]) -> str | None:
        matched = self._scan(self._detokenizer.finish(), texts)
        if matched is None and self._stops is not None:
            texts.append(self._stops.finish())
        return matched

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        self.ledger.finished = True
