"""`/v1/completions`: go on after a text or ids, streamed or whole.

Knows the shape of completions; prompts, checks, streams and the frame around the choices are its neighbours'.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.responses import Response

from app.api.answers import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs, Shaper
from app.api.asking import Frame, Logprobs, door_of, generations
from app.api.bodies import read_body
from app.api.documentation import documented
from app.api.errors import Invalid
from app.api.events import (
    DONE,
    WAITING,
    EventResponse,
    Template,
    collected,
    encoder,
    event,
    open_streams,
    pieces,
    shaped,
)
from app.api.prompts import Prompt, echoes, read_prompts
from app.api.schemas_requests import CompletionRequest
from app.generation import Delta, Stream
from app.text.tokenizer import Tokenizer

router = APIRouter()

MAX_ANSWERS = 1024


@router.post("/v1/completions", summary="Go on after a prompt", **documented(CompletionRequest, Completion, Completion))
async def completions(request: Request) -> Response:
    """A completion: whole, or as server-sent events that end with `[DONE]`."""
    body = await read_body(request, CompletionRequest)
    door = door_of(request, body.model)
    _check(body)
    prompts = await read_prompts(door, body.prompt, body.add_special_tokens is not False, body.retention)
    if len(prompts) * (body.n or 1) > MAX_ANSWERS:
        raise Invalid(f"{len(prompts)} prompts times n are more than the limit of {MAX_ANSWERS} answers", "n")
    logprobs = Logprobs(body.logprobs, _prompt_logprobs(body))
    ids = [prompt.ids for prompt in prompts]
    asked = await generations(request, door, body, ids, logprobs, field="prompt", rest_of_context=False)
    service = request.app.state.service
    echoed = await echoes(door.tokenizer, prompts, body.logprobs is not None) if body.echo else []
    writer = _Writer(body, prompts, echoed, Frame("cmpl", door, body, asked, service.model), door.tokenizer)
    async with AsyncExitStack() as stack:
        streams = await open_streams(stack, service, asked)
        if body.stream:
            return EventResponse(writer, streams, stack.pop_all())
        keep = body.logprobs is not None or bool(body.trace)
        answers = await collected(streams, keep)
        answer = await shaped(writer.weight, writer.whole, streams, answers)
        return Response(encoder.encode(answer), media_type="application/json")


def _check(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Invalid(f"best_of ({body.best_of}) must equal n: choosing among more is not served", "best_of")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise Invalid(
            "max_tokens 0 asks for nothing; with `echo` it tells the prompt's log-probabilities", "max_tokens"
        )


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    echoed = body.logprobs if body.echo else None
    wanted = [k for k in (body.prompt_logprobs, echoed) if k is not None]
    return max(wanted, default=None)


class _Writer:
    """Deltas in the shape of completions. Answer number = prompt number * n + choice."""

    def __init__(
        self,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        echoed: Sequence[Sequence[str]],
        frame: Frame,
        tokenizer: Tokenizer,
    ) -> None:
        """`echoed`: the pieces of each prompt's text, empty without an echo."""
        self._body = body
        self._prompts = prompts
        self._echoed = echoed
        self._lengths = [sum(map(len, texts)) for texts in echoed] if body.echo else [0] * len(prompts)
        self._frame = frame
        self._shaper = Shaper(tokenizer)
        self._n = body.n or 1
        self._begun: set[int] = set()
        k = _prompt_logprobs(body)
        self._candidates = 0 if k is None else k + 1
        self._plain = body.logprobs is None and not body.trace and not frame.talkative
        self._templates: dict[int, Template] = {}

    @property
    def weight(self) -> int:
        """How many candidates of prompts the whole answer tells."""
        return sum(len(prompt.ids) for prompt in self._prompts) * self._candidates

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[bytes, None]:
        """The stream's bytes."""
        async for piece in pieces(streams):
            numbered: Sequence[Delta] = piece.deltas
            if piece.prompt:
                numbered = [replace(delta, choice=piece.prompt * self._n + delta.choice) for delta in piece.deltas]
            weight = self._candidates and self._weight(numbered)
            data = await shaped(weight, self.written, streams, numbered) if weight else self.written(streams, numbered)
            if data or piece.pulse:
                yield data or WAITING
        if self._frame.include_usage:
            yield event(self._completion([], usage=self._frame.usage(streams)))
        yield DONE

    def whole(self, streams: Sequence[Stream], answers: Mapping[tuple[int, int], Delta]) -> Completion:
        """The whole answer: the joined deltas in the same shape."""
        deltas = [replace(delta, choice=prompt * self._n + choice) for (prompt, choice), delta in answers.items()]
        return self._completion(
            [self._choice(streams, delta) for delta in deltas],
            usage=self._frame.usage(streams),
            seed=self._frame.seed,
            everstream=self._frame.everstream(streams, deltas),
        )

    def _completion(self, choices: list[CompletionChoice], **around: Any) -> Completion:
        frame = self._frame
        return Completion(frame.identity, "text_completion", frame.created, frame.model, choices, **around)

    def _weight(self, deltas: Sequence[Delta]) -> int:
        """How many candidates of prompts these deltas bring along."""
        new = {delta.choice // self._n for delta in deltas if delta.choice not in self._begun}
        return sum(len(self._prompts[number].ids) for number in new) * self._candidates

    def written(self, streams: Sequence[Stream], deltas: Sequence[Delta]) -> bytes:
        """The events of numbered deltas, b"" where they tell nothing."""
        parts = []
        for delta in deltas:
            if self._plain and delta.finish_reason is None and delta.choice in self._begun:
                if delta.text:
                    parts.append(self._template(delta.choice).event(delta.text))
            elif self._speaks(delta):
                parts.append(event(self._chunk(streams, delta)))
        return b"".join(parts)

    def _template(self, choice: int) -> Template:
        """The events of a choice between its first and its last, where they tell nothing but text."""
        found = self._templates.get(choice)
        if found is None:
            usage = None if self._frame.include_usage else UNSET

            def chunk(text: str) -> Completion:
                return self._completion([CompletionChoice(choice, text, None, None)], usage=usage)

            found = self._templates[choice] = Template(chunk)
        return found

    def _chunk(self, streams: Sequence[Stream], delta: Delta) -> Completion:
        return self._completion([self._choice(streams, delta)], **self._frame.around(streams, [delta]))

    def _speaks(self, delta: Delta) -> bool:
        """Whether the delta has anything to tell."""
        told = self._body.logprobs is not None or bool(self._body.trace)
        prompt = delta.choice not in self._begun and (self._body.echo or self._body.prompt_logprobs is not None)
        return bool(delta.text or delta.finish_reason or (told and delta.tokens) or prompt or self._frame.talkative)

    def _choice(self, streams: Sequence[Stream], delta: Delta) -> CompletionChoice:
        body, first = self._body, delta.choice not in self._begun
        self._begun.add(delta.choice)
        stream, prompt = streams[delta.choice // self._n], self._prompts[delta.choice // self._n]
        texts = self._echoed[delta.choice // self._n] if body.echo else ()
        echo = "".join(texts) if first else ""
        logprobs = None
        if body.logprobs is not None:
            logprobs = self._shaper.completion(delta.tokens, body.logprobs, self._lengths[delta.choice // self._n])
            if body.echo and first:
                known = self._shaper.prompt(prompt.ids, texts, stream.prompt_logprobs, body.logprobs)
                logprobs = _joined(known, logprobs)
        told: PromptLogprobs | UnsetType = UNSET
        if first and body.prompt_logprobs is not None:
            told = self._shaper.prompt_logprobs(stream.prompt_logprobs, body.prompt_logprobs)
        return CompletionChoice(
            delta.choice,
            echo + delta.text,
            logprobs,
            delta.finish_reason,
            delta.stop_reason if delta.finish_reason else UNSET,
            told,
            self._shaper.trace(delta.tokens, body.trace) if body.trace else UNSET,
        )


def _joined(before: CompletionLogprobs, after: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        before.tokens + after.tokens,
        before.token_logprobs + after.token_logprobs,
        before.top_logprobs + after.top_logprobs,
        before.text_offset + after.text_offset,
    )
