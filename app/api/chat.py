"""`/v1/chat/completions`: answer in a conversation, streamed or whole.

Knows the shape of chat answers: roles, content, thoughts; the conversation's text, checks, streams and the frame
around the choices are its neighbours'.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from app.api.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    Shaper,
    TraceToken,
)
from app.api.asking import Frame, Logprobs, door_of, generations
from app.api.bodies import read_body
from app.api.conversations import prompt_of, render
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
from app.api.schemas_requests import ChatRequest
from app.generation import Delta, Stream
from app.text.chat_template import opens_thoughts
from app.text.reasoning import Parted, ReasoningSplitter
from app.text.tokenizer import Tokenizer

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    summary="Answer in a conversation",
    **documented(ChatRequest, ChatCompletion, ChatChunk),
)
async def chat_completions(request: Request) -> Response:
    """An assistant's message: whole, or as server-sent events that end with `[DONE]`."""
    body = await read_body(request, ChatRequest)
    door = door_of(request, body.model)
    logprobs = _logprobs(body)
    template = request.app.state.chat_template
    text = await render(template, body, body.messages)
    prompt = await prompt_of(door, text, body.retention)
    asked = await generations(request, door, body, [prompt.ids], logprobs, field="messages", rest_of_context=True)
    if asked[0].params.max_tokens == 0:
        raise Invalid("max_tokens must be at least 1 in a conversation", "max_tokens")
    service = request.app.state.service
    inside = opens_thoughts(text) if template.has_thoughts else None
    writer = _Writer(body, Frame("chatcmpl", door, body, asked, service.model), door.tokenizer, inside)
    async with AsyncExitStack() as stack:
        streams = await open_streams(stack, service, asked)
        if body.stream:
            return EventResponse(writer, streams, stack.pop_all())
        answers = await collected(streams, bool(body.logprobs or body.trace))
        weight = 0 if logprobs.prompt is None else len(prompt.ids) * (logprobs.prompt + 1)
        answer = await shaped(weight, writer.whole, streams, answers)
        return Response(encoder.encode(answer), media_type="application/json")


def _logprobs(body: ChatRequest) -> Logprobs:
    if body.top_logprobs and not body.logprobs:
        raise Invalid("top_logprobs needs `logprobs: true`", "top_logprobs")
    return Logprobs((body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs)


class _Writer:
    """Deltas in the shape of chat answers."""

    def __init__(self, body: ChatRequest, frame: Frame, tokenizer: Tokenizer, inside: bool | None) -> None:
        """`inside`: whether the prompt ends within thoughts; None where the model has none."""
        self._body = body
        self._frame = frame
        self._shaper = Shaper(tokenizer)
        self._begun: set[int] = set()
        self._tells = bool(body.logprobs or body.trace)
        self._plain = not self._tells and not frame.talkative
        self._templates: dict[int, Template] = {}
        self._splitters = [ReasoningSplitter(inside) for _ in range(body.n or 1)] if inside is not None else []

    async def events(self, streams: Sequence[Stream]) -> AsyncGenerator[bytes, None]:
        """The stream's bytes."""
        async for piece in pieces(streams):
            data = self.written(streams, piece.deltas)
            if data or piece.pulse:
                yield data or WAITING
        if self._frame.include_usage:
            yield event(self._chunk([], usage=self._frame.usage(streams)))
        yield DONE

    def written(self, streams: Sequence[Stream], deltas: Sequence[Delta]) -> bytes:
        """The events of some deltas, b"" where they tell nothing."""
        return b"".join([self._events(streams, delta) for delta in deltas])

    def _events(self, streams: Sequence[Stream], delta: Delta) -> bytes:
        """The events of one delta; the first of each choice is preceded by one with the role."""
        data = b""
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            told: PromptLogprobs | UnsetType = UNSET
            if self._body.prompt_logprobs is not None and delta.choice == 0:
                told = self._shaper.prompt_logprobs(streams[0].prompt_logprobs, self._body.prompt_logprobs)
            opening = ChatChunkChoice(delta.choice, ChatDelta(role="assistant", content=""), None, None)
            data = event(self._chunk([opening], prompt_logprobs=told, **self._frame.around(streams, [])))
        parted = self._part(delta)
        if self._plain and delta.finish_reason is None and not parted.reasoning:
            return data + self._template(delta.choice).event(parted.content) if parted.content else data
        if not (any(parted) or delta.finish_reason or (self._tells and delta.tokens) or self._frame.talkative):
            return data
        added = ChatDelta(content=parted.content or UNSET, reasoning_content=parted.reasoning or UNSET)
        choice = ChatChunkChoice(
            delta.choice,
            added,
            self._told(delta),
            delta.finish_reason,
            delta.stop_reason if delta.finish_reason else UNSET,
            self._trace(delta),
        )
        return data + event(self._chunk([choice], **self._frame.around(streams, [delta])))

    def _template(self, choice: int) -> Template:
        """The events of a choice between its first and its last, where they tell nothing but content."""
        found = self._templates.get(choice)
        if found is None:
            usage = None if self._frame.include_usage else UNSET

            def chunk(text: str) -> ChatChunk:
                return self._chunk([ChatChunkChoice(choice, ChatDelta(content=text), None, None)], usage=usage)

            found = self._templates[choice] = Template(chunk)
        return found

    def whole(self, streams: Sequence[Stream], answers: Mapping[tuple[int, int], Delta]) -> ChatCompletion:
        """The whole answer: the joined deltas in the same shape."""
        frame, body, deltas = self._frame, self._body, list(answers.values())
        told: PromptLogprobs | UnsetType = UNSET
        if body.prompt_logprobs is not None:
            told = self._shaper.prompt_logprobs(streams[0].prompt_logprobs, body.prompt_logprobs)
        return ChatCompletion(
            frame.identity,
            "chat.completion",
            frame.created,
            frame.model,
            [self._choice(delta) for delta in deltas],
            frame.usage(streams),
            frame.seed,
            told,
            frame.everstream(streams, deltas),
        )

    def _choice(self, delta: Delta) -> ChatChoice:
        parted = self._part(delta)
        message = ChatMessage("assistant", parted.content, parted.reasoning or UNSET)
        return ChatChoice(
            delta.choice, message, self._told(delta), delta.finish_reason, delta.stop_reason, self._trace(delta)
        )

    def _chunk(self, choices: list[ChatChunkChoice], **around: Any) -> ChatChunk:
        frame = self._frame
        return ChatChunk(frame.identity, "chat.completion.chunk", frame.created, frame.model, choices, **around)

    def _told(self, delta: Delta) -> ChatLogprobs | None:
        return self._shaper.chat(delta.tokens, self._body.top_logprobs or 0) if self._body.logprobs else None

    def _trace(self, delta: Delta) -> list[TraceToken] | UnsetType:
        return self._shaper.trace(delta.tokens, self._body.trace) if self._body.trace else UNSET

    def _part(self, delta: Delta) -> Parted:
        if not self._splitters:
            return Parted("", delta.text)
        splitter = self._splitters[delta.choice]
        parted = splitter.push(delta.text)
        if delta.finish_reason is None:
            return parted
        rest = splitter.finish()
        return Parted(parted.reasoning + rest.reasoning, parted.content + rest.content)
