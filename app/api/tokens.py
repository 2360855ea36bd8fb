"""`/tokenize` and `/detokenize`: texts and conversations to ids, with the place of each in the text, and back.

Knows the tokenizer; generates nothing and asks no worker.
"""

import asyncio
import itertools
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.answers import Detokenized, Piece, Tokenized
from app.api.asking import door_of
from app.api.bodies import read_body
from app.api.conversations import render
from app.api.documentation import documented
from app.api.errors import Invalid
from app.api.events import encoder
from app.api.prompts import LONG, MANY, check_sizes, in_thread
from app.api.schemas_requests import DetokenizeRequest, TokenizeRequest
from app.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/tokenize", summary="The ids of a text or a conversation", **documented(TokenizeRequest, Tokenized))
async def tokenize(request: Request) -> Response:
    """Ids, their spelling in the vocabulary, and the bytes of the text they stand for."""
    body = await read_body(request, TokenizeRequest)
    door = door_of(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Invalid("send either `prompt` or `messages`", "prompt")
    if body.messages is not None:
        text = await render(request.app.state.chat_template, body, body.messages)
        add_special = bool(body.add_special_tokens)
    else:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name):
                raise Invalid(f"{name} belongs to `messages`", name)
        text = body.prompt or ""
        check_sizes([text], "prompt")
        add_special = body.add_special_tokens is not False
    context = door.ready.context
    if len(text) <= LONG:
        data = _tokenized(door.tokenizer, text, add_special, context)
    else:
        data = await in_thread(len(text), _tokenized, door.tokenizer, text, add_special, context)
    return Response(data, media_type="application/json")


@router.post("/detokenize", summary="The text of ids", **documented(DetokenizeRequest, Detokenized))
async def detokenize(request: Request) -> Response:
    """The text; bytes that are no characters become U+FFFD."""
    body = await read_body(request, DetokenizeRequest)
    door = door_of(request, body.model)
    if len(body.tokens) <= MANY:
        door.check_ids(body.tokens, "tokens")
    else:
        await asyncio.to_thread(door.check_ids, body.tokens, "tokens")
    skip = bool(body.skip_special_tokens)
    if len(body.tokens) <= LONG:
        text = door.tokenizer.decode(body.tokens, skip)
    else:
        decode = door.tokenizer.backend.decode_batch  # it lets go of the interpreter's lock
        (text,) = await asyncio.to_thread(decode, [body.tokens], skip)
    return Response(encoder.encode(Detokenized(text)), media_type="application/json")


def _tokenized(tokenizer: Tokenizer, text: str, add_special: bool, context: int) -> bytes:
    encoding = tokenizer.backend.encode_batch([text], add_special_tokens=add_special)[0]
    pieces = _pieces(tokenizer, text, encoding.ids, encoding.offsets)
    return encoder.encode(Tokenized(encoding.ids, len(encoding.ids), pieces, context))


def _pieces(tokenizer: Tokenizer, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[Piece]:
    """Where each token stands, in bytes: by its own bytes where they spell the text, else by its characters."""
    data = [tokenizer.token_bytes(token) for token in ids]
    added = [offset == (0, 0) and tokenizer.is_special(token) for token, offset in zip(ids, offsets, strict=True)]
    if ids and text.startswith(tokenizer.piece(ids[0])):
        added[0] = False
    own = [b"" if extra else part for part, extra in zip(data, added, strict=True)]
    if b"".join(own) == text.encode():
        ends = list(itertools.accumulate(map(len, own), initial=0))
        spans = list(itertools.pairwise(ends))
    else:
        starts = _byte_starts(text)
        spans = [(starts[start], starts[end]) for start, end in offsets]
    return [
        Piece(token, tokenizer.piece(token), tuple(part), *span)
        for token, part, span in zip(ids, data, spans, strict=True)
    ]


def _byte_starts(text: str) -> list[int]:
    """Where each character begins in the text's UTF-8, and where the last one ends."""
    starts, place = [], 0
    for char in text:
        starts.append(place)
        place += len(char.encode())
    return [*starts, place]
